"""Expert ids of one tensor-parallel rank, renumbered, in TileLang: one pass, an id or a vector of them a thread."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def mask_indices_by_tp_kernel(dtype, vec, threads):
    """Compile for ids of `dtype`, of which a thread moves `vec` at a time."""
    N = T.dynamic("N")

    @T.prim_func
    def mask_indices_by_tp(
        ids: T.Tensor((N,), dtype),
        out: T.Tensor((N,), dtype),
        per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        with T.Kernel(T.ceildiv(N, threads * vec), threads=threads) as block:
            T.assume(N % vec == 0)  # run() chose vec so
            first = (block * threads + T.get_thread_binding(0)) * vec
            given = T.alloc_local((vec,), dtype)
            result = T.alloc_local((vec,), dtype)
            size = T.cast(per_rank, dtype)
            ranks = T.cast(num_tp_ranks, dtype)
            rank = T.cast(tp_rank, dtype)

            if first < N:
                for v in T.vectorized(vec):
                    given[v] = ids[first + v]
                for v in T.unroll(vec):
                    # Negative ids are replaced before the divisions, which round toward zero and not down.
                    known = T.max(given[v], T.cast(0, dtype))
                    owner = T.truncmod(T.truncdiv(known, size), ranks)
                    local = known - rank * size
                    result[v] = T.if_then_else(
                        given[v] >= 0 and owner == rank,
                        local - T.truncdiv(local, size * ranks) * (size * ranks - size),
                        T.cast(-1, dtype),
                    )
                for v in T.vectorized(vec):
                    out[first + v] = result[v]

    return mask_indices_by_tp


def run(ids, num_experts, num_ep_ranks, tp_rank, num_tp_ranks, out, *, threads=128):
    """out = the number of each expert among those of this tensor-parallel rank, -1 for all others.

    ids, out: [M, K], int64 or int32, contiguous. The scalars are Python numbers; num_experts >= num_ep_ranks.
    """
    count = ids.numel()
    if count == 0:
        return
    # The widest power of two, at most 16 bytes, that divides the number of ids and the addresses.
    bits = count | (ids.data_ptr() | out.data_ptr()) // ids.element_size() | 16 // ids.element_size()
    kernel = mask_indices_by_tp_kernel(ids.dtype, bits & -bits, threads)
    kernel(ids.view(-1), out.view(-1), num_experts // num_ep_ranks, tp_rank, num_tp_ranks)

"""Expert ids changed one by one or row by row, in TileLang."""

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


def run_mask_indices_by_tp(ids, num_experts, num_ep_ranks, tp_rank, num_tp_ranks, out, *, threads=128):
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


@functools.cache
@tilelang.jit
def unique_kernel(K, vec, threads):
    """Compile for rows of K ids, of which a thread moves `vec` at a time."""
    M = T.dynamic("M")

    @T.prim_func
    def unique(ids: T.Tensor((M, K), "int64")):
        with T.Kernel(T.ceildiv(M, threads), threads=threads) as block:
            row = block * threads + T.get_thread_binding(0)
            values = T.alloc_local((K,), "int64")
            result = T.alloc_local((K,), "int64")

            if row < M:
                for c in T.unroll(K // vec):
                    for v in T.vectorized(vec):
                        values[c * vec + v] = ids[row, c * vec + v]
                for k in T.unroll(K):
                    result[k] = values[k]
                    for j in T.unroll(k):
                        if values[j] == values[k]:
                            result[k] = T.int64(-1)
                for c in T.unroll(K // vec):
                    for v in T.vectorized(vec):
                        ids[row, c * vec + v] = result[c * vec + v]

    return unique


def run_inplace_unique_group_indices(ids, *, threads=128):
    """In each row of ids the first of equal ids stays and the others become -1, in place.

    ids: [M, K], int64, contiguous; K <= 32. A row belongs to one thread, which compares its ids in registers.
    """
    M, K = ids.shape
    if M == 0:
        return
    # Two ids a load where the rows and the address allow it.
    bits = K | ids.data_ptr() // 8 | 2
    unique_kernel(K, bits & -bits, threads)(ids)

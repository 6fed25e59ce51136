"""Rows of a table of embeddings and its gradient, TileLang: tokens are sorted by id, so each row is added up in order."""

import functools

import tilelang
import tilelang.language as T
import torch

SORTERS = 8  # warps of a CTA that sorts 32 tokens: each compares them with its share of all
LOADS = 8  # of a warp in flight


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def rows_kernel(H, dtype, vec, threads, repeat):
    """Compile for H columns: a CTA of `threads` threads copies threads * repeat * vec columns of a row."""
    M, V = T.dynamic("M V")
    blocks = -(-H // (threads * repeat * vec))

    @T.prim_func
    def rows(
        ids: T.Tensor((M,), "int64"),
        weight: T.StridedTensor((V, H), (T.int64(H), 1), dtype),
        out: T.StridedTensor((M, H), (T.int64(H), 1), dtype),
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            token = block // blocks
            first = (block % blocks * repeat * threads + T.get_thread_binding(0)) * vec
            loaded = T.alloc_local((repeat, vec), dtype)
            row = T.alloc_var("int64", init=0)

            row = ids[token]
            for i in T.unroll(repeat):
                for v in T.vectorized(vec):
                    loaded[i, v] = T.cast(T.float32(float("nan")), dtype)  # an id that is no row is an error
                if first + i * threads * vec < H and row >= 0 and row < V:
                    for v in T.vectorized(vec):
                        loaded[i, v] = weight[row, first + i * threads * vec + v]
            for i in T.unroll(repeat):
                if first + i * threads * vec < H:
                    for v in T.vectorized(vec):
                        out[token, first + i * threads * vec + v] = loaded[i, v]

    return rows


@functools.cache
@tilelang.jit
def sort_kernel():
    """Compile order[slot] = token, stably sorted by id; counts[slot] = tokens of its id in its first slot, and 0 in others.

    Each token is compared with all: for the tokens of a training step this is less than the zeros of a large table.
    """
    M = T.dynamic("M")

    @T.prim_func
    def sort(ids: T.Tensor((M,), "int64"), order: T.Tensor((M,), "int32"), counts: T.Tensor((M,), "int32")):
        with T.Kernel(T.ceildiv(M, 32), threads=32 * SORTERS) as block:
            thread = T.get_thread_binding(0)
            warp, lane = thread // 32, thread % 32
            token = block * 32 + lane
            found = T.alloc_shared(
                (3, SORTERS, 32), "int32"
            )  # smaller ids, equal ones, and those of them before the token
            others = T.alloc_local((LOADS,), "int64")
            own = T.alloc_var("int64", init=0)
            smaller = T.alloc_var("int32", init=0)
            equal = T.alloc_var("int32", init=0)
            before = T.alloc_var("int32", init=0)

            own = ids[T.min(token, M - 1)]
            for step in T.serial(T.ceildiv(M, SORTERS * LOADS)):
                for u in T.unroll(LOADS):
                    others[u] = ids[T.min((step * SORTERS + warp) * LOADS + u, M - 1)]
                for u in T.unroll(LOADS):
                    if (step * SORTERS + warp) * LOADS + u < M:
                        if others[u] < own:
                            smaller += 1
                        if others[u] == own:
                            equal += 1
                            if (step * SORTERS + warp) * LOADS + u < token:
                                before += 1
            found[0, warp, lane] = smaller
            found[1, warp, lane] = equal
            found[2, warp, lane] = before
            T.sync_threads()
            if warp == 0 and token < M:
                smaller = 0
                equal = 0
                before = 0
                for w in T.unroll(SORTERS):
                    smaller += found[0, w, lane]
                    equal += found[1, w, lane]
                    before += found[2, w, lane]
                order[smaller + before] = token
                counts[smaller + before] = T.if_then_else(before == 0, equal, 0)

    return sort


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def sums_kernel(H, dtype, vec, threads):
    """Compile for H columns: a CTA adds up, in order, threads * vec columns of the tokens of a slot."""
    M, V = T.dynamic("M V")
    blocks = -(-H // (threads * vec))

    @T.prim_func
    def sums(
        ids: T.Tensor((M,), "int64"),
        grad_out: T.StridedTensor((M, H), (T.int64(H), 1), dtype),
        grad_weight: T.StridedTensor((V, H), (T.int64(H), 1), dtype),
        order: T.Tensor((M,), "int32"),
        counts: T.Tensor((M,), "int32"),
        padding_idx: T.int64,
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            slot = block // blocks
            first = (block % blocks * threads + T.get_thread_binding(0)) * vec
            loaded = T.alloc_local((vec,), dtype)
            total = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)
            count = T.alloc_var("int32", init=0)
            token = T.alloc_var("int32", init=0)
            row = T.alloc_var("int64", init=0)

            row = ids[order[slot]]
            count = counts[slot]
            if row == padding_idx or row < 0 or row >= V or first >= H:
                count = 0
            if count > 0:
                for v in T.unroll(vec):
                    total[v] = 0.0
                for which in T.serial(count):
                    token = order[slot + which]
                    for v in T.vectorized(vec):
                        loaded[v] = grad_out[token, first + v]
                    for v in T.unroll(vec):
                        total[v] += T.cast(loaded[v], "float32")
                for v in T.unroll(vec):
                    result[v] = T.cast(total[v], dtype)
                for v in T.vectorized(vec):
                    grad_weight[row, first + v] = result[v]

    return sums


def _vector(one, other):
    """Return the widest power of two, up to 16 bytes, that divides rows and addresses, in elements."""
    itemsize = one.dtype.itemsize
    bits = one.shape[1] | 16 // itemsize | (one.data_ptr() | other.data_ptr()) // itemsize
    return bits & -bits


def run(ids, weight, padding_idx, out, *, threads=256, repeat=2):
    """Write out [M, H] = the rows of weight [V, H] that ids [M] name. A thread copies `repeat` vectors of up to 16 bytes."""
    M, H = out.shape
    if M == 0:
        return
    vec = _vector(weight, out)
    threads = max(32, min(threads, 32 * -(-H // (32 * vec * repeat))))
    rows_kernel(H, weight.dtype, vec, threads, repeat)(ids, weight, out)


def run_backward(ids, weight, grad_out, padding_idx, grad_weight, *, threads=128):
    """Write grad_weight [V, H] = the sum of grad_out [M, H] over the tokens of each row, in float32 and rounded once.

    Rows without tokens and the row padding_idx are 0. Tokens of a row are added in their order, so the bits are the same in
    every run.
    """
    M, H = grad_out.shape
    grad_weight.zero_()
    if M == 0:
        return
    order, counts = torch.empty((2, M), dtype=torch.int32, device=ids.device)
    sort_kernel()(ids, order, counts)
    vec = _vector(grad_out, grad_weight)
    threads = max(32, min(threads, 32 * -(-H // (32 * vec))))
    sums_kernel(H, grad_out.dtype, vec, threads)(ids, grad_out, grad_weight, order, counts, padding_idx)

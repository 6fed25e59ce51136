"""RMSNorm over the last axis without a weight, in TileLang: the inverse root is rounded to T, then the product."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def rms_norm_kernel(N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride", "int64"), T.dynamic("out_stride", "int64")
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    # A row stays in registers where they suffice: a thread of 1024 has 64. Longer rows are read again, from L2.
    kept = chunks * vec * dtype.itemsize <= (128 if threads <= 512 else 64)
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check
    loop, slots = (T.unroll, chunks) if kept else (T.serial, 1)

    @T.prim_func
    def rms_norm_unweighted(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            values = T.alloc_local((slots, vec), dtype)
            result = T.alloc_local((slots, vec), dtype)
            partial = T.alloc_shared((rows, warps), "float32")
            total = T.alloc_var("float32", init=0.0)

            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if not full:
                    for v in T.vectorized(vec):
                        values[slot, v] = 0
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        values[slot, v] = x[row, column + v]
                if not kept:
                    for v in T.unroll(vec):
                        total += T.cast(values[0, v], "float32") * T.cast(values[0, v], "float32")
            if kept:  # a second loop, so that every load is on its way before the first is waited for
                for c, v in T.grid(chunks, vec):
                    total += T.cast(values[c, v], "float32") * T.cast(values[c, v], "float32")

            total = T.warp_reduce_sum(total)
            if warps > 1:
                if thread % 32 == 0:
                    partial[local_row, thread // 32] = total
                T.sync_threads()
                total = 0.0
                for w in T.unroll(warps):
                    total += partial[local_row, w]
            r = T.cast(T.cast(T.rsqrt(total * (1.0 / N) + eps), dtype), "float32")

            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if full or (row < M and column < N):
                    if not kept:
                        for v in T.vectorized(vec):
                            values[0, v] = x[row, column + v]
                    for v in T.vectorized(vec):
                        result[slot, v] = T.cast(T.cast(values[slot, v], "float32") * r, dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[slot, v]

    return rms_norm_unweighted


def run(x: torch.Tensor, eps: float, out: torch.Tensor, *, threads=None, rows=None):
    """out[M, N] = T(x[M, N] * T(rsqrt(mean(x^2) + eps))), statistics in float32.

    x, out: [M, N] with last stride 1 (any row stride); T is bfloat16, float16 or float32. A row belongs to `threads` threads (a
    multiple of 32), a CTA has `rows` rows; None: two vectors a thread, four warps a CTA at least.
    """
    M, N = x.shape
    if M == 0:
        return
    itemsize = x.dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, the strides and all addresses.
    bits = N | x.stride(0) | out.stride(0) | 16 // itemsize | (x.data_ptr() | out.data_ptr()) // itemsize
    vec = bits & -bits
    usual = min(1024, 32 * -(-N // (2 * vec * 32)))
    threads, rows = threads or usual, rows or max(1, 128 // usual)
    rms_norm_kernel(N, x.dtype, vec, threads, min(rows, 1024 // threads))(x, eps, out)

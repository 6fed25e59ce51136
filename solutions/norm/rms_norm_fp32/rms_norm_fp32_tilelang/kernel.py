"""RMSNorm with a single rounding (OLMo-2, gpt-oss) in TileLang: a group of warps reads a row once and keeps it."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def rms_norm_fp32_kernel(N, dtype, vec, threads, rows):
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
    def rms_norm_fp32(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            values = T.alloc_local((slots, vec), dtype)
            scales = T.alloc_local((slots, vec), dtype)
            result = T.alloc_local((vec,), dtype)
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
                    if kept:  # asked for now, so that it arrives while the sum is reduced
                        for v in T.vectorized(vec):
                            scales[slot, v] = weight[column + v]
                if not kept:
                    for v in T.unroll(vec):
                        total += T.cast(values[0, v], "float32") * T.cast(values[0, v], "float32")
            if kept:
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
            r = T.rsqrt(total * (1.0 / N) + eps)

            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if full or (row < M and column < N):
                    if not kept:
                        for v in T.vectorized(vec):
                            values[0, v] = x[row, column + v]
                        for v in T.vectorized(vec):
                            scales[0, v] = weight[column + v]
                    for v in T.vectorized(vec):
                        normed = T.cast(values[slot, v], "float32") * r
                        result[v] = T.cast(normed * T.cast(scales[slot, v], "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return rms_norm_fp32


@functools.cache
def default_shape(N, vec):
    """Threads a row and rows a CTA: two vectors a thread, four warps a CTA where a row needs fewer."""
    threads = min(1024, 32 * -(-N // (2 * vec * 32)))
    return threads, max(1, 128 // threads)


def run(x, weight, eps, out, *, threads=None, rows=None):
    """out = T(x * rsqrt(mean(x^2) + eps) * weight), float32 up to the one cast to T.

    x, out: [M, N] with last stride 1 (any row stride); weight: [N] contiguous; T is bfloat16, float16 or float32.
    A row belongs to `threads` threads (a multiple of 32), a CTA has `rows` rows; None chooses both from N alone.
    """
    M, N = x.shape
    if M == 0:
        return
    dtype = x.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, both strides and all addresses.
    bits = N | x.stride(0) | out.stride(0) | 16 // itemsize
    bits |= (x.data_ptr() | weight.data_ptr() | out.data_ptr()) // itemsize
    vec = bits & -bits
    if threads is None or rows is None:
        chosen = default_shape(N, vec)
        threads, rows = threads or chosen[0], rows or chosen[1]
    rows = min(rows, 1024 // threads)
    rms_norm_fp32_kernel(N, dtype, vec, threads, rows)(x, weight, eps, out)

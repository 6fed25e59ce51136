"""Residual add and RMSNorm in one pass, in TileLang: a group of warps keeps the summed row in registers."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def fused_add_rms_norm_kernel(N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA."""
    M = T.dynamic("M")
    x_stride, residual_stride, out_stride = T.dynamic("x_stride residual_stride out_stride", "int64")
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    # A row stays in registers where they suffice: a thread of 1024 has 64. Longer rows are read again, from L2.
    kept = chunks * vec * dtype.itemsize <= (128 if threads <= 512 else 64)
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check
    loop, slots = (T.unroll, chunks) if kept else (T.serial, 1)

    @T.prim_func
    def fused_add_rms_norm(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        residual: T.StridedTensor((M, N), (residual_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(residual_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            addends = T.alloc_local((slots, vec), dtype)
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
                        addends[slot, v] = 0
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        addends[slot, v] = x[row, column + v]
                    for v in T.vectorized(vec):
                        values[slot, v] = residual[row, column + v]
                    if kept:  # asked for now, so that it arrives while the sum is reduced
                        for v in T.vectorized(vec):
                            scales[slot, v] = weight[column + v]
                if not kept:
                    for v in T.unroll(vec):
                        values[0, v] = T.cast(T.cast(addends[0, v], "float32") + T.cast(values[0, v], "float32"), dtype)
                        total += T.cast(values[0, v], "float32") * T.cast(values[0, v], "float32")
                    if full or (row < M and column < N):
                        for v in T.vectorized(vec):
                            residual[row, column + v] = values[0, v]
            if kept:  # a second loop, so that every load is on its way before the first is waited for
                for c in T.unroll(chunks):
                    column = (c * threads + thread) * vec
                    for v in T.unroll(vec):
                        values[c, v] = T.cast(T.cast(addends[c, v], "float32") + T.cast(values[c, v], "float32"), dtype)
                        total += T.cast(values[c, v], "float32") * T.cast(values[c, v], "float32")
                    if full or (row < M and column < N):
                        for v in T.vectorized(vec):
                            residual[row, column + v] = values[c, v]

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
                    if not kept:  # this thread wrote these elements above
                        for v in T.vectorized(vec):
                            values[0, v] = residual[row, column + v]
                        for v in T.vectorized(vec):
                            scales[0, v] = weight[column + v]
                    for v in T.vectorized(vec):
                        normed = T.cast(T.cast(values[slot, v], "float32") * r, dtype)
                        result[v] = T.cast(T.cast(normed, "float32") * T.cast(scales[slot, v], "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return fused_add_rms_norm


@functools.cache
def default_shape(N, vec):
    """Threads a row and rows a CTA: two vectors a thread, four warps a CTA where a row needs fewer."""
    threads = min(1024, 32 * -(-N // (2 * vec * 32)))
    return threads, max(1, 128 // threads)


def run(x, residual, weight, eps, out, *, threads=None, rows=None):
    """residual = T(x + residual), in place; out = T(T(residual * rsqrt(mean(residual^2) + eps)) * weight).

    x, residual, out: [M, N] with last stride 1 (any row stride); weight: [N] contiguous; T is bfloat16, float16 or
    float32, sums are float32. A row belongs to `threads` threads (a multiple of 32), a CTA has `rows` rows; None
    chooses both from N alone.
    """
    M, N = x.shape
    if M == 0:
        return
    dtype = x.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, the strides and all addresses.
    bits = N | x.stride(0) | residual.stride(0) | out.stride(0) | 16 // itemsize
    bits |= (x.data_ptr() | residual.data_ptr() | weight.data_ptr() | out.data_ptr()) // itemsize
    vec = bits & -bits
    if threads is None or rows is None:
        chosen = default_shape(N, vec)
        threads, rows = threads or chosen[0], rows or chosen[1]
    rows = min(rows, 1024 // threads)
    fused_add_rms_norm_kernel(N, dtype, vec, threads, rows)(x, residual, weight, eps, out)

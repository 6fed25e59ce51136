"""Residual add and layer norm in one pass and new tensors, in TileLang.

A group of warps reads a row once and keeps its sum in registers.
"""

import functools

import tilelang
import tilelang.language as T
import torch


@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def add_layer_norm_kernel(N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA.

    The row's first value is subtracted before anything is summed: a mean that is many deviations away from zero then costs no
    digits, and a row of equal values gives exactly zero. Any value of the row is within sqrt(N) deviations of the mean.
    """
    M = T.dynamic("M")
    x_stride, residual_stride, out_stride, sum_stride = T.dynamic(
        "x_stride residual_stride out_stride sum_stride", "int64"
    )
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    # A row stays in registers where they suffice: a thread of 1024 has 64. Longer rows are read again, from L2.
    kept = chunks * vec * dtype.itemsize <= (64 if threads <= 512 else 32)
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check
    loop, slots = (T.unroll, chunks) if kept else (T.serial, 1)

    @T.macro
    def load_values(x, residual, addends, values, row, column, slot):
        if full or (row < M and column < N):
            for v in T.vectorized(vec):
                values[slot, v] = x[row, column + v]
            for v in T.vectorized(vec):
                addends[slot, v] = residual[row, column + v]

    @T.macro
    def add_values(addends, values, slot):
        for v in T.unroll(vec):
            values[slot, v] = T.cast(T.cast(values[slot, v], "float32") + T.cast(addends[slot, v], "float32"), dtype)

    @T.macro
    def load_weights(weight, bias, scales, offsets, column, slot):
        if full or column < N:
            for v in T.vectorized(vec):
                scales[slot, v] = weight[column + v]
            for v in T.vectorized(vec):
                offsets[slot, v] = bias[column + v]

    @T.macro
    def row_mean(total, partial, local_row, thread):
        """Replace total[0] by the mean over all threads of a row, added in a fixed order."""
        total[0] = T.warp_reduce_sum(total[0])
        if warps > 1:
            if thread % 32 == 0:
                partial[local_row, thread // 32] = total[0]
            T.sync_threads()
            total[0] = 0.0
            for w in T.unroll(warps):
                total[0] += partial[local_row, w]
        total[0] = total[0] * (1.0 / N)

    @T.prim_func
    def add_layer_norm(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        residual: T.StridedTensor((M, N), (residual_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        bias: T.Tensor((N,), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
        summed: T.StridedTensor((M, N), (sum_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(residual_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            T.assume(sum_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            values = T.alloc_local((slots, vec), dtype)
            addends = T.alloc_local((slots, vec), dtype)
            scales = T.alloc_local((slots, vec), dtype)
            offsets = T.alloc_local((slots, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            first = T.alloc_local((1,), "float32")
            mean = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            # One for each reduction: a warp that is ahead may write the second while others read the first.
            sums = T.alloc_shared((rows, warps), "float32")
            squares = T.alloc_shared((rows, warps), "float32")

            first[0] = 0.0
            if full or row < M:
                first[0] = T.cast(x[row, 0], "float32")
                first[0] = T.cast(T.cast(first[0] + T.cast(residual[row, 0], "float32"), dtype), "float32")
            if kept:  # every load is on its way before the first is waited for
                for c in T.unroll(chunks):
                    if not full:
                        for v in T.vectorized(vec):
                            values[c, v] = 0
                        for v in T.vectorized(vec):
                            addends[c, v] = 0
                    load_values(x, residual, addends, values, row, (c * threads + thread) * vec, c)
                for c in T.unroll(chunks):
                    load_weights(weight, bias, scales, offsets, (c * threads + thread) * vec, c)

            mean[0] = 0.0
            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if not kept:
                    load_values(x, residual, addends, values, row, column, slot)
                add_values(addends, values, slot)
                if full or (row < M and column < N):
                    for v in T.unroll(vec):
                        mean[0] += T.cast(values[slot, v], "float32") - first[0]
            row_mean(mean, sums, local_row, thread)

            scale[0] = 0.0
            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if not kept:
                    load_values(x, residual, addends, values, row, column, slot)
                    add_values(addends, values, slot)
                if full or (row < M and column < N):
                    for v in T.unroll(vec):
                        centred = T.cast(values[slot, v], "float32") - first[0] - mean[0]
                        scale[0] += centred * centred
            row_mean(scale, squares, local_row, thread)
            scale[0] = T.rsqrt(scale[0] + eps)

            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if not kept:
                    load_values(x, residual, addends, values, row, column, slot)
                    add_values(addends, values, slot)
                    load_weights(weight, bias, scales, offsets, column, slot)
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        summed[row, column + v] = values[slot, v]
                    for v in T.unroll(vec):
                        centred = T.cast(values[slot, v], "float32") - first[0] - mean[0]
                        normed = centred * scale[0] * T.cast(scales[slot, v], "float32")
                        result[v] = T.cast(normed + T.cast(offsets[slot, v], "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return add_layer_norm


@functools.cache
def kernel_for(N, dtype, vec, threads, rows):
    """The kernel of `threads` threads a row and `rows` rows a CTA; None: two vectors a thread, four warps a CTA at least."""
    usual = min(1024, 32 * -(-N // (2 * vec * 32)))
    threads, rows = threads or usual, rows or max(1, 128 // usual)
    return add_layer_norm_kernel(N, dtype, vec, threads, min(rows, 1024 // threads))


def run_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    threads=None,
    rows=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T((s - mean) * rsqrt(var + eps) * weight[N] + bias[N]), float32 inside.

    x, residual, out, residual_out: [M, N] with last stride 1 (any row stride); weight, bias: [N] contiguous; T is bfloat16,
    float16 or float32. A row belongs to `threads` threads (a multiple of 32), a CTA has `rows` rows; None chooses both from N
    alone.
    """
    M, N = x.shape
    if M == 0:
        return
    dtype = x.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, all strides and all addresses.
    bits = N | 16 // itemsize
    for rows_of in (x, residual, out, residual_out):
        bits |= rows_of.stride(0) | rows_of.data_ptr() // itemsize
    bits |= (weight.data_ptr() | bias.data_ptr()) // itemsize
    kernel = kernel_for(N, dtype, bits & -bits, threads, rows)
    kernel(x, residual, weight, bias, eps, out, residual_out)

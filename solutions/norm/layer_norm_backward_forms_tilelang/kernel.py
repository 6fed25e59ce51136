"""The gradients of layer norm without a shift, and of a residual sum and its layer norm, in TileLang: rows in registers."""

import functools

import tilelang
import tilelang.language as T
import torch

SUM_COLUMNS, SUM_GROUPS = 32, 32  # columns of a CTA that adds up partial sums, and how many of them it adds at once


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def layer_norm_backward_kernel(adds, N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA.

    A CTA has a run of rows, and each of its `rows` groups leaves a row of partial sums for scale and shift each. The row's
    first value is subtracted before anything is summed, as in the forward. `adds`: the gradient of the residual stream is added
    to the rounded one of the norm, and the shift has one, too.
    """
    M, parts = T.dynamic("M parts")
    x_stride, grad_stride, total_stride, out_stride = T.dynamic("x_stride grad_stride total_stride out_stride", "int64")
    kinds = 2 if adds else 1
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check

    @T.macro
    def load_row(x, grad_out, grad_total, values, grads, given, first, row, inside, thread):
        first[0] = 0.0
        if inside:
            first[0] = T.cast(x[row, 0], "float32")
        for c in T.unroll(chunks):
            column = (c * threads + thread) * vec
            for v in T.vectorized(vec):
                values[c, v] = 0
            for v in T.vectorized(vec):
                grads[c, v] = 0
            if inside and (full or column < N):
                for v in T.vectorized(vec):
                    values[c, v] = x[row, column + v]
                for v in T.vectorized(vec):
                    grads[c, v] = grad_out[row, column + v]
                if adds:
                    for v in T.vectorized(vec):
                        given[c, v] = grad_total[row, column + v]

    @T.macro
    def row_means(found, count, shared, local_row, thread):
        """Replace the first `count` numbers of all threads of a row by their means, added in a fixed order."""
        for k in T.unroll(count):
            found[k] = T.warp_reduce_sum(found[k])
        if warps > 1:
            if thread % 32 == 0:
                for k in T.unroll(count):
                    shared[local_row, thread // 32, k] = found[k]
            T.sync_threads()
            for k in T.unroll(count):
                found[k] = 0.0
                for w in T.unroll(warps):
                    found[k] += shared[local_row, w, k]
        for k in T.unroll(count):
            found[k] = found[k] * (1.0 / N)

    @T.prim_func
    def layer_norm_backward(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        grad_out: T.StridedTensor((M, N), (grad_stride, 1), dtype),
        grad_total: T.StridedTensor((M, N), (total_stride, 1), dtype),
        eps: T.float32,
        per_part: T.int32,
        grad_x: T.StridedTensor((M, N), (out_stride, 1), dtype),
        partial: T.Tensor((parts, rows, kinds, N), "float32"),
    ):
        with T.Kernel(parts, threads=(threads, rows)) as part:
            T.assume(x_stride % vec == 0)  # run chose vec so; it lets the compiler use vector accesses
            T.assume(grad_stride % vec == 0)
            T.assume(total_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            begin = part * per_part
            end = T.min(begin + per_part, M)
            values = T.alloc_local((chunks, vec), dtype)
            grads = T.alloc_local((chunks, vec), dtype)
            given = T.alloc_local((chunks, vec), dtype)
            scales = T.alloc_local((chunks, vec), dtype)
            scale_sums = T.alloc_local((chunks, vec), "float32")
            shift_sums = T.alloc_local((chunks, vec), "float32")
            result = T.alloc_local((chunks, vec), dtype)
            first = T.alloc_local((1,), "float32")
            means = T.alloc_local((2,), "float32")  # of the shifted row, and of its gradient times the weight
            products = T.alloc_local((2,), "float32")  # of the centred row with itself, and with that gradient
            # One for each reduction: a warp that is ahead may write the next row's while others read the other.
            of_means = T.alloc_shared((rows, warps, 2), "float32")
            of_products = T.alloc_shared((rows, warps, 2), "float32")
            for c, v in T.grid(chunks, vec):
                scale_sums[c, v] = 0.0
                shift_sums[c, v] = 0.0
            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                for v in T.vectorized(vec):
                    scales[c, v] = 0
                if full or column < N:
                    for v in T.vectorized(vec):
                        scales[c, v] = weight[column + v]
            for step in T.serial(T.ceildiv(end - begin, rows)):
                row = begin + step * rows + local_row
                load_row(x, grad_out, grad_total, values, grads, given, first, row, row < end, thread)
                means[0] = 0.0
                means[1] = 0.0
                for c in T.unroll(chunks):
                    if full or (c * threads + thread) * vec < N:
                        for v in T.unroll(vec):
                            means[0] += T.cast(values[c, v], "float32") - first[0]
                            means[1] += T.cast(grads[c, v], "float32") * T.cast(scales[c, v], "float32")
                row_means(means, 2, of_means, local_row, thread)
                products[0] = 0.0
                products[1] = 0.0
                for c in T.unroll(chunks):
                    if full or (c * threads + thread) * vec < N:
                        for v in T.unroll(vec):
                            centred = T.cast(values[c, v], "float32") - first[0] - means[0]
                            scaled = T.cast(grads[c, v], "float32") * T.cast(scales[c, v], "float32")
                            products[0] += centred * centred
                            products[1] += centred * scaled
                row_means(products, 2, of_products, local_row, thread)
                products[0] = T.rsqrt(products[0] + eps)
                products[1] = products[1] * products[0]
                if row < end:  # beyond it the reciprocal root may be infinite, where eps is 0
                    for c in T.unroll(chunks):
                        column = (c * threads + thread) * vec
                        if full or column < N:
                            for v in T.unroll(vec):
                                grad = T.cast(grads[c, v], "float32")
                                normed = (T.cast(values[c, v], "float32") - first[0] - means[0]) * products[0]
                                across = grad * T.cast(scales[c, v], "float32") - means[1] - normed * products[1]
                                scale_sums[c, v] += grad * normed
                                if adds:
                                    shift_sums[c, v] += grad
                                result[c, v] = T.cast(products[0] * across, dtype)
                                if adds:
                                    result[c, v] = T.cast(
                                        T.cast(result[c, v], "float32") + T.cast(given[c, v], "float32"), dtype
                                    )
                            for v in T.vectorized(vec):
                                grad_x[row, column + v] = result[c, v]
            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                if full or column < N:
                    for v in T.unroll(vec):
                        partial[part, local_row, 0, column + v] = scale_sums[c, v]
                    if adds:
                        for v in T.unroll(vec):
                            partial[part, local_row, 1, column + v] = shift_sums[c, v]

    return layer_norm_backward


@functools.cache
@tilelang.jit
def sum_parts_kernel(kinds, N, dtype):
    """Compile for N columns: adds up `count` rows of partial sums of either kind in a fixed order; zeros without rows."""
    rows = T.dynamic("rows")

    @T.prim_func
    def sum_parts(
        partial: T.Tensor((rows, kinds, N), "float32"),
        count: T.int32,
        grad_weight: T.Tensor((N,), dtype),
        grad_bias: T.Tensor((N,), dtype),
    ):
        with T.Kernel(T.ceildiv(N, SUM_COLUMNS), kinds, threads=(SUM_COLUMNS, SUM_GROUPS)) as (block, kind):
            lane, group = T.get_thread_binding(0), T.get_thread_binding(1)
            column = block * SUM_COLUMNS + lane
            shared = T.alloc_shared((SUM_GROUPS, SUM_COLUMNS), "float32")
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for step in T.serial(T.ceildiv(count, SUM_GROUPS)):
                if step * SUM_GROUPS + group < count and column < N:
                    total[0] += partial[step * SUM_GROUPS + group, kind, column]
            shared[group, lane] = total[0]
            T.sync_threads()
            if group == 0 and column < N:
                total[0] = 0.0
                for g in T.unroll(SUM_GROUPS):
                    total[0] += shared[g, lane]
                if kind == 0:
                    grad_weight[column] = T.cast(total[0], dtype)
                else:
                    grad_bias[column] = T.cast(total[0], dtype)

    return sum_parts


def _shape(N, tensors, threads, rows):
    """Elements of a vector, threads of a row and rows of a CTA: two vectors a thread, four warps where a row needs fewer."""
    itemsize = tensors[0].dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, all strides and all addresses.
    bits = N | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.data_ptr() // itemsize
        if tensor.dim() == 2:
            bits |= tensor.stride(0)
    vec = bits & -bits
    fewest = 32 * -(-N // (16 * vec * 32))  # with more than 16 vectors a thread nothing stays in registers
    threads = min(1024, max(threads or 32 * -(-N // (2 * vec * 32)), fewest))
    return vec, threads, max(1, min(rows or 128 // threads, 1024 // threads))


def _launch(x, weight, grad_out, grad_total, eps, grad_x, grad_weight, grad_bias, adds, parts, threads, rows):
    M, N = x.shape
    dtype, kinds = x.dtype, 2 if adds else 1
    vec, threads, rows = _shape(N, (x, weight, grad_out, grad_total, grad_x), threads, rows)
    tiles = -(-M // rows)
    per_part = -(-tiles // parts) * rows  # whole tiles of rows, as even as they go
    used = -(-M // per_part) if M else 0  # no part may be empty
    partial = torch.empty((max(used, 1), rows, kinds, N), dtype=torch.float32, device=x.device)
    if used:
        kernel = layer_norm_backward_kernel(adds, N, dtype, vec, threads, rows)
        kernel(x, weight, grad_out, grad_total, eps, per_part, grad_x, partial)
    sum_parts_kernel(kinds, N, dtype)(partial.view(-1, kinds, N), used * rows, grad_weight, grad_bias)


def run_layer_norm_no_bias_backward(
    x, weight, grad_out, eps, grad_x, grad_weight, *, parts=528, threads=None, rows=None
):
    """grad_x = T(r * (h - mean(h) - n * mean(h * n))), grad_weight = T(sum over rows of grad_out * n).

    r = rsqrt(var + eps), n = (x - mean) * r, h = grad_out * weight; float32 inside and in the sums, one cast to T.
    x, grad_out, grad_x: [M, N] with last stride 1 (any row stride), N <= 16384; weight, grad_weight: [N]; T is bfloat16, float16
    or float32. A row belongs to `threads` threads (a multiple of 32), a CTA has `rows` rows; None chooses both from N. At most
    `parts` CTAs have a run of rows each and leave fp32 partial sums, which a second kernel adds up: no atomics, so the order of
    the sums depends on the shape only. 528 is four for each multiprocessor of an H200.
    """
    _launch(x, weight, grad_out, grad_out, eps, grad_x, grad_weight, grad_weight, False, parts, threads, rows)


def run_add_layer_norm_backward(
    residual_out,
    weight,
    grad_out,
    grad_residual_out,
    eps,
    grad_x,
    grad_weight,
    grad_bias,
    *,
    parts=528,
    threads=None,
    rows=None,
):
    """grad_x = T(T(gradient as above) + grad_residual_out); grad_weight and grad_bias sum grad_out * n and grad_out."""
    tensors = residual_out, weight, grad_out, grad_residual_out
    _launch(*tensors, eps, grad_x, grad_weight, grad_bias, True, parts, threads, rows)

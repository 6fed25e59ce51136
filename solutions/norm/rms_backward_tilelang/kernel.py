"""The gradients of RMSNorm in TileLang: a group of warps keeps a row and its gradient in registers; no atomics."""

import functools

import tilelang
import tilelang.language as T
import torch

SUM_COLUMNS, SUM_GROUPS = 32, 32  # columns of a CTA that adds up partial sums, and how many of them it adds at once


def _tile(N, dtype, vec, threads, rows):
    """What both kernels do with a row: macros that load it, reduce it and store its gradient."""
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check

    @T.macro
    def load_weight(weight, scales, thread):
        for c in T.unroll(chunks):
            column = (c * threads + thread) * vec
            for v in T.vectorized(vec):
                scales[c, v] = 0
            if full or column < N:
                for v in T.vectorized(vec):
                    scales[c, v] = weight[column + v]

    @T.macro
    def load_row(x, grad_out, values, grads, row, inside, thread):
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

    @T.macro
    def row_sum(total, shared, local_row, thread):
        """`total[0]` of all threads of a row, in a fixed order."""
        total[0] = T.warp_reduce_sum(total[0])
        if warps > 1:
            if thread % 32 == 0:
                shared[local_row, thread // 32] = total[0]
            T.sync_threads()
            total[0] = 0.0
            for w in T.unroll(warps):
                total[0] += shared[local_row, w]

    @T.macro
    def reduce_row(values, grads, scales, rstd, along, squares, products, eps, local_row, thread):
        """rstd = rsqrt(mean(x^2) + eps) and along = mean(h * n); n = x * rstd, h = T(grad_out * weight)."""
        rstd[0] = 0.0
        for c, v in T.grid(chunks, vec):
            rstd[0] += T.cast(values[c, v], "float32") * T.cast(values[c, v], "float32")
        row_sum(rstd, squares, local_row, thread)
        rstd[0] = T.rsqrt(rstd[0] * (1.0 / N) + eps)
        along[0] = 0.0
        for c, v in T.grid(chunks, vec):
            scaled = T.cast(T.cast(grads[c, v], "float32") * T.cast(scales[c, v], "float32"), dtype)
            along[0] += T.cast(scaled, "float32") * (T.cast(values[c, v], "float32") * rstd[0])
        row_sum(along, products, local_row, thread)
        along[0] = along[0] * (1.0 / N)

    @T.macro
    def store_row(values, grads, scales, rstd, along, result, grad_x, row, inside, thread):
        for c in T.unroll(chunks):
            column = (c * threads + thread) * vec
            if inside and (full or column < N):
                for v in T.vectorized(vec):
                    scaled = T.cast(T.cast(grads[c, v], "float32") * T.cast(scales[c, v], "float32"), dtype)
                    normed = T.cast(values[c, v], "float32") * rstd[0]
                    result[v] = T.cast(rstd[0] * (T.cast(scaled, "float32") - normed * along[0]), dtype)
                for v in T.vectorized(vec):
                    grad_x[row, column + v] = result[v]

    return warps, chunks, full, load_weight, load_row, reduce_row, store_row


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def rms_norm_backward_x_kernel(N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA."""
    M = T.dynamic("M")
    x_stride, grad_stride, out_stride = T.dynamic("x_stride grad_stride out_stride", "int64")
    warps, chunks, _, load_weight, load_row, reduce_row, store_row = _tile(N, dtype, vec, threads, rows)

    @T.prim_func
    def rms_norm_backward_x(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        grad_out: T.StridedTensor((M, N), (grad_stride, 1), dtype),
        eps: T.float32,
        grad_x: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # run chose vec so; it lets the compiler use vector accesses
            T.assume(grad_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            values = T.alloc_local((chunks, vec), dtype)
            grads = T.alloc_local((chunks, vec), dtype)
            scales = T.alloc_local((chunks, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            rstd = T.alloc_local((1,), "float32")
            along = T.alloc_local((1,), "float32")
            squares = T.alloc_shared((rows, warps), "float32")
            products = T.alloc_shared((rows, warps), "float32")
            load_row(x, grad_out, values, grads, row, row < M, thread)
            load_weight(weight, scales, thread)
            reduce_row(values, grads, scales, rstd, along, squares, products, eps, local_row, thread)
            store_row(values, grads, scales, rstd, along, result, grad_x, row, row < M, thread)

    return rms_norm_backward_x


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def rms_norm_backward_kernel(N, dtype, vec, threads, rows):
    """As above; a CTA has a run of rows, and each of its `rows` groups leaves a row of partial sums for the weight."""
    M, parts = T.dynamic("M parts")
    x_stride, grad_stride, out_stride = T.dynamic("x_stride grad_stride out_stride", "int64")
    warps, chunks, full, load_weight, load_row, reduce_row, store_row = _tile(N, dtype, vec, threads, rows)

    @T.prim_func
    def rms_norm_backward(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        grad_out: T.StridedTensor((M, N), (grad_stride, 1), dtype),
        eps: T.float32,
        per_part: T.int32,
        grad_x: T.StridedTensor((M, N), (out_stride, 1), dtype),
        partial: T.Tensor((parts, rows, N), "float32"),
    ):
        with T.Kernel(parts, threads=(threads, rows)) as part:
            T.assume(x_stride % vec == 0)  # run chose vec so; it lets the compiler use vector accesses
            T.assume(grad_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            first = part * per_part
            last = T.min(first + per_part, M)
            values = T.alloc_local((chunks, vec), dtype)
            grads = T.alloc_local((chunks, vec), dtype)
            scales = T.alloc_local((chunks, vec), dtype)
            sums = T.alloc_local((chunks, vec), "float32")
            result = T.alloc_local((vec,), dtype)
            rstd = T.alloc_local((1,), "float32")
            along = T.alloc_local((1,), "float32")
            # One for each reduction: a warp that is ahead may write the next row's sums of one while others read the other.
            squares = T.alloc_shared((rows, warps), "float32")
            products = T.alloc_shared((rows, warps), "float32")
            for c, v in T.grid(chunks, vec):
                sums[c, v] = 0.0
            load_weight(weight, scales, thread)
            for step in T.serial(T.ceildiv(last - first, rows)):
                row = first + step * rows + local_row
                load_row(x, grad_out, values, grads, row, row < last, thread)
                reduce_row(values, grads, scales, rstd, along, squares, products, eps, local_row, thread)
                store_row(values, grads, scales, rstd, along, result, grad_x, row, row < last, thread)
                if row < last:  # beyond it rstd may be infinite, where eps is 0
                    for c, v in T.grid(chunks, vec):
                        normed = T.cast(T.cast(values[c, v], "float32") * rstd[0], dtype)
                        sums[c, v] += T.cast(grads[c, v], "float32") * T.cast(normed, "float32")
            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                if full or column < N:
                    for v in T.unroll(vec):
                        partial[part, local_row, column + v] = sums[c, v]

    return rms_norm_backward


@functools.cache
@tilelang.jit
def sum_parts_kernel(N, dtype):
    """Compile for N columns: adds up `count` rows of partial sums in a fixed order; zeros where there are none."""
    rows = T.dynamic("rows")

    @T.prim_func
    def sum_parts(partial: T.Tensor((rows, N), "float32"), count: T.int32, grad_weight: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, SUM_COLUMNS), threads=(SUM_COLUMNS, SUM_GROUPS)) as block:
            lane, group = T.get_thread_binding(0), T.get_thread_binding(1)
            column = block * SUM_COLUMNS + lane
            shared = T.alloc_shared((SUM_GROUPS, SUM_COLUMNS), "float32")
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for step in T.serial(T.ceildiv(count, SUM_GROUPS)):
                if step * SUM_GROUPS + group < count and column < N:
                    total[0] += partial[step * SUM_GROUPS + group, column]
            shared[group, lane] = total[0]
            T.sync_threads()
            if group == 0 and column < N:
                total[0] = 0.0
                for g in T.unroll(SUM_GROUPS):
                    total[0] += shared[g, lane]
                grad_weight[column] = T.cast(total[0], dtype)

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


def run_rms_norm_backward_x(x, weight, grad_out, eps, grad_x, *, threads=None, rows=None):
    """grad_x = T(r * (h - n * mean(h * n))), r = rsqrt(mean(x^2) + eps), n = x * r, h = T(grad_out * weight), fp32 inside.

    x, grad_out, grad_x: [M, N] with last stride 1 (any row stride), N <= 16384; weight: [N]; T is bfloat16, float16 or
    float32. A row belongs to `threads` threads (a multiple of 32), a CTA has `rows` rows; None chooses both from N.
    """
    M, N = x.shape
    if M == 0:
        return
    vec, threads, rows = _shape(N, (x, weight, grad_out, grad_x), threads, rows)
    rms_norm_backward_x_kernel(N, x.dtype, vec, threads, rows)(x, weight, grad_out, eps, grad_x)


def run_rms_norm_backward(x, weight, grad_out, eps, grad_x, grad_weight, *, parts=528, threads=None, rows=None):
    """grad_x as above, and grad_weight = T(sum over rows of grad_out * T(n)); fp32 inside and in the sum.

    Shapes as above, grad_weight [N]. At most `parts` CTAs have a run of rows each and leave fp32 partial sums, which a
    second kernel adds up: no atomics, so the order of the sums depends on the shape only. 528 is four for each
    multiprocessor of an H200.
    """
    M, N = x.shape
    dtype = x.dtype
    vec, threads, rows = _shape(N, (x, weight, grad_out, grad_x), threads, rows)
    tiles = -(-M // rows)
    per_part = -(-tiles // parts) * rows  # whole tiles of rows, as even as they go
    used = -(-M // per_part) if M else 0  # no part may be empty
    partial = torch.empty((max(used, 1), rows, N), dtype=torch.float32, device=x.device)
    if used:
        kernel = rms_norm_backward_kernel(N, dtype, vec, threads, rows)
        kernel(x, weight, grad_out, eps, per_part, grad_x, partial)
    sum_parts_kernel(N, dtype)(partial.view(-1, N), used * rows, grad_weight)

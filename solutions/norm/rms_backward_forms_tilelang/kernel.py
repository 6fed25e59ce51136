"""The gradients of RMSNorm and of a residual sum before it, in TileLang: a group of warps keeps a row in registers."""

import functools

import tilelang
import tilelang.language as T
import torch

SUM_COLUMNS, SUM_GROUPS = 32, 32  # columns of a CTA that adds up partial sums, and how many of them it adds at once


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def rms_norm_backward_kernel(form, adds, N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA.

    A CTA has a run of rows, and each of its `rows` groups leaves a row of partial sums for the weight. `form` is "rounded" where
    the normalised value is rounded before it is multiplied by the weight, "fp32" where it is not, and "zero_centred" where it is
    not either and the factor is 1 + weight. `adds`: the gradient of the residual stream is added to the rounded one of the norm.
    """
    M, parts = T.dynamic("M parts")
    x_stride, grad_stride, total_stride, out_stride = T.dynamic("x_stride grad_stride total_stride out_stride", "int64")
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check

    def to_normed(grad, scale):
        """The gradient of a normalised value in float32, rounded where autograd rounds it."""
        grad, scale = T.cast(grad, "float32"), T.cast(scale, "float32")
        if form == "rounded":
            return T.cast(T.cast(grad * scale, dtype), "float32")
        return grad * (1.0 + scale) if form == "zero_centred" else grad * scale

    @T.macro
    def load_row(x, grad_out, grad_total, values, grads, given, row, inside, thread):
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
    def row_mean(total, shared, local_row, thread):
        """Replace total[0] by the mean over all threads of a row, added in a fixed order."""
        total[0] = T.warp_reduce_sum(total[0])
        if warps > 1:
            if thread % 32 == 0:
                shared[local_row, thread // 32] = total[0]
            T.sync_threads()
            total[0] = 0.0
            for w in T.unroll(warps):
                total[0] += shared[local_row, w]
        total[0] = total[0] * (1.0 / N)

    @T.prim_func
    def rms_norm_backward(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        grad_out: T.StridedTensor((M, N), (grad_stride, 1), dtype),
        grad_total: T.StridedTensor((M, N), (total_stride, 1), dtype),
        eps: T.float32,
        per_part: T.int32,
        grad_x: T.StridedTensor((M, N), (out_stride, 1), dtype),
        partial: T.Tensor((parts, rows, N), "float32"),
    ):
        with T.Kernel(parts, threads=(threads, rows)) as part:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(grad_stride % vec == 0)
            T.assume(total_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            first = part * per_part
            last = T.min(first + per_part, M)
            values = T.alloc_local((chunks, vec), dtype)
            grads = T.alloc_local((chunks, vec), dtype)
            given = T.alloc_local((chunks, vec), dtype)
            scales = T.alloc_local((chunks, vec), dtype)
            sums = T.alloc_local((chunks, vec), "float32")
            result = T.alloc_local((chunks, vec), dtype)
            rstd = T.alloc_local((1,), "float32")
            along = T.alloc_local((1,), "float32")
            # One for each reduction: a warp that is ahead may write the next row's sums of one while others read the other.
            squares = T.alloc_shared((rows, warps), "float32")
            products = T.alloc_shared((rows, warps), "float32")
            for c, v in T.grid(chunks, vec):
                sums[c, v] = 0.0
            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                for v in T.vectorized(vec):
                    scales[c, v] = 0
                if full or column < N:
                    for v in T.vectorized(vec):
                        scales[c, v] = weight[column + v]
            for step in T.serial(T.ceildiv(last - first, rows)):
                row = first + step * rows + local_row
                load_row(x, grad_out, grad_total, values, grads, given, row, row < last, thread)
                rstd[0] = 0.0
                for c, v in T.grid(chunks, vec):
                    rstd[0] += T.cast(values[c, v], "float32") * T.cast(values[c, v], "float32")
                row_mean(rstd, squares, local_row, thread)
                rstd[0] = T.rsqrt(rstd[0] + eps)
                along[0] = 0.0
                for c, v in T.grid(chunks, vec):
                    along[0] += to_normed(grads[c, v], scales[c, v]) * (T.cast(values[c, v], "float32") * rstd[0])
                row_mean(along, products, local_row, thread)
                if row < last:  # beyond it rstd may be infinite, where eps is 0
                    for c in T.unroll(chunks):
                        column = (c * threads + thread) * vec
                        if full or column < N:
                            for v in T.unroll(vec):
                                normed = T.cast(values[c, v], "float32") * rstd[0]
                                across = to_normed(grads[c, v], scales[c, v]) - normed * along[0]
                                result[c, v] = T.cast(rstd[0] * across, dtype)
                                if adds:
                                    result[c, v] = T.cast(
                                        T.cast(result[c, v], "float32") + T.cast(given[c, v], "float32"), dtype
                                    )
                                if form == "rounded":
                                    sums[c, v] += T.cast(grads[c, v], "float32") * T.cast(
                                        T.cast(normed, dtype), "float32"
                                    )
                                else:
                                    sums[c, v] += T.cast(grads[c, v], "float32") * normed
                            for v in T.vectorized(vec):
                                grad_x[row, column + v] = result[c, v]
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


def _launches(form, adds):
    """Fill in a function that only declares an entry, for one form with or without a residual stream.

    Activations and their gradients: [M, N] with last stride 1 (any row stride), N <= 16384; weight and grad_weight: [N]; T is
    bfloat16, float16 or float32. A row belongs to `threads` threads (a multiple of 32), a CTA has `rows` rows; None chooses both
    from N. At most `parts` CTAs have a run of rows each and leave fp32 partial sums, which a second kernel adds up: no atomics,
    so the order of the sums depends on the shape only. 528 is four for each multiprocessor of an H200.
    """

    def compute(x, weight, grad_out, grad_total, eps, grad_x, grad_weight, parts, threads, rows):
        M, N = x.shape
        dtype = x.dtype
        vec, threads, rows = _shape(N, (x, weight, grad_out, grad_total, grad_x), threads, rows)
        tiles = -(-M // rows)
        per_part = -(-tiles // parts) * rows  # whole tiles of rows, as even as they go
        used = -(-M // per_part) if M else 0  # no part may be empty
        partial = torch.empty((max(used, 1), rows, N), dtype=torch.float32, device=x.device)
        if used:
            kernel = rms_norm_backward_kernel(form, adds, N, dtype, vec, threads, rows)
            kernel(x, weight, grad_out, grad_total, eps, per_part, grad_x, partial)
        sum_parts_kernel(N, dtype)(partial.view(-1, N), used * rows, grad_weight)

    if adds:

        def run(
            residual_out, weight, grad_out, grad_residual_out, eps, grad_x, grad_weight,
            *, parts=528, threads=None, rows=None,
        ):  # fmt: skip
            compute(residual_out, weight, grad_out, grad_residual_out, eps, grad_x, grad_weight, parts, threads, rows)

    else:

        def run(x, weight, grad_out, eps, grad_x, grad_weight, *, parts=528, threads=None, rows=None):
            compute(x, weight, grad_out, grad_out, eps, grad_x, grad_weight, parts, threads, rows)

    return lambda declared: run


@_launches("rounded", True)
def run_add_rms_norm_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    parts=528,
    threads=None,
    rows=None,
):
    """grad_x = T(T(r * (h - n * mean(h * n))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * T(n)).

    s = residual_out, r = rsqrt(mean(s^2) + eps), n = s * r, h = T(grad_out * weight); fp32 inside and in the sum.
    """


@_launches("fp32", True)
def run_add_rms_norm_fp32_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    parts=528,
    threads=None,
    rows=None,
):
    """grad_x = T(T(r * (h - n * mean(h * n))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * n).

    s = residual_out, r = rsqrt(mean(s^2) + eps), n = s * r, h = grad_out * weight; fp32 inside and in the sum.
    """


@_launches("zero_centred", True)
def run_add_rms_norm_gemma_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    parts=528,
    threads=None,
    rows=None,
):
    """grad_x = T(T(r * (h - n * mean(h * n))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * n).

    s = residual_out, r = rsqrt(mean(s^2) + eps), n = s * r, h = grad_out * (1 + weight); fp32 inside and in the sum.
    """


@_launches("fp32", False)
def run_rms_norm_fp32_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    parts=528,
    threads=None,
    rows=None,
):
    """grad_x = T(r * (h - n * mean(h * n))), grad_weight = T(sum over rows of grad_out * n).

    r = rsqrt(mean(x^2) + eps), n = x * r, h = grad_out * weight; fp32 inside and in the sum.
    """


@_launches("zero_centred", False)
def run_rms_norm_gemma_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    parts=528,
    threads=None,
    rows=None,
):
    """grad_x = T(r * (h - n * mean(h * n))), grad_weight = T(sum over rows of grad_out * n).

    r = rsqrt(mean(x^2) + eps), n = x * r, h = grad_out * (1 + weight); fp32 inside and in the sum.
    """

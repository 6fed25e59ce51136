"""Residual add and RMSNorm in one pass and new tensors, in TileLang: a group of warps keeps the summed row in registers."""

import functools

import tilelang
import tilelang.language as T
import torch


@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def add_rms_norm_kernel(form, N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA.

    `form` is "rounded" where the normalised value is rounded before it is multiplied by the weight, "fp32" where it is not, and
    "zero_centred" where it is not either and the factor is 1 + weight.
    """
    M = T.dynamic("M")
    x_stride, residual_stride, out_stride, sum_stride = T.dynamic(
        "x_stride residual_stride out_stride sum_stride", "int64"
    )
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    # A row stays in registers where they suffice: a thread of 1024 has 64. Longer rows are read again, from L2.
    kept = chunks * vec * dtype.itemsize <= (128 if threads <= 512 else 64)
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check
    loop, slots = (T.unroll, chunks) if kept else (T.serial, 1)
    normed_dtype = dtype if form == "rounded" else "float32"

    def factor(scale):
        return 1.0 + T.cast(scale, "float32") if form == "zero_centred" else T.cast(scale, "float32")

    @T.prim_func
    def add_rms_norm(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        residual: T.StridedTensor((M, N), (residual_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
        sums: T.StridedTensor((M, N), (sum_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(residual_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            T.assume(sum_stride % vec == 0)
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
                            sums[row, column + v] = values[0, v]
            if kept:  # a second loop, so that every load is on its way before the first is waited for
                for c in T.unroll(chunks):
                    column = (c * threads + thread) * vec
                    for v in T.unroll(vec):
                        values[c, v] = T.cast(T.cast(addends[c, v], "float32") + T.cast(values[c, v], "float32"), dtype)
                        total += T.cast(values[c, v], "float32") * T.cast(values[c, v], "float32")
                    if full or (row < M and column < N):
                        for v in T.vectorized(vec):
                            sums[row, column + v] = values[c, v]

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
                            values[0, v] = sums[row, column + v]
                        for v in T.vectorized(vec):
                            scales[0, v] = weight[column + v]
                    for v in T.vectorized(vec):
                        normed = T.cast(T.cast(values[slot, v], "float32") * r, normed_dtype)
                        result[v] = T.cast(T.cast(normed, "float32") * factor(scales[slot, v]), dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return add_rms_norm


@functools.cache
def kernel_for(form, N, dtype, vec, threads, rows):
    """The kernel of `threads` threads a row and `rows` rows a CTA; None: two vectors a thread, four warps a CTA at least."""
    usual = min(1024, 32 * -(-N // (2 * vec * 32)))
    threads, rows = threads or usual, rows or max(1, 128 // usual)
    return add_rms_norm_kernel(form, N, dtype, vec, threads, min(rows, 1024 // threads))


def _launches(form):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x, residual, out, residual_out: [M, N] with last stride 1 (any row stride); weight: [N] contiguous; T is bfloat16, float16
    or float32, sums are float32. residual_out becomes the sum s = T(x + residual). A row belongs to `threads` threads
    (a multiple of 32), a CTA has `rows` rows; None chooses both from N alone.
    """

    def run(x, residual, weight, eps, out, residual_out, *, threads=None, rows=None):
        M, N = x.shape
        if M == 0:
            return
        dtype = x.dtype
        itemsize = dtype.itemsize
        # The widest power of two, at most 16 bytes, that divides the row, the strides and all addresses.
        bits = N | x.stride(0) | residual.stride(0) | out.stride(0) | residual_out.stride(0) | 16 // itemsize
        addresses = x.data_ptr() | residual.data_ptr() | weight.data_ptr() | out.data_ptr() | residual_out.data_ptr()
        bits |= addresses // itemsize
        vec = bits & -bits
        kernel_for(form, N, dtype, vec, threads, rows)(x, residual, weight, eps, out, residual_out)

    return lambda declared: run


@_launches("rounded")
def run_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    threads=None,
    rows=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(T(s * rsqrt(mean(s^2) + eps)) * weight[N])."""


@_launches("fp32")
def run_add_rms_norm_fp32(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    threads=None,
    rows=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(s * rsqrt(mean(s^2) + eps) * weight[N]), one cast after the product."""


@_launches("zero_centred")
def run_add_rms_norm_gemma(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    threads=None,
    rows=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(s * rsqrt(mean(s^2) + eps) * (1 + weight[N])), one cast at the end."""

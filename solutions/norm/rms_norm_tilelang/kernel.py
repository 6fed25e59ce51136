"""RMSNorm over the last axis in TileLang: a group of warps, or a part of one, reads a row once and keeps it in registers."""

import functools

import tilelang
import tilelang.language as T
import torch

SHORT_THREADS = 128  # a CTA where a row needs a part of a warp


@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def rms_norm_kernel(form, N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA.

    `form` is "rounded" where the normalised value is rounded before it is multiplied by the weight, "fp32" where it is not, and
    "zero_centred" where it is not either and the factor is 1 + weight.
    """
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride", "int64"), T.dynamic("out_stride", "int64")
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
    def rms_norm(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
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
                        normed = T.cast(T.cast(values[slot, v], "float32") * r, normed_dtype)
                        result[v] = T.cast(T.cast(normed, "float32") * factor(scales[slot, v]), dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return rms_norm


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def rms_norm_short_kernel(N, dtype, vec, lanes, rows):
    """Compile for rows of N <= lanes * vec elements: `lanes` lanes of a warp (a power of two) have `rows` rows each.

    With 32 lanes for every row, those beyond its end would idle; here they work on other rows.
    """
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride", "int64"), T.dynamic("out_stride", "int64")
    groups = SHORT_THREADS // lanes
    full = lanes * vec == N

    @T.prim_func
    def rms_norm_short(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, groups * rows), threads=SHORT_THREADS) as block:
            T.assume(x_stride % vec == 0)  # as above
            T.assume(out_stride % vec == 0)
            thread = T.get_thread_binding(0)
            first = block * groups * rows + thread // lanes
            column = thread % lanes * vec
            values = T.alloc_local((rows, vec), dtype)
            scales = T.alloc_local((vec,), dtype)
            result = T.alloc_local((vec,), dtype)
            total = T.alloc_local((rows,), "float32")

            for r in T.unroll(rows):
                for v in T.vectorized(vec):
                    values[r, v] = 0
                if first + r * groups < M and (full or column < N):
                    for v in T.vectorized(vec):
                        values[r, v] = x[first + r * groups, column + v]
            if full or column < N:  # asked for now, so that it arrives while the sums are reduced
                for v in T.vectorized(vec):
                    scales[v] = weight[column + v]
            for r in T.unroll(rows):
                total[r] = 0.0
                for v in T.unroll(vec):
                    total[r] += T.cast(values[r, v], "float32") * T.cast(values[r, v], "float32")
                for step in T.unroll(lanes.bit_length() - 1):
                    total[r] += T.shfl_xor(total[r], 1 << step)
                total[r] = T.rsqrt(total[r] * (1.0 / N) + eps)
            for r in T.unroll(rows):
                if first + r * groups < M and (full or column < N):
                    for v in T.unroll(vec):
                        normed = T.cast(T.cast(values[r, v], "float32") * total[r], dtype)
                        result[v] = T.cast(T.cast(normed, "float32") * T.cast(scales[v], "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[first + r * groups, column + v] = result[v]

    return rms_norm_short


@functools.cache
def kernel_for(form, N, dtype, vec, threads, rows):
    """The kernel of `threads` threads a row and `rows` rows a CTA; None: two vectors a thread, four warps a CTA at least."""
    usual = min(1024, 32 * -(-N // (2 * vec * 32)))
    threads, rows = threads or usual, rows or max(1, 128 // usual)
    return rms_norm_kernel(form, N, dtype, vec, threads, min(rows, 1024 // threads))


def _launches(form, short_lanes=0):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x, out: [M, N] with last stride 1 (any row stride); weight: [N] contiguous; T is bfloat16, float16 or float32.
    A row belongs to `threads` threads (a multiple of 32), a CTA has `rows` rows; None chooses both from N alone. A row
    that `short_lanes` threads can load at once takes no more lanes of a warp than that needs, and each of them `rows`
    rows; None is 2 where there are many.
    """

    def run(x, weight, eps, out, *, threads=None, rows=None):
        M, N = x.shape
        if M == 0:
            return
        dtype = x.dtype
        itemsize = dtype.itemsize
        # The widest power of two, at most 16 bytes, that divides the row, both strides and all addresses.
        bits = N | x.stride(0) | out.stride(0) | 16 // itemsize
        bits |= (x.data_ptr() | weight.data_ptr() | out.data_ptr()) // itemsize
        vec = bits & -bits
        if short_lanes * vec >= N:
            lanes = 1 << (-(-N // vec) - 1).bit_length()
            rows = rows or (2 if M >= 4096 else 1)
            rms_norm_short_kernel(N, dtype, vec, lanes, rows)(x, weight, eps, out)
            return
        kernel_for(form, N, dtype, vec, threads, rows)(x, weight, eps, out)

    return lambda declared: run


@_launches("rounded", short_lanes=32)
def run_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, threads=None, rows=None):
    """out[M, N] = T(T(x[M, N] * rsqrt(mean(x^2) + eps)) * weight[N]), sums in float32."""


@_launches("fp32")
def run_rms_norm_fp32(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, threads=None, rows=None):
    """out[M, N] = T(x[M, N] * rsqrt(mean(x^2) + eps) * weight[N]), float32 up to the one cast to T."""


@_launches("zero_centred")
def run_rms_norm_gemma(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, threads=None, rows=None
):
    """out[M, N] = T(x[M, N] * rsqrt(mean(x^2) + eps) * (1 + weight[N])), float32 up to the one cast to T."""

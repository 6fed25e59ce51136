"""(up + 1) * gate * sigmoid(alpha * gate) of alternating columns, in TileLang: 16 bytes a load, no shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def swiglu_oai_kernel(I, dtype, vec, threads, repeat):
    """Compile for I output columns: a thread makes one vector of `vec` outputs in each of `repeat` rows."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    vectors = -(-I // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal

    @T.prim_func
    def swiglu_oai(
        x: T.StridedTensor((M, 2 * I), (x_stride, 1), dtype),
        alpha: T.float32,
        limit: T.float32,
        out: T.StridedTensor((M, I), (out_stride, 1), dtype),
    ):
        # Column blocks vary fastest, so neighbouring CTAs read neighbouring memory.
        with T.Kernel(T.ceildiv(M, rows * repeat) * blocks, threads=(columns, rows)) as block:
            row_block = block // blocks
            column_block = block % blocks
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(out_stride % vec == 0)
            column = (column_block * columns + T.get_thread_binding(0)) * vec
            first_row = row_block * (rows * repeat) + T.get_thread_binding(1)
            pairs = T.alloc_local((repeat, 2 * vec), dtype)
            result = T.alloc_local((vec,), dtype)

            if column < I:
                for i in T.unroll(repeat):  # all loads first: they overlap
                    if first_row + i * rows < M:
                        for v in T.vectorized(vec):
                            pairs[i, v] = x[first_row + i * rows, 2 * column + v]
                        for v in T.vectorized(vec):
                            pairs[i, vec + v] = x[first_row + i * rows, 2 * column + vec + v]
                for i in T.unroll(repeat):
                    if first_row + i * rows < M:
                        for v in T.unroll(vec):
                            # Selections and not minima, so that NaN stays NaN.
                            given = T.cast(pairs[i, 2 * v], "float32")
                            g = T.Select(given > limit, limit, given)
                            raw = T.cast(pairs[i, 2 * v + 1], "float32")
                            u = T.Select(raw > limit, limit, T.Select(raw < -limit, -limit, raw))
                            scaled = -alpha * g
                            glu = g / (1.0 + T.exp(scaled)) if exact else g * T.fast_rcp(1.0 + T.__exp(scaled))
                            result[v] = T.cast((u + 1.0) * glu, dtype)
                        for v in T.vectorized(vec):
                            out[first_row + i * rows, column + v] = result[v]

    return swiglu_oai


def run(x, alpha, limit, out, *, threads=256, repeat=1):
    """out = T((u + 1) * g * sigmoid(alpha * g)), g = min(x[:, 0::2], limit), u = clamp(x[:, 1::2], -limit, limit).

    x: [M, 2 * I], out: [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32; float32 inside, one
    rounding. A CTA has `threads` threads along the row (short rows share a CTA), each of which makes one vector in
    `repeat` rows, out of two vectors of x.
    """
    M, I = out.shape
    if M == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the rows, both strides and all addresses.
    bits = I | x.stride(0) | out.stride(0) | (x.data_ptr() | out.data_ptr()) // itemsize | 16 // itemsize
    vec = bits & -bits
    swiglu_oai_kernel(I, dtype, vec, threads, repeat)(x, float(alpha), float(limit), out)

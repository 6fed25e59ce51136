"""Gated activations of clamped operands, in halves of each row or in alternating columns, in TileLang: 16 bytes a load."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def clamped_swiglu_kernel(I, dtype, vec, threads, repeat, oai):
    """Compile for I output columns: a thread makes one vector of `vec` outputs in each of `repeat` rows, out of two of x."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    vectors = -(-I // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal

    @T.prim_func
    def clamped_swiglu(
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
            # Two vectors of x: gates and what they multiply, or pairs of both.
            given = T.alloc_local((repeat, 2 * vec), dtype)
            result = T.alloc_local((vec,), dtype)

            if column < I:
                for i in T.unroll(repeat):  # all loads first: they overlap
                    if first_row + i * rows < M:
                        for v in T.vectorized(vec):
                            given[i, v] = x[first_row + i * rows, (2 * column if oai else column) + v]
                        for v in T.vectorized(vec):
                            given[i, vec + v] = x[first_row + i * rows, (2 * column + vec if oai else I + column) + v]
                for i in T.unroll(repeat):
                    if first_row + i * rows < M:
                        for v in T.unroll(vec):
                            # Selections and not minima, so that NaN stays NaN.
                            gate = T.cast(given[i, 2 * v if oai else v], "float32")
                            g = T.Select(gate > limit, limit, gate)
                            up = T.cast(given[i, 2 * v + 1 if oai else vec + v], "float32")
                            u = T.Select(up > limit, limit, T.Select(up < -limit, -limit, up))
                            scaled = -alpha * g if oai else -g
                            glu = g / (1.0 + T.exp(scaled)) if exact else g * T.fast_rcp(1.0 + T.__exp(scaled))
                            result[v] = T.cast(
                                (u + 1.0) * glu if oai else T.cast(T.cast(glu, dtype), "float32") * u, dtype
                            )
                        for v in T.vectorized(vec):
                            out[first_row + i * rows, column + v] = result[v]

    return clamped_swiglu


def _launch(x, alpha, limit, oai, out, threads, repeat):
    """A CTA has `threads` threads along the row (short rows share a CTA), each of which makes one vector in `repeat` rows."""
    M, I = out.shape
    if M == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the rows or their halves, both strides and all addresses.
    bits = I | x.stride(0) | out.stride(0) | (x.data_ptr() | out.data_ptr()) // itemsize | 16 // itemsize
    clamped_swiglu_kernel(I, dtype, bits & -bits, threads, repeat, oai)(x, float(alpha), float(limit), out)


def run_swiglu_clamp(x, limit, out, *, threads=256, repeat=1):
    """out = T(T(silu(min(x[:, :I], limit))) * clamp(x[:, I:], -limit, limit)), in float32 between the two roundings.

    x: [M, 2 * I], out: [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32. For 16-bit T, silu below -87
    gives -0 where float32 holds less than 1e-36 in magnitude.
    """
    _launch(x, 1.0, limit, False, out, threads, repeat)


def run_swiglu_oai(x, alpha, limit, out, *, threads=256, repeat=1):
    """out = T((u + 1) * g * sigmoid(alpha * g)), g = min(x[:, 0::2], limit), u = clamp(x[:, 1::2], -limit, limit).

    x: [M, 2 * I], out: [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32; float32 inside, one rounding.
    """
    _launch(x, alpha, limit, True, out, threads, repeat)

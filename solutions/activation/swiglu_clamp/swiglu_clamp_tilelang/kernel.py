"""Clamped silu(gate) * up over a packed [gate | up] tensor, in TileLang: 16 bytes a thread and load, no shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def swiglu_clamp_kernel(I, dtype, vec, threads, repeat):
    """Compile for I output columns: a thread makes one vector of `vec` outputs in each of `repeat` rows."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    vectors = -(-I // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal

    @T.prim_func
    def swiglu_clamp(
        x: T.StridedTensor((M, 2 * I), (x_stride, 1), dtype),
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
            gate = T.alloc_local((repeat, vec), dtype)
            up = T.alloc_local((repeat, vec), dtype)
            silu = T.alloc_local((vec,), dtype)
            result = T.alloc_local((vec,), dtype)

            if column < I:
                for i in T.unroll(repeat):  # all loads first: they overlap
                    if first_row + i * rows < M:
                        for v in T.vectorized(vec):
                            gate[i, v] = x[first_row + i * rows, column + v]
                        for v in T.vectorized(vec):
                            up[i, v] = x[first_row + i * rows, I + column + v]
                for i in T.unroll(repeat):
                    if first_row + i * rows < M:
                        for v in T.unroll(vec):
                            # Selections and not minima, so that NaN stays NaN.
                            given = T.cast(gate[i, v], "float32")
                            g = T.Select(given > limit, limit, given)
                            silu[v] = T.cast(
                                g / (1.0 + T.exp(-g)) if exact else g * T.fast_rcp(1.0 + T.__exp(-g)), dtype
                            )
                        for v in T.unroll(vec):
                            raw = T.cast(up[i, v], "float32")
                            u = T.Select(raw > limit, limit, T.Select(raw < -limit, -limit, raw))
                            result[v] = T.cast(T.cast(silu[v], "float32") * u, dtype)
                        for v in T.vectorized(vec):
                            out[first_row + i * rows, column + v] = result[v]

    return swiglu_clamp


def run(x, limit, out, *, threads=256, repeat=1):
    """out = T(T(silu(min(x[:, :I], limit))) * clamp(x[:, I:], -limit, limit)), in float32 between the two roundings.

    x: [M, 2 * I], out: [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32. A CTA has `threads`
    threads along the row (short rows share a CTA), each of which makes one vector in `repeat` rows. For 16-bit T,
    silu below -87 gives -0 where float32 holds less than 1e-36 in magnitude.
    """
    M, I = out.shape
    if M == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides both halves, both strides and all addresses.
    bits = I | x.stride(0) | out.stride(0) | (x.data_ptr() | out.data_ptr()) // itemsize | 16 // itemsize
    vec = bits & -bits
    swiglu_clamp_kernel(I, dtype, vec, threads, repeat)(x, float(limit), out)

"""T(gelu(a)) * b, gelu in its tanh form, in TileLang: 16 bytes a thread and load, no shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

# gelu(a) = a / 2 * (1 + tanh(u)) = a / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (a + 0.044715 a^3), and exp(-2 u) is
# exp2(a * (LINEAR + CUBIC * a^2)): one exponential and one division, and no cancellation where tanh is near -1.
LINEAR = -2.302208198144325  # -2 * sqrt(2 / pi) * log2(e)
CUBIC = -0.1029432395800235  # LINEAR * 0.044715


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gelu_tanh_and_mul_kernel(I, dtype, vec, threads, repeat):
    """Compile for I columns: a thread makes one vector of `vec` outputs in each of `repeat` rows."""
    M = T.dynamic("M")
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    vectors = -(-I // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast reciprocal

    @T.prim_func
    def gelu_tanh_and_mul(
        a: T.StridedTensor((M, I), (a_stride, 1), dtype),
        b: T.StridedTensor((M, I), (b_stride, 1), dtype),
        out: T.StridedTensor((M, I), (out_stride, 1), dtype),
    ):
        # Column blocks vary fastest, so neighbouring CTAs read neighbouring memory: 87 us instead of 90 (4096 rows of
        # 14,336 values, H200).
        with T.Kernel(T.ceildiv(M, rows * repeat) * blocks, threads=(columns, rows)) as block:
            row_block = block // blocks
            column_block = block % blocks
            T.assume(a_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(b_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            column = (column_block * columns + T.get_thread_binding(0)) * vec
            first_row = row_block * (rows * repeat) + T.get_thread_binding(1)
            gate = T.alloc_local((repeat, vec), dtype)
            up = T.alloc_local((repeat, vec), dtype)
            gelu = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)

            if column < I:
                for i in T.unroll(repeat):  # all loads first: they overlap
                    if first_row + i * rows < M:
                        for v in T.vectorized(vec):
                            gate[i, v] = a[first_row + i * rows, column + v]
                        for v in T.vectorized(vec):
                            up[i, v] = b[first_row + i * rows, column + v]
                for i in T.unroll(repeat):
                    if first_row + i * rows < M:
                        for v in T.unroll(vec):
                            g = T.cast(gate[i, v], "float32")
                            divisor = 1.0 + T.exp2(g * (LINEAR + CUBIC * g * g))
                            gelu[v] = g / divisor if exact else g * T.fast_rcp(divisor)
                        for v in T.vectorized(vec):
                            rounded = T.cast(T.cast(gelu[v], dtype), "float32")
                            result[v] = T.cast(rounded * T.cast(up[i, v], "float32"), dtype)
                        for v in T.vectorized(vec):
                            out[first_row + i * rows, column + v] = result[v]

    return gelu_tanh_and_mul


def run(a, b, out, *, threads=256, repeat=1):
    """out = T(T(gelu(a)) * b): the tanh form of gelu in float32, rounded to T before the product.

    a, b, out: [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32. A CTA has `threads`
    threads along the row (short rows share a CTA), each of which makes one vector in `repeat` rows. For 16-bit T,
    gelu gives -0 where float32 holds less than 1e-37 in magnitude.
    """
    M, I = out.shape
    if M == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, the strides and all addresses.
    bits = I | a.stride(0) | b.stride(0) | out.stride(0) | 16 // itemsize
    bits |= (a.data_ptr() | b.data_ptr() | out.data_ptr()) // itemsize
    vec = bits & -bits
    gelu_tanh_and_mul_kernel(I, dtype, vec, threads, repeat)(a, b, out)

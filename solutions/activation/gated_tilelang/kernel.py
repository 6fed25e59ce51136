"""Gated activations in TileLang, of halves of each row or of two tensors: 16 bytes a thread and load, no shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

# gelu(a) = a / 2 * (1 + tanh(u)) = a / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (a + 0.044715 a^3), and exp(-2 u) is
# exp2(a * (LINEAR + CUBIC * a^2)): one exponential and one division, and no cancellation where tanh is near -1.
LINEAR = -2.302208198144325  # -2 * sqrt(2 / pi) * log2(e)
CUBIC = -0.1029432395800235  # LINEAR * 0.044715


@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gated_kernel(activation, I, dtype, vec, threads, repeat):
    """Compile for I output columns: a thread makes one vector of `vec` outputs in each of `repeat` rows.

    `activation` is "silu" or "gelu_tanh" of one tensor, rounded before the product with another; None is SiLU of the first half
    of each row, not rounded before the product with the second.
    """
    M = T.dynamic("M")
    vectors = -(-I // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal
    activated_dtype = dtype if activation else "float32"

    def activated(g):
        if activation == "gelu_tanh":
            divisor = 1.0 + T.exp2(g * (LINEAR + CUBIC * g * g))
        else:
            divisor = 1.0 + (T.exp(-g) if exact else T.__exp(-g))
        return g / divisor if exact else g * T.fast_rcp(divisor)

    @T.macro
    def multiply_tile(a, b, first_up, out, block):
        """out = activated(a) * b[:, first_up:]."""
        row_block = block // blocks
        column_block = block % blocks
        column = (column_block * columns + T.get_thread_binding(0)) * vec
        first_row = row_block * (rows * repeat) + T.get_thread_binding(1)
        gate = T.alloc_local((repeat, vec), dtype)
        up = T.alloc_local((repeat, vec), dtype)
        product = T.alloc_local((vec,), "float32")
        result = T.alloc_local((vec,), dtype)

        if column < I:
            for i in T.unroll(repeat):  # all loads first: they overlap
                if first_row + i * rows < M:
                    for v in T.vectorized(vec):
                        gate[i, v] = a[first_row + i * rows, column + v]
                    for v in T.vectorized(vec):
                        up[i, v] = b[first_row + i * rows, first_up + column + v]
            for i in T.unroll(repeat):
                if first_row + i * rows < M:
                    for v in T.unroll(vec):
                        g = T.cast(gate[i, v], "float32")
                        product[v] = activated(g)
                    for v in T.vectorized(vec):
                        rounded = T.cast(T.cast(product[v], activated_dtype), "float32")
                        result[v] = T.cast(rounded * T.cast(up[i, v], "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[first_row + i * rows, column + v] = result[v]

    if activation is None:
        x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")

        @T.prim_func
        def gated_halves(
            x: T.StridedTensor((M, 2 * I), (x_stride, 1), dtype),
            out: T.StridedTensor((M, I), (out_stride, 1), dtype),
        ):
            # Column blocks vary fastest, so neighbouring CTAs read neighbouring memory: 87 us instead of 90 (4096 rows of
            # 14,336 values, H200).
            with T.Kernel(T.ceildiv(M, rows * repeat) * blocks, threads=(columns, rows)) as block:
                T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
                T.assume(out_stride % vec == 0)
                multiply_tile(x, x, I, out, block)

        return gated_halves

    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")

    @T.prim_func
    def gated_pair(
        a: T.StridedTensor((M, I), (a_stride, 1), dtype),
        b: T.StridedTensor((M, I), (b_stride, 1), dtype),
        out: T.StridedTensor((M, I), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows * repeat) * blocks, threads=(columns, rows)) as block:
            T.assume(a_stride % vec == 0)  # as above
            T.assume(b_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            multiply_tile(a, b, 0, out, block)

    return gated_pair


def _launches(activation):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x: [M, 2 * I], a, b, out: [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32. A CTA has
    `threads` threads along the row (short rows share a CTA), each of which makes one vector in `repeat` rows.
    """
    kernel_for = functools.cache(functools.partial(gated_kernel, activation))

    def run(a, b, out=None, *, threads=256, repeat=1):  # (x, out) or (a, b, out): the second has the shape of out
        M, I = b.shape
        if M == 0:
            return
        dtype = b.dtype
        itemsize = dtype.itemsize
        # The widest power of two, at most 16 bytes, that divides the columns, the strides and all addresses.
        bits = I | a.stride(0) | b.stride(0) | 16 // itemsize
        if out is None:
            bits |= (a.data_ptr() | b.data_ptr()) // itemsize
            kernel_for(I, dtype, bits & -bits, threads, repeat)(a, b)
            return
        bits |= out.stride(0) | (a.data_ptr() | b.data_ptr() | out.data_ptr()) // itemsize
        kernel_for(I, dtype, bits & -bits, threads, repeat)(a, b, out)

    return lambda declared: run


@_launches(None)
def run_silu_and_mul(x, out, *, threads=256, repeat=1):
    """out = T(silu(x[:, :I]) * x[:, I:]), computed in float32 and rounded once; silu(v) = v / (1 + exp(-v)).

    For 16-bit T, silu below -87 gives -0 where float32 holds less than 1e-36 in magnitude.
    """


@_launches("silu")
def run_swiglu(a, b, out, *, threads=256, repeat=1):
    """out = T(T(silu(a)) * b): silu(v) = v / (1 + exp(-v)) in float32, rounded to T before the product.

    For 16-bit T, silu below -87 gives -0 where float32 holds less than 1e-36 in magnitude.
    """


@_launches("gelu_tanh")
def run_gelu_tanh_and_mul(a, b, out, *, threads=256, repeat=1):
    """out = T(T(gelu(a)) * b): the tanh form of gelu in float32, rounded to T before the product.

    For 16-bit T, gelu gives -0 where float32 holds less than 1e-37 in magnitude.
    """

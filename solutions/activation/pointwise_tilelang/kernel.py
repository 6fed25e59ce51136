"""Activations of MLPs without a gate, in TileLang: 16 bytes a thread and load, no shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

MINUS_LOG2_E = -1.4426950408889634
ROOT_HALF = 0.7071067811865476
# tanh(u) = 2 sigmoid(2 u) - 1, so the tanh form of GELU is x * sigmoid(x * (LINEAR + CUBIC * x^2)).
LINEAR, CUBIC = 1.5957691216057308, 0.07135481282696677
QUICK = 1.702
# -log2 of the normal distribution below -a, for a >= 0: a polynomial from its highest power on. The distribution is then
# right to 1.2e-4 of itself up to a = 5.2; the polynomial grows without bound.
LOWER_TAIL = (
    5.383534103556255e-07,
    -2.793161195929273e-05,
    0.0005913092970659742,
    -0.0068295334932924326,
    0.04972661171681173,
    0.4635307453964969,
    1.1489743534111536,
    1.0001648380943793,
)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def pointwise_kernel(function, I, dtype, vec, threads, repeat):
    """Compile for I columns: a thread makes one vector of `vec` outputs in each of `repeat` rows."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    vectors = -(-I // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the shorter forms

    def logistic(x, slope):
        if exact:
            return x / (1.0 + T.exp(-slope))
        return x * T.fast_rcp(1.0 + T.exp2(slope * MINUS_LOG2_E))

    def activated(x):
        if function == "relu_squared":
            kept = T.if_then_else(x < 0.0, 0.0, x)  # NaN stays
            return kept * kept
        if function == "quick_gelu":
            return logistic(x, QUICK * x)
        if function == "gelu_tanh":
            return logistic(x, x * (LINEAR + CUBIC * x * x))
        return 0.5 * x * (1.0 + T.erf(x * ROOT_HALF))

    def minus_log2_tail(distance):
        power = T.float32(LOWER_TAIL[0])
        for coefficient in LOWER_TAIL[1:]:
            power = power * distance + T.float32(coefficient)
        return power

    @T.prim_func
    def pointwise(
        x: T.StridedTensor((M, I), (x_stride, 1), dtype),
        out: T.StridedTensor((M, I), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows * repeat) * blocks, threads=(columns, rows)) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(out_stride % vec == 0)
            # Column blocks vary fastest, so neighbouring CTAs read neighbouring memory.
            column = (block % blocks * columns + T.get_thread_binding(0)) * vec
            first_row = block // blocks * (rows * repeat) + T.get_thread_binding(1)
            values = T.alloc_local((repeat, vec), dtype)
            below = T.alloc_local((vec,), "float32")  # memory, because an expression would be written out at each use
            result = T.alloc_local((vec,), dtype)

            if column < I:
                for i in T.unroll(repeat):  # all loads first: they overlap
                    if first_row + i * rows < M:
                        for v in T.vectorized(vec):
                            values[i, v] = x[first_row + i * rows, column + v]
                for i in T.unroll(repeat):
                    if first_row + i * rows < M:
                        for v in T.unroll(vec):
                            value = T.cast(values[i, v], "float32")
                            if function == "gelu" and not exact:
                                below[v] = T.exp2(-minus_log2_tail(T.abs(value)))
                                share = T.if_then_else(value > 0.0, 1.0 - below[v], below[v])
                                result[v] = T.cast(value * share, dtype)
                            else:
                                result[v] = T.cast(activated(value), dtype)
                        for v in T.vectorized(vec):
                            out[first_row + i * rows, column + v] = result[v]

    return pointwise


def _launches(function):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x, out: [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32. A CTA has `threads` threads along the
    row (short rows share a CTA), each of which makes one vector in `repeat` rows.
    """

    def run(x, out, *, threads=256, repeat=None):
        M, I = out.shape
        if M == 0:
            return
        dtype = out.dtype
        itemsize = dtype.itemsize
        # The widest power of two, at most 16 bytes, that divides the columns, the strides and all addresses.
        bits = I | x.stride(0) | out.stride(0) | 16 // itemsize
        bits |= (x.data_ptr() | out.data_ptr()) // itemsize
        repeat = repeat or (2 if M * I >= 1 << 20 else 1)
        pointwise_kernel(function, I, dtype, bits & -bits, threads, repeat)(x, out)

    return lambda declared: run


@_launches("gelu")
def run_gelu(x: torch.Tensor, out: torch.Tensor, *, threads=256, repeat=None):
    """out = T(x * Phi(x)), float32 inside."""


@_launches("gelu_tanh")
def run_gelu_tanh(x: torch.Tensor, out: torch.Tensor, *, threads=256, repeat=None):
    """out = T(x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2), float32 inside, for gelu_tanh and gelu_new."""


@_launches("quick_gelu")
def run_quick_gelu(x: torch.Tensor, out: torch.Tensor, *, threads=256, repeat=None):
    """out = T(x * sigmoid(1.702 x)), float32 inside."""


@_launches("relu_squared")
def run_relu_squared(x: torch.Tensor, out: torch.Tensor, *, threads=256, repeat=None):
    """out = T(max(x, 0)^2), float32 inside."""

"""The gradients of activations of MLPs without a gate, in TileLang: 16 bytes a thread and load, no shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

LOG2_E = 1.4426950408889634
ROOT_HALF = 0.7071067811865476
DENSITY_AT_0 = 0.3989422804014327  # 1 / sqrt(2 pi)
# tanh(u) = 2 sigmoid(2 u) - 1, so the tanh form of GELU is x * sigmoid(x * (LINEAR + CUBIC * x^2)).
LINEAR, CUBIC = 1.5957691216057308, 0.07135481282696677
QUICK = 1.702


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def pointwise_backward_kernel(function, I, dtype, vec, threads, repeat):
    """Compile for I columns: a thread makes one vector of `vec` gradients in each of `repeat` rows."""
    M = T.dynamic("M")
    x_stride, grad_out_stride, grad_x_stride = T.dynamic("x_stride grad_out_stride grad_x_stride", "int64")
    vectors = -(-I // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the shorter forms

    def slope(x, factor):
        return QUICK if function == "quick_gelu" else LINEAR + factor * CUBIC * x * x

    def exponential(power):
        return T.exp(power) if exact else T.exp2(power * LOG2_E)

    def share_of(x):
        if function == "gelu":
            return 0.5 * (1.0 + T.erf(x * ROOT_HALF))
        divisor = 1.0 + exponential(-slope(x, 1.0) * x)  # inf makes the share 0
        return 1.0 / divisor if exact else T.fast_rcp(divisor)

    def derivative(x, share):
        if function == "gelu":
            return share + x * (DENSITY_AT_0 * exponential(-0.5 * x * x))
        # The cube of a large x would be infinite, and times 0 no number.
        return share + x * (share * (1.0 - share)) * slope(x, 3.0)

    @T.prim_func
    def pointwise_backward(
        x: T.StridedTensor((M, I), (x_stride, 1), dtype),
        grad_out: T.StridedTensor((M, I), (grad_out_stride, 1), dtype),
        grad_x: T.StridedTensor((M, I), (grad_x_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows * repeat) * blocks, threads=(columns, rows)) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(grad_out_stride % vec == 0)
            T.assume(grad_x_stride % vec == 0)
            # Column blocks vary fastest, so neighbouring CTAs read neighbouring memory.
            column = (block % blocks * columns + T.get_thread_binding(0)) * vec
            first_row = block // blocks * (rows * repeat) + T.get_thread_binding(1)
            values = T.alloc_local((repeat, vec), dtype)
            grads = T.alloc_local((repeat, vec), dtype)
            share = T.alloc_local((vec,), "float32")  # memory, because an expression would be written out at each use
            result = T.alloc_local((vec,), dtype)

            if column < I:
                for i in T.unroll(repeat):  # all loads first: they overlap
                    if first_row + i * rows < M:
                        for v in T.vectorized(vec):
                            values[i, v] = x[first_row + i * rows, column + v]
                        for v in T.vectorized(vec):
                            grads[i, v] = grad_out[first_row + i * rows, column + v]
                for i in T.unroll(repeat):
                    if first_row + i * rows < M:
                        for v in T.unroll(vec):
                            value = T.cast(values[i, v], "float32")
                            grad = T.cast(grads[i, v], "float32")
                            if function == "relu_squared":
                                # NaN stays; 0 also if the gradient is infinite.
                                result[v] = T.cast(T.if_then_else(value <= 0.0, 0.0, grad * (2.0 * value)), dtype)
                            else:
                                share[v] = share_of(value)
                                result[v] = T.cast(grad * derivative(value, share[v]), dtype)
                        for v in T.vectorized(vec):
                            grad_x[first_row + i * rows, column + v] = result[v]

    return pointwise_backward


def _launches(function):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x, grad_out, grad_x: [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32. A CTA has `threads` threads
    along the row (short rows share a CTA), each of which makes one vector in `repeat` rows.
    """

    def run(x, grad_out, grad_x, *, threads=256, repeat=None):
        M, I = grad_x.shape
        if M == 0:
            return
        dtype = grad_x.dtype
        itemsize = dtype.itemsize
        # The widest power of two, at most 16 bytes, that divides the columns, the strides and all addresses.
        bits = I | x.stride(0) | grad_out.stride(0) | grad_x.stride(0) | 16 // itemsize
        bits |= (x.data_ptr() | grad_out.data_ptr() | grad_x.data_ptr()) // itemsize
        repeat = repeat or (2 if M * I >= 1 << 20 else 1)
        pointwise_backward_kernel(function, I, dtype, bits & -bits, threads, repeat)(x, grad_out, grad_x)

    return lambda declared: run


@_launches("gelu")
def run_gelu_backward(x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, threads=256, repeat=None):
    """grad_x = T(grad_out * (Phi(x) + x * phi(x))), float32 inside."""


@_launches("gelu_tanh")
def run_gelu_tanh_backward(x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, threads=256, repeat=None):
    """grad_x = T(grad_out * the derivative of GELU's tanh form), float32 inside, for gelu_tanh and gelu_new."""


@_launches("quick_gelu")
def run_quick_gelu_backward(x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, threads=256, repeat=None):
    """grad_x = T(grad_out * (s + 1.702 x s (1 - s))), s = sigmoid(1.702 x), float32 inside."""


@_launches("relu_squared")
def run_relu_squared_backward(
    x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, threads=256, repeat=None
):
    """grad_x = T(grad_out * 2 max(x, 0)), float32 inside."""

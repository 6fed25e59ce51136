"""The gradients of activations of MLPs without a gate, Triton: the Definitions differ in one constant, the function."""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
# tanh(u) = 2 sigmoid(2 u) - 1, so the tanh form of GELU is x * sigmoid(x * (LINEAR + CUBIC * x^2)).
LINEAR = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.07135481282696677)
QUICK = tl.constexpr(1.702)


@triton.jit
def _derivative(x, FUNCTION: tl.constexpr, EXACT: tl.constexpr):
    """Return the derivative at x in fp32; a cast to 16 bits hides the last bits of the shorter exponential."""
    if FUNCTION == "relu_squared":
        return 2.0 * tl.where(x < 0.0, 0.0, x)  # NaN stays
    if FUNCTION == "gelu":
        power = tl.exp(-0.5 * x * x) if EXACT else tl.exp2(x * x * (-0.5 * LOG2_E))
        return 0.5 * (1.0 + tl.erf(x * ROOT_HALF)) + x * (DENSITY_AT_0 * power)
    slope = QUICK if FUNCTION == "quick_gelu" else LINEAR + CUBIC * x * x
    steepness = QUICK if FUNCTION == "quick_gelu" else LINEAR + 3.0 * CUBIC * x * x
    # An exponential that overflows to inf makes the share 0.
    power = tl.exp(-slope * x) if EXACT else tl.exp2(slope * x * -LOG2_E)
    share = 1.0 / (1.0 + power)
    # The cube of a large x would be infinite, and times 0 no number.
    return share + x * (share * (1.0 - share)) * steepness


@triton.jit(do_not_specialize=["M"])
def _pointwise_backward_tile(
    x_ptr,
    grad_out_ptr,
    grad_x_ptr,
    x_stride,
    grad_out_stride,
    grad_x_stride,
    M,
    I: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = grad_x_ptr.dtype.element_ty
    # Column blocks vary fastest, so neighbouring programs read neighbouring memory.
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < I)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    grad = tl.load(
        grad_out_ptr + rows * grad_out_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    if FUNCTION == "relu_squared":
        grad_x = tl.where(x <= 0.0, 0.0, grad * _derivative(x, FUNCTION, True))  # 0, also if the gradient is infinite
    else:
        grad_x = grad * _derivative(x, FUNCTION, dtype == tl.float32)
    tl.store(grad_x_ptr + rows * grad_x_stride + cols, grad_x.to(dtype), mask=mask)


def _launches(function):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    Shapes: x, grad_out, grad_x [M, I] with unit last stride and any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a flat grid of tiles of BLOCK values; a tile is part of one row when I is large and several whole rows when I is
    small.
    BLOCK = None: 2048 values a program, or 512 where 2048 would leave most of the machine idle.
    num_warps = None: 16 values a thread, 8 for 512.
    """

    def run(x, grad_out, grad_x, *, BLOCK=None, num_warps=None):
        M, I = grad_x.shape
        if M == 0 or I == 0:
            return
        block = BLOCK or (2048 if M * I >= 1 << 19 else 512)
        warps = num_warps or (4 if block >= 1024 else 2)
        block_n = min(block, 1 << (I - 1).bit_length())  # triton.next_power_of_2 costs microseconds a call
        block_m = block // block_n
        grid = ((M + block_m - 1) // block_m) * ((I + block_n - 1) // block_n)
        strides = x.stride(0), grad_out.stride(0), grad_x.stride(0)
        _pointwise_backward_tile[(grid,)](
            x, grad_out, grad_x, *strides, M, I, function, block_m, block_n, num_warps=warps
        )

    return lambda declared: run


@_launches("gelu")
def run_gelu_backward(x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, BLOCK=None, num_warps=None):
    """grad_x = T(grad_out * (Phi(x) + x * phi(x))), fp32 inside."""


@_launches("gelu_tanh")
def run_gelu_tanh_backward(
    x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, BLOCK=None, num_warps=None
):
    """grad_x = T(grad_out * the derivative of GELU's tanh form), fp32 inside, for gelu_tanh and gelu_new."""


@_launches("quick_gelu")
def run_quick_gelu_backward(
    x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, BLOCK=None, num_warps=None
):
    """grad_x = T(grad_out * (s + 1.702 x s (1 - s))), s = sigmoid(1.702 x), fp32 inside."""


@_launches("relu_squared")
def run_relu_squared_backward(
    x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, BLOCK=None, num_warps=None
):
    """grad_x = T(grad_out * 2 max(x, 0)), fp32 inside."""

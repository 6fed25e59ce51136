"""The gradients of activations of MLPs without a gate, cuTile: the Definitions differ in one constant, the function."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that lanes beyond the row cost nothing. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

LOG2_E = 1.4426950408889634
DENSITY_AT_0 = 0.3989422804014327  # 1 / sqrt(2 pi)
# tanh(u) = 2 sigmoid(2 u) - 1, so the tanh form of GELU is x * sigmoid(x * (LINEAR + CUBIC * x^2)).
LINEAR, CUBIC = 1.5957691216057308, 0.07135481282696677
GELU, GELU_TANH, QUICK_GELU, RELU_SQUARED = 0, 1, 2, 3


@ct.function
def _gelu_derivative(x):
    """Return Phi(x) + x phi(x); Phi to 7.5e-8 by Abramowitz and Stegun's rational form 7.1.26 of erfc."""
    a = ct.abs(x)
    t = ct.truediv(1.0, 1.0 + 0.23164188926 * a, rounding_mode=ct.RoundingMode.FULL)  # 0.3275911 / sqrt(2)
    q = 0.5307027145 * t - 0.7265760135
    q = q * t + 0.7107068705
    q = q * t - 0.142248368
    q = q * t + 0.127414796
    power = ct.exp(-0.5 * a * a)
    below = q * t * power
    return ct.where(x > 0.0, 1.0 - below, below) + x * (DENSITY_AT_0 * power)


@ct.function
def _sigmoid(slope, out):
    """Return sigmoid(slope); an exponential that overflows to inf makes it 0."""
    if out.dtype == ct.float32:
        # FULL division is within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
        return ct.truediv(1.0, 1.0 + ct.exp(-slope), rounding_mode=ct.RoundingMode.FULL)
    # The cast hides the last bits.
    power = ct.exp2(slope * -LOG2_E, flush_to_zero=True)
    return ct.truediv(1.0, 1.0 + power, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


@ct.function
def _gradient(x, grad, out, FUNCTION: Int):
    if FUNCTION == RELU_SQUARED:
        return ct.where(x <= 0.0, 0.0, grad * (2.0 * x))  # NaN stays; 0 also if the gradient is infinite
    if FUNCTION == GELU:
        return grad * _gelu_derivative(x)
    if FUNCTION == QUICK_GELU:
        share = _sigmoid(1.702 * x, out)
        return grad * (share + 1.702 * x * (share * (1.0 - share)))
    share = _sigmoid(x * (LINEAR + CUBIC * x * x), out)
    # The cube of a large x would be infinite, and times 0 no number.
    return grad * (share + x * (share * (1.0 - share)) * (LINEAR + 3.0 * CUBIC * x * x))


@ct.kernel
def _pointwise_backward(x: Rows, grad_out: Rows, grad_x: Rows, FUNCTION: Int, TILE_M: Int, TILE_N: Int):
    m, n = grad_x.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block no row is out of bounds
        inside = inside & (rows < m)
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    grad = ct.gather(grad_out, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    result = _gradient(values, grad, grad_x, FUNCTION)
    ct.scatter(grad_x, (rows, cols), result.astype(grad_x.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _pointwise_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _launches(function):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x, grad_out and grad_x are T = bf16, fp16 or fp32, and rows may be further apart than I elements. A block computes TILE
    gradients: a part of one row, or several rows when a row is shorter than TILE. None chooses 2048 (1024 in fp32), or half of
    it while that would leave multiprocessors idle.
    """

    def run(x, grad_out, grad_x, *, TILE=None, WARPS=4):
        m, n = grad_x.shape
        if m == 0:
            return
        if TILE is None:
            TILE = 4096 // grad_x.element_size()
            if m * n < 256 * TILE:
                TILE //= 2
        tile_n = min(TILE, 1 << (n - 1).bit_length())
        tile_m = TILE // tile_n
        grid = (-(-m // tile_m) * -(-n // tile_n), 1, 1)
        arguments = (x, grad_out, grad_x, function, tile_m, tile_n)
        ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], arguments)

    return lambda declared: run


@_launches(GELU)
def run_gelu_backward(
    x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """grad_x = T(grad_out * (Phi(x) + x * phi(x))), fp32 inside."""


@_launches(GELU_TANH)
def run_gelu_tanh_backward(
    x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """grad_x = T(grad_out * the derivative of GELU's tanh form), fp32 inside, for gelu_tanh and gelu_new."""


@_launches(QUICK_GELU)
def run_quick_gelu_backward(
    x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """grad_x = T(grad_out * (s + 1.702 x s (1 - s))), s = sigmoid(1.702 x), fp32 inside."""


@_launches(RELU_SQUARED)
def run_relu_squared_backward(
    x: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """grad_x = T(grad_out * 2 max(x, 0)), fp32 inside."""

"""Activations of MLPs without a gate, cuTile: the Definitions differ in one constant, the function."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that lanes beyond the row cost nothing. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

MINUS_LOG2_E = -1.4426950408889634
GELU, GELU_TANH, QUICK_GELU, RELU_SQUARED = 0, 1, 2, 3


@ct.function
def _lower_tail(a):
    """Return the normal distribution below -a for a >= 0, to 1.2e-4 of itself up to a = 5.2.

    It is 2^-p(a), with the polynomial p fitted to its logarithm: one exponential and no division. p grows without bound.
    """
    p = 5.383534103556255e-07 * a - 2.793161195929273e-05
    p = p * a + 0.0005913092970659742
    p = p * a - 0.0068295334932924326
    p = p * a + 0.04972661171681173
    p = p * a + 0.4635307453964969
    p = p * a + 1.1489743534111536
    p = p * a + 1.0001648380943793
    return ct.exp2(-p, flush_to_zero=True)


@ct.function
def _lower_tail_fp32(a):
    """Return the normal distribution below -a for a >= 0, to 7.5e-8: Abramowitz and Stegun's rational form 7.1.26 of erfc."""
    t = ct.truediv(1.0, 1.0 + 0.23164188926 * a, rounding_mode=ct.RoundingMode.FULL)  # 0.3275911 / sqrt(2)
    q = 0.5307027145 * t - 0.7265760135
    q = q * t + 0.7107068705
    q = q * t - 0.142248368
    q = q * t + 0.127414796
    return q * t * ct.exp(-0.5 * a * a)


@ct.function
def _logistic(x, slope, out):
    """Return x * sigmoid(slope); an exponential that overflows to inf makes the quotient -0."""
    if out.dtype == ct.float32:
        # FULL division is within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
        return ct.truediv(x, 1.0 + ct.exp(-slope), rounding_mode=ct.RoundingMode.FULL)
    # The cast hides the last bits.
    power = ct.exp2(slope * MINUS_LOG2_E, flush_to_zero=True)
    return x * ct.truediv(1.0, 1.0 + power, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


@ct.function
def _activated(x, out, FUNCTION: Int):
    if FUNCTION == RELU_SQUARED:
        kept = ct.where(x < 0.0, 0.0, x)  # NaN stays
        return kept * kept
    if FUNCTION == QUICK_GELU:
        return _logistic(x, 1.702 * x, out)
    if FUNCTION == GELU_TANH:
        # tanh(u) = 2 sigmoid(2 u) - 1
        return _logistic(x, x * (1.5957691216057308 + 0.07135481282696677 * x * x), out)
    below = _lower_tail_fp32(ct.abs(x)) if out.dtype == ct.float32 else _lower_tail(ct.abs(x))
    return x * ct.where(x > 0.0, 1.0 - below, below)


@ct.kernel
def _pointwise(x: Rows, out: Rows, FUNCTION: Int, TILE_M: Int, TILE_N: Int):
    m, n = out.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block no row is out of bounds
        inside = inside & (rows < m)
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    result = _activated(values, out, FUNCTION)
    ct.scatter(out, (rows, cols), result.astype(out.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _pointwise.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _launches(function):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x and out are T = bf16, fp16 or fp32, and rows may be further apart than I elements. A block computes TILE outputs: a part
    of one row, or several rows when a row is shorter than TILE. None chooses 2048 (1024 in fp32), or half of it while that
    would leave multiprocessors idle.
    """

    def run(x, out, *, TILE=None, WARPS=4):
        m, n = out.shape
        if m == 0:
            return
        if TILE is None:
            TILE = 4096 // out.element_size()
            if m * n < 256 * TILE:
                TILE //= 2
        tile_n = min(TILE, 1 << (n - 1).bit_length())
        tile_m = TILE // tile_n
        grid = (-(-m // tile_m) * -(-n // tile_n), 1, 1)
        ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], (x, out, function, tile_m, tile_n))

    return lambda declared: run


@_launches(GELU)
def run_gelu(x: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out = T(x * Phi(x)), fp32 inside."""


@_launches(GELU_TANH)
def run_gelu_tanh(x: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out = T(x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2), fp32 inside, for gelu_tanh and gelu_new."""


@_launches(QUICK_GELU)
def run_quick_gelu(x: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out = T(x * sigmoid(1.702 x)), fp32 inside."""


@_launches(RELU_SQUARED)
def run_relu_squared(x: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out = T(max(x, 0)^2), fp32 inside."""

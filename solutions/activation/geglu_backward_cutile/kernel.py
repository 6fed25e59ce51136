"""The gradients of GELU's tanh form of one matrix times another, elementwise, rounded as autograd rounds them."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the number of tiles in a row is one too and lanes beyond the row
# cost nothing. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

# tanh(u) = 2 sigmoid(2 u) - 1, so the tanh form of GELU is a * sigmoid(a * (LINEAR + CUBIC * a^2)).
LINEAR, CUBIC = 1.5957691216057308, 0.07135481282696677


@ct.kernel
def _gelu_tanh_and_mul_backward(a: Rows, b: Rows, grad_out: Rows, grad_a: Rows, grad_b: Rows, TILE_M: Int, TILE_N: Int):
    m, n = grad_a.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block no row is out of bounds
        inside = inside & (rows < m)
    gate = ct.gather(a, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    up = ct.gather(b, (rows, cols), mask=inside, check_bounds=False)
    grad = ct.gather(grad_out, (rows, cols), mask=inside, check_bounds=False)
    # An exponential that overflows to inf makes the share 0. FULL division is within 2 ulp of fp32 and several instructions
    # shorter than the correctly rounded one.
    divisor = 1.0 + ct.exp(-gate * (LINEAR + CUBIC * gate * gate))
    share = ct.truediv(1.0, divisor, rounding_mode=ct.RoundingMode.FULL)
    activated = (gate * share).astype(grad_b.dtype)
    to_activated = (grad * up).astype(ct.float32)  # rounded to T by the product of two T
    # The cube of a large gate would be infinite, and times 0 no number.
    steepness = LINEAR + 3.0 * CUBIC * gate * gate
    to_gate = to_activated * (share + gate * (share * (1.0 - share)) * steepness)
    ct.scatter(grad_a, (rows, cols), to_gate.astype(grad_a.dtype), mask=inside, check_bounds=False)
    ct.scatter(grad_b, (rows, cols), grad * activated, mask=inside, check_bounds=False)


_KERNELS = {warps: _gelu_tanh_and_mul_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_gelu_tanh_and_mul_backward(
    a: torch.Tensor,
    b: torch.Tensor,
    grad_out: torch.Tensor,
    grad_a: torch.Tensor,
    grad_b: torch.Tensor,
    *,
    TILE: int | None = None,
    WARPS: int = 4,
) -> None:
    """grad_a = T(T(grad_out * b) * the derivative of GELU at a), grad_b = T(grad_out * T(gelu(a))), tanh form, fp32 inside.

    All [M, I] in T = bf16, fp16 or fp32; rows may be further apart than their length. A block computes TILE values of both
    gradients: a part of one row, or several rows when a row is shorter than TILE. None chooses 2048 (1024 in fp32), or half
    of it while that would leave multiprocessors idle.
    """
    m, n = grad_a.shape
    if m == 0:
        return
    if TILE is None:
        TILE = 4096 // grad_a.element_size()
        if m * n < 256 * TILE:
            TILE //= 2
    tile_n = min(TILE, 1 << (n - 1).bit_length())
    tile_m = TILE // tile_n
    grid = (-(-m // tile_m) * -(-n // tile_n), 1, 1)
    arguments = (a, b, grad_out, grad_a, grad_b, tile_m, tile_n)
    ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], arguments)

"""The output of attention times the sigmoid of its gate, cuTile."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that lanes beyond the row cost nothing. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

MINUS_LOG2_E = -1.4426950408889634


@ct.kernel
def _sigmoid_mul(x: Rows, gate: Rows, out: Rows, TILE_M: Int, TILE_N: Int):
    m, n = out.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block no row is out of bounds
        inside = inside & (rows < m)
    gates = ct.gather(gate, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False)
    if out.dtype == ct.float32:
        # FULL division is within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
        opening = ct.truediv(1.0, 1.0 + ct.exp(-gates), rounding_mode=ct.RoundingMode.FULL)
    else:  # the cast hides the last bits
        divisor = 1.0 + ct.exp2(gates * MINUS_LOG2_E, flush_to_zero=True)
        opening = ct.truediv(1.0, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    # The product of two T is rounded to T.
    ct.scatter(out, (rows, cols), values * opening.astype(out.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _sigmoid_mul.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out[M, N] = T(x * T(sigmoid(gate))); the sigmoid is fp32 inside.

    x, gate and out are T = bf16, fp16 or fp32, and rows may be further apart than N elements. A block computes TILE outputs: a
    part of one row, or several rows when a row is shorter than TILE. None chooses 2048 (1024 in fp32), or half of it while that
    would leave multiprocessors idle.
    """
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
    ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], (x, gate, out, tile_m, tile_n))

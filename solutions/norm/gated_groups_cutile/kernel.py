"""SiLU of a gate times the activation, then RMSNorm of each group of columns, in one pass; cuTile."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that aligned groups are read 16 bytes at a time.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]

MINUS_LOG2_E = -1.4426950408889634


@ct.kernel
def _gated_groups(
    x: Rows, gate: Rows, weight: Vector, out: Rows, eps: float, SIZE: Int, TILE_M: Int, TILE_G: Int
):  # fmt: skip
    m, n = x.shape
    groups = n // SIZE
    rows = ct.bid(0) // groups * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    place = ct.arange(TILE_G, dtype=ct.int32)[None, :]
    cols = ct.bid(0) % groups * SIZE + place
    inside = place < SIZE
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    # The three gathers are independent, so all are in flight before the reduction waits.
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    gates = ct.gather(gate, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    scale = ct.gather(weight, cols, mask=place < SIZE, check_bounds=False)
    # An exponential that overflows to inf for very negative gates makes the quotient -0, as in PyTorch.
    if out.dtype == ct.float32:
        # FULL division is within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
        opening = ct.truediv(gates, 1.0 + ct.exp(-gates), rounding_mode=ct.RoundingMode.FULL)
    else:  # the cast hides the last bits
        divisor = 1.0 + ct.exp2(gates * MINUS_LOG2_E, flush_to_zero=True)
        opening = ct.truediv(gates, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    opened = values * opening
    mean_square = ct.sum(opened * opened, axis=1, keepdims=True) * (1.0 / SIZE)
    normed = (opened * ct.rsqrt(mean_square + eps)).astype(out.dtype)
    ct.scatter(out, (rows, cols), normed * scale, mask=inside, check_bounds=False)


_KERNELS = {warps: _gated_groups.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    group_size: int,
    eps: float,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """out[M, N] = T(T(y * rsqrt(mean(y^2) + eps)) * weight) with y = x * silu(gate) and means over groups; fp32 inside.

    x, gate and out, whose rows may be further apart than N elements, and weight[N] are T = bf16, fp16 or fp32. A block handles a
    group of TILE_M rows with WARPS (4 or 8) warps. None: as many rows as make a tile of 2048 values, and a warp each 512.
    """
    m, n = out.shape
    if m == 0 or n == 0:
        return
    tile_g = 1 << (group_size - 1).bit_length()
    tile_m = max(1, min(TILE_M or (1 if m <= 64 else 2048 // tile_g), 16384 // tile_g))
    tile_m = 1 << (tile_m.bit_length() - 1)
    warps = WARPS or (8 if tile_m * tile_g >= 4096 else 4)
    args = (x, gate, weight, out, eps, group_size, tile_m, tile_g)
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m) * (n // group_size), 1, 1), _KERNELS[warps], args)

"""RMSNorm of each head's output, times its weight and the sigmoid of a gate, in one pass; cuTile."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]

MINUS_LOG2_E = -1.4426950408889634


@ct.kernel
def _gated_norm(x: Rows, gate: Rows, weight: Vector, out: Rows, eps: float, TILE_M: Int, TILE_N: Int):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    # The three gathers are independent, so all are in flight before the reduction waits.
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    gates = ct.gather(gate, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    scale = ct.gather(weight, cols, mask=cols < n, check_bounds=False)
    mean_square = ct.sum(values * values, axis=1, keepdims=True) * (1.0 / n)
    normed = values * ct.rsqrt(mean_square + eps) * scale.astype(ct.float32)
    # An exponential that overflows to inf for very negative gates makes the quotient 0, as in PyTorch.
    if out.dtype == ct.float32:
        # FULL division is within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
        opening = ct.truediv(1.0, 1.0 + ct.exp(-gates), rounding_mode=ct.RoundingMode.FULL)
    else:  # the cast hides the last bits
        divisor = 1.0 + ct.exp2(gates * MINUS_LOG2_E, flush_to_zero=True)
        opening = ct.truediv(1.0, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    ct.scatter(out, (rows, cols), (normed * opening).astype(out.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _gated_norm.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int = 4,
) -> None:
    """out[M, N] = T(x * rsqrt(mean(x^2) + eps) * weight * sigmoid(gate)): fp32 with one rounding to T.

    x, gate and out, whose rows may be further apart than N elements, and weight[N] are T = bf16, fp16 or fp32, N <= 16384. A
    block handles TILE_M whole rows with WARPS (4 or 8) warps. None: as many rows as make a tile of 2048 values (1024 in
    fp32), or half of it while that would leave multiprocessors idle.
    """
    m, n = out.shape
    if m == 0:
        return
    tile_n = 1 << (n - 1).bit_length()
    if TILE_M is None:
        TILE_M = max(1, 4096 // out.element_size() // tile_n)
        if m < 256 * TILE_M:
            TILE_M = max(1, TILE_M // 2)
    TILE_M = max(1, min(TILE_M, 16384 // tile_n))
    args = (x, gate, weight, out, eps, TILE_M, tile_n)
    ct.launch(torch.cuda.current_stream(), (-(-m // TILE_M), 1, 1), _KERNELS[WARPS], args)

"""(up + 1) * gate * sigmoid(alpha * gate) of clamped operands in alternating columns, one rounding."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the compiler knows whether rows are aligned for 16-byte loads and how
# many tiles a row has. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]


@ct.kernel
def _swiglu_oai(x: Rows, out: Rows, alpha: float, limit: float, TILE_M: Int, TILE_N: Int):
    m, n = out.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    first = ct.bid(0) % tiles_n * TILE_N
    cols = first + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    both = 2 * first + ct.arange(2 * TILE_N, dtype=ct.int32)[None, :]
    # Pairs are loaded as they lie, in whole vectors, and taken apart in registers.
    pairs = ct.gather(x, (rows, both), mask=(rows < m) & (both < 2 * n), check_bounds=False)
    pairs = ct.reshape(pairs.astype(ct.float32), (TILE_M, TILE_N, 2))
    gate = ct.reshape(ct.extract(pairs, (0, 0, 0), (TILE_M, TILE_N, 1)), (TILE_M, TILE_N))
    up = ct.reshape(ct.extract(pairs, (0, 0, 1), (TILE_M, TILE_N, 1)), (TILE_M, TILE_N))
    # Comparisons and not minima, so that NaN stays NaN.
    gate = ct.where(gate > limit, limit, gate)
    up = ct.where(up > limit, limit, ct.where(up < -limit, -limit, up))
    # exp overflows to inf for very negative gates and the quotient is then -0. FULL division is within 2 ulp of fp32 and
    # several instructions shorter than the correctly rounded one.
    glu = ct.truediv(gate, 1.0 + ct.exp(-alpha * gate), rounding_mode=ct.RoundingMode.FULL)
    result = ((up + 1.0) * glu).astype(out.dtype)
    ct.scatter(out, (rows, cols), result, mask=(rows < m) & (cols < n), check_bounds=False)


_KERNELS = {warps: _swiglu_oai.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """out[M, I] = T((u + 1) * g * sigmoid(alpha * g)), g = min(x[:, 0::2], limit), u = clamp(x[:, 1::2], -limit, limit).

    T = bf16, fp16 or fp32; fp32 inside, one rounding. Rows may be further apart than their length. A block computes TILE
    outputs: a part of one row, or several rows when a row is shorter than TILE. None chooses 2048 (1024 in fp32), or half
    of it while that would leave multiprocessors idle.
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
    args = (x, out, float(alpha), float(limit), tile_m, tile_n)
    ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], args)

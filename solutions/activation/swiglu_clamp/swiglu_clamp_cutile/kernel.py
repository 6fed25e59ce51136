"""SiLU of the clamped first half of each row times the clamped second half, elementwise, two roundings."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the compiler knows whether the second half is aligned for 16-byte
# loads and how many tiles a row has. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]


@ct.kernel
def _swiglu_clamp(x: Rows, out: Rows, limit: float, TILE_M: Int, TILE_N: Int):
    m, n = out.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block no row is out of bounds
        inside = inside & (rows < m)
    gate = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    up = ct.gather(x, (rows, cols + n), mask=inside, check_bounds=False).astype(ct.float32)
    # Comparisons and not minima, so that NaN stays NaN.
    gate = ct.where(gate > limit, limit, gate)
    up = ct.where(up > limit, limit, ct.where(up < -limit, -limit, up))
    # exp overflows to inf for very negative gates and the quotient is then -0, as in PyTorch. FULL division is within
    # 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
    silu = ct.truediv(gate, 1.0 + ct.exp(-gate), rounding_mode=ct.RoundingMode.FULL).astype(out.dtype)
    result = (silu.astype(ct.float32) * up).astype(out.dtype)
    ct.scatter(out, (rows, cols), result, mask=inside, check_bounds=False)


_KERNELS = {warps: _swiglu_clamp.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(x: torch.Tensor, limit: float, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out[M, I] = T(T(silu(min(x[:, :I], limit))) * clamp(x[:, I:], -limit, limit)) for x[M, 2 * I] in T = bf16, fp16 or
    fp32; fp32 between the two roundings.

    Rows may be further apart than their length. A block computes TILE outputs: a part of one row, or several rows when
    a row is shorter than TILE. None chooses 2048 (1024 in fp32), or half of it while that would leave multiprocessors
    idle.
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
    ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], (x, out, float(limit), tile_m, tile_n))

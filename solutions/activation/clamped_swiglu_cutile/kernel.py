"""Gated activations of clamped operands, in halves of each row or in alternating columns."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the compiler knows whether rows are aligned for 16-byte loads and how
# many tiles a row has. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]


@ct.kernel
def _clamped_swiglu(x: Rows, out: Rows, alpha: float, limit: float, OAI: ct.Constant[bool], TILE_M: Int, TILE_N: Int):
    m, n = out.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    first = ct.bid(0) % tiles_n * TILE_N
    cols = first + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block no row is out of bounds
        inside = inside & (rows < m)
    if OAI:  # pairs are loaded as they lie, in whole vectors, and taken apart in registers
        both = 2 * first + ct.arange(2 * TILE_N, dtype=ct.int32)[None, :]
        pairs = ct.gather(x, (rows, both), mask=(rows < m) & (both < 2 * n), check_bounds=False)
        pairs = ct.reshape(pairs.astype(ct.float32), (TILE_M, TILE_N, 2))
        gate = ct.reshape(ct.extract(pairs, (0, 0, 0), (TILE_M, TILE_N, 1)), (TILE_M, TILE_N))
        up = ct.reshape(ct.extract(pairs, (0, 0, 1), (TILE_M, TILE_N, 1)), (TILE_M, TILE_N))
    else:
        gate = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
        up = ct.gather(x, (rows, cols + n), mask=inside, check_bounds=False).astype(ct.float32)
    # Comparisons and not minima, so that NaN stays NaN.
    gate = ct.where(gate > limit, limit, gate)
    up = ct.where(up > limit, limit, ct.where(up < -limit, -limit, up))
    # exp overflows to inf for very negative gates and the quotient is then -0, as in PyTorch. FULL division is within
    # 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
    if OAI:
        glu = ct.truediv(gate, 1.0 + ct.exp(-alpha * gate), rounding_mode=ct.RoundingMode.FULL)
        result = ((up + 1.0) * glu).astype(out.dtype)
    else:
        silu = ct.truediv(gate, 1.0 + ct.exp(-gate), rounding_mode=ct.RoundingMode.FULL).astype(out.dtype)
        result = (silu.astype(ct.float32) * up).astype(out.dtype)
    ct.scatter(out, (rows, cols), result, mask=inside, check_bounds=False)


_KERNELS = {warps: _clamped_swiglu.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _launch(
    x: torch.Tensor, alpha: float, limit: float, oai: bool, out: torch.Tensor, TILE: int | None, WARPS: int
) -> None:
    """A block computes TILE outputs: a part of one row, or several rows when a row is shorter than TILE.

    Rows may be further apart than their length. None chooses 2048 (1024 in fp32), or half of it while that would leave
    multiprocessors idle.
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
    args = (x, out, float(alpha), float(limit), oai, tile_m, tile_n)
    ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], args)


def run_swiglu_clamp(
    x: torch.Tensor, limit: float, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """out[M, I] = T(T(silu(min(x[:, :I], limit))) * clamp(x[:, I:], -limit, limit)) for x[M, 2 * I] in T = bf16, fp16 or
    fp32; fp32 between the two roundings.
    """
    _launch(x, 1.0, limit, False, out, TILE, WARPS)


def run_swiglu_oai(
    x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """out[M, I] = T((u + 1) * g * sigmoid(alpha * g)), g = min(x[:, 0::2], limit), u = clamp(x[:, 1::2], -limit, limit).

    T = bf16, fp16 or fp32; fp32 inside, one rounding.
    """
    _launch(x, alpha, limit, True, out, TILE, WARPS)

"""GELU (tanh form) of one matrix times another, elementwise, with the rounding of two separate PyTorch operations."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the number of tiles in a row is one too and lanes beyond the row
# cost nothing. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

# gelu(a) = a / 2 * (1 + tanh(u)) = a / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (a + 0.044715 a^3), and exp(-2 u) is
# exp2(a * (LINEAR + CUBIC * a^2)): one exponential and one division, and no cancellation where tanh is near -1.
LINEAR = -2.302208198144325  # -2 * sqrt(2 / pi) * log2(e)
CUBIC = -0.1029432395800235  # LINEAR * 0.044715


@ct.kernel
def _gelu_tanh(a: Rows, b: Rows, out: Rows, TILE_M: Int, TILE_N: Int):
    m, n = out.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block no row is out of bounds
        inside = inside & (rows < m)
    gate = ct.gather(a, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    up = ct.gather(b, (rows, cols), mask=inside, check_bounds=False)
    # exp2 overflows to inf for very negative gates and the quotient is then -0, as in PyTorch. FULL division is within
    # 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
    exponential = ct.exp2(gate * (LINEAR + CUBIC * gate * gate))
    gelu = ct.truediv(gate, 1.0 + exponential, rounding_mode=ct.RoundingMode.FULL).astype(out.dtype)
    ct.scatter(out, (rows, cols), gelu * up, mask=inside, check_bounds=False)


_KERNELS = {warps: _gelu_tanh.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out[M, I] = T(T(gelu(a)) * b) for a[M, I], b[M, I] in T = bf16, fp16 or fp32; gelu (tanh form) is fp32 inside.

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
    ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], (a, b, out, tile_m, tile_n))

"""Matrices out of place, rows and columns exchanged, Triton."""

import torch
import triton
import triton.language as tl

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _transpose(x_ptr, out_ptr, x_batch, x_row, out_batch, out_row, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """A tile goes through registers and shared memory; both sides of it are read and written along rows."""
    across = tl.cdiv(N, TILE_N)
    tiles = tl.cdiv(M, TILE_M) * across
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    rows = (tile // across).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    cols = (tile % across).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + batch * x_batch + rows[:, None] * x_row + cols[None, :], mask=inside)
    out_ptrs = out_ptr + batch * out_batch + cols[:, None] * out_row + rows[None, :]
    tl.store(out_ptrs, tl.trans(x), mask=(cols < N)[:, None] & (rows < M)[None, :])


def run(x: torch.Tensor, out: torch.Tensor, *, TILE=None, num_warps=4):
    """out[b, n, m] = x[b, m, n], bits and not values: floats are moved as integers of their width.

    Shapes: x [B, M, N] with unit last stride and any others, out [B, N, M] likewise. TILE = None: 64 x 64, or 128 x 128 of
    bytes, so that a row of a tile is 64 bytes or more on both sides.
    """
    B, M, N = x.shape
    if x.numel() == 0:
        return
    tile = TILE or (128 if x.element_size() == 1 else 64)
    kind = _INTEGERS[x.element_size()]
    _transpose[(B * -(-M // tile) * -(-N // tile),)](
        x.view(kind),
        out.view(kind),
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        M,
        N,
        tile,
        tile,
        num_warps=num_warps,
    )

"""Matrices out of place, rows and columns exchanged, cuTile."""

import cuda.tile as ct
import torch

Int = ct.Constant[int]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@ct.kernel
def _transpose(x: ct.Array, out: ct.Array, TILE_M: Int, TILE_N: Int):
    across = ct.cdiv(x.shape[2], TILE_N)
    tiles = ct.cdiv(x.shape[1], TILE_M) * across
    batch = ct.bid(0) // tiles
    down = ct.bid(0) % tiles // across
    strip = ct.bid(0) % tiles % across
    tile = ct.load(x, (batch, down, strip), (1, TILE_M, TILE_N))
    ct.store(out, (batch, strip, down), ct.transpose(tile, 1, 2))


_KERNELS = {warps: _transpose.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(x: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out[b, n, m] = x[b, m, n], bits and not values: floats are moved as integers of their width.

    x: [B, M, N] with unit last stride and any others, out: [B, N, M] likewise. TILE = None: 64 x 64, or 128 x 128 of bytes.
    """
    B, M, N = x.shape
    if x.numel() == 0:
        return
    tile = TILE or (128 if x.element_size() == 1 else 64)
    kind = _INTEGERS[x.element_size()]
    grid = (B * -(-M // tile) * -(-N // tile), 1, 1)
    ct.launch(torch.cuda.current_stream(), grid, _KERNELS[WARPS], (x.view(kind), out.view(kind), tile, tile))

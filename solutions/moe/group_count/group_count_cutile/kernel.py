"""How often each group occurs: ids are compared with every group, which needs neither shared memory nor atomics."""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

ONE_BLOCK = 8  # up to this many tiles of ids are counted in one launch
MOST_BLOCKS = 128
TILE_E = 64


@ct.kernel
def _count_part(ids: ct.Array, out: Rows, count: int, rounds: int, TILE: Int, TILE_GROUPS: Int):
    part = ct.bid(0)
    groups = ct.bid(1) * TILE_GROUPS + ct.arange(TILE_GROUPS, dtype=ct.int32)
    total = ct.zeros((TILE_GROUPS,), dtype=ct.int32)
    for turn in range(rounds):
        places = (part * rounds + turn) * TILE + ct.arange(TILE, dtype=ct.int32)
        given = ct.gather(ids, places, mask=places < count, padding_value=-1, check_bounds=False)
        total = total + ct.sum((given[:, None] == groups[None, :]).astype(ct.int32), axis=0)
    ct.scatter(out, (part, groups), total, mask=groups < out.shape[1], check_bounds=False)


@ct.kernel
def _sum_parts(parts: Rows, out: Rows, TILE_P: Int, TILE_GROUPS: Int):
    rows = ct.arange(TILE_P, dtype=ct.int32)[:, None]
    groups = ct.bid(0) * TILE_GROUPS + ct.arange(TILE_GROUPS, dtype=ct.int32)
    inside = (rows < parts.shape[0]) & (groups < parts.shape[1])[None, :]
    counts = ct.gather(parts, (rows, groups[None, :]), mask=inside, check_bounds=False)
    total = ct.sum(counts, axis=0)
    ct.scatter(out, (0, groups), total, mask=groups < out.shape[1], check_bounds=False)


_COUNT = {warps: _count_part.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(ids: torch.Tensor, num_groups: int, counts: torch.Tensor, *, TILE: int = 128, WARPS: int = 4) -> None:
    """counts[e] = how many of the ids are e; E = num_groups; ids outside of 0..E-1 count nowhere.

    ids: [M, K] int64, contiguous, fewer than 2**31; counts: [E] int32. A block counts tiles of TILE ids
    for 64 groups. Many ids are shared out to at most MOST_BLOCKS blocks, whose counts a second kernel adds up: two
    launches, no atomic operation, nothing that must be zero before.
    """
    E = num_groups
    count = ids.numel()
    tiles = -(-count // TILE)
    flat = ids.view(-1) if count else torch.empty(1, dtype=torch.int64, device=ids.device)
    stream = torch.cuda.current_stream()
    columns = -(-E // TILE_E)
    if tiles <= ONE_BLOCK:
        args = (flat, counts.view(1, E), count, tiles, TILE, TILE_E)
        ct.launch(stream, (1, columns, 1), _COUNT[WARPS], args)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    args = (flat, parts, count, rounds, TILE, TILE_E)
    ct.launch(stream, (blocks, columns, 1), _COUNT[WARPS], args)
    ct.launch(stream, (-(-E // 16), 1, 1), _sum_parts, (parts, counts.view(1, E), MOST_BLOCKS, 16))

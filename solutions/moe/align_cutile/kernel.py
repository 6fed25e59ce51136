"""Rows of a grouped product in whole tiles of one expert each: ids are compared with every expert, which needs neither shared
memory nor atomics."""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

FEW_IDS = 1024  # up to this many, every block counts them all, in one launch
MOST_BLOCKS = 128


@ct.function
def _known_keys(ids, places, count, E: Int):
    """The experts of some ids, E for what is none."""
    keys = ct.gather(ids, places, mask=places < count, padding_value=-1, check_bounds=False)
    return ct.where((keys >= 0) & (keys < E), keys, E)


@ct.function
def _count(keys, bins, E: Int):
    return ct.sum(((keys[:, None] == bins[None, :]) & (bins < E)[None, :]).astype(ct.int32), axis=0)


@ct.kernel
def _count_parts(ids: ct.Array, parts: Rows, count: int, rounds: int, E: Int, TILE: Int, TILE_E: Int):
    part = ct.bid(0)
    bins = ct.arange(TILE_E, dtype=ct.int32)
    total = ct.zeros((TILE_E,), dtype=ct.int32)
    for turn in range(rounds):
        places = (part * rounds + turn) * TILE + ct.arange(TILE, dtype=ct.int32)
        total = total + _count(_known_keys(ids, places, count, E), bins, E)
    ct.scatter(parts, (part, bins), total, mask=bins < E, check_bounds=False)


@ct.function
def _place(ids, rows, following, part, count, rounds, E: Int, TILE: Int, TILE_E: Int):
    """Give each id of this part its row, TILE ids after the other, so that equal ids keep their order."""
    bins = ct.arange(TILE_E, dtype=ct.int32)
    lanes = ct.arange(TILE, dtype=ct.int32)
    for turn in range(rounds):
        places = (part * rounds + turn) * TILE + lanes
        keys = _known_keys(ids, places, count, E)
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        rank = ct.sum(earlier.astype(ct.int32), axis=1)
        mine = ((keys[:, None] == bins[None, :]) & (bins < E)[None, :]).astype(ct.int32)
        slots = ct.sum(mine * following[None, :], axis=1) + rank
        ct.scatter(rows, slots, places, mask=keys < E, check_bounds=False)
        following = following + ct.sum(mine, axis=0)


@ct.kernel
def _align(
    ids: ct.Array,
    parts: Rows,
    rows: ct.Array,
    owners: ct.Array,
    end: ct.Array,
    count: int,
    rounds: int,
    count_parts: int,
    tiles: int,
    tile_rounds: int,
    block_size: int,
    E: Int,
    ALONE: ct.Constant[bool],
    TILE: Int,
    TILE_E: Int,
    TILE_T: Int,
    TILE_B: Int,
):
    part = ct.bid(0)
    bins = ct.arange(TILE_E, dtype=ct.int32)
    # Ids of each expert in all parts, and in those before this one. ALONE, the first block has all of them to place.
    total = ct.zeros((TILE_E,), dtype=ct.int32)
    before = ct.zeros((TILE_E,), dtype=ct.int32)
    if ALONE:
        for turn in range(rounds):
            places = turn * TILE + ct.arange(TILE, dtype=ct.int32)
            total = total + _count(_known_keys(ids, places, count, E), bins, E)
    else:
        for other in range(count_parts):
            counts = ct.gather(parts, (other, bins), mask=bins < E, check_bounds=False)
            total = total + counts
            before = before + ct.where(other < part, counts, 0)
    padded = (total + block_size - 1) // block_size * block_size
    ends = ct.cumsum(padded, axis=0)
    starts = ends - padded
    first = ct.arange(1, dtype=ct.int32)
    ct.scatter(end, first, ct.sum(padded, keepdims=True), mask=first == part, check_bounds=False)
    if ALONE:
        if part == 0:
            _place(ids, rows, starts, part, count, rounds, E, TILE, TILE_E)
    else:
        _place(ids, rows, starts + before, part, count, rounds, E, TILE, TILE_E)

    # This block's share of the tiles: whose they are, and the rows that no id has. What it stores above lies elsewhere.
    columns = ct.arange(TILE_B, dtype=ct.int32)[None, :]
    for turn in range(tile_rounds):
        tile = (part * tile_rounds + turn) * TILE_T + ct.arange(TILE_T, dtype=ct.int32)
        first_row = (tile * block_size)[:, None]
        mine = (starts[None, :] <= first_row) & (first_row < ends[None, :])
        owner = ct.sum(ct.where(mine, (bins + 1)[None, :], 0), axis=1) - 1
        filled = ct.sum(ct.where(mine, (starts + total)[None, :], 0), axis=1)
        ct.scatter(owners, tile, owner, mask=tile < tiles, check_bounds=False)
        slots = first_row + columns
        empty = (columns < block_size) & (tile < tiles)[:, None] & (slots >= filled[:, None])
        ct.scatter(rows, slots, ct.full((TILE_T, TILE_B), count, dtype=ct.int32), mask=empty, check_bounds=False)


_COUNT_PARTS = {warps: _count_parts.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_ALIGN = {warps: _align.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    *,
    TILE: int = 32,
    WARPS: int = 4,
) -> None:
    """Rows = flat indices of the ids, sorted stably by expert, each expert's filled up with M * K to tiles of one expert each.

    topk_ids: [M, K] int32, contiguous; sorted_token_ids: [P], expert_ids: [P / B], num_tokens_post_padded: [1], all int32,
    P = (M * K + (B - 1) * min(E, M * K)) rounded down to whole tiles of B = block_size rows. Ids outside of 0..E-1 have no row.
    Many ids are shared out in order to at most MOST_BLOCKS blocks: one kernel counts each one's ids, a second finds from all
    counts where its ids belong, and fills up its share of the tiles. Of few ids, each block counts them all and fills up its
    share, and the first one places them. A block places TILE ids at a time.
    """
    e = num_experts
    count, tiles = topk_ids.numel(), expert_ids.numel()
    stream = torch.cuda.current_stream()
    ids, rows, owners = topk_ids.view(-1), sorted_token_ids, expert_ids
    if count == 0:
        ids = rows = owners = torch.empty(1, dtype=torch.int32, device=ids.device)
    tile_e = max(16, 1 << (e - 1).bit_length())
    tile_b = 1 << (block_size - 1).bit_length()
    tile_t = max(1, min(16, 1024 // tile_b))
    needed, given = -(-count // TILE), (rows, owners, num_tokens_post_padded, count)
    if count <= FEW_IDS:
        blocks = max(1, min(-(-tiles // tile_t), MOST_BLOCKS))
        tile_rounds = -(-tiles // (blocks * tile_t))
        nothing = torch.empty(1, e, dtype=torch.int32, device=ids.device)
        args = (ids, nothing, *given, needed, 1, tiles, tile_rounds, block_size, e, True, TILE, tile_e, tile_t, tile_b)
        ct.launch(stream, (blocks, 1, 1), _ALIGN[WARPS], args)
        return
    rounds = -(-needed // MOST_BLOCKS)
    blocks = -(-needed // rounds)
    tile_rounds = -(-tiles // (blocks * tile_t))
    parts = torch.empty(blocks, e, dtype=torch.int32, device=ids.device)
    ct.launch(stream, (blocks, 1, 1), _COUNT_PARTS[WARPS], (ids, parts, count, rounds, e, TILE, tile_e))
    args = (ids, parts, *given, rounds, blocks, tiles, tile_rounds, block_size, e, False, TILE, tile_e, tile_t, tile_b)
    ct.launch(stream, (blocks, 1, 1), _ALIGN[WARPS], args)

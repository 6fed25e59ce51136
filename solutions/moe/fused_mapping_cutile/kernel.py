"""Tables of a buffer of rows by expert, from a stable counting sort by comparisons alone: neither shared memory nor atomics."""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

FEW_IDS = 1024  # up to this many, each block counts all ids itself, in one launch
MOST_BLOCKS = 128
PADDING = 8  # rows of padding of each expert that are written at a time: 32 bytes of a table
TAIL = 1024  # rows behind the last expert that are written at a time


@ct.function
def _known_keys(ids, places, count, experts):
    """The experts of some ids; `experts` for those of none, and beyond the ids."""
    given = ct.gather(ids, places, mask=places < count, padding_value=-1, check_bounds=False)
    return ct.where((given >= 0) & (given < experts), given, experts).astype(ct.int32)


@ct.function
def _counts_of(keys, bins, experts):
    """[ids, experts], 1 where an id is of an expert."""
    return ((keys[:, None] == bins[None, :]) & (bins < experts)[None, :]).astype(ct.int32)


@ct.function
def _store_row(to_expert, to_token, to_choice, rows, expert, token, choice, mask):
    ct.scatter(to_expert, rows, expert, mask=mask, check_bounds=False)
    ct.scatter(to_token, rows, token, mask=mask, check_bounds=False)
    ct.scatter(to_choice, rows, choice, mask=mask, check_bounds=False)


@ct.kernel
def _count_parts(ids: ct.Array, parts: Rows, count: int, rounds: int, TILE: Int, TILE_E: Int):
    experts = parts.shape[1]
    part = ct.bid(0)
    bins = ct.arange(TILE_E, dtype=ct.int32)
    total = ct.zeros((TILE_E,), dtype=ct.int32)
    for turn in range(rounds):
        keys = _known_keys(ids, (part * rounds + turn) * TILE + ct.arange(TILE, dtype=ct.int32), count, experts)
        total = total + ct.sum(_counts_of(keys, bins, experts), axis=0)
    ct.scatter(parts, (part, bins), total, mask=bins < experts, check_bounds=False)


@ct.kernel
def _map_ids(
    ids: ct.Array,
    parts: Rows,
    to_expert: ct.Array,
    to_token: ct.Array,
    to_choice: ct.Array,
    by_choice: ct.Array,
    starts: ct.Array,
    ends: ct.Array,
    sizes: ct.Array,
    count: int,
    rows: int,
    rounds: int,
    blocks: int,
    alignment: int,
    choices: int,
    ALONE: ct.Constant[bool],
    TILE: Int,
    TILE_E: Int,
    PAD: Int,
    TAIL_ROWS: Int,
):
    """Block b of `blocks` places the b-th share of the ids and writes the b-th share of the padding.

    ALONE: every block counts all ids itself, and the first one places them all.
    """
    experts = parts.shape[1]
    part = ct.bid(0)
    bins = ct.arange(TILE_E, dtype=ct.int32)
    lanes = ct.arange(TILE, dtype=ct.int32)
    # Ids of each expert in all parts, and in those before this one.
    total = ct.zeros((TILE_E,), dtype=ct.int32)
    before = ct.zeros((TILE_E,), dtype=ct.int32)
    if ALONE:
        for turn in range(rounds):
            keys = _known_keys(ids, turn * TILE + lanes, count, experts)
            total = total + ct.sum(_counts_of(keys, bins, experts), axis=0)
    else:
        for other in range(blocks):
            counts = ct.gather(parts, (other, bins), mask=bins < experts, padding_value=0, check_bounds=False)
            total = total + counts
            before = before + ct.where(other < part, counts, 0)
    size = (total + alignment - 1) // alignment * alignment
    end = ct.cumsum(size, axis=0)
    start = end - size
    first_block = (bins < experts) & (part == 0)
    ct.scatter(starts, bins, start, mask=first_block, check_bounds=False)
    ct.scatter(ends, bins, end, mask=first_block, check_bounds=False)
    ct.scatter(sizes, bins, size, mask=first_block, check_bounds=False)

    # Padding: PAD rows of every expert at a time, then what lies behind the last expert.
    none = ct.full((TILE_E, PAD), -1, dtype=ct.int32)
    for first in range(part * PAD, alignment, blocks * PAD):
        padding = (start + total)[:, None] + first + ct.arange(PAD, dtype=ct.int32)[None, :]
        _store_row(to_expert, to_token, to_choice, padding, none, none, none, padding < end[:, None])
    behind = ct.full((TAIL_ROWS,), -1, dtype=ct.int32)
    for first in range(ct.sum(size) + part * TAIL_ROWS, rows, blocks * TAIL_ROWS):
        padding = first + ct.arange(TAIL_ROWS, dtype=ct.int32)
        _store_row(to_expert, to_token, to_choice, padding, behind, behind, behind, padding < rows)

    turns = rounds
    if ALONE:
        turns = ct.where(part == 0, rounds, 0)
    following = start + before  # the next row of each expert
    for turn in range(turns):
        places = (part * rounds + turn) * TILE + lanes
        keys = _known_keys(ids, places, count, experts)
        known = keys < experts
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        mine = _counts_of(keys, bins, experts)
        row = ct.sum(mine * following[None, :], axis=1) + ct.sum(earlier.astype(ct.int32), axis=1)
        _store_row(to_expert, to_token, to_choice, row, keys, places // choices, places, known)
        ct.scatter(by_choice, places, ct.where(known, row, -1), mask=places < count, check_bounds=False)
        following = following + ct.sum(mine, axis=0)


_COUNT_PARTS = {warps: _count_parts.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_MAP_IDS = {warps: _map_ids.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_get_fused_mapping(
    ids: torch.Tensor,
    num_experts: int,
    alignment: int,
    pos_to_expert: torch.Tensor,
    pos_to_token: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    expert_start: torch.Tensor,
    expert_end: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    *,
    TILE: int = 32,
    WARPS: int = 4,
) -> None:
    """Tables of a buffer whose rows lie by expert, each expert's first row at a multiple of `alignment`, and their inverse.

    ids: [M, K] int64, contiguous; pos_to_*: [P], token_topk_to_pos: [M, K], the others [E], int32; E = num_experts <= 1024,
    P = floor((M K + (alignment - 1) E) / alignment) * alignment. Ids outside of 0..E-1 have no row. Ids are shared out in order
    to at most MOST_BLOCKS blocks: one kernel counts each one's ids, a second finds from all counts where its ids belong, TILE
    at a time, and writes a share of the padding. Few ids are counted by every block and placed by the first, in one launch.
    """
    E, K = num_experts, ids.shape[1]
    count, rows = ids.numel(), pos_to_expert.shape[0]
    tables = (pos_to_expert, pos_to_token, pos_to_token_topk)
    experts = (expert_start, expert_end, num_tokens_per_expert)
    flat, by_choice = ids.view(-1), token_topk_to_pos.view(-1)
    if count == 0:
        flat = torch.empty(1, dtype=torch.int64, device=ids.device)
        by_choice = torch.empty(1, dtype=torch.int32, device=ids.device)
    if rows == 0:
        tables = (by_choice, by_choice, by_choice)
    tile_e = max(16, 1 << (E - 1).bit_length())
    tiles = -(-count // TILE)
    stream = torch.cuda.current_stream()
    if count <= FEW_IDS:
        blocks = max(1, min(MOST_BLOCKS, -(-rows // TAIL)))
        parts = expert_start.view(1, E)  # its width is the number of experts; not read
        sizes = (count, rows, tiles, blocks, alignment, K)
        args = (flat, parts, *tables, by_choice, *experts, *sizes, True, TILE, tile_e, PADDING, TAIL)
        ct.launch(stream, (blocks, 1, 1), _MAP_IDS[WARPS], args)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    ct.launch(stream, (blocks, 1, 1), _COUNT_PARTS[WARPS], (flat, parts, count, rounds, TILE, tile_e))
    sizes = (count, rows, rounds, blocks, alignment, K)
    args = (flat, parts, *tables, by_choice, *experts, *sizes, False, TILE, tile_e, PADDING, TAIL)
    ct.launch(stream, (blocks, 1, 1), _MAP_IDS[WARPS], args)

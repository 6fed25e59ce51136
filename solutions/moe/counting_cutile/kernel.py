"""Expert ids counted, and sorted by their counts: ids are compared with every expert, which needs neither shared memory nor
atomics."""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

ONE_BLOCK = 8  # up to this many tiles of ids are counted in one launch
FEW_IDS = 1024  # up to this many, one block counts and places them all, in one launch
MOST_BLOCKS = 128
TILE_E = 64


@ct.kernel
def _count_groups(
    ids: ct.Array,
    out: Rows,
    count: int,
    rounds: int,
    experts: float,
    choices: float,
    TILE: Int,
    TILE_GROUPS: Int,
    FREQUENCY: ct.Constant[bool],
):
    part = ct.bid(0)
    groups = ct.bid(1) * TILE_GROUPS + ct.arange(TILE_GROUPS, dtype=ct.int32)
    total = ct.zeros((TILE_GROUPS,), dtype=ct.int32)
    for turn in range(rounds):
        places = (part * rounds + turn) * TILE + ct.arange(TILE, dtype=ct.int32)
        given = ct.gather(ids, places, mask=places < count, padding_value=-1, check_bounds=False)
        total = total + ct.sum((given[:, None] == groups[None, :]).astype(ct.int32), axis=0)
    if FREQUENCY:
        frequency = total.astype(ct.float32) * experts / choices
        ct.scatter(out, (part, groups), frequency, mask=groups < out.shape[1], check_bounds=False)
    else:
        ct.scatter(out, (part, groups), total, mask=groups < out.shape[1], check_bounds=False)


@ct.kernel
def _sum_parts(
    parts: Rows, out: Rows, experts: float, choices: float, TILE_P: Int, TILE_GROUPS: Int, FREQUENCY: ct.Constant[bool]
):
    rows = ct.arange(TILE_P, dtype=ct.int32)[:, None]
    groups = ct.bid(0) * TILE_GROUPS + ct.arange(TILE_GROUPS, dtype=ct.int32)
    inside = (rows < parts.shape[0]) & (groups < parts.shape[1])[None, :]
    counts = ct.gather(parts, (rows, groups[None, :]), mask=inside, check_bounds=False)
    total = ct.sum(counts, axis=0)
    if FREQUENCY:
        frequency = total.astype(ct.float32) * experts / choices
        ct.scatter(out, (0, groups), frequency, mask=groups < out.shape[1], check_bounds=False)
    else:
        ct.scatter(out, (0, groups), total, mask=groups < out.shape[1], check_bounds=False)


@ct.function
def _known_keys(ids, places, count, experts):
    """The experts of some ids; `experts` for those of none, one more beyond the ids."""
    given = ct.gather(ids, places, mask=places < count, padding_value=-1, check_bounds=False)
    keys = ct.where((given >= 0) & (given < experts), given, experts).astype(ct.int32)
    return ct.where(places < count, keys, experts + 1)


@ct.kernel
def _count_parts(ids: ct.Array, parts: Rows, count: int, rounds: int, TILE: Int, TILE_E: Int):
    experts = parts.shape[1]
    part = ct.bid(0)
    bins = ct.arange(TILE_E, dtype=ct.int32)
    total = ct.zeros((TILE_E,), dtype=ct.int32)
    for turn in range(rounds):
        keys = _known_keys(ids, (part * rounds + turn) * TILE + ct.arange(TILE, dtype=ct.int32), count, experts)
        total = total + ct.sum((keys[:, None] == bins[None, :]).astype(ct.int32), axis=0)
    ct.scatter(parts, (part, bins), total, mask=bins < experts, check_bounds=False)


@ct.kernel
def _place(
    ids: ct.Array,
    parts: Rows,
    perm: ct.Array,
    offs: Rows,
    inverse: ct.Array,
    count: int,
    rounds: int,
    count_parts: int,
    ALONE: ct.Constant[bool],
    TILE: Int,
    TILE_E: Int,
):
    experts = offs.shape[1]
    part = ct.bid(0)
    bins = ct.arange(TILE_E, dtype=ct.int32)
    lanes = ct.arange(TILE, dtype=ct.int32)
    # Ids of each expert in all parts, and in those before this one.
    total = ct.zeros((TILE_E,), dtype=ct.int32)
    before = ct.zeros((TILE_E,), dtype=ct.int32)
    if ALONE:
        for turn in range(rounds):
            keys = _known_keys(ids, turn * TILE + lanes, count, experts)
            mine = (keys[:, None] == bins[None, :]) & (bins < experts)[None, :]
            total = total + ct.sum(mine.astype(ct.int32), axis=0)
    else:
        for other in range(count_parts):
            counts = ct.gather(parts, (other, bins), mask=bins < experts, check_bounds=False)
            total = total + counts
            before = before + ct.where(other < part, counts, 0)
    ends = ct.cumsum(total, axis=0)
    ct.scatter(offs, (0, bins), ends, mask=(bins < experts) & (part == 0), check_bounds=False)
    following = ends - total + before  # the next slot of each expert
    # Ids of no expert come after all others; those before this part are what no expert has of the ids before it.
    following_none = ct.sum(total) + part * rounds * TILE - ct.sum(before)
    for turn in range(rounds):
        places = (part * rounds + turn) * TILE + lanes
        keys = _known_keys(ids, places, count, experts)
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        rank = ct.sum(earlier.astype(ct.int32), axis=1)
        mine = ((keys[:, None] == bins[None, :]) & (bins < experts)[None, :]).astype(ct.int32)
        slots = ct.where(keys < experts, ct.sum(mine * following[None, :], axis=1), following_none) + rank
        inside = places < count
        ct.scatter(perm, slots, places.astype(ct.int64), mask=inside, check_bounds=False)
        ct.scatter(inverse, places, slots.astype(ct.int64), mask=inside, check_bounds=False)
        following = following + ct.sum(mine, axis=0)
        following_none = following_none + ct.sum((keys == experts).astype(ct.int32))


_COUNT_GROUPS = {warps: _count_groups.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_COUNT_PARTS = {warps: _count_parts.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_PLACE = {warps: _place.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _count(
    ids: torch.Tensor, E: int, experts: float, choices: float, out: torch.Tensor, frequency: bool, TILE: int, WARPS: int
) -> None:
    """Counts of E experts, or `frequency`: counts times `experts` over `choices`.

    A block counts tiles of TILE ids for 64 groups. Many ids are shared out to at most MOST_BLOCKS blocks, whose counts a second
    kernel adds up: two launches, no atomic operation, nothing that must be zero before.
    """
    count = ids.numel()
    tiles = -(-count // TILE)
    flat = ids.view(-1) if count else torch.empty(1, dtype=torch.int64, device=ids.device)
    stream = torch.cuda.current_stream()
    columns = -(-E // TILE_E)
    if tiles <= ONE_BLOCK:
        args = (flat, out.view(1, E), count, tiles, experts, choices, TILE, TILE_E, frequency)
        ct.launch(stream, (1, columns, 1), _COUNT_GROUPS[WARPS], args)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    args = (flat, parts, count, rounds, experts, choices, TILE, TILE_E, False)
    ct.launch(stream, (blocks, columns, 1), _COUNT_GROUPS[WARPS], args)
    args = (parts, out.view(1, E), experts, choices, MOST_BLOCKS, 16, frequency)
    ct.launch(stream, (-(-E // 16), 1, 1), _sum_parts, args)


def run_group_count(
    ids: torch.Tensor, num_groups: int, counts: torch.Tensor, *, TILE: int = 128, WARPS: int = 4
) -> None:
    """counts[e] = how many of the ids are e; E = num_groups; ids outside of 0..E-1 count nowhere.

    ids: [M, K] int64, contiguous, fewer than 2**31; counts: [E] int32.
    """
    _count(ids, num_groups, 0.0, 1.0, counts, False, TILE, WARPS)


def run_aux_fi(
    ids: torch.Tensor,
    num_experts: int,
    num_aux_topk: int,
    frequency: torch.Tensor,
    *,
    TILE: int = 128,
    WARPS: int = 4,
) -> None:
    """frequency[e] = float(count of e) * E / (M * num_aux_topk), E = num_experts; other ids count nowhere; zeros without tokens.

    ids: [M, K] int64, contiguous, fewer than 2**31; frequency: [E] float32.
    """
    choices = float(max(ids.shape[0] * num_aux_topk, 1))
    _count(ids, num_experts, float(num_experts), choices, frequency, True, TILE, WARPS)


def run_moe_offsets(
    ids: torch.Tensor,
    num_experts: int,
    perm: torch.Tensor,
    offs: torch.Tensor,
    inverse: torch.Tensor,
    *,
    TILE: int = 32,
    WARPS: int = 4,
) -> None:
    """perm = flat indices of ids, sorted stably by expert; offs = where each expert's slots end; inverse = slot of each index.

    ids: [M, K] int64, contiguous, fewer than 2**31; perm, inverse: [M * K] int64, offs: [E] int32, E = num_experts <= 1024.
    Ids outside of 0..E-1 come last, in order. Few ids are counted and placed by one block. Many are shared out in order to at
    most MOST_BLOCKS blocks: one kernel counts each one's ids, a second finds from all counts where its ids belong. A block
    places TILE ids at a time.
    """
    E = num_experts
    count = ids.numel()
    tile_e = max(16, 1 << (E - 1).bit_length())
    tiles = -(-count // TILE)
    stream = torch.cuda.current_stream()
    flat, ends = ids.view(-1), offs.view(1, E)
    if count == 0:
        flat = perm = inverse = torch.empty(1, dtype=torch.int64, device=ids.device)
    if count <= FEW_IDS:
        args = (flat, ends, perm, ends, inverse, count, tiles, 1, True, TILE, tile_e)
        ct.launch(stream, (1, 1, 1), _PLACE[WARPS], args)
        return
    rounds = -(-tiles // MOST_BLOCKS)
    blocks = -(-tiles // rounds)
    parts = torch.empty(blocks, E, dtype=torch.int32, device=ids.device)
    ct.launch(stream, (blocks, 1, 1), _COUNT_PARTS[WARPS], (flat, parts, count, rounds, TILE, tile_e))
    args = (flat, parts, perm, ends, inverse, count, rounds, blocks, False, TILE, tile_e)
    ct.launch(stream, (blocks, 1, 1), _PLACE[WARPS], args)

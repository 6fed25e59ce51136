"""Rows of a grouped product in whole tiles of one expert each; Triton."""

import torch
import triton
import triton.language as tl

FEW_IDS = 1024  # up to this many, every program counts them all, in one launch
MOST_PROGRAMS = 128
COUNTED = 512  # ids that are counted at a time before they are placed


@triton.jit
def _histogram(ids_ptr, first, count, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How often each expert is among BLOCK ids from `first` on; other ids count nowhere."""
    places = first + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + places, mask=places < count, other=-1)
    known = (ids >= 0) & (ids < E)
    return tl.histogram(tl.where(known, ids, 0), BINS, mask=known)


@triton.jit(do_not_specialize=["count", "rounds"])
def _count_part(ids_ptr, parts_ptr, count, rounds, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for turn in range(rounds):
        total += _histogram(ids_ptr, (part * rounds + turn) * BLOCK, count, E, BINS, BLOCK)
    tl.store(parts_ptr + part * E + bins, total, mask=bins < E)


@triton.jit(do_not_specialize=["count", "rounds", "parts", "tiles", "tile_rounds"])
def _align(
    ids_ptr,
    parts_ptr,
    rows_ptr,
    owners_ptr,
    end_ptr,
    count,
    rounds,
    parts,
    tiles,
    tile_rounds,
    B,
    E: tl.constexpr,
    ALONE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    # Ids of each expert in all parts, and in those before this one. ALONE, the first program has all of them to place.
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if ALONE:
        for first in range(0, count, COUNTS):
            total += _histogram(ids_ptr, first, count, E, BINS, COUNTS)
    else:
        for other in range(parts):
            counts = tl.load(parts_ptr + other * E + bins, mask=bins < E, other=0)
            total += counts
            before += tl.where(other < part, counts, 0)
    padded = (total + (B - 1)) // B * B
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    if part == 0:
        tl.store(end_ptr, tl.sum(padded, axis=0))

    lanes = tl.arange(0, BLOCK)
    following = starts + before  # the next row of each expert
    for turn in range(tl.where(ALONE & (part > 0), 0, rounds)):
        places = (part * rounds + turn) * BLOCK + lanes
        ids = tl.load(ids_ptr + places, mask=places < count, other=-1)
        known = (ids >= 0) & (ids < E)
        keys = tl.where(known, ids, E)
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        rank = tl.sum(earlier.to(tl.int32), axis=1)
        experts = tl.where(known, keys, 0)
        tl.store(rows_ptr + tl.gather(following, experts, axis=0) + rank, places, mask=known)
        following += tl.histogram(experts, BINS, mask=known)

    # This program's share of the tiles: whose they are, and the rows that no id has. What it stores above lies elsewhere.
    columns = tl.arange(0, BLOCK_B)[None, :]
    for turn in range(tile_rounds):
        tile = (part * tile_rounds + turn) * BLOCK_T + tl.arange(0, BLOCK_T)
        first_row = (tile * B)[:, None]
        mine = (starts[None, :] <= first_row) & (first_row < ends[None, :])
        owner = tl.sum(tl.where(mine, bins[None, :] + 1, 0), axis=1) - 1
        filled = tl.sum(tl.where(mine, (starts + total)[None, :], 0), axis=1)
        tl.store(owners_ptr + tile, owner, mask=tile < tiles)
        empty = (columns < B) & (tile < tiles)[:, None] & (first_row + columns >= filled[:, None])
        tl.store(rows_ptr + first_row + columns, tl.zeros([BLOCK_T, BLOCK_B], tl.int32) + count, mask=empty)


def run(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    *,
    BLOCK=64,
    num_warps=4,
):
    """Rows = flat indices of the ids, sorted stably by expert, each expert's filled up with M * K to tiles of one expert each.

    Shapes: topk_ids [M, K] int32, contiguous; sorted_token_ids [P], expert_ids [P / B], num_tokens_post_padded [1], all int32,
    P = (M * K + (B - 1) * min(E, M * K)) rounded down to whole tiles of B = block_size rows. Ids outside of 0..E-1 have no row.
    Mapping: many ids are shared out in order to at most MOST_PROGRAMS programs: one kernel counts each one's ids, a second finds
    from all counts where its ids belong, and fills up its share of the tiles. Of few ids, each program counts them all and fills
    up its share, and the first one places them. A program places BLOCK ids at a time.
    """
    E, B = num_experts, block_size
    count, tiles = topk_ids.numel(), expert_ids.numel()
    bins = max(32, 1 << (E - 1).bit_length())  # at least one a lane of a warp
    block_b = 1 << (B - 1).bit_length()
    block_t = max(1, min(16, 1024 // block_b))
    given = (sorted_token_ids, expert_ids, num_tokens_post_padded, count)
    if count <= FEW_IDS:
        programs = max(1, min((tiles + block_t - 1) // block_t, MOST_PROGRAMS))
        tile_rounds = (tiles + programs * block_t - 1) // (programs * block_t)
        _align[(programs,)](
            topk_ids, topk_ids, *given, (count + BLOCK - 1) // BLOCK, 1, tiles, tile_rounds, B, E, True, bins, BLOCK,
            COUNTED, block_t, block_b, num_warps=num_warps,
        )  # fmt: skip
        return
    # Whole runs of COUNTED ids a program, so that both kernels share the ids out in the same way.
    runs = (count + COUNTED - 1) // COUNTED
    rounds = (runs + MOST_PROGRAMS - 1) // MOST_PROGRAMS
    programs = (runs + rounds - 1) // rounds
    tile_rounds = (tiles + programs * block_t - 1) // (programs * block_t)
    parts = torch.empty(programs, E, dtype=torch.int32, device=topk_ids.device)
    _count_part[(programs,)](topk_ids, parts, count, rounds, E, bins, COUNTED, num_warps=num_warps)
    _align[(programs,)](
        topk_ids, parts, *given, rounds * (COUNTED // BLOCK), programs, tiles, tile_rounds, B, E, False, bins, BLOCK,
        COUNTED, block_t, block_b, num_warps=num_warps,
    )  # fmt: skip

"""Tables of a buffer of rows by expert, from a stable counting sort of expert ids; Triton."""

import torch
import triton
import triton.language as tl

FEW_IDS = 1024  # up to this many, each program counts all ids itself, in one launch
COUNTED = 512  # ids that are counted at a time before they are placed
MOST_PROGRAMS = 128
PADDING = 8  # rows of padding of each expert that are written at a time: 32 bytes of a table
TAIL = 1024  # rows behind the last expert that are written at a time


@triton.jit
def _histogram(ids_ptr, first, count, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How often each expert is among BLOCK ids from `first` on; other ids count nowhere."""
    places = first + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + places, mask=places < count, other=-1)
    known = (ids >= 0) & (ids < E)
    return tl.histogram(tl.where(known, ids, 0).to(tl.int32), BINS, mask=known)


@triton.jit(do_not_specialize=["count", "rounds"])
def _count_part(ids_ptr, parts_ptr, count, rounds, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for turn in range(rounds):
        total += _histogram(ids_ptr, (part * rounds + turn) * BLOCK, count, E, BINS, BLOCK)
    tl.store(parts_ptr + part * E + bins, total, mask=bins < E)


@triton.jit
def _store_row(to_expert_ptr, to_token_ptr, to_choice_ptr, rows, expert, token, choice, mask):
    tl.store(to_expert_ptr + rows, expert, mask=mask)
    tl.store(to_token_ptr + rows, token, mask=mask)
    tl.store(to_choice_ptr + rows, choice, mask=mask)


@triton.jit(do_not_specialize=["count", "rows", "rounds", "parts", "alignment"])
def _map_ids(
    ids_ptr,
    parts_ptr,
    to_expert_ptr,
    to_token_ptr,
    to_choice_ptr,
    by_choice_ptr,
    start_ptr,
    end_ptr,
    aligned_ptr,
    count,
    rows,
    rounds,
    parts,
    alignment,
    E: tl.constexpr,
    K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTS: tl.constexpr,
    PAD: tl.constexpr,
    TAIL_ROWS: tl.constexpr,
):
    """Program p of `parts` places the p-th share of the ids and writes the p-th share of the padding.

    COUNTS = 0: parts_ptr holds the counts of each share. Else every program counts all ids, COUNTS at a time, and the first one
    places them all.
    """
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    # Ids of each expert in all parts, and in those before this one.
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if COUNTS > 0:
        for first in range(0, count, COUNTS):
            total += _histogram(ids_ptr, first, count, E, BINS, COUNTS)
    else:
        for other in range(parts):
            counts = tl.load(parts_ptr + other * E + bins, mask=bins < E, other=0)
            total += counts
            before += tl.where(other < part, counts, 0)
    aligned = (total + alignment - 1) // alignment * alignment
    end = tl.cumsum(aligned, axis=0)
    start = end - aligned
    if part == 0:
        tl.store(start_ptr + bins, start, mask=bins < E)
        tl.store(end_ptr + bins, end, mask=bins < E)
        tl.store(aligned_ptr + bins, aligned, mask=bins < E)

    # Padding: PAD rows of every expert at a time, then what lies behind the last expert.
    for first in range(part * PAD, alignment, parts * PAD):
        padding = (start + total)[:, None] + first + tl.arange(0, PAD)[None, :]
        _store_row(to_expert_ptr, to_token_ptr, to_choice_ptr, padding, -1, -1, -1, padding < end[:, None])
    behind = tl.sum(aligned, axis=0)
    for first in range(behind + part * TAIL_ROWS, rows, parts * TAIL_ROWS):
        padding = first + tl.arange(0, TAIL_ROWS)
        _store_row(to_expert_ptr, to_token_ptr, to_choice_ptr, padding, -1, -1, -1, padding < rows)

    if COUNTS == 0 or part == 0:
        following = start + before  # the next row of each expert
        lanes = tl.arange(0, BLOCK)
        for turn in range(rounds):
            places = (part * rounds + turn) * BLOCK + lanes
            inside = places < count
            ids = tl.load(ids_ptr + places, mask=inside, other=-1)
            known = (ids >= 0) & (ids < E)
            keys = tl.where(known, ids, E).to(tl.int32)
            earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
            rank = tl.sum(earlier.to(tl.int32), axis=1)
            experts = tl.where(known, keys, 0)
            row = tl.gather(following, experts, axis=0) + rank
            _store_row(to_expert_ptr, to_token_ptr, to_choice_ptr, row, keys, places // K, places, known)
            tl.store(by_choice_ptr + places, tl.where(known, row, -1), mask=inside)
            following += tl.histogram(experts, BINS, mask=known)


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
    BLOCK=64,
    num_warps=4,
):
    """Tables of a buffer whose rows lie by expert, each expert's first row at a multiple of `alignment`, and their inverse.

    Shapes: ids [M, K] int64, contiguous; pos_to_* [P], token_topk_to_pos [M, K], the others [E], int32; E = num_experts <= 1024,
    P = floor((M K + (alignment - 1) E) / alignment) * alignment. Ids outside of 0..E-1 have no row.
    Mapping: ids are shared out in order to at most MOST_PROGRAMS programs. One kernel counts each one's ids, a second finds from
    all counts where its ids belong, BLOCK ids at a time; few ids are counted by every program and placed by the first. No
    atomic operation, nothing that must be filled before: padding is written by whoever knows the counts.
    """
    E, K = num_experts, ids.shape[1]
    count, rows = ids.numel(), pos_to_expert.shape[0]
    bins = max(32, 1 << (E - 1).bit_length())  # at least one a lane of a warp
    tables = (pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos)
    experts = (expert_start, expert_end, num_tokens_per_expert)
    fixed = (E, K, bins, BLOCK)
    if count <= FEW_IDS:
        programs = max(1, min(MOST_PROGRAMS, (rows + TAIL - 1) // TAIL))
        rounds = (count + BLOCK - 1) // BLOCK
        sizes = (count, rows, rounds, programs, alignment)
        _map_ids[(programs,)](ids, ids, *tables, *experts, *sizes, *fixed, COUNTED, PADDING, TAIL, num_warps=num_warps)
        return
    # Whole runs of COUNTED ids a program, so that both kernels share the ids out in the same way.
    runs = (count + COUNTED - 1) // COUNTED
    rounds = (runs + MOST_PROGRAMS - 1) // MOST_PROGRAMS
    programs = (runs + rounds - 1) // rounds
    parts = torch.empty(programs, E, dtype=torch.int32, device=ids.device)
    _count_part[(programs,)](ids, parts, count, rounds, E, bins, COUNTED, num_warps=num_warps)
    sizes = (count, rows, rounds * (COUNTED // BLOCK), programs, alignment)
    _map_ids[(programs,)](ids, parts, *tables, *experts, *sizes, *fixed, 0, PADDING, TAIL, num_warps=num_warps)

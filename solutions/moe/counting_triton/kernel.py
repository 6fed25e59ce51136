"""Expert ids counted, and sorted by their counts; Triton."""

import torch
import triton
import triton.language as tl

ONE_PROGRAM = 8  # up to this many blocks of ids one program counts them all, in one launch
FEW_IDS = 1024  # up to this many, one program counts and places them all, in one launch
MOST_PROGRAMS = 128
COUNTED = 512  # ids that are counted at a time before they are placed


@triton.jit
def _histogram(ids_ptr, first, count, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How often each expert is among BLOCK ids from `first` on; other ids count nowhere."""
    places = first + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + places, mask=places < count, other=-1)
    known = (ids >= 0) & (ids < E)
    return tl.histogram(tl.where(known, ids, 0).to(tl.int32), BINS, mask=known)


@triton.jit(do_not_specialize=["count", "rounds", "experts", "choices"])
def _count_part(
    ids_ptr,
    out_ptr,
    count,
    rounds,
    experts,
    choices,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    FREQUENCY: tl.constexpr,
):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for turn in range(rounds):
        total += _histogram(ids_ptr, (part.to(tl.int64) * rounds + turn) * BLOCK, count, E, BINS, BLOCK)
    if FREQUENCY:
        frequency = tl.div_rn(total.to(tl.float32) * experts, tl.zeros([BINS], tl.float32) + choices)
        tl.store(out_ptr + bins, frequency, mask=bins < E)
    else:
        tl.store(out_ptr + part * E + bins, total, mask=bins < E)


@triton.jit(do_not_specialize=["parts", "experts", "choices"])
def _sum_parts(
    parts_ptr,
    out_ptr,
    parts,
    experts,
    choices,
    E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    FREQUENCY: tl.constexpr,
):
    groups = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = tl.arange(0, BLOCK_P)[:, None]
    mask = (rows < parts) & (groups < E)[None, :]
    total = tl.sum(tl.load(parts_ptr + rows * E + groups[None, :], mask=mask, other=0), axis=0)
    if FREQUENCY:
        frequency = tl.div_rn(total.to(tl.float32) * experts, tl.zeros([BLOCK_E], tl.float32) + choices)
        tl.store(out_ptr + groups, frequency, mask=groups < E)
    else:
        tl.store(out_ptr + groups, total, mask=groups < E)


@triton.jit(do_not_specialize=["count", "rounds", "parts"])
def _place_part(
    ids_ptr,
    parts_ptr,
    perm_ptr,
    offs_ptr,
    inverse_ptr,
    count,
    rounds,
    parts,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    # Ids of each expert in all parts, and in those before this one.
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for other in range(parts):
        counts = tl.load(parts_ptr + other * E + bins, mask=bins < E, other=0)
        total += counts
        before += tl.where(other < part, counts, 0)
    _place(ids_ptr, perm_ptr, offs_ptr, inverse_ptr, total, before, part, count, rounds, E, BINS, BLOCK)


@triton.jit(do_not_specialize=["count", "rounds"])
def _place_all(
    ids_ptr,
    perm_ptr,
    offs_ptr,
    inverse_ptr,
    count,
    rounds,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTS: tl.constexpr,
):
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, count, COUNTS):
        total += _histogram(ids_ptr, first, count, E, BINS, COUNTS)
    before = tl.zeros([BINS], tl.int32)
    _place(ids_ptr, perm_ptr, offs_ptr, inverse_ptr, total, before, 0, count, rounds, E, BINS, BLOCK)


@triton.jit
def _place(
    ids_ptr,
    perm_ptr,
    offs_ptr,
    inverse_ptr,
    total,
    before,
    part,
    count,
    rounds,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give each id of this part its slot, BLOCK ids after the other, so that equal ids keep their order."""
    bins = tl.arange(0, BINS)
    lanes = tl.arange(0, BLOCK)
    ends = tl.cumsum(total, axis=0)
    if part == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < E)
    following = ends - total + before  # the next slot of each expert
    # Ids of no expert come after all others; those before this part are what no expert has of the ids before it.
    following_none = tl.sum(total, axis=0) + part * rounds * BLOCK - tl.sum(before, axis=0)
    for turn in range(rounds):
        places = (part * rounds + turn) * BLOCK + lanes
        inside = places < count
        ids = tl.load(ids_ptr + places, mask=inside, other=-1)
        known = (ids >= 0) & (ids < E)
        keys = tl.where(known, ids, E).to(tl.int32)
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        rank = tl.sum(earlier.to(tl.int32), axis=1)
        experts = tl.where(known, keys, 0)
        slots = tl.where(known, tl.gather(following, experts, axis=0), following_none) + rank
        tl.store(perm_ptr + slots, places.to(tl.int64), mask=inside)
        tl.store(inverse_ptr + places, slots.to(tl.int64), mask=inside)
        following += tl.histogram(experts, BINS, mask=known)
        following_none += tl.sum((inside & ~known).to(tl.int32), axis=0)


def _bins(E):
    return max(32, 1 << (E - 1).bit_length())  # at least one a lane of a warp


def _count(ids, E, experts, choices, out, frequency, block, num_warps):
    """Counts of E experts, or `frequency`: counts times `experts` over `choices`.

    Few ids are counted by one program in its shared memory. Many are shared out to at most MOST_PROGRAMS programs, whose counts
    a second kernel adds up: two launches, no atomic operation on global memory, nothing that must be zero before.
    """
    count = ids.numel()
    blocks = (count + block - 1) // block
    bins, given = _bins(E), (experts, choices, E)
    if blocks <= ONE_PROGRAM:
        _count_part[(1,)](ids, out, count, blocks, *given, bins, block, frequency, num_warps=num_warps)
        return
    programs = min(blocks, MOST_PROGRAMS)
    rounds = (blocks + programs - 1) // programs
    programs = (blocks + rounds - 1) // rounds
    parts = torch.empty(programs, E, dtype=torch.int32, device=ids.device)
    _count_part[(programs,)](ids, parts, count, rounds, *given, bins, block, False, num_warps=num_warps)
    _sum_parts[((E + 15) // 16,)](parts, out, programs, *given, MOST_PROGRAMS, 16, frequency, num_warps=4)


def run_group_count(ids: torch.Tensor, num_groups: int, counts: torch.Tensor, *, BLOCK=1024, num_warps=4):
    """counts[e] = how many of the ids are e; E = num_groups; ids outside of 0..E-1 count nowhere.

    Shapes: ids [M, K] int64, contiguous; counts [E] int32.
    """
    _count(ids, num_groups, 0.0, 1.0, counts, False, BLOCK, num_warps)


def run_aux_fi(
    ids: torch.Tensor,
    num_experts: int,
    num_aux_topk: int,
    frequency: torch.Tensor,
    *,
    BLOCK=1024,
    num_warps=4,
):
    """frequency[e] = float(count of e) * E / (M * num_aux_topk), E = num_experts; other ids count nowhere; zeros without tokens.

    Shapes: ids [M, K] int64, contiguous; frequency [E] float32.
    """
    choices = float(max(ids.shape[0] * num_aux_topk, 1))
    _count(ids, num_experts, float(num_experts), choices, frequency, True, BLOCK, num_warps)


def run_moe_offsets(
    ids: torch.Tensor,
    num_experts: int,
    perm: torch.Tensor,
    offs: torch.Tensor,
    inverse: torch.Tensor,
    *,
    BLOCK=64,
    num_warps=4,
):
    """perm = flat indices of ids, sorted stably by expert; offs = where each expert's slots end; inverse = slot of each index.

    Shapes: ids [M, K] int64, contiguous, fewer than 2**31; perm, inverse [M * K] int64, offs [E] int32, E = num_experts. Ids
    outside of 0..E-1 come last, in order.
    Mapping: few ids are counted and placed by one program. Many are shared out in order to at most MOST_PROGRAMS programs: one
    kernel counts each one's ids, a second finds from all counts where its ids belong. A program places BLOCK ids at a time.
    """
    E = num_experts
    count = ids.numel()
    blocks = (count + BLOCK - 1) // BLOCK
    bins = _bins(E)
    if count <= FEW_IDS:
        _place_all[(1,)](ids, perm, offs, inverse, count, blocks, E, bins, BLOCK, COUNTED, num_warps=num_warps)
        return
    # Whole runs of COUNTED ids a program, so that both kernels share the ids out in the same way.
    runs = (count + COUNTED - 1) // COUNTED
    rounds = (runs + MOST_PROGRAMS - 1) // MOST_PROGRAMS
    programs = (runs + rounds - 1) // rounds
    parts = torch.empty(programs, E, dtype=torch.int32, device=ids.device)
    _count_part[(programs,)](ids, parts, count, rounds, 0.0, 1.0, E, bins, COUNTED, False, num_warps=num_warps)
    rounds *= COUNTED // BLOCK
    _place_part[(programs,)](
        ids, parts, perm, offs, inverse, count, rounds, programs, E, bins, BLOCK, num_warps=num_warps
    )

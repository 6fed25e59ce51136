"""How often each group occurs; Triton."""

import torch
import triton
import triton.language as tl

ONE_PROGRAM = 8  # up to this many blocks of ids one program counts them all, in one launch
MOST_PROGRAMS = 128


@triton.jit(do_not_specialize=["count", "rounds"])
def _count_part(ids_ptr, out_ptr, count, rounds, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for turn in range(rounds):
        places = (part.to(tl.int64) * rounds + turn) * BLOCK + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + places, mask=places < count, other=-1)
        known = (ids >= 0) & (ids < E)
        total += tl.histogram(tl.where(known, ids, 0).to(tl.int32), BINS, mask=known)
    tl.store(out_ptr + part * E + bins, total, mask=bins < E)


@triton.jit(do_not_specialize=["parts"])
def _sum_parts(parts_ptr, out_ptr, parts, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    groups = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = tl.arange(0, BLOCK_P)[:, None]
    mask = (rows < parts) & (groups < E)[None, :]
    total = tl.sum(tl.load(parts_ptr + rows * E + groups[None, :], mask=mask, other=0), axis=0)
    tl.store(out_ptr + groups, total, mask=groups < E)


def run(ids: torch.Tensor, num_groups: int, counts: torch.Tensor, *, BLOCK=1024, num_warps=4):
    """counts[e] = how many of the ids are e; E = num_groups; ids outside of 0..E-1 count nowhere.

    Shapes: ids [M, K] int64, contiguous; counts [E] int32.
    Mapping: few ids are counted by one program in its shared memory. Many are shared out to at most MOST_PROGRAMS programs,
    whose counts a second kernel adds up: two launches, no atomic operation on global memory, nothing that must be zero
    before.
    """
    E = num_groups
    count = ids.numel()
    blocks = (count + BLOCK - 1) // BLOCK
    bins = max(32, 1 << (E - 1).bit_length())  # at least one a lane of a warp
    if blocks <= ONE_PROGRAM:
        _count_part[(1,)](ids, counts, count, blocks, E, bins, BLOCK, num_warps=num_warps)
        return
    programs = min(blocks, MOST_PROGRAMS)
    rounds = (blocks + programs - 1) // programs
    programs = (blocks + rounds - 1) // rounds
    parts = torch.empty(programs, E, dtype=torch.int32, device=ids.device)
    _count_part[(programs,)](ids, parts, count, rounds, E, bins, BLOCK, num_warps=num_warps)
    grid = ((E + 15) // 16,)
    _sum_parts[grid](parts, counts, programs, E, MOST_PROGRAMS, 16, num_warps=4)

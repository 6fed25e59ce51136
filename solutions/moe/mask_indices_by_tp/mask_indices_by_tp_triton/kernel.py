"""Expert ids of one tensor-parallel rank, renumbered; Triton."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "per_rank", "tp_rank", "num_tp_ranks"])
def _mask_indices_by_tp(ids_ptr, out_ptr, count, per_rank, tp_rank, num_tp_ranks, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    ids = tl.load(ids_ptr + places, mask=inside, other=-1)
    # Negative ids are replaced before the divisions, which round toward zero and not down.
    known = tl.where(ids < 0, 0, ids)
    ours = (ids >= 0) & ((known // per_rank) % num_tp_ranks == tp_rank)
    local = tl.where(ours, known - tp_rank * per_rank, 0)
    local = local - local // (per_rank * num_tp_ranks) * (per_rank * num_tp_ranks - per_rank)
    tl.store(out_ptr + places, tl.where(ours, local, -1).to(out_ptr.dtype.element_ty), mask=inside)


def run(
    ids: torch.Tensor,
    num_experts: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    out: torch.Tensor,
    *,
    BLOCK=512,
    num_warps=4,
):
    """out = the number of each expert among those of this tensor-parallel rank, -1 for all others.

    Shapes: ids, out [M, K], int64 or int32, contiguous. The scalars are Python numbers; num_experts >= num_ep_ranks.
    Mapping: BLOCK ids a program.
    """
    count = ids.numel()
    if count == 0:
        return
    grid = ((count + BLOCK - 1) // BLOCK,)
    per_rank = num_experts // num_ep_ranks
    _mask_indices_by_tp[grid](ids, out, count, per_rank, tp_rank, num_tp_ranks, BLOCK, num_warps=num_warps)

"""Expert ids changed one by one or row by row; Triton."""

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


def run_mask_indices_by_tp(
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


@triton.jit(do_not_specialize=["M"])
def _unique_tile(ids_ptr, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    places = rows * K + cols
    mask = (rows < M) & (cols < K)
    ids = tl.load(ids_ptr + places, mask=mask, other=-1)
    # Every id against every earlier one, from registers: nothing is read again that another thread may have overwritten.
    earlier = tl.arange(0, BLOCK_K)[None, None, :] < tl.arange(0, BLOCK_K)[None, :, None]
    equal = (ids[:, :, None] == ids[:, None, :]) & earlier
    repeated = tl.max(equal.to(tl.int32), axis=2) > 0
    tl.store(ids_ptr + places, tl.where(repeated, -1, ids), mask=mask)


def run_inplace_unique_group_indices(ids: torch.Tensor, *, BLOCK=4096, num_warps=4):
    """In each row of ids the first of equal ids stays and the others become -1, in place.

    Shapes: ids [M, K], int64, contiguous; K <= 32.
    Mapping: a program owns whole rows, as many as give about BLOCK comparisons.
    """
    M, K = ids.shape
    if M == 0:
        return
    block_k = 1 << (K - 1).bit_length()
    block_m = max(1, BLOCK // (block_k * block_k))
    _unique_tile[((M + block_m - 1) // block_m,)](ids, M, K, block_m, block_k, num_warps=num_warps)

"""Expert ids of one tensor-parallel rank, renumbered: one pass over the ids."""

import cuda.tile as ct
import torch

Int = ct.Constant[int]


@ct.kernel
def _mask_indices_by_tp(ids: ct.Array, out: ct.Array, per_rank: int, tp_rank: int, num_tp_ranks: int, TILE: Int):
    places = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = places < ids.shape[0]
    given = ct.gather(ids, places, mask=inside, check_bounds=False)
    # Negative ids are replaced before the divisions.
    known = ct.where(given < 0, 0, given)
    ours = (given >= 0) & (known // per_rank % num_tp_ranks == tp_rank)
    local = ct.where(ours, known - tp_rank * per_rank, 0)
    local = local - local // (per_rank * num_tp_ranks) * (per_rank * num_tp_ranks - per_rank)
    ct.scatter(out, places, ct.where(ours, local, -1).astype(out.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _mask_indices_by_tp.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    ids: torch.Tensor,
    num_experts: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    out: torch.Tensor,
    *,
    TILE: int = 512,
    WARPS: int = 4,
) -> None:
    """out[M, K] = the number of each expert of ids[M, K] among those of this tensor-parallel rank, -1 for all others.

    int64 or int32, contiguous, fewer than 2**31 ids. The scalars are Python numbers; num_experts >= num_ep_ranks. A block
    takes TILE ids.
    """
    count = ids.numel()
    if count == 0:
        return
    args = (ids.view(-1), out.view(-1), num_experts // num_ep_ranks, tp_rank, num_tp_ranks, TILE)
    ct.launch(torch.cuda.current_stream(), (-(-count // TILE), 1, 1), _KERNELS[WARPS], args)

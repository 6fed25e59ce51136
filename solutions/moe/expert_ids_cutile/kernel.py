"""Expert ids changed one by one or row by row."""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
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


_MASK = {warps: _mask_indices_by_tp.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_mask_indices_by_tp(
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
    ct.launch(torch.cuda.current_stream(), (-(-count // TILE), 1, 1), _MASK[WARPS], args)


@ct.kernel
def _unique(ids: Rows, TILE_M: Int, TILE_K: Int):
    m, k = ids.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    lanes = ct.arange(TILE_K, dtype=ct.int32)
    inside = (rows < m) & (lanes[None, :] < k)
    values = ct.gather(ids, (rows, lanes[None, :]), mask=inside, check_bounds=False)
    # From registers: nothing is read again that another thread may have overwritten.
    earlier = lanes[None, None, :] < lanes[None, :, None]
    equal = (values[:, :, None] == values[:, None, :]) & earlier
    repeated = ct.max(equal.astype(ct.int32), axis=2) > 0
    ct.scatter(ids, (rows, lanes[None, :]), ct.where(repeated, -1, values), mask=inside, check_bounds=False)


_UNIQUE = {warps: _unique.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_inplace_unique_group_indices(ids: torch.Tensor, *, TILE: int = 4096, WARPS: int = 4) -> None:
    """In each row of ids[M, K] (int64, contiguous, K <= 32) the first of equal ids stays and the others become -1, in place.

    A block owns whole rows, as many as give about TILE comparisons.
    """
    m, k = ids.shape
    if m == 0:
        return
    tile_k = 1 << (k - 1).bit_length()
    tile_m = max(1, TILE // (tile_k * tile_k))
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m), 1, 1), _UNIQUE[WARPS], (ids, tile_m, tile_k))

"""The first of equal ids of each row, in place: every id is compared with every earlier one."""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]


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


_KERNELS = {warps: _unique.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(ids: torch.Tensor, *, TILE: int = 4096, WARPS: int = 4) -> None:
    """In each row of ids[M, K] (int64, contiguous, K <= 32) the first of equal ids stays and the others become -1, in place.

    A block owns whole rows, as many as give about TILE comparisons.
    """
    m, k = ids.shape
    if m == 0:
        return
    tile_k = 1 << (k - 1).bit_length()
    tile_m = max(1, TILE // (tile_k * tile_k))
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m), 1, 1), _KERNELS[WARPS], (ids, tile_m, tile_k))

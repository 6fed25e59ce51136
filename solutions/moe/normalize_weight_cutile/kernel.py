"""Each row divided by its sum, which is added up in order."""

from typing import Annotated

import cuda.tile as ct
import torch

Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]


@ct.kernel
def _normalize_weight(weights: Rows, denominator: ct.Array, out: Rows, TILE_M: Int, TILE_K: Int):
    m, k = weights.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)
    cols = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    inside = (rows[:, None] < m) & (cols < k)
    values = ct.gather(weights, (rows[:, None], cols), mask=inside, check_bounds=False)
    total = ct.full((TILE_M,), 1e-20, dtype=ct.float32)
    # In order of the choices, as the Definition says: a tree sum would differ in the last bit.
    for choice in range(k):
        total = total + ct.gather(weights, (rows, choice), mask=rows < m, check_bounds=False)
    ct.scatter(denominator, rows, total, mask=rows < m, check_bounds=False)
    ct.scatter(out, (rows[:, None], cols), values / total[:, None], mask=inside, check_bounds=False)


_KERNELS = {warps: _normalize_weight.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    weights: torch.Tensor, denominator: torch.Tensor, out: torch.Tensor, *, TILE: int = 1024, WARPS: int = 4
) -> None:
    """denominator[M] = 1e-20 + sum of the row, in order; out[M, K] = weights / denominator, correctly rounded; all float32.

    A block owns whole rows, about TILE values of them. The columns that are added up one by one come from the L1 cache.
    K <= 64.
    """
    m, k = weights.shape
    if m == 0:
        return
    tile_k = 1 << (k - 1).bit_length()
    tile_m = max(1, TILE // tile_k)
    args = (weights, denominator, out, tile_m, tile_k)
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m), 1, 1), _KERNELS[WARPS], args)

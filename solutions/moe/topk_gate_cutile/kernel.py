"""Indices of the K largest scores of each row: one launch, whole rows in registers."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

NOTHING = -float("inf")


@ct.kernel
def _topk(scores: Rows, out: Rows, K: Int, TILE_M: Int, TILE_E: Int, TILE_K: Int):
    m, e = scores.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    experts = ct.arange(TILE_E, dtype=ct.int32)[None, :]
    choices = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    # What is left is told apart from scores of -inf, so that every choice is another expert.
    left = (experts < e) & (rows < m)
    values = ct.gather(scores, (rows, experts), mask=left, check_bounds=False, padding_value=NOTHING)
    ids = ct.zeros((TILE_M, TILE_K), dtype=ct.int32)
    for k in range(K):
        best = ct.max(ct.where(left, values, NOTHING), axis=1, keepdims=True)
        first = ct.min(ct.where(left & (values == best), experts, TILE_E), axis=1, keepdims=True)
        left = left & (experts != first)
        ids = ct.where(choices == k, first, ids)
    mask = (choices < K) & (rows < m)
    ct.scatter(out, (rows, choices), ids.astype(ct.int64), mask=mask, check_bounds=False)


_TOPK = {warps: _topk.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(scores: torch.Tensor, top_k: int, topk_idx: torch.Tensor, *, TILE_M: int | None = None, WARPS: int = 4) -> None:
    """topk_idx[m] = indices of the top_k largest scores[m], largest first; of equal scores the smaller index first.

    scores: [M, E] float32, unit last stride and any row stride; topk_idx: [M, K] int64, contiguous. -inf is a score like any
    other. A block owns TILE_M whole rows and keeps them in registers; None: 1 while there are few rows to share out, else as many
    as make a tile of 1024 scores.
    """
    m, e = scores.shape
    if m == 0:
        return
    tile_e = 1 << (e - 1).bit_length()
    tile_m = TILE_M or (1 if m <= 16 else max(1, 1024 // tile_e))
    tiles = (tile_m, tile_e, 1 << (top_k - 1).bit_length())
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m), 1, 1), _TOPK[WARPS], (scores, topk_idx, top_k, *tiles))

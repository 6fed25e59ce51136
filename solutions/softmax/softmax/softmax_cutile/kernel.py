"""Softmax over the last axis: rows in registers, or streamed twice with a running maximum when they are too long."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

MAX_TILE_N = 16384  # values that one block keeps in registers
CHUNK_N = 4096
GROUP = 8  # values that share a running maximum: one 16-byte load, so the maximum needs no exchange between threads
LOWEST = -3.4028234663852886e38


@ct.kernel
def _softmax_rows(x: Rows, out: Rows, TILE_M: Int, TILE_N: Int):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False, padding_value=-float("inf")).astype(ct.float32)
    # A row of -inf only, or with +inf or NaN in it, becomes NaN through inf - inf, as in PyTorch.
    exps = ct.exp(values - ct.max(values, axis=1, keepdims=True))
    inverse = 1.0 / ct.sum(exps, axis=1, keepdims=True)
    ct.scatter(out, (rows, cols), (exps * inverse).astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _softmax_long_row(x: Rows, out: Rows, TILE_N: Int):
    n = x.shape[1]
    row = ct.bid(0)
    lanes = ct.arange(TILE_N, dtype=ct.int32)
    # Running maximum and sum of each group of lanes. The maximum starts finite: with -inf, a group that has seen
    # nothing but -inf (a masked vocabulary) would compute inf - inf.
    top = ct.full((TILE_N // GROUP, 1), LOWEST, dtype=ct.float32)
    total = ct.zeros((TILE_N // GROUP, 1), dtype=ct.float32)
    for chunk in range(ct.cdiv(n, TILE_N)):
        cols = chunk * TILE_N + lanes
        values = ct.gather(x, (row, cols), mask=cols < n, check_bounds=False, padding_value=-float("inf"))
        values = values.astype(ct.float32).reshape((TILE_N // GROUP, GROUP))
        new_top = ct.maximum(top, ct.max(values, axis=1, keepdims=True))
        total = total * ct.exp(top - new_top) + ct.sum(ct.exp(values - new_top), axis=1, keepdims=True)
        top = new_top
    row_top = ct.max(top)
    inverse = 1.0 / ct.sum(total * ct.exp(top - row_top))  # 1 / 0 for a row of -inf: 0 * inf is the NaN it must be
    for chunk in range(ct.cdiv(n, TILE_N)):  # the second read of the row comes from L2
        cols = chunk * TILE_N + lanes
        inside = cols < n
        values = ct.gather(x, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
        result = (ct.exp(values - row_top) * inverse).astype(out.dtype)
        ct.scatter(out, (row, cols), result, mask=inside, check_bounds=False)


# CLUSTER blocks on neighbouring multiprocessors share one tile, so a row of up to CLUSTER * MAX_TILE_N values fits.
_ROWS = {
    (warps, cluster): _softmax_rows.replace_hints(num_worker_warps=warps, num_ctas=cluster)
    for warps in (4, 8)
    for cluster in (1, 2, 4, 8)
}
_LONG_ROW = {warps: _softmax_long_row.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
    CLUSTER: int | None = None,
) -> None:
    """out[M, N] = T(softmax(x, dim=-1)) for x[M, N] in T = bf16, fp16 or fp32; fp32 inside, maximum subtracted.

    Rows may be further apart than N elements. Up to 16384 columns (CLUSTER times as many with CLUSTER blocks a row) a
    row is read once and kept in registers, TILE_M rows a block of WARPS (4 or 8) warps. Longer rows are read twice: the
    first pass keeps a running maximum and sum, the second, mostly from L2, writes.

    None chooses by shape: TILE_M so that a block has at least 16 bytes a thread to load; 8 warps for long rows, and
    for any row that fills them when there are too few rows to fill the GPU; CLUSTER = 1, except for rows beyond 16384
    columns that are too few to occupy the GPU with one block each.
    """
    m, n = x.shape
    if m == 0:
        return
    tile_n = 1 << (n - 1).bit_length()
    if CLUSTER is None:
        CLUSTER = min(8, max(1, tile_n // MAX_TILE_N)) if m <= 16 else 1
    if WARPS is None:
        WARPS = 8 if tile_n > 4096 or (m <= 256 and tile_n >= 2048) else 4
    stream = torch.cuda.current_stream()
    if tile_n > MAX_TILE_N * CLUSTER:
        ct.launch(stream, (m, 1, 1), _LONG_ROW[WARPS], (x, out, CHUNK_N))
        return
    TILE_M = max(1, 1024 // tile_n if TILE_M is None else min(TILE_M, MAX_TILE_N // tile_n))
    ct.launch(stream, (-(-m // TILE_M), 1, 1), _ROWS[WARPS, CLUSTER], (x, out, TILE_M, tile_n))

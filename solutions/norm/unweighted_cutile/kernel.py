"""RMSNorm over the last axis without a weight, cuTile: the inverse root is rounded to T, then the product."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

MAX_TILE_N = 16384  # longer rows do not fit in the registers of a block and are read twice
CHUNK_N = 4096


@ct.kernel
def _rms_norm_rows(x: Rows, out: Rows, eps: float, TILE_M: Int, TILE_N: Int):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    mean_square = ct.sum(values * values, axis=1, keepdims=True) * (1.0 / n)
    inverse_rms = ct.rsqrt(mean_square + eps).astype(out.dtype).astype(ct.float32)
    ct.scatter(out, (rows, cols), (values * inverse_rms).astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _rms_norm_long_row(x: Rows, out: Rows, eps: float, TILE_N: Int):
    n = x.shape[1]
    row = ct.bid(0)
    lanes = ct.arange(TILE_N, dtype=ct.int32)
    squares = ct.zeros((TILE_N,), dtype=ct.float32)
    for chunk in range(ct.cdiv(n, TILE_N)):
        cols = chunk * TILE_N + lanes
        values = ct.gather(x, (row, cols), mask=cols < n, check_bounds=False).astype(ct.float32)
        squares = squares + values * values
    inverse_rms = ct.rsqrt(ct.sum(squares) * (1.0 / n) + eps).astype(out.dtype).astype(ct.float32)
    for chunk in range(ct.cdiv(n, TILE_N)):  # the second read of the row comes from L2
        cols = chunk * TILE_N + lanes
        inside = cols < n
        values = ct.gather(x, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
        ct.scatter(out, (row, cols), (values * inverse_rms).astype(out.dtype), mask=inside, check_bounds=False)


_ROWS = {warps: _rms_norm_rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_LONG_ROW = {warps: _rms_norm_long_row.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(x: torch.Tensor, eps: float, out: torch.Tensor, *, TILE_M=None, WARPS=None):
    """out[M, N] = T(x[M, N] * T(rsqrt(mean(x^2) + eps))), statistics in fp32.

    x and out, whose rows may be further apart than N elements, are T = bf16, fp16 or fp32. A block normalises TILE_M whole rows
    with WARPS (4 or 8) warps.

    None chooses by shape: TILE_M so that a block has at least 16 bytes a thread to load; 8 warps for long rows, and
    for any row that fills them when there are too few rows to fill the GPU (less work a thread, so lower latency).
    """
    m, n = x.shape
    if m == 0:
        return
    tile_n = 1 << (n - 1).bit_length()
    if WARPS is None:
        WARPS = 8 if tile_n > 4096 or (m <= 256 and tile_n >= 2048) else 4
    stream = torch.cuda.current_stream()
    if tile_n > MAX_TILE_N:
        ct.launch(stream, (m, 1, 1), _LONG_ROW[WARPS], (x, out, eps, CHUNK_N))
        return
    TILE_M = max(1, 1024 // tile_n if TILE_M is None else min(TILE_M, MAX_TILE_N // tile_n))
    ct.launch(stream, (-(-m // TILE_M), 1, 1), _ROWS[WARPS], (x, out, eps, TILE_M, tile_n))

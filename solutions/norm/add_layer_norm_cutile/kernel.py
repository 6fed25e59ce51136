"""Residual add and layer norm in one pass and new tensors, cuTile."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]

MAX_TILE_N = 16384  # longer rows do not fit in the registers of a block and are read three times
CHUNK_N = 4096
# The row's first value is subtracted before anything is summed: a mean that is many deviations away from zero then costs no
# digits, and a row of equal values gives exactly zero. Any value of the row is within sqrt(N) deviations of the mean.


@ct.function
def _values(x, residual, row, cols, inside):
    """Return the sum of x and the residual, rounded to T."""
    values = ct.gather(x, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
    added = ct.gather(residual, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
    return (values + added).astype(x.dtype)


@ct.kernel
def _add_layer_norm_rows(
    x: Rows,
    residual: Rows,
    weight: Vector,
    bias: Vector,
    out: Rows,
    sums: Rows,
    eps: float,
    TILE_M: Int,
    TILE_N: Int,
):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    # The gathers are independent, so all are in flight before a reduction waits.
    values = _values(x, residual, rows, cols, inside)
    first = _values(x, residual, rows, rows * 0, rows < m).astype(ct.float32)
    scale = ct.gather(weight, cols, mask=cols < n, check_bounds=False).astype(ct.float32)
    shift = ct.gather(bias, cols, mask=cols < n, check_bounds=False).astype(ct.float32)
    shifted = ct.where(inside, values.astype(ct.float32) - first, 0.0)
    mean = ct.sum(shifted, axis=1, keepdims=True) * (1.0 / n)
    centred = ct.where(inside, shifted - mean, 0.0)
    variance = ct.sum(centred * centred, axis=1, keepdims=True) * (1.0 / n)
    result = centred * ct.rsqrt(variance + eps) * scale + shift
    ct.scatter(sums, (rows, cols), values, mask=inside, check_bounds=False)
    ct.scatter(out, (rows, cols), result.astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _add_layer_norm_long_row(
    x: Rows,
    residual: Rows,
    weight: Vector,
    bias: Vector,
    out: Rows,
    sums: Rows,
    eps: float,
    TILE_N: Int,
):
    n = x.shape[1]
    row = ct.bid(0)
    lanes = ct.arange(TILE_N, dtype=ct.int32)
    first = _values(x, residual, row, ct.zeros((1,), dtype=ct.int32), True).astype(ct.float32)
    total = ct.zeros((TILE_N,), dtype=ct.float32)
    for chunk in range(ct.cdiv(n, TILE_N)):
        cols = chunk * TILE_N + lanes
        values = _values(x, residual, row, cols, cols < n).astype(ct.float32)
        total = total + ct.where(cols < n, values - first, 0.0)
    mean = ct.sum(total) * (1.0 / n)
    squares = ct.zeros((TILE_N,), dtype=ct.float32)
    for chunk in range(ct.cdiv(n, TILE_N)):  # the later reads of the row come from L2
        cols = chunk * TILE_N + lanes
        values = _values(x, residual, row, cols, cols < n).astype(ct.float32)
        centred = ct.where(cols < n, values - first - mean, 0.0)
        squares = squares + centred * centred
    rstd = ct.rsqrt(ct.sum(squares) * (1.0 / n) + eps)
    for chunk in range(ct.cdiv(n, TILE_N)):
        cols = chunk * TILE_N + lanes
        inside = cols < n
        values = _values(x, residual, row, cols, inside)
        scale = ct.gather(weight, cols, mask=inside, check_bounds=False).astype(ct.float32)
        shift = ct.gather(bias, cols, mask=inside, check_bounds=False).astype(ct.float32)
        result = (values.astype(ct.float32) - first - mean) * rstd * scale + shift
        ct.scatter(sums, (row, cols), values, mask=inside, check_bounds=False)
        ct.scatter(out, (row, cols), result.astype(out.dtype), mask=inside, check_bounds=False)


_ROWS = {warps: _add_layer_norm_rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_LONG_ROW = {warps: _add_layer_norm_long_row.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    TILE_M=None,
    WARPS=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T((s - mean) * rsqrt(var + eps) * weight[N] + bias[N]), fp32 inside.

    x, residual, out and residual_out, whose rows may be further apart than N elements, weight and bias are T = bf16, fp16, fp32.
    A block normalises TILE_M whole rows with WARPS (4 or 8) warps.

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
    arguments = (x, residual, weight, bias, out, residual_out, eps)
    if tile_n > MAX_TILE_N:
        ct.launch(stream, (m, 1, 1), _LONG_ROW[WARPS], (*arguments, CHUNK_N))
        return
    TILE_M = max(1, 1024 // tile_n if TILE_M is None else min(TILE_M, MAX_TILE_N // tile_n))
    ct.launch(stream, (-(-m // TILE_M), 1, 1), _ROWS[WARPS], (*arguments, TILE_M, tile_n))

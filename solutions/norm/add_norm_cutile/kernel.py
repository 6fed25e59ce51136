"""Residual add and RMSNorm in one pass over memory, both in new tensors: the sum stays in registers between its two uses."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]

MAX_TILE_N = 16384  # longer rows do not fit in the registers of a block and are read twice
CHUNK_N = 4096
# Values of FORM: the normalised value is rounded to T as well, it is not, and it is not and the factor is 1 + weight.
ROUNDED, FP32, ZERO_CENTRED = 0, 1, 2


@ct.function
def _weighted(normed, weight, out, FORM: Int):
    """What is written to out, for normalised values in fp32 and their weights in T."""
    if FORM == ROUNDED:
        result = normed.astype(out.dtype) * weight  # the product of two T is rounded to T
    else:
        factor = weight.astype(ct.float32)
        if FORM == ZERO_CENTRED:
            factor = 1.0 + factor
        result = (normed * factor).astype(out.dtype)
    return result


@ct.kernel
def _add_rms_norm_rows(
    x: Rows, residual: Rows, weight: Vector, out: Rows, sums: Rows, eps: float, FORM: Int, TILE_M: Int, TILE_N: Int
):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    # The three gathers are independent, so all are in flight before the reduction waits.
    added = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    before = ct.gather(residual, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    scale = ct.gather(weight, cols, mask=cols < n, check_bounds=False)
    total = (added + before).astype(x.dtype)  # what is normalised is the rounded sum
    ct.scatter(sums, (rows, cols), total, mask=inside, check_bounds=False)
    values = total.astype(ct.float32)
    mean_square = ct.sum(values * values, axis=1, keepdims=True) * (1.0 / n)
    result = _weighted(values * ct.rsqrt(mean_square + eps), scale, out, FORM)
    ct.scatter(out, (rows, cols), result, mask=inside, check_bounds=False)


@ct.function
def _rounded_sum(x, residual, row, cols, inside):
    added = ct.gather(x, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
    before = ct.gather(residual, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
    return (added + before).astype(x.dtype)


@ct.kernel
def _add_rms_norm_long_row(
    x: Rows, residual: Rows, weight: Vector, out: Rows, sums: Rows, eps: float, FORM: Int, TILE_N: Int
):
    n = x.shape[1]
    row = ct.bid(0)
    lanes = ct.arange(TILE_N, dtype=ct.int32)
    squares = ct.zeros((TILE_N,), dtype=ct.float32)
    for chunk in range(ct.cdiv(n, TILE_N)):
        cols = chunk * TILE_N + lanes
        values = _rounded_sum(x, residual, row, cols, cols < n).astype(ct.float32)
        squares = squares + values * values
    inverse_rms = ct.rsqrt(ct.sum(squares) * (1.0 / n) + eps)
    # The sum is computed again from what L2 holds.
    for chunk in range(ct.cdiv(n, TILE_N)):
        cols = chunk * TILE_N + lanes
        inside = cols < n
        total = _rounded_sum(x, residual, row, cols, inside)
        scale = ct.gather(weight, cols, mask=inside, check_bounds=False)
        result = _weighted(total.astype(ct.float32) * inverse_rms, scale, out, FORM)
        ct.scatter(sums, (row, cols), total, mask=inside, check_bounds=False)
        ct.scatter(out, (row, cols), result, mask=inside, check_bounds=False)


_ROWS = {warps: _add_rms_norm_rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_LONG_ROW = {warps: _add_rms_norm_long_row.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _launches(form):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x, residual, out and residual_out [M, N], whose rows may be further apart than N elements, and weight[N] are T = bf16,
    fp16 or fp32. The sum s = T(x + residual) is made in fp32, rounded to T and written to residual_out; mean and
    reciprocal root of the rounded sum are fp32. A block handles TILE_M whole rows with WARPS (4 or 8) warps.

    None chooses by shape: TILE_M so that a block has at least 16 bytes a thread to load; 8 warps for long rows, and
    for any row that fills them when there are too few rows to fill the GPU (less work a thread, so lower latency).
    """

    def run(x, residual, weight, eps, out, residual_out, *, TILE_M=None, WARPS=None):
        m, n = x.shape
        if m == 0:
            return
        tile_n = 1 << (n - 1).bit_length()
        if WARPS is None:
            WARPS = 8 if tile_n > 4096 or (m <= 256 and tile_n >= 2048) else 4
        stream = torch.cuda.current_stream()
        if tile_n > MAX_TILE_N:
            ct.launch(stream, (m, 1, 1), _LONG_ROW[WARPS], (x, residual, weight, out, residual_out, eps, form, CHUNK_N))
            return
        TILE_M = max(1, 1024 // tile_n if TILE_M is None else min(TILE_M, MAX_TILE_N // tile_n))
        args = (x, residual, weight, out, residual_out, eps, form, TILE_M, tile_n)
        ct.launch(stream, (-(-m // TILE_M), 1, 1), _ROWS[WARPS], args)

    return lambda declared: run


@_launches(ROUNDED)
def run_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    TILE_M=None,
    WARPS=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(T(s * rsqrt(mean(s^2) + eps)) * weight[N])."""


@_launches(FP32)
def run_add_rms_norm_fp32(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    TILE_M=None,
    WARPS=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(s * rsqrt(mean(s^2) + eps) * weight[N]), one cast after the product."""


@_launches(ZERO_CENTRED)
def run_add_rms_norm_gemma(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    TILE_M=None,
    WARPS=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(s * rsqrt(mean(s^2) + eps) * (1 + weight[N])), one cast at the end."""

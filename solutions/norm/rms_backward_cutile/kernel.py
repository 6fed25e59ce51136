"""The gradients of RMSNorm: rows and their gradients are kept in registers, the weight's sums are added in a fixed order."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]

MAX_TILE = 16384  # values of each input that the registers of a block hold
SUM_PARTS, SUM_COLUMNS = 64, 32  # partial sums that are added at once, and the columns that a block does that for


@ct.function
def _row_gradients(x, scale, grad_out, grad_x, rows, cols, inside, eps):
    """Writes the gradients of some rows, and gives what each value of them adds to the weight's."""
    n = x.shape[1]
    values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    grad = ct.gather(grad_out, (rows, cols), mask=inside, check_bounds=False)
    rstd = ct.rsqrt(ct.sum(values * values, axis=1, keepdims=True) * (1.0 / n) + eps)
    normed = values * rstd
    to_normed = (grad * scale).astype(ct.float32)  # the product of two T is rounded to T
    along = ct.sum(to_normed * normed, axis=1, keepdims=True) * (1.0 / n)
    gradient = rstd * (to_normed - normed * along)
    ct.scatter(grad_x, (rows, cols), gradient.astype(grad_x.dtype), mask=inside, check_bounds=False)
    return grad.astype(ct.float32) * normed.astype(x.dtype).astype(ct.float32)


@ct.kernel
def _rms_norm_backward_x(x: Rows, weight: Vector, grad_out: Rows, grad_x: Rows, eps: float, TILE_M: Int, TILE_N: Int):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block the grid is exact
        inside = inside & (rows < m)
    scale = ct.gather(weight, cols, mask=cols < n, check_bounds=False)
    _row_gradients(x, scale, grad_out, grad_x, rows, cols, inside, eps)


@ct.kernel
def _rms_norm_backward(
    x: Rows,
    weight: Vector,
    grad_out: Rows,
    grad_x: Rows,
    partial: Rows,
    eps: float,
    per_part: int,
    TILE_M: Int,
    TILE_N: Int,
):
    m, n = x.shape
    part = ct.bid(0)
    first = part * per_part
    last = ct.minimum(first + per_part, m)
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    in_row = cols < n
    scale = ct.gather(weight, cols, mask=in_row, check_bounds=False)
    sums = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for tile in range(ct.cdiv(last - first, TILE_M)):
        rows = first + tile * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
        inside = in_row & (rows < last)
        added = _row_gradients(x, scale, grad_out, grad_x, rows, cols, inside, eps)
        # Beyond the last row the reciprocal root may be infinite, where eps is 0.
        sums = sums + ct.where(inside, added, 0.0)
    totals = ct.sum(sums, axis=0, keepdims=True)
    ct.scatter(partial, (part, cols), totals, mask=in_row, check_bounds=False)


@ct.kernel
def _sum_parts(partial: Rows, grad_weight: Vector, parts: int, TILE_P: Int, TILE_N: Int):
    n = grad_weight.shape[0]
    cols = ct.bid(0) * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    sums = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)
    for tile in range(ct.cdiv(parts, TILE_P)):
        rows = tile * TILE_P + ct.arange(TILE_P, dtype=ct.int32)[:, None]
        sums = sums + ct.gather(partial, (rows, cols), mask=(rows < parts) & (cols < n), check_bounds=False)
    totals = ct.sum(sums, axis=0, keepdims=True).astype(grad_weight.dtype)
    ct.scatter(grad_weight, cols, totals, mask=cols < n, check_bounds=False)


_ROWS = {warps: _rms_norm_backward_x.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_PARTS = {warps: _rms_norm_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _tile(n: int, TILE_M: int | None, WARPS: int | None, values: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a block that has `values` values of each input, or one row."""
    tile_n = 1 << (n - 1).bit_length()
    tile_m = min(TILE_M or values // tile_n, MAX_TILE // tile_n)
    return max(1, tile_m), tile_n, WARPS or (8 if tile_n >= 4096 else 4)


def run_rms_norm_backward_x(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """grad_x = T(r * (h - n * mean(h * n))), r = rsqrt(mean(x^2) + eps), n = x * r, h = T(grad_out * weight), fp32 inside.

    x, grad_out, grad_x: [M, N] with N <= 16384, rows may be further apart than N elements; weight: [N]; all T = bf16, fp16
    or fp32. A block has TILE_M whole rows and WARPS (4 or 8) warps. None chooses by the row length.
    """
    m, n = x.shape
    if m == 0:
        return
    tile_m, tile_n, warps = _tile(n, TILE_M, WARPS, 1024)
    arguments = (x, weight, grad_out, grad_x, eps, tile_m, tile_n)
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m), 1, 1), _ROWS[warps], arguments)


def run_rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS: int = 264,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """grad_x as above, and grad_weight = T(sum over rows of grad_out * T(n)); fp32 inside and in the sum.

    Shapes as above, grad_weight [N]. At most PARTS blocks have a run of rows each and leave fp32 partial sums, which a second
    kernel adds up: no atomics, so the order of the sums depends on the shape only. 264 is two for each multiprocessor of
    an H200.
    """
    m, n = x.shape
    tile_m, tile_n, warps = _tile(n, TILE_M, WARPS, 4096)
    tiles = -(-m // tile_m)
    per_part = -(-tiles // PARTS) * tile_m  # whole tiles of rows, as even as they go
    parts = -(-m // per_part) if m else 0  # no part may be empty
    partial = torch.empty((max(parts, 1), n), dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream()
    if parts:
        arguments = (x, weight, grad_out, grad_x, partial, eps, per_part, tile_m, tile_n)
        ct.launch(stream, (parts, 1, 1), _PARTS[warps], arguments)
    blocks = -(-n // SUM_COLUMNS)
    ct.launch(stream, (blocks, 1, 1), _sum_parts, (partial, grad_weight, parts, SUM_PARTS, SUM_COLUMNS))

"""The gradients of layer norm without a shift, and of a residual sum and its layer norm: rows and sums in registers."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]

MAX_TILE = 16384  # values of each input that the registers of a block hold
SUM_PARTS, SUM_COLUMNS = 64, 32  # partial sums that are added at once, and the columns that a block does that for


@ct.kernel
def _layer_norm_backward(
    x: Rows,
    weight: Vector,
    grad_out: Rows,
    grad_total: Rows,
    grad_x: Rows,
    scale_parts: Rows,
    shift_parts: Rows,
    eps: float,
    per_part: int,
    ADDS: Flag,
    TILE_M: Int,
    TILE_N: Int,
):
    """ADDS: the gradient of the residual stream is added to the rounded one of the norm, and the shift has one, too."""
    m, n = x.shape
    part = ct.bid(0)
    begin = part * per_part
    end = ct.minimum(begin + per_part, m)
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    in_row = cols < n
    scale = ct.gather(weight, cols, mask=in_row, check_bounds=False).astype(ct.float32)
    scale_sums = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    shift_sums = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for tile in range(ct.cdiv(end - begin, TILE_M)):
        rows = begin + tile * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
        inside = in_row & (rows < end)
        values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
        grad = ct.gather(grad_out, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
        if ADDS:
            given = ct.gather(grad_total, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
        # The row's first value is subtracted before anything is summed, as in the forward.
        first = ct.gather(x, (rows, rows * 0), mask=rows < end, check_bounds=False).astype(ct.float32)
        grad = ct.where(inside, grad, 0.0)
        shifted = ct.where(inside, values - first, 0.0)
        mean = ct.sum(shifted, axis=1, keepdims=True) * (1.0 / n)
        centred = ct.where(inside, shifted - mean, 0.0)
        rstd = ct.rsqrt(ct.sum(centred * centred, axis=1, keepdims=True) * (1.0 / n) + eps)
        # Beyond the last row the reciprocal root may be infinite, where eps is 0.
        normed = ct.where(inside, centred * rstd, 0.0)
        grad_normed = grad * scale
        shared = ct.sum(grad_normed, axis=1, keepdims=True) * (1.0 / n)
        along = ct.sum(grad_normed * normed, axis=1, keepdims=True) * (1.0 / n)
        gradient = (rstd * (grad_normed - shared - normed * along)).astype(grad_x.dtype)
        if ADDS:
            gradient = (gradient.astype(ct.float32) + given).astype(grad_x.dtype)
        ct.scatter(grad_x, (rows, cols), gradient, mask=inside, check_bounds=False)
        scale_sums = scale_sums + grad * normed
        if ADDS:
            shift_sums = shift_sums + grad
    scale_total = ct.sum(scale_sums, axis=0, keepdims=True)
    ct.scatter(scale_parts, (part, cols), scale_total, mask=in_row, check_bounds=False)
    if ADDS:
        shift_total = ct.sum(shift_sums, axis=0, keepdims=True)
        ct.scatter(shift_parts, (part, cols), shift_total, mask=in_row, check_bounds=False)


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


_PARTS = {warps: _layer_norm_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _launch(x, weight, grad_out, grad_total, eps, grad_x, grad_weight, grad_bias, adds, PARTS, TILE_M, WARPS):
    m, n = x.shape
    tile_n = 1 << (n - 1).bit_length()
    tile_m = max(1, min(TILE_M or 4096 // tile_n, MAX_TILE // tile_n))
    warps = WARPS or (8 if tile_n >= 1024 else 4)
    tiles = -(-m // tile_m)
    per_part = -(-tiles // PARTS) * tile_m  # whole tiles of rows, as even as they go
    parts = -(-m // per_part) if m else 0  # no part may be empty
    partial = torch.empty((2 if adds else 1, max(parts, 1), n), dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream()
    if parts:
        arguments = (
            x,
            weight,
            grad_out,
            grad_total,
            grad_x,
            partial[0],
            partial[-1],
            eps,
            per_part,
            adds,
            tile_m,
            tile_n,
        )
        ct.launch(stream, (parts, 1, 1), _PARTS[warps], arguments)
    blocks = -(-n // SUM_COLUMNS)
    ct.launch(stream, (blocks, 1, 1), _sum_parts, (partial[0], grad_weight, parts, SUM_PARTS, SUM_COLUMNS))
    if adds:
        ct.launch(stream, (blocks, 1, 1), _sum_parts, (partial[-1], grad_bias, parts, SUM_PARTS, SUM_COLUMNS))


def run_layer_norm_no_bias_backward(
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
    """grad_x = T(r * (h - mean(h) - n * mean(h * n))), grad_weight = T(sum over rows of grad_out * n).

    r = rsqrt(var + eps), n = (x - mean) * r, h = grad_out * weight; fp32 inside and in the sums, one cast to T.
    x, grad_out, grad_x: [M, N] with N <= 16384, rows may be further apart than N elements; weight, grad_weight: [N]; all T =
    bf16, fp16 or fp32. At most PARTS blocks have a run of rows each and leave fp32 partial sums, which a second kernel adds up:
    no atomics, so the order of the sums depends on the shape only. 264 is two for each multiprocessor of an H200. A block has
    TILE_M whole rows at once and WARPS (4 or 8) warps. None chooses by the row length.
    """
    _launch(x, weight, grad_out, grad_out, eps, grad_x, grad_weight, grad_weight, False, PARTS, TILE_M, WARPS)


def run_add_layer_norm_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    *,
    PARTS: int = 264,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """grad_x = T(T(gradient as above) + grad_residual_out); grad_weight and grad_bias sum grad_out * n and grad_out."""
    _launch(
        residual_out,
        weight,
        grad_out,
        grad_residual_out,
        eps,
        grad_x,
        grad_weight,
        grad_bias,
        True,
        PARTS,
        TILE_M,
        WARPS,
    )

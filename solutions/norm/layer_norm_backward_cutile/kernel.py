"""The gradients of layer norm: rows and their gradients are kept in registers, sums over rows are added in a fixed order."""

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


@ct.kernel
def _layer_norm_backward(
    x: Rows,
    weight: Vector,
    grad_out: Rows,
    grad_x: Rows,
    scale_parts: Rows,
    shift_parts: Rows,
    eps: float,
    per_part: int,
    TILE_M: Int,
    TILE_N: Int,
):
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
        gradient = rstd * (grad_normed - shared - normed * along)
        ct.scatter(grad_x, (rows, cols), gradient.astype(grad_x.dtype), mask=inside, check_bounds=False)
        scale_sums = scale_sums + grad * normed
        shift_sums = shift_sums + grad
    scale_total = ct.sum(scale_sums, axis=0, keepdims=True)
    shift_total = ct.sum(shift_sums, axis=0, keepdims=True)
    ct.scatter(scale_parts, (part, cols), scale_total, mask=in_row, check_bounds=False)
    ct.scatter(shift_parts, (part, cols), shift_total, mask=in_row, check_bounds=False)


@ct.kernel
def _sum_parts(
    scale_parts: Rows,
    shift_parts: Rows,
    grad_weight: Vector,
    grad_bias: Vector,
    parts: int,
    TILE_P: Int,
    TILE_N: Int,
):
    n = grad_weight.shape[0]
    cols = ct.bid(0) * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    scale_sums = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)
    shift_sums = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)
    for tile in range(ct.cdiv(parts, TILE_P)):
        rows = tile * TILE_P + ct.arange(TILE_P, dtype=ct.int32)[:, None]
        inside = (rows < parts) & (cols < n)
        found_scale = ct.gather(scale_parts, (rows, cols), mask=inside, check_bounds=False)
        found_shift = ct.gather(shift_parts, (rows, cols), mask=inside, check_bounds=False)
        scale_sums = scale_sums + ct.where(inside, found_scale, 0.0)
        shift_sums = shift_sums + ct.where(inside, found_shift, 0.0)
    scale_total = ct.sum(scale_sums, axis=0, keepdims=True).astype(grad_weight.dtype)
    shift_total = ct.sum(shift_sums, axis=0, keepdims=True).astype(grad_bias.dtype)
    ct.scatter(grad_weight, cols, scale_total, mask=cols < n, check_bounds=False)
    ct.scatter(grad_bias, cols, shift_total, mask=cols < n, check_bounds=False)


_PARTS = {warps: _layer_norm_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    *,
    PARTS: int = 264,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """grad_x = T(r * (h - mean(h) - n * mean(h * n))); grad_weight and grad_bias are the sums of grad_out * n and grad_out.

    r = rsqrt(var + eps), n = (x - mean) * r, h = grad_out * weight; fp32 inside and in the sums, one cast to T.
    x, grad_out, grad_x: [M, N] with N <= 16384, rows may be further apart than N elements; weight, grad_weight, grad_bias:
    [N]; all T = bf16, fp16 or fp32. At most PARTS blocks have a run of rows each and leave fp32 partial sums, which a second
    kernel adds up: no atomics, so the order of the sums depends on the shape only. 264 is two for each multiprocessor of
    an H200. A block has TILE_M whole rows at once and WARPS (4 or 8) warps. None chooses by the row length.
    """
    m, n = x.shape
    tile_n = 1 << (n - 1).bit_length()
    tile_m = max(1, min(TILE_M or 4096 // tile_n, MAX_TILE // tile_n))
    warps = WARPS or (8 if tile_n >= 1024 else 4)
    tiles = -(-m // tile_m)
    per_part = -(-tiles // PARTS) * tile_m  # whole tiles of rows, as even as they go
    parts = -(-m // per_part) if m else 0  # no part may be empty
    partial = torch.empty((2, max(parts, 1), n), dtype=torch.float32, device=x.device)
    scale_parts, shift_parts = partial[0], partial[1]
    stream = torch.cuda.current_stream()
    if parts:
        arguments = (x, weight, grad_out, grad_x, scale_parts, shift_parts, eps, per_part, tile_m, tile_n)
        ct.launch(stream, (parts, 1, 1), _PARTS[warps], arguments)
    arguments = (scale_parts, shift_parts, grad_weight, grad_bias, parts, SUM_PARTS, SUM_COLUMNS)
    ct.launch(stream, (-(-n // SUM_COLUMNS), 1, 1), _sum_parts, arguments)

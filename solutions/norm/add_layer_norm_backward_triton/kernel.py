"""Gradients of a residual sum and its layer norm: of the sum, and by sums over all rows of scale and shift, Triton."""

import torch
import triton
import triton.language as tl
from _lib.triton.partial_sums import SUM_COLUMNS, SUM_PARTS, cdiv

# Up to this many columns a row, its gradient and two partial sums over rows stay in registers (8 values of each a thread at
# 32 warps); longer rows are read four times.
MAX_REGISTER_COLUMNS = 8192
LOOP_COLUMNS = 4096
# Partial sums of a column block over some rows, where rows are long.
PART_COLUMNS = 256
# The row's first value is subtracted before anything is summed, as in the forward.


@triton.jit(do_not_specialize=["M", "rows_per_part"])
def _layer_norm_backward_rows(
    x_ptr,
    weight_ptr,
    grad_out_ptr,
    grad_total_ptr,
    grad_x_ptr,
    partial_ptr,
    x_stride,
    grad_out_stride,
    grad_total_stride,
    grad_x_stride,
    eps,
    M,
    rows_per_part,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the gradients of a run of rows, and one row each of partial sums for scale and shift."""
    dtype = grad_x_ptr.dtype.element_ty
    part = tl.program_id(0).to(tl.int64)
    begin = part * rows_per_part
    end = tl.minimum(begin + rows_per_part, M)
    cols = tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    # One running sum a row of the tile: a single reduction over rows at the end instead of one a tile.
    scale_sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    shift_sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    rows = begin + tl.arange(0, BLOCK_M)[:, None]
    mask = (rows < end) & in_row
    next_x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0)
    next_first = tl.load(x_ptr + rows * x_stride, mask=rows < end, other=0.0)
    next_grad = tl.load(grad_out_ptr + rows * grad_out_stride + cols, mask=mask, other=0.0)
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        mask = (rows < end) & in_row
        shifted = tl.where(mask, next_x.to(tl.float32) - next_first.to(tl.float32), 0.0)
        grad = next_grad.to(tl.float32)
        given = tl.load(grad_total_ptr + rows * grad_total_stride + cols, mask=mask, other=0.0).to(tl.float32)
        # The next tile is asked for before the reductions of this one.
        later = rows + BLOCK_M
        there = (later < end) & in_row
        next_x = tl.load(x_ptr + later * x_stride + cols, mask=there, other=0.0)
        next_first = tl.load(x_ptr + later * x_stride, mask=later < end, other=0.0)
        next_grad = tl.load(grad_out_ptr + later * grad_out_stride + cols, mask=there, other=0.0)
        grad_normed = grad * weight
        shared = tl.sum(grad_normed, axis=1, keep_dims=True) / N
        mean = tl.sum(shifted, axis=1, keep_dims=True) / N
        centred = tl.where(mask, shifted - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / N + eps)
        normed = tl.where(mask, centred * rstd, 0.0)  # beyond the last row rstd may be infinite, where eps is 0
        along = tl.sum(grad_normed * normed, axis=1, keep_dims=True) / N
        grad_x = (rstd * (grad_normed - shared - normed * along)).to(dtype).to(tl.float32)
        tl.store(grad_x_ptr + rows * grad_x_stride + cols, (grad_x + given).to(dtype), mask=mask)
        scale_sums += grad * normed
        shift_sums += grad
    partial_ptr += part * 2 * N + cols
    tl.store(partial_ptr, tl.sum(scale_sums, axis=0, keep_dims=True), mask=in_row)
    tl.store(partial_ptr + N, tl.sum(shift_sums, axis=0, keep_dims=True), mask=in_row)


@triton.jit
def _layer_norm_backward_long_row(
    x_ptr,
    weight_ptr,
    grad_out_ptr,
    grad_total_ptr,
    grad_x_ptr,
    stats_ptr,
    x_stride,
    grad_out_stride,
    grad_total_stride,
    grad_x_stride,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one row's gradient, and keep its statistics for the partial sums."""
    dtype = grad_x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    grad_out_ptr += row * grad_out_stride
    grad_total_ptr += row * grad_total_stride
    grad_x_ptr += row * grad_x_stride
    first = tl.load(x_ptr).to(tl.float32)
    # One running sum a lane: a single cross-warp reduction at the end instead of one a block.
    sums = tl.zeros([BLOCK_N], dtype=tl.float32)
    grad_sums = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_row = cols < N
        x = tl.load(x_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        sums += tl.where(in_row, x - first, 0.0)
        grad_sums += grad * weight
    mean = tl.sum(sums, axis=0) / N
    shared = tl.sum(grad_sums, axis=0) / N
    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    products = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_row = cols < N
        x = tl.load(x_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        centred = tl.where(in_row, x - first - mean, 0.0)
        squares += centred * centred
        products += grad * weight * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    along = tl.sum(products, axis=0) * rstd / N
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, rstd)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_row = cols < N
        x = tl.load(x_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        normed = (x - first - mean) * rstd
        given = tl.load(grad_total_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        grad_x = (rstd * (grad * weight - shared - normed * along)).to(dtype).to(tl.float32)
        tl.store(grad_x_ptr + cols, (grad_x + given).to(dtype), mask=in_row)


@triton.jit(do_not_specialize=["M", "rows_per_part"])
def _sum_columns_of_rows(
    x_ptr,
    grad_out_ptr,
    stats_ptr,
    partial_ptr,
    x_stride,
    grad_out_stride,
    M,
    rows_per_part,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute partial sums for scale and shift: a block of columns over a run of long rows."""
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    part = (tl.program_id(0) // column_blocks).to(tl.int64)
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    begin = part * rows_per_part
    end = tl.minimum(begin + rows_per_part, M)
    scale_sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    shift_sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        mask = (rows < end) & in_row
        mean = tl.load(stats_ptr + 2 * rows, mask=rows < end, other=0.0)
        rstd = tl.load(stats_ptr + 2 * rows + 1, mask=rows < end, other=0.0)
        first = tl.load(x_ptr + rows * x_stride, mask=rows < end, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + rows * grad_out_stride + cols, mask=mask, other=0.0).to(tl.float32)
        scale_sums += grad * ((x - first - mean) * rstd)
        shift_sums += grad
    partial_ptr += part * 2 * N + cols
    tl.store(partial_ptr, tl.sum(scale_sums, axis=0, keep_dims=True), mask=in_row)
    tl.store(partial_ptr + N, tl.sum(shift_sums, axis=0, keep_dims=True), mask=in_row)


@triton.jit(do_not_specialize=["parts"])
def _sum_parts(
    partial_ptr, grad_weight_ptr, grad_bias_ptr, parts, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add the partial sums in a fixed order (deterministic); zeros if there are no parts."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    scale_sums = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    shift_sums = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)[:, None]
        ptrs = partial_ptr + part.to(tl.int64) * 2 * N + cols
        mask = (part < parts) & in_row
        scale_sums += tl.load(ptrs, mask=mask, other=0.0)
        shift_sums += tl.load(ptrs + N, mask=mask, other=0.0)
    dtype = grad_weight_ptr.dtype.element_ty
    tl.store(grad_weight_ptr + cols, tl.sum(scale_sums, axis=0, keep_dims=True).to(dtype), mask=in_row)
    tl.store(grad_bias_ptr + cols, tl.sum(shift_sums, axis=0, keep_dims=True).to(dtype), mask=in_row)


def run(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    *,
    PARTS=264,
    BLOCK_M=None,
    num_warps=None,
):
    """grad_x = T(T(r * (h - mean(h) - n * mean(h * n))) + grad_residual_out); the others sum grad_out * n and grad_out.

    s = residual_out, r = rsqrt(var + eps), n = (s - mean) * r, h = grad_out * weight; fp32 inside and in the sums.

    Shapes: residual_out, grad_out, grad_residual_out, grad_x [M, N] with unit last stride and any row stride, weight,
    grad_weight and grad_bias [N]; one dtype T in bfloat16, float16, float32.
    Mapping: PARTS programs (at most) own a run of rows each, keep a tile of BLOCK_M whole rows in registers and add up what
    their rows give to scale and shift; a second kernel adds up the fp32 [PARTS, 2, N] that they leave. No atomics: the order
    of the sums depends on the shape only. Rows longer than MAX_REGISTER_COLUMNS take one program a row, and programs for
    blocks of columns that read both tensors again.
    PARTS: two a multiprocessor of an H200. BLOCK_M = None: as many rows as make a tile of 4096 values.
    num_warps = None: 16 values of each input a thread, 8 where the tile is one row.
    """
    M, N = residual_out.shape
    if N == 0:
        return
    tensors = residual_out, weight, grad_out, grad_residual_out, grad_x
    strides = residual_out.stride(0), grad_out.stride(0), grad_residual_out.stride(0), grad_x.stride(0)
    block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    is_long = N > MAX_REGISTER_COLUMNS
    block_m = BLOCK_M or (16 if is_long else max(1, 4096 // block_n))
    tiles = cdiv(M, block_m)
    rows_per_part = cdiv(tiles, PARTS) * block_m
    parts = cdiv(M, rows_per_part) if M else 0  # no part may be empty
    partial = torch.empty((max(parts, 1), 2, N), dtype=torch.float32, device=residual_out.device)
    if parts and not is_long:
        warps = num_warps or min(32, max(1, block_m * block_n // (256 if block_m == 1 else 512)))
        _layer_norm_backward_rows[(parts,)](
            *tensors, partial, *strides, eps, M, rows_per_part, N, block_m, block_n, num_warps=warps
        )
    elif parts:
        stats = torch.empty((M, 2), dtype=torch.float32, device=residual_out.device)
        _layer_norm_backward_long_row[(M,)](*tensors, stats, *strides, eps, N, LOOP_COLUMNS, num_warps=num_warps or 16)
        _sum_columns_of_rows[(parts * cdiv(N, PART_COLUMNS),)](
            residual_out,
            grad_out,
            stats,
            partial,
            *strides[:2],
            M,
            rows_per_part,
            N,
            block_m,
            PART_COLUMNS,
            num_warps=4,
        )
    _sum_parts[(cdiv(N, SUM_COLUMNS),)](partial, grad_weight, grad_bias, parts, N, SUM_PARTS, SUM_COLUMNS, num_warps=4)

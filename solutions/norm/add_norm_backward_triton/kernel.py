"""Gradients of a residual sum and its RMSNorm: of the sum, and by a sum over all rows of the weight, Triton."""

import torch
import triton
import triton.language as tl
from _lib.triton.partial_sums import SUM_COLUMNS, SUM_PARTS, cdiv, sum_parts

# Up to this many columns a row, its gradient and a partial sum over rows stay in registers (8 values of each a thread at 32
# warps); longer rows are read three times.
MAX_REGISTER_COLUMNS = 8192
LOOP_COLUMNS = 4096
# A partial sum of a column block over some rows, where rows are long.
PART_COLUMNS = 256
# FORM is "rounded" where the normalised value is rounded before it is multiplied by the weight, "fp32" where it is not, and
# "zero_centred" where it is not either and the factor is 1 + weight.


@triton.jit
def _grad_normed(grad, weight, dtype: tl.constexpr, FORM: tl.constexpr):
    """Return the gradient of the normalised row, rounded where autograd rounds it."""
    if FORM == "rounded":
        return (grad * weight).to(dtype).to(tl.float32)
    return grad * (weight if FORM == "fp32" else 1.0 + weight)


@triton.jit(do_not_specialize=["M", "rows_per_part"])
def _rms_norm_backward_rows(
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
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the gradients of a run of rows, and one row of partial sums for the weight."""
    dtype = grad_x_ptr.dtype.element_ty
    part = tl.program_id(0).to(tl.int64)
    first = part * rows_per_part
    last = tl.minimum(first + rows_per_part, M)
    cols = tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    # One running sum a row of the tile: a single reduction over rows at the end instead of one a tile.
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        mask = (rows < last) & in_row
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        grad = tl.load(
            grad_out_ptr + rows * grad_out_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
        normed = tl.where(mask, x * rstd, 0.0)  # beyond the last row rstd may be infinite, where eps is 0
        given = tl.load(
            grad_total_ptr + rows * grad_total_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        grad_normed = _grad_normed(grad, weight, dtype, FORM)
        along = tl.sum(grad_normed * normed, axis=1, keep_dims=True) / N
        grad_x = (rstd * (grad_normed - normed * along)).to(dtype).to(tl.float32)
        tl.store(grad_x_ptr + rows * grad_x_stride + cols, (grad_x + given).to(dtype), mask=mask)
        sums += grad * (normed.to(dtype).to(tl.float32) if FORM == "rounded" else normed)
    totals = tl.sum(sums, axis=0, keep_dims=True)
    tl.store(partial_ptr + part * N + cols, totals, mask=in_row)


@triton.jit
def _rms_norm_backward_long_row(
    x_ptr,
    weight_ptr,
    grad_out_ptr,
    grad_total_ptr,
    grad_x_ptr,
    rstd_ptr,
    x_stride,
    grad_out_stride,
    grad_total_stride,
    grad_x_stride,
    eps,
    N: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one row's gradient, and keep its scale for the partial sums."""
    dtype = grad_x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    grad_out_ptr += row * grad_out_stride
    grad_total_ptr += row * grad_total_stride
    grad_x_ptr += row * grad_x_stride
    # One running sum a lane: a single cross-warp reduction at the end instead of one a block.
    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    products = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_row = cols < N
        x = tl.load(x_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        squares += x * x
        products += _grad_normed(grad, weight, dtype, FORM) * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    along = tl.sum(products, axis=0) * rstd / N
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_row = cols < N
        x = tl.load(x_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        given = tl.load(grad_total_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        grad_x = (rstd * (_grad_normed(grad, weight, dtype, FORM) - x * rstd * along)).to(dtype).to(tl.float32)
        tl.store(grad_x_ptr + cols, (grad_x + given).to(dtype), mask=in_row)


@triton.jit(do_not_specialize=["M", "rows_per_part"])
def _sum_columns_of_rows(
    x_ptr,
    grad_out_ptr,
    rstd_ptr,
    partial_ptr,
    x_stride,
    grad_out_stride,
    M,
    rows_per_part,
    N: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute partial sums for the weight: a block of columns over a run of long rows."""
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    part = (tl.program_id(0) // column_blocks).to(tl.int64)
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    first = part * rows_per_part
    last = tl.minimum(first + rows_per_part, M)
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        mask = (rows < last) & in_row
        rstd = tl.load(rstd_ptr + rows, mask=rows < last, other=0.0)
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + rows * grad_out_stride + cols, mask=mask, other=0.0).to(tl.float32)
        normed = x * rstd
        sums += grad * (normed.to(x_ptr.dtype.element_ty).to(tl.float32) if FORM == "rounded" else normed)
    totals = tl.sum(sums, axis=0, keep_dims=True)
    tl.store(partial_ptr + part * N + cols, totals, mask=in_row)


def _launches(form):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    Shapes: residual_out, grad_out, grad_residual_out, grad_x [M, N] with unit last stride and any row stride, weight and
    grad_weight [N]; one dtype T in bfloat16, float16, float32.
    Mapping: PARTS programs (at most) own a run of rows each, keep a tile of BLOCK_M whole rows in registers and add up what
    their rows give to the weight; a second kernel adds up the fp32 [PARTS, N] that they leave. No atomics: the order of the
    sums depends on the shape only. Rows longer than MAX_REGISTER_COLUMNS take one program a row, and programs for blocks of
    columns that read both tensors again.
    PARTS: two a multiprocessor of an H200. BLOCK_M = None: as many rows as make a tile of 4096 values.
    num_warps = None: 16 values of each input a thread, 8 where the tile is one row.
    """

    def run(
        residual_out,
        weight,
        grad_out,
        grad_residual_out,
        eps,
        grad_x,
        grad_weight,
        *,
        PARTS=264,
        BLOCK_M=None,
        num_warps=None,
    ):
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
        partial = torch.empty((max(parts, 1), N), dtype=torch.float32, device=residual_out.device)
        if parts and not is_long:
            warps = num_warps or min(32, max(1, block_m * block_n // (256 if block_m == 1 else 512)))
            _rms_norm_backward_rows[(parts,)](
                *tensors, partial, *strides, eps, M, rows_per_part, N, form, block_m, block_n, num_warps=warps
            )
        elif parts:
            rstd = torch.empty((M,), dtype=torch.float32, device=residual_out.device)
            _rms_norm_backward_long_row[(M,)](
                *tensors, rstd, *strides, eps, N, form, LOOP_COLUMNS, num_warps=num_warps or 16
            )
            _sum_columns_of_rows[(parts * cdiv(N, PART_COLUMNS),)](
                residual_out, grad_out, rstd, partial, *strides[:2], M, rows_per_part, N, form, block_m, PART_COLUMNS,
                num_warps=4,
            )  # fmt: skip
        sum_parts[(cdiv(N, SUM_COLUMNS),)](partial, grad_weight, parts, N, SUM_PARTS, SUM_COLUMNS, num_warps=4)

    return lambda declared: run


@_launches("rounded")
def run_add_rms_norm_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS=264,
    BLOCK_M=None,
    num_warps=None,
):
    """grad_x = T(T(r * (h - s * r * mean(h * s * r))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * n).

    s = residual_out, r = rsqrt(mean(s^2) + eps), h = T(grad_out * weight), n = T(s * r) in the sum over rows; fp32 inside.
    """


@_launches("fp32")
def run_add_rms_norm_fp32_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS=264,
    BLOCK_M=None,
    num_warps=None,
):
    """grad_x = T(T(r * (h - s * r * mean(h * s * r))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * n).

    s = residual_out, r = rsqrt(mean(s^2) + eps), n = s * r, h = grad_out * weight; fp32 inside and in the sum.
    """


@_launches("zero_centred")
def run_add_rms_norm_gemma_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS=264,
    BLOCK_M=None,
    num_warps=None,
):
    """grad_x = T(T(r * (h - s * r * mean(h * s * r))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * n).

    s = residual_out, r = rsqrt(mean(s^2) + eps), n = s * r, h = grad_out * (1 + weight); fp32 inside and in the sum.
    """

"""The gradient of RMSNorm's activation, Triton."""

import torch
import triton
import triton.language as tl

# Up to this many columns a row and its gradient stay in registers (8 values of each a thread at 32 warps); longer rows are
# read twice.
MAX_REGISTER_COLUMNS = 8192
LOOP_COLUMNS = 4096


@triton.jit(do_not_specialize=["M"])
def _rms_norm_backward_tile(
    x_ptr,
    weight_ptr,
    grad_out_ptr,
    grad_x_ptr,
    x_stride,
    grad_out_stride,
    grad_x_stride,
    eps,
    M,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = grad_x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    mask = (rows < M) & in_row
    # The weight does not depend on the reductions: ask for it together with the rows, so that its latency is hidden.
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    grad = tl.load(
        grad_out_ptr + rows * grad_out_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
    normed = x * rstd
    grad_normed = (grad * weight).to(dtype).to(tl.float32)
    along = tl.sum(grad_normed * normed, axis=1, keep_dims=True) / N
    grad_x = rstd * (grad_normed - normed * along)
    tl.store(grad_x_ptr + rows * grad_x_stride + cols, grad_x.to(dtype), mask=mask)


@triton.jit
def _rms_norm_backward_long_row(
    x_ptr,
    weight_ptr,
    grad_out_ptr,
    grad_x_ptr,
    x_stride,
    grad_out_stride,
    grad_x_stride,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = grad_x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    grad_out_ptr += row * grad_out_stride
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
        products += (grad * weight).to(dtype).to(tl.float32) * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    along = tl.sum(products, axis=0) * rstd / N
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_row = cols < N
        x = tl.load(x_ptr + cols, mask=in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
        grad = tl.load(grad_out_ptr + cols, mask=in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        grad_normed = (grad * weight).to(dtype).to(tl.float32)
        grad_x = rstd * (grad_normed - x * rstd * along)
        tl.store(grad_x_ptr + cols, grad_x.to(dtype), mask=in_row)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """grad_x = T(r * (h - n * mean(h * n))), r = rsqrt(mean(x^2) + eps), n = x * r, h = T(grad_out * weight), fp32 inside.

    Shapes: x, grad_out, grad_x [M, N] with unit last stride and any row stride, weight [N]; one dtype T in bfloat16,
    float16, float32.
    Mapping: a program owns BLOCK_M whole rows and keeps them and their gradients in registers, so both are read once. Rows
    longer than MAX_REGISTER_COLUMNS are looped over twice by one program a row (BLOCK_M does not apply to them).
    BLOCK_M = None: 1 while there are few rows to share out, else as many rows as make a tile of 2048 values.
    num_warps = None: 8 values of each input a thread.
    """
    M, N = x.shape
    if M == 0 or N == 0:
        return
    strides = x.stride(0), grad_out.stride(0), grad_x.stride(0)
    if N > MAX_REGISTER_COLUMNS:
        _rms_norm_backward_long_row[(M,)](
            x, weight, grad_out, grad_x, *strides, eps, N, LOOP_COLUMNS, num_warps=num_warps or 16
        )
        return
    block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
    warps = num_warps or min(32, max(1, block_m * block_n // 256))
    _rms_norm_backward_tile[((M + block_m - 1) // block_m,)](
        x, weight, grad_out, grad_x, *strides, eps, M, N, block_m, block_n, num_warps=warps
    )

"""The gradient of softmax over the last axis from its saved output, Triton."""

import torch
import triton
import triton.language as tl

# Up to this many columns a row stays in registers; longer rows are read twice.
MAX_REGISTER_COLUMNS = 16384
LOOP_COLUMNS = 4096


@triton.jit(do_not_specialize=["M"])
def _softmax_backward_tile(
    out_ptr,
    grad_ptr,
    grad_x_ptr,
    out_stride,
    grad_stride,
    grad_x_stride,
    M,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    out = tl.load(out_ptr + rows * out_stride + cols, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + rows * grad_stride + cols, mask=mask, other=0.0).to(tl.float32)
    along = tl.sum(out * grad, axis=1, keep_dims=True)
    result = (out * (grad - along)).to(grad_x_ptr.dtype.element_ty)
    tl.store(grad_x_ptr + rows * grad_x_stride + cols, result, mask=mask)


@triton.jit
def _softmax_backward_long_row(
    out_ptr, grad_ptr, grad_x_ptr, out_stride, grad_stride, grad_x_stride, N: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    # One running sum a lane: a single reduction at the end instead of one a block.
    sums = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        out = tl.load(out_ptr + row * out_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        sums += out * grad
    along = tl.sum(sums, axis=0)
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        out = tl.load(out_ptr + row * out_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        result = (out * (grad - along)).to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + row * grad_x_stride + cols, result, mask=cols < N)


def run(out: torch.Tensor, grad_out: torch.Tensor, grad_x: torch.Tensor, *, BLOCK_M=None, num_warps=None):
    """grad_x = out * (grad_out - sum(out * grad_out)), float32 inside, rounded once.

    Shapes: all [M, N] with unit last stride and any row stride, one dtype in bfloat16, float16, float32.
    BLOCK_M = None: as many rows as make a tile of 4096 values, one where rows are longer or few.
    """
    M, N = out.shape
    if M == 0:
        return
    strides = (out.stride(0), grad_out.stride(0), grad_x.stride(0))
    if N > MAX_REGISTER_COLUMNS:
        _softmax_backward_long_row[(M,)](out, grad_out, grad_x, *strides, N, LOOP_COLUMNS, num_warps=num_warps or 8)
        return
    block_n = 1 << (N - 1).bit_length()
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 4096 // block_n))
    warps = num_warps or min(16, max(4, block_m * block_n // 1024))
    _softmax_backward_tile[((M + block_m - 1) // block_m,)](
        out, grad_out, grad_x, *strides, M, N, block_m, block_n, num_warps=warps
    )

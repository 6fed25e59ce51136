"""RMS norm without a weight over the last axis, Triton: the inverse root is rounded to T, then the product."""

import torch
import triton
import triton.language as tl

# Up to this many columns a row stays in registers; longer rows are read twice.
MAX_REGISTER_COLUMNS = 16384
LOOP_COLUMNS = 8192


@triton.jit(do_not_specialize=["M"])
def _norm_tile(
    x_ptr, out_ptr, x_stride, out_stride, eps, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    dtype = out_ptr.dtype.element_ty
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (cols < N)
    x = tl.load(x_ptr + offs_m * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps).to(dtype).to(tl.float32)
    tl.store(out_ptr + offs_m * out_stride + cols, (x * scale).to(dtype), mask=mask)


@triton.jit
def _norm_long_row(x_ptr, out_ptr, x_stride, out_stride, eps, N: tl.constexpr, BLOCK_N: tl.constexpr):
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * out_stride
    # One running sum a lane: a single reduction across warps at the end instead of one a block.
    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / N + eps).to(dtype).to(tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + cols, (x * scale).to(dtype), mask=cols < N)


def run(x: torch.Tensor, eps: float, out: torch.Tensor, *, BLOCK_M=None, num_warps=None):
    """out[M, N] = T(x[M, N] * T(rsqrt(mean(x^2) + eps))), statistics in fp32, both casts to nearest even.

    x and out have unit last stride and any row stride; T is bfloat16, float16 or float32.
    BLOCK_M = None: 1 while there are few rows to share out, else as many rows as make a tile of 2048 values.
    num_warps = None: 32 values a thread where there are many rows, else 16.
    """
    M, N = x.shape
    if M == 0 or N == 0:
        return
    if N > MAX_REGISTER_COLUMNS:
        _norm_long_row[(M,)](x, out, x.stride(0), out.stride(0), eps, N, LOOP_COLUMNS, num_warps=num_warps or 16)
        return
    block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
    values = block_m * block_n
    warps = num_warps or (max(4, values // 1024) if M > 512 else min(32, max(1, values // 512)))
    _norm_tile[((M + block_m - 1) // block_m,)](
        x, out, x.stride(0), out.stride(0), eps, M, N, block_m, block_n, num_warps=warps
    )

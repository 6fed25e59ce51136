"""Residual addition and layer norm of it, into new tensors, Triton."""

import torch
import triton
import triton.language as tl

# Up to this many columns a row stays in registers (at most 32 values a thread of each tensor); longer rows are read again.
MAX_REGISTER_COLUMNS = 16384
LOOP_COLUMNS = 8192
# The row's first value is subtracted before anything is summed: a mean that is many deviations away from zero then costs no
# digits, and a row of equal values gives exactly zero. Any value of the row is within sqrt(N) deviations of the mean.


@triton.jit(do_not_specialize=["M"])
def _layer_norm_tile(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    out_stride,
    total_stride,
    eps,
    M,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    mask = (rows < M) & in_row
    # Neither depends on a reduction: ask for them together with x, so that their latency is hidden.
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    # evict_last, although nothing is read again: up to 6% faster than no policy, where evict_first is slower (H200).
    value = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    first = tl.load(x_ptr + rows * x_stride, mask=rows < M, other=0.0).to(tl.float32)
    residual_ptrs = residual_ptr + rows * residual_stride + cols
    residual = tl.load(residual_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    first += tl.load(residual_ptr + rows * residual_stride, mask=rows < M, other=0.0).to(tl.float32)
    # The norm sees the rounded sum, as the next layer will.
    value = (value + residual).to(dtype).to(tl.float32)
    first = first.to(dtype).to(tl.float32)
    tl.store(total_ptr + rows * total_stride + cols, value.to(dtype), mask=mask)
    shifted = tl.where(mask, value - first, 0.0)
    mean = tl.sum(shifted, axis=1, keep_dims=True) / N
    centred = tl.where(mask, shifted - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / N + eps)
    result = centred * rstd * weight
    result += bias
    tl.store(out_ptr + rows * out_stride + cols, result.to(dtype), mask=mask)


@triton.jit
def _layer_norm_long_row(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    out_stride,
    total_stride,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    out_ptr += row * out_stride
    total_ptr += row * total_stride
    first = tl.load(x_ptr).to(tl.float32)
    first = (first + tl.load(residual_ptr).to(tl.float32)).to(dtype).to(tl.float32)
    # One running sum a lane: a single cross-warp reduction at the end instead of one a block.
    sums = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        value = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        value += tl.load(residual_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        sums += tl.where(cols < N, value - first, 0.0)
    mean = tl.sum(sums, axis=0) / N
    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        value = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        value += tl.load(residual_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        centred = tl.where(cols < N, value - first - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    # The sum is computed again rather than read back: no thread then depends on another thread's store.
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_row = cols < N
        value = tl.load(x_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        value += tl.load(residual_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        tl.store(total_ptr + cols, value.to(dtype), mask=in_row)
        result = (value - first - mean) * rstd * tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        result += tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        tl.store(out_ptr + cols, result.to(dtype), mask=in_row)


def run(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T((s - mean) * rsqrt(var + eps) * weight[N] + bias[N]), fp32 inside.

    Shapes: x, residual, out and residual_out [M, N] with unit last stride and any row stride; one dtype T in bfloat16, float16,
    float32.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers: two reads and two writes of M * N values. Rows longer
    than MAX_REGISTER_COLUMNS are looped over three times by one program a row (BLOCK_M does not apply to them).
    BLOCK_M = None: 1 while there are few rows to share out, else as many rows as make a tile of 2048 values.
    num_warps = None: 32 values a thread where there are many rows and others to run meanwhile, else 16.
    """
    M, N = x.shape
    if M == 0 or N == 0:
        return
    tensors = x, residual, weight, bias, out, residual_out
    strides = x.stride(0), residual.stride(0), out.stride(0), residual_out.stride(0)
    if N > MAX_REGISTER_COLUMNS:
        _layer_norm_long_row[(M,)](*tensors, *strides, eps, N, LOOP_COLUMNS, num_warps=num_warps or 16)
        return
    block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
    values = block_m * block_n
    warps = num_warps or (max(4, values // 1024) if M > 512 else min(32, max(1, values // 512)))
    _layer_norm_tile[((M + block_m - 1) // block_m,)](*tensors, *strides, eps, M, N, block_m, block_n, num_warps=warps)

"""Residual addition and RMSNorm of it, into new tensors, Triton: the Definitions differ in how the weight is applied."""

import torch
import triton
import triton.language as tl

# Up to this many columns a row stays in registers (at most 32 values a thread of each tensor); longer: read twice.
MAX_REGISTER_COLUMNS = 16384
LOOP_COLUMNS = 8192
# FORM is "rounded" where the normalised value is rounded before it is multiplied by the weight, "fp32" where it is not, and
# "zero_centred" where it is not either and the factor is 1 + weight.


@triton.jit(do_not_specialize=["M"])
def _add_norm_tile(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    out_stride,
    total_stride,
    eps,
    M,
    N: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    mask = (rows < M) & in_row
    # The weight does not depend on the reduction: ask for it together with x, so that its latency is hidden.
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    # evict_last, although nothing is read again: up to 6% faster than no policy, where evict_first is slower (H200).
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    residual_ptrs = residual_ptr + rows * residual_stride + cols
    total = (x + tl.load(residual_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)).to(dtype)
    tl.store(total_ptr + rows * total_stride + cols, total, mask=mask)
    total = total.to(tl.float32)  # the norm sees the rounded sum, as the next layer will
    scale = tl.rsqrt(tl.sum(total * total, axis=1, keep_dims=True) / N + eps)
    if FORM == "rounded":
        normed = (total * scale).to(dtype).to(tl.float32)
        tl.store(out_ptr + rows * out_stride + cols, (normed * weight).to(dtype), mask=mask)
    else:
        factor = weight if FORM == "fp32" else 1.0 + weight
        tl.store(out_ptr + rows * out_stride + cols, (total * scale * factor).to(dtype), mask=mask)


@triton.jit
def _add_norm_long_row(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    out_stride,
    total_stride,
    eps,
    N: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    out_ptr += row * out_stride
    total_ptr += row * total_stride
    # One running sum a lane: a single cross-warp reduction at the end instead of one a block.
    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        total = (x + residual).to(dtype).to(tl.float32)
        squares += total * total
    scale = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    # The sum is computed again rather than read back: no thread then depends on another thread's store.
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_row = cols < N
        x = tl.load(x_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        total = (x + residual).to(dtype)
        tl.store(total_ptr + cols, total, mask=in_row)
        if FORM == "rounded":
            normed = (total.to(tl.float32) * scale).to(dtype).to(tl.float32)
            tl.store(out_ptr + cols, (normed * weight).to(dtype), mask=in_row)
        else:
            factor = weight if FORM == "fp32" else 1.0 + weight
            tl.store(out_ptr + cols, (total.to(tl.float32) * scale * factor).to(dtype), mask=in_row)


def _launches(form):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    Shapes: x, residual, out and residual_out [M, N] with unit last stride and any row stride, weight [N]; one dtype T in
    bfloat16, float16, float32. Sums and statistics in fp32, every cast rounds to nearest even.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers: two reads and two writes of M * N values.
    Rows longer than MAX_REGISTER_COLUMNS are looped over twice by one program a row (BLOCK_M does not apply to them).
    BLOCK_M = None: 1 while there are few rows to share out, else as many rows as make a tile of 2048 values.
    num_warps = None: 32 values a thread where there are many rows and others to run meanwhile, else 16.
    """

    def run(x, residual, weight, eps, out, residual_out, *, BLOCK_M=None, num_warps=None):
        M, N = x.shape
        if M == 0 or N == 0:
            return
        if N > MAX_REGISTER_COLUMNS:
            _add_norm_long_row[(M,)](
                x,
                residual,
                weight,
                out,
                residual_out,
                x.stride(0),
                residual.stride(0),
                out.stride(0),
                residual_out.stride(0),
                eps,
                N,
                form,
                LOOP_COLUMNS,
                num_warps=num_warps or 16,
            )
            return
        block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
        block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
        values = block_m * block_n
        warps = num_warps or (max(4, values // 1024) if M > 512 else min(32, max(1, values // 512)))
        _add_norm_tile[((M + block_m - 1) // block_m,)](
            x,
            residual,
            weight,
            out,
            residual_out,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            residual_out.stride(0),
            eps,
            M,
            N,
            form,
            block_m,
            block_n,
            num_warps=warps,
        )

    return lambda declared: run


@_launches("rounded")
def run_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(T(s * rsqrt(mean(s^2) + eps)) * weight[N])."""


@_launches("fp32")
def run_add_rms_norm_fp32(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(s * rsqrt(mean(s^2) + eps) * weight[N]), one cast after the product."""


@_launches("zero_centred")
def run_add_rms_norm_gemma(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """residual_out = s = T(x + residual); out[M, N] = T(s * rsqrt(mean(s^2) + eps) * (1 + weight[N])), one cast at the end."""

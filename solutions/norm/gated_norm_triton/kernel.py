"""RMSNorm of each head's output, times its weight, times SiLU of a gate, in one pass; Triton."""

import torch
import triton
import triton.language as tl

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit(do_not_specialize=["M"])
def _gated_norm_tile(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    gate_stride,
    out_stride,
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
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    # Neither depends on the reduction: asked for now, they arrive while it runs.
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(
        tl.float32
    )
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
    normed = (x * scale).to(dtype).to(tl.float32)
    scaled = (normed * weight).to(dtype).to(tl.float32)
    # An exponential of inf gives -0 for very negative finite gates and NaN for -inf, as PyTorch does.
    # The cast to a 16-bit T hides the last bits of the shorter one.
    power = tl.exp(-gate) if dtype == tl.float32 else tl.exp2(gate * MINUS_LOG2_E)
    opening = gate / (1.0 + power)
    tl.store(out_ptr + rows * out_stride + cols, (scaled * opening).to(dtype), mask=mask)


def run(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """out = T(T(T(x * rsqrt(mean(x^2) + eps)) * weight) * silu(gate)): fp32 inside, three roundings to nearest even.

    Shapes: x, gate, out [M, N] with unit last stride and any row stride, weight [N], N <= 16384; one dtype T in bfloat16,
    float16, float32.
    Mapping: a program owns BLOCK_M whole rows and keeps both tensors in registers.
    BLOCK_M = None: 1 while there are few rows to share out, else as many rows as make a tile of 2048 values.
    num_warps = None: 16 values of each tensor a thread.
    """
    M, N = out.shape
    if M == 0 or N == 0:
        return
    block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
    warps = num_warps or min(32, max(1, block_m * block_n // 512))
    _gated_norm_tile[((M + block_m - 1) // block_m,)](
        x, gate, weight, out, x.stride(0), gate.stride(0), out.stride(0), eps, M, N, block_m, block_n, num_warps=warps
    )

"""RMSNorm of each head's output, times its weight and the sigmoid of a gate, in one pass; Triton."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _norm_and_gate(
    x_ptr, gate_ptr, weight_ptr, out_ptr, x_stride, gate_stride, out_stride, eps, M, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
    opening = 1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))
    out = weight * (x * scale) * opening
    tl.store(out_ptr + rows * out_stride + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


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
    """out = T(weight * x * rsqrt(mean(x^2) + eps) * sigmoid(gate)), in fp32 with one rounding.

    Shapes: x, gate, out [M, N] with unit last stride and any row stride, weight [N], N <= 16384; one dtype T in bfloat16,
    float16, float32.
    Mapping: a program owns BLOCK_M whole rows; None: 1 for few rows, else as many as make a tile of 2048 values.
    num_warps = None: 16 values of each tensor a thread.
    """
    M, N = out.shape
    if out.numel() == 0:
        return
    block_n = 1 << (N - 1).bit_length()
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
    warps = num_warps or min(32, max(1, block_m * block_n // 512))
    _norm_and_gate[((M + block_m - 1) // block_m,)](
        x, gate, weight, out, x.stride(0), gate.stride(0), out.stride(0), eps, M, N, block_m, block_n, num_warps=warps
    )

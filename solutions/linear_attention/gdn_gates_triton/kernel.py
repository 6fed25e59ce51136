"""Decay and writing strength of a Gated DeltaNet layer, Triton: one small tile a program."""

import torch
import triton
import triton.language as tl


@triton.jit
def _log1p_of_fraction(e):
    """log(1 + e) for e in [0, 1], within 2 ulp: 2 atanh(s) by its series, s = e / (2 + e) <= 1/3.

    tl.log(1 + e) loses all digits of a small e.
    """
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    return 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))


@triton.jit(do_not_specialize=["M"])
def _gdn_gates_tile(
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    g_ptr,
    beta_ptr,
    a_stride,
    b_stride,
    M,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    heads = tl.arange(0, BLOCK_H)[None, :]
    in_row = heads < H
    mask = (rows < M) & in_row
    a = tl.load(a_ptr + rows * a_stride + heads, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + rows * b_stride + heads, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(rate_ptr + heads, mask=in_row, other=0.0).to(tl.float32))
    step = a + tl.load(bias_ptr + heads, mask=in_row, other=0.0).to(tl.float32)
    # softplus(step) = max(step, 0) + log1p(exp(-|step|)), which is step itself from 17 on; NaN stays in the second term.
    softplus = tl.where(step > 0, step, 0.0) + _log1p_of_fraction(tl.exp(-tl.abs(step)))
    tl.store(g_ptr + rows * H + heads, -rate * softplus, mask=mask)
    beta = 1.0 / (1.0 + tl.exp(-b))
    tl.store(beta_ptr + rows * H + heads, beta.to(beta_ptr.dtype.element_ty), mask=mask)


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=None,
):
    """g = -exp(A_log) * softplus(a + dt_bias) in fp32, beta = T(sigmoid(b)).

    Shapes: a, b [M, H] with unit last stride and any row stride, A_log, dt_bias [H] of dtype P, g, beta [M, H] contiguous,
    H <= 4096; T and P in bfloat16, float16, float32.
    Mapping: BLOCK values a program in whole rows; None: 1024, or 256 where that would leave most of the machine idle.
    num_warps = None: 4 values a thread, at most 8 warps.
    """
    M, H = beta.shape
    if M == 0 or H == 0:
        return
    block = BLOCK or (1024 if M * H >= 1 << 17 else 256)
    block_h = 1 << (H - 1).bit_length()
    block_m = max(1, block // block_h)
    warps = num_warps or min(8, max(1, block_m * block_h // 128))
    _gdn_gates_tile[((M + block_m - 1) // block_m,)](
        a, b, A_log, dt_bias, g, beta, a.stride(0), b.stride(0), M, H, block_m, block_h, num_warps=warps
    )

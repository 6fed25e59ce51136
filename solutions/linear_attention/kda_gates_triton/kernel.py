"""Decays of Kimi Delta Attention, Triton: x is read once, and decays are written once."""

import torch
import triton
import triton.language as tl


@triton.jit
def _log1p(e):
    """log(1 + e) for e in [0, 1]: the quotient corrects what the sum has rounded off."""
    total = 1.0 + e
    return tl.where(total == 1.0, e, tl.log(total) * (e / (total - 1.0)))


@triton.jit(do_not_specialize=["M"])
def _decays(x_ptr, rate_ptr, bias_ptr, out_ptr, M, WIDTH, K, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_row = cols < WIDTH
    mask = (rows < M) & in_row
    x = tl.load(x_ptr + rows * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(rate_ptr + cols // K, mask=in_row, other=0.0).to(tl.float32))
    step = x + tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    # softplus(step) = max(step, 0) + log1p(exp(-|step|)); NaN stays in the second term.
    softplus = tl.where(step > 0, step, 0.0) + _log1p(tl.exp(-tl.abs(step)))
    tl.store(out_ptr + rows * WIDTH + cols, -rate * softplus, mask=mask)


def run(
    x: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK_M=1,
    BLOCK=1024,
    num_warps=4,
):
    """out = -exp(A_log) * softplus(x + dt_bias) in fp32.

    Shapes: x and out [M, H, K], A_log [H] and dt_bias [H, K] of dtype P, contiguous.
    Mapping: BLOCK values of BLOCK_M tokens a program.
    """
    M, H, K = out.shape
    if out.numel() == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(H * K))
    _decays[(triton.cdiv(M, BLOCK_M), triton.cdiv(H * K, block))](
        x, A_log, dt_bias, out, M, H * K, K, BLOCK_M, block, num_warps=num_warps
    )

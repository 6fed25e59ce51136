"""The trained activation of Apertus, Triton: one pass over the activation, in float32."""

import torch
import triton
import triton.language as tl


@triton.jit
def _softplus(value):
    return tl.maximum(value, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(value)))


@triton.jit
def _exponential_rest(x):
    """Return e^x - 1 - x for x <= 0: near zero by its series, because the difference would lose all digits."""
    s = 1.0 + x * (1.0 / 9.0)
    s = 1.0 + x * (1.0 / 8.0) * s
    s = 1.0 + x * (1.0 / 7.0) * s
    s = 1.0 + x * (1.0 / 6.0) * s
    s = 1.0 + x * (1.0 / 5.0) * s
    s = 1.0 + x * (1.0 / 4.0) * s
    s = 1.0 + x * (1.0 / 3.0) * s
    return tl.where(x > -0.5, 0.5 * x * x * s, tl.exp(x) - 1.0 - x)


@triton.jit(do_not_specialize=["count"])
def _xielu(x_ptr, alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, out_ptr, count, BLOCK: tl.constexpr):
    beta = tl.load(beta_ptr).to(tl.float32)
    eps = tl.load(eps_ptr).to(tl.float32)
    above = _softplus(tl.load(alpha_p_ptr).to(tl.float32))
    below = beta + _softplus(tl.load(alpha_n_ptr).to(tl.float32))
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    least = tl.minimum(x, eps)
    rest = _exponential_rest(least) + (least - x)  # the last difference is 0 below eps, and keeps NaN
    out = tl.where(x > 0.0, above * x * x, rest * below) + beta * x
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=offsets < count)


def run(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK: int | None = None,
):
    """out = T(xIELU(x)), fp32 inside.

    Shapes: x, out [B, S, I], contiguous; alpha_p, alpha_n [1]; beta, eps []; one dtype T in bfloat16, float16, float32.
    BLOCK: elements of a program (None: 2048, or 512 if that leaves most of the machine idle).
    """
    count = out.numel()
    if count == 0:
        return
    block = BLOCK or (2048 if count >= 1 << 19 else 512)
    programs = (count + block - 1) // block
    _xielu[(programs,)](x, alpha_p, alpha_n, beta, eps, out, count, block, num_warps=4 if block >= 1024 else 2)

"""The gated value of n-gram memory as Qwen4-Exp has it, Triton: norms with weights about zero, and no sum with the stream.

A row is one copy of the residual stream of one token. A program has a run of tokens of one copy, so that the weights of that copy
are read once a run; the copies of a token are neighbours in the grid and share its value row through the L2.
"""

import torch
import triton
import triton.language as tl


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


@triton.jit(do_not_specialize=["M", "tokens_per_run"])
def _gated_rows(
    hidden_ptr,
    key_ptr,
    value_ptr,
    weight_hidden_ptr,
    weight_embed_ptr,
    out_ptr,
    clamp,
    eps,
    M,
    tokens_per_run,
    C: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    copy = tl.program_id(0) % C
    first = (tl.program_id(0) // C).to(tl.int64) * tokens_per_run
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    weight = 1.0 + tl.load(weight_hidden_ptr + copy * H + cols, mask=inside, other=0.0).to(tl.float32)
    weight *= 1.0 + tl.load(weight_embed_ptr + copy * H + cols, mask=inside, other=0.0).to(tl.float32)
    for token in range(first, tl.minimum(first + tokens_per_run, M)):
        row = token * C + copy
        hidden = tl.load(hidden_ptr + row * H + cols, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + row * H + cols, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + token * H + cols, mask=inside, other=0.0).to(tl.float32)
        rstd_hidden = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / H + eps)
        rstd_key = tl.rsqrt(tl.sum(key * key, axis=0) / H + eps)
        # Normalised before they are multiplied: the product of two rows may be out of range where that of their norms is not.
        score = tl.sum((hidden * rstd_hidden) * (key * rstd_key) * weight, axis=0) * (1.0 / H**0.5)
        root = tl.sqrt(tl.maximum(tl.abs(score), clamp))
        root = tl.where(score > 0, root, tl.where(score < 0, -root, score))  # zero has no sign, NaN stays
        result = tl.sigmoid(root) * value
        tl.store(out_ptr + row * H + cols, result.to(out_ptr.dtype.element_ty), mask=inside)


def run_gate_hf(
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
    out: torch.Tensor,
    *,
    TOKENS=None,
    num_warps=None,
) -> None:
    """out = T(gate * v), gate = sigmoid(signed root of the score), one per token and copy; float32 inside, rounded once.

    score = sum(hidden * (1 + weight_hidden) * k * (1 + weight_embed)) * rstd(hidden) * rstd(k) / sqrt(H), clamp at least.
    Shapes: hidden, k and out [M, C, H], v [M, H], weights [C, H], all of one dtype and contiguous; H <= 16384.
    TOKENS = None: as many tokens a program as leave eight programs a multiprocessor, at most 16.
    """
    M, C, H = hidden.shape
    if M == 0:
        return
    block = 1 << (H - 1).bit_length()
    tokens = TOKENS or max(1, min(16, M * C // 1024))
    warps = num_warps or min(16, max(1, block // 512))
    _gated_rows[(_cdiv(M, tokens) * C,)](
        hidden, k, v, weight_hidden, weight_embed, out, clamp, eps, M, tokens, C, H, block, num_warps=warps
    )

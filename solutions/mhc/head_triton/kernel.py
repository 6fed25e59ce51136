"""The end of hyper-connections, Triton: weights from all streams of a token, and their weighted sum, in one launch."""

import torch
import triton
import triton.language as tl

# Up to this many tokens each has a program to itself: there are processors for all of them.
FEW_TOKENS = 256
TOKENS = 4


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _pow2(value: int) -> int:
    return 1 << (value - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


@triton.jit(do_not_specialize=["M"])
def _head(
    residual_ptr,
    fn_ptr,
    scale_ptr,
    base_ptr,
    out_ptr,
    rms_eps,
    eps,
    M,
    C: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TOKENS tokens share what is read of the projection; their streams are read again, from the cache, for the sum."""
    K: tl.constexpr = C * H
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, P)
    lanes = tl.arange(0, BLOCK)
    inside = token[:, None] < M
    products = tl.zeros([TOKENS, P], dtype=tl.float32)
    squares = tl.zeros([TOKENS], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + lanes
        x = tl.load(residual_ptr + token[:, None] * K + k[None, :], mask=inside & (k[None, :] < K), other=0.0)
        fn = tl.load(fn_ptr + j[:, None] * K + k[None, :], mask=(j[:, None] < C) & (k[None, :] < K), other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        products += tl.sum(wide[:, None, :] * fn[None, :, :], axis=2)
    rstd = tl.rsqrt(squares / K + rms_eps)
    base = tl.load(base_ptr + j, mask=j < C, other=0.0)
    gates = tl.sigmoid(products * rstd[:, None] * tl.load(scale_ptr) + base[None, :]) + eps
    for start in range(0, H, BLOCK):
        cols = start + lanes
        real = inside & (cols[None, :] < H)
        total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
        for c in tl.static_range(C):
            x = tl.load(residual_ptr + (token[:, None] * C + c) * H + cols[None, :], mask=real, other=0.0)
            gate = tl.sum(tl.where(j[None, :] == c, gates, 0.0), axis=1)
            total += gate[:, None] * x.to(tl.float32)
        tl.store(out_ptr + token[:, None] * H + cols[None, :], total.to(out_ptr.dtype.element_ty), mask=real)


def run_head_fused(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    eps: float,
    out: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=8,
) -> None:
    """out[M, H] = T(sum over c of w[M, c] * residual[M, c, H]), w = sigmoid(scale * fn of the normalised streams + base) + eps.

    Shapes: residual [M, C, H] and out in bfloat16 or float32; fn [C, C * H], scale [1], base [C] in float32; contiguous, C <= 8.
    Products are those of float32. BLOCK = None: 1024 columns at a time for one token, 256 for four.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    tokens = 1 if M <= FEW_TOKENS else TOKENS
    block = min(BLOCK or 1024 // tokens, _pow2(C * H))
    _head[(_cdiv(M, tokens),)](
        residual, fn, scale, base, out, rms_eps, eps, M, C, H, _pow2(C), tokens, block, num_warps=num_warps
    )

"""RMSNorm of the heads of q and k and the rotary embedding behind it, in one launch, Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def _halves(ptrs, mask, HALF: tl.constexpr):
    low = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return low, tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["S"])
def _normed_rope(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_b, q_s, q_h, k_b, k_s, k_h, cos_b, cos_s, sin_b, sin_s, q_out_b, q_out_s, q_out_h, k_out_b, k_out_s, k_out_h,
    eps, S, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    # Tiles vary fastest: those of one token are neighbours, share its cos and sin, and read neighbouring memory.
    q_tiles: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    tiles: tl.constexpr = q_tiles + (K_HEADS + BLOCK_H - 1) // BLOCK_H
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    tile, token = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    in_half = dims < HALF
    if tile < q_tiles:
        heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        mask = (heads < Q_HEADS) & in_half
        x_ptrs = q_ptr + b * q_b + s * q_s + heads.to(tl.int64) * q_h + dims
        out_ptrs = q_out_ptr + b * q_out_b + s * q_out_s + heads.to(tl.int64) * q_out_h + dims
        weight_ptrs = q_weight_ptr + dims
    else:
        heads = (tile - q_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        mask = (heads < K_HEADS) & in_half
        x_ptrs = k_ptr + b * k_b + s * k_s + heads.to(tl.int64) * k_h + dims
        out_ptrs = k_out_ptr + b * k_out_b + s * k_out_s + heads.to(tl.int64) * k_out_h + dims
        weight_ptrs = k_weight_ptr + dims
    # All loads before the first sum: they are in flight together.
    low, high = _halves(x_ptrs, mask, HALF)
    weight_low, weight_high = _halves(weight_ptrs, in_half, HALF)
    cos_low, cos_high = _halves(cos_ptr + b * cos_b + s * cos_s + dims, in_half, HALF)
    sin_low, sin_high = _halves(sin_ptr + b * sin_b + s * sin_s + dims, in_half, HALF)

    squares = tl.sum(low * low + high * high, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)
    # Rounded to T after each operation, as separate PyTorch operations round; all is computed in fp32.
    if CENTRED:  # one rounding for the whole norm, with a weight that is zero-centred
        low = _rounded(low * scale * (1 + weight_low), dtype)
        high = _rounded(high * scale * (1 + weight_high), dtype)
    else:
        low = _rounded(_rounded(low * scale, dtype) * weight_low, dtype)
        high = _rounded(_rounded(high * scale, dtype) * weight_high, dtype)
    out_low = _rounded(low * cos_low, dtype) - _rounded(high * sin_low, dtype)
    out_high = _rounded(high * cos_high, dtype) + _rounded(low * sin_high, dtype)
    tl.store(out_ptrs, out_low.to(dtype), mask=mask)
    tl.store(out_ptrs + HALF, out_high.to(dtype), mask=mask)


def _launch(q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, BLOCK_H, num_warps, CENTRED):
    B, S, q_heads, D = q.shape
    if B == 0 or S == 0:
        return
    k_heads = k.shape[2]
    # Tables of one sequence are those of all.
    cos_b, sin_b = (one.stride(0) if one.shape[0] > 1 else 0 for one in (cos, sin))
    tiles = triton.cdiv(q_heads, BLOCK_H) + triton.cdiv(k_heads, BLOCK_H)
    _normed_rope[(tiles * B * S,)](
        q, k, q_weight, k_weight, cos, sin, q_out, k_out,
        *q.stride()[:3], *k.stride()[:3], cos_b, cos.stride(1), sin_b, sin.stride(1),
        *q_out.stride()[:3], *k_out.stride()[:3],
        eps, S, q_heads, k_heads, D // 2, BLOCK_H, CENTRED, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def run_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    BLOCK_H=4,
    num_warps=1,
):
    """q_out and k_out = rotated RMSNorm of every head of q and k, rounded to T after each operation.

    Shapes: q, q_out [B, S, Hq, D], k, k_out [B, S, Hkv, D], q_weight, k_weight [D], cos, sin [1 or B, S, D]; D even;
    rows of D are contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: BLOCK_H heads of one token a program.
    """
    _launch(q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, BLOCK_H, num_warps, CENTRED=False)


def run_qk_norm_rope_gemma(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    BLOCK_H=4,
    num_warps=1,
):
    """q_out and k_out = rotated RMSNorm of every head of q and k, with weights around zero; the norm is rounded once.

    Shapes: q, q_out [B, S, Hq, D], k, k_out [B, S, Hkv, D], q_weight, k_weight [D], cos, sin [1 or B, S, D]; D even;
    rows of D are contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: BLOCK_H heads of one token a program.
    """
    _launch(q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, BLOCK_H, num_warps, CENTRED=True)

"""Rotary position embedding (the two halves of a head rotate together) of q and k in one launch, Triton."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S"])
def _rope_neox_tile(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    cos_stride_b,
    cos_stride_s,
    sin_stride_b,
    sin_stride_s,
    q_out_stride_b,
    q_out_stride_h,
    q_out_stride_s,
    k_out_stride_b,
    k_out_stride_h,
    k_out_stride_s,
    S,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Tiles vary fastest: those of one token are neighbours, share its cos and sin, and read neighbouring memory.
    q_tiles: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    tiles: tl.constexpr = q_tiles + (K_HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    tile = pid % tiles
    token = pid // tiles
    b = (token // S).to(tl.int64)
    s = (token % S).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)[None, :]

    if tile < q_tiles:
        heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        mask = (heads < Q_HEADS) & (dims < HALF)
        x_ptrs = q_ptr + b * q_stride_b + s * q_stride_s + heads.to(tl.int64) * q_stride_h + dims
        out_ptrs = q_out_ptr + b * q_out_stride_b + s * q_out_stride_s + heads.to(tl.int64) * q_out_stride_h + dims
    else:
        heads = (tile - q_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        mask = (heads < K_HEADS) & (dims < HALF)
        x_ptrs = k_ptr + b * k_stride_b + s * k_stride_s + heads.to(tl.int64) * k_stride_h + dims
        out_ptrs = k_out_ptr + b * k_out_stride_b + s * k_out_stride_s + heads.to(tl.int64) * k_out_stride_h + dims

    # evict_last, although nothing is read again: up to 6% faster than no policy, where evict_first is slower (H200).
    low = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    high = tl.load(x_ptrs + HALF, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    # Every head asks for the same cos and sin, which L1 answers: they arrive in the layout of x. One row of them for all
    # heads would have to be laid out anew, through shared memory and a barrier.
    dims = tl.broadcast_to(dims, (BLOCK_H, BLOCK_D))
    cos_ptrs = cos_ptr + b * cos_stride_b + s * cos_stride_s + dims
    sin_ptrs = sin_ptr + b * sin_stride_b + s * sin_stride_s + dims
    cos_low = tl.load(cos_ptrs, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptrs, mask=mask, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)

    # Each product is rounded to T before the sum, as separate PyTorch operations round. Subtracting the rounded product
    # is the same, bit for bit, as adding the rounded product of -high.
    dtype = q_out_ptr.dtype.element_ty
    out_low = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
    out_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    tl.store(out_ptrs, out_low.to(dtype), mask=mask)
    tl.store(out_ptrs + HALF, out_high.to(dtype), mask=mask)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    BLOCK_H=None,
    num_warps=None,
):
    """y = T(T(x * cos) + T(cat(-x2, x1) * sin)) for x = q and x = k, x1 and x2 being the halves of a head.

    Shapes: q, q_out [B, Hq, S, D]; k, k_out [B, Hkv, S, D]; cos, sin [1 or B, S, D]; unit last stride, any other
    strides; one dtype T in bfloat16, float16, float32; D even. Every cast rounds to nearest even.
    Mapping: a program owns BLOCK_H heads of q, or of k, of one token. With the layout that models use (all heads of a
    token side by side) it reads one contiguous piece, and its neighbours the rest of the token.
    BLOCK_H = None: as many heads as make 1024 values, or 256 while there are few tokens (decode).
    num_warps = None: 16 values a thread, or fewer in a single warp.
    """
    B, q_heads, S, D = q.shape
    k_heads = k.shape[1]
    tokens = B * S
    if tokens == 0 or D == 0:
        return
    # Next powers of two, written out: triton.next_power_of_2 costs microseconds a call.
    block_d = 1 << (D // 2 - 1).bit_length()
    all_heads = 1 << (max(q_heads, k_heads) - 1).bit_length()
    block_h = min(BLOCK_H or max(1, (512 if tokens >= 64 else 128) // block_d), all_heads)
    tiles = (q_heads + block_h - 1) // block_h + (k_heads + block_h - 1) // block_h
    warps = num_warps or min(8, max(1, block_h * block_d // 256))
    cos_stride_b, cos_stride_s, _ = cos.stride()
    sin_stride_b, sin_stride_s, _ = sin.stride()
    if cos.shape[0] == 1:  # one table for the whole batch
        cos_stride_b = sin_stride_b = 0
    # Without contraction: a fused multiply-add would skip the rounding of a product when T is float32.
    _rope_neox_tile[(tokens * tiles,)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        *q.stride()[:3],
        *k.stride()[:3],
        cos_stride_b,
        cos_stride_s,
        sin_stride_b,
        sin_stride_s,
        *q_out.stride()[:3],
        *k_out.stride()[:3],
        S,
        q_heads,
        k_heads,
        D // 2,
        block_h,
        block_d,
        num_warps=warps,
        enable_fp_fusion=False,
    )

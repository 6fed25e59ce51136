"""Rotary position embedding of the first R elements of each head of q and k in one launch, Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    x_head_stride,
    out_head_stride,
    first_head,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    heads = first_head + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    rest = tl.arange(0, BLOCK_REST)[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    rest_mask = (heads < HEADS) & (rest < REST)
    heads = heads.to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    x_ptrs = x_ptr + heads * x_head_stride + dims
    if REST > 0:
        copied = tl.load(x_ptr + heads * x_head_stride + 2 * HALF + rest, mask=rest_mask)
    low = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    # Each product is rounded to T before the sum, as separate PyTorch operations round. Subtracting the rounded product
    # is the same, bit for bit, as adding the rounded product of -high.
    out_low = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
    out_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    out_ptrs = out_ptr + heads * out_head_stride + dims
    tl.store(out_ptrs, out_low.to(dtype), mask=mask)
    tl.store(out_ptrs + HALF, out_high.to(dtype), mask=mask)
    if REST > 0:
        tl.store(out_ptr + heads * out_head_stride + 2 * HALF + rest, copied, mask=rest_mask)


@triton.jit(do_not_specialize=["S"])
def _rope_partial_token(
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
    REST: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    pid = tl.program_id(0)
    group = pid % GROUPS
    token = pid // GROUPS
    b = (token // S).to(tl.int64)
    s = (token % S).to(tl.int64)

    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = dims < HALF
    cos_ptrs = cos_ptr + b * cos_stride_b + s * cos_stride_s + dims
    sin_ptrs = sin_ptr + b * sin_stride_b + s * sin_stride_s + dims
    cos_low = tl.load(cos_ptrs, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptrs, mask=mask, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)

    _rotate_heads(
        q_ptr + b * q_stride_b + s * q_stride_s,
        q_out_ptr + b * q_out_stride_b + s * q_out_stride_s,
        q_stride_h,
        q_out_stride_h,
        group * BLOCK_Q,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        Q_HEADS,
        HALF,
        REST,
        BLOCK_Q,
        BLOCK_D,
        BLOCK_REST,
    )
    _rotate_heads(
        k_ptr + b * k_stride_b + s * k_stride_s,
        k_out_ptr + b * k_out_stride_b + s * k_out_stride_s,
        k_stride_h,
        k_out_stride_h,
        group * BLOCK_K,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        K_HEADS,
        HALF,
        REST,
        BLOCK_K,
        BLOCK_D,
        BLOCK_REST,
    )


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    GROUPS=None,
    num_warps=None,
):
    """y = cat(T(T(r * cos) + T(cat(-r2, r1) * sin)), p): r is the first R elements of a head of q or k, p the rest.

    Shapes: q, q_out [B, Hq, S, D]; k, k_out [B, Hkv, S, D]; cos, sin [1 or B, S, R]; r1, r2 the halves of r; unit last
    stride, any other strides; one dtype T in bfloat16, float16, float32; R even, R <= D. Casts round to nearest even.
    Mapping: a program owns one token and 1 / GROUPS of its q and of its k heads: cos and sin are read once for all of
    them, and with the layout models use (all heads of a token side by side) the program reads one contiguous piece.
    GROUPS = None: 1, or more (up to 16) where there are too few tokens to fill the machine (decode).
    num_warps = None: 32 values of q a thread (16 when the heads are split).
    """
    B, q_heads, S, D = q.shape
    k_heads = k.shape[1]
    half = cos.shape[-1] // 2
    rest = D - 2 * half
    tokens = B * S
    if tokens == 0:
        return
    groups = GROUPS or (1 if tokens >= 512 else 4 if tokens >= 64 else 16)
    # Next powers of two, written out: triton.next_power_of_2 costs microseconds a call.
    block_q = 1 << ((q_heads + groups - 1) // groups - 1).bit_length()
    block_k = 1 << ((k_heads + groups - 1) // groups - 1).bit_length()
    block_d = 1 << (half - 1).bit_length()
    block_rest = 1 << max(rest - 1, 0).bit_length()
    # Rounding the blocks up to powers of two may leave the last groups without heads: launch only the others.
    groups = max((q_heads + block_q - 1) // block_q, (k_heads + block_k - 1) // block_k)
    # Down to a power of two, which D need not be.
    warps = num_warps or min(8, 1 << max((block_q * D // (1024 if groups == 1 else 512)).bit_length() - 1, 0))
    cos_stride_b, cos_stride_s, _ = cos.stride()
    sin_stride_b, sin_stride_s, _ = sin.stride()
    if cos.shape[0] == 1:  # one table for the whole batch
        cos_stride_b = sin_stride_b = 0
    # Without contraction: a fused multiply-add would skip the rounding of a product when T is float32.
    _rope_partial_token[(tokens * groups,)](
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
        half,
        rest,
        groups,
        block_q,
        block_k,
        block_d,
        block_rest,
        num_warps=warps,
        enable_fp_fusion=False,
    )

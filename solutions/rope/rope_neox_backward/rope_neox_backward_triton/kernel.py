"""The gradients of rotary position embedding (the two halves of a head rotate together) of q and k in one launch, Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_heads_back(
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
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    heads = first_head + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    heads = heads.to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    x_ptrs = x_ptr + heads * x_head_stride + dims
    low = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    # Each product is rounded to T before the sum, as separate PyTorch operations round. What one half of a head gives to the
    # other is scaled by the table of the half it comes from: the forward rotation has it the other way round.
    out_low = (low * cos_low).to(dtype).to(tl.float32) + (high * sin_high).to(dtype).to(tl.float32)
    out_high = (high * cos_high).to(dtype).to(tl.float32) - (low * sin_low).to(dtype).to(tl.float32)
    out_ptrs = out_ptr + heads * out_head_stride + dims
    tl.store(out_ptrs, out_low.to(dtype), mask=mask)
    tl.store(out_ptrs + HALF, out_high.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["S"])
def _rope_neox_backward_token(
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
    GROUPS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
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

    _rotate_heads_back(
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
        BLOCK_Q,
        BLOCK_D,
    )
    _rotate_heads_back(
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
        BLOCK_K,
        BLOCK_D,
    )


def run(
    grad_q_out: torch.Tensor,
    grad_k_out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    *,
    GROUPS=None,
    num_warps=None,
):
    """dx = T(T(g * cos) + cat(t2, -t1)), t = T(g * sin), for the gradients g of q and of k; t1 and t2 are halves of a head.

    Shapes: grad_q_out, grad_q [B, Hq, S, D]; grad_k_out, grad_k [B, Hkv, S, D]; cos, sin [1 or B, S, D]; unit last stride,
    any other strides; one dtype T in bfloat16, float16, float32; D even. Every cast rounds to nearest even.
    Mapping: a program owns one token and 1 / GROUPS of its q and of its k heads: cos and sin are read once for all of
    them, and with the layout models use (all heads of a token side by side) the program reads one contiguous piece.
    GROUPS = None: 1, or more (up to 16) where there are too few tokens to fill the machine (decode).
    num_warps = None: 16 values of each half of q a thread (8 when the heads are split).
    """
    B, q_heads, S, D = grad_q.shape
    k_heads = grad_k.shape[1]
    tokens = B * S
    if tokens == 0 or D == 0:
        return
    groups = GROUPS or (1 if tokens >= 512 else 4 if tokens >= 64 else 16)
    # Next powers of two, written out: triton.next_power_of_2 costs microseconds a call.
    block_q = 1 << ((q_heads + groups - 1) // groups - 1).bit_length()
    block_k = 1 << ((k_heads + groups - 1) // groups - 1).bit_length()
    block_d = 1 << (D // 2 - 1).bit_length()
    # Rounding the blocks up to powers of two may leave the last groups without heads: launch only the others.
    groups = max((q_heads + block_q - 1) // block_q, (k_heads + block_k - 1) // block_k)
    warps = num_warps or min(8, max(1, block_q * block_d // (512 if groups == 1 else 256)))
    cos_stride_b, cos_stride_s, _ = cos.stride()
    sin_stride_b, sin_stride_s, _ = sin.stride()
    if cos.shape[0] == 1:  # one table for the whole batch
        cos_stride_b = sin_stride_b = 0
    # Without contraction: a fused multiply-add would skip the rounding of a product when T is float32.
    _rope_neox_backward_token[(tokens * groups,)](
        grad_q_out,
        grad_k_out,
        cos,
        sin,
        grad_q,
        grad_k,
        *grad_q_out.stride()[:3],
        *grad_k_out.stride()[:3],
        cos_stride_b,
        cos_stride_s,
        sin_stride_b,
        sin_stride_s,
        *grad_q.stride()[:3],
        *grad_k.stride()[:3],
        S,
        q_heads,
        k_heads,
        D // 2,
        groups,
        block_q,
        block_k,
        block_d,
        num_warps=warps,
        enable_fp_fusion=False,
    )

"""New keys and values behind those of earlier positions, Triton: both tensors are copied in one launch."""

import torch
import triton
import triton.language as tl


@triton.jit
def _copy(
    past_ptr, new_ptr, out_ptr, past_b, past_h, past_s, new_b, new_h, new_s, out_b, out_h, out_s, L, S, H,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    wide, in_row = rows.to(tl.int64), cols < D
    is_past, is_new = (rows < L) & in_row, (rows >= L) & (rows < L + S) & in_row
    past_ptrs = past_ptr + batch * past_b + head * past_h + wide * past_s + cols
    new_ptrs = new_ptr + batch * new_b + head * new_h + (wide - L) * new_s + cols
    # Most blocks have no new position: their second load has no lane and reads nothing.
    past, new = tl.load(past_ptrs, mask=is_past, other=0.0), tl.load(new_ptrs, mask=is_new, other=0.0)
    out_ptrs = out_ptr + batch * out_b + head * out_h + wide * out_s + cols
    tl.store(out_ptrs, tl.where(is_new, new, past), mask=is_past | is_new)


@triton.jit(do_not_specialize=["L", "S"])
def _concat(
    past_k_ptr, past_v_ptr, k_ptr, v_ptr, k_out_ptr, v_out_ptr,
    past_k_b, past_k_h, past_k_s, past_v_b, past_v_h, past_v_s, k_b, k_h, k_s, v_b, v_h, v_s,
    k_out_b, k_out_h, k_out_s, v_out_b, v_out_h, v_out_s, L, S, H,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _copy(
            past_k_ptr, k_ptr, k_out_ptr, past_k_b, past_k_h, past_k_s, k_b, k_h, k_s, k_out_b, k_out_h, k_out_s,
            L, S, H, D, BLOCK, BLOCK_D,
        )  # fmt: skip
    else:
        _copy(
            past_v_ptr, v_ptr, v_out_ptr, past_v_b, past_v_h, past_v_s, v_b, v_h, v_s, v_out_b, v_out_h, v_out_s,
            L, S, H, DV, BLOCK, BLOCK_DV,
        )  # fmt: skip


def run(
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=4,
):
    """k_out = past_k and then k; v_out = past_v and then v, along the positions.

    Shapes: past_k [B, H, L, D], past_v [B, H, L, Dv], k [B, H, S, D], v [B, H, S, Dv], k_out [B, H, L + S, D],
    v_out [B, H, L + S, Dv]; rows of D and Dv are contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: BLOCK positions of one head of k or of v a program; None: 32.
    """
    B, H, L, D = past_k.shape
    S, DV = k.shape[2], v.shape[3]
    if B == 0:
        return
    block = BLOCK or 32
    strides = [step for one in (past_k, past_v, k, v, k_out, v_out) for step in one.stride()[:3]]
    _concat[(triton.cdiv(L + S, block), B * H, 2)](
        past_k, past_v, k, v, k_out, v_out, *strides, L, S, H,
        D, DV, block, triton.next_power_of_2(D), triton.next_power_of_2(DV), num_warps=num_warps,
    )  # fmt: skip

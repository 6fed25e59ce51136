"""Keys and values of the first positions in new tensors, Triton: both tensors are copied in one launch."""

import torch
import triton
import triton.language as tl


@triton.jit
def _copy(
    x_ptr, out_ptr, x_b, x_h, x_s, out_b, out_h, out_s, S, H, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < S) & (cols < D)
    x = tl.load(x_ptr + batch * x_b + head * x_h + rows * x_s + cols, mask=inside)
    tl.store(out_ptr + batch * out_b + head * out_h + rows * out_s + cols, x, mask=inside)


@triton.jit(do_not_specialize=["S"])
def _start(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, k_b, k_s, k_h, v_b, v_s, v_h,
    k_out_b, k_out_h, k_out_s, v_out_b, v_out_h, v_out_s, S, H,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _copy(k_ptr, k_out_ptr, k_b, k_h, k_s, k_out_b, k_out_h, k_out_s, S, H, D, BLOCK, BLOCK_D)
    else:
        _copy(v_ptr, v_out_ptr, v_b, v_h, v_s, v_out_b, v_out_h, v_out_s, S, H, DV, BLOCK, BLOCK_DV)


def run(k: torch.Tensor, v: torch.Tensor, k_out: torch.Tensor, v_out: torch.Tensor, *, BLOCK=None, num_warps=4):
    """k_out = k and v_out = v, with heads before positions.

    Shapes: k [B, S, H, D], v [B, S, H, Dv], k_out [B, H, S, D], v_out [B, H, S, Dv]; rows of D and Dv are contiguous; one
    dtype T in bfloat16, float16, float32.
    Mapping: BLOCK positions of one head of k or of v a program; None: 32.
    """
    B, S, H, D = k.shape
    DV = v.shape[3]
    if B == 0:
        return
    block = BLOCK or 32
    strides = [step for one in (k, v, k_out, v_out) for step in one.stride()[:3]]
    _start[(triton.cdiv(S, block), B * H, 2)](
        k, v, k_out, v_out, *strides, S, H,
        D, DV, block, triton.next_power_of_2(D), triton.next_power_of_2(DV), num_warps=num_warps,
    )  # fmt: skip

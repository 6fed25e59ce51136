"""Keys of latent attention from the part of each head and the part that heads share, Triton: both are copied in one launch."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["L"])
def _expand(
    nope_ptr, rope_ptr, out_ptr, nope_b, nope_h, nope_l, rope_b, rope_l, out_b, out_h, out_l, L, H,
    DN: tl.constexpr, DR: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    is_own, is_shared = (rows < L) & (cols < DN), (rows < L) & (cols >= DN) & (cols < DN + DR)
    own = tl.load(nope_ptr + batch * nope_b + head * nope_h + rows * nope_l + cols, mask=is_own, other=0.0)
    shared = tl.load(rope_ptr + batch * rope_b + rows * rope_l + cols - DN, mask=is_shared, other=0.0)
    out_ptrs = out_ptr + batch * out_b + head * out_h + rows * out_l + cols
    tl.store(out_ptrs, tl.where(is_own, own, shared), mask=is_own | is_shared)


def run(k_nope: torch.Tensor, k_rope: torch.Tensor, keys: torch.Tensor, *, BLOCK=32, num_warps=4):
    """keys = k_nope of each head and then k_rope of all heads, along the width.

    Shapes: k_nope [B, H, L, Dn], k_rope [B, 1, L, Dr], keys [B, H, L, Dn + Dr]; rows are contiguous; one dtype T in bfloat16,
    float16, float32.
    Mapping: BLOCK positions of one head a program.
    """
    B, H, L, DN = k_nope.shape
    DR = k_rope.shape[3]
    if keys.numel() == 0:
        return
    _expand[(triton.cdiv(L, BLOCK), B * H)](
        k_nope, k_rope, keys, *k_nope.stride()[:3], k_rope.stride(0), k_rope.stride(2), *keys.stride()[:3], L, H,
        DN, DR, BLOCK, triton.next_power_of_2(DN + DR), num_warps=num_warps,
    )  # fmt: skip

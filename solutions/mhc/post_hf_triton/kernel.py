"""What a sublayer writes back to residual streams, rounded where transformers rounds, Triton.

A token's streams are C rows of H values. A program owns a block of columns of one token, so that its coefficients are scalars, and
reads every stream once; all loads are in flight before the first is used.
"""

# ruff: noqa: RUF005
# A kernel gathers the streams of a token in a tuple by sums of tuples: Triton has no starred expressions.

import torch
import triton
import triton.language as tl


@triton.jit
def _post(
    y_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    C: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    y = tl.load(y_ptr + token * H + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    streams = ()
    for i in tl.static_range(C):
        where = residual_ptr + (token * C + i) * H + cols
        streams = streams + (tl.load(where, mask=inside, other=0.0, eviction_policy="evict_last"),)
    for o in tl.static_range(C):
        gain = tl.load(post_ptr + token * C + o).to(dtype).to(tl.float32)
        mixed = tl.zeros([BLOCK], dtype=tl.float32)
        for i in tl.static_range(C):
            weight = tl.load(comb_ptr + (token * C + i) * C + o).to(dtype).to(tl.float32)
            mixed += weight * streams[i].to(tl.float32)
        added = (gain * y).to(dtype).to(tl.float32)
        total = added + mixed.to(dtype).to(tl.float32)
        tl.store(out_ptr + (token * C + o) * H + cols, total.to(dtype), mask=inside)


def run(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=4,
) -> None:
    """out[:, o] = T(T(T(post[:, o]) * y) + T(sum over i of T(comb[:, i, o]) * residual[:, i])), the sum in float32.

    Shapes: y [M, H], residual and out [M, C, H] in T (bfloat16 or float32), post [M, C], comb [M, C, C] in float32; contiguous.
    BLOCK = None: the widest power of two up to 1024 columns that leaves no tail, and at least 512 where H has them.
    """
    M, C, H = residual.shape
    if M == 0 or H == 0:
        return
    block = min(BLOCK or min(1024, max(H & -H, 512)), 1 << (H - 1).bit_length())
    programs = M * -(-H // block)
    # Fused, T(gain * y) + mixed is one bfloat16 FMA on sm_90, and the product is not rounded.
    _post[(programs,)](y, residual, post, comb, out, C, H, block, num_warps=num_warps, enable_fp_fusion=False)

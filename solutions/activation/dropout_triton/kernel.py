"""Dropout with the mask of a seed and an offset, Triton: one read and one write, and no mask in memory."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["least"])
def _dropout(x_ptr, state_ptr, out_ptr, N, least, scale, BLOCK: tl.constexpr):
    """Scale or drop four elements for each block of Philox; the key is the seed, the counter the block and the offset."""
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(state_ptr)
    offset = tl.load(state_ptr + 1)
    nothing = tl.zeros([BLOCK], dtype=tl.uint32)
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    high = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    offset_low = nothing + (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = nothing + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, offset_low, offset_high)
    lane = tl.arange(0, 4)[None, :]
    pair = tl.where(lane < 2, tl.where(lane == 0, a[:, None], b[:, None]), tl.where(lane == 2, c[:, None], d[:, None]))
    elements = block[:, None] * 4 + lane
    inside = elements < N
    x = tl.load(x_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    kept = tl.where(pair.to(tl.int64) >= least, x * scale, 0.0)
    tl.store(out_ptr + elements, kept.to(out_ptr.dtype.element_ty), mask=inside)


def run(
    x: torch.Tensor, state: torch.Tensor, p: float, out: torch.Tensor, *, BLOCK: int = 512, num_warps: int = 4
) -> None:
    """Write out [N] = T(x / (1 - p)), or 0 for an element whose random bits are less than p * 2**32.

    x in bfloat16, float16 or float32; state [2] int64, the seed and the offset. The bits of element i are number i % 4 of
    block i // 4 of Philox 4x32-10. A program has 4 * BLOCK elements.
    """
    N = x.numel()
    if N == 0:
        return
    _dropout[(-(-N // (4 * BLOCK)),)](x, state, out, N, int(p * 2**32), 1 / (1 - p), BLOCK, num_warps=num_warps)

"""Codes of 4 bits, two a byte, with a scale per 32 channels, Triton."""

import torch
import triton
import triton.language as tl

BLOCK = 32
BLOCKS = 16  # of a program
SMALLEST = tl.constexpr(6 * 2.0**-126)


@triton.jit
def _to_codes(scaled):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 as its place among them, a tie as the even place; the sign is bit 3."""
    size = tl.abs(scaled)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | (((scaled.to(tl.int32, bitcast=True) >> 31) & 1) << 3)


@triton.jit(do_not_specialize=["M"])
def _cast_pairs(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    out_stride,
    scale_row,
    scale_column,
    M,
    H,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    cols = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_rows = (rows < M)[:, None, None]
    mask = in_rows & (cols < H)[None, :, :]
    x = tl.load(x_ptr + rows[:, None, None] * x_stride + cols[None, :, :], mask=mask, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), axis=2), SMALLEST)
    limit = tl.full([BLOCK_M, BLOCKS], 6.0, tl.float32)
    scale = tl.div_rn(amax, limit)
    if ROUND:
        exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        inverse = tl.div_rn(limit, amax)
    codes = _to_codes(x * inverse[:, :, None])
    low, high = tl.split(tl.reshape(codes, [BLOCK_M, BLOCKS, BLOCK // 2, 2]))
    places = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    in_bytes = in_rows & (places * 2 < H)[None, :, :]
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(out_ptr + rows[:, None, None] * out_stride + places[None, :, :], packed, mask=in_bytes)
    in_scales = (rows < M)[:, None] & (blocks * BLOCK < H)[None, :]
    tl.store(scale_ptr + rows[:, None] * scale_row + blocks[None, :] * scale_column, scale, mask=in_scales)


def run(x: torch.Tensor, round_scale: bool, out: torch.Tensor, scale: torch.Tensor, *, BLOCK_M=4, num_warps=4):
    """out = codes of x, two a byte, the even channel low; scale = what they are multiplied by, a power of two if asked.

    Shapes: x [M, H] in bfloat16 or float32, H even, and out [M, H / 2] bytes with unit last stride; scale [M, ceil(H / 32)]
    float32 of any strides.
    """
    M, H = x.shape
    if M == 0:
        return
    grid = ((M + BLOCK_M - 1) // BLOCK_M, (scale.shape[1] + BLOCKS - 1) // BLOCKS)
    _cast_pairs[grid](
        x,
        out,
        scale,
        x.stride(0),
        out.stride(0),
        scale.stride(0),
        scale.stride(1),
        M,
        H,
        bool(round_scale),
        BLOCK_M,
        BLOCKS,
        BLOCK,
        num_warps=num_warps,
    )

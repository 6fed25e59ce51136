"""Codes of 8 bits with packed powers of two as scales, Triton."""

import torch
import triton
import triton.language as tl

BLOCK = 128
BLOCKS = 4  # exponents in a word of 32 bits


@triton.jit(do_not_specialize=["M"])
def _cast_words(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    out_stride,
    scale_row,
    scale_column,
    M,
    H,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    word = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    blocks = tl.arange(0, BLOCKS)
    cols = word * BLOCKS * BLOCK + blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None, None] & (cols < H)[None, :, :]
    x = tl.load(x_ptr + rows[:, None, None] * x_stride + cols[None, :, :], mask=mask, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), axis=2), 1e-4)
    # The division must round as IEEE asks, or a power of two lands one off.
    bits = tl.div_rn(amax, tl.full([BLOCK_M, BLOCKS], 448.0, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (bits + 0x7FFFFF) >> 23
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(x * inverse[:, :, None], -448.0), 448.0)
    codes = scaled.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None, None] * out_stride + cols[None, :, :], codes, mask=mask)
    exists = (word * BLOCKS + blocks) * BLOCK < H
    packed = tl.sum(tl.where(exists[None, :], exponent << (8 * blocks)[None, :], 0), axis=1)
    tl.store(scale_ptr + rows * scale_row + word * scale_column, packed, mask=rows < M)


def run(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, *, BLOCK_M=4, num_warps=4):
    """out = codes of x, scale = the exponents of the powers of two that they are multiplied by, four a word.

    Shapes: x [M, H] in bfloat16 or float32 and out [M, H] in float8_e4m3fn with unit last stride; scale
    [M, ceil(H / 512)] int32 of any strides: what lies between its elements is not touched.
    """
    M, H = x.shape
    if M == 0:
        return
    grid = ((M + BLOCK_M - 1) // BLOCK_M, scale.shape[1])
    _cast_words[grid](
        x,
        out,
        scale,
        x.stride(0),
        out.stride(0),
        scale.stride(0),
        scale.stride(1),
        M,
        H,
        BLOCK_M,
        BLOCKS,
        BLOCK,
        num_warps=num_warps,
    )

"""FP4 codes to FP8 codes under a coarser scale, without losing a bit, Triton."""

import triton
import triton.language as tl

BLOCK = 128  # rows and columns that share a scale of the result
GROUP = 32  # columns that share a scale of x


@triton.jit
def _fp4_values(sign, size):
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, times 2^-26, from bit 31 of sign and bits 22 to 24 of size.

    Size is such a value times 2^-126: float32 has an exponent of 0 for the same two of them.
    """
    return ((sign & -0x80000000) | (size & 0x01C00000)).to(tl.float32, bitcast=True) * 2.0**100


@triton.jit
def _cast_blocks_lossless(
    x_ptr,
    scale_in_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    scale_in_row,
    scale_in_column,
    out_stride,
    scale_row,
    scale_column,
    M,
    H,
    x_columns,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program has a block: its exponents first, then the codes, whose factor 2^(e - e_out) does not round."""
    across = tl.cdiv(H, BLOCK)
    down = (tl.program_id(0) // across).to(tl.int64)
    strip = tl.program_id(0) % across
    rows = down * BLOCK + tl.arange(0, BLOCK)
    groups = strip * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    in_scales = (rows < M)[:, None] & (groups * GROUP < H)[None, :]
    scale_in_ptrs = scale_in_ptr + rows[:, None] * scale_in_row + groups[None, :] * scale_in_column
    exponent = tl.load(scale_in_ptrs, mask=in_scales, other=0.0).to(tl.int32, bitcast=True) >> 23
    lowered = tl.maximum(tl.max(tl.max(exponent, axis=1), axis=0) - 6, 0)
    # 2^26 of the factor undo what _fp4_values leaves; all are products without rounding.
    factor = ((exponent - lowered + (127 + 26)) << 23).to(tl.float32, bitcast=True)
    # Tiles of two axes to load and store: with an axis of groups, the lanes of a warp would lie along the rows.
    places = strip * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    mask = (rows < M)[:, None] & (places < x_columns)[None, :]
    packed = tl.load(x_ptr + rows[:, None] * x_stride + places[None, :], mask=mask, other=0).to(tl.int32)
    packed = tl.reshape(packed, [BLOCK, BLOCK // GROUP, GROUP // 2])
    low = _fp4_values(packed << 28, packed << 22) * factor[:, :, None]
    high = _fp4_values(packed << 24, packed << 18) * factor[:, :, None]
    codes = tl.join(low, high).to(out_ptr.dtype.element_ty)
    cols = strip * BLOCK + tl.arange(0, BLOCK)
    out_mask = (rows < M)[:, None] & (cols < H)[None, :]
    out_ptrs = out_ptr + rows[:, None] * out_stride + cols[None, :]
    tl.store(out_ptrs, tl.reshape(codes, [BLOCK, BLOCK]), mask=out_mask)
    scale = (tl.zeros([1], tl.int32) + (lowered << 23)).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + down * scale_row + strip * scale_column + tl.arange(0, 1), scale)


def run(x, scale_in, out, scale, *, num_warps=8):
    """out = codes of the values of x, scale = the largest of scale_in in a block of 128 x 128, divided by 64.

    Shapes: x [M, H / 2] bytes and out [M, H] in float8_e4m3fn with unit last stride, H a multiple of 32; scale_in [M, H / 32],
    powers of two of which none is less than 2^-11 of the largest of its block, and scale [ceil(M / 128), ceil(H / 128)], float32
    of any strides.
    """
    M, H = out.shape
    if M == 0:
        return
    _cast_blocks_lossless[(-(-M // BLOCK) * -(-H // BLOCK),)](
        x,
        scale_in,
        out,
        scale,
        x.stride(0),
        scale_in.stride(0),
        scale_in.stride(1),
        out.stride(0),
        scale.stride(0),
        scale.stride(1),
        M,
        H,
        x.shape[1],
        BLOCK,
        GROUP,
        num_warps=num_warps,
    )

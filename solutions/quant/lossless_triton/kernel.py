"""FP4 codes to FP8 codes under a coarser scale, without losing a bit, Triton."""

import triton
import triton.language as tl

BLOCK = 128  # rows and columns that share a scale of the result
GROUP = 32  # columns that share a scale of x


@triton.jit
def _fp4_values(code):
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, from the exponent in bits 1 and 2 and the mantissa in bit 0."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    subnormal = mantissa.to(tl.float32) * 0.5
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, subnormal, normal)
    return (size.to(tl.int32, bitcast=True) | ((code >> 3) << 31)).to(tl.float32, bitcast=True)


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
    factor = ((exponent - lowered + 127) << 23).to(tl.float32, bitcast=True)
    places = (groups[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :])[None, :, :]
    mask = (rows < M)[:, None, None] & (places < x_columns)
    packed = tl.load(x_ptr + rows[:, None, None] * x_stride + places, mask=mask, other=0).to(tl.int32)
    low = _fp4_values(packed & 15) * factor[:, :, None]
    high = _fp4_values(packed >> 4) * factor[:, :, None]
    codes = tl.join(low, high).to(out_ptr.dtype.element_ty)
    codes = tl.reshape(codes, [BLOCK, BLOCK // GROUP, GROUP])
    cols = (groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :])[None, :, :]
    out_mask = (rows < M)[:, None, None] & (cols < H)
    tl.store(out_ptr + rows[:, None, None] * out_stride + cols, codes, mask=out_mask)
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

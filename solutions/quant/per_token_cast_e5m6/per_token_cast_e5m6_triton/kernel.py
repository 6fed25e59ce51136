"""Codes of 12 bits with one scale a row, Triton."""

import torch
import triton
import triton.language as tl

BYTES = 16  # of eight codes, rounded up to a power of two; twelve are stored


@triton.jit
def _to_codes(value):
    """float16 cut toward zero, without its last four bits; up where its last bit and the 17 bits left out say so."""
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    normal = ((bits & 0x7FFFFFFF) - (112 << 23)) >> 17
    shift = tl.minimum(tl.maximum(130 - exponent, 0), 31)
    subnormal = ((bits & 0x7FFFFF) | 0x800000) >> shift
    code = tl.where(exponent >= 113, normal, tl.where(exponent >= 103, subnormal, 0))
    return (code + (((code & 1) + (bits & 0x1FFFF)) > 0x10000).to(tl.int32)) | (((bits >> 31) & 1) << 11)


@triton.jit
def _cast_rows(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    out_stride,
    scale_row,
    H,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    # One running maximum a lane: a single reduction at the end instead of one a block.
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, H, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    amax = tl.maximum(tl.max(largest, axis=0, keep_dims=True), 1e-4)
    limit = tl.full([1], 65024.0, tl.float32)
    scale = tl.div_rn(amax, limit)
    if ROUND:
        exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        inverse = tl.div_rn(limit, amax)
    tl.store(scale_ptr + row * scale_row + tl.arange(0, 1), scale)
    place = tl.arange(0, 8)[None, :]
    byte = tl.arange(0, BYTES)[None, :]
    for start in range(0, H, BLOCK):
        groups = start // 8 + tl.arange(0, BLOCK // 8)[:, None]
        x = tl.load(x_ptr + row * x_stride + groups * 8 + place, mask=groups * 8 < H, other=0.0).to(tl.float32)
        code = _to_codes(x * inverse[:, None])
        # Each code adds its part to the words that it lies in.
        top = tl.where(place == 0, code << 20, tl.where(place == 1, code << 8, tl.where(place == 2, code >> 4, 0)))
        middle = tl.where(place == 2, code << 28, tl.where(place == 3, code << 16, 0))
        middle = tl.where(place == 4, code << 4, tl.where(place == 5, code >> 8, middle))
        last = tl.where(place == 5, code << 24, tl.where(place == 6, code << 12, tl.where(place == 7, code, 0)))
        words = tl.where(byte < 4, tl.sum(top, axis=1, keep_dims=True), tl.sum(middle, axis=1, keep_dims=True))
        words = tl.where(byte < 8, words, tl.sum(last, axis=1, keep_dims=True))
        found = ((words >> (byte % 4 * 8)) & 0xFF).to(tl.uint8)
        tl.store(out_ptr + row * out_stride + groups * 12 + byte, found, mask=(groups * 8 < H) & (byte < 12))


def run(x: torch.Tensor, round_scale: bool, out: torch.Tensor, scale: torch.Tensor, *, BLOCK=2048, num_warps=4):
    """out = codes of x, eight in twelve bytes, scale = what they are multiplied by, a power of two if asked.

    Shapes: x [M, H] in bfloat16 or float32, H a multiple of 8, and out [M, 3 * H / 2] bytes with unit last stride; scale [M, 1]
    float32 of any strides. Bytes are stored one by one: a row of them may begin at any address.
    """
    M, H = x.shape
    if M == 0:
        return
    _cast_rows[(M,)](
        x,
        out,
        scale,
        x.stride(0),
        out.stride(0),
        scale.stride(0),
        H,
        bool(round_scale),
        BLOCK,
        BYTES,
        num_warps=num_warps,
    )

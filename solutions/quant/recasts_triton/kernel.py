"""From codes to codes of another format or block, and from gathered rows, Triton: no value in between is stored."""

import triton
import triton.language as tl

E4M3_MOST = 448.0
E4M3_FLOOR = 1e-4


@triton.jit
def _scale_and_inverse(amax, MOST: tl.constexpr, FLOOR: tl.constexpr, ROUND: tl.constexpr):
    """What a code is multiplied by, and what a value is multiplied by, which is not quite the reciprocal unless rounded."""
    amax = tl.maximum(amax, FLOOR)
    most = tl.zeros_like(amax) + MOST
    if ROUND:
        # amax / MOST, rounded up to a power of two, without the division: the exponents' difference, and one more where the
        # mantissa of amax is above that of MOST. The quotient as it is rounded lies above 1 then, for 6, 448 and 65024.
        bits = amax.to(tl.int32, bitcast=True)
        most_bits = most.to(tl.int32, bitcast=True)
        exponent = ((bits + 0x7FFFFF - (most_bits & 0x7FFFFF)) >> 23) - (most_bits >> 23) + 127
        exponent = tl.where(bits >= 0x7F800000, 255, exponent)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        # The divisions must round as IEEE asks, or codes land one off.
        scale = tl.div_rn(amax, most)
        inverse = tl.div_rn(most, amax)
    return scale, inverse


@triton.jit(do_not_specialize=["units"])
def _requantise_groups(
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
    units,
    H,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """A group of channels covers GROUP / BLOCK_IN scales of x, each of which is loaded once."""
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    exists = unit < units
    row = (unit // GROUPS).to(tl.int64)
    group = unit % GROUPS
    inner = group[:, None] * (GROUP // BLOCK_IN) + tl.arange(0, GROUP // BLOCK_IN)[None, :]
    # Two axes to load and store: with an axis of scales, the lanes of a warp would lie along the rows.
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = exists[:, None] & (cols < H)
    x = tl.load(x_ptr + row[:, None] * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    x = tl.reshape(x.to(tl.float32), [BLOCK_U, GROUP // BLOCK_IN, BLOCK_IN])
    in_scales = exists[:, None] & (inner * BLOCK_IN < H)
    scale_in_ptrs = scale_in_ptr + (row // BLOCK_IN)[:, None] * scale_in_row + inner * scale_in_column
    scale_in = tl.load(scale_in_ptrs, mask=in_scales, other=0.0)
    amax = tl.max(tl.max(tl.abs(x), axis=2) * scale_in, axis=1)
    scale, inverse = _scale_and_inverse(amax, MOST, FLOOR, ROUND)
    codes = (x * (scale_in * inverse[:, None])[:, :, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * out_stride + cols, tl.reshape(codes, [BLOCK_U, GROUP]), mask=mask)
    tl.store(scale_ptr + row * scale_row + group * scale_column, scale, mask=exists)


def run_per_token_requantise(x, scale_in, block, round_scale, out, scale, *, BLOCK=4096, num_warps=4):
    """out = codes of x * scale_in per token and 128 channels, scale = what they are multiplied by.

    Shapes: x [M, H] and out [M, H] in float8_e4m3fn with unit last stride; scale_in [ceil(M / block), ceil(H / block)], block 32
    or 128, and scale [M, ceil(H / 128)], float32 of any strides.
    """
    M, H = x.shape
    if M == 0:
        return
    groups = -(-H // 128)
    units = M * groups
    block_u = max(1, BLOCK // 128)
    _requantise_groups[((units + block_u - 1) // block_u,)](
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
        units,
        H,
        groups,
        128,
        block,
        E4M3_MOST,
        E4M3_FLOOR,
        bool(round_scale),
        block_u,
        num_warps=num_warps,
    )


# -- rows that are gathered ------------------------------------------------------------------------------------------------


@triton.jit
def _cast_gathered_channels(
    x_ptr,
    scale_in_ptr,
    token_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    scale_in_row,
    scale_in_column,
    out_stride,
    scale_row,
    scale_column,
    N,
    H,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    ROUND: tl.constexpr,
):
    """TOKENS gathered rows share a scale a channel; a program has BLOCK_H channels, which lie in one group of x."""
    strips = tl.cdiv(H, BLOCK_H)
    down = (tl.program_id(0) // strips).to(tl.int64)
    strip = tl.program_id(0) % strips
    rows = down * TOKENS + tl.arange(0, TOKENS)
    cols = strip * BLOCK_H + tl.arange(0, BLOCK_H)
    # Eight channels a thread instead of sixteen: half as many values go between threads for a maximum.
    cols = tl.max_contiguous(tl.multiple_of(cols, 8), 8)
    token = tl.load(token_ptr + rows, mask=rows < N, other=-1).to(tl.int64)
    present = token >= 0
    mask = present[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + token[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale_in_ptrs = scale_in_ptr + token * scale_in_row + (strip * BLOCK_H // GROUP) * scale_in_column
    x *= tl.load(scale_in_ptrs, mask=present, other=0.0)[:, None]
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(x), axis=0), MOST, FLOOR, ROUND)
    codes = (x * inverse[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + rows[:, None] * out_stride + cols[None, :], codes, mask=(rows < N)[:, None] & (cols < H)[None, :]
    )
    tl.store(scale_ptr + down * scale_row + cols * scale_column, scale, mask=cols < H)


def run_per_channel_cast_fused(x, scale_in, token_of_row, round_scale, out, scale, *, BLOCK_H=64, num_warps=4):
    """out = codes of the gathered rows of x * scale_in per channel and 128 rows, scale = what they are multiplied by.

    Shapes: x [T, H] and out [N, H] in float8_e4m3fn with unit last stride; scale_in [T, ceil(H / 128)] and scale
    [ceil(N / 128), H] float32 of any strides; token_of_row [N] int32, -1 for a row of zeros.
    """
    N, H = out.shape
    if N == 0:
        return
    _cast_gathered_channels[(-(-N // 128) * -(-H // BLOCK_H),)](
        x,
        scale_in,
        token_of_row,
        out,
        scale,
        x.stride(0),
        scale_in.stride(0),
        scale_in.stride(1),
        out.stride(0),
        scale.stride(0),
        scale.stride(1),
        N,
        H,
        128,
        BLOCK_H,
        128,
        E4M3_MOST,
        E4M3_FLOOR,
        bool(round_scale),
        num_warps=num_warps,
    )

"""Casts to codes of 8, 4 and 12 bits with a scale a block, Triton: the variants differ in compile-time constants alone."""

import torch
import triton
import triton.language as tl

E4M3_MOST = 448.0
FP4_MOST = 6.0
E5M6_MOST = 65024.0
E4M3_FLOOR = 1e-4
FP4_FLOOR = 6 * 2.0**-126
MANY_GROUPS = 1 << 15  # groups of 128 values from which on a program has 16 of them, and no multiprocessor goes without


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


@triton.jit
def _fp4_codes(scaled):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 as its place among them, a tie as the even place; the sign is bit 3."""
    size = tl.abs(scaled)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | (((scaled.to(tl.int32, bitcast=True) >> 31) & 1) << 3)


@triton.jit(do_not_specialize=["units"])
def _cast_groups(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride, scale_row, scale_column, units, H, out_columns,
    UNITS_A_ROW: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, MOST: tl.constexpr, FLOOR: tl.constexpr,
    ROUND: tl.constexpr, FP4: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Groups of GROUP channels of one token share a scale. PACK of them are a unit, whose exponents are one word if four.

    Units are numbered along rows and then down, so that no lane idles where a row has few of them.
    """
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    row = (unit // UNITS_A_ROW).to(tl.int64)
    place = unit % UNITS_A_ROW
    exists = unit < units
    group = place[:, None] * PACK + tl.arange(0, PACK)[None, :]
    cols = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    mask = exists[:, None, None] & (cols < H)
    x = tl.load(x_ptr + row[:, None, None] * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    x = x.to(tl.float32)
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(x), axis=2), MOST, FLOOR, ROUND)
    scaled = x * inverse[:, :, None]
    if FP4:
        low, high = tl.split(tl.reshape(_fp4_codes(scaled), [BLOCK_U, PACK, GROUP // 2, 2]))
        codes = (low | (high << 4)).to(tl.uint8)
        out_cols = group[:, :, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, None, :]
        out_mask = exists[:, None, None] & (out_cols < out_columns)
    else:
        codes = scaled.to(out_ptr.dtype.element_ty)  # saturates, so what exceeds the largest by rounding is the largest
        out_cols = cols
        out_mask = mask
    tl.store(out_ptr + row[:, None, None] * out_stride + out_cols, codes, mask=out_mask)
    if PACK == 4:
        exponent = (scale.to(tl.int32, bitcast=True) >> 23) << (8 * tl.arange(0, PACK))[None, :]
        word = tl.sum(tl.where(group * GROUP < H, exponent, 0), axis=1)
        tl.store(scale_ptr + row * scale_row + place * scale_column, word, mask=exists)
    else:
        in_scales = exists[:, None] & (group * GROUP < H)
        tl.store(scale_ptr + row[:, None] * scale_row + group * scale_column, scale, mask=in_scales)


def _tensors(x, out, scale):
    """What every kernel is given first: three tensors, the strides of rows, and the last one of the scales."""
    return x, out, scale, x.stride(0), out.stride(0), scale.stride(0), scale.stride(1)


def _run_groups(x, out, scale, round_scale, group, pack, fp4, block, num_warps):
    M, H = x.shape
    if M == 0:
        return
    units_a_row = -(-H // (group * pack))
    units = M * units_a_row
    block_u = max(1, block // (group * pack))
    most, floor = (FP4_MOST, FP4_FLOOR) if fp4 else (E4M3_MOST, E4M3_FLOOR)
    _cast_groups[((units + block_u - 1) // block_u,)](
        *_tensors(x, out, scale),
        units,
        H,
        out.shape[1],
        units_a_row,
        group,
        pack,
        most,
        floor,
        bool(round_scale),
        fp4,
        block_u,
        num_warps=num_warps,
    )


def run_per_token_cast(x, round_scale, out, scale, *, BLOCK=2048, num_warps=4):
    """out = codes of x, scale = what they are multiplied by, per token and 128 channels; a power of two if asked.

    Shapes: x [M, H] in bfloat16 or float32 and out [M, H] in float8_e4m3fn with unit last stride; scale
    [M, ceil(H / 128)] float32 of any strides: what lies between its elements is not touched. A program casts BLOCK values.
    """
    _run_groups(x, out, scale, round_scale, 128, 1, False, BLOCK, num_warps)


def run_per_token_cast_ue8m0(x, out, scale, *, BLOCK=2048, num_warps=4):
    """out = codes of x, scale = the exponents of the powers of two that they are multiplied by, four a word.

    Shapes: x [M, H] in bfloat16 or float32 and out [M, H] in float8_e4m3fn with unit last stride; scale
    [M, ceil(H / 512)] int32 of any strides.
    """
    _run_groups(x, out, scale, True, 128, 4, False, BLOCK, num_warps)


def run_per_token_cast_mxfp8(x, out, scale, *, BLOCK=2048, num_warps=4):
    """The same per token and 32 channels; scale [M, ceil(H / 128)] int32."""
    _run_groups(x, out, scale, True, 32, 4, False, BLOCK, num_warps)


def run_per_token_cast_fp4(x, round_scale, out, scale, *, BLOCK=2048, num_warps=4):
    """out = codes of x, two a byte, the even channel low; scale = what they are multiplied by, per token and 32 channels.

    Shapes: x [M, H] in bfloat16 or float32, H even, and out [M, H / 2] bytes with unit last stride; scale [M, ceil(H / 32)]
    float32 of any strides.
    """
    _run_groups(x, out, scale, round_scale, 32, 1, True, BLOCK, num_warps)


# -- a scale a row ---------------------------------------------------------------------------------------------------------


@triton.jit
def _e5m6_codes(value):
    """float16 cut toward zero, without its last four bits; up where its last bit and the 17 bits left out say so."""
    bits = value.to(tl.int32, bitcast=True)
    code = (value.to(tl.float16, fp_downcast_rounding="rtz").to(tl.int16, bitcast=True).to(tl.int32) >> 4) & 0xFFF
    # The sum has bit 17 where the last bit of the code and those 17 together are above 2^16, and nothing above it.
    return code + (((bits & 0x1FFFF) + (code & 1) + 0xFFFF) >> 17)


@triton.jit
def _store_e5m6(out_row_ptr, code, groups, mask, WORDS: tl.constexpr):
    """Eight codes are three words of 32 bits; each code adds its part to the words that it lies in."""
    place = tl.arange(0, 8)[None, :]
    top = tl.where(place == 0, code << 20, tl.where(place == 1, code << 8, tl.where(place == 2, code >> 4, 0)))
    middle = tl.where(place == 2, code << 28, tl.where(place == 3, code << 16, 0))
    middle = tl.where(place == 4, code << 4, tl.where(place == 5, code >> 8, middle))
    last = tl.where(place == 5, code << 24, tl.where(place == 6, code << 12, tl.where(place == 7, code, 0)))
    top = tl.sum(top, axis=1, keep_dims=True)
    middle = tl.sum(middle, axis=1, keep_dims=True)
    last = tl.sum(last, axis=1, keep_dims=True)
    if WORDS:
        part = tl.arange(0, 4)[None, :]
        found = tl.where(part == 0, top, tl.where(part == 1, middle, last))
        tl.store(out_row_ptr + groups * 3 + part, found, mask=mask & (part < 3))
    else:
        part = tl.arange(0, 16)[None, :]
        found = tl.where(part < 4, top, tl.where(part < 8, middle, last))
        tl.store(out_row_ptr + groups * 12 + part, (found >> (part % 4 * 8)).to(tl.uint8), mask=mask & (part < 12))


@triton.jit
def _cast_rows(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride, scale_row, H,
    MOST: tl.constexpr, ROUND: tl.constexpr, E5M6: tl.constexpr, WORDS: tl.constexpr, ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row shares a scale. It stays in registers where BLOCK holds it (ONCE), or is read again, from the cache."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    groups = tl.arange(0, BLOCK // 8)[:, None]
    cols = groups * 8 + tl.arange(0, 8)[None, :]
    if ONCE:
        x = tl.load(x_row + cols, mask=cols < H, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.abs(x)
    else:
        # One running maximum a lane: a single reduction at the end instead of one a block.
        largest = tl.zeros([BLOCK // 8, 8], dtype=tl.float32)
        for start in range(0, H, BLOCK):
            x = tl.load(x_row + start + cols, mask=cols < H - start, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
    amax = tl.max(tl.max(largest, axis=1), axis=0, keep_dims=True)
    scale, inverse = _scale_and_inverse(amax, MOST, 1e-4, ROUND)
    tl.store(scale_ptr + row * scale_row + tl.arange(0, 1), scale)
    for start in range(0, BLOCK if ONCE else H, BLOCK):
        if not ONCE:
            x = tl.load(x_row + start + cols, mask=cols < H - start, other=0.0).to(tl.float32)
        scaled = x * inverse[:, None]
        if E5M6:
            code = _e5m6_codes(scaled)
            _store_e5m6(out_ptr + row * out_stride, code, start // 8 + groups, groups * 8 < H - start, WORDS)
        else:
            codes = scaled.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * out_stride + start + cols, codes, mask=cols < H - start)


def _run_rows(x, out, scale, round_scale, most, e5m6, block, num_warps):
    M, H = x.shape
    if M == 0:
        return
    words = e5m6 and out.data_ptr() % 4 == 0 and out.stride(0) % 4 == 0
    if words:
        out = out.view(torch.int32)
    block = min(block, max(256, 1 << (H - 1).bit_length()))
    _cast_rows[(M,)](
        *_tensors(x, out, scale)[:6],
        H,
        most,
        bool(round_scale),
        e5m6,
        words,
        block >= H,
        block,
        num_warps=num_warps or max(1, min(8, block // 512)),
    )


def run_per_token_cast_e5m6(x, round_scale, out, scale, *, BLOCK=8192, num_warps=None):
    """out = codes of x, eight in twelve bytes, scale = what they are multiplied by, a power of two if asked.

    Shapes: x [M, H] in bfloat16 or float32, H a multiple of 8, and out [M, 3 * H / 2] bytes with unit last stride; scale [M, 1]
    float32 of any strides. Bytes are stored one by one where rows do not begin at multiples of four.
    """
    _run_rows(x, out, scale, round_scale, E5M6_MOST, True, BLOCK, num_warps)


def run_per_row_cast(x, round_scale, out, scale, *, BLOCK=8192, num_warps=None):
    """out = codes of x, scale = what they are multiplied by, per token; a power of two if asked.

    Shapes: x [M, H] in bfloat16 or float32 and out [M, H] in float8_e4m3fn with unit last stride; scale [M, 1] float32 of any
    strides.
    """
    _run_rows(x, out, scale, round_scale, E4M3_MOST, False, BLOCK, num_warps)


# -- blocks of several tokens ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _cast_blocks(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride, scale_row, scale_column, M, H,
    ROUND: tl.constexpr, MOST: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """BLOCK x BLOCK values share a scale; a program has COUNT such blocks beside one another."""
    blocks_of_blocks = tl.cdiv(H, BLOCK * COUNT)
    down = tl.program_id(0) // blocks_of_blocks
    across = tl.program_id(0) % blocks_of_blocks * COUNT + tl.arange(0, COUNT)
    rows = (down.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None, None]
    cols = (across[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
    mask = (rows < M) & (cols < H)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    # In the dtype of x, whose maximum is as exact and half as wide to pass on between threads.
    amax = tl.max(tl.max(tl.abs(x), axis=2), axis=0).to(tl.float32)
    scale, inverse = _scale_and_inverse(amax, MOST, FLOOR, ROUND)
    codes = (x.to(tl.float32) * inverse[None, :, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * out_stride + cols, codes, mask=mask)
    tl.store(scale_ptr + down.to(tl.int64) * scale_row + across * scale_column, scale, mask=across * BLOCK < H)


def _run_blocks(x, out, scale, round_scale, block, count, num_warps):
    M, H = x.shape
    if M == 0:
        return
    _cast_blocks[(-(-M // block) * -(-H // (block * count)),)](
        *_tensors(x, out, scale),
        M,
        H,
        bool(round_scale),
        E4M3_MOST,
        E4M3_FLOOR,
        block,
        count,
        num_warps=num_warps,
    )


def run_per_block_cast(x, round_scale, out, scale, *, num_warps=8):
    """out = codes of x, scale = what they are multiplied by, per block of 128 x 128; a power of two if asked.

    Shapes: x [M, H] in bfloat16 or float32 and out [M, H] in float8_e4m3fn with unit last stride; scale
    [ceil(M / 128), ceil(H / 128)] float32 of any strides. A program has a block, which it reads once.
    """
    _run_blocks(x, out, scale, round_scale, 128, 1, num_warps)


def run_per_block_cast_32(x, round_scale, out, scale, *, COUNT=16, num_warps=4):
    """The same per block of 32 x 32; scale [ceil(M / 32), ceil(H / 32)]. A program has COUNT blocks beside one another."""
    _run_blocks(x, out, scale, round_scale, 32, COUNT, num_warps)


# -- channels --------------------------------------------------------------------------------------------------------------


@triton.jit
def _cast_channels(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride, scale_row, scale_column, M, H,
    TOKENS: tl.constexpr, COUNT: tl.constexpr, BLOCK_H: tl.constexpr, MOST: tl.constexpr, FLOOR: tl.constexpr,
    ROUND: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens share a scale a channel; a program has COUNT times as many tokens and BLOCK_H channels."""
    strips = tl.cdiv(H, BLOCK_H)
    first = (tl.program_id(0) // strips).to(tl.int64) * COUNT
    cols = tl.program_id(0) % strips * BLOCK_H + tl.arange(0, BLOCK_H)
    # Eight channels a thread, in the store too: codes then need no way through shared memory to be 16 a thread.
    cols = tl.max_contiguous(tl.multiple_of(cols, 8), 8)
    rows = first * TOKENS + tl.arange(0, TOKENS * COUNT)
    mask = (rows < M)[:, None] & (cols < H)[None, :]
    x_ptrs = x_ptr + rows[:, None] * x_stride + cols[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    grouped = tl.reshape(x, [COUNT, TOKENS, BLOCK_H])
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(grouped), axis=1), MOST, FLOOR, ROUND)
    scaled = tl.reshape(grouped * inverse[:, None, :], [COUNT * TOKENS, BLOCK_H])
    codes = scaled.to(out_ptr.dtype.element_ty)
    if TRANSPOSE:
        out_ptrs = out_ptr + cols.to(tl.int64)[:, None] * out_stride + rows[None, :]
        tl.store(out_ptrs, tl.trans(codes), mask=(cols < H)[:, None] & (rows < M)[None, :])
    else:
        tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], codes, mask=mask)
    groups = first + tl.arange(0, COUNT)
    in_scales = (groups * TOKENS < M)[:, None] & (cols < H)[None, :]
    tl.store(scale_ptr + groups[:, None] * scale_row + cols[None, :] * scale_column, scale, mask=in_scales)


def _run_channels(x, round_scale, out, scale, tokens, transpose, block_h, num_warps):
    M, H = x.shape
    if M == 0:
        return
    _cast_channels[(-(-M // 128) * -(-H // block_h),)](
        *_tensors(x, out, scale),
        M,
        H,
        tokens,
        128 // tokens,
        block_h,
        E4M3_MOST,
        E4M3_FLOOR,
        bool(round_scale),
        transpose,
        num_warps=num_warps,
    )


def run_per_channel_cast(x, round_scale, out, scale, *, BLOCK_H=64, num_warps=4):
    """out = codes of x, scale = what they are multiplied by, per channel and 128 tokens; a power of two if asked.

    Shapes: x [M, H] in bfloat16 and out [M, H] in float8_e4m3fn with unit last stride, M a multiple of 128; scale
    [M / 128, H] float32 of any strides.
    """
    _run_channels(x, round_scale, out, scale, 128, False, BLOCK_H, num_warps)


def run_per_channel_cast_and_transpose(x, group, round_scale, out, scale, *, BLOCK_H=64, num_warps=4):
    """The same for groups of 32 or 128 tokens, with out [H, M]: the codes of a channel lie side by side."""
    _run_channels(x, round_scale, out, scale, group, True, BLOCK_H, num_warps)


# -- gated activations -----------------------------------------------------------------------------------------------------


@triton.jit
def _exp(x):
    """e^x by the steps of CUDA's expf, whose last bit decides about scales: 2^n times 2^r, r from 0 to 1."""
    part = tl.minimum(tl.maximum(tl.fma(x, 0.0057249800302088260651, 0.5), 0.0), 1.0)
    n = tl.floor(part * 252.0) - 126.0
    r = tl.fma(x, 1.925963033500011079e-08, tl.fma(x, 1.4426950216293334961, -n))
    return tl.exp2(r) * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["units", "limit"])
def _swiglu_and_cast_groups(
    weights_ptr, weight_of_row_ptr, expert_of_row_ptr, x_ptr, out_ptr, scale_ptr, x_stride, out_stride, scale_row,
    scale_column, limit, units, H,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, FLOOR: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Groups are numbered along rows and then down, so that no lane idles where a row has few of them."""
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    exists = unit < units
    row = (unit // GROUPS).to(tl.int64)
    group = unit % GROUPS
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = exists[:, None] & (cols < H)
    x_ptrs = x_ptr + row[:, None] * x_stride + cols
    gate = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    up = tl.load(x_ptrs + H, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    place = tl.load(weight_of_row_ptr + row, mask=exists, other=-1)
    weight = tl.load(weights_ptr + place, mask=exists & (place >= 0), other=0.0)
    local = tl.load(expert_of_row_ptr + row, mask=exists, other=-1) >= 0
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    silu = tl.div_rn(gate, 1.0 + _exp(-gate))
    value = tl.where(local[:, None], silu * up * weight[:, None], 0.0)
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(value), axis=1), MOST, FLOOR, ROUND)
    codes = (value * inverse[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * out_stride + cols, codes, mask=mask)
    tl.store(scale_ptr + row * scale_row + group * scale_column, scale, mask=exists)


def run_swiglu_and_per_token_cast(
    x, weights, weight_of_row, expert_of_row, limit, round_scale, out, scale, *, BLOCK=None, num_warps=4
):
    """out = codes of silu(gate) * up * weight, scale = what they are multiplied by, per token and 128 channels.

    Shapes: x [P, 2 * H] = [gate | up] in bfloat16 or float32 and out [P, H] in float8_e4m3fn with unit last stride; weights
    [T, K] float32, weight_of_row and expert_of_row [P] int32, all contiguous; scale [P, ceil(H / 128)] float32 of any strides.
    A program casts BLOCK values; None: 2048, and 1024 where there are few.
    """
    P, H = out.shape
    if P == 0:
        return
    groups = -(-H // 128)
    units = P * groups
    block_u = max(1, (BLOCK or (2048 if units >= MANY_GROUPS else 1024)) // 128)
    _swiglu_and_cast_groups[((units + block_u - 1) // block_u,)](
        weights,
        weight_of_row,
        expert_of_row,
        *_tensors(x, out, scale),
        float(limit),
        units,
        H,
        groups,
        128,
        E4M3_MOST,
        E4M3_FLOOR,
        bool(round_scale),
        block_u,
        num_warps=num_warps,
    )


# -- back from codes -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _cast_back(
    x_ptr,
    scale_ptr,
    out_ptr,
    x_stride,
    scale_row,
    scale_column,
    out_stride,
    M,
    H,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RUNS: tl.constexpr,
):
    """A scale is loaded once for each RUN columns of a row, all of which have it."""
    strips = tl.cdiv(H, RUN * RUNS)
    rows = (tl.program_id(0) // strips).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (tl.program_id(0) % strips * RUNS + tl.arange(0, RUNS)) * RUN
    cols = (first[:, None] + tl.arange(0, RUN)[None, :])[None, :, :]
    mask = (rows < M)[:, None, None] & (cols < H)
    x = tl.load(x_ptr + rows[:, None, None] * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    scale_ptrs = scale_ptr + (rows // ROWS)[:, None] * scale_row + (first // COLUMNS)[None, :] * scale_column
    scale = tl.load(scale_ptrs, mask=(rows < M)[:, None] & (first < H)[None, :], other=0.0)
    value = (x.to(tl.float32) * scale[:, :, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None, None] * out_stride + cols, value, mask=mask)


def run_cast_back(x, scale, block_rows, block_columns, out, *, BLOCK=2048, num_warps=4):
    """out = x * scale of its block, one product in float32, rounded once.

    Shapes: x [M, H] in float8_e4m3fn and out [M, H] in bfloat16 with unit last stride; scale [ceil(M / block_rows),
    ceil(H / block_columns)] float32 of any strides.
    """
    M, H = x.shape
    if M == 0:
        return
    run = min(128, block_columns & -block_columns)
    wide = min(BLOCK, max(run, 1 << (H - 1).bit_length()))
    block_m = BLOCK // wide
    _cast_back[(-(-M // block_m) * -(-H // wide),)](
        x,
        scale,
        out,
        x.stride(0),
        scale.stride(0),
        scale.stride(1),
        out.stride(0),
        M,
        H,
        block_rows,
        block_columns,
        run,
        block_m,
        wide // run,
        num_warps=num_warps,
    )

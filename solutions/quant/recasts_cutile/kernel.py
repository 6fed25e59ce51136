"""Casts with a scale a row or a small block, from codes of another format, and fused with what comes before them, cuTile.

All of them gather and scatter with masks: tiles that are stored whole write 16 bytes at a time, past the end of a row of codes
whose length is no multiple of 16.
"""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the compiler knows which accesses are aligned and complete.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]

GROUP = 128  # channels that share a scale, or rows


@ct.function
def _scale_and_inverse(amax, ROUND):
    """What a code is multiplied by, and what a value is multiplied by, which is not quite the reciprocal unless rounded."""
    amax = ct.maximum(amax, 1e-4)
    # Tile by tile and not by a number: a division by a constant might become a product with its rounded reciprocal.
    most = ct.full(amax.shape, 448.0, dtype=ct.float32)
    scale = ct.truediv(amax, most)
    inverse = ct.truediv(most, amax)
    if ROUND:
        exponent = (ct.bitcast(scale, ct.int32) + 0x7FFFFF) >> 23
        scale = ct.bitcast(exponent << 23, ct.float32)
        inverse = ct.bitcast((254 - exponent) << 23, ct.float32)
    return scale, inverse


@ct.function
def _e4m3_bytes(scaled):
    return ct.bitcast(ct.minimum(ct.maximum(scaled, -448.0), 448.0).astype(ct.float8_e4m3fn), ct.uint8)


@ct.function
def _e4m3_values(codes):
    return ct.bitcast(codes, ct.float8_e4m3fn).astype(ct.float32)


# -- a scale a row ---------------------------------------------------------------------------------------------------------


@ct.kernel
def _cast_rows(x: Rows, out: Rows, scale_out: ct.Array, ROUND: Flag, ONCE: Flag, TILE: Int):
    """A row stays in registers where TILE holds it (ONCE), or is read again, from the cache."""
    channels = x.shape[1]
    row = ct.bid(0)
    lanes = ct.arange(TILE, dtype=ct.int32)
    if ONCE:
        values = ct.gather(x, (row, lanes), mask=lanes < channels, check_bounds=False).astype(ct.float32)
        amax = ct.max(ct.abs(values), axis=0, keepdims=True)
        scale, inverse = _scale_and_inverse(amax, ROUND)
        ct.scatter(out, (row, lanes), _e4m3_bytes(values * inverse), mask=lanes < channels, check_bounds=False)
    else:
        # One running maximum a lane: a single reduction at the end instead of one a tile.
        largest = ct.zeros((TILE,), dtype=ct.float32)
        for start in range(0, channels, TILE):
            cols = start + lanes
            part = ct.gather(x, (row, cols), mask=cols < channels, check_bounds=False)
            largest = ct.maximum(largest, ct.abs(part.astype(ct.float32)))
        scale, inverse = _scale_and_inverse(ct.max(largest, axis=0, keepdims=True), ROUND)
        for start in range(0, channels, TILE):
            cols = start + lanes
            part = ct.gather(x, (row, cols), mask=cols < channels, check_bounds=False).astype(ct.float32)
            ct.scatter(out, (row, cols), _e4m3_bytes(part * inverse), mask=cols < channels, check_bounds=False)
    ct.scatter(scale_out, (row, ct.arange(1, dtype=ct.int32)), scale)


_ROWS = {warps: _cast_rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_per_row_cast(x, round_scale, out, scale, *, TILE: int = 8192, WARPS: int = 8) -> None:
    """out = codes of x, scale = what they are multiplied by, per token; a power of two if asked.

    x: [M, H] in bf16 or fp32, out: [M, H] in float8_e4m3fn, both with unit last stride; scale: [M, 1] float32 of any strides. A
    block casts a row, and reads it once if it has at most TILE values.
    """
    M, H = x.shape
    if M == 0:
        return
    tile = min(TILE, max(256, 1 << (H - 1).bit_length()))
    args = (x, out.view(torch.uint8), scale, bool(round_scale), tile >= H, tile)
    ct.launch(torch.cuda.current_stream(), (M, 1, 1), _ROWS[WARPS], args)


# -- square blocks of 32 ---------------------------------------------------------------------------------------------------


@ct.kernel
def _cast_blocks(x: Rows, out: Rows, scale_out: ct.Array, ROUND: Flag, SIDE: Int, COUNT: Int):
    """SIDE x SIDE values share a scale; a block of threads has COUNT such blocks beside one another."""
    channels = x.shape[1]
    strips = ct.cdiv(channels, SIDE * COUNT)
    down = ct.bid(0) // strips
    across = ct.bid(0) % strips * COUNT + ct.arange(COUNT, dtype=ct.int32)
    rows = (down * SIDE + ct.arange(SIDE, dtype=ct.int32))[:, None]
    cols = (ct.bid(0) % strips * (SIDE * COUNT) + ct.arange(SIDE * COUNT, dtype=ct.int32))[None, :]
    mask = rows < x.shape[0]
    if channels % (SIDE * COUNT) != 0:
        mask = mask & (cols < channels)
    values = ct.gather(x, (rows, cols), mask=mask, check_bounds=False).astype(ct.float32)
    # Down the columns first: what is left for the reshape and the exchange between threads is one row.
    columns = ct.reshape(ct.max(ct.abs(values), axis=0), (COUNT, SIDE))
    scale, inverse = _scale_and_inverse(ct.max(columns, axis=1), ROUND)
    spread = ct.reshape(ct.broadcast_to(inverse[:, None], (COUNT, SIDE)), (1, SIDE * COUNT))
    ct.scatter(out, (rows, cols), _e4m3_bytes(values * spread), mask=mask, check_bounds=False)
    ct.scatter(scale_out, (down, across), scale, mask=across * SIDE < channels, check_bounds=False)


_BLOCKS = {warps: _cast_blocks.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_per_block_cast_32(x, round_scale, out, scale, *, COUNT: int = 8, WARPS: int = 4) -> None:
    """out = codes of x, scale = what they are multiplied by, per block of 32 x 32; a power of two if asked.

    x: [M, H] in bf16 or fp32, out: [M, H] in float8_e4m3fn, both with unit last stride; scale: [ceil(M / 32), ceil(H / 32)]
    float32 of any strides. A block of threads casts COUNT blocks, and reads them once.
    """
    M, H = x.shape
    if M == 0:
        return
    count = min(COUNT, 1 << (-(-H // 32) - 1).bit_length())
    grid = (-(-M // 32) * -(-H // (32 * count)), 1, 1)
    args = (x, out.view(torch.uint8), scale, bool(round_scale), 32, count)
    ct.launch(torch.cuda.current_stream(), grid, _BLOCKS[WARPS], args)


# -- after a gated activation ----------------------------------------------------------------------------------------------


@ct.kernel
def _swiglu_and_cast_groups(
    x: Rows,
    weights: ct.Array,
    weight_of_row: ct.Array,
    expert_of_row: ct.Array,
    out: Rows,
    scale_out: ct.Array,
    limit: float,
    units: int,
    GROUP: Int,
    ROUND: Flag,
    TILE_U: Int,
):
    """Groups are numbered along rows and then down, so that no lane idles where a row has few of them."""
    channels = out.shape[1]
    groups = ct.cdiv(channels, GROUP)
    unit = ct.bid(0) * TILE_U + ct.arange(TILE_U, dtype=ct.int32)
    exists = unit < units
    row = unit // groups
    group = unit - row * groups
    cols = group[:, None] * GROUP + ct.arange(GROUP, dtype=ct.int32)[None, :]
    mask = exists[:, None]
    if channels % GROUP != 0:
        mask = mask & (cols < channels)
    gate = ct.gather(x, (row[:, None], cols), mask=mask, check_bounds=False).astype(ct.float32)
    up = ct.gather(x, (row[:, None], cols + channels), mask=mask, check_bounds=False).astype(ct.float32)
    place = ct.gather(weight_of_row, row, mask=exists, padding_value=-1, check_bounds=False)
    weight = ct.gather(weights, place, mask=place >= 0, check_bounds=False)
    local = ct.gather(expert_of_row, row, mask=exists, padding_value=-1, check_bounds=False) >= 0
    gate = ct.minimum(gate, limit)
    up = ct.minimum(ct.maximum(up, -limit), limit)
    # The division must round as IEEE asks, and exp is CUDA's expf: their last bits decide about scales near a power of two.
    silu = ct.truediv(gate, 1.0 + ct.exp(-gate))
    value = ct.where(local[:, None], silu * up * weight[:, None], 0.0)
    scale, inverse = _scale_and_inverse(ct.max(ct.abs(value), axis=1), ROUND)
    ct.scatter(out, (row[:, None], cols), _e4m3_bytes(value * inverse[:, None]), mask=mask, check_bounds=False)
    ct.scatter(scale_out, (row, group), scale, mask=exists, check_bounds=False)


_SWIGLU = {warps: _swiglu_and_cast_groups.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_swiglu_and_per_token_cast(
    x, weights, weight_of_row, expert_of_row, limit, round_scale, out, scale, *, TILE: int = 1024, WARPS: int = 4
) -> None:
    """out = codes of silu(gate) * up * weight, scale = what they are multiplied by, per token and 128 channels.

    x: [P, 2 * H] = [gate | up] in bf16 or fp32 and out: [P, H] in float8_e4m3fn, both with unit last stride; weights: [M, K]
    float32, weight_of_row and expert_of_row: [P] int32, all contiguous; scale: [P, ceil(H / 128)] float32 of any strides. A block
    casts TILE values.
    """
    P, H = out.shape
    if P == 0:
        return
    units = P * -(-H // GROUP)
    tile_u = TILE // GROUP
    rows = (x, weights.view(-1), weight_of_row, expert_of_row, out.view(torch.uint8), scale)
    args = (*rows, float(limit), units, GROUP, bool(round_scale), tile_u)
    ct.launch(torch.cuda.current_stream(), (-(-units // tile_u), 1, 1), _SWIGLU[WARPS], args)


# -- from codes with a scale a block to codes with a scale a token ---------------------------------------------------------


@ct.kernel
def _requantise_groups(
    x: Rows,
    scale_in: ct.Array,
    out: Rows,
    scale_out: ct.Array,
    units: int,
    SIDE: Int,
    GROUP: Int,
    ROUND: Flag,
    TILE_U: Int,
):
    """A group of channels covers GROUP / SIDE scales of x, each of which is loaded once.

    Groups are numbered along rows and then down, so that no lane idles where a row has few of them.
    """
    channels = x.shape[1]
    groups = ct.cdiv(channels, GROUP)
    unit = ct.bid(0) * TILE_U + ct.arange(TILE_U, dtype=ct.int32)
    exists = unit < units
    row = unit // groups
    group = unit - row * groups
    inner = group[:, None] * (GROUP // SIDE) + ct.arange(GROUP // SIDE, dtype=ct.int32)[None, :]
    cols = inner[:, :, None] * SIDE + ct.arange(SIDE, dtype=ct.int32)[None, None, :]
    mask = exists[:, None, None]
    if channels % GROUP != 0:
        mask = mask & (cols < channels)
    rows = row[:, None, None]
    values = _e4m3_values(ct.gather(x, (rows, cols), mask=mask, check_bounds=False))
    in_scales = exists[:, None] & (inner * SIDE < channels)
    factor = ct.gather(scale_in, ((row // SIDE)[:, None], inner), mask=in_scales, check_bounds=False)
    # A product with a positive factor keeps the order, rounded or not: one product a scale of x is enough.
    amax = ct.max(ct.max(ct.abs(values), axis=2) * factor, axis=1)
    scale, inverse = _scale_and_inverse(amax, ROUND)
    codes = _e4m3_bytes(values * (factor * inverse[:, None])[:, :, None])
    ct.scatter(out, (rows, cols), codes, mask=mask, check_bounds=False)
    ct.scatter(scale_out, (row, group), scale, mask=exists, check_bounds=False)


_REQUANTISE = {warps: _requantise_groups.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_per_token_requantise(x, scale_in, block, round_scale, out, scale, *, TILE: int = 2048, WARPS: int = 4) -> None:
    """out = codes of x * scale_in per token and 128 channels, scale = what they are multiplied by.

    x: [M, H] and out: [M, H] in float8_e4m3fn with unit last stride; scale_in: [ceil(M / block), ceil(H / block)], block 32 or
    128, and scale: [M, ceil(H / 128)], float32 of any strides. A block casts TILE values.
    """
    M, H = x.shape
    if M == 0:
        return
    units = M * -(-H // GROUP)
    tile_u = TILE // GROUP
    args = (x.view(torch.uint8), scale_in, out.view(torch.uint8), scale, units, block, GROUP, bool(round_scale), tile_u)
    ct.launch(torch.cuda.current_stream(), (-(-units // tile_u), 1, 1), _REQUANTISE[WARPS], args)


# -- rows that are gathered ------------------------------------------------------------------------------------------------


@ct.kernel
def _cast_gathered_channels(
    x: Rows,
    scale_in: ct.Array,
    token_of_row: ct.Array,
    out: Rows,
    scale_out: ct.Array,
    ROUND: Flag,
    GROUP: Int,
    TILE_H: Int,
):
    """GROUP gathered rows share a scale a channel; a block has TILE_H channels, which lie in one group of x."""
    channels = x.shape[1]
    strips = ct.cdiv(channels, TILE_H)
    down = ct.bid(0) // strips
    strip = ct.bid(0) % strips
    rows = down * GROUP + ct.arange(GROUP, dtype=ct.int32)
    cols = (strip * TILE_H + ct.arange(TILE_H, dtype=ct.int32))[None, :]
    in_rows = rows < out.shape[0]
    token = ct.gather(token_of_row, rows, mask=in_rows, padding_value=-1, check_bounds=False)
    present = token >= 0
    codes = ct.gather(x, (token[:, None], cols), mask=present[:, None] & (cols < channels), check_bounds=False)
    factor = ct.gather(scale_in, (token, strip * TILE_H // GROUP), mask=present, check_bounds=False)
    values = _e4m3_values(codes) * factor[:, None]
    scale, inverse = _scale_and_inverse(ct.max(ct.abs(values), axis=0, keepdims=True), ROUND)
    stored = in_rows[:, None] & (cols < channels)
    ct.scatter(out, (rows[:, None], cols), _e4m3_bytes(values * inverse), mask=stored, check_bounds=False)
    ct.scatter(scale_out, (down, cols), scale, mask=cols < channels, check_bounds=False)


_GATHERED = {warps: _cast_gathered_channels.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_per_channel_cast_fused(
    x, scale_in, token_of_row, round_scale, out, scale, *, TILE_H: int = 64, WARPS: int = 8
) -> None:
    """out = codes of the gathered rows of x * scale_in per channel and 128 rows, scale = what they are multiplied by.

    x: [T, H] and out: [N, H] in float8_e4m3fn with unit last stride; scale_in: [T, ceil(H / 128)] and scale: [ceil(N / 128), H]
    float32 of any strides; token_of_row: [N] int32, -1 for a row of zeros. TILE_H divides 128.
    """
    N, H = out.shape
    if N == 0:
        return
    grid = (-(-N // GROUP) * -(-H // TILE_H), 1, 1)
    args = (x.view(torch.uint8), scale_in, token_of_row, out.view(torch.uint8), scale, bool(round_scale), GROUP, TILE_H)
    ct.launch(torch.cuda.current_stream(), grid, _GATHERED[WARPS], args)


# -- FP4 codes to FP8 codes under a coarser scale --------------------------------------------------------------------------


@ct.function
def _fp4_values(code):
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, from the exponent in bits 1 and 2 and the mantissa in bit 0."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = ct.bitcast(((exponent + 126) << 23) | (mantissa << 22), ct.float32)
    size = ct.where(exponent == 0, mantissa.astype(ct.float32) * 0.5, normal)
    # A product, so that the negative zero keeps its sign.
    return size * ct.where(code >= 8, -1.0, 1.0)


@ct.kernel
def _cast_blocks_lossless(
    x: Rows, scale_in: ct.Array, out: Rows, scale_out: ct.Array, SIDE: Int, GROUP: Int, TILE_M: Int
):
    """A block has SIDE x SIDE values: their exponents first, then the codes, whose factor 2^(e - e_out) does not round."""
    channels = out.shape[1]
    tokens = out.shape[0]
    strips = ct.cdiv(channels, SIDE)
    down = ct.bid(0) // strips
    strip = ct.bid(0) % strips
    groups = (strip * (SIDE // GROUP) + ct.arange(SIDE // GROUP, dtype=ct.int32))[None, :]
    rows = (down * SIDE + ct.arange(SIDE, dtype=ct.int32))[:, None]
    in_scales = (rows < tokens) & (groups * GROUP < channels)
    exponent = ct.bitcast(ct.gather(scale_in, (rows, groups), mask=in_scales, check_bounds=False), ct.int32) >> 23
    lowered = ct.maximum(ct.max(ct.max(exponent, axis=1), axis=0, keepdims=True) - 6, 0)
    ct.scatter(scale_out, (down, strip + ct.arange(1, dtype=ct.int32)), ct.bitcast(lowered << 23, ct.float32))
    places = groups[:, :, None] * (GROUP // 2) + ct.arange(GROUP // 2, dtype=ct.int32)[None, None, :]
    cols = groups[:, :, None] * GROUP + ct.arange(GROUP, dtype=ct.int32)[None, None, :]
    shifts = (ct.arange(2, dtype=ct.int32) * 4)[None, None, None, :]
    for first in range(0, SIDE, TILE_M):
        some = down * SIDE + first + ct.arange(TILE_M, dtype=ct.int32)
        present = (some < tokens)[:, None] & (groups * GROUP < channels)
        own = ct.bitcast(ct.gather(scale_in, (some[:, None], groups), mask=present, check_bounds=False), ct.int32) >> 23
        factor = ct.bitcast((own - lowered + 127) << 23, ct.float32)
        packed = ct.gather(x, (some[:, None, None], places), mask=present[:, :, None], check_bounds=False)
        pairs = (packed.astype(ct.int32)[:, :, :, None] >> shifts) & 15
        values = ct.reshape(_fp4_values(pairs), (TILE_M, SIDE // GROUP, GROUP)) * factor[:, :, None]
        ct.scatter(out, (some[:, None, None], cols), _e4m3_bytes(values), mask=present[:, :, None], check_bounds=False)


_LOSSLESS = {warps: _cast_blocks_lossless.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_per_block_cast_lossless(x, scale_in, out, scale, *, TILE_M: int = 32, WARPS: int = 4) -> None:
    """out = codes of the values of x, scale = the largest of scale_in in a block of 128 x 128, divided by 64.

    x: [M, H / 2] bytes and out: [M, H] in float8_e4m3fn with unit last stride, H a multiple of 32; scale_in: [M, H / 32], powers
    of two of which none is less than 2^-11 of the largest of its block, and scale: [ceil(M / 128), ceil(H / 128)], float32 of any
    strides. A block casts TILE_M rows of its 128 at a time.
    """
    M, H = out.shape
    if M == 0:
        return
    grid = (-(-M // GROUP) * -(-H // GROUP), 1, 1)
    args = (x, scale_in, out.view(torch.uint8), scale, GROUP, 32, TILE_M)
    ct.launch(torch.cuda.current_stream(), grid, _LOSSLESS[WARPS], args)

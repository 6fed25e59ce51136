"""Casts to codes of 8, 4 and 12 bits with a scale a block, cuTile: the variants differ in compile-time constants alone."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the compiler knows which accesses are aligned and complete.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
Float = ct.Constant[float]
Flag = ct.Constant[bool]

E4M3_MOST = 448.0
FP4_MOST = 6.0
E5M6_MOST = 65024.0
E4M3_FLOOR = 1e-4
FP4_FLOOR = 6 * 2.0**-126


@ct.function
def _scale_and_inverse(amax, MOST, FLOOR, ROUND):
    """What a code is multiplied by, and what a value is multiplied by, which is not quite the reciprocal unless rounded."""
    amax = ct.maximum(amax, FLOOR)
    # Tile by tile and not by a number: a division by a constant might become a product with its rounded reciprocal.
    most = ct.full(amax.shape, MOST, dtype=ct.float32)
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
def _fp4_codes(scaled):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 as its place among them, a tie as the even place; the sign is bit 3."""
    size = ct.abs(scaled)
    code = (size > 0.25).astype(ct.int32) + (size >= 0.75).astype(ct.int32) + (size > 1.25).astype(ct.int32)
    code = code + (size >= 1.75).astype(ct.int32) + (size > 2.5).astype(ct.int32) + (size >= 3.5).astype(ct.int32)
    code = code + (size > 5.0).astype(ct.int32)
    return code | (((ct.bitcast(scaled, ct.int32) >> 31) & 1) << 3)


@ct.kernel
def _cast_groups(
    x: Rows,
    out: Rows,
    scale_out: ct.Array,
    units: int,
    GROUP: Int,
    PACK: Int,
    MOST: Float,
    FLOOR: Float,
    ROUND: Flag,
    FP4: Flag,
    TILE_U: Int,
):
    """GROUP channels of one token share a scale; PACK such groups are a unit, whose exponents are one word if four.

    Units are numbered along rows and then down, so that no lane idles where a row has few of them.
    """
    channels = x.shape[1]
    units_a_row = ct.cdiv(channels, GROUP * PACK)
    unit = ct.bid(0) * TILE_U + ct.arange(TILE_U, dtype=ct.int32)
    row = unit // units_a_row
    place = unit - row * units_a_row
    exists = unit < units
    group = place[:, None] * PACK + ct.arange(PACK, dtype=ct.int32)[None, :]
    cols = group[:, :, None] * GROUP + ct.arange(GROUP, dtype=ct.int32)[None, None, :]
    mask = exists[:, None, None]
    if channels % (GROUP * PACK) != 0:
        mask = mask & (cols < channels)
    rows = row[:, None, None]
    values = ct.gather(x, (rows, cols), mask=mask, check_bounds=False).astype(ct.float32)
    scale, inverse = _scale_and_inverse(ct.max(ct.abs(values), axis=2), MOST, FLOOR, ROUND)
    scaled = values * inverse[:, :, None]
    if FP4:
        pairs = ct.reshape(_fp4_codes(scaled), (TILE_U, PACK, GROUP // 2, 2))
        # The second of a pair is worth sixteen of the first.
        weights = (ct.arange(2, dtype=ct.int32) * 15 + 1)[None, None, None, :]
        codes = ct.sum(pairs * weights, axis=3).astype(ct.uint8)
        out_cols = group[:, :, None] * (GROUP // 2) + ct.arange(GROUP // 2, dtype=ct.int32)[None, None, :]
        out_mask = exists[:, None, None]
        if channels % (GROUP * PACK) != 0:
            out_mask = out_mask & (out_cols < out.shape[1])
        ct.scatter(out, (rows, out_cols), codes, mask=out_mask, check_bounds=False)
    else:
        ct.scatter(out, (rows, cols), _e4m3_bytes(scaled), mask=mask, check_bounds=False)
    if PACK == 4:
        exponent = (ct.bitcast(scale, ct.int32) >> 23) << (8 * ct.arange(PACK, dtype=ct.int32))[None, :]
        word = ct.sum(ct.where(group * GROUP < channels, exponent, 0), axis=1)
        ct.scatter(scale_out, (row, place), word, mask=exists, check_bounds=False)
    else:
        in_scales = exists[:, None] & (group * GROUP < channels)
        ct.scatter(scale_out, (row[:, None], group), scale, mask=in_scales, check_bounds=False)


_GROUPS = {warps: _cast_groups.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _run_groups(x, out, scale, round_scale, group, pack, fp4, tile, warps):
    M, H = x.shape
    if M == 0:
        return
    units = M * -(-H // (group * pack))
    tile_u = max(1, tile // (group * pack))
    most, floor = (FP4_MOST, FP4_FLOOR) if fp4 else (E4M3_MOST, E4M3_FLOOR)
    args = (x, out.view(torch.uint8), scale, units, group, pack, most, floor, bool(round_scale), fp4, tile_u)
    ct.launch(torch.cuda.current_stream(), (-(-units // tile_u), 1, 1), _GROUPS[warps], args)


def run_per_token_cast(x, round_scale, out, scale, *, TILE: int = 2048, WARPS: int = 4) -> None:
    """out = codes of x, scale = what they are multiplied by, per token and 128 channels; a power of two if asked.

    x: [M, H] in bf16 or fp32, out: [M, H] in float8_e4m3fn, both with unit last stride; scale: [M, ceil(H / 128)] float32 of
    any strides: what lies between its elements is not touched. A block casts TILE values.
    """
    _run_groups(x, out, scale, round_scale, 128, 1, False, TILE, WARPS)


def run_per_token_cast_ue8m0(x, out, scale, *, TILE: int = 2048, WARPS: int = 4) -> None:
    """out = codes of x, scale = the exponents of the powers of two that they are multiplied by, four a word.

    x: [M, H] in bf16 or fp32, out: [M, H] in float8_e4m3fn, both with unit last stride; scale: [M, ceil(H / 512)] int32 of any
    strides.
    """
    _run_groups(x, out, scale, True, 128, 4, False, TILE, WARPS)


def run_per_token_cast_mxfp8(x, out, scale, *, TILE: int = 2048, WARPS: int = 4) -> None:
    """The same per token and 32 channels; scale: [M, ceil(H / 128)] int32."""
    _run_groups(x, out, scale, True, 32, 4, False, TILE, WARPS)


def run_per_token_cast_fp4(x, round_scale, out, scale, *, TILE: int = 2048, WARPS: int = 4) -> None:
    """out = codes of x, two a byte, the even channel low; scale = what they are multiplied by, per token and 32 channels.

    x: [M, H] in bf16 or fp32, H even, out: [M, H / 2] bytes, both with unit last stride; scale: [M, ceil(H / 32)] float32 of any
    strides.
    """
    _run_groups(x, out, scale, round_scale, 32, 1, True, TILE, WARPS)


# -- a scale a row ---------------------------------------------------------------------------------------------------------


@ct.function
def _e5m6_codes(value):
    """float16 cut toward zero, without its last four bits; up where its last bit and the 17 bits left out say so."""
    bits = ct.bitcast(value, ct.int32)
    exponent = (bits >> 23) & 0xFF
    normal = ((bits & 0x7FFFFFFF) - (112 << 23)) >> 17
    shift = ct.minimum(ct.maximum(130 - exponent, 0), 31)
    subnormal = ((bits & 0x7FFFFF) | 0x800000) >> shift
    code = ct.where(exponent >= 113, normal, ct.where(exponent >= 103, subnormal, 0))
    return (code + (((code & 1) + (bits & 0x1FFFF)) > 0x10000).astype(ct.int32)) | (((bits >> 31) & 1) << 11)


@ct.kernel
def _cast_rows_e5m6(x: Rows, out: Rows, scale_out: ct.Array, ROUND: Flag, WORDS: Flag, TILE: Int):
    """A row is read twice, the second time from the cache; eight codes are three words, or twelve bytes."""
    channels = x.shape[1]
    row = ct.bid(0)
    lanes = ct.arange(TILE, dtype=ct.int32)
    # One running maximum a lane: a single reduction at the end instead of one a tile.
    largest = ct.zeros((TILE,), dtype=ct.float32)
    for start in range(0, channels, TILE):
        values = ct.gather(x, (row, start + lanes), mask=start + lanes < channels, check_bounds=False)
        largest = ct.maximum(largest, ct.abs(values.astype(ct.float32)))
    scale, inverse = _scale_and_inverse(ct.max(largest, axis=0, keepdims=True), E5M6_MOST, E4M3_FLOOR, ROUND)
    ct.scatter(scale_out, (row, ct.arange(1, dtype=ct.int32)), scale)
    place = ct.arange(8, dtype=ct.int32)[None, :]
    for start in range(0, channels, TILE):
        groups = start // 8 + ct.arange(TILE // 8, dtype=ct.int32)
        inside = groups * 8 < channels
        values = ct.gather(x, (row, groups[:, None] * 8 + place), mask=inside[:, None], check_bounds=False)
        code = _e5m6_codes(values.astype(ct.float32) * inverse[:, None])
        # Each code adds its part to the words that it lies in.
        top = ct.where(place == 0, code << 20, ct.where(place == 1, code << 8, ct.where(place == 2, code >> 4, 0)))
        middle = ct.where(place == 2, code << 28, ct.where(place == 3, code << 16, 0))
        middle = ct.where(place == 4, code << 4, ct.where(place == 5, code >> 8, middle))
        last = ct.where(place == 5, code << 24, ct.where(place == 6, code << 12, ct.where(place == 7, code, 0)))
        top, middle, last = ct.sum(top, axis=1), ct.sum(middle, axis=1), ct.sum(last, axis=1)
        if WORDS:
            ct.scatter(out, (row, groups * 3), top, mask=inside, check_bounds=False)
            ct.scatter(out, (row, groups * 3 + 1), middle, mask=inside, check_bounds=False)
            ct.scatter(out, (row, groups * 3 + 2), last, mask=inside, check_bounds=False)
        else:
            byte = ct.arange(16, dtype=ct.int32)[None, :]
            word = ct.where(byte < 4, top[:, None], ct.where(byte < 8, middle[:, None], last[:, None]))
            found = ((word >> (byte % 4 * 8)) & 0xFF).astype(ct.uint8)
            stored = inside[:, None] & (byte < 12)
            ct.scatter(out, (row, groups[:, None] * 12 + byte), found, mask=stored, check_bounds=False)


_E5M6 = {warps: _cast_rows_e5m6.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_per_token_cast_e5m6(x, round_scale, out, scale, *, TILE: int = 2048, WARPS: int = 4) -> None:
    """out = codes of x, eight in twelve bytes, scale = what they are multiplied by, a power of two if asked.

    x: [M, H] in bf16 or fp32, H a multiple of 8, out: [M, 3 * H / 2] bytes, both with unit last stride; scale: [M, 1] float32
    of any strides. Bytes are stored one by one where rows do not begin at multiples of four.
    """
    M, H = x.shape
    if M == 0:
        return
    words = out.data_ptr() % 4 == 0 and out.stride(0) % 4 == 0
    stored = out.view(torch.int32) if words else out
    tile = min(TILE, max(8, 1 << (H - 1).bit_length()))
    args = (x, stored, scale, bool(round_scale), words, tile)
    ct.launch(torch.cuda.current_stream(), (M, 1, 1), _E5M6[WARPS], args)


# -- blocks of several tokens ----------------------------------------------------------------------------------------------


@ct.kernel
def _cast_tiles(
    x: ct.Array,
    out: ct.Array,
    scale_out: ct.Array,
    ROUND: Flag,
    CHANNELS: Flag,
    TRANSPOSE: Flag,
    TILE_M: Int,
    TILE_H: Int,
):
    """A block has TILE_M tokens and TILE_H channels, which share one scale, or each channel its own (CHANNELS)."""
    across = ct.cdiv(x.shape[1], TILE_H)
    down = ct.bid(0) // across
    strip = ct.bid(0) % across
    values = ct.load(x, (down, strip), (TILE_M, TILE_H), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    amax = ct.max(ct.abs(values), axis=0, keepdims=True)
    if not CHANNELS:
        amax = ct.max(amax, axis=1, keepdims=True)
    scale, inverse = _scale_and_inverse(amax, E4M3_MOST, E4M3_FLOOR, ROUND)
    codes = _e4m3_bytes(values * inverse)
    if TRANSPOSE:
        ct.store(out, (strip, down), ct.transpose(codes))
    else:
        ct.store(out, (down, strip), codes)
    ct.store(scale_out, (down, strip), scale)


_TILES = {warps: _cast_tiles.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _run_tiles(x, round_scale, out, scale, channels, transpose, tile_m, tile_h, warps):
    M, H = x.shape
    if M == 0:
        return
    grid = (-(-M // tile_m) * -(-H // tile_h), 1, 1)
    args = (x, out.view(torch.uint8), scale, bool(round_scale), channels, transpose, tile_m, tile_h)
    ct.launch(torch.cuda.current_stream(), grid, _TILES[warps], args)


def run_per_block_cast(x, round_scale, out, scale, *, WARPS: int = 8) -> None:
    """out = codes of x, scale = what they are multiplied by, per block of 128 x 128; a power of two if asked.

    x: [M, H] in bf16 or fp32, out: [M, H] in float8_e4m3fn, both with unit last stride; scale: [ceil(M / 128),
    ceil(H / 128)] float32 of any strides. A block reads its values once.
    """
    _run_tiles(x, round_scale, out, scale, False, False, 128, 128, WARPS)


def run_per_channel_cast(x, round_scale, out, scale, *, TILE_H: int = 64, WARPS: int = 8) -> None:
    """out = codes of x, scale = what they are multiplied by, per channel and 128 tokens; a power of two if asked.

    x: [M, H] in bf16, out: [M, H] in float8_e4m3fn, both with unit last stride, M a multiple of 128; scale: [M / 128, H] float32
    of any strides.
    """
    _run_tiles(x, round_scale, out, scale, True, False, 128, TILE_H, WARPS)


def run_per_channel_cast_and_transpose(x, group, round_scale, out, scale, *, TILE_H: int = 64, WARPS: int = 8) -> None:
    """The same for groups of 32 or 128 tokens, with out [H, M]: the codes of a channel lie side by side."""
    _run_tiles(x, round_scale, out, scale, True, True, group, TILE_H, WARPS)


# -- back from codes -------------------------------------------------------------------------------------------------------


@ct.kernel
def _cast_back(x: Rows, scale_in: ct.Array, out: Rows, ROWS: Int, COLUMNS: Int, RUN: Int, TILE_M: Int, RUNS: Int):
    """A scale is loaded once for each RUN columns of a row, all of which have it."""
    channels = x.shape[1]
    strips = ct.cdiv(channels, RUN * RUNS)
    rows = ct.bid(0) // strips * TILE_M + ct.arange(TILE_M, dtype=ct.int32)
    first = (ct.bid(0) % strips * RUNS + ct.arange(RUNS, dtype=ct.int32)) * RUN
    cols = first[None, :, None] + ct.arange(RUN, dtype=ct.int32)[None, None, :]
    in_rows = rows < x.shape[0]
    mask = in_rows[:, None, None] & (cols < channels)
    codes = ct.gather(x, (rows[:, None, None], cols), mask=mask, check_bounds=False)
    in_scales = in_rows[:, None] & (first < channels)[None, :]
    place = ((rows // ROWS)[:, None], (first // COLUMNS)[None, :])
    scale = ct.gather(scale_in, place, mask=in_scales, check_bounds=False)
    value = ct.bitcast(codes, ct.float8_e4m3fn).astype(ct.float32) * scale[:, :, None]
    ct.scatter(out, (rows[:, None, None], cols), value.astype(ct.bfloat16), mask=mask, check_bounds=False)


_BACK = {warps: _cast_back.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_cast_back(x, scale, block_rows, block_columns, out, *, TILE: int = 2048, WARPS: int = 4) -> None:
    """out = x * scale of its block, one product in float32, rounded once.

    x: [M, H] in float8_e4m3fn, out: [M, H] in bf16, both with unit last stride; scale: [ceil(M / block_rows),
    ceil(H / block_columns)] float32 of any strides.
    """
    M, H = x.shape
    if M == 0:
        return
    run = min(128, block_columns & -block_columns)
    wide = min(TILE, max(run, 1 << (H - 1).bit_length()))
    tile_m = TILE // wide
    grid = (-(-M // tile_m) * -(-H // wide), 1, 1)
    args = (x.view(torch.uint8), scale, out, block_rows, block_columns, run, tile_m, wide // run)
    ct.launch(torch.cuda.current_stream(), grid, _BACK[WARPS], args)

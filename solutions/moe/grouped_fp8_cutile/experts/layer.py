"""Experts with FP8 weights, cuTile: ids are sorted by expert on the device; casts, two grouped products and a sum follow."""

from typing import Annotated

import cuda.tile as ct
import torch
from kernel import run_grouped

Int = ct.Constant[int]
Columns = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]

GROUP = 128  # channels that share a scale
MOST_PARTS = 128
CAST_ROWS = 16  # of a block


@ct.function
def _keys(ids, places, last, E: Int):
    """Experts of the ids at some places below last; -1 where there is none."""
    given = ct.gather(ids, places, mask=places < last, padding_value=-1, check_bounds=False)
    return ct.where((given >= 0) & (given < E), given, -1).astype(ct.int32)


@ct.function
def _of_each(keys, bins):
    """1 where a key is that of a bin: a thread has a bin and counts all keys, without exchanging anything."""
    return (keys[None, :] == bins[:, None]).astype(ct.int32)


@ct.kernel
def _count_ids(ids: ct.Array, parts: ct.Array, pairs: int, rounds: int, E: Int, TILE_P: Int, TILE_E: Int):
    bins = ct.arange(TILE_E, dtype=ct.int32)
    total = ct.zeros((TILE_E,), dtype=ct.int32)
    for turn in range(rounds):
        places = (ct.bid(0) * rounds + turn) * TILE_P + ct.arange(TILE_P, dtype=ct.int32)
        total = total + ct.sum(_of_each(_keys(ids, places, pairs, E), bins), axis=1)
    ct.scatter(parts, (ct.bid(0), bins), total, check_bounds=False)


@ct.kernel
def _place_ids(
    ids: ct.Array,
    parts: ct.Array,
    slots: ct.Array,
    offs: ct.Array,
    pairs: int,
    rounds: int,
    E: Int,
    TILE_P: Int,
    TILE_E: Int,
):
    """slots[pair] = its place among the pairs sorted stably by expert, -1 for ids of none; offs[e] = where those of e end."""
    part = ct.bid(0)
    bins = ct.arange(TILE_E, dtype=ct.int32)
    lanes = ct.arange(TILE_P, dtype=ct.int32)
    # Ids of each expert among all, and among those before this part.
    total = ct.zeros((TILE_E,), dtype=ct.int32)
    before = ct.zeros((TILE_E,), dtype=ct.int32)
    for first in range(0, parts.shape[0], TILE_P):
        others = (first + lanes)[None, :]
        counts = ct.gather(parts, (others, bins[:, None]), mask=others < parts.shape[0], check_bounds=False)
        total = total + ct.sum(counts, axis=1)
        before = before + ct.sum(ct.where(others < part, counts, 0), axis=1)
    ends = ct.cumsum(total, axis=0)
    ct.scatter(offs, bins, ends, mask=bins < ct.where(part == 0, E, 0), check_bounds=False)

    following = ends - total + before
    for turn in range(rounds):
        places = (part * rounds + turn) * TILE_P + lanes
        keys = _keys(ids, places, pairs, E)
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        mine = _of_each(keys, bins)
        found = ct.sum(mine * following[:, None], axis=0) + ct.sum(earlier.astype(ct.int32), axis=1)
        ct.scatter(slots, places, ct.where(keys >= 0, found, -1), mask=places < pairs, check_bounds=False)
        following = following + ct.sum(mine, axis=1)


@ct.function
def _cast_block(x):
    """Codes of a block of 128 channels a row as bytes, and what they are multiplied by."""
    x = x.astype(ct.float32)
    amax = ct.maximum(ct.max(ct.abs(x), axis=1), 1e-4)
    # Tile by tile and not by a number: a division by a constant might become a product with its rounded reciprocal.
    most = ct.full(amax.shape, 448.0, dtype=ct.float32)
    scaled = x * ct.truediv(most, amax)[:, None]
    codes = ct.minimum(ct.maximum(scaled, -448.0), 448.0).astype(ct.float8_e4m3fn)
    return ct.bitcast(codes, ct.uint8), ct.truediv(amax, most)


@ct.kernel
def _cast_into_slots(x: Columns, slots: ct.Array, codes: Columns, scale_out: ct.Array, K: Int, TILE: Int):
    """codes[slot] and scale_out[block, slot] of a token's row, for the slots of its choices. One block of channels."""
    block = ct.bid(1)
    tokens = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    cols = block * GROUP + ct.arange(GROUP, dtype=ct.int32)
    made, scale = _cast_block(ct.gather(x, (tokens[:, None], cols[None, :])))
    for choice in ct.static_iter(range(K)):
        slot = ct.gather(slots, tokens * K + choice, mask=tokens < x.shape[0], padding_value=-1, check_bounds=False)
        inside = (slot >= 0)[:, None] & (cols < codes.shape[1])[None, :]
        ct.scatter(codes, (slot[:, None], cols[None, :]), made, mask=inside, check_bounds=False)
        ct.scatter(scale_out, (block, slot), scale, mask=slot >= 0, check_bounds=False)


@ct.kernel
def _activate_and_cast(both: Columns, codes: Columns, scale_out: ct.Array, TILE: Int):
    """codes[slot] and scale_out[block, slot] of silu(gate) * up, each step rounded to bfloat16; gate is the first half."""
    block = ct.bid(1)
    columns = codes.shape[1]
    rows = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    cols = block * GROUP + ct.arange(GROUP, dtype=ct.int32)
    inside = (rows < both.shape[0])[:, None] & (cols < columns)[None, :]
    gate = ct.gather(both, (rows[:, None], cols[None, :]), mask=inside, check_bounds=False).astype(ct.float32)
    up = ct.gather(both, (rows[:, None], columns + cols[None, :]), mask=inside, check_bounds=False)
    gate = (gate / (1.0 + ct.exp(-gate))).astype(ct.bfloat16).astype(ct.float32)
    inner = (gate * up.astype(ct.float32)).astype(ct.bfloat16)
    made, scale = _cast_block(ct.where(inside, inner, 0.0))
    ct.scatter(codes, (rows[:, None], cols[None, :]), made, mask=inside, check_bounds=False)
    ct.scatter(scale_out, (block, rows), scale, mask=rows < both.shape[0], check_bounds=False)


@ct.kernel
def _sum_choices(rows: ct.Array, slots: ct.Array, weights: ct.Array, out: ct.Array, K: Int, TILE_N: Int):
    """out[token] = sum over its choices, in order, of weight times row, each product rounded to bfloat16."""
    width = out.shape[1]
    tiles_n = ct.cdiv(width, TILE_N)
    token = ct.bid(0) // tiles_n
    n = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    total = ct.zeros((TILE_N,), dtype=ct.float32)
    for choice in ct.static_iter(range(K)):
        slot = ct.gather(slots, token * K + choice, check_bounds=False)
        share = ct.gather(weights, token * K + choice, check_bounds=False).astype(ct.bfloat16).astype(ct.float32)
        row = ct.gather(rows, (slot, n), mask=(n < width) & (slot >= 0), check_bounds=False).astype(ct.float32)
        weighted = (row * share).astype(ct.bfloat16).astype(ct.float32)
        total = total + ct.where(slot >= 0, weighted, 0.0)
    ct.scatter(out, (token, n), total.astype(out.dtype), mask=n < width, check_bounds=False)


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _route(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the pairs of token and choice, and where those of each expert end."""
    pairs = ids.numel()
    tile_e = max(16, _power_of_two(experts))
    tile_p = max(8, min(32, 4096 // tile_e))
    rounds = _cdiv(_cdiv(pairs, tile_p), MOST_PARTS)
    parts = _cdiv(pairs, rounds * tile_p)
    slots = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    offs = torch.empty(experts, dtype=torch.int32, device=ids.device)
    counts = torch.empty((parts, tile_e), dtype=torch.int32, device=ids.device)
    stream = torch.cuda.current_stream()
    ct.launch(stream, (parts, 1, 1), _count_ids, (ids, counts, pairs, rounds, experts, tile_p, tile_e))
    args = (ids, counts, slots, offs, pairs, rounds, experts, tile_p, tile_e)
    ct.launch(stream, (parts, 1, 1), _place_ids, args)
    return slots, offs


def _codes(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for codes [rows, columns], and for their scales a column of them for each block of 128 channels."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((_cdiv(columns, GROUP), rows), dtype=torch.float32, device=device)


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    UP: str | None = None,
    DOWN: str | None = None,
    GROUP_M: int = 8,
) -> None:
    """out[t] = sum over choices of weights[t, k] * (silu(x gate^T) * (x up^T)) down^T of expert ids[t, k], activations cast.

    Shapes: x and out [M, H] in bfloat16 with unit last stride, any row stride; ids [M, K] int64, weights [M, K]; gate_up
    [E, 2 I, H] with gate rows first and down [E, H, I] in float8_e4m3fn, scales of blocks of 128 x 128 in float32, contiguous.
    Roundings are those of the Definition; ids outside of 0..E-1 contribute nothing. Sums are in a fixed order.
    Pairs of token and choice are sorted by expert on the device, and nothing is read back. A token is cast once and written
    to the slots of its choices. UP and DOWN are the CONFIG of `run_grouped` in the first and the second product.
    """
    m, h = out.shape
    if m == 0:
        return
    k = ids.shape[1]
    experts, inner_size = down.shape[0], down.shape[2]
    pairs = m * k
    stream = torch.cuda.current_stream()
    slots, offs = _route(ids.view(-1), experts)
    codes, scale = _codes(pairs, h, x.device)
    args = (x, slots, codes.view(torch.uint8), scale, k, CAST_ROWS)
    ct.launch(stream, (_cdiv(m, CAST_ROWS), scale.shape[0], 1), _cast_into_slots, args)
    both = torch.empty((pairs, 2 * inner_size), dtype=torch.bfloat16, device=x.device)
    run_grouped(codes, gate_up, scale.T, gate_up_scale, offs, both, CONFIG=UP, GROUP_M=GROUP_M)
    inner, inner_scale = _codes(pairs, inner_size, x.device)
    args = (both, inner.view(torch.uint8), inner_scale, CAST_ROWS)
    ct.launch(stream, (_cdiv(pairs, CAST_ROWS), inner_scale.shape[0], 1), _activate_and_cast, args)
    rows = torch.empty((pairs, h), dtype=torch.bfloat16, device=x.device)
    run_grouped(inner, down, inner_scale.T, down_scale, offs, rows, CONFIG=DOWN, GROUP_M=GROUP_M)
    tile = min(1024, max(32, _power_of_two(h)))
    args = (rows, slots, weights.view(-1), out, k, tile)
    ct.launch(stream, (m * _cdiv(h, tile), 1, 1), _sum_choices, args)

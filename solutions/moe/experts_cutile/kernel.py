"""Experts of a mixture, cuTile: ids are sorted by expert on the device, two grouped products follow, then a sum over choices."""

import functools

import cuda.tile as ct
import torch

Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

FEW_PAIRS = (
    256  # up to this many pairs of token and choice nothing is sorted: each block looks for its rows among all ids
)
MOST_PARTS = 128
SILU, CLAMP, OAI = 0, 1, 2  # what lies between the products

# Rows of the table of row tiles
GROUP, COUNT, FIRST, USED = 0, 1, 2, 3


# --- Routing: order[slot] = pair of token and choice, slots sorted stably by expert, each expert's from a multiple of TILE_M on.
# The table has for every row tile its group, how many rows it has, and which of the sorted rows is the first.


@ct.function
def _keys(ids, places, last, E: Int):
    """Experts of the ids at some places below last; -1 where there is none."""
    given = ct.gather(ids, places, mask=places < last, padding_value=-1, check_bounds=False)
    return ct.where((given >= 0) & (given < E), given, -1).astype(ct.int32)


@ct.function
def _of_each(keys, bins):
    """1 where a key is that of a bin: a thread has a bin and counts all keys, without exchanging anything."""
    return (keys[None, :] == bins[:, None]).astype(ct.int32)


@ct.function
def _list_tiles(table, part, parts, total, bins, TILE_M: Int):
    """This part of the table of tiles, and how many there are; `total` rows belong to each group."""
    row_tiles = (total + TILE_M - 1) // TILE_M
    tile_starts = ct.cumsum(row_tiles, axis=0) - row_tiles
    row_starts = ct.cumsum(total, axis=0) - total
    for turn in range(part, ct.max(row_tiles).item(), parts):
        there = turn < row_tiles
        done = turn * TILE_M
        ct.scatter(table, (GROUP, tile_starts + turn), bins, mask=there, check_bounds=False)
        ct.scatter(table, (COUNT, tile_starts + turn), ct.minimum(total - done, TILE_M), mask=there, check_bounds=False)
        ct.scatter(table, (FIRST, tile_starts + turn), row_starts + done, mask=there, check_bounds=False)
    ct.scatter(table, (USED, 0), ct.sum(row_tiles), mask=part == 0, check_bounds=False)


@ct.kernel
def _list_groups(offs: ct.Array, table: ct.Array, rows: int, E: Int, TILE_M: Int, TILE_E: Int):
    """The table for groups that end at offs; the rows after the last of them are group E."""
    bins = ct.arange(TILE_E, dtype=ct.int32)
    ends = ct.gather(offs, bins, mask=bins < E, check_bounds=False)
    ends = ct.where(bins < E, ends, rows)
    starts = ct.gather(offs, bins - 1, mask=(bins > 0) & (bins <= E), check_bounds=False)
    total = ct.where(bins <= E, ends - starts, 0)
    _list_tiles(table, ct.bid(0), ct.num_blocks(0), total, bins, TILE_M)


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
    order: ct.Array,
    table: ct.Array,
    pairs: int,
    rounds: int,
    E: Int,
    TILE_M: Int,
    TILE_P: Int,
    TILE_E: Int,
):
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
    _list_tiles(table, part, ct.num_blocks(0), total, bins, TILE_M)

    # Slots of this part's ids. Those of no expert have none.
    room = (total + TILE_M - 1) // TILE_M * TILE_M
    following = ct.cumsum(room, axis=0) - room + before
    for turn in range(rounds):
        places = (part * rounds + turn) * TILE_P + lanes
        keys = _keys(ids, places, pairs, E)
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        mine = _of_each(keys, bins)
        slots = ct.sum(mine * following[:, None], axis=0) + ct.sum(earlier.astype(ct.int32), axis=1)
        ct.scatter(order, slots, places, mask=keys >= 0, check_bounds=False)
        following = following + ct.sum(mine, axis=1)


@ct.function
def _sharers(ids, pair, pairs, E: Int, TILE_M: Int, TILE_P: Int):
    """The expert of a pair, the next TILE_M pairs of this expert from it on, and how many they are.

    None where the pair has no expert, or where another one's TILE_M include it: every TILE_M-th of an expert has some.
    """
    own = ct.gather(ids, pair, check_bounds=False)
    known = (own >= 0) & (own < E)
    places = ct.arange(TILE_P, dtype=ct.int32)
    same = ct.gather(ids, places, mask=places < pairs, padding_value=-1, check_bounds=False) == own
    earlier = ct.sum((same & (places < pair)).astype(ct.int32))
    left = ct.sum((same & (places >= pair)).astype(ct.int32))
    count = ct.where(known & (earlier % TILE_M == 0), ct.minimum(left, TILE_M), 0)
    lanes = ct.arange(TILE_M, dtype=ct.int32)
    rows = ct.zeros((TILE_M,), dtype=ct.int32) + pair
    last = ct.zeros((1,), dtype=ct.int32) + pair
    for lane in range(1, count.item()):  # few: a token rarely chooses what another has chosen
        last = ct.min(ct.where(same & (places > last), places, TILE_P), keepdims=True)
        rows = ct.where(lanes == lane, last, rows)
    return ct.where(known, own, 0).astype(ct.int32), rows, count


@ct.function
def _listed_tile(work, tiles_n, table, GROUP_M: Int):
    """Row tile, tile of columns, group and rows of a block's place among the tiles of the table, no rows past the last one.

    Tiles in bands of GROUP_M row tiles, column by column: those in flight together share rows and weights in L2.
    """
    used = ct.gather(table, (USED, 0), check_bounds=False)
    listed = work < used * tiles_n
    band = work // (GROUP_M * tiles_n)
    band_rows = ct.maximum(ct.minimum(used - band * GROUP_M, GROUP_M), 1)
    place = work % (GROUP_M * tiles_n)
    tile_m = ct.where(listed, band * GROUP_M + place % band_rows, 0).item()
    group = ct.gather(table, (GROUP, tile_m), check_bounds=False)
    count = ct.where(listed, ct.gather(table, (COUNT, tile_m), check_bounds=False), 0)
    return tile_m, place // band_rows, group, count


@ct.function
def _own_tile(work, tiles_n, ids, order, table, pairs, E: Int, FEW: Flag, TILE_M: Int, TILE_P: Int, GROUP_M: Int):
    """A block's row tile and tile of columns, its expert, pairs and how many they are; lanes past these have one that exists."""
    if FEW:
        expert, rows, count = _sharers(ids, work // tiles_n, pairs, E, TILE_M, TILE_P)
        return work // tiles_n, work % tiles_n, expert, rows, count
    tile_m, tile_n, group, count = _listed_tile(work, tiles_n, table, GROUP_M)
    lanes = ct.arange(TILE_M, dtype=ct.int32)
    rows = ct.gather(order, tile_m * TILE_M + lanes, mask=lanes < count, check_bounds=False)
    return tile_m, tile_n, group, rows, count


# --- Products


@ct.function
def _rounded(value, T):
    return value.astype(T).astype(ct.float32)


@ct.function
def _divided(value, divisor):
    """Within 2 ulp of fp32, which is several instructions shorter than the correctly rounded quotient."""
    return ct.truediv(value, divisor, rounding_mode=ct.RoundingMode.FULL)


@ct.function
def _activation(gate, up, alpha, limit, KIND: Int, T):
    """What models compute between the products, each step rounded to T as theirs. NaN passes every bound."""
    gate = _rounded(gate, T)
    up = _rounded(up, T)
    if KIND != SILU:
        gate = _rounded(ct.where(gate > limit, limit, gate), T)
        up = ct.where(up > limit, limit, up)
        up = _rounded(ct.where(up < -limit, -limit, up), T)
    if KIND == OAI:
        gate = _rounded(gate * _rounded(_divided(1.0, 1.0 + ct.exp(-_rounded(gate * alpha, T))), T), T)
        up = _rounded(up + 1.0, T)
    else:
        gate = _rounded(_divided(gate, 1.0 + ct.exp(-gate)), T)
    return (gate * up).astype(T)


@ct.function
def _gathered(x, rows, tile_k, width, EVEN_K: Flag, TILE_K: Int):
    """Columns of some rows of x; zeros past the width."""
    k = tile_k * TILE_K + ct.arange(TILE_K, dtype=ct.int32)
    if EVEN_K:
        return ct.gather(x, (rows[:, None], k[None, :]), check_bounds=False)
    return ct.gather(x, (rows[:, None], k[None, :]), mask=(k < width)[None, :], check_bounds=False)


@ct.function
def _weights(w, expert, tile_n, tile_k, HALVES: Int, BY_COLUMN: Flag, SWAP: Flag, TILE_N: Int, TILE_K: Int):
    """A tile of w, [E, HALVES, N, K] or BY_COLUMN [E, 1, K, N], as the operand [K, N] or with SWAP [N, K]; zeros outside.

    Columns n of all halves lie side by side in it.
    """
    if SWAP:
        shape = (1, HALVES, TILE_N, TILE_K)
        index = (expert, 0, tile_n, tile_k)
        order = (0, 1, 3, 2) if BY_COLUMN else (0, 1, 2, 3)
        return ct.reshape(ct.load(w, index, shape, order=order, padding_mode=ZERO), (HALVES * TILE_N, TILE_K))
    shape = (1, TILE_K, HALVES, TILE_N)
    index = (expert, tile_k, 0, tile_n)
    order = (0, 2, 1, 3) if BY_COLUMN else (0, 3, 1, 2)
    return ct.reshape(ct.load(w, index, shape, order=order, padding_mode=ZERO), (TILE_K, HALVES * TILE_N))


@ct.function
def _add_product(rows, w, acc, SWAP: Flag):
    """acc + rows w, or with SWAP its transpose: the 64 rows of a tensor-core instruction then lie along the weights."""
    if SWAP:
        return ct.mma(w, ct.transpose(rows), acc)
    return ct.mma(rows, w, acc)


@ct.function
def _gate_and_up(both, BY_COLUMN: Flag, SWAP: Flag, TILE_M: Int, TILE_N: Int):
    """Both halves of a tile whose columns lie side by side, or BY_COLUMN alternate; with SWAP these are its rows."""
    shape = (TILE_N, TILE_M) if SWAP else (TILE_M, TILE_N)
    if BY_COLUMN:
        part = (TILE_N, 1, TILE_M) if SWAP else (TILE_M, TILE_N, 1)
        split = ct.reshape(both, (TILE_N, 2, TILE_M) if SWAP else (TILE_M, TILE_N, 2))
        gate = ct.extract(split, (0, 0, 0), part)
        up = ct.extract(split, (0, 1, 0) if SWAP else (0, 0, 1), part)
        return ct.reshape(gate, shape), ct.reshape(up, shape)
    return ct.extract(both, (0, 0), shape), ct.extract(both, (1, 0) if SWAP else (0, 1), shape)


@ct.function
def _along_columns(values, SWAP: Flag):
    return values[:, None] if SWAP else values[None, :]


@ct.kernel
def _gate_up(
    x: ct.Array,
    w: ct.Array,
    bias: ct.Array,
    ids: ct.Array,
    order: ct.Array,
    table: ct.Array,
    inner: ct.Array,
    pairs: int,
    columns: int,
    alpha: float,
    limit: float,
    E: Int,
    K: Int,
    KIND: Int,
    BY_COLUMN: Flag,
    BIAS: Flag,
    FEW: Flag,
    EVEN_K: Flag,
    SWAP: Flag,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    TILE_P: Int,
    GROUP_M: Int,
):
    """inner = activation(x w_gate, x w_up), `columns` of them and zeros up to the width of inner; for FEW a row for each pair.

    w is [E, 2, I, H], or BY_COLUMN [E, 1, H, 2 I] with gate in the even columns.
    """
    tile_m, tile_n, expert, rows, count = _own_tile(
        ct.bid(0), ct.cdiv(columns, TILE_N), ids, order, table, pairs, E, FEW, TILE_M, TILE_P, GROUP_M
    )
    if count > 0:
        token = rows // K
        both = ct.zeros((2 * TILE_N, TILE_M) if SWAP else (TILE_M, 2 * TILE_N), dtype=ct.float32)
        for k in range(ct.cdiv(x.shape[1], TILE_K)):
            x_tile = _gathered(x, token, k, x.shape[1], EVEN_K, TILE_K)
            if BY_COLUMN:
                w_tile = _weights(w, expert, tile_n, k, 1, True, SWAP, 2 * TILE_N, TILE_K)
            else:
                w_tile = _weights(w, expert, tile_n, k, 2, False, SWAP, TILE_N, TILE_K)
            both = _add_product(x_tile, w_tile, both, SWAP)
        gate, up = _gate_and_up(both, BY_COLUMN, SWAP, TILE_M, TILE_N)
        n = tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        if BIAS:
            gate_bias = ct.gather(bias, (expert, 2 * n), mask=n < columns, check_bounds=False).astype(ct.float32)
            up_bias = ct.gather(bias, (expert, 2 * n + 1), mask=n < columns, check_bounds=False).astype(ct.float32)
            gate = _rounded(gate, inner.dtype) + _along_columns(gate_bias, SWAP)
            up = _rounded(up, inner.dtype) + _along_columns(up_bias, SWAP)
        found = _activation(gate, up, alpha, limit, KIND, inner.dtype)
        # Zeros past the last column: the second product multiplies them with zeros, and NaN would remain NaN.
        found = ct.where(_along_columns(n < columns, SWAP), found, 0.0)
        if SWAP:
            found = ct.transpose(found)
        if FEW:
            lanes = ct.arange(TILE_M, dtype=ct.int32)
            inside = (lanes < count)[:, None] & (n < inner.shape[1])[None, :]
            ct.scatter(inner, (rows[:, None], n[None, :]), found, mask=inside, check_bounds=False)
        else:
            ct.store(inner, (tile_m, tile_n), found)


@ct.kernel
def _down(
    inner: ct.Array,
    w: ct.Array,
    bias: ct.Array,
    ids: ct.Array,
    order: ct.Array,
    table: ct.Array,
    out: ct.Array,
    pairs: int,
    depth: int,
    E: Int,
    BY_COLUMN: Flag,
    BIAS: Flag,
    FEW: Flag,
    TIGHT: Flag,
    EVEN_K: Flag,
    SWAP: Flag,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    TILE_P: Int,
    GROUP_M: Int,
):
    """out[pair] = inner[slot of the pair] w, or for FEW inner[pair] w; w [E, 1, N, depth] or BY_COLUMN [E, 1, depth, N].

    TIGHT: out[row] = inner[row] w for the rows of the table; group E has no weights, and its rows are zeros.
    """
    width = out.shape[1]
    tiles_n = ct.cdiv(width, TILE_N)
    tiles_k = ct.cdiv(depth, TILE_K)
    lanes = ct.arange(TILE_M, dtype=ct.int32)
    if TIGHT:
        tile_m, tile_n, expert, count = _listed_tile(ct.bid(0), tiles_n, table, GROUP_M)
        rows = ct.gather(table, (FIRST, tile_m), check_bounds=False) + ct.minimum(lanes, count - 1)
        tiles_k = ct.where(expert < E, tiles_k, 0).item()
    else:
        tile_m, tile_n, expert, rows, count = _own_tile(
            ct.bid(0), tiles_n, ids, order, table, pairs, E, FEW, TILE_M, TILE_P, GROUP_M
        )
    if count > 0:
        acc = ct.zeros((TILE_N, TILE_M) if SWAP else (TILE_M, TILE_N), dtype=ct.float32)
        for k in range(tiles_k):
            if FEW or TIGHT:
                rows_tile = _gathered(inner, rows, k, depth, EVEN_K, TILE_K)
            else:
                rows_tile = ct.load(inner, (tile_m, k), (TILE_M, TILE_K), padding_mode=ZERO)
            w_tile = _weights(w, expert, tile_n, k, 1, BY_COLUMN, SWAP, TILE_N, TILE_K)
            acc = _add_product(rows_tile, w_tile, acc, SWAP)
        n = tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        if BIAS:
            column_bias = ct.gather(bias, (expert, n), mask=n < width, check_bounds=False).astype(ct.float32)
            acc = _rounded(acc, out.dtype) + _along_columns(column_bias, SWAP)
        found = acc.astype(out.dtype)
        if SWAP:
            found = ct.transpose(found)
        # Rows go to where the sum over choices reads them, those of a token side by side.
        inside = (lanes < count)[:, None] & (n < width)[None, :]
        ct.scatter(out, (rows[:, None], n[None, :]), found, mask=inside, check_bounds=False)


@ct.kernel
def _sum_choices(
    rows: ct.Array,
    ids: ct.Array,
    weights: ct.Array,
    out: ct.Array,
    E: Int,
    K: Int,
    ROUND: Flag,
    TILE_N: Int,
):
    """out[token] = sum over its choices, in order, of weight times row."""
    width = out.shape[1]
    tiles_n = ct.cdiv(width, TILE_N)
    token = ct.bid(0) // tiles_n
    n = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    total = ct.zeros((TILE_N,), dtype=ct.float32)
    for choice in ct.static_iter(range(K)):
        pair = token * K + choice
        expert = ct.gather(ids, pair, check_bounds=False)
        known = (expert >= 0) & (expert < E)
        share = ct.gather(weights, pair, check_bounds=False).astype(ct.float32)
        row = ct.gather(rows, (pair, n), mask=(n < width) & known, check_bounds=False).astype(ct.float32)
        weighted = row * share
        if ROUND:
            weighted = _rounded(weighted, rows.dtype)
        total = total + ct.where(known, weighted, 0.0)
    ct.scatter(out, (token, n), total.astype(out.dtype), mask=n < width, check_bounds=False)


# Launch configurations by rows of a tile, then by index UP or DOWN: columns and depth of a tile, warps, blocks a multiprocessor.
# A tile of the first product has as many columns of gate and of up.
_UP = {
    16: ((32, 128, 4, 3), (64, 128, 4, 2), (32, 256, 4, 2), (64, 64, 4, 3)),
    32: ((32, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 8, 1)),
    64: ((64, 64, 4, 2), (64, 128, 4, 1), (128, 64, 8, 1), (128, 64, 4, 1)),
    128: ((128, 64, 8, 1), (64, 64, 4, 2), (64, 128, 8, 1), (64, 64, 8, 1)),
}
_DOWN = {
    16: ((64, 128, 4, 3), (64, 256, 4, 2), (32, 256, 4, 3), (128, 128, 4, 2)),
    32: ((64, 128, 4, 3), (128, 64, 4, 3), (128, 128, 4, 2), (64, 256, 4, 1)),
    64: ((128, 64, 4, 2), (128, 128, 8, 1), (64, 128, 4, 2), (256, 64, 8, 1)),
    128: ((128, 64, 8, 1), (256, 64, 8, 1), (128, 128, 8, 1), (128, 64, 4, 2)),
}
# In fp32, and where the copy engine cannot read the weights.
_UP_OTHERWISE = ((32, 16, 4, 2), (32, 32, 4, 2))
_DOWN_OTHERWISE = ((64, 16, 4, 2), (64, 32, 4, 2))


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@functools.lru_cache
def _with_hints(kernel: ct.kernel, warps: int, occupancy: int) -> ct.kernel:
    return kernel.replace_hints(num_worker_warps=warps, occupancy=occupancy)


def _rows_of_tile(given: int | None, pairs: int, experts: int, dtype: torch.dtype) -> int:
    """What is given, else by the rows that an expert gets on average; in fp32, which takes more registers, 32 at most."""
    rows = pairs / experts
    chosen = given or (16 if rows <= 8 else 32 if rows <= 20 else 64 if rows <= 48 else 128)
    return min(chosen, 32) if dtype == torch.float32 else chosen


def _config(
    configs, otherwise, tile_m: int, variant: int | None, depth: int, w: torch.Tensor
) -> tuple[int, int, int, int]:
    """Columns and depth of a tile, warps, blocks a multiprocessor. Tiles that divide the depth need no masks."""
    if w.dtype == torch.float32:
        return otherwise[0]
    if w.data_ptr() % 16 or w.shape[-1] * w.element_size() % 16:
        return otherwise[1]
    tile_n, tile_k, warps, occupancy = configs[tile_m][variant or 0]
    return tile_n, 64 if depth % tile_k else tile_k, warps, occupancy


def _route(ids: torch.Tensor, experts: int, tile_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order of the slots and table of the row tiles, of which there are at most as many as the table has columns."""
    pairs = ids.numel()
    tiles = (pairs + min(experts, pairs) * (tile_m - 1)) // tile_m
    tile_e = max(16, _power_of_two(experts))
    tile_p = max(8, min(32, 4096 // tile_e))
    rounds = _cdiv(_cdiv(pairs, tile_p), MOST_PARTS)
    parts = _cdiv(pairs, rounds * tile_p)
    order = torch.empty(tiles * tile_m, dtype=torch.int32, device=ids.device)
    table = torch.empty((4, tiles), dtype=torch.int32, device=ids.device)
    counts = torch.empty((parts, tile_e), dtype=torch.int32, device=ids.device)
    stream = torch.cuda.current_stream()
    ct.launch(stream, (parts, 1, 1), _count_ids, (ids, counts, pairs, rounds, experts, tile_p, tile_e))
    args = (ids, counts, order, table, pairs, rounds, experts, tile_m, tile_p, tile_e)
    ct.launch(stream, (parts, 1, 1), _place_ids, args)
    return order, table


def _second_product(inner, depth, w, bias, ids, order, table, out, by_column, few, tight, tile_m, variant, group_m):
    """Launch out[pair] = inner[slot or pair] w, with w [E, N, depth], or [E, depth, N] by column."""
    pairs, width = out.shape
    tile_n, tile_k, warps, occupancy = _config(_DOWN, _DOWN_OTHERWISE, tile_m, variant, depth, w)
    tiles_m = pairs if few else table.shape[1]
    tile_p = _power_of_two(pairs) if few else 1
    args = (
        inner, w.unsqueeze(1), ids if bias is None else bias, ids, order, table, out, pairs, depth, w.shape[0], by_column,
        bias is not None, few, tight, depth % tile_k == 0, tile_m <= 64, tile_m, tile_n, tile_k, tile_p, group_m,
    )  # fmt: skip
    grid = (tiles_m * _cdiv(width, tile_n), 1, 1)
    ct.launch(torch.cuda.current_stream(), grid, _with_hints(_down, warps, occupancy), args)


def _experts(x, ids, weights, gate_up, up_bias, down, down_bias, out, kind, alpha, limit, by_column, config):
    """Launch the kernels. kind: the activation; by_column: weights are [E, H, 2 I] and [E, I, H]; config: as `run` takes it."""
    TILE_M, UP, DOWN, GROUP_M = config
    M, H = out.shape
    if M == 0:
        return
    K = ids.shape[1]
    E, I = down.shape[0], down.shape[1] if by_column else down.shape[2]
    pairs = M * K
    few = pairs <= FEW_PAIRS
    tile_m = min(_rows_of_tile(TILE_M, pairs, E, x.dtype), 64 if few else 128)
    ids, weights = ids.view(-1), weights.view(-1)
    order = table = ids
    slots = pairs
    if not few:
        order, table = _route(ids, E, tile_m)
        slots = order.shape[0]
    # Rows of whole vectors, so that tiles may be stored where the last one is not full.
    inner = torch.empty((slots, _cdiv(I, 8) * 8), dtype=x.dtype, device=x.device)
    tile_n, tile_k, warps, occupancy = _config(_UP, _UP_OTHERWISE, tile_m, UP, H, gate_up)
    args = (
        x, gate_up.view(E, 1, H, 2 * I) if by_column else gate_up.view(E, 2, I, H), ids if up_bias is None else up_bias,
        ids, order, table, inner, pairs, I, float(alpha), float(limit), E, K, kind, by_column, up_bias is not None, few,
        H % tile_k == 0, tile_m <= 64, tile_m, tile_n, tile_k, _power_of_two(pairs) if few else 1, GROUP_M,
    )  # fmt: skip
    grid = ((pairs if few else table.shape[1]) * _cdiv(I, tile_n), 1, 1)
    stream = torch.cuda.current_stream()
    ct.launch(stream, grid, _with_hints(_gate_up, warps, occupancy), args)

    rows = torch.empty((pairs, H), dtype=x.dtype, device=x.device)
    _second_product(inner, I, down, down_bias, ids, order, table, rows, by_column, few, False, tile_m, DOWN, GROUP_M)
    tile = min(1024, max(32, _power_of_two(H)))
    round_product = x.dtype != torch.float32 and weights.dtype == x.dtype
    args = (rows, ids, weights, out, E, K, round_product, tile)
    ct.launch(stream, (M * _cdiv(H, tile), 1, 1), _sum_choices, args)


def run(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    UP: int | None = None,
    DOWN: int | None = None,
    GROUP_M: int = 8,
) -> None:
    """out[t] = sum over choices of weights[t, k] * (silu(x gate^T) * (x up^T)) down^T of expert ids[t, k], fp32 accumulation.

    Shapes: x and out [M, H], ids [M, K] int64, weights [M, K], gate_up [E, 2 I, H] with gate rows first, down [E, H, I];
    T bfloat16 or float32 (IEEE products, without tensor cores); unit last stride, any row stride of x and out.
    Roundings are those of the Definition; ids outside of 0..E-1 contribute nothing. Sums are in a fixed order.
    """
    config = TILE_M, UP, DOWN, GROUP_M
    _experts(x, ids, weights, gate_up, None, down, None, out, SILU, 0.0, 0.0, False, config)


def run_clamp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    UP: int | None = None,
    DOWN: int | None = None,
    GROUP_M: int = 8,
) -> None:
    """As `run`, with gate cut at limit from above and up on both sides before the activation."""
    config = TILE_M, UP, DOWN, GROUP_M
    _experts(x, ids, weights, gate_up, None, down, None, out, CLAMP, 0.0, limit, False, config)


def run_oai(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float,
    limit: float,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    UP: int | None = None,
    DOWN: int | None = None,
    GROUP_M: int = 8,
) -> None:
    """As `run`, for gate_up [E, H, 2 I] with gate in the even columns, down [E, I, H], biases [E, 2 I] and [E, H].

    Between the products: (up + 1) * gate * sigmoid(alpha * gate), gate cut at limit from above, up on both sides.
    """
    config = TILE_M, UP, DOWN, GROUP_M
    _experts(x, ids, weights, gate_up, gate_up_bias, down, down_bias, out, OAI, alpha, limit, True, config)


def run_grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE_M: int | None = None,
    DOWN: int | None = None,
    GROUP_M: int = 8,
) -> None:
    """out[s] = x[s] w[e]^T for the rows s from offs[e - 1] to below offs[e]; zero from offs[E - 1] on; fp32 accumulation.

    Shapes: x [S, K], w [E, N, K], out [S, N] of one dtype in bfloat16, float16, float32, offs [E] int32, ascending; contiguous.
    """
    S, E = x.shape[0], w.shape[0]
    if S == 0:
        return
    tile_m = _rows_of_tile(TILE_M, S, E, x.dtype)
    tiles = (S + min(E + 1, S) * (tile_m - 1)) // tile_m
    table = torch.empty((4, tiles), dtype=torch.int32, device=x.device)
    args = (offs, table, S, E, tile_m, max(16, _power_of_two(E + 1)))
    ct.launch(torch.cuda.current_stream(), (min(64, _cdiv(S, tile_m)), 1, 1), _list_groups, args)
    _second_product(x, x.shape[1], w, None, offs, offs, table, out, False, False, True, tile_m, DOWN, GROUP_M)

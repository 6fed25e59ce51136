"""Experts of a mixture with other code between the products, Triton: sorted on the device, two grouped products, one sum.

The routing is that of ``experts_triton``, whose file stays as it was measured. Here experts may have no gate, and weights by
column have gate and up as halves.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

FEW_PAIRS = 1024  # up to this many pairs of token and choice, every program counts all ids itself, in one launch
COUNTED = 512  # ids that are counted at a time
PLACED = 64  # ids that are placed at a time
MOST_PARTS = 128
GROUP_M = 8  # row tiles that share weights in L2


# --- Routing: order[slot] = pair of token and choice, slots sorted stably by expert; table of row tiles of the products.


@triton.jit(do_not_specialize=["pairs", "share"])
def _count_ids(ids_ptr, counts_ptr, pairs, share, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """counts[part, e] = how many of the `share` ids of this part are e."""
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    for first in range(part * share, tl.minimum(part * share + share, pairs), BLOCK):
        places = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + places, mask=(places < pairs) & (places < part * share + share), other=-1)
        known = (ids >= 0) & (ids < E)
        count += tl.histogram(tl.where(known, ids, 0).to(tl.int32), BINS, mask=known)
    tl.store(counts_ptr + part * BINS + bins, count)


@triton.jit
def _list_tiles(
    tiles_ptr,
    tiles,
    first_tile,
    last_tile,
    ends,
    total,
    GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    """Write this part of the table of row tiles: group, first slot, end of the group's slots; group -1 where none is left."""
    row_tiles = (total + TILE_ROWS - 1) // TILE_ROWS
    tile_ends = tl.cumsum(row_tiles, axis=0)
    for first in range(first_tile, last_tile, TILE_BLOCK):
        tile = first + tl.arange(0, TILE_BLOCK)
        group = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        used = group < GROUPS
        owner = tl.where(used, group, 0)
        end = tl.gather(ends, owner, axis=0)
        turn = tile - tl.gather(tile_ends - row_tiles, owner, axis=0)
        tl.store(tiles_ptr + tile, tl.where(used, group, -1), mask=tile < last_tile)
        first_slot = end - tl.gather(total, owner, axis=0) + turn * TILE_ROWS
        tl.store(tiles_ptr + tiles + tile, first_slot, mask=tile < last_tile)
        tl.store(tiles_ptr + 2 * tiles + tile, end, mask=tile < last_tile)


@triton.jit(do_not_specialize=["pairs", "share", "parts", "tiles", "tile_share"])
def _place_ids(
    ids_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    pairs,
    share,
    parts,
    tiles,
    tile_share,
    E: tl.constexpr,
    BINS: tl.constexpr,
    COUNTED_BEFORE: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    # Ids of each expert among all, and among those before this part.
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if COUNTED_BEFORE:
        PART_BLOCK: tl.constexpr = 8192 // BINS
        for first in range(0, parts, PART_BLOCK):
            other = first + tl.arange(0, PART_BLOCK)[:, None]
            counts = tl.load(counts_ptr + other * BINS + bins[None, :], mask=other < parts, other=0)
            total += tl.sum(counts, axis=0)
            before += tl.sum(tl.where(other < part, counts, 0), axis=0)
    else:
        for first in range(0, pairs, COUNT_BLOCK):
            places = first + tl.arange(0, COUNT_BLOCK)
            ids = tl.load(ids_ptr + places, mask=places < pairs, other=-1)
            known = (ids >= 0) & (ids < E)
            experts = tl.where(known, ids, 0).to(tl.int32)
            total += tl.histogram(experts, BINS, mask=known)
            before += tl.histogram(experts, BINS, mask=known & (places < part * share))
    ends = tl.cumsum(total, axis=0)

    first_tile = part * tile_share
    last_tile = tl.minimum(first_tile + tile_share, tiles)
    _list_tiles(tiles_ptr, tiles, first_tile, last_tile, ends, total, E, TILE_ROWS, TILE_BLOCK)

    # Slots of this part's ids. Those of no expert have none.
    following = ends - total + before
    lanes = tl.arange(0, BLOCK)
    for first in range(part * share, tl.minimum(part * share + share, pairs), BLOCK):
        places = first + lanes
        ids = tl.load(ids_ptr + places, mask=(places < pairs) & (places < part * share + share), other=-1)
        known = (ids >= 0) & (ids < E)
        keys = tl.where(known, ids, E).to(tl.int32)
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        experts = tl.where(known, keys, 0)
        slots = tl.gather(following, experts, axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(order_ptr + slots, places, mask=known)
        following += tl.histogram(experts, BINS, mask=known)


@triton.jit
def _used_rows(x_ptr, ids_ptr, out_ptr, rows_of_expert, H, BLOCK: tl.constexpr):
    """ids[row] = its expert, or -1 and zeros in out if all of the row is zero."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    used = tl.zeros([BLOCK], tl.int32)
    for start in range(0, H, BLOCK):
        x = tl.load(x_ptr + row * H + start + lanes, mask=lanes < H - start, other=0.0)
        used |= (x != 0.0).to(tl.int32)
    is_used = tl.max(used, axis=0) > 0
    tl.store(ids_ptr + row, tl.where(is_used, row // rows_of_expert, -1))
    if not is_used:
        zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
        for start in range(0, H, BLOCK):
            tl.store(out_ptr + row * H + start + lanes, zeros, mask=lanes < H - start)


# --- Products


@triton.jit
def _rounded(value, T: tl.constexpr):
    return value.to(T).to(tl.float32)


@triton.jit
def _activation(gate, up, alpha, limit, ACTIVATION: tl.constexpr, T: tl.constexpr):
    """What models compute between the products, each step rounded to T as theirs. NaN passes every bound."""
    gate = _rounded(gate, T)
    if ACTIVATION == "relu2":  # up is not read
        positive = tl.where(gate < 0.0, 0.0, gate)
        found = (positive * positive).to(T)
    else:
        up = _rounded(up, T)
        if ACTIVATION == "oai":
            gate = _rounded(tl.where(gate > limit, limit, gate), T)
            up = tl.where(up > limit, limit, up)
            up = _rounded(tl.where(up < -limit, -limit, up), T)
            gate = _rounded(gate * _rounded(1.0 / (1.0 + tl.exp(-_rounded(gate * alpha, T))), T), T)
            up = _rounded(up + 1.0, T)
        elif ACTIVATION == "gelu":  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
            twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            gate = _rounded(gate / (1.0 + tl.exp(-twice)), T)
        else:
            gate = _rounded(gate / (1.0 + tl.exp(-gate)), T)
        found = (gate * up).to(T)
    return found


@triton.jit
def _tile_coordinates(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M rows of tiles, down a column first: neighbours in time share rows and weights in L2."""
    group_size = GROUP_M * n_tiles
    first_m = tile // group_size * GROUP_M
    rows = tl.minimum(m_tiles - first_m, GROUP_M)
    return first_m + tile % group_size % rows, tile % group_size // rows


@triton.jit
def _read(pointers, inside, EVEN: tl.constexpr):
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tiles"])
def _first_product(
    x_ptr,
    w,
    order_ptr,
    tiles_ptr,
    inner_ptr,
    x_stride,
    H,
    I,
    alpha,
    limit,
    tiles,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """inner[slot] = activation(x w_gate, x w_up) for the slots of one tile and BLOCK_N columns.

    w is [E, 2 I, H] with gate rows first, BY_COLUMN [E, H, 2 I] with gate columns first, without a gate [E, I, H].
    """
    T: tl.constexpr = inner_ptr.dtype.element_ty
    GATED: tl.constexpr = ACTIVATION != "relu2"
    PARTS: tl.constexpr = 2 if GATED else 1
    m_tile, n_tile = _tile_coordinates(tl.program_id(0), tiles, tl.cdiv(I, BLOCK_N), GROUP_M)
    expert = tl.load(tiles_ptr + m_tile)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + tiles + m_tile)
    end = tl.load(tiles_ptr + 2 * tiles + m_tile)
    slots = first + tl.arange(0, BLOCK_M)
    # Rows past the end are read from the last one and not stored.
    token = tl.load(order_ptr + tl.minimum(slots, end - 1)) // K
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if not COPY_ENGINE:
        if BY_COLUMN:
            # Columns past the end are masked and not clamped: clamped addresses are no longer known to be contiguous.
            gate_ptrs = w + (expert.to(tl.int64) * H + k[:, None]) * 2 * I + n[None, :]
            up_ptrs = gate_ptrs + I
        else:
            row = (expert.to(tl.int64) * PARTS * I + tl.minimum(n, I - 1)) * H
            gate_ptrs = w + row[None, :] + k[:, None]
            up_ptrs = gate_ptrs + tl.cast(I, tl.int64) * H
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, H, BLOCK_K):
        x = _read(x_ptrs, k[None, :] < H - start, EVEN_K)
        if BY_COLUMN:
            if COPY_ENGINE:  # only where BLOCK_K divides H, or it would read of the next expert
                w_gate = w.load([expert * H + start, n_tile * BLOCK_N])
                w_up = w.load([expert * H + start, I + n_tile * BLOCK_N])
            else:
                inside = n[None, :] < I
                inside = inside if EVEN_K else inside & (k[:, None] < H - start)
                w_gate = tl.load(gate_ptrs, mask=inside, other=0.0)
                w_up = tl.load(up_ptrs, mask=inside, other=0.0)
                gate_ptrs += BLOCK_K * 2 * tl.cast(I, tl.int64)
                up_ptrs += BLOCK_K * 2 * tl.cast(I, tl.int64)
            up = tl.dot(x, w_up, up, input_precision="ieee")
        elif COPY_ENGINE:  # past the last column it gives zeros
            w_gate = w.load([expert * PARTS * I + n_tile * BLOCK_N, start]).T
            if GATED:
                w_up = w.load([expert * PARTS * I + I + n_tile * BLOCK_N, start]).T
                up = tl.dot(x, w_up, up, input_precision="ieee")
        else:
            w_gate = _read(gate_ptrs + start, k[:, None] < H - start, EVEN_K)
            if GATED:
                w_up = _read(up_ptrs + start, k[:, None] < H - start, EVEN_K)
                up = tl.dot(x, w_up, up, input_precision="ieee")
        gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        x_ptrs += BLOCK_K
    inner = _activation(gate, up, alpha, limit, ACTIVATION, T)
    tl.store(
        inner_ptr + slots.to(tl.int64)[:, None] * I + n[None, :], inner, mask=(slots[:, None] < end) & (n[None, :] < I)
    )


@triton.jit(do_not_specialize=["tiles"])
def _second_product(
    inner,
    w,
    order_ptr,
    tiles_ptr,
    rows_ptr,
    H,
    I,
    tiles,
    BY_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """rows[pair] = inner[slot of the pair] w for the slots of one tile and BLOCK_N columns. w [E, H, I], BY_COLUMN [E, I, H]."""
    T: tl.constexpr = rows_ptr.dtype.element_ty
    m_tile, n_tile = _tile_coordinates(tl.program_id(0), tiles, tl.cdiv(H, BLOCK_N), GROUP_M)
    expert = tl.load(tiles_ptr + m_tile)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + tiles + m_tile)
    end = tl.load(tiles_ptr + 2 * tiles + m_tile)
    slots = first + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if not COPY_ENGINE:
        inner_ptrs = inner + tl.minimum(slots, end - 1).to(tl.int64)[:, None] * I + k[None, :]
        if BY_COLUMN:
            w_ptrs = w + (expert.to(tl.int64) * I + k[:, None]) * H + n[None, :]
        else:
            w_ptrs = w + ((expert.to(tl.int64) * H + tl.minimum(n, H - 1)) * I)[None, :] + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, I, BLOCK_K):
        if COPY_ENGINE:
            a = inner.load([first, start])
            # Past the last column it gives zeros. BY_COLUMN only where BLOCK_K divides I, or it would read of the next expert.
            row = expert * I + start if BY_COLUMN else expert * H + n_tile * BLOCK_N
            b = w.load([row, n_tile * BLOCK_N]) if BY_COLUMN else w.load([row, start]).T
        else:
            a = _read(inner_ptrs + start, k[None, :] < I - start, EVEN_K)
            if BY_COLUMN:
                inside = n[None, :] < H
                inside = inside if EVEN_K else inside & (k[:, None] < I - start)
                b = tl.load(w_ptrs, mask=inside, other=0.0)
                w_ptrs += BLOCK_K * tl.cast(H, tl.int64)
            else:
                b = _read(w_ptrs + start, k[:, None] < I - start, EVEN_K)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    # Rows go to where the sum over choices reads them, those of a token side by side.
    pair = tl.load(order_ptr + tl.minimum(slots, end - 1)).to(tl.int64)
    tl.store(rows_ptr + pair[:, None] * H + n[None, :], acc.to(T), mask=(slots[:, None] < end) & (n[None, :] < H))


@triton.jit
def _weighted(row, share, ROUND: tl.constexpr, T: tl.constexpr):
    found = row.to(tl.float32) * share.to(tl.float32)
    return found.to(T).to(tl.float32) if ROUND else found


@triton.jit
def _sum_choices(
    rows_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    out_stride,
    H,
    E: tl.constexpr,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[token] = sum over its choices, in order, of weight times row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        pair = token * K + choice
        expert = tl.load(ids_ptr + pair)
        known = (expert >= 0) & (expert < E)
        share = tl.load(weights_ptr + pair)
        row = tl.load(rows_ptr + pair * H + columns, mask=columns < tl.where(known, H, 0), other=0.0)
        total += tl.where(known, _weighted(row, share, ROUND, rows_ptr.dtype.element_ty), 0.0)
    tl.store(out_ptr + token * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


# --- One or two tokens: no expert is likely to be met twice, so nothing is sorted, and each choice reads its own weights.


@triton.jit
def _first_of_choice(
    x_ptr,
    ids_ptr,
    w_ptr,
    inner_ptr,
    x_stride,
    H,
    I,
    alpha,
    limit,
    E: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    T: tl.constexpr = inner_ptr.dtype.element_ty
    GATED: tl.constexpr = ACTIVATION != "relu2"
    PARTS: tl.constexpr = 2 if GATED else 1
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    if (expert < 0) | (expert >= E):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + pair // K * x_stride
    if BY_COLUMN:
        k = tl.arange(0, BLOCK_K)[:, None]
        w_ptrs = w_ptr + (expert * H + k) * 2 * I + n[None, :]
        gates = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        ups = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        for start in range(0, H, BLOCK_K):
            inside = k < H - start
            x = tl.load(x_ptrs + start + k, mask=inside, other=0.0).to(tl.float32)
            inside = inside & (n[None, :] < I)
            gates += x * tl.load(w_ptrs, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            ups += x * tl.load(w_ptrs + I, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            w_ptrs += BLOCK_K * 2 * tl.cast(I, tl.int64)
        gate, up = tl.sum(gates, axis=0), tl.sum(ups, axis=0)
    else:
        k = tl.arange(0, BLOCK_K)[None, :]
        gate_ptrs = w_ptr + (expert * PARTS * I + tl.minimum(n, I - 1)[:, None]) * H + k
        up_ptrs = gate_ptrs + tl.cast(I, tl.int64) * H
        gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in range(0, H, BLOCK_K):
            inside = k < H - start
            x = tl.load(x_ptrs + start + k, mask=inside, other=0.0).to(tl.float32)
            w_gate = tl.load(gate_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_first")
            gates += x * w_gate.to(tl.float32)
            if GATED:
                w_up = tl.load(up_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_first")
                ups += x * w_up.to(tl.float32)
        gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    tl.store(inner_ptr + pair * I + n, _activation(gate, up, alpha, limit, ACTIVATION, T), mask=n < I)


@triton.jit
def _second_of_token(
    inner_ptr,
    ids_ptr,
    weights_ptr,
    w_ptr,
    out_ptr,
    out_stride,
    H,
    I,
    E: tl.constexpr,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """All choices of a token at once, BLOCK_N columns of each: as many rows of weights, read side by side.

    Without weights, tokens have one choice, and those of no expert are left as they are.
    """
    T: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    if weights_ptr is None:  # noqa: SIM102
        if tl.load(ids_ptr + token) < 0:
            return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if BY_COLUMN:
        lanes = tl.arange(0, CHOICES * BLOCK_K)
        choice, k = (lanes // BLOCK_K)[:, None], (lanes % BLOCK_K)[:, None]
        n = columns[None, :]
    else:
        lanes = tl.arange(0, CHOICES * BLOCK_N)
        choice = (lanes // BLOCK_N)[:, None]
        n = tl.program_id(1) * BLOCK_N + (lanes % BLOCK_N)[:, None]
        k = tl.arange(0, BLOCK_K)[None, :]
    pair = token * K + choice
    expert = tl.load(ids_ptr + pair, mask=choice < K, other=-1)
    known = (expert >= 0) & (expert < E)
    if BY_COLUMN:
        w_ptrs = w_ptr + (expert * I + k) * H + n
        step = BLOCK_K * tl.cast(H, tl.int64)
        acc = tl.zeros([CHOICES * BLOCK_K, BLOCK_N], tl.float32)
    else:
        w_ptrs = w_ptr + (expert * H + n) * I + k
        step = BLOCK_K
        acc = tl.zeros([CHOICES * BLOCK_N, BLOCK_K], tl.float32)
    inner_ptrs = inner_ptr + pair * I + k
    for start in range(0, I, BLOCK_K):
        inside = known & (k < I - start)
        w = tl.load(w_ptrs, mask=inside & (n < H), other=0.0, eviction_policy="evict_first").to(tl.float32)
        acc += w * tl.load(inner_ptrs + start, mask=inside, other=0.0).to(tl.float32)
        w_ptrs += step
    if BY_COLUMN:
        found = tl.sum(tl.reshape(acc, (CHOICES, BLOCK_K, BLOCK_N)), axis=1)
    else:
        found = tl.reshape(tl.sum(acc, axis=1), (CHOICES, BLOCK_N))
    if weights_ptr is None:
        total = tl.sum(found, axis=0)
    else:
        choices = tl.arange(0, CHOICES)
        pairs = token * K + choices
        experts = tl.load(ids_ptr + pairs, mask=choices < K, other=-1)[:, None]
        chosen = (experts >= 0) & (experts < E)
        share = tl.load(weights_ptr + pairs, mask=choices < K, other=0.0)[:, None]
        total = tl.sum(tl.where(chosen, _weighted(found.to(T), share, ROUND, T), 0.0), axis=0)
    tl.store(out_ptr + token * out_stride + columns, total.to(T), mask=columns < H)


# Launch configurations by rows of a tile, then by VARIANT: BLOCK_N, BLOCK_K, num_warps, num_stages.
# A program of the first product has BLOCK_N columns of gate and as many of up, or twice as many without a gate.
_FIRST = {
    16: ((32, 256, 4, 3), (32, 128, 4, 4), (64, 128, 4, 4)),
    32: ((32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3)),
    64: ((64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4)),
    128: ((128, 64, 8, 4), (64, 64, 4, 3), (128, 64, 8, 3)),
}
_SECOND = {
    16: ((64, 128, 4, 4), (32, 256, 4, 3), (128, 64, 4, 5)),
    32: ((64, 128, 4, 4), (128, 64, 4, 5), (64, 64, 4, 6)),
    64: ((128, 64, 4, 4), (256, 64, 4, 4), (256, 64, 8, 4)),
    128: ((256, 64, 8, 4), (128, 64, 4, 3), (128, 128, 8, 3)),
}

# The same for choices that are worked off one by one, without stages. By column BLOCK_K holds for one choice.
_FIRST_OF_CHOICE = ((2, 1024, 4), (4, 512, 4), (8, 256, 4))
_SECOND_OF_TOKEN = ((4, 256, 4), (2, 256, 4), (2, 512, 4))
_FIRST_BY_COLUMN = ((32, 128, 8), (16, 256, 8), (64, 64, 4))
_SECOND_BY_COLUMN = ((16, 512, 8), (32, 256, 8), (32, 128, 4))


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _default_rows(tokens: int, pairs: int, experts: int) -> int:
    """Rows of a tile by what an expert gets on average; 1: choices are worked off one by one."""
    if tokens <= 2:
        return 1
    rows = pairs / experts
    return 16 if rows <= 8 else 32 if rows <= 20 else 64 if rows <= 48 else 128


def _copy_engine_reads(tensor: torch.Tensor, columns: int) -> bool:
    return tensor.data_ptr() % 16 == 0 and columns * tensor.element_size() % 16 == 0


def _route(ids: torch.Tensor, experts: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Order of the slots, table of tiles, and how many tiles there are at most, which no host has to read back."""
    pairs = ids.numel()
    tiles = (pairs + min(experts, pairs) * (tile_rows - 1)) // tile_rows
    bins = max(32, 1 << (experts - 1).bit_length())  # at least one a lane of a warp
    parts = min(MOST_PARTS, _cdiv(pairs, PLACED))
    share = _cdiv(_cdiv(pairs, parts), PLACED) * PLACED
    parts = _cdiv(pairs, share)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    table = torch.empty(3 * tiles, dtype=torch.int32, device=ids.device)
    counts = order
    if pairs > FEW_PAIRS:
        counts = torch.empty(parts * bins, dtype=torch.int32, device=ids.device)
        _count_ids[(parts,)](ids, counts, pairs, share, experts, bins, PLACED)
    _place_ids[(parts,)](
        ids, counts, order, table, pairs, share, parts, tiles, _cdiv(tiles, parts), experts, bins, pairs > FEW_PAIRS,
        COUNTED, PLACED, tile_rows, max(1, min(16, 4096 // bins)),
    )  # fmt: skip
    return order, table, tiles


def _grouped(x, order, table, tiles, first_w, second_w, rows, choices, kind, alpha, limit, block_m, variant):
    """Launch both products: rows[pair] for the pairs in the table of tiles."""
    by_column, gated = kind == "silu", kind != "relu2"
    H, pairs = rows.shape[1], rows.shape[0]
    E, I = second_w.shape[0], second_w.shape[1] if by_column else second_w.shape[2]
    fp32 = x.dtype == torch.float32
    inner = torch.empty((pairs, I), dtype=x.dtype, device=x.device)

    block_n, block_k, warps, stages = (32, 32, 4, 3) if fp32 else _FIRST[block_m][variant]
    block_n = block_n if gated else 2 * block_n
    parts = 2 if gated else 1
    columns = 2 * I if by_column else H
    copied = block_m >= 64 and not fp32 and _copy_engine_reads(first_w, columns) and not (by_column and H % block_k)
    box = (
        ([E * H, 2 * I], [2 * I, 1], [block_k, block_n])
        if by_column
        else ([E * parts * I, H], [H, 1], [block_n, block_k])
    )
    _first_product[(tiles * _cdiv(I, block_n),)](
        x, TensorDescriptor(first_w, *box) if copied else first_w, order, table, inner, x.stride(0), H, I, alpha, limit,
        tiles, choices, kind, by_column, block_m, block_n, block_k, H % block_k == 0, copied, GROUP_M,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip

    block_n, block_k, warps, stages = (64, 32, 4, 3) if fp32 else _SECOND[block_m][variant]
    copied = (
        block_m >= 64 and not fp32 and _copy_engine_reads(inner, I) and _copy_engine_reads(second_w, second_w.shape[2])
    )
    copied = copied and not (by_column and I % block_k)
    box = ([E * I, H], [H, 1], [block_k, block_n]) if by_column else ([E * H, I], [I, 1], [block_n, block_k])
    _second_product[(tiles * _cdiv(H, block_n),)](
        TensorDescriptor(inner, list(inner.shape), [I, 1], [block_m, block_k]) if copied else inner,
        TensorDescriptor(second_w, *box) if copied else second_w,
        order, table, rows, H, I, tiles, by_column, block_m, block_n, block_k, I % block_k == 0, copied, GROUP_M,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _one_by_one(x, ids, weights, first_w, second_w, out, kind, alpha, limit, variant):
    """Launch a program for each choice and block of columns, without a table."""
    by_column, gated = kind == "silu", kind != "relu2"
    M, H = out.shape
    K = ids.shape[1]
    E, I = second_w.shape[0], second_w.shape[1] if by_column else second_w.shape[2]
    inner = torch.empty((M * K, I), dtype=x.dtype, device=x.device)
    block_n, block_k, warps = (_FIRST_BY_COLUMN if by_column else _FIRST_OF_CHOICE)[variant]
    block_n = block_n if gated else 2 * block_n
    _first_of_choice[(M * K, _cdiv(I, block_n))](
        x,
        ids,
        first_w,
        inner,
        x.stride(0),
        H,
        I,
        alpha,
        limit,
        E,
        K,
        kind,
        by_column,
        block_n,
        block_k,
        num_warps=warps,
    )
    block_n, block_k, warps = (_SECOND_BY_COLUMN if by_column else _SECOND_OF_TOKEN)[variant]
    choices = 1 << (K - 1).bit_length()
    round_product = weights is not None and x.dtype != torch.float32 and weights.dtype == x.dtype
    _second_of_token[(M, _cdiv(H, block_n))](
        inner, ids, weights, second_w, out, out.stride(0), H, I, E, K, round_product, by_column, choices, block_n, block_k,
        num_warps=warps,
    )  # fmt: skip


def _experts(x, ids, weights, first_w, second_w, out, kind, alpha, limit, BLOCK_M, VARIANT):
    """Launch the kernels of experts with ids and weights of each token."""
    M, H = out.shape
    if M == 0:
        return
    K, E = ids.shape[1], second_w.shape[0]
    block_m = BLOCK_M or _default_rows(M, M * K, E)
    if block_m == 1:
        _one_by_one(x, ids, weights, first_w, second_w, out, kind, alpha, limit, VARIANT)
        return
    fp32 = x.dtype == torch.float32
    block_m = min(block_m, 64) if fp32 else block_m
    order, table, tiles = _route(ids, E, block_m)
    rows = torch.empty((M * K, H), dtype=x.dtype, device=x.device)
    _grouped(x, order, table, tiles, first_w, second_w, rows, K, kind, alpha, limit, block_m, VARIANT)
    block = min(1024, max(32, 1 << (H - 1).bit_length()))
    round_product = not fp32 and weights.dtype == x.dtype
    _sum_choices[(M, _cdiv(H, block))](
        rows, ids, weights, out, out.stride(0), H, E, K, round_product, block, num_warps=max(1, block // 256)
    )


def run_gelu(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    VARIANT=0,
):
    """out[t] = sum over choices of weights[t, k] * (gelu_tanh(x gate^T) * (x up^T)) down^T of expert ids[t, k].

    Shapes: x and out [M, H], ids [M, K] int64, weights [M, K], gate_up [E, 2 I, H] with gate rows first, down [E, H, I];
    T bfloat16 or float32 (IEEE products, without tensor cores); unit last stride, any row stride of x and out.
    Roundings are those of the Definition; ids outside of 0..E-1 contribute nothing. Sums are in a fixed order.
    Mapping: pairs of token and choice are sorted by expert on the device; each expert's rows are cut into tiles of BLOCK_M,
    listed in a table of the size of a bound, so that nothing is read back. The first product gathers rows of x, the second
    writes each pair's row to its place, and a last kernel adds the K rows of a token. With BLOCK_M = 1 choices are worked
    off one by one instead, which reads an expert once for each of its pairs.
    BLOCK_M = None: by the rows that an expert gets on average. VARIANT: a row of the tables of launch configurations.
    """
    _experts(x, ids, weights, gate_up, down, out, "gelu", 0.0, 0.0, BLOCK_M, VARIANT)


def run_relu2(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    VARIANT=0,
):
    """As `run_gelu`, for up [E, I, H] and no gate: max(x up^T, 0) squared between the products."""
    _experts(x, ids, weights, up, down, out, "relu2", 0.0, 0.0, BLOCK_M, VARIANT)


def run_oai_halves(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    alpha: float,
    limit: float,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    VARIANT=0,
):
    """As `run_gelu`, with (up + 1) * gate * sigmoid(alpha * gate), gate cut at limit from above, up on both sides."""
    _experts(x, ids, weights, gate_up, down, out, "oai", alpha, limit, BLOCK_M, VARIANT)


def run_dense(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, out: torch.Tensor, *, BLOCK_M=None, VARIANT=0
):
    """out[e, s] = (silu(x gate) * (x up)) down of expert e; rows of x that are all zero give zeros and cost no product.

    Shapes: x and out [E, S, H], gate_up [E, H, 2 I] with gate columns first, down [E, I, H]; T bfloat16 or float32; contiguous.
    Mapping: one kernel reads x and lists the rows that are not zero; then as `run_gelu` with one choice a row and no sum.
    BLOCK_M = None: as if one expert had been chosen for each token.
    """
    E, S, H = x.shape
    if E * S == 0:
        return
    rows, found = x.view(E * S, H), out.view(E * S, H)
    ids = torch.empty((E * S, 1), dtype=torch.int64, device=x.device)
    block = min(2048, max(32, 1 << (H - 1).bit_length()))
    _used_rows[(E * S,)](rows, ids, found, S, H, block, num_warps=max(1, min(8, block // 256)))
    block_m = BLOCK_M or _default_rows(S, S, E)
    if block_m == 1:
        _one_by_one(rows, ids, None, gate_up, down, found, "silu", 0.0, 0.0, VARIANT)
        return
    block_m = min(block_m, 64) if x.dtype == torch.float32 else block_m
    order, table, tiles = _route(ids, E, block_m)
    _grouped(rows, order, table, tiles, gate_up, down, found, 1, "silu", 0.0, 0.0, block_m, VARIANT)

"""Attention with a sink and a mask of numbers, cuTile: only tiles in which some key is seen are read, whatever made the mask.

The mask is added to the scores. The least number of its dtype, or -inf, hides a key. The sink is one score more in each row's
sum, and comes in at the end. A prompt is computed in blocks of queries. A single position has its keys dealt out among blocks.

The running softmax is in base 2. Its largest score starts at the least finite number, so that no difference of two is NaN.
"""

from typing import Annotated, NamedTuple

import cuda.tile as ct
import torch
from _lib.cutile.needed_tiles import find_bounds

# The head size is a compile-time constant: tiles that hold whole heads need no mask along them.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Masks = Annotated[ct.Array, ct.ArrayAnnotation(index_dtype=ct.int64)]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
LEAST_SCORE = -3.4028234663852886e38
MOST_SINK = 2.0e38
"""Sinks are kept below it, so that one in base 2 is finite."""
MOST_SPLITS = 64
AT_ONCE = 16
"""Tiles of which a block of decoding reads the flags at once, to find those that it needs."""
FEW_BLOCKS = 4 * 132
"""Fewer than this leave multiprocessors without work, at one block each: smaller blocks are chosen."""


@ct.function
def _add_keys(
    q, k, v, mask, state, row, scale, least, batch, plane, head, block,
    MASKED: Flag, TILE_S: Int, TILE_N: Int, TILE_D: Int,
):  # fmt: skip
    """A step of the running softmax: a block of keys. MASKED: some number of the mask is not 0."""
    acc, sums, largest = state
    index, shape = (batch, head, 0, block), (1, 1, TILE_D, TILE_N)
    keys = ct.load(k, index, shape, order=(0, 1, 3, 2), padding_mode=ZERO).reshape((TILE_D, TILE_N))
    scores = ct.mma(q, keys, ct.zeros((TILE_S, TILE_N), dtype=ct.float32)) * scale
    if MASKED:
        numbers, inside = _numbers(mask, plane, row, block * TILE_N, TILE_S, TILE_N)
        scores = ct.where(inside & (numbers > least), scores + numbers * LOG2_E, -INFINITY)
    grown = ct.maximum(largest, ct.max(scores, axis=1, keepdims=True))
    weights = ct.exp2(scores - grown, flush_to_zero=True)
    shrink = ct.exp2(largest - grown, flush_to_zero=True)
    sums = sums * shrink + ct.sum(weights, axis=1, keepdims=True)
    values = ct.load(v, (batch, head, block, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO).reshape((TILE_N, TILE_D))
    return ct.mma(weights.astype(v.dtype), values, acc * shrink), sums, grown


@ct.function
def _numbers(mask, plane, row, key, TILE_S: Int, TILE_N: Int):
    """Numbers of TILE_S queries and TILE_N keys of one mask in float32, and if these are there."""
    rows = row + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    keys = key + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = (rows < mask.shape[2]) & (keys < mask.shape[3])
    found = ct.gather(mask, (plane, 0, rows, keys), mask=inside, padding_value=0, check_bounds=False)
    return found.astype(ct.float32), inside


@ct.function
def _with_sink(acc, sums, largest, sink):
    """Return acc / sums, relative to `largest`, where the sums take in a sink as well; zeros without any weight."""
    sink = ct.minimum(sink.astype(ct.float32), MOST_SINK) * LOG2_E
    top = ct.maximum(largest, sink)
    share = ct.exp2(largest - top, flush_to_zero=True)
    total = sums * share + ct.exp2(sink - top, flush_to_zero=True)
    return acc * (share / ct.where(total > 0, total, 1.0))


@ct.kernel(num_worker_warps=4)
def _sort_tiles(mask: Masks, kinds: ct.Array, least: float, TILE_S: Int, TILE_N: Int):
    """Note the kind of a tile of the mask: 2 if all of its numbers are 0, 1 if some key is seen, else 0."""
    row, tile = ct.bid(0) // kinds.shape[2], ct.bid(0) % kinds.shape[2]
    plane, block = row // kinds.shape[1], row % kinds.shape[1]
    numbers, inside = _numbers(mask, plane, block * TILE_S, tile * TILE_N, TILE_S, TILE_N)
    some = ct.max(ct.where(inside & (numbers > least), 1, 0))
    # Rows behind the last query do not count; keys behind the last one are never seen.
    rows = block * TILE_S + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    every = ct.min(ct.where((inside & (numbers == 0)) | (rows >= mask.shape[2]), 1, 0))
    ct.scatter(kinds, (plane, block, tile), some + every, check_bounds=False)


@ct.kernel
def _prefill(
    q: Heads,
    k: Heads,
    v: Heads,
    sinks: ct.Array,
    mask: Masks,
    bounds: ct.Array,
    out: Heads,
    scale: float,
    least: float,
    GROUP: Int,
    TILE_S: Int,
    TILE_N: Int,
    TILE_D: Int,
):
    """A block has TILE_S positions of a query head."""
    turn = ct.bid(0) % (q.shape[0] * q.shape[1])
    batch, head = turn // q.shape[1], turn % q.shape[1]
    kv_head = head // GROUP
    plane = ct.minimum(batch, mask.shape[0] - 1)  # one mask for all sequences, or one for each
    # The last positions mostly see the most keys: they start first, so that the short ones fill the gaps at the end.
    tile = ct.cdiv(q.shape[2], TILE_S) - 1 - ct.bid(0) // (q.shape[0] * q.shape[1])
    row = tile * TILE_S
    low = ct.gather(bounds, (plane, tile, 0), check_bounds=False).item()
    high = ct.gather(bounds, (plane, tile, 1), check_bounds=False).item()
    whole = ct.gather(bounds, (plane, tile, 2), check_bounds=False).item()
    edge = ct.gather(bounds, (plane, tile, 3), check_bounds=False).item()
    shape = (1, 1, TILE_S, TILE_D)
    queries = ct.load(q, (batch, head, tile, 0), shape, padding_mode=ZERO).reshape((TILE_S, TILE_D))
    acc = ct.zeros((TILE_S, TILE_D), dtype=ct.float32)
    sums = ct.zeros((TILE_S, 1), dtype=ct.float32)
    state = acc, sums, ct.full((TILE_S, 1), LEAST_SCORE, dtype=ct.float32)
    for block in range(whole, edge):
        state = _add_keys(
            queries, k, v, mask, state, row, scale, least, batch, plane, kv_head, block,
            False, TILE_S, TILE_N, TILE_D,
        )  # fmt: skip
    for number in range(low, high - (edge - whole)):
        block = ct.where(number < whole, number, number + edge - whole).item()
        state = _add_keys(
            queries, k, v, mask, state, row, scale, least, batch, plane, kv_head, block,
            True, TILE_S, TILE_N, TILE_D,
        )  # fmt: skip
    acc, sums, largest = state
    found = _with_sink(acc, sums, largest, ct.gather(sinks, head, check_bounds=False))
    ct.store(out, (batch, head, tile, 0), found.astype(out.dtype).reshape(shape))


@ct.kernel(num_worker_warps=4, occupancy=2)
def _decode(
    q: Heads,
    k: Heads,
    v: Heads,
    sinks: ct.Array,
    mask: Masks,
    out: Heads,
    statistics: ct.Array,
    scale: float,
    least: float,
    SPLITS: Int,
    GROUP: Int,
    TILE_G: Int,
    TILE_N: Int,
    TILE_D: Int,
):
    """A block has all query heads of a key head and each SPLITS-th tile of its keys; with one, out is [B, Hkv, GROUP, D].

    Else out is [B * Hkv, SPLITS, GROUP, D] in float32, not yet divided, and statistics [B * Hkv, SPLITS, 2, GROUP].
    """
    batch, head, split = ct.bid(0) // k.shape[1], ct.bid(0) % k.shape[1], ct.bid(1)
    plane = ct.minimum(batch, mask.shape[0] - 1)  # one mask for all sequences, or one for each
    length = k.shape[2]
    tiles = ct.cdiv(ct.cdiv(length, TILE_N), SPLITS)
    # Of the block's tiles (split, split + SPLITS, ...), the first and the last with a key that is seen.
    places = ct.arange(TILE_N, dtype=ct.int32)
    firsts = ct.full((AT_ONCE, TILE_N), 1 << 30, dtype=ct.int32)
    lasts = ct.zeros((AT_ONCE, TILE_N), dtype=ct.int32)
    for base in range(0, tiles, AT_ONCE):
        own = (base + ct.arange(AT_ONCE, dtype=ct.int32))[:, None]
        keys = (split + own * SPLITS) * TILE_N + places[None, :]
        found = ct.gather(mask, (plane, 0, 0, keys), mask=keys < length, padding_value=0, check_bounds=False)
        seen = (keys < length) & (found.astype(ct.float32) > least)
        firsts = ct.minimum(firsts, ct.where(seen, own, 1 << 30))
        lasts = ct.maximum(lasts, ct.where(seen, own + 1, 0))
    first, last = ct.min(firsts).item(), ct.max(lasts).item()
    members = ct.arange(TILE_G, dtype=ct.int32)
    # Each key is read once for all columns: the query heads that share it, filled up with zeros. Keys lie along rows, of which
    # the instructions have 64, and heads along columns, of which they have as few as 8.
    shape = (1, 1, TILE_D, TILE_G)
    queries = ct.load(q, (batch, head, 0, 0), shape, order=(0, 1, 3, 2), padding_mode=ZERO).reshape((TILE_D, TILE_G))
    largest = ct.full((1, TILE_G), LEAST_SCORE, dtype=ct.float32)
    sums = ct.zeros((TILE_N, TILE_G), dtype=ct.float32)
    acc = ct.zeros((TILE_D, TILE_G), dtype=ct.float32)
    for tile in range(first, last):
        block = split + tile * SPLITS
        rows = block * TILE_N + places
        found = ct.gather(mask, (plane, 0, 0, rows), mask=rows < length, padding_value=0, check_bounds=False)
        numbers = found.astype(ct.float32)
        seen = (rows < length) & (numbers > least)
        keys = ct.load(k, (batch, head, block, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO).reshape((TILE_N, TILE_D))
        scores = ct.mma(keys, queries, ct.zeros((TILE_N, TILE_G), dtype=ct.float32)) * scale
        scores = ct.where(seen[:, None], scores + numbers[:, None] * LOG2_E, -INFINITY)
        grown = ct.maximum(largest, ct.max(scores, axis=0, keepdims=True))
        weights = ct.exp2(scores - grown, flush_to_zero=True)
        shrink = ct.exp2(largest - grown, flush_to_zero=True)
        sums = sums * shrink + weights
        index = (batch, head, 0, block)
        values = ct.load(v, index, (1, 1, TILE_D, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO)
        acc = ct.mma(values.reshape((TILE_D, TILE_N)), weights.astype(v.dtype), acc * shrink)
        largest = grown
    total = ct.sum(sums, axis=0, keepdims=True)
    if SPLITS == 1:
        own = head * GROUP + ct.minimum(members, GROUP - 1)
        sink = ct.gather(sinks, own, check_bounds=False)[None, :]
        found = ct.transpose(_with_sink(acc, total, largest, sink)).astype(out.dtype)
        ct.store(out, (batch, head, 0, 0), found.reshape((1, 1, TILE_G, TILE_D)))
    else:
        ct.store(out, (ct.bid(0), split, 0, 0), ct.transpose(acc).reshape((1, 1, TILE_G, TILE_D)))
        inside = members < GROUP
        place = (ct.bid(0), split, 0, members)
        ct.scatter(statistics, place, largest.reshape((TILE_G,)), mask=inside, check_bounds=False)
        place = (ct.bid(0), split, 1, members)
        ct.scatter(statistics, place, total.reshape((TILE_G,)), mask=inside, check_bounds=False)


@ct.kernel(num_worker_warps=4, occupancy=4)
def _join(parts: Heads, statistics: ct.Array, sinks: ct.Array, out: Heads, SPLITS: Int, GROUP: Int, TILE_D: Int):
    """A block has a query head: the sum of its parts, each at the scale of the largest score among them."""
    row, member = ct.bid(0) // GROUP, ct.bid(0) % GROUP
    batch, head = row // out.shape[1], row % out.shape[1]
    spans = ct.arange(SPLITS, dtype=ct.int32)
    largest = ct.gather(statistics, (row, spans, 0, member), check_bounds=False)
    sums = ct.gather(statistics, (row, spans, 1, member), check_bounds=False)
    shape = (1, SPLITS, 1, TILE_D)
    accs = ct.load(parts, (row, 0, member, 0), shape, padding_mode=ZERO).reshape((SPLITS, TILE_D))
    top = ct.max(largest, axis=0)
    shares = ct.exp2(largest - top, flush_to_zero=True)
    sink = ct.gather(sinks, head * GROUP + member, check_bounds=False)
    found = _with_sink(ct.sum(accs * shares[:, None], axis=0), ct.sum(sums * shares, axis=0), top, sink)
    ct.store(out, (batch, head, member, 0), found.astype(out.dtype).reshape((1, 1, 1, TILE_D)))


class Config(NamedTuple):
    """Positions of a block; keys of a step; warps; blocks a multiprocessor."""

    tile_s: int
    tile_n: int
    warps: int
    occupancy: int


CONFIGS = {
    "s128_n128": Config(128, 128, 8, 1),
    "s128_n64": Config(128, 64, 8, 2),
    "s64_n128": Config(64, 128, 4, 2),
    "s64_n64": Config(64, 64, 4, 3),
    "s64_n64_most": Config(64, 64, 4, 4),
}
_PREFILL = {
    config[2:]: _prefill.replace_hints(num_worker_warps=config.warps, occupancy=config.occupancy)
    for config in CONFIGS.values()
}


def _one_if_shared(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask, with one entry if all sequences share it."""
    return mask if mask.stride(0) else mask[:1]


def run_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    CONFIG: str | None = None,
) -> None:
    """out = T(w v), w = softmax of scale * q k^T + mask and the sink, without the sink's own weight.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, L, D], unit last strides, any others; sinks [Hq]; mask [B, 1, S, L] T, any
    strides; T in bfloat16, float16. Scores, softmax and sums in fp32, weights rounded to T for the second product.
    Rows that begin at multiples of 16 bytes are read and written by TMA, others element by element (correct, slow).
    Mapping: a first kernel reads the mask once and notes for each tile of it if all numbers are 0, or some key is seen, a second
    one which tiles a block of queries needs. Then a block owns some queries of a head and streams the tiles of keys that one of
    them sees. It reads the mask again for those that are not plain, and for all behind a gap. A mask that all sequences share
    (stride 0) is sorted once.
    CONFIG names an entry of CONFIGS. None: 128 positions of a head, or 64 if blocks are few or heads are large.
    """
    B, Hq, S, D = q.shape
    L = k.shape[2]
    if q.numel() == 0:
        return
    is_large = D <= 128 and B * Hq * -(-S // 128) >= FEW_BLOCKS
    config = CONFIGS[CONFIG or ("s128_n64" if is_large else "s64_n64")]
    masks, least = _one_if_shared(mask), torch.finfo(mask.dtype).min
    blocks, tiles = -(-S // config.tile_s), -(-L // config.tile_n)
    kinds = torch.empty((masks.shape[0], blocks, tiles), dtype=torch.int32, device=q.device)
    bounds = torch.empty((masks.shape[0], blocks, 4), dtype=torch.int32, device=q.device)
    stream = torch.cuda.current_stream()
    ct.launch(stream, (kinds.numel(), 1, 1), _sort_tiles, (masks, kinds, least, config.tile_s, config.tile_n))
    ct.launch(stream, (masks.shape[0] * blocks, 1, 1), find_bounds, (kinds, bounds, 1 << (tiles - 1).bit_length()))
    args = (
        q, k, v, sinks, masks, bounds, out, scale * LOG2_E, least, Hq // k.shape[1],
        config.tile_s, config.tile_n, max(16, 1 << (D - 1).bit_length()),
    )  # fmt: skip
    ct.launch(stream, (B * Hq * blocks, 1, 1), _PREFILL[config[2:]], args)


def _splits(programs: int, tiles: int, wanted: int) -> int:
    """A power of two, so that a growing cache compiles few kernels: up to `wanted` blocks, with a tile each at least."""
    most = min(tiles, max(1, wanted // programs), MOST_SPLITS)
    return 1 << (most.bit_length() - 1)


def run_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCKS: int = 256,
    TILE_N: int = 64,
) -> None:
    """out = T(w v), w = softmax of scale * q k^T + mask and the sink, without the sink's own weight.

    Shapes: q and out [B, Hq, 1, D], k and v [B, Hkv, L, D], unit last strides, any others; sinks [Hq]; mask [B, 1, 1, L] T, any
    strides; T in bfloat16, float16. Scores, softmax and sums in fp32, weights rounded to T for the second product.
    Rows that begin at multiples of 16 bytes are read by TMA, others element by element (correct, slow).
    Mapping: a block owns a key head, all query heads that share it, and each n-th tile of TILE_N keys, so that the keys that are
    seen spread evenly over blocks wherever they lie; there are BLOCKS of them, or fewer. Parts are kept in fp32 and joined by
    one block a query head.
    """
    B, Hq, _, D = q.shape
    Hkv, L = k.shape[1], k.shape[2]
    if q.numel() == 0:
        return
    group = Hq // Hkv
    tile_n = TILE_N if D <= 128 else 64
    splits = _splits(B * Hkv, -(-L // tile_n), BLOCKS)
    # Values lie along rows in the second product, and its fast instructions have 64.
    tile_d = max(64, 1 << (D - 1).bit_length())
    # Splitting the heads and dropping the position keeps any strides.
    q, out = q.view(B, Hkv, group, D), out.view(B, Hkv, group, D)
    stream = torch.cuda.current_stream()
    parts, statistics = out, out
    if splits > 1:
        rows = B * Hq * splits
        # Sums of values, then the largest score and the sum of weights of each head and split.
        workspace = torch.empty(rows * (D + 2), dtype=torch.float32, device=q.device)
        parts = workspace[: rows * D].view(B * Hkv, splits, group, D)
        statistics = workspace[rows * D :].view(B * Hkv, splits, 2, group)
    args = (
        q, k, v, sinks, _one_if_shared(mask), parts, statistics, scale * LOG2_E, torch.finfo(mask.dtype).min,
        splits, group, max(8, 1 << (group - 1).bit_length()), tile_n, tile_d,
    )  # fmt: skip
    ct.launch(stream, (B * Hkv, splits, 1), _decode, args)
    if splits > 1:
        ct.launch(stream, (B * Hq, 1, 1), _join, (parts, statistics, sinks, out, splits, group, tile_d))

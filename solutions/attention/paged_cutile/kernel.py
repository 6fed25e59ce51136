"""Attention over pages of a common cache, cuTile: positions are split among blocks, and a second kernel joins the parts.

The running softmax is in base 2. Its largest score starts at the least finite number, so that no difference of two is NaN.
"""

from typing import Annotated

import cuda.tile as ct
import torch

# The head size is a compile-time constant: tiles that hold whole heads need no mask along them.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
LEAST_SCORE = -3.4028234663852886e38
MOST_SPLITS = 64
FEW_POSITIONS = 512
"""Up to so many are not split: a second launch should take longer than their few steps. Not measured."""


@ct.function
def _slots(table, batch, first, length, P: Int, WHOLE: Flag, TILE_N: Int):
    """The pages of a step's positions, or its one page. Positions past the last have that one's: no other entry is a page."""
    if WHOLE:
        return ct.gather(table, (batch, ct.minimum(first, length - 1) // P), check_bounds=False)
    places = ct.minimum(first + ct.arange(TILE_N, dtype=ct.int32), length - 1)
    return ct.gather(table, (batch, places // P), check_bounds=False)


@ct.function
def _rows(cache, slots, head, first, length, P: Int, WHOLE: Flag, EVEN: Flag, TILE_N: Int, TILE_D: Int):
    """Keys or values [TILE_N, TILE_D] of a step. WHOLE: a part of one page; else past the last position this one again."""
    if WHOLE:
        index = (slots.item(), first % P // TILE_N, head, 0)
        return ct.load(cache, index, (1, TILE_N, 1, TILE_D), padding_mode=ZERO).reshape((TILE_N, TILE_D))
    within = ct.minimum(first + ct.arange(TILE_N, dtype=ct.int32), length - 1) % P
    cols = ct.arange(TILE_D, dtype=ct.int32)[None, :]
    place = (slots[:, None], within[:, None], head, cols)
    if EVEN:
        return ct.gather(cache, place, check_bounds=False)
    return ct.gather(cache, place, mask=cols < cache.shape[3], check_bounds=False)


@ct.function
def _add_keys(
    queries, k, v, slots, state, scale, head, first, length,
    LAST: Flag, P: Int, WHOLE: Flag, EVEN: Flag, TILE_N: Int, TILE_D: Int,
):  # fmt: skip
    """A step of the running softmax. LAST: behind the last position a page has anything, NaN too."""
    acc, sums, largest = state
    keys = _rows(k, slots, head, first, length, P, WHOLE, EVEN, TILE_N, TILE_D)
    scores = ct.mma(keys, queries, ct.zeros((TILE_N, queries.shape[1]), dtype=ct.float32)) * scale
    values = _rows(v, slots, head, first, length, P, WHOLE, EVEN, TILE_N, TILE_D)
    if LAST:
        rows = first + ct.arange(TILE_N, dtype=ct.int32)[:, None]
        scores = ct.where(rows < length, scores, -INFINITY)
        if WHOLE:
            values = ct.where(rows < length, values, 0)
    grown = ct.maximum(largest, ct.max(scores, axis=0, keepdims=True))
    weights = ct.exp2(scores - grown, flush_to_zero=True)
    shrink = ct.exp2(largest - grown, flush_to_zero=True)
    return ct.mma(ct.transpose(values), weights.astype(v.dtype), acc * shrink), sums * shrink + weights, grown


@ct.kernel(num_worker_warps=4, occupancy=2)
def _decode(
    q: Heads,
    k: Heads,
    v: Heads,
    table: ct.Array,
    lengths: ct.Array,
    out: Heads,
    statistics: ct.Array,
    scale: float,
    SPLITS: Int,
    GROUP: Int,
    P: Int,
    WHOLE: Flag,
    EVEN: Flag,
    TILE_G: Int,
    TILE_N: Int,
    TILE_D: Int,
):
    """A block has all query heads of a key head and one of SPLITS spans of its positions; with one, out is [B, Hkv, GROUP, D].

    Else out is [B * Hkv, SPLITS, GROUP, D] in float32, not yet divided, and statistics [B * Hkv, SPLITS, 2, GROUP].
    """
    batch, head, split = ct.bid(0) // k.shape[2], ct.bid(0) % k.shape[2], ct.bid(1)
    length = ct.gather(lengths, batch, check_bounds=False).item()
    blocks = ct.cdiv(length, TILE_N)
    share = ct.cdiv(blocks, SPLITS)
    low = split * share
    high = ct.minimum(low + share, blocks)
    full = ct.minimum(high, length // TILE_N)
    members = ct.arange(TILE_G, dtype=ct.int32)
    # Each key is read once for all columns: the query heads that share it, filled up with zeros. Keys lie along rows, of which
    # the instructions have 64, and heads along columns, of which they have as few as 8.
    shape = (1, 1, TILE_D, TILE_G)
    queries = ct.load(q, (batch, head, 0, 0), shape, order=(0, 1, 3, 2), padding_mode=ZERO).reshape((TILE_D, TILE_G))
    largest = ct.full((1, TILE_G), LEAST_SCORE, dtype=ct.float32)
    sums = ct.zeros((TILE_N, TILE_G), dtype=ct.float32)
    state = ct.zeros((TILE_D, TILE_G), dtype=ct.float32), sums, largest
    if low < high:
        # Pages are looked up a step ahead, so that loads of keys wait for no other load.
        slots = _slots(table, batch, low * TILE_N, length, P, WHOLE, TILE_N)
        for block in range(low, full):
            first = block * TILE_N
            ahead = _slots(table, batch, first + TILE_N, length, P, WHOLE, TILE_N)
            state = _add_keys(
                queries, k, v, slots, state, scale, head, first, length, False, P, WHOLE, EVEN, TILE_N, TILE_D
            )
            slots = ahead
        if full < high:
            state = _add_keys(
                queries, k, v, slots, state, scale, head, full * TILE_N, length, True, P, WHOLE, EVEN, TILE_N, TILE_D
            )
    acc, sums, largest = state
    total = ct.sum(sums, axis=0, keepdims=True)
    if SPLITS == 1:
        found = acc * (1.0 / ct.where(total > 0, total, 1.0))  # zeros for a sequence without positions
        ct.store(out, (batch, head, 0, 0), ct.transpose(found).astype(out.dtype).reshape((1, 1, TILE_G, TILE_D)))
    else:
        ct.store(out, (ct.bid(0), split, 0, 0), ct.transpose(acc).reshape((1, 1, TILE_G, TILE_D)))
        inside = members < GROUP
        place = (ct.bid(0), split, 0, members)
        ct.scatter(statistics, place, largest.reshape((TILE_G,)), mask=inside, check_bounds=False)
        place = (ct.bid(0), split, 1, members)
        ct.scatter(statistics, place, total.reshape((TILE_G,)), mask=inside, check_bounds=False)


@ct.kernel(num_worker_warps=4, occupancy=4)
def _join(parts: Heads, statistics: ct.Array, out: Heads, SPLITS: Int, GROUP: Int, TILE_D: Int):
    """A block has a query head: the sum of its parts, each at the scale of the largest score among them."""
    row, member = ct.bid(0) // GROUP, ct.bid(0) % GROUP
    batch, head = row // out.shape[1], row % out.shape[1]
    spans = ct.arange(SPLITS, dtype=ct.int32)
    largest = ct.gather(statistics, (row, spans, 0, member), check_bounds=False)
    sums = ct.gather(statistics, (row, spans, 1, member), check_bounds=False)
    shape = (1, SPLITS, 1, TILE_D)
    accs = ct.load(parts, (row, 0, member, 0), shape, padding_mode=ZERO).reshape((SPLITS, TILE_D))
    shares = ct.exp2(largest - ct.max(largest, axis=0))
    total = ct.sum(sums * shares, axis=0)
    found = ct.sum(accs * shares[:, None], axis=0) * (1.0 / ct.where(total > 0, total, 1.0))
    ct.store(out, (batch, head, member, 0), found.astype(out.dtype).reshape((1, 1, 1, TILE_D)))


def _splits(programs: int, length: int, wanted: int, least: int) -> int:
    """A power of two, so that tables of all widths compile few kernels: up to `wanted` blocks, of `least` positions or more."""
    if length <= FEW_POSITIONS:
        return 1
    most = min(-(-length // least), max(1, wanted // programs), MOST_SPLITS)
    return 1 << (most.bit_length() - 1)


def run_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCKS: int = 264,
    LEAST: int = 256,
    TILE_N: int = 64,
    WHOLE_PAGES: bool = True,
) -> None:
    """out = T(softmax(scale * q k^T) v) over the pages of each sequence, zeros for a sequence without positions.

    Shapes: q and out [B, Hq, D], caches [N, P, Hkv, D], table [B, M], unit last strides, any others; lengths [B]; T in bfloat16,
    float16. Scores, softmax and sums in fp32, weights rounded to T for the second product.
    Mapping: a block owns a key head, all query heads that share it, and one of several spans of positions, in steps of TILE_N.
    Their number depends on shapes alone: no length is read on the host. WHOLE_PAGES: pages of TILE_N positions or more are
    loaded by TMA, else their rows are gathered as those of smaller pages are. Parts are kept in fp32 and joined by one block a
    query head.
    """
    B, Hq, D = q.shape
    size, Hkv = k_cache.shape[1], k_cache.shape[2]
    if q.numel() == 0:
        return
    group = Hq // Hkv
    splits = _splits(B * Hkv, table.shape[1] * size, BLOCKS, LEAST)
    # Values lie along rows in the second product, and its fast instructions have 64.
    tile_d = max(64, 1 << (D - 1).bit_length())
    tile_n = TILE_N if D <= 128 else 64
    # Splitting the heads keeps any strides.
    q, out = q.view(B, Hkv, group, D), out.view(B, Hkv, group, D)
    stream = torch.cuda.current_stream()
    parts, statistics = out, out
    if splits > 1:
        rows = B * Hq * splits
        # Sums of values, then the largest score and the sum of weights of each head and span.
        workspace = torch.empty(rows * (D + 2), dtype=torch.float32, device=q.device)
        parts = workspace[: rows * D].view(B * Hkv, splits, group, D)
        statistics = workspace[rows * D :].view(B * Hkv, splits, 2, group)
    args = (
        q, k_cache, v_cache, table, lengths, parts, statistics, scale * LOG2_E,
        splits, group, size, WHOLE_PAGES and size % tile_n == 0, tile_d == D,
        max(8, 1 << (group - 1).bit_length()), tile_n, tile_d,
    )  # fmt: skip
    ct.launch(stream, (B * Hkv, splits, 1), _decode, args)
    if splits > 1:
        ct.launch(stream, (B * Hq, 1, 1), _join, (parts, statistics, out, splits, group, tile_d))

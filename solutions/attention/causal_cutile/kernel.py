"""Attention with shared key heads, cuTile: of whole sequences, causal, and of one position whose keys are split among blocks.

The running softmax is in base 2. Its largest score starts at a finite number, so that no difference of two is NaN.
"""

import math
from typing import Annotated, NamedTuple

import cuda.tile as ct
import torch

# The head size is a compile-time constant: tiles that hold whole heads need no mask along them.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
LEAST_SCORE = -1e30
MASSIVE = 2.0**28
"""Scaled scores beyond it differ by 8 or not at all, and a product is rounded by at most 8."""
MOST_SPLITS = 64
FEW_POSITIONS = 512
"""Up to so many are not split: a second launch should take longer than their few steps. Not measured."""
FEW_BLOCKS = 4 * 132
"""Fewer than this leave multiprocessors without work, at one block each: smaller blocks are chosen."""


@ct.function
def _add_keys(
    q, k, v, state, rows, scale, power, batch, head, block, MASKED: Flag, NEGATIVE: Flag, TILE_N: Int, TILE_D: Int
):  # fmt: skip
    """A step of the running softmax: a block of keys."""
    acc, sums, offset = state  # the largest score so far, scaled
    index, shape = (batch, head, 0, block), (1, 1, TILE_D, TILE_N)
    keys = ct.load(k, index, shape, order=(0, 1, 3, 2), padding_mode=ZERO).reshape((TILE_D, TILE_N))
    scores = ct.mma(q, keys, ct.zeros((q.shape[0], TILE_N), dtype=ct.float32))
    if MASKED:
        # Not yet scaled: what is not seen is minus infinity once it is.
        columns = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        scores = ct.where(columns <= rows, scores, INFINITY if NEGATIVE else -INFINITY)
    # The difference of a score to the offset is one instruction, which does not round the product: the largest weight is 2**e,
    # with e the rounding error of the offset. That factor is in the sums too. It is small unless scores are massive. Two massive
    # ones that differ are so far apart that one weighs nothing: any slope will do, and by a power of two the offset is exact.
    found = ct.min(scores, axis=1, keepdims=True) if NEGATIVE else ct.max(scores, axis=1, keepdims=True)
    steep = ct.where(ct.abs(found * scale) > MASSIVE, power, scale)
    grown = ct.maximum(offset, found * steep)
    weights = ct.exp2(scores * steep - grown, flush_to_zero=True)
    shrink = ct.exp2(offset - grown, flush_to_zero=True)
    sums = sums * shrink + ct.sum(weights, axis=1, keepdims=True)
    values = ct.load(v, (batch, head, block, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO).reshape((TILE_N, TILE_D))
    return ct.mma(weights.astype(v.dtype), values, acc * shrink), sums, grown


@ct.kernel
def _prefill(
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    scale: float,
    power: float,
    GROUP: Int,
    NEGATIVE: Flag,
    TILE_S: Int,
    TILE_N: Int,
    TILE_D: Int,
):
    """A block has TILE_S positions of a query head. NEGATIVE: the scale is, and so is `power`, a power of two next to it."""
    turn = ct.bid(0) % (q.shape[0] * q.shape[1])
    batch, head = turn // q.shape[1], turn % q.shape[1]
    kv_head = head // GROUP
    # The last positions see the most keys: they start first, so that the short ones fill the gaps at the end.
    tile = ct.cdiv(q.shape[2], TILE_S) - 1 - ct.bid(0) // (q.shape[0] * q.shape[1])
    first = tile * TILE_S
    high = ct.cdiv(ct.minimum(first + TILE_S, q.shape[2]), TILE_N)
    whole = (first + 1) // TILE_N  # blocks of keys that every position of the tile sees
    rows = first + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    shape = (1, 1, TILE_S, TILE_D)
    queries = ct.load(q, (batch, head, tile, 0), shape, padding_mode=ZERO).reshape((TILE_S, TILE_D))
    acc = ct.zeros((TILE_S, TILE_D), dtype=ct.float32)
    sums = ct.zeros((TILE_S, 1), dtype=ct.float32)
    state = acc, sums, ct.full((TILE_S, 1), LEAST_SCORE, dtype=ct.float32)
    for block in range(0, whole):
        state = _add_keys(
            queries, k, v, state, rows, scale, power, batch, kv_head, block, False, NEGATIVE, TILE_N, TILE_D
        )
    for block in range(whole, high):
        state = _add_keys(
            queries, k, v, state, rows, scale, power, batch, kv_head, block, True, NEGATIVE, TILE_N, TILE_D
        )
    acc, sums, _ = state
    ct.store(out, (batch, head, tile, 0), (acc * (1.0 / sums)).astype(out.dtype).reshape(shape))


@ct.kernel(num_worker_warps=4, occupancy=2)
def _decode(
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    statistics: ct.Array,
    scale: float,
    SPLITS: Int,
    GROUP: Int,
    TILE_G: Int,
    TILE_N: Int,
    TILE_D: Int,
):
    """A block has all query heads of a key head and one of SPLITS spans of its positions; with one, out is [B, Hkv, GROUP, D].

    Else out is [B * Hkv, SPLITS, GROUP, D] in float32, not yet divided, and statistics [B * Hkv, SPLITS, 2, GROUP].
    """
    batch, head, split = ct.bid(0) // k.shape[1], ct.bid(0) % k.shape[1], ct.bid(1)
    length = k.shape[2]
    blocks = ct.cdiv(length, TILE_N)
    share = ct.cdiv(blocks, SPLITS)
    members = ct.arange(TILE_G, dtype=ct.int32)
    # Each key is read once for all columns: the query heads that share it, filled up with zeros. Keys lie along rows, of which
    # the instructions have 64, and heads along columns, of which they have as few as 8.
    shape = (1, 1, TILE_D, TILE_G)
    queries = ct.load(q, (batch, head, 0, 0), shape, order=(0, 1, 3, 2), padding_mode=ZERO).reshape((TILE_D, TILE_G))
    largest = ct.full((1, TILE_G), LEAST_SCORE, dtype=ct.float32)
    sums = ct.zeros((TILE_N, TILE_G), dtype=ct.float32)
    acc = ct.zeros((TILE_D, TILE_G), dtype=ct.float32)
    for block in range(split * share, ct.minimum(split * share + share, blocks)):
        keys = ct.load(k, (batch, head, block, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO).reshape((TILE_N, TILE_D))
        scores = ct.mma(keys, queries, ct.zeros((TILE_N, TILE_G), dtype=ct.float32)) * scale
        rows = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None]
        scores = ct.where(rows < length, scores, -INFINITY)
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
        found = ct.transpose(acc * (1.0 / total)).astype(out.dtype)
        ct.store(out, (batch, head, 0, 0), found.reshape((1, 1, TILE_G, TILE_D)))
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
    found = ct.sum(accs * shares[:, None], axis=0) * (1.0 / ct.sum(sums * shares, axis=0))
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


def _power_of_two(scale: float) -> float:
    """Return the power of two of the sign of a scale that is next to it, or beyond it as seen from 0."""
    return math.copysign(2.0 ** math.ceil(math.log2(abs(scale))), scale)


def _in_base_2(scale: float) -> float:
    """The scale of scores in base 2. One next to 0 is kept from it: what a mask left infinite would become NaN."""
    scale *= LOG2_E
    return scale if abs(scale) >= 1e-30 else 1e-30


def run_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor, *, CONFIG: str | None = None
) -> None:
    """out = T(softmax(scale * q k^T, causal) v), scores, softmax and sums in fp32, weights rounded to T for the second product.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, S, D]; unit last strides, any others; T in bfloat16, float16.
    Rows that begin at multiples of 16 bytes are read and written by TMA, others element by element (correct, slow).
    Mapping: a block owns some positions of a query head, and streams the keys that they see: first those that all of them see,
    without a mask, then those that the diagonal cuts.
    CONFIG names an entry of CONFIGS. None: 128 positions of a head, or 64 if blocks are few or heads are large.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    is_large = D <= 128 and B * Hq * -(-S // 128) >= FEW_BLOCKS
    config = CONFIGS[CONFIG or ("s128_n128" if is_large else "s64_n64")]
    scale = _in_base_2(scale)
    args = (
        q, k, v, out, scale, _power_of_two(scale), Hq // k.shape[1], scale < 0,
        config.tile_s, config.tile_n, max(16, 1 << (D - 1).bit_length()),
    )  # fmt: skip
    ct.launch(torch.cuda.current_stream(), (B * Hq * -(-S // config.tile_s), 1, 1), _PREFILL[config[2:]], args)


def _splits(programs: int, length: int, wanted: int, least: int) -> int:
    """A power of two, so that a growing cache compiles few kernels: up to `wanted` blocks, of `least` positions or more each."""
    if length <= FEW_POSITIONS:
        return 1
    most = min(-(-length // least), max(1, wanted // programs), MOST_SPLITS)
    return 1 << (most.bit_length() - 1)


def run_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCKS: int = 256,
    LEAST: int = 256,
    TILE_N: int = 128,
) -> None:
    """out = T(softmax(scale * q k^T) v), scores, softmax and sums in fp32, weights rounded to T for the second product.

    Shapes: q and out [B, Hq, 1, D], k and v [B, Hkv, L, D]; unit last strides, any others; T in bfloat16, float16.
    Rows that begin at multiples of 16 bytes are read and written by TMA, others element by element (correct, slow).
    Mapping: a block owns a key head, all query heads that share it, and one of several spans of positions, in steps of TILE_N;
    there are BLOCKS of them, or fewer where a span would get under LEAST positions. Parts are kept in fp32 and joined by one
    block a query head.
    """
    B, Hq, _, D = q.shape
    Hkv, L = k.shape[1], k.shape[2]
    if q.numel() == 0:
        return
    group = Hq // Hkv
    splits = _splits(B * Hkv, L, BLOCKS, LEAST)
    # Values lie along rows in the second product, and its fast instructions have 64.
    tile_d = max(64, 1 << (D - 1).bit_length())
    # Splitting the heads and dropping the position keeps any strides.
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
        q, k, v, parts, statistics, scale * LOG2_E,
        splits, group, max(8, 1 << (group - 1).bit_length()), TILE_N if D <= 128 else 64, tile_d,
    )  # fmt: skip
    ct.launch(stream, (B * Hkv, splits, 1), _decode, args)
    if splits > 1:
        ct.launch(stream, (B * Hq, 1, 1), _join, (parts, statistics, out, splits, group, tile_d))

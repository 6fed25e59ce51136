"""Attention with values of another width than the keys, cuTile: of whole sequences, causal, and of one position.

Keys of 129 to 192 columns are two tiles, of 128 and of 64 columns: sizes of tiles are powers of two. The running softmax is in
base 2. Its largest score starts at the least finite number, so that no difference of two is NaN.
"""

import math
from typing import Annotated, NamedTuple

import cuda.tile as ct
import torch

# Head sizes are compile-time constants: tiles that hold whole heads need no mask along them.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
LEAST_SCORE = -3.4028234663852886e38
MASSIVE = 2.0**28
"""Scaled scores beyond it differ by 8 or not at all, and a product is rounded by at most 8."""
MOST_SPLITS = 64
FEW_POSITIONS = 512
"""Up to so many are not split: a second launch should take longer than their few steps. Not measured."""
FEW_BLOCKS = 4 * 132
"""Fewer than this leave multiprocessors without work, at one block each: smaller blocks are chosen."""


@ct.function
def _tile(x, batch, head, block, column, ROWS: Int, COLUMNS: Int):
    """ROWS positions of a head and COLUMNS of its columns, from number column * COLUMNS on."""
    found = ct.load(x, (batch, head, block, column), (1, 1, ROWS, COLUMNS), padding_mode=ZERO)
    return found.reshape((ROWS, COLUMNS))


@ct.function
def _transposed(x, batch, head, block, column, ROWS: Int, COLUMNS: Int):
    """The same, columns first."""
    shape = (1, 1, COLUMNS, ROWS)
    found = ct.load(x, (batch, head, column, block), shape, order=(0, 1, 3, 2), padding_mode=ZERO)
    return found.reshape((COLUMNS, ROWS))


@ct.function
def _add_keys(
    queries, rest, k, v, state, rows, scale, power, batch, head, block,
    MASKED: Flag, NEGATIVE: Flag, TILE_N: Int, TILE_D: Int, REST: Int, TILE_V: Int,
):  # fmt: skip
    """A step of the running softmax: a block of keys."""
    acc, sums, offset = state  # the largest score so far, scaled
    keys = _transposed(k, batch, head, block, 0, TILE_N, TILE_D)
    scores = ct.mma(queries, keys, ct.zeros((queries.shape[0], TILE_N), dtype=ct.float32))
    if REST > 0:
        scores = ct.mma(rest, _transposed(k, batch, head, block, TILE_D // REST, TILE_N, REST), scores)
    if MASKED:
        # Not yet scaled: what is not seen is minus infinity once it is.
        columns = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        scores = ct.where(columns <= rows, scores, INFINITY if NEGATIVE else -INFINITY)
    # The difference of a score to the offset is one instruction, which does not round the product. Two massive scores that
    # differ are so far apart that one weighs nothing: any slope will do, and by a power of two the offset is exact.
    found = ct.min(scores, axis=1, keepdims=True) if NEGATIVE else ct.max(scores, axis=1, keepdims=True)
    steep = ct.where(ct.abs(found * scale) > MASSIVE, power, scale)
    grown = ct.maximum(offset, found * steep)
    weights = ct.exp2(scores * steep - grown, flush_to_zero=True)
    shrink = ct.exp2(offset - grown, flush_to_zero=True)
    sums = sums * shrink + ct.sum(weights, axis=1, keepdims=True)
    values = _tile(v, batch, head, block, 0, TILE_N, TILE_V)
    return ct.mma(weights.astype(v.dtype), values, acc * shrink), sums, grown


@ct.kernel
def _prefill(
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    scale: float,
    power: float,
    NEGATIVE: Flag,
    TILE_S: Int,
    TILE_N: Int,
    TILE_D: Int,
    REST: Int,
    TILE_V: Int,
):
    """A block has TILE_S positions of a head. NEGATIVE: the scale is, and so is `power`, a power of two next to it."""
    turn = ct.bid(0) % (q.shape[0] * q.shape[1])
    batch, head = turn // q.shape[1], turn % q.shape[1]
    # The last positions see the most keys: they start first, so that the short ones fill the gaps at the end.
    tile = ct.cdiv(q.shape[2], TILE_S) - 1 - ct.bid(0) // (q.shape[0] * q.shape[1])
    first = tile * TILE_S
    high = ct.cdiv(ct.minimum(first + TILE_S, q.shape[2]), TILE_N)
    whole = (first + 1) // TILE_N  # blocks of keys that every position of the tile sees
    rows = first + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    queries = _tile(q, batch, head, tile, 0, TILE_S, TILE_D)
    rest = queries
    if REST > 0:
        rest = _tile(q, batch, head, tile, TILE_D // REST, TILE_S, REST)
    acc = ct.zeros((TILE_S, TILE_V), dtype=ct.float32)
    sums = ct.zeros((TILE_S, 1), dtype=ct.float32)
    state = acc, sums, ct.full((TILE_S, 1), LEAST_SCORE, dtype=ct.float32)
    for block in range(0, whole):
        state = _add_keys(
            queries, rest, k, v, state, rows, scale, power, batch, head, block,
            False, NEGATIVE, TILE_N, TILE_D, REST, TILE_V,
        )  # fmt: skip
    for block in range(whole, high):
        state = _add_keys(
            queries, rest, k, v, state, rows, scale, power, batch, head, block,
            True, NEGATIVE, TILE_N, TILE_D, REST, TILE_V,
        )  # fmt: skip
    acc, sums, _ = state
    found = (acc * (1.0 / sums)).astype(out.dtype)
    ct.store(out, (batch, head, tile, 0), found.reshape((1, 1, TILE_S, TILE_V)))


@ct.kernel(num_worker_warps=4, occupancy=2)
def _decode(
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    statistics: ct.Array,
    scale: float,
    SPLITS: Int,
    TILE_N: Int,
    TILE_D: Int,
    REST: Int,
    TILE_V: Int,
):
    """A block has a head and one of SPLITS spans of its positions; out is [B, H, SPLITS, Dv], not divided for more than one.

    Statistics [B, H, SPLITS, 2] are the largest score and the sum of weights.
    """
    batch, head, split = ct.bid(0) // k.shape[1], ct.bid(0) % k.shape[1], ct.bid(1)
    length = k.shape[2]
    blocks = ct.cdiv(length, TILE_N)
    share = ct.cdiv(blocks, SPLITS)
    # A head has keys of its own: they are read once, and tensor cores would have one row of 64.
    queries = _tile(q, batch, head, 0, 0, 1, TILE_D).astype(ct.float32) * scale
    rest = queries
    if REST > 0:
        rest = _tile(q, batch, head, 0, TILE_D // REST, 1, REST).astype(ct.float32) * scale
    largest = ct.full((1, 1), LEAST_SCORE, dtype=ct.float32)
    sums = ct.zeros((TILE_N, 1), dtype=ct.float32)
    acc = ct.zeros((1, TILE_V), dtype=ct.float32)
    for block in range(split * share, ct.minimum(split * share + share, blocks)):
        keys = _tile(k, batch, head, block, 0, TILE_N, TILE_D).astype(ct.float32)
        scores = ct.sum(keys * queries, axis=1, keepdims=True)
        if REST > 0:
            more = _tile(k, batch, head, block, TILE_D // REST, TILE_N, REST).astype(ct.float32)
            scores = scores + ct.sum(more * rest, axis=1, keepdims=True)
        rows = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None]
        scores = ct.where(rows < length, scores, -INFINITY)
        grown = ct.maximum(largest, ct.max(scores, axis=0, keepdims=True))
        weights = ct.exp2(scores - grown, flush_to_zero=True)
        shrink = ct.exp2(largest - grown, flush_to_zero=True)
        sums = sums * shrink + weights
        values = _tile(v, batch, head, block, 0, TILE_N, TILE_V).astype(ct.float32)
        acc = acc * shrink + ct.sum(values * weights, axis=0, keepdims=True)
        largest = grown
    total = ct.sum(sums, axis=0, keepdims=True)
    if SPLITS == 1:
        acc = acc * (1.0 / total)
    ct.store(out, (batch, head, split, 0), acc.astype(out.dtype).reshape((1, 1, 1, TILE_V)))
    if SPLITS > 1:
        ct.scatter(statistics, (batch, head, split, 0), largest.reshape(()), check_bounds=False)
        ct.scatter(statistics, (batch, head, split, 1), total.reshape(()), check_bounds=False)


@ct.kernel(num_worker_warps=4, occupancy=4)
def _join(parts: Heads, statistics: ct.Array, out: Heads, SPLITS: Int, TILE_V: Int):
    """A block has a head: the sum of its parts, each at the scale of the largest score among them."""
    batch, head = ct.bid(0) // out.shape[1], ct.bid(0) % out.shape[1]
    spans = ct.arange(SPLITS, dtype=ct.int32)
    largest = ct.gather(statistics, (batch, head, spans, 0), check_bounds=False)
    sums = ct.gather(statistics, (batch, head, spans, 1), check_bounds=False)
    accs = _tile(parts, batch, head, 0, 0, SPLITS, TILE_V)
    shares = ct.exp2(largest - ct.max(largest, axis=0))
    found = ct.sum(accs * shares[:, None], axis=0) * (1.0 / ct.sum(sums * shares, axis=0))
    ct.store(out, (batch, head, 0, 0), found.astype(out.dtype).reshape((1, 1, 1, TILE_V)))


class Config(NamedTuple):
    """Positions of a block; keys of a step; warps; blocks a multiprocessor."""

    tile_s: int
    tile_n: int
    warps: int
    occupancy: int


CONFIGS = {
    "s128_n128": Config(128, 128, 8, 1),
    "s128_n64": Config(128, 64, 8, 1),
    "s64_n128": Config(64, 128, 4, 1),
    "s64_n64": Config(64, 64, 4, 2),
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


def _columns(D: int) -> tuple[int, int]:
    """Columns of the first tile of a head and of the second one, if any."""
    return (128, 64) if 128 < D <= 192 else (max(16, 1 << (D - 1).bit_length()), 0)


def run_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor, *, CONFIG: str | None = None
) -> None:
    """out = T(softmax(scale * q k^T, causal) v), scores, softmax and sums in fp32, weights rounded to T for the second product.

    Shapes: q and k [B, H, S, D], v and out [B, H, S, Dv]; unit last strides, any others; T in bfloat16, float16.
    Rows that begin at multiples of 16 bytes are read and written by TMA, others element by element (correct, slow).
    Mapping: a block owns some positions of a head, and streams the keys that they see: first those that all of them see, without
    a mask, then those that the diagonal cuts.
    CONFIG names an entry of CONFIGS. None: 128 positions of a head, or 64 if blocks are few or heads are large.
    """
    B, H, S, D = q.shape
    if out.numel() == 0:
        return
    is_large = D <= 192 and B * H * -(-S // 128) >= FEW_BLOCKS
    config = CONFIGS[CONFIG or ("s128_n64" if is_large else "s64_n64")]
    scale = _in_base_2(scale)
    args = (
        q, k, v, out, scale, _power_of_two(scale), scale < 0,
        config.tile_s, config.tile_n, *_columns(D), max(16, 1 << (v.shape[3] - 1).bit_length()),
    )  # fmt: skip
    ct.launch(torch.cuda.current_stream(), (B * H * -(-S // config.tile_s), 1, 1), _PREFILL[config[2:]], args)


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
    BLOCKS: int = 264,
    LEAST: int = 256,
    TILE_N: int = 64,
) -> None:
    """out = T(softmax(scale * q k^T) v), scores, softmax and sums in fp32.

    Shapes: q [B, H, 1, D], k [B, H, L, D], v [B, H, L, Dv], out [B, H, 1, Dv]; unit last strides, any others; T in bfloat16,
    float16. Rows that begin at multiples of 16 bytes are read by TMA, others element by element (correct, slow).
    Mapping: a block owns a head and one of several spans of positions, in steps of TILE_N; there are BLOCKS of them, or fewer
    where a span would get under LEAST positions. Parts are kept in fp32 and joined by one block a head.
    """
    B, H, _, D = q.shape
    L, DV = k.shape[2], v.shape[3]
    if out.numel() == 0:
        return
    splits = _splits(B * H, L, BLOCKS, LEAST)
    tile_v = max(16, 1 << (DV - 1).bit_length())
    stream = torch.cuda.current_stream()
    parts = statistics = out
    if splits > 1:
        rows = B * H * splits
        # Sums of values, then the largest score and the sum of weights of each head and span.
        workspace = torch.empty(rows * (DV + 2), dtype=torch.float32, device=q.device)
        parts = workspace[: rows * DV].view(B, H, splits, DV)
        statistics = workspace[rows * DV :].view(B, H, splits, 2)
    args = (q, k, v, parts, statistics, scale * LOG2_E, splits, TILE_N, *_columns(D), tile_v)
    ct.launch(stream, (B * H, splits, 1), _decode, args)
    if splits > 1:
        ct.launch(stream, (B * H, 1, 1), _join, (parts, statistics, out, splits, tile_v))

"""Attention within sequences that lie one behind the other, cuTile: a block of queries finds its sequence by the ends of all.

The running softmax is in base 2. Its largest score starts at the least finite number, so that no difference of two is NaN. A head
of 72, 80 or 96 is 64 columns and a narrow rest, because a tile of 128 would do up to 1.8 times the work.
"""

import math
from typing import Annotated, NamedTuple

import cuda.tile as ct
import torch

# The head size is a compile-time constant: tiles that hold whole heads need no mask along them.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
LEAST_SCORE = -3.4028234663852886e38
MASSIVE = 2.0**28
"""Scaled scores beyond it differ by 8 or not at all, and a product is rounded by at most 8."""


@ct.function
def _columns(x, head, block, column, ROWS: Int, COLUMNS: Int):
    """Load a tile of rows and columns of a head: zeros past its ends."""
    tile = ct.load(x, (block, head, column), (ROWS, 1, COLUMNS), padding_mode=ZERO)
    return tile.reshape((ROWS, COLUMNS))


@ct.function
def _turned(x, head, block, column, ROWS: Int, COLUMNS: Int):
    """Load the same with the columns along the rows of the tile."""
    tile = ct.load(x, (column, head, block), (COLUMNS, 1, ROWS), order=(2, 1, 0), padding_mode=ZERO)
    return tile.reshape((COLUMNS, ROWS))


@ct.function
def _add_keys(
    q, q_rest, k, v, state, rows, scale, power, head, block,
    MASKED: Flag, CAUSAL: Flag, NEGATIVE: Flag, TILE_N: Int, TILE_D: Int, REST: Int,
):  # fmt: skip
    """A step of the running softmax: a block of keys."""
    acc, acc_rest, sums, offset = state  # the largest score so far, scaled
    keys = _turned(k, head, block, 0, TILE_N, TILE_D)
    scores = ct.mma(q, keys, ct.zeros((q.shape[0], TILE_N), dtype=ct.float32))
    if REST > 0:
        scores = ct.mma(q_rest, _turned(k, head, block, TILE_D // REST, TILE_N, REST), scores)
    if MASKED:
        # Not yet scaled: what is not there is minus infinity once it is.
        columns = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        seen = columns < k.shape[0]
        if CAUSAL:
            seen = seen & (columns <= rows)
        scores = ct.where(seen, scores, INFINITY if NEGATIVE else -INFINITY)
    # The difference of a score to the offset is one instruction, which does not round the product: the largest weight is 2**e,
    # with e the rounding error of the offset. That factor is in the sums too. It is small unless scores are massive. Two massive
    # ones that differ are so far apart that one weighs nothing: any slope will do, and by a power of two the offset is exact.
    found = ct.min(scores, axis=1, keepdims=True) if NEGATIVE else ct.max(scores, axis=1, keepdims=True)
    steep = ct.where(ct.abs(found * scale) > MASSIVE, power, scale)
    grown = ct.maximum(offset, found * steep)
    weights = ct.exp2(scores * steep - grown, flush_to_zero=True)
    shrink = ct.exp2(offset - grown, flush_to_zero=True)
    sums = sums * shrink + ct.sum(weights, axis=1, keepdims=True)
    narrow = weights.astype(v.dtype)
    acc = ct.mma(narrow, _columns(v, head, block, 0, TILE_N, TILE_D), acc * shrink)
    if REST > 0:
        values = _columns(v, head, block, TILE_D // REST, TILE_N, REST)
        acc_rest = ct.mma(narrow, values, acc_rest * shrink)
    return acc, acc_rest, sums, grown


@ct.kernel(num_worker_warps=4)
def _find_blocks(offsets: ct.Array, places: ct.Array, tokens: int, sequences: int, TILE_S: Int, TILE_Q: Int):
    """Note the first token and the end of the sequence of each block of queries, and the number of the block in it.

    Behind the last sequence the number is -1, and the tokens are what the block fills with zeros. TILE_Q is a power of two, not
    below the number of sequences. Apart from the kernel that reads this: with these sums in it, cuTile 1.7 ends with an error of
    its own.
    """
    turn = ct.bid(0)
    index = ct.arange(TILE_Q, dtype=ct.int32)
    there = index < sequences
    begins = ct.gather(offsets, index, mask=there, padding_value=0, check_bounds=False)
    ends = ct.gather(offsets, index + 1, mask=there, padding_value=0, check_bounds=False)
    blocks = (ends - begins + TILE_S - 1) // TILE_S
    last = ct.cumsum(blocks, axis=0)  # of the blocks of each sequence, plus 1
    own = there & (last - blocks <= turn) & (turn < last)
    # Among the queries of a sequence the last ones see the most keys, and start first.
    number = ct.max(ct.where(own, last - 1 - turn, -1))
    behind = ct.max(ends) + (turn - ct.max(last)) * TILE_S
    begin = ct.where(number < 0, ct.minimum(behind, tokens), ct.max(ct.where(own, begins, 0)))
    end = ct.where(number < 0, ct.minimum(behind + TILE_S, tokens), ct.max(ct.where(own, ends, 0)))
    ct.scatter(places, (turn, 0), begin, check_bounds=False)
    ct.scatter(places, (turn, 1), end, check_bounds=False)
    ct.scatter(places, (turn, 2), number, check_bounds=False)


@ct.kernel
def _attention(
    q: Heads,
    k: Heads,
    v: Heads,
    places: ct.Array,
    out: Heads,
    scale: float,
    power: float,
    GROUP: Int,
    CAUSAL: Flag,
    NEGATIVE: Flag,
    TILE_S: Int,
    TILE_N: Int,
    TILE_D: Int,
    REST: Int,
):
    """A block has TILE_S positions of a query head. NEGATIVE: the scale is, and so is `power`, a power of two next to it.

    Columns from TILE_D on are REST, which divides it; 0 for none.
    """
    turn, head = ct.bid(0), ct.bid(1)
    begin = ct.gather(places, (turn, 0), check_bounds=False).item()
    end = ct.gather(places, (turn, 1), check_bounds=False).item()
    tile = ct.gather(places, (turn, 2), check_bounds=False).item()
    if tile < 0:
        # 1. Behind the last sequence there are zeros.
        if begin < end:
            behind = out.slice(axis=0, start=begin, stop=end)
            ct.store(behind, (0, head, 0), ct.zeros((TILE_S, 1, TILE_D), dtype=out.dtype))
            if REST > 0:
                ct.store(behind, (0, head, TILE_D // REST), ct.zeros((TILE_S, 1, REST), dtype=out.dtype))
    else:
        # 2. The queries.
        length = end - begin
        first = tile * TILE_S
        rows = first + ct.arange(TILE_S, dtype=ct.int32)[:, None]
        own_q, own_out = q.slice(axis=0, start=begin, stop=end), out.slice(axis=0, start=begin, stop=end)
        own_k, own_v = k.slice(axis=0, start=begin, stop=end), v.slice(axis=0, start=begin, stop=end)
        kv_head = head // GROUP
        queries = _columns(own_q, head, tile, 0, TILE_S, TILE_D)
        acc = ct.zeros((TILE_S, TILE_D), dtype=ct.float32)
        rest, acc_rest = queries, acc
        if REST > 0:
            rest = _columns(own_q, head, tile, TILE_D // REST, TILE_S, REST)
            acc_rest = ct.zeros((TILE_S, REST), dtype=ct.float32)
        sums = ct.zeros((TILE_S, 1), dtype=ct.float32)
        state = acc, acc_rest, sums, ct.full((TILE_S, 1), LEAST_SCORE, dtype=ct.float32)
        # 3. Keys that every query of the block sees, then the others.
        if CAUSAL:
            whole = (first + 1) // TILE_N
            high = ct.cdiv(ct.minimum(first + TILE_S, length), TILE_N)
        else:
            whole = length // TILE_N
            high = ct.cdiv(length, TILE_N)
        for block in range(0, whole):
            state = _add_keys(
                queries, rest, own_k, own_v, state, rows, scale, power, kv_head, block,
                False, CAUSAL, NEGATIVE, TILE_N, TILE_D, REST,
            )  # fmt: skip
        for block in range(whole, high):
            state = _add_keys(
                queries, rest, own_k, own_v, state, rows, scale, power, kv_head, block,
                True, CAUSAL, NEGATIVE, TILE_N, TILE_D, REST,
            )  # fmt: skip
        acc, acc_rest, sums, _ = state
        share = 1.0 / sums
        ct.store(own_out, (tile, head, 0), (acc * share).astype(out.dtype).reshape((TILE_S, 1, TILE_D)))
        if REST > 0:
            found = (acc_rest * share).astype(out.dtype).reshape((TILE_S, 1, REST))
            ct.store(own_out, (tile, head, TILE_D // REST), found)


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
_KERNELS = {
    config[2:]: _attention.replace_hints(num_worker_warps=config.warps, occupancy=config.occupancy)
    for config in CONFIGS.values()
}


def _widths(size: int) -> tuple[int, int]:
    """Return the columns of the first tile of a head, and those of a second one if that saves work; else 0."""
    whole = max(16, 1 << (size - 1).bit_length())
    rest = max(16, 1 << (size - whole // 2 - 1).bit_length()) if size > whole // 2 >= 64 else whole
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)


def _power_of_two(scale: float) -> float:
    """Return the power of two of the sign of a scale that is next to it, or beyond it as seen from 0."""
    return math.copysign(2.0 ** math.ceil(math.log2(abs(scale))), scale)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    causal: bool,
    out: torch.Tensor,
    *,
    CONFIG: str | None = None,
) -> None:
    """out = T(softmax(scale * q k^T) v) within each sequence, zeros behind the last one.

    Shapes: q and out [M, Hq, D], k and v [M, Hkv, D], unit last strides, any others; cu_seqlens [N + 1] int32, from 0 up to M;
    T in bfloat16, float16. Scores, softmax and sums in fp32, weights rounded to T for the second product.
    Rows that begin at multiples of 16 bytes are read and written by TMA, others element by element (correct, slow).
    Mapping: a first kernel finds the sequence of each block of queries by the ends of all. Then a block owns some queries of a
    head, and streams the keys that they see. Nothing is read on the host: there are as many blocks as any N sequences of M
    tokens may need.
    CONFIG names an entry of CONFIGS. None: 128 queries of a head, or 64 if sequences are short on average or heads are large.
    """
    M, Hq, D = q.shape
    sequences = cu_seqlens.shape[0] - 1
    if q.numel() == 0:
        return
    config = CONFIGS[CONFIG or ("s128_n128" if D <= 128 and 64 * sequences < M else "s64_n64")]
    scale *= LOG2_E
    scale = scale if abs(scale) >= 1e-30 else 1e-30  # next to 0, what a mask left infinite would become NaN
    tile_d, rest = _widths(D)
    blocks = -(-M // config.tile_s) + sequences
    places = torch.empty((blocks, 3), dtype=torch.int32, device=q.device)
    stream = torch.cuda.current_stream()
    widest = 1 << (sequences - 1).bit_length()
    ct.launch(stream, (blocks, 1, 1), _find_blocks, (cu_seqlens, places, M, sequences, config.tile_s, widest))
    args = (
        q, k, v, places, out, scale, _power_of_two(scale), Hq // k.shape[1], causal, scale < 0,
        config.tile_s, config.tile_n, tile_d, rest,
    )  # fmt: skip
    ct.launch(stream, (blocks, Hq, 1), _KERNELS[config[2:]], args)

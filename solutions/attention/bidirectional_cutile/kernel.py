"""Attention to all keys with shared key heads, cuTile: a block of positions of a query head, keys streamed once by TMA.

The running softmax is in base 2. Its largest score starts at the least finite number, so that no difference of two is NaN. A head
of 72, 80 or 96 is 64 columns and a narrow rest, because a tile of 128 would do up to 1.8 times the work.
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
LEAST_SCORE = -3.4028234663852886e38
MASSIVE = 2.0**28
"""Scaled scores beyond it differ by 8 or not at all, and a product is rounded by at most 8."""


@ct.function
def _columns(x, batch, head, block, column, ROWS: Int, COLUMNS: Int):
    """Load a tile of rows and columns of a head: zeros past its ends."""
    tile = ct.load(x, (batch, head, block, column), (1, 1, ROWS, COLUMNS), padding_mode=ZERO)
    return tile.reshape((ROWS, COLUMNS))


@ct.function
def _turned(x, batch, head, block, column, ROWS: Int, COLUMNS: Int):
    """Load the same with the columns along the rows of the tile."""
    shape = (1, 1, COLUMNS, ROWS)
    tile = ct.load(x, (batch, head, column, block), shape, order=(0, 1, 3, 2), padding_mode=ZERO)
    return tile.reshape((COLUMNS, ROWS))


@ct.function
def _add_keys(
    q, q_rest, k, v, state, scale, power, batch, head, block,
    MASKED: Flag, NEGATIVE: Flag, TILE_N: Int, TILE_D: Int, REST: Int,
):  # fmt: skip
    """A step of the running softmax: a block of keys."""
    acc, acc_rest, sums, offset = state  # the largest score so far, scaled
    keys = _turned(k, batch, head, block, 0, TILE_N, TILE_D)
    scores = ct.mma(q, keys, ct.zeros((q.shape[0], TILE_N), dtype=ct.float32))
    if REST > 0:
        scores = ct.mma(q_rest, _turned(k, batch, head, block, TILE_D // REST, TILE_N, REST), scores)
    if MASKED:
        # Not yet scaled: what is not there is minus infinity once it is.
        columns = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        scores = ct.where(columns < k.shape[2], scores, INFINITY if NEGATIVE else -INFINITY)
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
    acc = ct.mma(narrow, _columns(v, batch, head, block, 0, TILE_N, TILE_D), acc * shrink)
    if REST > 0:
        values = _columns(v, batch, head, block, TILE_D // REST, TILE_N, REST)
        acc_rest = ct.mma(narrow, values, acc_rest * shrink)
    return acc, acc_rest, sums, grown


@ct.kernel
def _attention(
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
    REST: Int,
):
    """A block has TILE_S positions of a query head. NEGATIVE: the scale is, and so is `power`, a power of two next to it.

    Columns from TILE_D on are REST, which divides TILE_D; 0 for none.
    """
    tiles = ct.cdiv(q.shape[2], TILE_S)
    turn, tile = ct.bid(0) // tiles, ct.bid(0) % tiles
    batch, head = turn // q.shape[1], turn % q.shape[1]
    kv_head = head // GROUP
    queries = _columns(q, batch, head, tile, 0, TILE_S, TILE_D)
    acc = ct.zeros((TILE_S, TILE_D), dtype=ct.float32)
    rest, acc_rest = queries, acc
    if REST > 0:
        rest = _columns(q, batch, head, tile, TILE_D // REST, TILE_S, REST)
        acc_rest = ct.zeros((TILE_S, REST), dtype=ct.float32)
    sums = ct.zeros((TILE_S, 1), dtype=ct.float32)
    state = acc, acc_rest, sums, ct.full((TILE_S, 1), LEAST_SCORE, dtype=ct.float32)
    whole = k.shape[2] // TILE_N
    for block in range(0, whole):
        state = _add_keys(
            queries, rest, k, v, state, scale, power, batch, kv_head, block, False, NEGATIVE, TILE_N, TILE_D, REST
        )
    for block in range(whole, ct.cdiv(k.shape[2], TILE_N)):
        state = _add_keys(
            queries, rest, k, v, state, scale, power, batch, kv_head, block, True, NEGATIVE, TILE_N, TILE_D, REST
        )
    acc, acc_rest, sums, _ = state
    share = 1.0 / sums
    ct.store(out, (batch, head, tile, 0), (acc * share).astype(out.dtype).reshape((1, 1, TILE_S, TILE_D)))
    if REST > 0:
        found = (acc_rest * share).astype(out.dtype).reshape((1, 1, TILE_S, REST))
        ct.store(out, (batch, head, tile, TILE_D // REST), found)


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor, *, CONFIG: str | None = None
) -> None:
    """out = T(softmax(scale * q k^T) v), scores, softmax and sums in fp32, weights rounded to T for the second product.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, L, D]; unit last strides, any others; T in bfloat16, float16.
    Rows that begin at multiples of 16 bytes are read and written by TMA, others element by element (correct, slow).
    Mapping: a block owns some positions of a query head, and streams all keys; only the last step has a mask.
    CONFIG names an entry of CONFIGS. None: 128 positions of a head, or 64 if there are few or heads are large.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    config = CONFIGS[CONFIG or ("s128_n128" if D <= 128 and S > 64 else "s64_n64")]
    scale *= LOG2_E
    scale = scale if abs(scale) >= 1e-30 else 1e-30  # next to 0, what a mask left infinite would become NaN
    tile_d, rest = _widths(D)
    args = (
        q, k, v, out, scale, _power_of_two(scale), Hq // k.shape[1], scale < 0, config.tile_s, config.tile_n, tile_d, rest,
    )  # fmt: skip
    blocks = B * Hq * -(-S // config.tile_s)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _KERNELS[config[2:]], args)

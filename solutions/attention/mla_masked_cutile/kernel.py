"""Attention with a mask of flags and values of another width than the keys, cuTile: only tiles with a key that is seen are read.

Keys of 129 to 192 columns are two tiles, of 128 and of 64 columns: sizes of tiles are powers of two. The running softmax is in
base 2. Its largest score starts at the least finite number, so that no difference of two is NaN.
"""

import math
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
MASSIVE = 2.0**28
"""Scaled scores beyond it differ by 8 or not at all, and a product is rounded by at most 8."""
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
    q, rest, k, v, mask, state, row, scale, power, batch, plane, head, block,
    MASKED: Flag, NEGATIVE: Flag, TILE_S: Int, TILE_N: Int, TILE_D: Int, REST: Int, TILE_V: Int,
):  # fmt: skip
    """A step of the running softmax: a block of keys. MASKED: some query does not see some of them."""
    acc, sums, offset = state  # the largest score so far, scaled
    keys = _transposed(k, batch, head, block, 0, TILE_N, TILE_D)
    scores = ct.mma(q, keys, ct.zeros((TILE_S, TILE_N), dtype=ct.float32))
    if REST > 0:
        scores = ct.mma(rest, _transposed(k, batch, head, block, TILE_D // REST, TILE_N, REST), scores)
    if MASKED:
        # Not yet scaled: what is not seen is minus infinity once it is.
        seen = _flags(mask, plane, row, block * TILE_N, TILE_S, TILE_N) > 0
        scores = ct.where(seen, scores, INFINITY if NEGATIVE else -INFINITY)
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


@ct.function
def _flags(mask, plane, row, key, TILE_S: Int, TILE_N: Int):
    """Flags of TILE_S queries and TILE_N keys of one mask, as int32; 0 behind the last query and the last key."""
    rows = row + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    keys = key + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = (rows < mask.shape[2]) & (keys < mask.shape[3])
    return ct.gather(mask, (plane, 0, rows, keys), mask=inside, padding_value=0, check_bounds=False).astype(ct.int32)


@ct.kernel(num_worker_warps=4)
def _sort_tiles(mask: Masks, kinds: ct.Array, TILE_S: Int, TILE_N: Int):
    """Note the kind of a tile of the mask: 2 if each of its queries sees each of its keys, 1 if some flag is set, else 0."""
    row, tile = ct.bid(0) // kinds.shape[2], ct.bid(0) % kinds.shape[2]
    plane, block = row // kinds.shape[1], row % kinds.shape[1]
    flags = _flags(mask, plane, block * TILE_S, tile * TILE_N, TILE_S, TILE_N)
    # Rows behind the last query do not count; keys behind the last one are never seen.
    rows = block * TILE_S + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    every = ct.min(ct.where(rows < mask.shape[2], flags, 1))
    ct.scatter(kinds, (plane, block, tile), ct.max(flags) + every, check_bounds=False)


@ct.kernel
def _attention(
    q: Heads,
    k: Heads,
    v: Heads,
    mask: Masks,
    bounds: ct.Array,
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
    plane = ct.minimum(batch, mask.shape[0] - 1)  # one mask for all sequences, or one for each
    # The last positions mostly see the most keys: they start first, so that the short ones fill the gaps at the end.
    tile = ct.cdiv(q.shape[2], TILE_S) - 1 - ct.bid(0) // (q.shape[0] * q.shape[1])
    row = tile * TILE_S
    low = ct.gather(bounds, (plane, tile, 0), check_bounds=False).item()
    high = ct.gather(bounds, (plane, tile, 1), check_bounds=False).item()
    whole = ct.gather(bounds, (plane, tile, 2), check_bounds=False).item()
    edge = ct.gather(bounds, (plane, tile, 3), check_bounds=False).item()
    queries = _tile(q, batch, head, tile, 0, TILE_S, TILE_D)
    rest = queries
    if REST > 0:
        rest = _tile(q, batch, head, tile, TILE_D // REST, TILE_S, REST)
    acc = ct.zeros((TILE_S, TILE_V), dtype=ct.float32)
    sums = ct.zeros((TILE_S, 1), dtype=ct.float32)
    state = acc, sums, ct.full((TILE_S, 1), LEAST_SCORE, dtype=ct.float32)
    for block in range(whole, edge):
        state = _add_keys(
            queries, rest, k, v, mask, state, row, scale, power, batch, plane, head, block,
            False, NEGATIVE, TILE_S, TILE_N, TILE_D, REST, TILE_V,
        )  # fmt: skip
    for number in range(low, high - (edge - whole)):
        block = ct.where(number < whole, number, number + edge - whole).item()
        state = _add_keys(
            queries, rest, k, v, mask, state, row, scale, power, batch, plane, head, block,
            True, NEGATIVE, TILE_S, TILE_N, TILE_D, REST, TILE_V,
        )  # fmt: skip
    acc, sums, _ = state
    found = acc * (1.0 / ct.where(sums > 0, sums, 1.0))  # zeros in rows that see no key
    ct.store(out, (batch, head, tile, 0), found.astype(out.dtype).reshape((1, 1, TILE_S, TILE_V)))


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
_KERNELS = {
    config[2:]: _attention.replace_hints(num_worker_warps=config.warps, occupancy=config.occupancy)
    for config in CONFIGS.values()
}


def _power_of_two(scale: float) -> float:
    """Return the power of two of the sign of a scale that is next to it, or beyond it as seen from 0."""
    return math.copysign(2.0 ** math.ceil(math.log2(abs(scale))), scale)


def _in_base_2(scale: float) -> float:
    """The scale of scores in base 2. One next to 0 is kept from it: what a mask left infinite would become NaN."""
    scale *= LOG2_E
    return scale if abs(scale) >= 1e-30 else 1e-30


def _one_if_shared(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as bytes, with one entry if all sequences share it."""
    flags = mask.view(torch.uint8)
    return flags if mask.stride(0) else flags[:1]


def _widths(D: int) -> tuple[int, int]:
    """Columns of the first tile of a head and of the second one, if any."""
    return (128, 64) if 128 < D <= 192 else (max(16, 1 << (D - 1).bit_length()), 0)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    CONFIG: str | None = None,
) -> None:
    """out = T(softmax(scale * q k^T over the keys with a flag) v), zeros in rows without such a key.

    Shapes: q [B, H, S, D], k [B, H, L, D], v [B, H, L, Dv], out [B, H, S, Dv], unit last strides, any others; mask [B, 1, S, L]
    bool, any strides; T in bfloat16, float16. Scores, softmax and sums in fp32, weights rounded to T for the second product.
    Rows that begin at multiples of 16 bytes are read and written by TMA, others element by element (correct, slow).
    Mapping: a first kernel reads the mask once and notes for each tile of it if all, some or none of its flags are set, a second
    one which tiles a block of queries needs. Then a block owns some queries of a head and streams the tiles of keys that one of
    them sees. It reads the mask again for those that are seen in part, and for all behind a gap. A mask that all sequences share
    (stride 0) is sorted once.
    CONFIG names an entry of CONFIGS. None: 128 positions of a head, or 64 if blocks are few or heads are large.
    """
    B, H, S, D = q.shape
    L = k.shape[2]
    if out.numel() == 0:
        return
    is_large = D <= 192 and B * H * -(-S // 128) >= FEW_BLOCKS
    config = CONFIGS[CONFIG or ("s128_n64" if is_large else "s64_n64")]
    scale = _in_base_2(scale)
    flags = _one_if_shared(mask)
    blocks, tiles = -(-S // config.tile_s), -(-L // config.tile_n)
    kinds = torch.empty((flags.shape[0], blocks, tiles), dtype=torch.int32, device=q.device)
    bounds = torch.empty((flags.shape[0], blocks, 4), dtype=torch.int32, device=q.device)
    stream = torch.cuda.current_stream()
    ct.launch(stream, (kinds.numel(), 1, 1), _sort_tiles, (flags, kinds, config.tile_s, config.tile_n))
    ct.launch(stream, (flags.shape[0] * blocks, 1, 1), find_bounds, (kinds, bounds, 1 << (tiles - 1).bit_length()))
    args = (
        q, k, v, flags, bounds, out, scale, _power_of_two(scale), scale < 0,
        config.tile_s, config.tile_n, *_widths(D), max(16, 1 << (v.shape[3] - 1).bit_length()),
    )  # fmt: skip
    ct.launch(stream, (B * H * blocks, 1, 1), _KERNELS[config[2:]], args)

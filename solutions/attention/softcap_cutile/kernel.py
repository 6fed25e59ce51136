"""Attention with a soft cap of its scores and a mask of numbers, cuTile: a block of positions of a head streams all keys.

The mask is added to the capped scores in float32. The least number of its dtype is so large that a score vanishes beside it, so a
row that sees no key has equal weights, as in PyTorch. For that reason no tile of keys is left out. In base 2 that number would be
infinite, so that differences of scores are taken before.
"""

from typing import Annotated, NamedTuple

import cuda.tile as ct
import torch

# The head size is a compile-time constant: tiles that hold whole heads need no mask along them.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Masks = Annotated[ct.Array, ct.ArrayAnnotation(index_dtype=ct.int64)]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
LEAST_SCORE = -3.4028234663852886e38
FEW_BLOCKS = 2 * 132
"""Fewer than this leave multiprocessors without work: smaller blocks are chosen. Not measured."""


@ct.function
def _add_keys(
    q, k, v, mask, state, row, steep, softcap, batch, plane, head, block,
    LAST: Flag, TILE_S: Int, TILE_N: Int, TILE_D: Int,
):  # fmt: skip
    """A step of the running softmax: a block of keys. LAST: some of them are behind the last key."""
    acc, sums, largest = state
    index, shape = (batch, head, 0, block), (1, 1, TILE_D, TILE_N)
    keys = ct.load(k, index, shape, order=(0, 1, 3, 2), padding_mode=ZERO).reshape((TILE_D, TILE_N))
    scores = ct.mma(q, keys, ct.zeros((TILE_S, TILE_N), dtype=ct.float32))
    # tanh(x) = 1 - 2 / (1 + e^(2 x)); `steep` makes 2 x in base 2 of a score.
    capped = softcap - 2.0 * softcap / (1.0 + ct.exp2(scores * steep))
    rows = row + ct.arange(TILE_S, dtype=ct.int32)[:, None]
    columns = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = (rows < mask.shape[2]) & (columns < mask.shape[3])
    numbers = ct.gather(mask, (plane, 0, rows, columns), mask=inside, padding_value=0, check_bounds=False)
    scores = capped + numbers.astype(ct.float32)
    if LAST:
        scores = ct.where(columns < mask.shape[3], scores, -INFINITY)
    grown = ct.maximum(largest, ct.max(scores, axis=1, keepdims=True))
    weights = ct.exp2((scores - grown) * LOG2_E, flush_to_zero=True)
    shrink = ct.exp2((largest - grown) * LOG2_E, flush_to_zero=True)
    sums = sums * shrink + ct.sum(weights, axis=1, keepdims=True)
    values = ct.load(v, (batch, head, block, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO).reshape((TILE_N, TILE_D))
    return ct.mma(weights.astype(v.dtype), values, acc * shrink), sums, grown


@ct.kernel
def _capped_attention(
    q: Heads,
    k: Heads,
    v: Heads,
    mask: Masks,
    out: Heads,
    softcap: float,
    steep: float,
    GROUP: Int,
    TILE_S: Int,
    TILE_N: Int,
    TILE_D: Int,
):
    """A block has TILE_S positions of a query head."""
    tiles = ct.cdiv(q.shape[2], TILE_S)
    turn, tile = ct.bid(0) // tiles, ct.bid(0) % tiles
    batch, head = turn // q.shape[1], turn % q.shape[1]
    kv_head = head // GROUP
    plane = ct.minimum(batch, mask.shape[0] - 1)  # one mask for all sequences, or one for each
    row = tile * TILE_S
    shape = (1, 1, TILE_S, TILE_D)
    queries = ct.load(q, (batch, head, tile, 0), shape, padding_mode=ZERO).reshape((TILE_S, TILE_D))
    acc = ct.zeros((TILE_S, TILE_D), dtype=ct.float32)
    sums = ct.zeros((TILE_S, 1), dtype=ct.float32)
    state = acc, sums, ct.full((TILE_S, 1), LEAST_SCORE, dtype=ct.float32)
    whole = k.shape[2] // TILE_N
    for block in range(0, whole):
        state = _add_keys(
            queries, k, v, mask, state, row, steep, softcap, batch, plane, kv_head, block, False, TILE_S, TILE_N, TILE_D
        )
    for block in range(whole, ct.cdiv(k.shape[2], TILE_N)):
        state = _add_keys(
            queries, k, v, mask, state, row, steep, softcap, batch, plane, kv_head, block, True, TILE_S, TILE_N, TILE_D
        )
    acc, sums, _ = state
    ct.store(out, (batch, head, tile, 0), (acc * (1.0 / sums)).astype(out.dtype).reshape(shape))


class Config(NamedTuple):
    """Positions of a block; keys of a step; warps; blocks a multiprocessor."""

    tile_s: int
    tile_n: int
    warps: int
    occupancy: int


CONFIGS = {
    "s128_n64": Config(128, 64, 8, 1),
    "s64_n64": Config(64, 64, 4, 2),
    "s64_n32": Config(64, 32, 4, 2),
    "s16_n64": Config(16, 64, 4, 2),
}
_KERNELS = {
    config[2:]: _capped_attention.replace_hints(num_worker_warps=config.warps, occupancy=config.occupancy)
    for config in CONFIGS.values()
}


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    softcap: float,
    scale: float,
    out: torch.Tensor,
    *,
    CONFIG: str | None = None,
) -> None:
    """out = T(w v), w = softmax of softcap * tanh(scale * q k^T / softcap) + mask.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, L, D], unit last strides, any others; mask [B, 1, S, L] T, any strides; T is
    bfloat16. Scores, softmax and sums in fp32, weights rounded to T for the second product.
    Rows that begin at multiples of 16 bytes are read and written by TMA, others element by element (correct, slow).
    CONFIG names an entry of CONFIGS. None: 16 positions of a head if there are no more, else 128, or 64 if blocks are few.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    is_large = S > 64 and B * Hq * -(-S // 128) >= FEW_BLOCKS
    config = CONFIGS[CONFIG or ("s16_n64" if S <= 16 else "s128_n64" if is_large else "s64_n64")]
    args = (
        q, k, v, mask if mask.stride(0) else mask[:1], out, softcap, 2 * LOG2_E * scale / softcap, Hq // k.shape[1],
        config.tile_s, config.tile_n, max(16, 1 << (D - 1).bit_length()),
    )  # fmt: skip
    blocks = B * Hq * -(-S // config.tile_s)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _KERNELS[config[2:]], args)

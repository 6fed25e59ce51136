"""Attention to latents, cuTile: they are keys and values of all heads, their positions are split among blocks.

The running softmax is in base 2. Its largest score starts at the least finite number, so that no difference of two is NaN.
"""

from typing import Annotated

import cuda.tile as ct
import torch

# Widths are compile-time constants: tiles that hold whole rows need no mask along them.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2,))]
Parts = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
LEAST_SCORE = -3.4028234663852886e38
MOST_SPLITS = 64
FEW_POSITIONS = 256
"""Up to so many are not split: a second launch should take longer than their few steps. Not measured."""
FEW_HEADS = 32
"""Up to so many heads are columns of the products, of which the instructions have as few as 8; rows come in 64."""


@ct.function
def _along(values, FEW: Flag):
    """Numbers of positions along the rows of the scores, or their columns."""
    return values[:, None] if FEW else values[None, :]


@ct.function
def _add_latents(
    queries, rotated, latents, keys, state, scale, batch, block, length,
    LAST: Flag, FEW: Flag, TILE_N: Int, TILE_R: Int, TILE_E: Int,
):  # fmt: skip
    """A step of the running softmax over TILE_N positions; each latent is loaded once. FEW: heads are columns, else rows."""
    acc, sums, largest = state
    values = ct.load(latents, (batch, block, 0), (1, TILE_N, TILE_R), padding_mode=ZERO).reshape((TILE_N, TILE_R))
    rope = ct.load(keys, (batch, block, 0), (1, TILE_N, TILE_E), padding_mode=ZERO).reshape((TILE_N, TILE_E))
    if FEW:
        scores = ct.mma(rope, rotated, ct.zeros((TILE_N, rotated.shape[1]), dtype=ct.float32))
        scores = ct.mma(values, queries, scores) * scale
    else:
        scores = ct.mma(rotated, ct.transpose(rope), ct.zeros((rotated.shape[0], TILE_N), dtype=ct.float32))
        scores = ct.mma(queries, ct.transpose(values), scores) * scale
    if LAST:
        places = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        scores = ct.where(_along(places, FEW) < length, scores, -INFINITY)
    axis = 0 if FEW else 1
    grown = ct.maximum(largest, ct.max(scores, axis=axis, keepdims=True))
    weights = ct.exp2(scores - grown, flush_to_zero=True)
    shrink = ct.exp2(largest - grown, flush_to_zero=True)
    sums = sums * shrink + ct.sum(weights, axis=axis, keepdims=True)
    if FEW:
        acc = ct.mma(ct.transpose(values), weights.astype(values.dtype), acc * shrink)
    else:
        acc = ct.mma(weights.astype(values.dtype), values, acc * shrink)
    return acc, sums, grown


@ct.kernel(num_worker_warps=8, occupancy=1)
def _attend(
    q_nope: Rows,
    q_pe: Rows,
    latents: Rows,
    keys: Rows,
    out: Parts,
    statistics: ct.Array,
    scale: float,
    SPLITS: Int,
    FEW: Flag,
    TILE_H: Int,
    TILE_N: Int,
    TILE_R: Int,
    TILE_E: Int,
):
    """A block has TILE_H heads and one of SPLITS spans of positions; out is [B, H, SPLITS, R], not divided for more than one.

    Statistics [B, H, SPLITS, 2] are the largest score and the sum of weights.
    """
    tiles = ct.cdiv(q_nope.shape[1], TILE_H)
    batch, tile, split = ct.bid(0) // tiles, ct.bid(0) % tiles, ct.bid(1)
    length = latents.shape[1]
    blocks = ct.cdiv(length, TILE_N)
    share = ct.cdiv(blocks, SPLITS)
    low = split * share
    high = ct.minimum(low + share, blocks)
    full = ct.minimum(high, length // TILE_N)
    if FEW:
        shape, order, line, block_shape = (1, TILE_R, TILE_H), (0, 2, 1), (1, TILE_H), (TILE_R, TILE_H)
        queries = ct.load(q_nope, (batch, 0, tile), shape, order=order, padding_mode=ZERO).reshape(block_shape)
        rotated = ct.load(q_pe, (batch, 0, tile), (1, TILE_E, TILE_H), order=order, padding_mode=ZERO)
        rotated = rotated.reshape((TILE_E, TILE_H))
    else:
        line, block_shape = (TILE_H, 1), (TILE_H, TILE_R)
        queries = ct.load(q_nope, (batch, tile, 0), (1, TILE_H, TILE_R), padding_mode=ZERO).reshape(block_shape)
        rotated = ct.load(q_pe, (batch, tile, 0), (1, TILE_H, TILE_E), padding_mode=ZERO).reshape((TILE_H, TILE_E))
    state = (
        ct.zeros(block_shape, dtype=ct.float32),
        ct.zeros(line, dtype=ct.float32),
        ct.full(line, LEAST_SCORE, dtype=ct.float32),
    )
    for block in range(low, full):
        state = _add_latents(
            queries, rotated, latents, keys, state, scale, batch, block, length, False, FEW, TILE_N, TILE_R, TILE_E
        )
    if full < high:
        state = _add_latents(
            queries, rotated, latents, keys, state, scale, batch, full, length, True, FEW, TILE_N, TILE_R, TILE_E
        )
    acc, sums, largest = state
    if SPLITS == 1:
        acc = acc * (1.0 / sums)
    found = acc.astype(out.dtype)
    if FEW:
        found = ct.transpose(found)
    ct.store(out, (batch, tile, split, 0), found.reshape((1, TILE_H, 1, TILE_R)))
    if SPLITS > 1:
        heads = tile * TILE_H + ct.arange(TILE_H, dtype=ct.int32)
        inside = heads < q_nope.shape[1]
        place = (batch, heads, split, 0)
        ct.scatter(statistics, place, largest.reshape((TILE_H,)), mask=inside, check_bounds=False)
        place = (batch, heads, split, 1)
        ct.scatter(statistics, place, sums.reshape((TILE_H,)), mask=inside, check_bounds=False)


@ct.kernel(num_worker_warps=4, occupancy=4)
def _join(parts: Parts, statistics: ct.Array, out: Rows, SPLITS: Int, TILE_R: Int):
    """A block has a head and TILE_R columns: the sum of its parts, each at the scale of the largest score among them."""
    batch, head = ct.bid(0) // out.shape[1], ct.bid(0) % out.shape[1]
    spans = ct.arange(SPLITS, dtype=ct.int32)
    largest = ct.gather(statistics, (batch, head, spans, 0), check_bounds=False)
    sums = ct.gather(statistics, (batch, head, spans, 1), check_bounds=False)
    shape = (1, 1, SPLITS, TILE_R)
    accs = ct.load(parts, (batch, head, 0, ct.bid(1)), shape, padding_mode=ZERO).reshape((SPLITS, TILE_R))
    shares = ct.exp2(largest - ct.max(largest, axis=0))
    found = ct.sum(accs * shares[:, None], axis=0) * (1.0 / ct.sum(sums * shares, axis=0))
    ct.store(out, (batch, head, ct.bid(1)), found.astype(out.dtype).reshape((1, 1, TILE_R)))


def _splits(programs: int, length: int, wanted: int, least: int) -> int:
    """A power of two, so that a growing cache compiles few kernels: up to `wanted` blocks, of `least` positions or more each."""
    if length <= FEW_POSITIONS:
        return 1
    most = min(-(-length // least), max(1, wanted // programs), MOST_SPLITS)
    return 1 << (most.bit_length() - 1)


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_nope: torch.Tensor,
    k_rot: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCKS: int = 132,
    LEAST: int = 128,
    TILE_N: int = 64,
) -> None:
    """out = T(softmax(scale * (q_nope kv_nope^T + q_pe k_rot^T)) kv_nope): scores, softmax and sums in fp32.

    Shapes: q_nope and out [B, H, R], q_pe [B, H, E], kv_nope [B, L, R], k_rot [B, L, E]; unit last strides, any others; T in
    bfloat16, float16. Weights are rounded to T for the second product. Rows that begin at multiples of 16 bytes are read by TMA,
    others element by element (correct, slow).
    Mapping: a block owns up to 64 heads and one of several spans of positions, in steps of TILE_N; there are BLOCKS of them, or
    fewer where a span would get under LEAST positions. Parts are kept in fp32 and joined by blocks of a head.
    """
    B, H, R = q_nope.shape
    L = kv_nope.shape[1]
    if q_nope.numel() == 0:
        return
    few = H <= FEW_HEADS
    tile_h = max(8, 1 << (H - 1).bit_length()) if few else 64
    tiles = -(-H // tile_h)
    # With few heads latents lie along rows in the second product, and its fast instructions have 64.
    tile_r = max(64, 1 << (R - 1).bit_length())
    tile_e = max(16, 1 << (k_rot.shape[2] - 1).bit_length())
    splits = _splits(B * tiles, L, BLOCKS, LEAST)
    stream = torch.cuda.current_stream()
    parts = statistics = out.view(B, H, 1, R)
    if splits > 1:
        rows = B * H * splits
        # Sums of latents, then the largest score and the sum of weights of each head and span.
        workspace = torch.empty(rows * (R + 2), dtype=torch.float32, device=out.device)
        parts = workspace[: rows * R].view(B, H, splits, R)
        statistics = workspace[rows * R :].view(B, H, splits, 2)
    args = (
        q_nope, q_pe, kv_nope, k_rot, parts, statistics, scale * LOG2_E, splits, few, tile_h, TILE_N, tile_r, tile_e
    )  # fmt: skip
    ct.launch(stream, (B * tiles, splits, 1), _attend, args)
    if splits > 1:
        tile = min(128, tile_r)
        ct.launch(stream, (B * H, -(-R // tile), 1), _join, (parts, statistics, out, splits, tile))

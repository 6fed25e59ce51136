"""Rotary position embeddings in float32 with tables of any dtype, and the one of a single tensor, cuTile."""

from typing import Annotated

import cuda.tile as ct
import torch

# Numbers of heads and the head size are compile-time constants: aligned heads are then read 16 bytes at a time. Batch and
# sequence length are dynamic.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 3))]
Table = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]


@ct.function
def _apart(pairs, TILE_H: Int, TILE_S: Int, TILE_P: Int):
    """The first and the second elements of neighbouring pairs, which were loaded as they lie, in whole vectors."""
    split = ct.reshape(pairs, (TILE_H, TILE_S, TILE_P, 2))
    shape = (TILE_H, TILE_S, TILE_P)
    even = ct.reshape(ct.extract(split, (0, 0, 0, 0), (TILE_H, TILE_S, TILE_P, 1)), shape)
    odd = ct.reshape(ct.extract(split, (0, 0, 0, 1), (TILE_H, TILE_S, TILE_P, 1)), shape)
    return even, odd


@ct.function
def _entries(table, batch, position, PAIRS: Int, NEIGHBOURS: Flag, FULL: Flag, TILE_S: Int, TILE_P: Int):
    """What turns the first and the second elements of pairs: a tile of positions and pairs each. FULL: they differ."""
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
    lanes = ct.arange(TILE_P, dtype=ct.int32)[None, None, :]
    if FULL and NEIGHBOURS:
        dims = ct.arange(2 * TILE_P, dtype=ct.int32)[None, None, :]
        inside = (positions < table.shape[1]) & (dims < 2 * PAIRS)
        both = ct.gather(table, (batch, positions, dims), mask=inside, check_bounds=False)
        return _apart(both, 1, TILE_S, TILE_P)
    inside = (positions < table.shape[1]) & (lanes < PAIRS)
    first = ct.gather(table, (batch, positions, lanes), mask=inside, check_bounds=False)
    if FULL:
        return first, ct.gather(table, (batch, positions, lanes + PAIRS), mask=inside, check_bounds=False)
    return first, first


@ct.function
def _turned(first, second, tables, ONE_ROUNDING: Flag):
    # A product of tiles of T is rounded to T. The sum is made in fp32: a sum in T would be fused with a product, which
    # loses the rounding of that product. (In fp32 they are fused: one rounding fewer than PyTorch.)
    cos_1, sin_1, cos_2, sin_2 = tables
    if ONE_ROUNDING:
        first, second = first.astype(ct.float32), second.astype(ct.float32)
        cos_1, sin_1 = cos_1.astype(ct.float32), sin_1.astype(ct.float32)
        cos_2, sin_2 = cos_2.astype(ct.float32), sin_2.astype(ct.float32)
    y_1 = (first * cos_1).astype(ct.float32) - (second * sin_1).astype(ct.float32)
    y_2 = (second * cos_2).astype(ct.float32) + (first * sin_2).astype(ct.float32)
    return y_1, y_2


@ct.function
def _turn(
    x, out, tables, batch, head, position, PAIRS: Int, NEIGHBOURS: Flag, ONE_ROUNDING: Flag,
    TILE_H: Int, TILE_S: Int, TILE_P: Int,
):  # fmt: skip
    heads = head + ct.arange(TILE_H, dtype=ct.int32)[:, None, None]
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
    rows = (heads < x.shape[1]) & (positions < x.shape[2])
    if NEIGHBOURS:
        dims = ct.arange(2 * TILE_P, dtype=ct.int32)[None, None, :]
        inside = rows & (dims < 2 * PAIRS)
        given = ct.gather(x, (batch, heads, positions, dims), mask=inside, check_bounds=False)
        even, odd = _apart(given, TILE_H, TILE_S, TILE_P)
        first, second = _turned(even, odd, tables, ONE_ROUNDING)
        column = (TILE_H, TILE_S, TILE_P, 1)
        both = ct.cat((ct.reshape(first.astype(out.dtype), column), ct.reshape(second.astype(out.dtype), column)), 3)
        both = ct.reshape(both, (TILE_H, TILE_S, 2 * TILE_P))
        ct.scatter(out, (batch, heads, positions, dims), both, mask=inside, check_bounds=False)
    else:
        lanes = ct.arange(TILE_P, dtype=ct.int32)[None, None, :]
        inside = rows & (lanes < PAIRS)
        x_1 = ct.gather(x, (batch, heads, positions, lanes), mask=inside, check_bounds=False)
        x_2 = ct.gather(x, (batch, heads, positions, lanes + PAIRS), mask=inside, check_bounds=False)
        first, second = _turned(x_1, x_2, tables, ONE_ROUNDING)
        ct.scatter(out, (batch, heads, positions, lanes), first.astype(out.dtype), mask=inside, check_bounds=False)
        place = (batch, heads, positions, lanes + PAIRS)
        ct.scatter(out, place, second.astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel(num_worker_warps=4)
def _turn_heads(
    q: Heads,
    k: Heads,
    cos: Table,
    sin: Table,
    q_out: Heads,
    k_out: Heads,
    K_HEADS: Int,
    PAIRS: Int,
    NEIGHBOURS: Flag,
    FULL: Flag,
    ONE_ROUNDING: Flag,
    TILE_H: Int,
    TILE_S: Int,
    TILE_P: Int,
):
    """A block turns TILE_H heads of q or of the K_HEADS of k, which may be none, at TILE_S positions."""
    q_tiles = ct.cdiv(q.shape[1], TILE_H)
    tiles_h = q_tiles + ct.cdiv(K_HEADS, TILE_H)
    tiles_s = ct.cdiv(q.shape[2], TILE_S)
    # Blocks of the same positions are neighbours: they share cos and sin, and a token's heads are contiguous in memory.
    tile_h = ct.bid(0) % tiles_h
    position = ct.bid(0) // tiles_h % tiles_s * TILE_S
    batch = ct.bid(0) // tiles_h // tiles_s
    table = ct.minimum(batch, cos.shape[0] - 1)  # cos and sin have one batch entry, or as many as q
    cos_1, cos_2 = _entries(cos, table, position, PAIRS, NEIGHBOURS, FULL, TILE_S, TILE_P)
    sin_1, sin_2 = _entries(sin, table, position, PAIRS, NEIGHBOURS, FULL, TILE_S, TILE_P)
    tables = (cos_1, sin_1, cos_2, sin_2)
    if tile_h < q_tiles:
        head = tile_h * TILE_H
        _turn(q, q_out, tables, batch, head, position, PAIRS, NEIGHBOURS, ONE_ROUNDING, TILE_H, TILE_S, TILE_P)
    else:
        head = (tile_h - q_tiles) * TILE_H
        _turn(k, k_out, tables, batch, head, position, PAIRS, NEIGHBOURS, ONE_ROUNDING, TILE_H, TILE_S, TILE_P)


def _launch(q, k, cos, sin, q_out, k_out, TILE_H, TILE_S, k_heads, neighbours=False, full=True, one_rounding=True):
    """Shapes: q, q_out [B, Hq, S, D]; k, k_out [B, k_heads, S, D]; tables [1 or B, S, D]; any strides, the last being 1.

    T is bf16, fp16 or fp32, and so is the dtype of the tables. A block turns TILE_H heads at TILE_S positions. None chooses 8
    heads and about 4096 elements a block, or 2 heads and one position below 64 tokens (more blocks, less work in each).
    """
    B, q_heads, S, D = q.shape
    if q.numel() == 0 and k.numel() == 0:
        return
    tile_p = 1 << (D // 2 - 1).bit_length()
    if TILE_H is None:
        TILE_H = 2 if B * S < 64 else 8
    TILE_H = min(TILE_H, 1 << (max(q_heads, k_heads) - 1).bit_length())
    if TILE_S is None:
        TILE_S = 1 if B * S < 64 or S == 1 else max(1, 2048 // (TILE_H * tile_p))
    blocks = (-(-q_heads // TILE_H) - (-k_heads // TILE_H)) * -(-S // TILE_S) * B
    args = (
        q, k, cos, sin, q_out, k_out, k_heads, D // 2, neighbours, full, one_rounding, TILE_H, TILE_S, tile_p
    )  # fmt: skip
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _turn_heads, args)


def run_rope_neox_fp32(q, k, cos, sin, q_out, k_out, *, TILE_H=None, TILE_S=None):
    """y[i] = T(x[i] * c[i] - x[i+D/2] * s[i]), y[i+D/2] = T(x[i+D/2] * c[i+D/2] + x[i] * s[i+D/2]) for x = q and x = k.

    c and s are cos and sin [1 or B, S, D]; products and sums in float32.
    """
    _launch(q, k, cos, sin, q_out, k_out, TILE_H, TILE_S, k.shape[1])


def run_rope_neox_single(x, cos, sin, out, *, TILE_H=None, TILE_S=None):
    """As run_rope_neox_fp32 for one tensor, but each product is rounded to T, and then the sum. cos and sin are in T."""
    _launch(x, x, cos, sin, out, out, TILE_H, TILE_S, 0, one_rounding=False)


def run_rope_interleaved_fp32(q, k, cos, sin, q_out, k_out, *, TILE_H=None, TILE_S=None):
    """y[2i] = T(x[2i] * c[2i] - x[2i+1] * s[2i]), y[2i+1] = T(x[2i+1] * c[2i+1] + x[2i] * s[2i+1]) for x = q and x = k.

    c and s are cos and sin [1 or B, S, D]; products and sums in float32.
    """
    _launch(q, k, cos, sin, q_out, k_out, TILE_H, TILE_S, k.shape[1], neighbours=True)


def run_rope_pairs_fp32(q, k, cos, sin, q_out, k_out, *, TILE_H=None, TILE_S=None):
    """As run_rope_interleaved_fp32, but entry i of the first half of cos and sin is that of both elements of pair i."""
    _launch(q, k, cos, sin, q_out, k_out, TILE_H, TILE_S, k.shape[1], neighbours=True, full=False)

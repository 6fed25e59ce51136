"""Rotary position embeddings of neighbouring pairs, and by tables of half a head's width, cuTile."""

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
def _turned(even, odd, cos, sin, ONE_ROUNDING: Flag):
    # A product of tiles of T is rounded to T. The sum is made in fp32: a sum in T would be fused with a product, which
    # loses the rounding of that product. (In fp32 they are fused: one rounding fewer than PyTorch.)
    if ONE_ROUNDING:
        even, odd = even.astype(ct.float32), odd.astype(ct.float32)
        cos, sin = cos.astype(ct.float32), sin.astype(ct.float32)
    first = (even * cos).astype(ct.float32) - (odd * sin).astype(ct.float32)
    second = (odd * cos).astype(ct.float32) + (even * sin).astype(ct.float32)
    return first, second


@ct.function
def _turn_halves(x, out, cos, sin, batch, head, position, PAIRS: Int, TILE_H: Int, TILE_S: Int, TILE_P: Int):
    heads = head + ct.arange(TILE_H, dtype=ct.int32)[:, None, None]
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
    lanes = ct.arange(TILE_P, dtype=ct.int32)[None, None, :]
    inside = (heads < x.shape[1]) & (positions < x.shape[2]) & (lanes < PAIRS)
    x_1 = ct.gather(x, (batch, heads, positions, lanes), mask=inside, check_bounds=False)
    x_2 = ct.gather(x, (batch, heads, positions, lanes + PAIRS), mask=inside, check_bounds=False)
    first, second = _turned(x_1, x_2, cos, sin, False)
    ct.scatter(out, (batch, heads, positions, lanes), first.astype(out.dtype), mask=inside, check_bounds=False)
    ct.scatter(out, (batch, heads, positions, lanes + PAIRS), second.astype(out.dtype), mask=inside, check_bounds=False)


@ct.function
def _turn_pairs(
    x, out, cos, sin, batch, head, position, turns, START: Int, PAIRS: Int, TO_HALVES: Flag, ONE_ROUNDING: Flag,
    TILE_H: Int, TILE_S: Int, TILE_P: Int,
):  # fmt: skip
    heads = head + ct.arange(TILE_H, dtype=ct.int32)[:, None, None]
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
    rows = (heads < x.shape[1]) & (positions < x.shape[2])
    # Where the pairs begin at an odd element, the tile begins one element before the head.
    dims = ct.arange(2 * TILE_P, dtype=ct.int32)[None, None, :] - START % 2
    inside = rows & (dims < x.shape[3]) & (dims >= 0)
    given = ct.gather(x, (batch, heads, positions, dims), mask=inside, check_bounds=False)
    even, odd = _apart(given, TILE_H, TILE_S, TILE_P)
    first, second = _turned(even, odd, cos, sin, ONE_ROUNDING)
    first, second = first.astype(out.dtype), second.astype(out.dtype)
    if TO_HALVES:
        lanes = ct.arange(TILE_P, dtype=ct.int32)[None, None, :]
        inside = rows & (lanes < PAIRS)
        ct.scatter(out, (batch, heads, positions, lanes), first, mask=inside, check_bounds=False)
        ct.scatter(out, (batch, heads, positions, lanes + PAIRS), second, mask=inside, check_bounds=False)
    else:
        if x.shape[3] > 2 * PAIRS:  # the rest of a head passes bit for bit
            first, second = ct.where(turns, first, even), ct.where(turns, second, odd)
        column = (TILE_H, TILE_S, TILE_P, 1)
        both = ct.cat((ct.reshape(first, column), ct.reshape(second, column)), 3)
        both = ct.reshape(both, (TILE_H, TILE_S, 2 * TILE_P))
        ct.scatter(out, (batch, heads, positions, dims), both, mask=inside, check_bounds=False)


@ct.kernel
def _turn(
    q: Heads, k: Heads, cos: Table, sin: Table, q_out: Heads, k_out: Heads, START: Int, PAIRS: Int, HALVES: Flag, TO_HALVES: Flag,
    COMPLEX: Flag, ONE_ROUNDING: Flag, BOTH: Flag, TILE_H: Int, TILE_S: Int, TILE_P: Int,
):  # fmt: skip
    q_tiles = ct.cdiv(q.shape[1], TILE_H)
    tiles_h = q_tiles + (ct.cdiv(k.shape[1], TILE_H) if BOTH else 0)
    tiles_s = ct.cdiv(q.shape[2], TILE_S)
    # Blocks of the same positions are neighbours: they share cos and sin, and a token's heads are contiguous in memory.
    tile_h = ct.bid(0) % tiles_h
    position = ct.bid(0) // tiles_h % tiles_s * TILE_S
    batch = ct.bid(0) // tiles_h // tiles_s
    table = ct.minimum(batch, cos.shape[0] - 1)  # cos and sin have one batch entry, or as many as q
    positions = position + ct.arange(TILE_S, dtype=ct.int32)[None, :, None]
    lanes = ct.arange(TILE_P, dtype=ct.int32)[None, None, :] - (START + 1) // 2
    turns = (lanes >= 0) & (lanes < PAIRS)
    inside = (positions < q.shape[2]) & turns
    if COMPLEX:
        numbers = ct.arange(2 * TILE_P, dtype=ct.int32)[None, None, :]
        in_table = (positions < q.shape[2]) & (numbers < 2 * PAIRS)
        both = ct.gather(cos, (table, positions, numbers), mask=in_table, check_bounds=False)
        cosine, sine = _apart(both, 1, TILE_S, TILE_P)
    else:
        cosine = ct.gather(cos, (table, positions, lanes), mask=inside, check_bounds=False)
        sine = ct.gather(sin, (table, positions, lanes), mask=inside, check_bounds=False)
    if not BOTH or tile_h < q_tiles:
        head = tile_h * TILE_H
        if HALVES:
            _turn_halves(q, q_out, cosine, sine, batch, head, position, PAIRS, TILE_H, TILE_S, TILE_P)
        else:
            _turn_pairs(
                q, q_out, cosine, sine, batch, head, position, turns, START, PAIRS, TO_HALVES, ONE_ROUNDING,
                TILE_H, TILE_S, TILE_P,
            )  # fmt: skip
    else:
        head = (tile_h - q_tiles) * TILE_H
        if HALVES:
            _turn_halves(k, k_out, cosine, sine, batch, head, position, PAIRS, TILE_H, TILE_S, TILE_P)
        else:
            _turn_pairs(
                k, k_out, cosine, sine, batch, head, position, turns, START, PAIRS, TO_HALVES, ONE_ROUNDING,
                TILE_H, TILE_S, TILE_P,
            )  # fmt: skip


def _launch(q, k, cos, sin, q_out, k_out, pairs, flags, TILE_H, TILE_S, *, start=0, k_heads):
    """Heads and outputs [B, H, S, D], tables [1 or B, S, ...]; T = bf16, fp16 or fp32. Any strides, the last being 1.

    `flags`: pairs lie in the halves of a head; they are written to its halves; the table has cosine and sine side by side; fp32
    and one rounding; there is a k. A block rotates and copies TILE_H heads of q or of k at TILE_S positions. None chooses about
    4096 elements a block, or TILE_S = 1 for a single position.
    """
    batch, q_heads, length, size = q.shape
    if batch == 0 or length == 0:
        return
    tile_p = 1 << (pairs - 1).bit_length() if flags[0] else (1 << (size + start % 2 - 1).bit_length()) // 2
    TILE_H = min(TILE_H, 1 << (max(q_heads, k_heads) - 1).bit_length())
    if TILE_S is None:
        TILE_S = 1 if length == 1 else max(1, 4096 // (TILE_H * 2 * tile_p))
    blocks = (-(-q_heads // TILE_H) - (-k_heads // TILE_H)) * -(-length // TILE_S) * batch
    args = (q, k, cos, sin, q_out, k_out, start, pairs, *flags, TILE_H, TILE_S, tile_p)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _turn, args)


_HALVES = (True, False, False, False, True)
_PAIRS = (False, False, False, False, True)
_TO_HALVES = (False, True, False, False, True)
_COMPLEX = (False, False, True, True, True)
_TAIL = (False, False, False, True, False)


def run_rope_half_tables(q, k, cos, sin, q_out, k_out, *, TILE_H=8, TILE_S=None):
    """q_out = cat(T(T(a * cos) - T(b * sin)), T(T(b * cos) + T(a * sin))), a and b the halves of a head, and the same for k.

    cos and sin [1 or B, S, D/2] in T.
    """
    _launch(q, k, cos, sin, q_out, k_out, q.shape[3] // 2, _HALVES, TILE_H, TILE_S, k_heads=k.shape[1])


def run_rope_pairs(q, k, cos, sin, q_out, k_out, *, TILE_H=8, TILE_S=None):
    """y[2i] = T(T(x[2i] * c) - T(x[2i+1] * s)), y[2i+1] = T(T(x[2i+1] * c) + T(x[2i] * s)) for a head x of q or k.

    c and s are entry i of the first half of cos and sin [1 or B, S, R] in T; elements from R on are copied.
    """
    _launch(q, k, cos, sin, q_out, k_out, cos.shape[2] // 2, _PAIRS, TILE_H, TILE_S, k_heads=k.shape[1])


def run_rope_pairs_to_halves(q, k, cos, sin, q_out, k_out, *, TILE_H=8, TILE_S=None):
    """y[i] = T(T(x[2i] * c) - T(x[2i+1] * s)), y[i+D/2] = T(T(x[2i+1] * c) + T(x[2i] * s)) for a head x of q or k.

    c and s are entry i of the first half of cos and sin [1 or B, S, D] in T.
    """
    _launch(q, k, cos, sin, q_out, k_out, q.shape[3] // 2, _TO_HALVES, TILE_H, TILE_S, k_heads=k.shape[1])


def run_rope_complex_pairs(q, k, turns, q_out, k_out, *, TILE_H=8, TILE_S=None):
    """y[2i] = T(x[2i] * c - x[2i+1] * s), y[2i+1] = T(x[2i+1] * c + x[2i] * s) for a head x of q or k, in float32.

    c and s are entries 2i and 2i+1 of turns [1 or B, S, D] in float32.
    """
    _launch(q, k, turns, turns, q_out, k_out, q.shape[3] // 2, _COMPLEX, TILE_H, TILE_S, k_heads=k.shape[1])


def run_rope_tail_pairs(x, cos, sin, out, *, TILE_H=8, TILE_S=None):
    """The last 2P elements of each head as in run_rope_complex_pairs, c and s being entry i of cos and sin [1 or B, S, P] in T.

    What comes before them is copied.
    """
    pairs = cos.shape[2]
    start = x.shape[3] - 2 * pairs
    _launch(x, x, cos, sin, out, out, pairs, _TAIL, TILE_H, TILE_S, start=start, k_heads=0)

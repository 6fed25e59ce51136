"""The gated delta rule in cuTile: one token with the state in registers, or chunks of tokens between which it stays there.

Rows of queries and keys are normalised by factors on products, so that a key of 16 bits enters products as it is.
"""

from typing import Annotated

import cuda.tile as ct
import torch
from _lib.cutile.head_rows import is_aligned, move_rows, rounded

# Sizes of keys and values are compile-time constants: tiles that hold whole rows then need no mask.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
States = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2, 3))]
Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO

EPSILON = 1e-6


@ct.function
def _inverse_norm(x):
    """Return the factor that makes the norm of x [K, 1] one."""
    return ct.rsqrt(ct.sum(x * x, axis=0, keepdims=True) + EPSILON)


@ct.kernel
def _one_token(
    q: Heads, k: Heads, v: Heads, g: ct.Array, beta: ct.Array, initial: States, out: Heads, final: States,
    scale: float, TILE_K: Int, TILE_V: Int,
):  # fmt: skip
    heads = v.shape[2]
    batch, head, block = ct.bid(0) // heads, ct.bid(0) % heads, ct.bid(1)
    key_head = head // (heads // k.shape[2])
    state = ct.load(initial, (batch, head, 0, block), (1, 1, TILE_K, TILE_V), padding_mode=ZERO)
    state = state.reshape((TILE_K, TILE_V))
    shape = (1, 1, 1, TILE_K)
    query = ct.load(q, (batch, 0, key_head, 0), shape, padding_mode=ZERO).reshape((TILE_K, 1)).astype(ct.float32)
    key = ct.load(k, (batch, 0, key_head, 0), shape, padding_mode=ZERO).reshape((TILE_K, 1)).astype(ct.float32)
    value = ct.load(v, (batch, 0, head, block), (1, 1, 1, TILE_V), padding_mode=ZERO).reshape((1, TILE_V))
    decay = ct.exp(ct.load(g, (batch, 0, head), (1, 1, 1)).reshape((1, 1)))
    rate = ct.load(beta, (batch, 0, head), (1, 1, 1)).reshape((1, 1)).astype(ct.float32)
    query = query * (_inverse_norm(query) * scale)
    key = key * _inverse_norm(key)
    # Both sums over the old state; what the query reads of the new one follows from its product with the key.
    state = state * decay
    found = ct.sum(state * key, axis=0, keepdims=True)
    read = ct.sum(state * query, axis=0, keepdims=True)
    delta = rate * (value.astype(ct.float32) - found)
    read = read + ct.sum(query * key, axis=0, keepdims=True) * delta
    state = state + key * delta
    ct.store(final, (batch, head, 0, block), state.reshape((1, 1, TILE_K, TILE_V)))
    ct.store(out, (batch, 0, head, block), read.astype(out.dtype).reshape((1, 1, 1, TILE_V)))


_ONE_TOKEN = {warps: _one_token.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


# ---- chunks of tokens -----------------------------------------------------------------------------
# Of a chunk, A = tril(beta_i e^(G_i - G_j) k_i k_j, -1), with G the sums of g within it and k normalised. What the tokens write
# is W = (I + A)^-1 diag(beta) (V - e^G K S), of the state S before the chunk. Then out = e^G Q S + P W, where
# P = tril(e^(G_i - G_j) q_i k_j), and the state becomes e^G_last S + (e^(G_last - G) K)^T W.
#
# A write may erase what is a thousand times larger than what it leaves, so products that make the state need the bits of float32.
# A float32 factor is split into three of bfloat16, which have its range too. Two of them are enough for what is rounded to
# bfloat16.

CHUNK = 64
Square = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2, 3))]
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2))]
Between = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2))]
Flag = ct.Constant[bool]
MINUS_INFINITY = float("-inf")


@ct.function
def _split(x):
    """Return three tiles of bfloat16 whose sum has all bits of x, which is in float32."""
    high = x.astype(ct.bfloat16)
    rest = x - high.astype(ct.float32)
    middle = rest.astype(ct.bfloat16)
    return high, middle, (rest - middle.astype(ct.float32)).astype(ct.bfloat16)


@ct.function
def _add_parts(high, middle, low, x_high, x_middle, x_low, acc):
    """Return acc + (high + middle + low) (x_high + x_middle + x_low) in float32, without products below 2^-24."""
    acc = ct.mma(low, x_high, acc)
    acc = ct.mma(middle, x_middle, acc)
    acc = ct.mma(high, x_low, acc)
    acc = ct.mma(middle, x_high, acc)
    acc = ct.mma(high, x_middle, acc)
    return ct.mma(high, x_high, acc)


@ct.function
def _add_product(x, y, acc, SPLIT: Flag, ROUNDED: Flag):
    """Return acc + x y in float32, of x in float32; ROUNDED: two parts of x are enough. SPLIT: y is split too, else bfloat16."""
    high, middle, low = _split(x)
    if SPLIT:
        y_high, y_middle, y_low = _split(y.astype(ct.float32))
        acc = _add_parts(high, middle, low, y_high, y_middle, y_low, acc)
    else:
        if not ROUNDED:
            acc = ct.mma(low, y, acc)
        acc = ct.mma(middle, y, acc)
        acc = ct.mma(high, y, acc)
    return acc


@ct.function
def _product(a, b, SPLIT: Flag):
    """Return a b^T in float32."""
    nothing = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)
    if SPLIT:
        found = _add_product(a.astype(ct.float32), ct.transpose(b), nothing, True, False)
    else:
        found = ct.mma(a, ct.transpose(b), nothing)
    return found


@ct.function
def _join(T, A, rows, cols, SIZE: Int):
    """Return the inverse of the diagonal blocks of I + A of twice the SIZE, of T, that of the blocks of SIZE."""
    below = (rows // (2 * SIZE) == cols // (2 * SIZE)) & (rows // SIZE > cols // SIZE)
    nothing = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)
    half = T.astype(ct.float16)
    corner = ct.mma(half, ct.where(below, A, 0.0).astype(ct.float16), nothing)
    return T - ct.mma(corner.astype(ct.float16), half, nothing)


@ct.function
def _inverse(A, rows, cols):
    """Return (I + A)^-1 of A [C, C] in float32, which is strictly lower.

    Keys are of norm one and rates at most one, so no element of an inverse of blocks exceeds one, and float16 holds them. With
    E = I - (I + A) T, which is about 2^-8, T (I + E + E^2) then has nearly the bits of float32.
    """
    identity = ct.where(rows == cols, 1.0, 0.0).astype(ct.float32)
    pairs = (rows // 2 == cols // 2) & (rows > cols)
    T = identity - ct.where(pairs, A, 0.0)
    T = _join(T, A, rows, cols, 2)
    T = _join(T, A, rows, cols, 4)
    T = _join(T, A, rows, cols, 8)
    T = _join(T, A, rows, cols, 16)
    T = _join(T, A, rows, cols, 32)
    rough = T.astype(ct.bfloat16)
    found = _add_product(A, rough, ct.zeros((CHUNK, CHUNK), dtype=ct.float32), False, False)
    rest = identity - rough.astype(ct.float32) - found
    high = rest.astype(ct.bfloat16)
    rest = ct.mma(high, high, rest)
    high = rest.astype(ct.bfloat16)
    low = (rest - high.astype(ct.float32)).astype(ct.bfloat16)
    return ct.mma(rough, high, ct.mma(rough, low, rough.astype(ct.float32)))


@ct.kernel(num_worker_warps=4, occupancy=2)
def _prepare_chunk(
    q: Heads, k: Heads, g: ct.Array, beta: ct.Array, inverse: Square, attention: Square, factors: Rows,
    heads: int, scale: float, SPLIT: Flag, TILE_K: Int,
):  # fmt: skip
    part = ct.bid(0)
    chunks = ct.cdiv(k.shape[1], CHUNK)
    chunk, batch, head = part % chunks, part // chunks // heads, part // chunks % heads
    key_head = head // (heads // k.shape[2])
    shape = (1, CHUNK, 1, TILE_K)
    keys = ct.load(k, (batch, chunk, key_head, 0), shape, padding_mode=ZERO).reshape((CHUNK, TILE_K))
    queries = ct.load(q, (batch, chunk, key_head, 0), shape, padding_mode=ZERO).reshape((CHUNK, TILE_K))
    logs = ct.load(g, (batch, chunk, head), (1, CHUNK, 1), padding_mode=ZERO).reshape((CHUNK,))
    rate = ct.load(beta, (batch, chunk, head), (1, CHUNK, 1), padding_mode=ZERO).reshape((CHUNK,)).astype(ct.float32)
    wide = keys.astype(ct.float32)
    of_k = ct.rsqrt(ct.sum(wide * wide, axis=1) + EPSILON)
    wide = queries.astype(ct.float32)
    of_q = ct.rsqrt(ct.sum(wide * wide, axis=1) + EPSILON) * scale
    rows, cols = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
    # 1. Decays between the tokens of the chunk; a difference of sums above zero belongs to no pair.
    sums = ct.cumsum(logs, axis=0)
    last = ct.sum(logs, axis=0)
    row = (1, 1, CHUNK)
    ct.store(factors, (part, 0, 0), (of_k * ct.exp(sums)).reshape(row))
    ct.store(factors, (part, 1, 0), (of_k * ct.exp(ct.minimum(last - sums, 0.0))).reshape(row))
    ct.store(factors, (part, 2, 0), (of_q * ct.exp(sums)).reshape(row))
    ct.store(factors, (part, 3, 0), (ct.exp(last) + ct.zeros((CHUNK,), dtype=ct.float32)).reshape(row))
    left = ct.exp(ct.where(rows >= cols, sums[:, None] - sums[None, :], MINUS_INFINITY)) * of_k[None, :]
    # 2. Products of queries and of keys with keys.
    high, middle, low = _split(_product(queries, keys, SPLIT) * left * of_q[:, None])
    square = (1, 1, CHUNK, CHUNK)
    ct.store(attention, (part, 0, 0, 0), high.reshape(square))
    ct.store(attention, (part, 1, 0, 0), middle.reshape(square))
    if SPLIT:
        ct.store(attention, (part, 2, 0, 0), low.reshape(square))
    pairs = _product(keys, keys, SPLIT) * left * (of_k * rate)[:, None]
    # 3. The inverse.
    high, middle, low = _split(_inverse(ct.where(rows > cols, pairs, 0.0), rows, cols) * rate[None, :])
    ct.store(inverse, (part, 0, 0, 0), high.reshape(square))
    ct.store(inverse, (part, 1, 0, 0), middle.reshape(square))
    ct.store(inverse, (part, 2, 0, 0), low.reshape(square))


# A long sequence of few heads has fewer blocks than the GPU has places, so it is cut into segments of chunks. The state behind a
# segment is linear in the state before it: S M + F, with F what the segment makes of nothing. One pass finds F, and M as what
# the segment makes of unit states while it writes no values. The states between segments follow, and a second pass has them all.


@ct.function
def _written(state, keys, values, inverse, factors, part, SPLIT: Flag):
    """Return what the tokens of a chunk write [TILE_V, CHUNK], of the part of the values that is new."""
    square = (1, 1, CHUNK, CHUNK)
    inverse_high = ct.transpose(ct.load(inverse, (part, 0, 0, 0), square).reshape((CHUNK, CHUNK)))
    inverse_middle = ct.transpose(ct.load(inverse, (part, 1, 0, 0), square).reshape((CHUNK, CHUNK)))
    inverse_low = ct.transpose(ct.load(inverse, (part, 2, 0, 0), square).reshape((CHUNK, CHUNK)))
    read = ct.load(factors, (part, 0, 0), (1, 1, CHUNK)).reshape((1, CHUNK))
    nothing = ct.zeros((state.shape[0], CHUNK), dtype=ct.float32)
    known = _add_product(state, ct.transpose(keys), nothing, SPLIT, False)
    high, middle, low = _split(values - known * read)
    return _add_parts(high, middle, low, inverse_high, inverse_middle, inverse_low, nothing)


@ct.function
def _behind(state, delta, keys, factors, part, SPLIT: Flag):
    """Return the state behind a chunk."""
    written = ct.load(factors, (part, 1, 0), (1, 1, CHUNK)).reshape((1, CHUNK))
    left = ct.load(factors, (part, 3, 0), (1, 1, 1)).reshape((1, 1))
    return _add_product(delta * written, keys, state * left, SPLIT, False)


@ct.kernel
def _scan_ahead(
    k: Heads, v: Heads, initial: States, inverse: Square, factors: Rows, states: Between, moves: Between,
    segments: int, segment_chunks: int, SPLIT: Flag, TILE_K: Int, TILE_V: Int,
):  # fmt: skip
    """Make states [pairs * segments, V, K] of what segments make of nothing, and moves [pairs * segments, K, K]."""
    heads, chunks = v.shape[2], ct.cdiv(v.shape[1], CHUNK)
    of_values = ct.cdiv(v.shape[3], TILE_V)
    blocks = of_values + ct.cdiv(k.shape[3], TILE_V)
    block, segment = ct.bid(0) % blocks, ct.bid(0) // blocks % (segments - 1)
    pair = ct.bid(0) // blocks // (segments - 1)
    batch, head = pair // heads, pair % heads
    key_head = head // (heads // k.shape[2])
    unit = block >= of_values  # columns of unit states
    if segment > 0 or not unit:
        state = ct.zeros((TILE_V, TILE_K), dtype=ct.float32)
        if segment == 0:
            first = ct.load(initial, (batch, head, 0, block), (1, 1, TILE_K, TILE_V), padding_mode=ZERO)
            state = ct.transpose(first.reshape((TILE_K, TILE_V)))
        if unit:
            rows = (block - of_values) * TILE_V + ct.arange(TILE_V, dtype=ct.int32)[:, None]
            state = ct.where(rows == ct.arange(TILE_K, dtype=ct.int32)[None, :], 1.0, 0.0).astype(ct.float32)
        for chunk in range(segment * segment_chunks, segment * segment_chunks + segment_chunks):
            part = pair * chunks + chunk
            keys = ct.load(k, (batch, chunk, key_head, 0), (1, CHUNK, 1, TILE_K), padding_mode=ZERO)
            keys = keys.reshape((CHUNK, TILE_K))
            values = ct.load(
                v, (batch, chunk, head, ct.minimum(block, of_values - 1)), (1, CHUNK, 1, TILE_V), padding_mode=ZERO
            )
            values = ct.transpose(values.reshape((CHUNK, TILE_V))).astype(ct.float32)
            values = ct.where(unit, 0.0, values)
            delta = _written(state, keys, values, inverse, factors, part, SPLIT)
            state = _behind(state, delta, keys, factors, part, SPLIT)
        if unit:
            ct.store(moves, (pair * segments + segment, block - of_values, 0), state.reshape((1, TILE_V, TILE_K)))
        else:
            ct.store(states, (pair * segments + segment + 1, block, 0), state.reshape((1, TILE_V, TILE_K)))


@ct.kernel(num_worker_warps=4)
def _join_segments(states: Between, moves: Between, segments: int, TILE_K: Int, TILE_V: Int):
    """Turn what each segment makes of nothing into the state before each segment but the first."""
    pair, block = ct.bid(0), ct.bid(1)
    shape = (1, TILE_V, TILE_K)
    state = ct.load(states, (pair * segments + 1, block, 0), shape, padding_mode=ZERO).reshape((TILE_V, TILE_K))
    for segment in range(2, segments):
        move = ct.load(moves, (pair * segments + segment - 1, 0, 0), (1, TILE_K, TILE_K), padding_mode=ZERO)
        made = ct.load(states, (pair * segments + segment, block, 0), shape, padding_mode=ZERO).reshape(
            (TILE_V, TILE_K)
        )
        state = _add_product(state, move.reshape((TILE_K, TILE_K)), made, True, False)
        ct.store(states, (pair * segments + segment, block, 0), state.reshape(shape))


@ct.kernel
def _scan_chunks(
    q: Heads, k: Heads, v: Heads, initial: States, inverse: Square, attention: Square, factors: Rows, states: Between,
    out: Heads, final: States, segments: int, segment_chunks: int, SPLIT: Flag, TILE_K: Int, TILE_V: Int,
):  # fmt: skip
    heads, chunks = v.shape[2], ct.cdiv(v.shape[1], CHUNK)
    blocks = ct.cdiv(v.shape[3], TILE_V)
    block, segment, pair = ct.bid(0) % blocks, ct.bid(0) // blocks % segments, ct.bid(0) // blocks // segments
    batch, head = pair // heads, pair % heads
    key_head = head // (heads // k.shape[2])
    # The state and all that is made of it are transposed: rows are columns of values, and stay in registers between products.
    if segment == 0:
        first = ct.load(initial, (batch, head, 0, block), (1, 1, TILE_K, TILE_V), padding_mode=ZERO)
        state = ct.transpose(first.reshape((TILE_K, TILE_V)))
    else:
        first = ct.load(states, (pair * segments + segment, block, 0), (1, TILE_V, TILE_K), padding_mode=ZERO)
        state = first.reshape((TILE_V, TILE_K))
    nothing = ct.zeros((TILE_V, CHUNK), dtype=ct.float32)
    square = (1, 1, CHUNK, CHUNK)
    for chunk in range(segment * segment_chunks, ct.minimum(chunks, (segment + 1) * segment_chunks)):
        part = pair * chunks + chunk
        keys = ct.load(k, (batch, chunk, key_head, 0), (1, CHUNK, 1, TILE_K), padding_mode=ZERO).reshape(
            (CHUNK, TILE_K)
        )
        queries = ct.load(q, (batch, chunk, key_head, 0), (1, CHUNK, 1, TILE_K), padding_mode=ZERO)
        queries = queries.reshape((CHUNK, TILE_K))
        values = ct.load(v, (batch, chunk, head, block), (1, CHUNK, 1, TILE_V), padding_mode=ZERO)
        values = ct.transpose(values.reshape((CHUNK, TILE_V))).astype(ct.float32)
        attention_high = ct.transpose(ct.load(attention, (part, 0, 0, 0), square).reshape((CHUNK, CHUNK)))
        attention_middle = ct.transpose(ct.load(attention, (part, 1, 0, 0), square).reshape((CHUNK, CHUNK)))
        asked = ct.load(factors, (part, 2, 0), (1, 1, CHUNK)).reshape((1, CHUNK))
        # 1. What the tokens write.
        delta = _written(state, keys, values, inverse, factors, part, SPLIT)
        # 2. What the queries read.
        found = _add_product(state, ct.transpose(queries), nothing, SPLIT, True) * asked
        high, middle, low = _split(delta)
        if SPLIT:
            attention_low = ct.transpose(ct.load(attention, (part, 2, 0, 0), square).reshape((CHUNK, CHUNK)))
            found = _add_parts(high, middle, low, attention_high, attention_middle, attention_low, found)
        else:
            found = ct.mma(middle, attention_high, found)
            found = ct.mma(high, attention_middle, found)
            found = ct.mma(high, attention_high, found)
        found = ct.transpose(found.astype(out.dtype)).reshape((1, CHUNK, 1, TILE_V))
        ct.store(out, (batch, chunk, head, block), found)
        # 3. The state behind the chunk.
        state = _behind(state, delta, keys, factors, part, SPLIT)
    if segment == segments - 1:
        ct.store(final, (batch, head, 0, block), ct.transpose(state).reshape((1, 1, TILE_K, TILE_V)))


_AHEAD = {warps: _scan_ahead.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_SCAN = {warps: _scan_chunks.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _scan_shape(heads, V, chunks):
    """Return the columns of values of a block and the number of segments, for the heads of all sequences."""
    # An H200 has places for 132 blocks. The first pass takes most of the time of the second: two segments gain nothing.
    segments = min(132 // heads, chunks // 4)
    if heads <= 32 and segments >= 3:
        return (128 if V > 64 else 64), segments
    return (128 if V > 64 and heads > 66 else 64), 1


def _chunks(q, k, v, g, beta, initial_state, out, final_state, scale, tile_v, segments, count):
    """Compute what run_chunk() does for the first ``count`` sequences, of tensors that the kernels read in place."""
    (_, T, Hv, V), B, K = v.shape, count, k.shape[3]
    chunks = -(-T // CHUNK)
    parts = B * Hv * chunks
    best_tile, best_segments = _scan_shape(B * Hv, V, chunks)
    tile_v = tile_v or best_tile
    segments = min(segments or best_segments, chunks)
    segment_chunks = -(-chunks // segments)
    segments = -(-chunks // segment_chunks)
    split, stream, blocks = q.dtype != torch.bfloat16, torch.cuda.current_stream(), -(-V // tile_v)
    inverse = torch.empty((rounded(parts), 3, CHUNK, CHUNK), dtype=torch.bfloat16, device=q.device)
    attention = torch.empty((rounded(parts), 3 if split else 2, CHUNK, CHUNK), dtype=torch.bfloat16, device=q.device)
    factors = torch.empty((rounded(parts), 4, CHUNK), dtype=torch.float32, device=q.device)
    between = rounded(B * Hv * segments if segments > 1 else 1)
    states = torch.empty((between, V, K), dtype=torch.float32, device=q.device)
    moves = torch.empty((between, K, K), dtype=torch.float32, device=q.device)
    args = (q, k, g, beta, inverse, attention, factors, Hv, scale, split, K)
    ct.launch(stream, (parts, 1, 1), _prepare_chunk, args)
    if segments > 1:
        args = (k, v, initial_state, inverse, factors, states, moves, segments, segment_chunks, split, K, tile_v)
        grid = B * Hv * (segments - 1) * (blocks + -(-K // tile_v))
        ct.launch(stream, (grid, 1, 1), _AHEAD[tile_v // 16], args)
        if segments > 2:
            args = (states, moves, segments, K, 16)
            ct.launch(stream, (B * Hv, -(-V // 16), 1), _join_segments, args)
    args = (
        q, k, v, initial_state, inverse, attention, factors, states, out, final_state, segments, segment_chunks,
        split, K, tile_v,
    )  # fmt: skip
    ct.launch(stream, (B * Hv * segments * blocks, 1, 1), _SCAN[tile_v // 16], args)


# ---- other sizes and layouts ----------------------------------------------------------------------
# cuTile compiles a kernel for each set of divisible sizes, strides and addresses, and one of chunks takes seconds. They know the
# heads of models in aligned rows of bfloat16. All else is first moved to rows of whole chunks and of 128 numbers, of one head
# and 128 of its values each. Zeros behind keys, values and tokens change nothing.

WIDE = 128
MOVED_AT_ONCE = 1 << 27
"""Numbers of the largest tensor that is moved at once."""


def _in_rows(tensors, tokens, wide, compute):
    """Call ``compute`` with tensors like those given but of one head a sequence, ``wide`` columns of keys and WIDE of values."""
    q, k, v, g, beta, initial_state, out, final_state = tensors
    B, _, Hv, V = v.shape
    blocks = -(-V // WIDE)
    every = B * Hv * blocks
    at_once = max(1, MOVED_AT_ONCE // (max(tokens, WIDE) * wide))
    for first in range(0, every, at_once):
        count = min(at_once, every - first)
        room = rounded(count)
        queries = torch.empty((room, tokens, wide), dtype=q.dtype, device=q.device)
        keys = torch.empty_like(queries)
        values = torch.empty((room, tokens, WIDE), dtype=q.dtype, device=q.device)
        found = torch.empty_like(values)
        logs = torch.empty((room, tokens, 1), dtype=torch.float32, device=q.device)
        rates = torch.empty((room, tokens, 1), dtype=beta.dtype, device=q.device)
        before = torch.empty((room, wide, WIDE), dtype=torch.float32, device=q.device)
        behind = torch.empty_like(before)
        place = count, first, Hv, blocks
        for x, rows in ((q, queries), (k, keys), (g[..., None], logs), (beta[..., None], rates)):
            move_rows(x, rows, *place)
        move_rows(v, values, *place, skip_c=WIDE)
        move_rows(initial_state.transpose(1, 2), before, *place, skip_c=WIDE)
        one_head = (x[:, :, None] for x in (queries, keys, values))
        compute((*one_head, logs, rates, before[:, None], found[:, :, None], behind[:, None]), count)
        move_rows(out, found, *place, skip_c=WIDE, into=False)
        move_rows(final_state.transpose(1, 2), behind, *place, skip_c=WIDE, into=False)


def run_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    final_state: torch.Tensor,
    *,
    TILE_V=None,
    WARPS=4,
):
    """Compute S = e^g S, delta = beta (v - k S), final_state = S + k^T delta and out = q final_state for one token.

    Shapes: q, k [B, 1, Hk, K], v and out [B, 1, Hv, V], g and beta [B, 1, Hv], states [B, Hv, K, V]; unit last strides.
    Mapping: a block owns TILE_V columns of the state of one head, which it reads and writes once.
    TILE_V = None: 32, or 16 if there would be fewer blocks than an H200 has places for.
    Tensors of bfloat16 with K and V of 64 or 128 and aligned rows are read in place; others are moved first, some heads at once.
    """
    B, _, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    tile_v = TILE_V or (16 if B * Hv * V <= 132 * 64 else 32)

    def compute(tensors, count):
        _, _, heads, width = tensors[2].shape
        args = (*tensors, K**-0.5, tensors[1].shape[3], tile_v)
        ct.launch(torch.cuda.current_stream(), (count * heads, width // tile_v, 1), _ONE_TOKEN[WARPS], args)

    tensors = q, k, v, g, beta, initial_state, out, final_state
    is_usual = q.dtype == torch.bfloat16 and K in (64, 128) and V in (64, 128)
    if is_usual and all(map(is_aligned, (q, k, v, initial_state, out, final_state))):
        compute(tensors, B)
    else:
        _in_rows(tensors, 1, 128 if K <= 128 else 256, compute)


def run_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    final_state: torch.Tensor,
    *,
    TILE_V=None,
    segments=None,
):
    """Compute S = e^g S + k^T delta with delta = beta (v - k e^g S), and out = q S, for T tokens one after the other.

    Shapes: q, k [B, T, Hk, K], v and out [B, T, Hv, V], g and beta [B, T, Hv], states [B, Hv, K, V]; unit last strides. Sums,
    decays and the state are in float32.
    Mapping: one block a chunk of 64 tokens and head inverts the system of the chunk. Then a block owns TILE_V columns of a head's
    state and goes through the chunks.
    TILE_V and segments = None: by the number of heads, so that the blocks fill an H200.
    Tensors of bfloat16 with K and V of 64 or 128 and aligned rows are read in place; others are moved first, some heads at once.
    """
    (B, T, _, V), K = v.shape, k.shape[3]
    if final_state.numel() == 0:
        return
    is_usual = q.dtype == torch.bfloat16 and K in (64, 128) and V in (64, 128)
    if is_usual and all(map(is_aligned, (q, k, v, initial_state, out, final_state))):
        _chunks(q, k, v, g, beta, initial_state, out, final_state, K**-0.5, TILE_V, segments, B)
        return
    tokens = -(-T // CHUNK) * CHUNK

    def compute(tensors, count):
        _chunks(*tensors, K**-0.5, TILE_V, segments, count)

    _in_rows((q, k, v, g, beta, initial_state, out, final_state), tokens, WIDE, compute)

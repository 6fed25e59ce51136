"""The gated delta rule in cuTile: one token with the state in registers, or chunks of tokens between which it stays there.

Rows of queries and keys are normalised by factors on products, so that a key of 16 bits enters products as it is.
"""

from typing import Annotated

import cuda.tile as ct
import torch

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
    """
    B, _, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    tile_v = TILE_V or (16 if B * Hv * V <= 132 * 64 else 32)
    args = (
        q, k, v, g, beta, initial_state, out, final_state,
        K**-0.5, 1 << (K - 1).bit_length(), tile_v,
    )  # fmt: skip
    ct.launch(torch.cuda.current_stream(), (B * Hv, -(-V // tile_v), 1), _ONE_TOKEN[WARPS], args)


# ---- chunks of tokens -----------------------------------------------------------------------------
# Of a chunk, A = tril(beta_i e^(G_i - G_j) k_i k_j, -1), with G the sums of g within it and k normalised. What the tokens write
# is W = (I + A)^-1 diag(beta) (V - e^G K S), of the state S before the chunk. Then out = e^G Q S + P W, where
# P = tril(e^(G_i - G_j) q_i k_j), and the state becomes e^G_last S + (e^(G_last - G) K)^T W.
#
# A float32 factor of a product is split into two of bfloat16, so that 16 of its bits count.

CHUNK = 64
Square = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2, 3))]
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2))]
Flag = ct.Constant[bool]
MINUS_INFINITY = float("-inf")


@ct.function
def _split(x):
    """Return two tiles of bfloat16 whose sum has 16 bits of x, which is in float32."""
    high = x.astype(ct.bfloat16)
    return high, (x - high.astype(ct.float32)).astype(ct.bfloat16)


@ct.function
def _add_product(high, low, x, acc, SPLIT: Flag):
    """Return acc + (high + low) x in float32; x is bfloat16, or is split too."""
    if SPLIT:
        x_high, x_low = _split(x.astype(ct.float32))
        acc = ct.mma(low, x_high, acc)
        acc = ct.mma(high, x_low, acc)
        acc = ct.mma(high, x_high, acc)
    else:
        acc = ct.mma(low, x, acc)
        acc = ct.mma(high, x, acc)
    return acc


@ct.function
def _product(a, b, SPLIT: Flag):
    """Return a b^T in float32."""
    nothing = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)
    if SPLIT:
        high, low = _split(a.astype(ct.float32))
        found = _add_product(high, low, ct.transpose(b), nothing, True)
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

    Keys are of norm one and rates at most one, so no element of an inverse of blocks exceeds one, and float16 holds them. A step
    of Newton then leaves the error of the split factors.
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
    high, low = _split(A)
    found = ct.mma(high, rough, ct.mma(low, rough, ct.zeros((CHUNK, CHUNK), dtype=ct.float32)))
    rest = identity - rough.astype(ct.float32) - found
    return ct.mma(rough, rest.astype(ct.bfloat16), rough.astype(ct.float32))


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
    high, low = _split(_product(queries, keys, SPLIT) * left * of_q[:, None])
    square = (1, 1, CHUNK, CHUNK)
    ct.store(attention, (part, 0, 0, 0), high.reshape(square))
    ct.store(attention, (part, 1, 0, 0), low.reshape(square))
    pairs = _product(keys, keys, SPLIT) * left * (of_k * rate)[:, None]
    # 3. The inverse.
    high, low = _split(_inverse(ct.where(rows > cols, pairs, 0.0), rows, cols) * rate[None, :])
    ct.store(inverse, (part, 0, 0, 0), high.reshape(square))
    ct.store(inverse, (part, 1, 0, 0), low.reshape(square))


@ct.kernel
def _scan_chunks(
    q: Heads, k: Heads, v: Heads, initial: States, inverse: Square, attention: Square, factors: Rows, out: Heads,
    final: States, SPLIT: Flag, TILE_K: Int, TILE_V: Int,
):  # fmt: skip
    heads, chunks = v.shape[2], ct.cdiv(v.shape[1], CHUNK)
    blocks = ct.cdiv(v.shape[3], TILE_V)
    pair, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    batch, head = pair // heads, pair % heads
    key_head = head // (heads // k.shape[2])
    # The state and all that is made of it are transposed: rows are columns of values, and stay in registers between products.
    state = ct.load(initial, (batch, head, 0, block), (1, 1, TILE_K, TILE_V), padding_mode=ZERO)
    state = ct.transpose(state.reshape((TILE_K, TILE_V)))
    nothing = ct.zeros((TILE_V, CHUNK), dtype=ct.float32)
    for chunk in range(chunks):
        part = pair * chunks + chunk
        keys = ct.load(k, (batch, chunk, key_head, 0), (1, CHUNK, 1, TILE_K), padding_mode=ZERO).reshape(
            (CHUNK, TILE_K)
        )
        queries = ct.load(q, (batch, chunk, key_head, 0), (1, CHUNK, 1, TILE_K), padding_mode=ZERO)
        queries = queries.reshape((CHUNK, TILE_K))
        values = ct.load(v, (batch, chunk, head, block), (1, CHUNK, 1, TILE_V), padding_mode=ZERO)
        values = ct.transpose(values.reshape((CHUNK, TILE_V))).astype(ct.float32)
        square = (1, 1, CHUNK, CHUNK)
        inverse_high = ct.transpose(ct.load(inverse, (part, 0, 0, 0), square).reshape((CHUNK, CHUNK)))
        inverse_low = ct.transpose(ct.load(inverse, (part, 1, 0, 0), square).reshape((CHUNK, CHUNK)))
        attention_high = ct.transpose(ct.load(attention, (part, 0, 0, 0), square).reshape((CHUNK, CHUNK)))
        attention_low = ct.transpose(ct.load(attention, (part, 1, 0, 0), square).reshape((CHUNK, CHUNK)))
        read = ct.load(factors, (part, 0, 0), (1, 1, CHUNK)).reshape((1, CHUNK))
        written = ct.load(factors, (part, 1, 0), (1, 1, CHUNK)).reshape((1, CHUNK))
        asked = ct.load(factors, (part, 2, 0), (1, 1, CHUNK)).reshape((1, CHUNK))
        left = ct.load(factors, (part, 3, 0), (1, 1, 1)).reshape((1, 1))
        # 1. What the state holds for the keys.
        high, low = _split(state)
        known = _add_product(high, low, ct.transpose(keys), nothing, SPLIT)
        found = _add_product(high, low, ct.transpose(queries), nothing, SPLIT)
        # 2. What the tokens write, of the part of the values that is new.
        high, low = _split(values - known * read)
        delta = ct.mma(low, inverse_high, nothing)
        delta = ct.mma(high, inverse_low, delta)
        delta = ct.mma(high, inverse_high, delta)
        # 3. What the queries read.
        high, low = _split(delta)
        found = ct.mma(low, attention_high, found * asked)
        found = ct.mma(high, attention_low, found)
        found = ct.mma(high, attention_high, found)
        found = ct.transpose(found.astype(out.dtype)).reshape((1, CHUNK, 1, TILE_V))
        ct.store(out, (batch, chunk, head, block), found)
        # 4. The state behind the chunk.
        high, low = _split(delta * written)
        state = _add_product(high, low, keys, state * left, SPLIT)
    ct.store(final, (batch, head, 0, block), ct.transpose(state).reshape((1, 1, TILE_K, TILE_V)))


_SCAN = {warps: _scan_chunks.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


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
):
    """Compute S = e^g S + k^T delta with delta = beta (v - k e^g S), and out = q S, for T tokens one after the other.

    Shapes: q, k [B, T, Hk, K], v and out [B, T, Hv, V], g and beta [B, T, Hv], states [B, Hv, K, V]; unit last strides. Sums,
    decays and the state are in float32.
    Mapping: one block a chunk of 64 tokens and head inverts the system of the chunk. Then a block owns TILE_V columns of a head's
    state and goes through the chunks.
    TILE_V = None: 64, or 128 if that still gives a block to every second multiprocessor of an H200.
    """
    B, T, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    parts = B * Hv * -(-T // CHUNK)
    tile_k = max(16, 1 << (K - 1).bit_length())
    tile_v = TILE_V or (128 if B * Hv > 66 and V > 64 else 64)
    inverse = torch.empty((parts, 2, CHUNK, CHUNK), dtype=torch.bfloat16, device=q.device)
    attention = torch.empty((parts, 2, CHUNK, CHUNK), dtype=torch.bfloat16, device=q.device)
    factors = torch.empty((parts, 4, CHUNK), dtype=torch.float32, device=q.device)
    split, stream = q.dtype != torch.bfloat16, torch.cuda.current_stream()
    args = (q, k, g, beta, inverse, attention, factors, Hv, K**-0.5, split, tile_k)
    ct.launch(stream, (parts, 1, 1), _prepare_chunk, args)
    args = (q, k, v, initial_state, inverse, attention, factors, out, final_state, split, tile_k, tile_v)
    ct.launch(stream, (B * Hv * -(-V // tile_v), 1, 1), _SCAN[tile_v // 16], args)

"""The gated delta rule, Triton: one token with the state in registers, or chunks of tokens between which the state stays there.

Rows of queries and keys are normalised by factors on products, so that a key of 16 bits enters products as it is.
"""

import torch
import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)


@triton.jit
def _inverse_norm(x):
    """x [..., K] float32 -> [...]."""
    return tl.rsqrt(tl.sum(x * x, axis=-1) + EPSILON)


# ---- one token ------------------------------------------------------------------------------------


@triton.jit
def _one_token(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, initial_ptr, out_ptr, final_ptr,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, beta_b, initial_b, initial_h, initial_k, out_b, out_h, final_b, final_h, final_k,
    Hv, group, V, scale, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // Hv).to(tl.int64)
    head = tl.program_id(0) % Hv
    rows = tl.arange(0, BLOCK_K)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows[:, None] < K) & (cols[None, :] < V)
    state_ptrs = initial_ptr + batch * initial_b + head * initial_h + rows[:, None] * initial_k + cols[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0)
    q = tl.load(q_ptr + batch * q_b + head // group * q_h + rows, mask=rows < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + batch * k_b + head // group * k_h + rows, mask=rows < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + batch * v_b + head * v_h + cols, mask=cols < V, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g_ptr + batch * g_b + head))
    beta = tl.load(beta_ptr + batch * beta_b + head).to(tl.float32)
    q = q * (_inverse_norm(q) * scale)
    k = k * _inverse_norm(k)
    state = state * decay
    # Both sums over the state at once: the query reads the old state, and what is written by its product with the key.
    delta = beta * (v - tl.sum(state * k[:, None], axis=0))
    out = tl.sum(state * q[:, None], axis=0) + tl.sum(q * k, axis=0) * delta
    state = state + k[:, None] * delta[None, :]
    tl.store(final_ptr + batch * final_b + head * final_h + rows[:, None] * final_k + cols[None, :], state, mask=inside)
    tl.store(out_ptr + batch * out_b + head * out_h + cols, out.to(out_ptr.dtype.element_ty), mask=cols < V)


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
    BLOCK_V=None,
    num_warps=1,
):
    """Compute S = e^g S, delta = beta (v - k S), final_state = S + k^T delta and out = q final_state for one token.

    Shapes: q, k [B, 1, Hk, K], v and out [B, 1, Hv, V], g and beta [B, 1, Hv], states [B, Hv, K, V]; unit last strides.
    Mapping: a program owns BLOCK_V columns of the state of one head, which it reads and writes once.
    BLOCK_V = None: 32 columns, or 16 if there would be fewer programs than an H200 has places for.
    """
    B, _, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    block_v = BLOCK_V or (16 if B * Hv * V <= 132 * 64 else 32)
    _one_token[(B * Hv, triton.cdiv(V, block_v))](
        q, k, v, g, beta, initial_state, out, final_state,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2), g.stride(0), beta.stride(0),
        *initial_state.stride()[:3], out.stride(0), out.stride(2), *final_state.stride()[:3],
        Hv, Hv // k.shape[2], V, K**-0.5, K, triton.next_power_of_2(K), block_v,
        num_warps=num_warps,
    )  # fmt: skip


# ---- chunks of tokens -----------------------------------------------------------------------------
# Of a chunk, A = tril(beta_i e^(G_i - G_j) k_i k_j, -1), with G the sums of g within it and k normalised. What the tokens write
# is W = (I + A)^-1 diag(beta) (V - e^G K S), of the state S before the chunk. The rest are sums over tokens: out = e^G Q S + P W
# with P = tril(e^(G_i - G_j) q_i k_j), and the state becomes e^G_last S + (e^(G_last - G) K)^T W.
#
# A write may erase what is a thousand times larger than what it leaves, so products that make the state need the bits of float32.
# A float32 factor is split into three of bfloat16, which have its range too. Two of them are enough for what is rounded to
# bfloat16. K and Q are exact, as their norms are factors on sums.

CHUNK = tl.constexpr(64)


@triton.jit
def _split(x):
    """x in float32 -> two of bfloat16 whose sum has 16 of its bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split_all(x):
    """x in float32 -> three of bfloat16 whose sum has all of its bits."""
    high = x.to(tl.bfloat16)
    middle, low = _split(x - high.to(tl.float32))
    return high, middle, low


@triton.jit
def _add_parts(high, middle, low, x_high, x_middle, x_low, acc):
    """Return acc + (high + middle + low) (x_high + x_middle + x_low) in float32, without products below 2^-24."""
    acc = tl.dot(low, x_high, acc)
    acc = tl.dot(middle, x_middle, acc)
    acc = tl.dot(high, x_low, acc)
    acc = tl.dot(middle, x_high, acc)
    acc = tl.dot(high, x_middle, acc)
    return tl.dot(high, x_high, acc)


@triton.jit
def _add_product(x, y, acc, ROUNDED: tl.constexpr):
    """Return acc + x y in float32, of x in float32; ROUNDED: two parts of x are enough. y is split too unless it is bfloat16."""
    high, middle, low = _split_all(x)
    if y.dtype == tl.bfloat16:
        if not ROUNDED:
            acc = tl.dot(low, y, acc)
        acc = tl.dot(middle, y, acc)
        acc = tl.dot(high, y, acc)
    else:
        y_high, y_middle, y_low = _split_all(y.to(tl.float32))
        acc = _add_parts(high, middle, low, y_high, y_middle, y_low, acc)
    return acc


@triton.jit
def _product(a, b):
    """Return a b^T in float32."""
    if a.dtype == tl.bfloat16:
        acc = tl.dot(a, tl.trans(b))
    else:
        acc = _add_product(a.to(tl.float32), tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], dtype=tl.float32), False)
    return acc


@triton.jit
def _join(T, A, rows, cols, SIZE: tl.constexpr):
    """T: the inverse of the blocks of SIZE on the diagonal of I + A -> that of the blocks of twice the size."""
    below = (rows[:, None] // (2 * SIZE) == cols[None, :] // (2 * SIZE)) & (
        rows[:, None] // SIZE > cols[None, :] // SIZE
    )
    half = T.to(tl.float16)
    corner = tl.dot(half, tl.where(below, A, 0.0).to(tl.float16))
    return T - tl.dot(corner.to(tl.float16), half)


@triton.jit
def _inverse(A, rows, cols):
    """Return (I + A)^-1 of A [C, C] float32, which is strictly lower.

    Keys are of norm one and rates at most one, so no element of an inverse of blocks exceeds one, and float16 holds them. With
    E = I - (I + A) T, which is about 2^-8, T (I + E + E^2) then has nearly the bits of float32.
    """
    identity = tl.where(rows[:, None] == cols[None, :], 1.0, 0.0)
    pairs = (rows[:, None] // 2 == cols[None, :] // 2) & (rows[:, None] > cols[None, :])
    T = identity - tl.where(pairs, A, 0.0)
    T = _join(T, A, rows, cols, 2)
    T = _join(T, A, rows, cols, 4)
    T = _join(T, A, rows, cols, 8)
    T = _join(T, A, rows, cols, 16)
    T = _join(T, A, rows, cols, 32)
    rough = T.to(tl.bfloat16)
    rest = identity - rough.to(tl.float32) - _add_product(A, rough, tl.zeros_like(A), False)
    high = rest.to(tl.bfloat16)
    rest = tl.dot(high, high, rest)
    high, low = _split(rest)
    return tl.dot(rough, high, tl.dot(rough, low, rough.to(tl.float32)))


@triton.jit
def _prepare_chunk(
    q_ptr, k_ptr, g_ptr, beta_ptr, inverse_ptr, attention_ptr, factors_ptr,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, g_b, g_t, beta_b, beta_t,
    T, Hv, group, chunks, scale, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    batch = part // chunks // Hv
    head = part // chunks % Hv
    first = part % chunks * CHUNK
    rows, cols, depth = tl.arange(0, CHUNK), tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    here = rows < T - first
    inside = here[:, None] & (depth[None, :] < K)
    k_ptr += batch * k_b + head // group * k_h + first * k_t
    q_ptr += batch * q_b + head // group * q_h + first * q_t
    square = rows[:, None] * CHUNK + cols[None, :]
    inverse_ptr += part * (3 * CHUNK * CHUNK)
    attention_ptr += part * (PARTS * CHUNK * CHUNK)
    factors_ptr += part * (4 * CHUNK)
    g = tl.load(g_ptr + batch * g_b + (first + rows) * g_t + head, mask=here, other=0.0)
    beta = tl.load(beta_ptr + batch * beta_b + (first + rows) * beta_t + head, mask=here, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + rows[:, None] * k_t + depth[None, :] * k_k, mask=inside, other=0.0)
    q = tl.load(q_ptr + rows[:, None] * q_t + depth[None, :] * q_k, mask=inside, other=0.0)
    of_k = _inverse_norm(k.to(tl.float32))
    of_q = _inverse_norm(q.to(tl.float32)) * scale
    # 1. Decays between the tokens of the chunk; a difference of sums above zero belongs to no pair.
    G = tl.cumsum(g, axis=0)
    last = tl.sum(g, axis=0)
    tl.store(factors_ptr + rows, of_k * tl.exp(G))
    tl.store(factors_ptr + CHUNK + rows, of_k * tl.exp(tl.minimum(last - G, 0.0)))
    tl.store(factors_ptr + 2 * CHUNK + rows, of_q * tl.exp(G))
    tl.store(factors_ptr + 3 * CHUNK, tl.exp(last))
    # 2. Products of queries and of keys with keys.
    left = tl.exp(tl.where(rows[:, None] >= cols[None, :], G[:, None] - G[None, :], float("-inf"))) * of_k[None, :]
    attention = _product(q, k) * left * of_q[:, None]
    high, middle, low = _split_all(attention)
    tl.store(attention_ptr + square, high)
    tl.store(attention_ptr + CHUNK * CHUNK + square, middle)
    if PARTS == 3:
        tl.store(attention_ptr + 2 * CHUNK * CHUNK + square, low)
    pairs = _product(k, k) * left * (of_k * beta)[:, None]
    # 3. The inverse.
    inverse = _inverse(tl.where(rows[:, None] > cols[None, :], pairs, 0.0), rows, cols)
    high, middle, low = _split_all(inverse * beta[None, :])
    tl.store(inverse_ptr + square, high)
    tl.store(inverse_ptr + CHUNK * CHUNK + square, middle)
    tl.store(inverse_ptr + 2 * CHUNK * CHUNK + square, low)


# A long sequence of few heads has fewer programs than the GPU has places, so it is cut into segments of chunks. The state behind
# a segment is linear in the state before it: S M + F, with F what the segment makes of nothing. One pass finds F, and M as what
# the segment makes of unit states while it writes no values. The states between segments follow, and a second pass has them all.


@triton.jit
def _scan_chunks(
    q_ptr, k_ptr, v_ptr, initial_ptr, inverse_ptr, attention_ptr, factors_ptr, states_ptr, moves_ptr, out_ptr, final_ptr,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v,
    initial_b, initial_h, initial_k, out_b, out_t, out_h, final_b, final_h, final_k,
    T, Hv, group, V, chunks, segments, segment_chunks,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """AHEAD: the first pass, which writes states_ptr [B, Hv, segments, V, K] and moves_ptr [B, Hv, segments, K, K]."""
    of_values = tl.cdiv(V, BLOCK_V)
    if AHEAD:
        blocks = of_values + tl.cdiv(K, BLOCK_V)
        scanned = segments - 1  # no state follows the last
    else:
        blocks = of_values
        scanned = segments
    block = tl.program_id(0) % blocks
    segment = tl.program_id(0) // blocks % scanned
    pair = tl.program_id(0) // blocks // scanned  # of a sequence and a head
    unit = block >= of_values  # columns of unit states
    if unit & (segment == 0):
        return
    batch = (pair // Hv).to(tl.int64)
    head = (pair % Hv).to(tl.int64)
    rows, depth = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = depth[None, :] < K, cols[None, :] < V
    if unit:
        cols = (block - of_values) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = cols[None, :] < 0
    first = segment * segment_chunks
    T -= first * CHUNK
    # Pointers move to each chunk, so that threads keep offsets of 32 bits only.
    token = first.to(tl.int64) * CHUNK
    k_ptr += batch * k_b + head // group * k_h + token * k_t
    q_ptr += batch * q_b + head // group * q_h + token * q_t
    v_ptr += batch * v_b + head * v_h + token * v_t
    out_ptr += batch * out_b + head * out_h + token * out_t
    k_offsets = rows[:, None] * k_t + depth[None, :] * k_k
    q_offsets = rows[:, None] * q_t + depth[None, :] * q_k
    v_offsets = rows[:, None] * v_t + cols[None, :] * v_v
    out_offsets = rows[:, None] * out_t + cols[None, :]
    part = pair.to(tl.int64) * chunks + first
    square = rows[:, None] * CHUNK + rows[None, :]
    inverse_ptr += part * (3 * CHUNK * CHUNK)
    attention_ptr += part * (PARTS * CHUNK * CHUNK)
    factors_ptr += part * (4 * CHUNK)
    # The state and all that is made of it are transposed: rows are columns of values, and stay in registers between products.
    between = states_ptr + (pair.to(tl.int64) * segments + segment) * V * K
    between_offsets = cols[:, None] * K + depth[None, :]
    between_inside = (cols[:, None] < V) & in_k
    if segment == 0:
        state_ptrs = initial_ptr + batch * initial_b + head * initial_h + depth[:, None] * initial_k + cols[None, :]
        state = tl.trans(tl.load(state_ptrs, mask=(depth[:, None] < K) & in_v, other=0.0))
    elif AHEAD:
        state = tl.where(unit & (cols[:, None] == depth[None, :]), 1.0, 0.0)
    else:
        state = tl.load(between + between_offsets, mask=between_inside, other=0.0)
    for _ in tl.range(0, tl.minimum(chunks - first, segment_chunks), num_stages=STAGES):
        here = rows < T
        k = tl.load(k_ptr + k_offsets) if WHOLE else tl.load(k_ptr + k_offsets, mask=here[:, None] & in_k, other=0.0)
        if WHOLE and not AHEAD:
            v = tl.load(v_ptr + v_offsets)
        else:
            v = tl.load(v_ptr + v_offsets, mask=here[:, None] & in_v, other=0.0)
        inverse_high = tl.load(inverse_ptr + square)
        inverse_middle = tl.load(inverse_ptr + CHUNK * CHUNK + square)
        inverse_low = tl.load(inverse_ptr + 2 * CHUNK * CHUNK + square)
        # 1. What the state holds for the keys.
        nothing = tl.zeros([BLOCK_V, CHUNK], dtype=tl.float32)
        known = _add_product(state, tl.trans(k), nothing, False)
        read = tl.load(factors_ptr + rows)
        # 2. What the tokens write, of the part of the values that is new.
        high, middle, low = _split_all(tl.trans(v).to(tl.float32) - known * read[None, :])
        delta = _add_parts(
            high, middle, low, tl.trans(inverse_high), tl.trans(inverse_middle), tl.trans(inverse_low), nothing
        )
        # 3. What the queries read.
        if not AHEAD:
            q = (
                tl.load(q_ptr + q_offsets)
                if WHOLE
                else tl.load(q_ptr + q_offsets, mask=here[:, None] & in_k, other=0.0)
            )
            attention_high = tl.load(attention_ptr + square)
            attention_middle = tl.load(attention_ptr + CHUNK * CHUNK + square)
            asked = tl.load(factors_ptr + 2 * CHUNK + rows)
            out = _add_product(state, tl.trans(q), nothing, True) * asked[None, :]
            high, middle, low = _split_all(delta)
            if PARTS == 3:
                attention_low = tl.load(attention_ptr + 2 * CHUNK * CHUNK + square)
                out = _add_parts(
                    high,
                    middle,
                    low,
                    tl.trans(attention_high),
                    tl.trans(attention_middle),
                    tl.trans(attention_low),
                    out,
                )
            else:
                out = tl.dot(middle, tl.trans(attention_high), out)
                out = tl.dot(high, tl.trans(attention_middle), out)
                out = tl.dot(high, tl.trans(attention_high), out)
            out = tl.trans(out.to(out_ptr.dtype.element_ty))
            if WHOLE:
                tl.store(out_ptr + out_offsets, out)
            else:
                tl.store(out_ptr + out_offsets, out, mask=here[:, None] & in_v)
        # 4. The state behind the chunk.
        written = tl.load(factors_ptr + CHUNK + rows)
        left = tl.load(factors_ptr + 3 * CHUNK)
        state = _add_product(delta * written[None, :], k, state * left, False)
        T -= CHUNK
        k_ptr += CHUNK * tl.cast(k_t, tl.int64)
        q_ptr += CHUNK * tl.cast(q_t, tl.int64)
        v_ptr += CHUNK * tl.cast(v_t, tl.int64)
        out_ptr += CHUNK * tl.cast(out_t, tl.int64)
        inverse_ptr += 3 * CHUNK * CHUNK
        attention_ptr += PARTS * CHUNK * CHUNK
        factors_ptr += 4 * CHUNK
    if AHEAD:
        if unit:
            moves_ptr += (pair.to(tl.int64) * segments + segment) * K * K
            tl.store(moves_ptr + between_offsets, state, mask=(cols[:, None] < K) & in_k)
        else:
            tl.store(between + V * K + between_offsets, state, mask=between_inside)
    elif segment == segments - 1:
        final_ptrs = final_ptr + batch * final_b + head * final_h + depth[:, None] * final_k + cols[None, :]
        tl.store(final_ptrs, tl.trans(state), mask=(depth[:, None] < K) & in_v)


@triton.jit
def _join_segments(states_ptr, moves_ptr, V, segments, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """states_ptr [pairs, segments, V, K]: what each segment makes of nothing -> the state before each segment but the first."""
    pair = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    depth, moved = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K)
    offsets = cols[:, None] * K + depth[None, :]
    inside = (cols[:, None] < V) & (depth[None, :] < K)
    states_ptr += (pair * segments + 1) * V * K
    moves_ptr += (pair * segments + 1) * K * K
    state = tl.load(states_ptr + offsets, mask=inside, other=0.0)
    for _ in tl.range(2, segments):
        states_ptr += V * K
        move = tl.load(
            moves_ptr + moved[:, None] * K + depth[None, :], mask=(moved[:, None] < K) & (depth[None, :] < K), other=0.0
        )
        state = _add_product(state, move, tl.load(states_ptr + offsets, mask=inside, other=0.0), False)
        tl.store(states_ptr + offsets, state, mask=inside)
        moves_ptr += K * K


def _scan_shape(heads, V, chunks):
    """Return the columns of values of a program and the number of segments, for the heads of all sequences."""
    # An H200 has places for 132 programs. The first pass takes most of the time of the second: two segments gain nothing.
    segments = min(132 // heads, chunks // 4)
    if heads <= 32 and segments >= 3:
        return (128 if V > 64 else 64), segments
    return (128 if V > 64 and heads > 66 else 64), 1


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
    BLOCK_V=None,
    num_stages=2,
    segments=None,
):
    """Compute S = e^g S + k^T delta with delta = beta (v - k e^g S), and out = q S, for T tokens one after the other.

    Shapes: q, k [B, T, Hk, K] and v [B, T, Hv, V] of any strides; out [B, T, Hv, V], g and beta [B, T, Hv] and states
    [B, Hv, K, V] with unit last strides. Sums, decays and the state are in float32.
    Mapping: one program a chunk of 64 tokens and head inverts the system of the chunk. Then a program owns BLOCK_V columns of a
    head's state and goes through the chunks, with a warp per 16 columns.
    BLOCK_V and segments = None: by the number of heads, so that the programs fill an H200.
    """
    B, T, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    chunks = triton.cdiv(T, CHUNK.value)
    stages = num_stages if q.dtype == torch.bfloat16 else 1  # three parts of wider keys and queries need the memory
    parts, square = B * Hv * chunks, CHUNK.value**2
    block_k = max(16, triton.next_power_of_2(K))
    best_block, best_segments = _scan_shape(B * Hv, V, chunks)
    block_v = BLOCK_V or best_block
    blocks = triton.cdiv(V, block_v)
    segments = min(segments or best_segments, chunks)
    segment_chunks = triton.cdiv(chunks, segments)
    segments = triton.cdiv(chunks, segment_chunks)
    of_attention = 2 if q.dtype == torch.bfloat16 else 3
    inverse = torch.empty(3 * parts * square, dtype=torch.bfloat16, device=q.device)
    attention = torch.empty(of_attention * parts * square, dtype=torch.bfloat16, device=q.device)
    factors = torch.empty(parts * 4 * CHUNK.value, dtype=torch.float32, device=q.device)
    states = torch.empty(B * Hv * segments * V * K if segments > 1 else 1, dtype=torch.float32, device=q.device)
    moves = torch.empty(B * Hv * segments * K * K if segments > 1 else 1, dtype=torch.float32, device=q.device)
    _prepare_chunk[(parts,)](
        q, k, g, beta, inverse, attention, factors,
        *q.stride(), *k.stride(), *g.stride()[:2], *beta.stride()[:2],
        T, Hv, Hv // k.shape[2], chunks, K**-0.5, K, block_k, of_attention,
        num_warps=4, maxnreg=168,
    )  # fmt: skip

    def scan(programs, ahead):
        _scan_chunks[(programs,)](
            q, k, v, initial_state, inverse, attention, factors, states, moves, out, final_state,
            *q.stride(), *k.stride(), *v.stride(), *initial_state.stride()[:3], *out.stride()[:3], *final_state.stride()[:3],
            T, Hv, Hv // k.shape[2], V, chunks, segments, segment_chunks,
            K, block_k, block_v, of_attention, T % CHUNK.value == V % block_v == K % block_k == 0, ahead, stages,
            num_warps=block_v // 16,
        )  # fmt: skip

    if segments > 1:
        scan(B * Hv * (segments - 1) * (blocks + triton.cdiv(K, block_v)), True)
        if segments > 2:
            _join_segments[(B * Hv, triton.cdiv(V, 16))](states, moves, V, segments, K, block_k, 16, num_warps=4)
    scan(B * Hv * segments * blocks, False)

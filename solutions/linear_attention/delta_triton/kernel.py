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
# Products are of 16 bits. A float32 factor is split into two of bfloat16, so that 16 of its bits count: bfloat16 alone would
# leave a state that is no better than bfloat16. K and Q are exact, as their norms are factors on sums.

CHUNK = tl.constexpr(64)


@triton.jit
def _split(x):
    """x in float32 -> two of bfloat16 whose sum has 16 of its bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _add_product(high, low, x, acc):
    """Return acc + (high + low) x in float32; x is split too unless it is bfloat16."""
    if x.dtype == tl.bfloat16:
        acc = tl.dot(low, x, acc)
        acc = tl.dot(high, x, acc)
    else:
        x_high, x_low = _split(x.to(tl.float32))
        acc = tl.dot(low, x_high, acc)
        acc = tl.dot(high, x_low, acc)
        acc = tl.dot(high, x_high, acc)
    return acc


@triton.jit
def _product(a, b):
    """Return a b^T in float32."""
    if a.dtype == tl.bfloat16:
        acc = tl.dot(a, tl.trans(b))
    else:
        high, low = _split(a.to(tl.float32))
        acc = _add_product(high, low, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], dtype=tl.float32))
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

    Keys are of norm one and rates at most one, so no element of an inverse of blocks exceeds one, and float16 holds them. A step
    of Newton then leaves the error of the split factors.
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
    high, low = _split(A)
    rest = identity - rough.to(tl.float32) - tl.dot(low, rough, tl.dot(high, rough))
    return tl.dot(rough, rest.to(tl.bfloat16), rough.to(tl.float32))


@triton.jit
def _prepare_chunk(
    q_ptr, k_ptr, g_ptr, beta_ptr, inverse_ptr, attention_ptr, factors_ptr,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, g_b, g_t, beta_b, beta_t,
    T, Hv, group, chunks, scale, K: tl.constexpr, BLOCK_K: tl.constexpr,
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
    inverse_ptr += part * (2 * CHUNK * CHUNK)
    attention_ptr += part * (2 * CHUNK * CHUNK)
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
    high, low = _split(attention)
    tl.store(attention_ptr + square, high)
    tl.store(attention_ptr + CHUNK * CHUNK + square, low)
    pairs = _product(k, k) * left * (of_k * beta)[:, None]
    # 3. The inverse.
    inverse = _inverse(tl.where(rows[:, None] > cols[None, :], pairs, 0.0), rows, cols)
    high, low = _split(inverse * beta[None, :])
    tl.store(inverse_ptr + square, high)
    tl.store(inverse_ptr + CHUNK * CHUNK + square, low)


@triton.jit
def _scan_chunks(
    q_ptr, k_ptr, v_ptr, initial_ptr, inverse_ptr, attention_ptr, factors_ptr, out_ptr, final_ptr,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, v_b, v_t, v_h, v_v,
    initial_b, initial_h, initial_k, out_b, out_t, out_h, final_b, final_h, final_k,
    T, Hv, group, V, chunks, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK_V)
    pair = tl.program_id(0) // blocks  # of a sequence and a head
    batch = (pair // Hv).to(tl.int64)
    head = (pair % Hv).to(tl.int64)
    rows, depth = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    cols = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = depth[None, :] < K, cols[None, :] < V
    # Pointers move to each chunk, so that threads keep offsets of 32 bits only.
    k_ptr += batch * k_b + head // group * k_h
    q_ptr += batch * q_b + head // group * q_h
    v_ptr += batch * v_b + head * v_h
    out_ptr += batch * out_b + head * out_h
    k_offsets = rows[:, None] * k_t + depth[None, :] * k_k
    q_offsets = rows[:, None] * q_t + depth[None, :] * q_k
    v_offsets = rows[:, None] * v_t + cols[None, :] * v_v
    out_offsets = rows[:, None] * out_t + cols[None, :]
    part = pair.to(tl.int64) * chunks
    square = rows[:, None] * CHUNK + rows[None, :]
    inverse_ptr += part * (2 * CHUNK * CHUNK)
    attention_ptr += part * (2 * CHUNK * CHUNK)
    factors_ptr += part * (4 * CHUNK)
    # The state and all that is made of it are transposed: rows are columns of values, and stay in registers between products.
    state_ptrs = initial_ptr + batch * initial_b + head * initial_h + depth[:, None] * initial_k + cols[None, :]
    inside = (depth[:, None] < K) & in_v
    state = tl.trans(tl.load(state_ptrs, mask=inside, other=0.0))
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        here = rows < T - chunk * CHUNK
        if WHOLE:
            k = tl.load(k_ptr + k_offsets)
            q = tl.load(q_ptr + q_offsets)
            v = tl.load(v_ptr + v_offsets)
        else:
            k = tl.load(k_ptr + k_offsets, mask=here[:, None] & in_k, other=0.0)
            q = tl.load(q_ptr + q_offsets, mask=here[:, None] & in_k, other=0.0)
            v = tl.load(v_ptr + v_offsets, mask=here[:, None] & in_v, other=0.0)
        inverse_high = tl.load(inverse_ptr + square)
        inverse_low = tl.load(inverse_ptr + CHUNK * CHUNK + square)
        attention_high = tl.load(attention_ptr + square)
        attention_low = tl.load(attention_ptr + CHUNK * CHUNK + square)
        # 1. What the state holds for the keys and for the queries.
        high, low = _split(state)
        nothing = tl.zeros([BLOCK_V, CHUNK], dtype=tl.float32)
        known = _add_product(high, low, tl.trans(k), nothing)
        read = tl.load(factors_ptr + rows)
        # 2. What the tokens write, of the part of the values that is new.
        high, low = _split(tl.trans(v).to(tl.float32) - known * read[None, :])
        delta = tl.dot(low, tl.trans(inverse_high))
        delta = tl.dot(high, tl.trans(inverse_low), delta)
        delta = tl.dot(high, tl.trans(inverse_high), delta)
        # 3. What the queries read.
        high, low = _split(state)
        out = _add_product(high, low, tl.trans(q), nothing)
        high, low = _split(delta)
        asked = tl.load(factors_ptr + 2 * CHUNK + rows)
        out = tl.dot(low, tl.trans(attention_high), out * asked[None, :])
        out = tl.dot(high, tl.trans(attention_low), out)
        out = tl.dot(high, tl.trans(attention_high), out)
        out = tl.trans(out.to(out_ptr.dtype.element_ty))
        if WHOLE:
            tl.store(out_ptr + out_offsets, out)
        else:
            tl.store(out_ptr + out_offsets, out, mask=here[:, None] & in_v)
        # 4. The state behind the chunk.
        written = tl.load(factors_ptr + CHUNK + rows)
        left = tl.load(factors_ptr + 3 * CHUNK)
        high, low = _split(delta * written[None, :])
        state = _add_product(high, low, k, state * left)
        k_ptr += CHUNK * tl.cast(k_t, tl.int64)
        q_ptr += CHUNK * tl.cast(q_t, tl.int64)
        v_ptr += CHUNK * tl.cast(v_t, tl.int64)
        out_ptr += CHUNK * tl.cast(out_t, tl.int64)
        inverse_ptr += 2 * CHUNK * CHUNK
        attention_ptr += 2 * CHUNK * CHUNK
        factors_ptr += 4 * CHUNK
    final_ptrs = final_ptr + batch * final_b + head * final_h + depth[:, None] * final_k + cols[None, :]
    tl.store(final_ptrs, tl.trans(state), mask=inside)


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
):
    """Compute S = e^g S + k^T delta with delta = beta (v - k e^g S), and out = q S, for T tokens one after the other.

    Shapes: q, k [B, T, Hk, K] and v [B, T, Hv, V] of any strides; out [B, T, Hv, V], g and beta [B, T, Hv] and states
    [B, Hv, K, V] with unit last strides. Sums, decays and the state are in float32.
    Mapping: one program a chunk of 64 tokens and head inverts the system of the chunk. Then a program owns BLOCK_V columns of a
    head's state and goes through the chunks, with a warp per 16 columns.
    BLOCK_V = None: 64, or 128 if that still gives a program to every second multiprocessor of an H200.
    """
    B, T, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    chunks = triton.cdiv(T, CHUNK.value)
    stages = num_stages if q.dtype == torch.bfloat16 else 1  # two parts of wider keys and queries need the memory
    parts, square = B * Hv * chunks, CHUNK.value**2
    block_k = max(16, triton.next_power_of_2(K))
    block_v = BLOCK_V or (128 if B * Hv > 66 and V > 64 else 64)
    inverse = torch.empty(2 * parts * square, dtype=torch.bfloat16, device=q.device)
    attention = torch.empty(2 * parts * square, dtype=torch.bfloat16, device=q.device)
    factors = torch.empty(parts * 4 * CHUNK.value, dtype=torch.float32, device=q.device)
    _prepare_chunk[(parts,)](
        q, k, g, beta, inverse, attention, factors,
        *q.stride(), *k.stride(), *g.stride()[:2], *beta.stride()[:2],
        T, Hv, Hv // k.shape[2], chunks, K**-0.5, K, block_k,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
    _scan_chunks[(B * Hv * triton.cdiv(V, block_v),)](
        q, k, v, initial_state, inverse, attention, factors, out, final_state,
        *q.stride(), *k.stride(), *v.stride(), *initial_state.stride()[:3], *out.stride()[:3], *final_state.stride()[:3],
        T, Hv, Hv // k.shape[2], V, chunks, K, block_k, block_v, T % CHUNK.value == V % block_v == K % block_k == 0, stages,
        num_warps=block_v // 16,
    )  # fmt: skip

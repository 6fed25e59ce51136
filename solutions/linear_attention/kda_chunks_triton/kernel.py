"""Kimi Delta Attention, Triton: chunks of tokens, whose products are computed at once, and a state in registers between them.

Of a chunk, G are the sums of g within it, for each row of the state, and q and k are normalised. A = tril(beta_i sum_d k_i k_j
e^(G_i - G_j), -1) and P = tril(sum_d q_i k_j e^(G_i - G_j)) are sums over d, the rows of the state. What the tokens write is
W = (I + A)^-1 diag(beta) (V - (e^G K) S), of the state S before the chunk. The rest are sums over tokens: out = (e^G Q) S + P W,
and the state becomes e^G_last S + (e^(G_last - G) K)^T W.

A factor e^(-G) may be beyond float32, so decays are sums of the gates between two tokens and of no others, which all lie below
zero. Tokens come in blocks of 16. Between blocks, the decay of a pair is that of the first token to the end of its block, times
that from the next block on, so that products of matrices remain. Within a block, each pair has its own decay.
"""

import torch
import triton
import triton.language as tl
from _lib.triton.split_products import add_parts, add_product, inverse_of_unit_lower, split_all

EPSILON = tl.constexpr(1e-6)
BLOCK = tl.constexpr(16)
MOST_PARTS = 1 << 15
"""Chunks of heads at once, unless one sequence has more: 6 GB of workspace for K = 128."""


@triton.jit
def _tokens(x_ptr, rows, depth, x_t, x_k, T, K: tl.constexpr):
    """Load [rows, depth] in float32; zeros behind the last token, before the first one and past K."""
    inside = (rows[:, None] >= 0) & (rows[:, None] < T) & (depth[None, :] < K)
    return tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_t + depth[None, :] * x_k, mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def _inverse_norm(x):
    """x [..., K] float32 -> [...]."""
    return tl.rsqrt(tl.sum(x * x, axis=-1) + EPSILON)


@triton.jit
def _to_the_end(g_ptr, rows, depth, first, g_t, T, K: tl.constexpr):
    """Sums of the gates behind each token of a block, [BLOCK, K]: of the tokens that follow it within the block."""
    later = rows + 1
    limit = tl.minimum(first + BLOCK, T)
    return tl.cumsum(_tokens(g_ptr, later, depth, g_t, 1, limit, K), axis=0, reverse=True)


@triton.jit
def _prepare_block(
    q_ptr, k_ptr, g_ptr, pairs_ptr, attention_ptr, rows_ptr, left_ptr,
    q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, g_b, g_t, g_h,
    T, H, chunks, scale, CHUNK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program has a block of tokens: its rows of A / beta and of P, and what the scan multiplies with the state."""
    part = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = part // chunks
    chunk = part % chunks
    batch, head = pair // H, pair % H
    k_ptr += batch * k_b + head * k_h + chunk * CHUNK * k_t
    q_ptr += batch * q_b + head * q_h + chunk * CHUNK * q_t
    g_ptr += batch * g_b + head * g_h + chunk * CHUNK * g_t
    T = tl.minimum(T - chunk * CHUNK, CHUNK).to(tl.int32)
    depth, number = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK)
    far_depth = depth.to(tl.int64)  # its stride may be that of a whole tensor
    first = block * BLOCK
    rows = first + number
    pairs_ptr += part * (CHUNK * CHUNK) + rows[:, None] * CHUNK
    attention_ptr += part * (CHUNK * CHUNK) + rows[:, None] * CHUNK
    k = _tokens(k_ptr, rows, far_depth, k_t, k_k, T, K)
    q = _tokens(q_ptr, rows, far_depth, q_t, q_k, T, K)
    g = _tokens(g_ptr, rows, depth, g_t, 1, T, K)
    k = k * _inverse_norm(k)[:, None]
    q = q * (_inverse_norm(q) * scale)[:, None]
    since = tl.cumsum(g, axis=0)
    k_since, q_since = k * tl.exp(since), q * tl.exp(since)
    # 1. Pairs with the tokens of earlier blocks, from the nearest one on.
    between = tl.zeros([BLOCK_K], dtype=tl.float32)
    nothing = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for step in tl.range(0, block):
        begin = (block - 1 - step) * BLOCK
        others = begin + number
        other = _tokens(k_ptr, others, far_depth, k_t, k_k, T, K)
        decay = _to_the_end(g_ptr, others, depth, begin, g_t, T, K) + between[None, :]
        other = tl.trans(other * _inverse_norm(other)[:, None] * tl.exp(decay))
        tl.store(pairs_ptr + others[None, :], add_product(k_since, other, nothing, False))
        tl.store(attention_ptr + others[None, :], add_product(q_since, other, nothing, False))
        between += tl.sum(_tokens(g_ptr, others, depth, g_t, 1, T, K), axis=0)
    # 2. What the scan multiplies with the state: keys and queries since the chunk began, and keys until it ends.
    after = tl.zeros([BLOCK_K], dtype=tl.float32)
    for begin in tl.range(first + BLOCK, CHUNK, BLOCK):
        after += tl.sum(_tokens(g_ptr, begin + number, depth, g_t, 1, T, K), axis=0)
    rows_ptr += part * (3 * CHUNK * BLOCK_K) + rows[:, None] * BLOCK_K + depth[None, :]
    before = tl.exp(between)[None, :]
    tl.store(rows_ptr, k_since * before)
    tl.store(rows_ptr + CHUNK * BLOCK_K, q_since * before)
    until = _to_the_end(g_ptr, rows, depth, first, g_t, T, K) + after[None, :]
    tl.store(rows_ptr + 2 * CHUNK * BLOCK_K, k * tl.exp(until))
    if block == 0:
        tl.store(left_ptr + part * BLOCK_K + depth, tl.exp(tl.sum(g, axis=0) + after))
    # 3. Pairs within the block, from its last token back: a token's gate is added to the decays of those that follow it.
    pairs, attention = nothing, nothing
    decay = tl.zeros([BLOCK, BLOCK_K], dtype=tl.float32)
    for step in tl.range(0, BLOCK):
        token = BLOCK - 1 - step
        there = depth < tl.where(first + token < T, K, 0)
        key = tl.load(k_ptr + (first + token).to(tl.int64) * k_t + far_depth * k_k, mask=there, other=0.0).to(
            tl.float32
        )
        gate = tl.load(g_ptr + (first + token) * g_t + depth, mask=there, other=0.0)
        key = key * tl.rsqrt(tl.sum(key * key, axis=0) + EPSILON)
        known = number >= token
        weighed = tl.exp(decay) * key[None, :]
        column = number[None, :] == token
        pairs = tl.where(column, tl.where(known, tl.sum(k * weighed, axis=1), 0.0)[:, None], pairs)
        attention = tl.where(column, tl.where(known, tl.sum(q * weighed, axis=1), 0.0)[:, None], attention)
        decay = decay + tl.where(known[:, None], gate[None, :], 0.0)
    tl.store(pairs_ptr + rows[None, :], pairs)
    tl.store(attention_ptr + rows[None, :], attention)


@triton.jit
def _invert_chunk(
    pairs_ptr, attention_ptr, beta_ptr, inverse_ptr, shares_ptr, beta_b, beta_t, T, H, chunks,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write (I + A)^-1 diag(beta) as three of bfloat16, and P as two or three."""
    part = tl.program_id(0).to(tl.int64)
    pair = part // chunks
    first = part % chunks * CHUNK
    rows, cols = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    square = rows[:, None] * CHUNK + cols[None, :]
    beta_ptr += pair // H * beta_b + pair % H
    beta = tl.load(beta_ptr + (first + rows) * beta_t, mask=rows < T - first, other=0.0).to(tl.float32)
    # Blocks above the diagonal were not written.
    pairs = tl.load(pairs_ptr + part * (CHUNK * CHUNK) + square, mask=rows[:, None] > cols[None, :], other=0.0)
    inverse = inverse_of_unit_lower(pairs * beta[:, None], rows, cols, CHUNK)
    high, middle, low = split_all(inverse * beta[None, :])
    inverse_ptr += part * (3 * CHUNK * CHUNK)
    tl.store(inverse_ptr + square, high)
    tl.store(inverse_ptr + CHUNK * CHUNK + square, middle)
    tl.store(inverse_ptr + 2 * CHUNK * CHUNK + square, low)
    shares_ptr += part * (PARTS * CHUNK * CHUNK)
    shares = tl.load(attention_ptr + part * (CHUNK * CHUNK) + square, mask=rows[:, None] >= cols[None, :], other=0.0)
    high, middle, low = split_all(shares)
    tl.store(shares_ptr + square, high)
    tl.store(shares_ptr + CHUNK * CHUNK + square, middle)
    if PARTS == 3:
        tl.store(shares_ptr + 2 * CHUNK * CHUNK + square, low)


@triton.jit
def _scan_chunks(
    v_ptr, initial_ptr, inverse_ptr, shares_ptr, rows_ptr, left_ptr, out_ptr, final_ptr,
    v_b, v_t, v_h, v_v, initial_b, initial_h, initial_k, out_b, out_t, out_h, final_b, final_h, final_k,
    T, H, V, chunks, CHUNK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // H, pair % H
    rows, depth = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = cols < V
    square = rows[:, None] * CHUNK + rows[None, :]
    block = rows[:, None] * BLOCK_K + depth[None, :]
    v_ptr += batch * v_b + head * v_h
    out_ptr += batch * out_b + head * out_h
    v_offsets = rows.to(tl.int64)[:, None] * v_t + cols.to(tl.int64)[None, :] * v_v
    out_offsets = rows[:, None] * out_t + cols[None, :]
    part = pair * chunks
    inverse_ptr += part * (3 * CHUNK * CHUNK)
    shares_ptr += part * (PARTS * CHUNK * CHUNK)
    rows_ptr += part * (3 * CHUNK * BLOCK_K)
    left_ptr += part * BLOCK_K
    # The state and all that is made of it are transposed: rows are columns of values, and stay in registers between products.
    inside = (depth[:, None] < K) & in_v[None, :]
    state_ptrs = initial_ptr + batch * initial_b + head * initial_h + depth[:, None] * initial_k + cols[None, :]
    state = tl.trans(tl.load(state_ptrs, mask=inside, other=0.0))
    nothing = tl.zeros([BLOCK_V, CHUNK], dtype=tl.float32)
    rest = tl.cast(T, tl.int32)  # tokens from the chunk on; a T of 1 is a constant, which no loop may change
    for _ in tl.range(0, chunks, num_stages=STAGES):
        here = (rows < rest)[:, None] & in_v[None, :]
        # 1. What the tokens write, of the part of the values that the state does not hold.
        known = add_product(state, tl.trans(tl.load(rows_ptr + block)), nothing, False)
        v = tl.load(v_ptr + v_offsets, mask=here, other=0.0)
        high, middle, low = split_all(tl.trans(v).to(tl.float32) - known)
        inverse_high = tl.trans(tl.load(inverse_ptr + square))
        inverse_middle = tl.trans(tl.load(inverse_ptr + CHUNK * CHUNK + square))
        inverse_low = tl.trans(tl.load(inverse_ptr + 2 * CHUNK * CHUNK + square))
        delta = add_parts(high, middle, low, inverse_high, inverse_middle, inverse_low, nothing)
        # 2. What the queries read.
        asked = tl.trans(tl.load(rows_ptr + CHUNK * BLOCK_K + block))
        out = add_product(state, asked, nothing, PARTS == 2)
        high, middle, low = split_all(delta)
        shares_high = tl.trans(tl.load(shares_ptr + square))
        shares_middle = tl.trans(tl.load(shares_ptr + CHUNK * CHUNK + square))
        if PARTS == 3:
            shares_low = tl.trans(tl.load(shares_ptr + 2 * CHUNK * CHUNK + square))
            out = add_parts(high, middle, low, shares_high, shares_middle, shares_low, out)
        else:
            out = tl.dot(middle, shares_high, out)
            out = tl.dot(high, shares_middle, out)
            out = tl.dot(high, shares_high, out)
        tl.store(out_ptr + out_offsets, tl.trans(out.to(out_ptr.dtype.element_ty)), mask=here)
        # 3. The state behind the chunk.
        left = tl.load(left_ptr + depth)
        state = add_product(delta, tl.load(rows_ptr + 2 * CHUNK * BLOCK_K + block), state * left[None, :], False)
        rest -= CHUNK
        v_ptr += CHUNK * tl.cast(v_t, tl.int64)
        out_ptr += CHUNK * tl.cast(out_t, tl.int64)
        inverse_ptr += 3 * CHUNK * CHUNK
        shares_ptr += PARTS * CHUNK * CHUNK
        rows_ptr += 3 * CHUNK * BLOCK_K
        left_ptr += BLOCK_K
    final_ptrs = final_ptr + batch * final_b + head * final_h + depth[:, None] * final_k + cols[None, :]
    tl.store(final_ptrs, tl.trans(state), mask=inside)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    final_state: torch.Tensor,
    *,
    CHUNK=64,
    BLOCK_V=64,
    num_stages=1,
):
    """Compute S = diag(e^g) S, delta = beta (v - k S), S = S + k^T delta and out = q S for T tokens one after the other.

    Shapes: q, k [B, T, H, K] and v [B, T, H, V] of any strides; g [B, T, H, K], beta [B, T, H], out [B, T, H, V] and states
    [B, H, K, V] with unit last strides. Sums, decays and the state are in float32. g is at most 0, beta at most 1.
    Mapping: one program 16 tokens of a head computes their products with earlier ones, one a chunk of CHUNK tokens inverts its
    system. Then a program owns BLOCK_V columns of a head's state and goes through the chunks, with a warp per 16 columns. Some
    sequences at once, so that the workspace stays small.
    """
    B, T, H, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    chunks, block_k = triton.cdiv(T, CHUNK), max(16, triton.next_power_of_2(K))
    kept = 2 if q.dtype == torch.bfloat16 else 3
    stages = num_stages if kept == 2 else 1  # three parts leave no room in shared memory
    at_once = max(1, min(B, MOST_PARTS // (H * chunks)))
    parts, square = at_once * H * chunks, CHUNK * CHUNK
    pairs, attention = torch.empty((2, parts * square), dtype=torch.float32, device=q.device)
    inverse = torch.empty(3 * parts * square, dtype=torch.bfloat16, device=q.device)
    shares = torch.empty(kept * parts * square, dtype=torch.bfloat16, device=q.device)
    rows = torch.empty(3 * parts * CHUNK * block_k, dtype=torch.float32, device=q.device)
    left = torch.empty(parts * block_k, dtype=torch.float32, device=q.device)
    for first in range(0, B, at_once):
        some = slice(first, first + at_once)
        pairs_of_some = min(at_once, B - first) * H
        parts = pairs_of_some * chunks
        _prepare_block[(parts, CHUNK // BLOCK.value)](
            q[some], k[some], g[some], pairs, attention, rows, left, *q.stride(), *k.stride(), *g.stride()[:3],
            T, H, chunks, K**-0.5, CHUNK, K, block_k, num_warps=4, num_stages=1,
        )  # fmt: skip
        _invert_chunk[(parts,)](
            pairs, attention, beta[some], inverse, shares, *beta.stride()[:2], T, H, chunks, CHUNK, kept, num_warps=4
        )
        _scan_chunks[(pairs_of_some, triton.cdiv(V, BLOCK_V))](
            v[some], initial_state[some], inverse, shares, rows, left, out[some], final_state[some],
            *v.stride(), *initial_state.stride()[:3], *out.stride()[:3], *final_state.stride()[:3],
            T, H, V, chunks, CHUNK, K, block_k, BLOCK_V, kept, stages, num_warps=BLOCK_V // 16,
        )  # fmt: skip

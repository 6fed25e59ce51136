"""The gated delta rule in TileLang: one token with the state in registers, or chunks of tokens between which it stays there.

Rows of queries and keys are normalised by factors on products, so that a key of 16 bits enters products as it is.
"""

import functools

import tilelang
import tilelang.language as T
import torch

EPSILON = 1e-6


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def recurrent_kernel(sizes, dtype, rows, columns, threads, aligned):
    """Compile for states of `sizes` K and V, or of any. `aligned`: rows begin at 16 bytes, and blocks of columns fill them."""
    K, V = sizes or T.dynamic("K V")
    B, Hk, Hv = T.dynamic("B Hk Hv")
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h = T.dynamic("q_b q_t q_h k_b k_t k_h v_b v_t v_h", "int64")
    g_b, g_t, beta_b, beta_t, out_b, out_t, out_h = T.dynamic("g_b g_t beta_b beta_t out_b out_t out_h", "int64")
    i_b, i_h, i_k, f_b, f_h, f_k = T.dynamic("i_b i_h i_k f_b f_h f_k", "int64")

    @T.prim_func
    def recurrent(
        q: T.StridedTensor((B, 1, Hk, K), (q_b, q_t, q_h, 1), dtype),
        k: T.StridedTensor((B, 1, Hk, K), (k_b, k_t, k_h, 1), dtype),
        v: T.StridedTensor((B, 1, Hv, V), (v_b, v_t, v_h, 1), dtype),
        g: T.StridedTensor((B, 1, Hv), (g_b, g_t, 1), "float32"),
        beta: T.StridedTensor((B, 1, Hv), (beta_b, beta_t, 1), dtype),
        initial: T.StridedTensor((B, Hv, K, V), (i_b, i_h, i_k, 1), "float32"),
        out: T.StridedTensor((B, 1, Hv, V), (out_b, out_t, out_h, 1), dtype),
        final: T.StridedTensor((B, Hv, K, V), (f_b, f_h, f_k, 1), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(B * Hv, T.ceildiv(V, columns), threads=threads) as (pair, block):
            if aligned:
                T.assume(i_b % 4 == 0)
                T.assume(i_h % 4 == 0)
                T.assume(i_k % 4 == 0)
                T.assume(f_b % 4 == 0)
                T.assume(f_h % 4 == 0)
                T.assume(f_k % 4 == 0)
            state = T.alloc_fragment((rows, columns), "float32")
            products = T.alloc_fragment((rows, columns), "float32")
            found = T.alloc_fragment((columns,), "float32")
            read = T.alloc_fragment((columns,), "float32")
            delta = T.alloc_fragment((columns,), "float32")
            query = T.alloc_shared((rows,), "float32")
            key = T.alloc_shared((rows,), "float32")
            of_rows = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((1,), "float32")
            batch = T.truncdiv(pair, Hv)
            head = T.truncmod(pair, Hv)
            key_head = T.truncdiv(head, T.truncdiv(Hv, Hk))
            first = block * columns

            # 1. The state is on its way while the query and the key are normalised.
            if aligned:
                for i, j in T.Parallel(rows, columns):
                    state[i, j] = initial[batch, head, i, first + j]
            else:
                for i, j in T.Parallel(rows, columns):
                    state[i, j] = T.if_then_else(i < K and first + j < V, initial[batch, head, i, first + j], 0.0)
            for i in T.Parallel(rows):
                query[i] = T.if_then_else(i < K, T.cast(q[batch, 0, key_head, i], "float32"), 0.0)
                key[i] = T.if_then_else(i < K, T.cast(k[batch, 0, key_head, i], "float32"), 0.0)
            for i in T.Parallel(rows):
                of_rows[i] = query[i] * query[i]
            T.reduce_sum(of_rows, sums, dim=0)
            of_query = T.alloc_var("float32")
            of_query = T.rsqrt(sums[0] + EPSILON) * scale
            for i in T.Parallel(rows):
                of_rows[i] = key[i] * key[i]
            T.reduce_sum(of_rows, sums, dim=0)
            of_key = T.alloc_var("float32")
            of_key = T.rsqrt(sums[0] + EPSILON)
            for i in T.Parallel(rows):
                of_rows[i] = query[i] * key[i]
            T.reduce_sum(of_rows, sums, dim=0)
            decay = T.alloc_var("float32")
            decay = T.exp(g[batch, 0, head])

            # 2. What the old state has for the key and for the query.
            for i, j in T.Parallel(rows, columns):
                state[i, j] = state[i, j] * decay
                products[i, j] = state[i, j] * key[i]
            T.reduce_sum(products, found, dim=0)
            for i, j in T.Parallel(rows, columns):
                products[i, j] = state[i, j] * query[i]
            T.reduce_sum(products, read, dim=0)

            # 3. What is written, and what the query reads of it.
            for j in T.Parallel(columns):
                delta[j] = T.if_then_else(first + j < V, T.cast(v[batch, 0, head, first + j], "float32"), 0.0)
            for j in T.Parallel(columns):
                delta[j] = (delta[j] - found[j] * of_key) * T.cast(beta[batch, 0, head], "float32")
            for j in T.Parallel(columns):
                read[j] = read[j] * of_query + sums[0] * of_query * of_key * delta[j]
            for j in T.Parallel(columns):
                if first + j < V:
                    out[batch, 0, head, first + j] = T.cast(read[j], dtype)
            if aligned:
                for i, j in T.Parallel(rows, columns):
                    final[batch, head, i, first + j] = state[i, j] + key[i] * of_key * delta[j]
            else:
                for i, j in T.Parallel(rows, columns):
                    if i < K and first + j < V:
                        final[batch, head, i, first + j] = state[i, j] + key[i] * of_key * delta[j]

    return recurrent


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
    columns=None,
    threads=64,
):
    """Compute S = e^g S, delta = beta (v - k S), final_state = S + k^T delta and out = q final_state for one token.

    Shapes: q, k [B, 1, Hk, K], v and out [B, 1, Hv, V], g and beta [B, 1, Hv], states [B, Hv, K, V]; unit last strides.
    Mapping: a CTA owns some columns of the state of one head, which it reads and writes once.
    columns = None: 32, or 16 if there would be fewer CTAs than an H200 has places for.
    """
    B, _, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    wide = columns or (16 if B * Hv * V <= 132 * 64 else 32)
    rows = max(16, 1 << (K - 1).bit_length())
    aligned = K in (64, 128, 256) and V % wide == 0
    for state in (initial_state, final_state):
        aligned = aligned and all(step % 4 == 0 for step in (state.storage_offset(), *state.stride()[:3]))
    if not aligned:  # One kernel for many sizes: a compilation takes seconds.
        rows, wide = max(rows, 64), 16
    recurrent_kernel((K, V) if aligned else None, q.dtype, rows, wide, threads, aligned)(
        q, k, v, g, beta, initial_state, out, final_state, K**-0.5
    )


# ---- chunks of tokens -----------------------------------------------------------------------------
# Of a chunk, A = tril(beta_i e^(G_i - G_j) k_i k_j, -1), with G the sums of g within it and k normalised. What the tokens write
# is W = (I + A)^-1 diag(beta) (V - e^G K S), of the state S before the chunk. Then out = e^G Q S + P W, where
# P = tril(e^(G_i - G_j) q_i k_j), and the state becomes e^G_last S + (e^(G_last - G) K)^T W.
#
# A write may erase what is a thousand times larger than what it leaves, so products that make the state need the bits of float32.
# A float32 factor is split into three of bfloat16, which have its range too. Two of them are enough for what is rounded to
# bfloat16.

CHUNK = 64
# No TMA: TileLang's own schedule for it may wait forever (docs/how-to/write-a-kernel.md).
CHUNK_FLAGS = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True}


@T.macro
def split(wide, high, middle, low, rows, columns):
    """Make three tiles of bfloat16 whose sum has all bits of `wide`, which is in float32."""
    for i, j in T.Parallel(rows, columns):
        high[i, j] = T.cast(wide[i, j], "bfloat16")
    for i, j in T.Parallel(rows, columns):
        middle[i, j] = T.cast(wide[i, j] - T.cast(high[i, j], "float32"), "bfloat16")
    for i, j in T.Parallel(rows, columns):
        low[i, j] = T.cast(wide[i, j] - T.cast(high[i, j], "float32") - T.cast(middle[i, j], "float32"), "bfloat16")


@T.macro
def add_parts(high, middle, low, x_high, x_middle, x_low, acc, transpose):
    """Add the product of two factors in three parts each to `acc`, without products below 2^-24."""
    policy = T.GemmWarpPolicy.FullRow
    T.gemm(low, x_high, acc, transpose_B=transpose, policy=policy)
    T.gemm(middle, x_middle, acc, transpose_B=transpose, policy=policy)
    T.gemm(high, x_low, acc, transpose_B=transpose, policy=policy)
    T.gemm(middle, x_high, acc, transpose_B=transpose, policy=policy)
    T.gemm(high, x_middle, acc, transpose_B=transpose, policy=policy)
    T.gemm(high, x_high, acc, transpose_B=transpose, policy=policy)


@functools.cache
@tilelang.jit(pass_configs=CHUNK_FLAGS)
def prepare_kernel(size, rows):
    """Compile the inverse of a chunk's system, the products of its queries with its keys, and the factors of its rows.

    size = None: for keys of any size up to `rows`.
    """
    K = size or T.dynamic("K")
    B, N, Hk, Hv, parts = T.dynamic("B N Hk Hv parts")
    q_b, q_t, q_h, k_b, k_t, k_h = T.dynamic("q_b q_t q_h k_b k_t k_h", "int64")
    g_b, g_t, beta_b, beta_t = T.dynamic("g_b g_t beta_b beta_t", "int64")
    dtype = "bfloat16"

    @T.prim_func
    def prepare(
        q: T.StridedTensor((B, N, Hk, K), (q_b, q_t, q_h, 1), dtype),
        k: T.StridedTensor((B, N, Hk, K), (k_b, k_t, k_h, 1), dtype),
        g: T.StridedTensor((B, N, Hv), (g_b, g_t, 1), "float32"),
        beta: T.StridedTensor((B, N, Hv), (beta_b, beta_t, 1), dtype),
        inverse: T.Tensor((parts, 3, CHUNK, CHUNK), dtype),
        attention: T.Tensor((parts, 2, CHUNK, CHUNK), dtype),
        factors: T.Tensor((parts, 4, CHUNK), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(parts, threads=128) as part:
            q_tile = T.alloc_shared((CHUNK, rows), dtype)
            k_tile = T.alloc_shared((CHUNK, rows), dtype)
            half_tile = T.alloc_shared((CHUNK, CHUNK), "float16")
            corner_tile = T.alloc_shared((CHUNK, CHUNK), "float16")
            rough = T.alloc_shared((CHUNK, CHUNK), dtype)
            rest = T.alloc_shared((CHUNK, CHUNK), dtype)
            rest_low = T.alloc_shared((CHUNK, CHUNK), dtype)
            logs = T.alloc_shared((CHUNK,), "float32")
            rates = T.alloc_shared((CHUNK,), "float32")
            sums = T.alloc_shared((CHUNK,), "float32")
            of_q = T.alloc_shared((CHUNK,), "float32")
            of_k = T.alloc_shared((CHUNK,), "float32")
            squares = T.alloc_fragment((CHUNK, rows), "float32")
            found = T.alloc_fragment((CHUNK,), "float32")
            triangle = T.alloc_fragment((CHUNK, CHUNK), "float32")
            prefix = T.alloc_fragment((CHUNK,), "float32")
            system = T.alloc_fragment((CHUNK, CHUNK), "float32")
            acc = T.alloc_fragment((CHUNK, CHUNK), "float32")
            solved = T.alloc_fragment((CHUNK, CHUNK), "float32")
            high = T.alloc_fragment((CHUNK, CHUNK), dtype)
            middle = T.alloc_fragment((CHUNK, CHUNK), dtype)
            low = T.alloc_fragment((CHUNK, CHUNK), dtype)
            chunks = T.truncdiv(N + CHUNK - 1, CHUNK)
            batch = T.truncdiv(T.truncdiv(part, chunks), Hv)
            head = T.truncmod(T.truncdiv(part, chunks), Hv)
            key_head = T.truncdiv(head, T.truncdiv(Hv, Hk))
            first = T.truncmod(part, chunks) * CHUNK

            for i, j in T.Parallel(CHUNK, rows):
                k_tile[i, j] = T.if_then_else(first + i < N and j < K, k[batch, first + i, key_head, j], 0)
            for i, j in T.Parallel(CHUNK, rows):
                q_tile[i, j] = T.if_then_else(first + i < N and j < K, q[batch, first + i, key_head, j], 0)
            for i in T.Parallel(CHUNK):
                logs[i] = T.if_then_else(first + i < N, g[batch, first + i, head], 0.0)
                rates[i] = T.if_then_else(first + i < N, T.cast(beta[batch, first + i, head], "float32"), 0.0)
            for i, j in T.Parallel(CHUNK, rows):
                squares[i, j] = T.cast(k_tile[i, j], "float32") * T.cast(k_tile[i, j], "float32")
            T.reduce_sum(squares, found, dim=1)
            for i in T.Parallel(CHUNK):
                of_k[i] = T.rsqrt(found[i] + EPSILON)
            for i, j in T.Parallel(CHUNK, rows):
                squares[i, j] = T.cast(q_tile[i, j], "float32") * T.cast(q_tile[i, j], "float32")
            T.reduce_sum(squares, found, dim=1)
            for i in T.Parallel(CHUNK):
                of_q[i] = T.rsqrt(found[i] + EPSILON) * scale
            # 1. Decays between the tokens of the chunk; a difference of sums above zero belongs to no pair.
            for i, j in T.Parallel(CHUNK, CHUNK):
                triangle[i, j] = T.if_then_else(j <= i, logs[j], 0.0)
            T.reduce_sum(triangle, prefix, dim=1)
            for i in T.Parallel(CHUNK):
                sums[i] = prefix[i]
            for i in T.Parallel(CHUNK):
                factors[part, 0, i] = of_k[i] * T.exp(sums[i])
                factors[part, 1, i] = of_k[i] * T.exp(T.min(sums[CHUNK - 1] - sums[i], 0.0))
                factors[part, 2, i] = of_q[i] * T.exp(sums[i])
                factors[part, 3, i] = T.exp(sums[CHUNK - 1])
            # 2. Products of queries and of keys with keys.
            T.gemm(q_tile, k_tile, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                acc[i, j] = acc[i, j] * T.if_then_else(
                    j <= i, T.exp(T.min(sums[i] - sums[j], 0.0)) * of_k[j] * of_q[i], 0.0
                )
            split(acc, high, middle, low, CHUNK, CHUNK)
            T.copy(high, attention[part, 0, 0, 0])
            T.copy(middle, attention[part, 1, 0, 0])
            T.gemm(k_tile, k_tile, system, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                system[i, j] = system[i, j] * T.if_then_else(
                    j < i, T.exp(T.min(sums[i] - sums[j], 0.0)) * of_k[j] * of_k[i] * rates[i], 0.0
                )
            # 3. The inverse, from blocks of two on the diagonal to the whole. Keys are of norm one and rates at most one, so no
            # element of an inverse of blocks exceeds one, and float16 holds them. With E = I - (I + A) T, which is about 2^-8,
            # T (I + E + E^2) then has nearly the bits of float32.
            for i, j in T.Parallel(CHUNK, CHUNK):
                solved[i, j] = T.if_then_else(i == j, 1.0, T.if_then_else(i // 2 == j // 2, -system[i, j], 0.0))
            for level in T.unroll(5):
                for i, j in T.Parallel(CHUNK, CHUNK):
                    half_tile[i, j] = T.cast(solved[i, j], "float16")
                for i, j in T.Parallel(CHUNK, CHUNK):
                    corner_tile[i, j] = T.cast(
                        T.if_then_else(
                            (i >> (level + 2)) == (j >> (level + 2)) and (i >> (level + 1)) > (j >> (level + 1)),
                            -system[i, j],
                            0.0,
                        ),
                        "float16",
                    )
                T.gemm(half_tile, corner_tile, acc, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    corner_tile[i, j] = T.cast(acc[i, j], "float16")
                T.gemm(corner_tile, half_tile, solved, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(CHUNK, CHUNK):
                rough[i, j] = T.cast(solved[i, j], dtype)
            split(system, high, middle, low, CHUNK, CHUNK)
            T.gemm(low, rough, acc, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            T.gemm(middle, rough, acc, policy=T.GemmWarpPolicy.FullRow)
            T.gemm(high, rough, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(CHUNK, CHUNK):
                solved[i, j] = T.cast(rough[i, j], "float32")
            for i, j in T.Parallel(CHUNK, CHUNK):
                acc[i, j] = T.if_then_else(i == j, 1.0, 0.0) - solved[i, j] - acc[i, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                rest[i, j] = T.cast(acc[i, j], dtype)
            T.gemm(rest, rest, acc, policy=T.GemmWarpPolicy.FullRow)
            split(acc, high, middle, low, CHUNK, CHUNK)
            for i, j in T.Parallel(CHUNK, CHUNK):
                rest[i, j] = high[i, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                rest_low[i, j] = middle[i, j]
            T.gemm(rough, rest_low, solved, policy=T.GemmWarpPolicy.FullRow)
            T.gemm(rough, rest, solved, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(CHUNK, CHUNK):
                solved[i, j] = solved[i, j] * rates[j]
            split(solved, high, middle, low, CHUNK, CHUNK)
            T.copy(high, inverse[part, 0, 0, 0])
            T.copy(middle, inverse[part, 1, 0, 0])
            T.copy(low, inverse[part, 2, 0, 0])

    return prepare


# A long sequence of few heads has fewer CTAs than the GPU has places, so it is cut into segments of chunks. The state behind a
# segment is linear in the state before it: S M + F, with F what the segment makes of nothing. One pass finds F, and M as what
# the segment makes of unit states while it writes no values. The states between segments follow, and a second pass has them all.


@functools.cache
@tilelang.jit(pass_configs=CHUNK_FLAGS)
def join_kernel(sizes, rows):
    """Compile the sums from what each segment makes of nothing to the state before each segment but the first."""
    K, V = sizes or T.dynamic("K V")
    between = T.dynamic("between")

    @T.prim_func
    def join(
        states: T.Tensor((between, V, K), "float32"), moves: T.Tensor((between, K, K), "float32"), segments: T.int32
    ):
        with T.Kernel(T.truncdiv(between, segments), T.ceildiv(V, CHUNK), threads=128) as (pair, block):
            state = T.alloc_fragment((CHUNK, rows), "float32")
            made = T.alloc_fragment((CHUNK, rows), "float32")
            high = T.alloc_fragment((CHUNK, rows), "bfloat16")
            middle = T.alloc_fragment((CHUNK, rows), "bfloat16")
            low = T.alloc_fragment((CHUNK, rows), "bfloat16")
            move_high = T.alloc_shared((rows, rows), "bfloat16")
            move_middle = T.alloc_shared((rows, rows), "bfloat16")
            move_low = T.alloc_shared((rows, rows), "bfloat16")
            move = T.alloc_shared((rows, rows), "float32")
            start = block * CHUNK

            for i, j in T.Parallel(CHUNK, rows):
                state[i, j] = T.if_then_else(start + i < V and j < K, states[pair * segments + 1, start + i, j], 0.0)
            for step in T.serial(segments - 2):
                at = pair * segments + 2 + step
                for i, j in T.Parallel(rows, rows):
                    move[i, j] = T.if_then_else(i < K and j < K, moves[at - 1, i, j], 0.0)
                split(move, move_high, move_middle, move_low, rows, rows)
                split(state, high, middle, low, CHUNK, rows)
                for i, j in T.Parallel(CHUNK, rows):
                    made[i, j] = T.if_then_else(start + i < V and j < K, states[at, start + i, j], 0.0)
                add_parts(high, middle, low, move_high, move_middle, move_low, made, False)
                for i, j in T.Parallel(CHUNK, rows):
                    state[i, j] = made[i, j]
                for i, j in T.Parallel(CHUNK, rows):
                    if start + i < V and j < K:
                        states[at, start + i, j] = state[i, j]

    return join


@functools.cache
@tilelang.jit(pass_configs=CHUNK_FLAGS)
def scan_kernel(sizes, rows, columns, whole, ahead):
    """Compile a walk through the chunks of segments, for `sizes` K and V or for any.

    `whole`: rows begin at 16 bytes, and chunks and blocks fill their tensors.

    `ahead`: the first pass, which writes states [pairs * segments, V, K] and moves [pairs * segments, K, K].
    """
    B, N, Hk, Hv, parts, between = T.dynamic("B N Hk Hv parts between")
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h = T.dynamic("q_b q_t q_h k_b k_t k_h v_b v_t v_h", "int64")
    out_b, out_t, out_h, i_b, i_h, i_k, f_b, f_h, f_k = T.dynamic("out_b out_t out_h i_b i_h i_k f_b f_h f_k", "int64")
    dtype = "bfloat16"
    K, V = sizes or T.dynamic("K V")
    of_values = T.ceildiv(V, columns)
    blocks = of_values + T.ceildiv(K, columns) if ahead else of_values
    policy = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def scan(
        q: T.StridedTensor((B, N, Hk, K), (q_b, q_t, q_h, 1), dtype),
        k: T.StridedTensor((B, N, Hk, K), (k_b, k_t, k_h, 1), dtype),
        v: T.StridedTensor((B, N, Hv, V), (v_b, v_t, v_h, 1), dtype),
        initial: T.StridedTensor((B, Hv, K, V), (i_b, i_h, i_k, 1), "float32"),
        inverse: T.Tensor((parts, 3, CHUNK, CHUNK), dtype),
        attention: T.Tensor((parts, 2, CHUNK, CHUNK), dtype),
        factors: T.Tensor((parts, 4, CHUNK), "float32"),
        states: T.Tensor((between, V, K), "float32"),
        moves: T.Tensor((between, K, K), "float32"),
        out: T.StridedTensor((B, N, Hv, V), (out_b, out_t, out_h, 1), dtype),
        final: T.StridedTensor((B, Hv, K, V), (f_b, f_h, f_k, 1), "float32"),
        segments: T.int32,
        each: T.int32,
    ):
        with T.Kernel(B * Hv * blocks, segments - 1 if ahead else segments, threads=2 * columns) as (index, segment):
            if whole:
                T.assume(q_b % 8 == 0)
                T.assume(q_t % 8 == 0)
                T.assume(q_h % 8 == 0)
                T.assume(k_b % 8 == 0)
                T.assume(k_t % 8 == 0)
                T.assume(k_h % 8 == 0)
                T.assume(v_b % 8 == 0)
                T.assume(v_t % 8 == 0)
                T.assume(v_h % 8 == 0)
            q_tile = T.alloc_shared((CHUNK, rows), dtype)
            k_tile = T.alloc_shared((CHUNK, rows), dtype)
            v_tile = T.alloc_shared((CHUNK, columns), dtype)
            inverse_high = T.alloc_shared((CHUNK, CHUNK), dtype)
            inverse_middle = T.alloc_shared((CHUNK, CHUNK), dtype)
            inverse_low = T.alloc_shared((CHUNK, CHUNK), dtype)
            attention_high = T.alloc_shared((CHUNK, CHUNK), dtype)
            attention_middle = T.alloc_shared((CHUNK, CHUNK), dtype)
            factor = T.alloc_shared((4, CHUNK), "float32")
            # The state and all that is made of it are transposed, so that they stay in registers between products.
            state = T.alloc_fragment((columns, rows), "float32")
            state_high = T.alloc_fragment((columns, rows), dtype)
            state_middle = T.alloc_fragment((columns, rows), dtype)
            state_low = T.alloc_fragment((columns, rows), dtype)
            known = T.alloc_fragment((columns, CHUNK), "float32")
            delta = T.alloc_fragment((columns, CHUNK), "float32")
            read = T.alloc_fragment((columns, CHUNK), "float32")
            high = T.alloc_fragment((columns, CHUNK), dtype)
            middle = T.alloc_fragment((columns, CHUNK), dtype)
            low = T.alloc_fragment((columns, CHUNK), dtype)
            chunks = T.truncdiv(N + CHUNK - 1, CHUNK)
            pair = T.truncdiv(index, blocks)
            start = T.truncmod(index, blocks) * columns
            batch = T.truncdiv(pair, Hv)
            head = T.truncmod(pair, Hv)
            key_head = T.truncdiv(head, T.truncdiv(Hv, Hk))

            # Blocks behind those of values have columns of unit states.
            if segment == 0:
                for i, j in T.Parallel(columns, rows):
                    state[i, j] = T.if_then_else(start + i < V and j < K, initial[batch, head, j, start + i], 0.0)
            elif ahead:
                for i, j in T.Parallel(columns, rows):
                    state[i, j] = T.if_then_else(start + i - of_values * columns == j, 1.0, 0.0)
            else:
                for i, j in T.Parallel(columns, rows):
                    state[i, j] = T.if_then_else(
                        start + i < V and j < K, states[pair * segments + segment, start + i, j], 0.0
                    )
            for step in T.serial(T.min(each, chunks - segment * each)):
                chunk = segment * each + step
                if whole:
                    for i, j in T.Parallel(CHUNK, rows):
                        k_tile[i, j] = k[batch, chunk * CHUNK + i, key_head, j]
                else:
                    for i, j in T.Parallel(CHUNK, rows):
                        k_tile[i, j] = T.if_then_else(
                            chunk * CHUNK + i < N and j < K, k[batch, chunk * CHUNK + i, key_head, j], 0
                        )
                if whole and not ahead:
                    for i, j in T.Parallel(CHUNK, columns):
                        v_tile[i, j] = v[batch, chunk * CHUNK + i, head, start + j]
                else:
                    for i, j in T.Parallel(CHUNK, columns):
                        v_tile[i, j] = T.if_then_else(
                            chunk * CHUNK + i < N and start + j < V, v[batch, chunk * CHUNK + i, head, start + j], 0
                        )
                if not ahead:
                    if whole:
                        for i, j in T.Parallel(CHUNK, rows):
                            q_tile[i, j] = q[batch, chunk * CHUNK + i, key_head, j]
                    else:
                        for i, j in T.Parallel(CHUNK, rows):
                            q_tile[i, j] = T.if_then_else(
                                chunk * CHUNK + i < N and j < K, q[batch, chunk * CHUNK + i, key_head, j], 0
                            )
                    T.copy(attention[pair * chunks + chunk, 0, 0, 0], attention_high)
                    T.copy(attention[pair * chunks + chunk, 1, 0, 0], attention_middle)
                T.copy(inverse[pair * chunks + chunk, 0, 0, 0], inverse_high)
                T.copy(inverse[pair * chunks + chunk, 1, 0, 0], inverse_middle)
                T.copy(inverse[pair * chunks + chunk, 2, 0, 0], inverse_low)
                T.copy(factors[pair * chunks + chunk, 0, 0], factor)
                # 1. What the state holds for the keys and for the queries.
                split(state, state_high, state_middle, state_low, columns, rows)
                T.gemm(state_low, k_tile, known, transpose_B=True, policy=policy, clear_accum=True)
                T.gemm(state_middle, k_tile, known, transpose_B=True, policy=policy)
                T.gemm(state_high, k_tile, known, transpose_B=True, policy=policy)
                if not ahead:
                    T.gemm(state_middle, q_tile, read, transpose_B=True, policy=policy, clear_accum=True)
                    T.gemm(state_high, q_tile, read, transpose_B=True, policy=policy)
                # 2. What the tokens write, of the part of the values that is new.
                for i, j in T.Parallel(columns, CHUNK):
                    known[i, j] = T.cast(v_tile[j, i], "float32") - known[i, j] * factor[0, j]
                split(known, high, middle, low, columns, CHUNK)
                T.clear(delta)
                add_parts(high, middle, low, inverse_high, inverse_middle, inverse_low, delta, True)
                # 3. What the queries read.
                if not ahead:
                    for i, j in T.Parallel(columns, CHUNK):
                        read[i, j] = read[i, j] * factor[2, j]
                    split(delta, high, middle, low, columns, CHUNK)
                    T.gemm(middle, attention_high, read, transpose_B=True, policy=policy)
                    T.gemm(high, attention_middle, read, transpose_B=True, policy=policy)
                    T.gemm(high, attention_high, read, transpose_B=True, policy=policy)
                    for i, j in T.Parallel(columns, CHUNK):
                        if chunk * CHUNK + j < N and start + i < V:
                            out[batch, chunk * CHUNK + j, head, start + i] = T.cast(read[i, j], dtype)
                # 4. The state behind the chunk.
                for i, j in T.Parallel(columns, CHUNK):
                    delta[i, j] = delta[i, j] * factor[1, j]
                split(delta, high, middle, low, columns, CHUNK)
                for i, j in T.Parallel(columns, rows):
                    state[i, j] = state[i, j] * factor[3, 0]
                T.gemm(low, k_tile, state, policy=policy)
                T.gemm(middle, k_tile, state, policy=policy)
                T.gemm(high, k_tile, state, policy=policy)
            if ahead:
                for i, j in T.Parallel(columns, rows):
                    if start + i < V and j < K and start < of_values * columns:
                        states[pair * segments + segment + 1, start + i, j] = state[i, j]
                for i, j in T.Parallel(columns, rows):
                    if start >= of_values * columns and start + i - of_values * columns < K and j < K:
                        moves[pair * segments + segment, start + i - of_values * columns, j] = state[i, j]
            elif segment == segments - 1:
                for i, j in T.Parallel(columns, rows):
                    if start + i < V and j < K:
                        final[batch, head, j, start + i] = state[i, j]

    return scan


def _scan_shape(heads, V, chunks):
    """Return the columns of values of a CTA and the number of segments, for the heads of all sequences."""
    # An H200 has places for 132 CTAs. The first pass takes most of the time of the second: two segments gain nothing.
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
    columns=None,
    segments=None,
):
    """Compute S = e^g S + k^T delta with delta = beta (v - k e^g S), and out = q S, for T tokens one after the other.

    Shapes: q, k [B, T, Hk, K], v and out [B, T, Hv, V], g and beta [B, T, Hv], states [B, Hv, K, V]; unit last strides; T in
    bfloat16. Sums, decays and the state are in float32.
    Mapping: one CTA a chunk of 64 tokens and head inverts the system of the chunk. Then a CTA owns some columns of a head's state
    and goes through the chunks, with a warp per 16 columns.
    columns and segments = None: by the number of heads, so that the CTAs fill an H200.
    """
    B, tokens, Hv, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    chunks = -(-tokens // CHUNK)
    parts = B * Hv * chunks
    rows = max(16, 1 << (K - 1).bit_length())
    best_columns, best_segments = _scan_shape(B * Hv, V, chunks)
    wide = columns or best_columns
    segments = min(segments or best_segments, chunks)
    each = -(-chunks // segments)
    segments = -(-chunks // each)
    inverse = torch.empty((parts, 3, CHUNK, CHUNK), dtype=torch.bfloat16, device=q.device)
    attention = torch.empty((parts, 2, CHUNK, CHUNK), dtype=torch.bfloat16, device=q.device)
    factors = torch.empty((parts, 4, CHUNK), dtype=torch.float32, device=q.device)
    between = B * Hv * segments if segments > 1 else 1
    states = torch.empty((between, V, K), dtype=torch.float32, device=q.device)
    moves = torch.empty((between, K, K), dtype=torch.float32, device=q.device)
    # Other sizes than models have share a kernel: a compilation takes seconds.
    is_usual = K in (64, 128) and V in (64, 128)
    if not is_usual:
        rows, wide = 128, columns or 64
    sizes = (K, V) if is_usual else None
    whole = is_usual and V % wide == tokens % CHUNK == 0
    for x in (q, k, v):
        whole = whole and all(step % 8 == 0 for step in (x.storage_offset(), *x.stride()[:3]))
    prepare_kernel(K if is_usual else None, rows)(q, k, g, beta, inverse, attention, factors, K**-0.5)
    args = (q, k, v, initial_state, inverse, attention, factors, states, moves, out, final_state, segments, each)
    if segments > 1:
        scan_kernel(sizes, rows, wide, whole, True)(*args)
        if segments > 2:
            join_kernel(sizes, rows)(states, moves, segments)
    scan_kernel(sizes, rows, wide, whole, False)(*args)

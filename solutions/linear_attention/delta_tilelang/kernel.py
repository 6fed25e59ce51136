"""The gated delta rule for one token in TileLang: a CTA holds a block of columns of one head's state in registers."""

import functools

import tilelang
import tilelang.language as T
import torch

EPSILON = 1e-6


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def recurrent_kernel(K, V, dtype, rows, columns, threads, aligned):
    """Compile for states [K, V]; `aligned`: rows of states begin at 16 bytes, and blocks of columns fill them."""
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
    aligned = rows == K and V % wide == 0
    for state in (initial_state, final_state):
        aligned = aligned and all(step % 4 == 0 for step in (state.storage_offset(), *state.stride()[:3]))
    recurrent_kernel(K, V, q.dtype, rows, wide, threads, aligned)(
        q, k, v, g, beta, initial_state, out, final_state, K**-0.5
    )

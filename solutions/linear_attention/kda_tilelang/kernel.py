"""Kimi Delta Attention in TileLang: one token after the other, with the state in registers.

Every row of the state has its own decay, which therefore does not factor out of the products of keys. The recurrence needs no
such products: a token reads and writes columns of the state, and columns do not depend on each other.
"""

import functools

import tilelang
import tilelang.language as T
import torch

EPSILON = 1e-6
LANES = 8  # share the rows of a column


@T.macro
def fetch(to, values, batch, token, head, first, size, part, vec):
    """Copy rows `first` to `first + part` of one token, by 16 bytes if `vec` is more than 1; zeros past `size`."""
    if vec > 1:
        for i in T.unroll(part // vec):
            for u in T.vectorized(vec):
                to[i * vec + u] = values[batch, token, head, first + i * vec + u]
    else:
        for i in T.unroll(part):
            to[i] = T.if_then_else(first + i < size, values[batch, token, head, T.min(first + i, size - 1)], 0)


@T.macro
def add_up(sums, count):
    """Add up numbers of the lanes that share rows."""
    for step in T.unroll(3):
        for n in T.unroll(count):
            sums[n] += T.shfl_xor(sums[n], 1 << step)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def scan_kernel(size, dtype, part, columns, warps, vec):
    """Compile for keys of `size`, or of up to LANES * part if that is None. A lane has `part` rows of `columns` columns.

    With `vec` above 1 rows begin at 16 bytes, and V is a multiple of `columns`.
    """
    K = size or T.dynamic("K")
    B, S, H, V = T.dynamic("B S H V")
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h = T.dynamic("q_b q_t q_h k_b k_t k_h v_b v_t v_h", "int64")
    g_b, g_t, g_h, beta_b, beta_t = T.dynamic("g_b g_t g_h beta_b beta_t", "int64")
    out_b, out_t, out_h = T.dynamic("out_b out_t out_h", "int64")
    i_b, i_h, i_k, f_b, f_h, f_k = T.dynamic("i_b i_h i_k f_b f_h f_k", "int64")
    wide = min(vec, 4)  # numbers of float32 in 16 bytes

    @T.prim_func
    def scan_tokens(
        q: T.StridedTensor((B, S, H, K), (q_b, q_t, q_h, 1), dtype),
        k: T.StridedTensor((B, S, H, K), (k_b, k_t, k_h, 1), dtype),
        v: T.StridedTensor((B, S, H, V), (v_b, v_t, v_h, 1), dtype),
        g: T.StridedTensor((B, S, H, K), (g_b, g_t, g_h, 1), "float32"),
        beta: T.StridedTensor((B, S, H), (beta_b, beta_t, 1), dtype),
        initial: T.StridedTensor((B, H, K, V), (i_b, i_h, i_k, 1), "float32"),
        out: T.StridedTensor((B, S, H, V), (out_b, out_t, out_h, 1), dtype),
        final: T.StridedTensor((B, H, K, V), (f_b, f_h, f_k, 1), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(B * H, T.ceildiv(V, 4 * warps * columns), threads=32 * warps) as (pair, block):
            if vec > 1:
                T.assume(q_b % vec == 0)  # run() checked it
                T.assume(q_t % vec == 0)
                T.assume(q_h % vec == 0)
                T.assume(k_b % vec == 0)
                T.assume(k_t % vec == 0)
                T.assume(k_h % vec == 0)
                T.assume(g_b % 4 == 0)
                T.assume(g_t % 4 == 0)
                T.assume(g_h % 4 == 0)
                T.assume(i_b % 4 == 0)
                T.assume(i_h % 4 == 0)
                T.assume(i_k % 4 == 0)
                T.assume(f_b % 4 == 0)
                T.assume(f_h % 4 == 0)
                T.assume(f_k % 4 == 0)
            thread = T.get_thread_binding(0)
            batch = T.truncdiv(pair, H)
            head = T.truncmod(pair, H)
            first = thread % LANES * part
            column = (block * 4 * warps + thread // LANES) * columns
            state = T.alloc_local((part * columns,), "float32")
            query = T.alloc_local((part,), "float32")
            key = T.alloc_local((part,), "float32")
            decay = T.alloc_local((part,), "float32")
            sums = T.alloc_local((2 * columns + 3,), "float32")
            delta = T.alloc_local((columns,), "float32")
            # Those of the next token, on their way during this one.
            q_next = T.alloc_local((part,), dtype)
            k_next = T.alloc_local((part,), dtype)
            g_next = T.alloc_local((part,), "float32")
            v_next = T.alloc_local((columns,), dtype)
            beta_next = T.alloc_local((1,), dtype)
            of_query = T.alloc_var("float32", init=0.0)
            of_key = T.alloc_var("float32", init=0.0)
            rate = T.alloc_var("float32", init=0.0)
            ahead = T.alloc_var("int32", init=0)

            for i in T.unroll(part):
                for c in T.unroll(columns):
                    state[i * columns + c] = 0.0
            if vec > 1:
                if column < V:
                    for i in T.unroll(part):
                        for c in T.vectorized(columns):
                            state[i * columns + c] = initial[batch, head, first + i, column + c]
            else:
                for i in T.unroll(part):
                    for c in T.unroll(columns):
                        if first + i < K and column + c < V:
                            state[i * columns + c] = initial[batch, head, first + i, column + c]
            fetch(q_next, q, batch, 0, head, first, K, part, vec)
            fetch(k_next, k, batch, 0, head, first, K, part, vec)
            fetch(g_next, g, batch, 0, head, first, K, part, wide)
            for c in T.unroll(columns):
                v_next[c] = v[batch, 0, head, T.min(column + c, V - 1)]
            beta_next[0] = beta[batch, 0, head]

            for token in T.serial(S):
                for i in T.unroll(part):
                    query[i] = T.cast(q_next[i], "float32")
                    key[i] = T.cast(k_next[i], "float32")
                    decay[i] = T.exp(g_next[i])
                for c in T.unroll(columns):
                    delta[c] = T.cast(v_next[c], "float32")
                rate = T.cast(beta_next[0], "float32")
                ahead = T.min(token + 1, S - 1)
                fetch(q_next, q, batch, ahead, head, first, K, part, vec)
                fetch(k_next, k, batch, ahead, head, first, K, part, vec)
                fetch(g_next, g, batch, ahead, head, first, K, part, wide)
                for c in T.unroll(columns):
                    v_next[c] = v[batch, ahead, head, T.min(column + c, V - 1)]
                beta_next[0] = beta[batch, ahead, head]

                # All sums at once, over the state before the write: what the query reads of it follows from its product with
                # the key. Both are normalised by factors on sums.
                for n in T.unroll(2 * columns + 3):
                    sums[n] = 0.0
                for i in T.unroll(part):
                    sums[2 * columns] += query[i] * query[i]
                    sums[2 * columns + 1] += key[i] * key[i]
                    sums[2 * columns + 2] += query[i] * key[i]
                    for c in T.unroll(columns):
                        state[i * columns + c] *= decay[i]
                        sums[c] += state[i * columns + c] * key[i]
                        sums[columns + c] += state[i * columns + c] * query[i]
                add_up(sums, 2 * columns + 3)
                of_query = T.rsqrt(sums[2 * columns] + EPSILON) * scale
                of_key = T.rsqrt(sums[2 * columns + 1] + EPSILON)
                for c in T.unroll(columns):
                    delta[c] = (delta[c] - sums[c] * of_key) * rate * of_key
                for i in T.unroll(part):
                    for c in T.unroll(columns):
                        state[i * columns + c] += key[i] * delta[c]
                if thread % LANES == 0:
                    for c in T.unroll(columns):
                        if column + c < V:
                            out[batch, token, head, column + c] = T.cast(
                                (sums[columns + c] + sums[2 * columns + 2] * delta[c]) * of_query, dtype
                            )

            if vec > 1:
                if column < V:
                    for i in T.unroll(part):
                        for c in T.vectorized(columns):
                            final[batch, head, first + i, column + c] = state[i * columns + c]
            else:
                for i in T.unroll(part):
                    for c in T.unroll(columns):
                        if first + i < K and column + c < V:
                            final[batch, head, first + i, column + c] = state[i * columns + c]

    return scan_tokens


def begin_at_16_bytes(*tensors):
    """Return True if all rows begin at multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and not any(step * t.element_size() % 16 for step in t.stride()[:-1]) for t in tensors
    )


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
    columns=None,
    warps=1,
):
    """Compute S = diag(e^g) S, delta = beta (v - k S), S = S + k^T delta and out = q S for tokens one after the other.

    Shapes: q, k, g [B, T, H, K], v and out [B, T, H, V], beta [B, T, H], states [B, H, K, V]; unit last strides.
    Mapping: a lane owns an eighth of the rows of `columns` columns of a head's state, a warp four times as many columns.
    columns = None: 2, or 4 if there are enough warps with it. Rows that do not begin at 16 bytes are loaded one by one.
    """
    B, _, H, V = v.shape
    K = k.shape[3]
    if final_state.numel() == 0:
        return
    columns = columns or (4 if B * H * V >= 132 * 16 * 16 else 2)
    vec = 16 // q.element_size()
    if K % (LANES * vec) == 0 and V % columns == 0 and begin_at_16_bytes(q, k, g, initial_state, final_state):
        kernel = scan_kernel(K, q.dtype, K // LANES, columns, warps, vec)
    else:  # One kernel for many sizes: a compilation takes seconds.
        kernel = scan_kernel(None, q.dtype, max(8, 1 << (K - 1).bit_length()) // LANES, 2, 1, 1)
    kernel(q, k, v, g, beta, initial_state, out, final_state, K**-0.5)

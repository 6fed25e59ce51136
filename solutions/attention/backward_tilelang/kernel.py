"""The gradients of causal attention with shared key heads, TileLang, without atomics: queries first, then keys and values.

The log-sum-exp of each row is no input. The kernel of the queries finds it in a first pass over the keys, and keeps it for the
other kernel.
"""

import functools

import tilelang
import tilelang.language as T
import torch

LOG2_E = 1.4426950408889634
LEAST_SCORE = -3.4028234663852886e38  # of a row that has seen no key: finite, so that differences of it are no NaN
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0


@T.macro
def load_rows(x, batch, head, first, end, tile, rows, columns, D):
    """Load rows of a head; zeros past `end` and past D."""
    for i, j in T.Parallel(rows, columns):
        tile[i, j] = T.if_then_else(first + i < end and j < D, x[batch, head, first + i, j], 0)


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def grad_queries_kernel(D, dtype, rows, keys, columns):
    """Compile the gradient of `rows` queries of a head, after their sums: log-sum-exps in base 2, then sums of grad_out * out."""
    B, Hq, Hkv, S = T.dynamic("B Hq Hkv S")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    g_b, g_h, g_s, gq_b, gq_h, gq_s = T.dynamic("g_b g_h g_s gq_b gq_h gq_s", "int64")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def grad_queries(
        q: T.StridedTensor((B, Hq, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, Hkv, S, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, S, D), (v_b, v_h, v_s, 1), dtype),
        out: T.StridedTensor((B, Hq, S, D), (out_b, out_h, out_s, 1), dtype),
        grad_out: T.StridedTensor((B, Hq, S, D), (g_b, g_h, g_s, 1), dtype),
        grad_q: T.StridedTensor((B, Hq, S, D), (gq_b, gq_h, gq_s, 1), dtype),
        sums: T.Tensor((B, Hq, 2, S), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(B * Hq, T.ceildiv(S, rows), threads=2 * rows) as (row, tile):
            q_tile = T.alloc_shared((rows, columns), dtype)
            g_tile = T.alloc_shared((rows, columns), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, columns), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            steps = T.alloc_fragment((rows, keys), "float32")
            narrow = T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            grown = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            along = T.alloc_fragment((rows,), "float32")
            batch = T.alloc_var("int32")
            head = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            first = T.alloc_var("int32")

            batch = T.truncdiv(row, Hq)
            head = T.truncmod(row, Hq)
            key_head = T.truncdiv(head, T.truncdiv(Hq, Hkv))
            # The last queries see the most keys, and start first.
            first = (T.truncdiv(S + rows - 1, rows) - 1 - tile) * rows
            load_rows(q, batch, head, first, S, q_tile, rows, columns, D)
            # 1. The log-sum-exp of each row.
            T.fill(largest, LEAST_SCORE)
            T.clear(total)
            for step in T.serial(T.truncdiv(T.min(first + rows, S) + keys - 1, keys)):
                load_rows(k, batch, key_head, step * keys, S, k_tile, keys, columns, D)
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=full_row, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    scores[i, j] = T.if_then_else(
                        step * keys + j <= first + i, scores[i, j] * scale * LOG2_E, -T.infinity("float32")
                    )
                T.copy(largest, grown)
                T.reduce_max(scores, grown, dim=1, clear=False)
                for i, j in T.Parallel(rows, keys):
                    scores[i, j] = T.exp2(scores[i, j] - grown[i])
                T.reduce_sum(scores, added, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * T.exp2(largest[i] - grown[i]) + added[i]
                T.copy(grown, largest)
            for i in T.Parallel(rows):
                total[i] = largest[i] + T.log2(total[i])
            # 2. The part of each row that the softmax takes away.
            load_rows(out, batch, head, first, S, g_tile, rows, columns, D)
            T.copy(g_tile, acc)
            load_rows(grad_out, batch, head, first, S, g_tile, rows, columns, D)
            for i, j in T.Parallel(rows, columns):
                acc[i, j] = acc[i, j] * T.cast(g_tile[i, j], "float32")
            T.reduce_sum(acc, along, dim=1)
            for i in T.Parallel(rows):
                if first + i < S:
                    sums[batch, head, 0, first + i] = total[i]
                    sums[batch, head, 1, first + i] = along[i]
            # 3. The gradient.
            T.clear(acc)
            for step in T.serial(T.truncdiv(T.min(first + rows, S) + keys - 1, keys)):
                load_rows(k, batch, key_head, step * keys, S, k_tile, keys, columns, D)
                load_rows(v, batch, key_head, step * keys, S, v_tile, keys, columns, D)
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=full_row, clear_accum=True)
                T.gemm(g_tile, v_tile, steps, transpose_B=True, policy=full_row, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    scores[i, j] = T.if_then_else(
                        step * keys + j <= first + i, T.exp2(scores[i, j] * scale * LOG2_E - total[i]), 0.0
                    )
                for i, j in T.Parallel(rows, keys):
                    scores[i, j] = scores[i, j] * (steps[i, j] - along[i])
                T.copy(scores, narrow)
                T.gemm(narrow, k_tile, acc, policy=full_row)
            for i, j in T.Parallel(rows, columns):
                if first + i < S and j < D:
                    grad_q[batch, head, first + i, j] = T.cast(acc[i, j] * scale, dtype)

    return grad_queries


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def grad_keys_kernel(D, dtype, keys, rows, columns):
    """Compile the gradients of `keys` keys and values of a key head, from its query heads, `rows` queries a step."""
    B, Hq, Hkv, S = T.dynamic("B Hq Hkv S")
    q_b, q_h, q_s, g_b, g_h, g_s = T.dynamic("q_b q_h q_s g_b g_h g_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    gk_b, gk_h, gk_s, gv_b, gv_h, gv_s = T.dynamic("gk_b gk_h gk_s gv_b gv_h gv_s", "int64")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def grad_keys(
        q: T.StridedTensor((B, Hq, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, Hkv, S, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, S, D), (v_b, v_h, v_s, 1), dtype),
        grad_out: T.StridedTensor((B, Hq, S, D), (g_b, g_h, g_s, 1), dtype),
        grad_k: T.StridedTensor((B, Hkv, S, D), (gk_b, gk_h, gk_s, 1), dtype),
        grad_v: T.StridedTensor((B, Hkv, S, D), (gv_b, gv_h, gv_s, 1), dtype),
        sums: T.Tensor((B, Hq, 2, S), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(B * Hkv, T.ceildiv(S, keys), threads=2 * keys) as (row, tile):
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, columns), dtype)
            q_tile = T.alloc_shared((rows, columns), dtype)
            g_tile = T.alloc_shared((rows, columns), dtype)
            total = T.alloc_shared((rows,), "float32")
            along = T.alloc_shared((rows,), "float32")
            scores = T.alloc_fragment((keys, rows), "float32")
            steps = T.alloc_fragment((keys, rows), "float32")
            narrow = T.alloc_fragment((keys, rows), dtype)
            acc_k = T.alloc_fragment((keys, columns), "float32")
            acc_v = T.alloc_fragment((keys, columns), "float32")
            batch = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            head = T.alloc_var("int32")
            first = T.alloc_var("int32")
            low = T.alloc_var("int32")
            begin = T.alloc_var("int32")

            batch = T.truncdiv(row, Hkv)
            key_head = T.truncmod(row, Hkv)
            first = tile * keys  # the first keys are seen by the most queries, and start first
            low = T.truncdiv(first, rows)
            load_rows(k, batch, key_head, first, S, k_tile, keys, columns, D)
            load_rows(v, batch, key_head, first, S, v_tile, keys, columns, D)
            T.clear(acc_k)
            T.clear(acc_v)
            for turn in T.serial(T.truncdiv(Hq, Hkv) * (T.truncdiv(S + rows - 1, rows) - low)):
                head = key_head * T.truncdiv(Hq, Hkv) + T.truncdiv(turn, T.truncdiv(S + rows - 1, rows) - low)
                begin = (low + T.truncmod(turn, T.truncdiv(S + rows - 1, rows) - low)) * rows
                load_rows(q, batch, head, begin, S, q_tile, rows, columns, D)
                load_rows(grad_out, batch, head, begin, S, g_tile, rows, columns, D)
                for j in T.Parallel(rows):
                    total[j] = T.if_then_else(begin + j < S, sums[batch, head, 0, begin + j], 0.0)
                    along[j] = T.if_then_else(begin + j < S, sums[batch, head, 1, begin + j], 0.0)
                T.gemm(k_tile, q_tile, scores, transpose_B=True, policy=full_row, clear_accum=True)
                T.gemm(v_tile, g_tile, steps, transpose_B=True, policy=full_row, clear_accum=True)
                # Queries past S have no weight.
                for i, j in T.Parallel(keys, rows):
                    scores[i, j] = T.if_then_else(
                        first + i <= begin + j and begin + j < S, T.exp2(scores[i, j] * scale * LOG2_E - total[j]), 0.0
                    )
                T.copy(scores, narrow)
                T.gemm(narrow, g_tile, acc_v, policy=full_row)
                for i, j in T.Parallel(keys, rows):
                    scores[i, j] = scores[i, j] * (steps[i, j] - along[j])
                T.copy(scores, narrow)
                T.gemm(narrow, q_tile, acc_k, policy=full_row)
            for i, j in T.Parallel(keys, columns):
                if first + i < S and j < D:
                    grad_k[batch, key_head, first + i, j] = T.cast(acc_k[i, j] * scale, dtype)
                    grad_v[batch, key_head, first + i, j] = T.cast(acc_v[i, j], dtype)

    return grad_keys


def columns_of(D):
    """Return the columns of a tile: D filled up to what swizzled tiles and the warps of a product take."""
    return 64 if D <= 64 else 128 if D <= 128 else 256


def run(q, k, v, scale, out, grad_out, grad_q, grad_k, grad_v, *, keys=64, step=64):
    """Write the gradients of q, k and v of out = softmax(scale * q k^T, causal) v.

    q, out, grad_out, grad_q: [B, Hq, S, D], k, v, grad_k, grad_v: [B, Hkv, S, D], last stride 1 (any others); T is bfloat16 or
    float16. Weights and gradients of scores are rounded to T for the next product, all sums are in float32. A CTA owns `keys`
    queries of a head, then as many keys of a key head, and streams the others, `step` at a time.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    columns = columns_of(D)
    if columns == 256:
        keys, step = 64, 32
    sums = torch.empty((B, Hq, 2, S), dtype=torch.float32, device=q.device)
    scale = float(scale)
    grad_queries_kernel(D, q.dtype, keys, step, columns)(q, k, v, out, grad_out, grad_q, sums, scale)
    grad_keys_kernel(D, q.dtype, keys, step, columns)(q, k, v, grad_out, grad_k, grad_v, sums, scale)

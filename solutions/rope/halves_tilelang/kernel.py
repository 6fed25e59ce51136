"""Rotary embedding (NeoX halves) of q and k in one launch, and its gradients, in TileLang: a CTA a token, tables in registers."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def rope_halves_kernel(q_heads, k_heads, D, dtype, vec, groups, back):
    """Compile for head size D: threads (D / 2 / vec, groups), one of which rotates `vec` pairs of every groups-th head.

    With `back` it rotates back, and scales what one half gives the other by the sine of the half that it comes from.
    """
    B, S, table_B = T.dynamic("B S table_B")
    q_strides = (*T.dynamic("q_b q_h q_s", "int64"), 1)
    k_strides = (*T.dynamic("k_b k_h k_s", "int64"), 1)
    q_out_strides = (*T.dynamic("q_out_b q_out_h q_out_s", "int64"), 1)
    k_out_strides = (*T.dynamic("k_out_b k_out_h k_out_s", "int64"), 1)
    cos_strides = (*T.dynamic("cos_b cos_s", "int64"), 1)
    sin_strides = (*T.dynamic("sin_b sin_s", "int64"), 1)
    row_strides = q_strides[:3] + k_strides[:3] + q_out_strides[:3] + k_out_strides[:3]
    row_strides += cos_strides[:2] + sin_strides[:2]
    half = D // 2
    q_rounds, k_rounds = -(-q_heads // groups), -(-k_heads // groups)
    to_first, to_second = (1, -1) if back else (-1, 1)
    first_sin, second_sin = (1, 0) if back else (0, 1)

    @T.macro
    def load(x, rows, i, b, head, s, column):
        for v in T.vectorized(vec):
            rows[i, 0, v] = x[b, head, s, column + v]
        for v in T.vectorized(vec):
            rows[i, 1, v] = x[b, head, s, half + column + v]

    @T.macro
    def rotate(rows, i, cos_row, sin_row, result, out, b, head, s, column):
        """Products and sum are rounded to T each; T.fmul keeps float32 products out of a fused multiply-add.

        Every store has elements of `result` of its own: TileLang 0.1.15 may store a stale value of a reused one.
        """
        for v in T.vectorized(vec):
            kept = T.cast(T.fmul(T.cast(rows[i, 0, v], "float32"), T.cast(cos_row[0, v], "float32")), dtype)
            crossed = T.cast(
                T.fmul(to_first * T.cast(rows[i, 1, v], "float32"), T.cast(sin_row[first_sin, v], "float32")), dtype
            )
            result[i, 0, v] = T.cast(T.cast(kept, "float32") + T.cast(crossed, "float32"), dtype)
        for v in T.vectorized(vec):
            out[b, head, s, column + v] = result[i, 0, v]
        for v in T.vectorized(vec):
            kept = T.cast(T.fmul(T.cast(rows[i, 1, v], "float32"), T.cast(cos_row[1, v], "float32")), dtype)
            crossed = T.cast(
                T.fmul(to_second * T.cast(rows[i, 0, v], "float32"), T.cast(sin_row[second_sin, v], "float32")), dtype
            )
            result[i, 1, v] = T.cast(T.cast(kept, "float32") + T.cast(crossed, "float32"), dtype)
        for v in T.vectorized(vec):
            out[b, head, s, half + column + v] = result[i, 1, v]

    @T.prim_func
    def rope_halves(
        q: T.StridedTensor((B, q_heads, S, D), q_strides, dtype),
        k: T.StridedTensor((B, k_heads, S, D), k_strides, dtype),
        cos: T.StridedTensor((table_B, S, D), cos_strides, dtype),
        sin: T.StridedTensor((table_B, S, D), sin_strides, dtype),
        q_out: T.StridedTensor((B, q_heads, S, D), q_out_strides, dtype),
        k_out: T.StridedTensor((B, k_heads, S, D), k_out_strides, dtype),
    ):
        with T.Kernel(S, B, threads=(half // vec, groups)) as (s, b):
            for stride in row_strides:
                T.assume(stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            column, group = T.get_thread_binding(0) * vec, T.get_thread_binding(1)
            table_b = T.min(b, table_B - 1)  # one table for the whole batch, or one for each
            cos_row = T.alloc_local((2, vec), dtype)
            sin_row = T.alloc_local((2, vec), dtype)
            q_rows = T.alloc_local((q_rounds, 2, vec), dtype)
            k_rows = T.alloc_local((k_rounds, 2, vec), dtype)
            q_result = T.alloc_local((q_rounds, 2, vec), dtype)
            k_result = T.alloc_local((k_rounds, 2, vec), dtype)

            for side in T.unroll(2):  # all loads first: they overlap
                for v in T.vectorized(vec):
                    cos_row[side, v] = cos[table_b, s, side * half + column + v]
                for v in T.vectorized(vec):
                    sin_row[side, v] = sin[table_b, s, side * half + column + v]
            for i in T.unroll(q_rounds):
                if group + i * groups < q_heads:
                    load(q, q_rows, i, b, group + i * groups, s, column)
            for i in T.unroll(k_rounds):
                if group + i * groups < k_heads:
                    load(k, k_rows, i, b, group + i * groups, s, column)
            for i in T.unroll(q_rounds):
                if group + i * groups < q_heads:
                    rotate(q_rows, i, cos_row, sin_row, q_result, q_out, b, group + i * groups, s, column)
            for i in T.unroll(k_rounds):
                if group + i * groups < k_heads:
                    rotate(k_rows, i, cos_row, sin_row, k_result, k_out, b, group + i * groups, s, column)

    return rope_halves


def run_rope_neox_backward(grad_q_out, grad_k_out, cos, sin, grad_q, grad_k, *, rounds=None):
    """dx = T(T(g * cos) + cat(t2, -t1)), t = T(g * sin), for the gradients g of q and of k; t1 and t2 are halves of a head.

    Shapes as in `_run`. The forward has the sine of the half that receives; the gradient that of the half that gives.
    """
    _run(grad_q_out, grad_k_out, cos, sin, grad_q, grad_k, rounds, back=True)


def _run(q, k, cos, sin, q_out, k_out, rounds, *, back):
    """Rotate q and k.

    q, q_out: [B, Hq, S, D]; k, k_out: [B, Hkv, S, D]; cos, sin: [1 or B, S, D]; last strides 1, the others free; T is
    bfloat16, float16 or float32, products are taken in float32. A CTA owns a token (b, s): a thread keeps its part of
    cos and sin in registers and rotates it in `rounds` heads of q. rounds=None: 4 from 512 tokens on, else 1 (decode).
    """
    B, q_heads, S, D = q.shape
    if B == 0 or S == 0:
        return
    dtype = q.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides half a head, all strides and all addresses.
    bits = D // 2 | 16 // itemsize
    addresses = 0
    for tensor in (q, k, q_out, k_out):
        b, h, s, _ = tensor.stride()
        bits |= b | h | s
        addresses |= tensor.data_ptr()
    for tensor in (cos, sin):
        b, s, _ = tensor.stride()
        bits |= b | s
        addresses |= tensor.data_ptr()
    bits |= addresses // itemsize
    vec = bits & -bits
    k_heads = k.shape[1]
    if rounds is None:
        rounds = 4 if B * S >= 512 else 1
    groups = min(-(-max(q_heads, k_heads) // rounds), 1024 // (D // 2 // vec))
    rope_halves_kernel(q_heads, k_heads, D, dtype, vec, groups, back)(q, k, cos, sin, q_out, k_out)

"""Rotary embedding of the first R elements of each head of q and k in one launch, in TileLang: a CTA a token."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def rope_partial_kernel(q_heads, k_heads, D, R, dtype, vec, groups):
    """Compile for R of D: threads (D / vec, groups), one of which makes `vec` elements of every groups-th head."""
    B, S, table_B = T.dynamic("B S table_B")
    q_strides = (*T.dynamic("q_b q_h q_s", "int64"), 1)
    k_strides = (*T.dynamic("k_b k_h k_s", "int64"), 1)
    q_out_strides = (*T.dynamic("q_out_b q_out_h q_out_s", "int64"), 1)
    k_out_strides = (*T.dynamic("k_out_b k_out_h k_out_s", "int64"), 1)
    cos_strides = (*T.dynamic("cos_b cos_s", "int64"), 1)
    sin_strides = (*T.dynamic("sin_b sin_s", "int64"), 1)
    row_strides = q_strides[:3] + k_strides[:3] + q_out_strides[:3] + k_out_strides[:3]
    row_strides += cos_strides[:2] + sin_strides[:2]
    half = R // 2
    q_rounds, k_rounds = -(-q_heads // groups), -(-k_heads // groups)

    @T.macro
    def load(x, rows, i, b, head, s, column):
        for v in T.vectorized(vec):
            rows[i, 0, v] = x[b, head, s, column + v]
        if column < half:  # the other half of each pair, which its own thread reads too: this one hits in L1
            for v in T.vectorized(vec):
                rows[i, 1, v] = x[b, head, s, column + half + v]
        elif column < R:
            for v in T.vectorized(vec):
                rows[i, 1, v] = x[b, head, s, column - half + v]

    @T.macro
    def rotate(rows, i, cosine, sine, result, out, b, head, s, column):
        """Products and sum are rounded to T each; T.fmul keeps float32 products out of a fused multiply-add.

        Every store has elements of `result` of its own: TileLang 0.1.15 may store a stale value of a reused one.
        """
        if column < R:
            for v in T.vectorized(vec):
                kept = T.cast(T.fmul(T.cast(rows[i, 0, v], "float32"), cosine[v]), dtype)
                crossed = T.cast(T.fmul(T.cast(rows[i, 1, v], "float32"), sine[v]), dtype)
                result[i, v] = T.cast(T.cast(kept, "float32") + T.cast(crossed, "float32"), dtype)
            for v in T.vectorized(vec):
                out[b, head, s, column + v] = result[i, v]
        else:
            for v in T.vectorized(vec):
                out[b, head, s, column + v] = rows[i, 0, v]

    @T.prim_func
    def rope_partial(
        q: T.StridedTensor((B, q_heads, S, D), q_strides, dtype),
        k: T.StridedTensor((B, k_heads, S, D), k_strides, dtype),
        cos: T.StridedTensor((table_B, S, R), cos_strides, dtype),
        sin: T.StridedTensor((table_B, S, R), sin_strides, dtype),
        q_out: T.StridedTensor((B, q_heads, S, D), q_out_strides, dtype),
        k_out: T.StridedTensor((B, k_heads, S, D), k_out_strides, dtype),
    ):
        with T.Kernel(S, B, threads=(D // vec, groups)) as (s, b):
            for stride in row_strides:
                T.assume(stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            column, group = T.get_thread_binding(0) * vec, T.get_thread_binding(1)
            table_b = T.min(b, table_B - 1)  # one table for the whole batch, or one for each
            cos_row = T.alloc_local((vec,), dtype)
            sin_row = T.alloc_local((vec,), dtype)
            cosine = T.alloc_local((vec,), "float32")
            sine = T.alloc_local((vec,), "float32")  # negative in the first half: rot(r) = cat(-r[R/2:], r[:R/2])
            sign = T.alloc_var("float32", init=1.0)
            q_rows = T.alloc_local((q_rounds, 2, vec), dtype)
            k_rows = T.alloc_local((k_rounds, 2, vec), dtype)
            q_result = T.alloc_local((q_rounds, vec), dtype)
            k_result = T.alloc_local((k_rounds, vec), dtype)

            if column < R:
                for v in T.vectorized(vec):
                    cos_row[v] = cos[table_b, s, column + v]
                for v in T.vectorized(vec):
                    sin_row[v] = sin[table_b, s, column + v]
                if column < half:
                    sign = -1.0
                for v in T.vectorized(vec):
                    cosine[v] = T.cast(cos_row[v], "float32")
                    sine[v] = T.cast(sin_row[v], "float32") * sign
            for i in T.unroll(q_rounds):  # all loads first: they overlap
                if group + i * groups < q_heads:
                    load(q, q_rows, i, b, group + i * groups, s, column)
            for i in T.unroll(k_rounds):
                if group + i * groups < k_heads:
                    load(k, k_rows, i, b, group + i * groups, s, column)
            for i in T.unroll(q_rounds):
                if group + i * groups < q_heads:
                    rotate(q_rows, i, cosine, sine, q_result, q_out, b, group + i * groups, s, column)
            for i in T.unroll(k_rounds):
                if group + i * groups < k_heads:
                    rotate(k_rows, i, cosine, sine, k_result, k_out, b, group + i * groups, s, column)

    return rope_partial


def run(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """y = cat(T(T(r * cos) + T(rot(r) * sin)), x[R:]) for a head x of q or k, with r = x[:R].

    rot(r) is cat(-r[R/2:], r[:R/2]). q, q_out: [B, Hq, S, D]; k, k_out: [B, Hkv, S, D]; cos, sin: [1 or B, S, R]; R is
    even, R <= D; last strides 1, the others free; T is bfloat16, float16 or float32, products are taken in float32. A
    CTA owns a token (b, s): a thread makes the same elements of `rounds` heads of q, and keeps their cos and sin in
    registers. rounds=None: 4 from 512 tokens on, else 1 (decode).
    """
    B, q_heads, S, D = q.shape
    if B == 0 or S == 0:
        return
    R = cos.shape[2]
    dtype = q.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides a head, half of R, all strides and all addresses.
    bits = D | R // 2 | 16 // itemsize
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
    groups = min(-(-max(q_heads, k_heads) // rounds), 1024 // (D // vec))
    rope_partial_kernel(q_heads, k_heads, D, R, dtype, vec, groups)(q, k, cos, sin, q_out, k_out)

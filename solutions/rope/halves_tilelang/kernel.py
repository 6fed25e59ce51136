"""Rotary embedding (NeoX halves) of q and k in one launch, and its gradients, in TileLang: a CTA a token, tables in registers."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def rope_kernel(form, q_heads, k_heads, D, R, dtype, vec, groups):
    """Compile for R of D elements of a head.

    With `form` "forward" (R = D) one of (D / 2 / vec, groups) threads rotates `vec` pairs of every groups-th head; "back"
    rotates back, and scales what one half gives the other by the sine of the half that it comes from. With "part" one of
    (D / vec, groups) threads makes `vec` elements of every groups-th head, which it rotates or copies.
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
    half = R // 2
    q_rounds, k_rounds = -(-q_heads // groups), -(-k_heads // groups)
    part = form == "part"
    sides = 1 if part else 2  # halves of a head that a thread makes
    to_first, to_second = (1, -1) if form == "back" else (-1, 1)
    first_sin, second_sin = (1, 0) if form == "back" else (0, 1)

    @T.macro
    def load(x, rows, i, b, head, s, column):
        for v in T.vectorized(vec):
            rows[i, 0, v] = x[b, head, s, column + v]
        if not part:
            for v in T.vectorized(vec):
                rows[i, 1, v] = x[b, head, s, half + column + v]
        elif column < half:  # the other half of each pair, which its own thread reads too: this one hits in L1
            for v in T.vectorized(vec):
                rows[i, 1, v] = x[b, head, s, column + half + v]
        elif column < R:
            for v in T.vectorized(vec):
                rows[i, 1, v] = x[b, head, s, column - half + v]

    @T.macro
    def turn(rows, i, side, sign, cosine, sine, sine_side, result):
        """Products and sum are rounded to T each; T.fmul keeps float32 products out of a fused multiply-add."""
        for v in T.vectorized(vec):
            kept = T.cast(T.fmul(T.cast(rows[i, side, v], "float32"), T.cast(cosine[side, v], "float32")), dtype)
            crossed = T.cast(
                T.fmul(sign * T.cast(rows[i, 1 - side, v], "float32"), T.cast(sine[sine_side, v], "float32")), dtype
            )
            result[i, side, v] = T.cast(T.cast(kept, "float32") + T.cast(crossed, "float32"), dtype)

    @T.macro
    def rotate(rows, i, cosine, sine, result, out, b, head, s, column):
        """Every store has elements of `result` of its own: TileLang 0.1.15 may store a stale value of a reused one."""
        if not part:
            turn(rows, i, 0, to_first, cosine, sine, first_sin, result)
            for v in T.vectorized(vec):
                out[b, head, s, column + v] = result[i, 0, v]
            turn(rows, i, 1, to_second, cosine, sine, second_sin, result)
            for v in T.vectorized(vec):
                out[b, head, s, half + column + v] = result[i, 1, v]
        elif column < R:
            turn(rows, i, 0, 1, cosine, sine, 0, result)
            for v in T.vectorized(vec):
                out[b, head, s, column + v] = result[i, 0, v]
        else:
            for v in T.vectorized(vec):
                out[b, head, s, column + v] = rows[i, 0, v]

    @T.prim_func
    def rope(
        q: T.StridedTensor((B, q_heads, S, D), q_strides, dtype),
        k: T.StridedTensor((B, k_heads, S, D), k_strides, dtype),
        cos: T.StridedTensor((table_B, S, R), cos_strides, dtype),
        sin: T.StridedTensor((table_B, S, R), sin_strides, dtype),
        q_out: T.StridedTensor((B, q_heads, S, D), q_out_strides, dtype),
        k_out: T.StridedTensor((B, k_heads, S, D), k_out_strides, dtype),
    ):
        with T.Kernel(S, B, threads=((D if part else half) // vec, groups)) as (s, b):
            for stride in row_strides:
                T.assume(stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            column, group = T.get_thread_binding(0) * vec, T.get_thread_binding(1)
            table_b = T.min(b, table_B - 1)  # one table for the whole batch, or one for each
            cos_row = T.alloc_local((sides, vec), dtype)
            sin_row = T.alloc_local((sides, vec), dtype)
            q_rows = T.alloc_local((q_rounds, 2, vec), dtype)
            k_rows = T.alloc_local((k_rounds, 2, vec), dtype)
            q_result = T.alloc_local((q_rounds, sides, vec), dtype)
            k_result = T.alloc_local((k_rounds, sides, vec), dtype)

            # All loads first: they overlap.
            cosine, sine = cos_row, sin_row
            if part:
                cosine = T.alloc_local((1, vec), "float32")
                sine = T.alloc_local((1, vec), "float32")  # negative in the first half: rot(r) = cat(-r[R/2:], r[:R/2])
                sign = T.alloc_var("float32", init=1.0)
                if column < R:
                    for v in T.vectorized(vec):
                        cos_row[0, v] = cos[table_b, s, column + v]
                    for v in T.vectorized(vec):
                        sin_row[0, v] = sin[table_b, s, column + v]
                    if column < half:
                        sign = -1.0
                    for v in T.vectorized(vec):
                        cosine[0, v] = T.cast(cos_row[0, v], "float32")
                        sine[0, v] = T.cast(sin_row[0, v], "float32") * sign
            else:
                for side in T.unroll(2):
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
                    rotate(q_rows, i, cosine, sine, q_result, q_out, b, group + i * groups, s, column)
            for i in T.unroll(k_rounds):
                if group + i * groups < k_heads:
                    rotate(k_rows, i, cosine, sine, k_result, k_out, b, group + i * groups, s, column)

    return rope


@functools.cache
def kernel_for(form, q_heads, k_heads, D, R, dtype, vec, rounds):
    """The kernel whose threads have `rounds` heads of q, or more where a CTA would have over 1024 threads."""
    threads = (D if form == "part" else R // 2) // vec
    groups = min(-(-max(q_heads, k_heads) // rounds), 1024 // threads)
    return rope_kernel(form, q_heads, k_heads, D, R, dtype, vec, groups)


def _launches(form):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    q, q_out: [B, Hq, S, D]; k, k_out: [B, Hkv, S, D]; cos, sin: [1 or B, S, R]; R even, R <= D if `form` is "part", else R = D;
    last strides 1, the others free; T is bfloat16, float16 or float32, products are taken in float32. A CTA owns a token
    (b, s): a thread keeps its part of cos and sin in registers for `rounds` heads of q. rounds=None: 4 from 512 tokens on, else
    1 (decode).
    """

    def run(q, k, cos, sin, q_out, k_out, *, rounds=None):
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
        if rounds is None:
            rounds = 4 if B * S >= 512 else 1
        kernel_for(form, q_heads, k.shape[1], D, R, dtype, bits & -bits, rounds)(q, k, cos, sin, q_out, k_out)

    return lambda declared: run


@_launches("forward")
def run_rope_neox(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """y = T(T(x * cos) + T(rot(x) * sin)) for x in q and k, with rot(x) = cat(-x[D/2:], x[:D/2])."""


@_launches("part")
def run_rope_partial(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """y = cat(T(T(r * cos) + T(rot(r) * sin)), x[R:]) for a head x of q or k, with r = x[:R], rot(r) = cat(-r[R/2:], r[:R/2])."""


@_launches("back")
def run_rope_neox_backward(grad_q_out, grad_k_out, cos, sin, grad_q, grad_k, *, rounds=None):
    """dx = T(T(g * cos) + cat(t2, -t1)), t = T(g * sin), for the gradients g of q and of k; t1 and t2 are halves of a head.

    The forward has the sine of the half that receives; the gradient that of the half that gives.
    """

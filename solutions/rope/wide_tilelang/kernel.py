"""Rotary position embeddings in float32 with tables of any dtype, and the one of a single tensor, in TileLang: a CTA a token."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def turn_kernel(
    neighbours, full_tables, one_rounding, single, q_heads, k_heads, D, dtype, table_dtype, wide_rows, wide, groups
):
    """Compile for heads of D elements: a thread of (columns, groups) turns n pairs of every groups-th head.

    `neighbours`: a pair lies side by side, else in either half of a head. `full_tables`: its two elements have entries of their
    own, else that of the first half. `one_rounding`: all is in float32, else each product is rounded to T. `single`: there is no
    k. `wide_rows` elements of a head and `wide` entries of a table are moved at once.
    """
    B, S, table_B = T.dynamic("B S table_B")
    q_strides = (*T.dynamic("q_b q_h q_s", "int64"), 1)
    k_strides = (*T.dynamic("k_b k_h k_s", "int64"), 1)
    q_out_strides = (*T.dynamic("q_out_b q_out_h q_out_s", "int64"), 1)
    k_out_strides = (*T.dynamic("k_out_b k_out_h k_out_s", "int64"), 1)
    cos_strides = (*T.dynamic("cos_b cos_s", "int64"), 1)
    sin_strides = (*T.dynamic("sin_b sin_s", "int64"), 1)
    row_strides = q_strides[:3] + k_strides[:3] + q_out_strides[:3] + k_out_strides[:3]
    half = D // 2
    n = max(1, wide_rows // 2) if neighbours else wide_rows
    columns = half // n
    q_rounds, k_rounds = -(-q_heads // groups), 0 if single else -(-k_heads // groups)
    sides = 2 if full_tables else 1
    apart = wide_rows == 1  # two elements side by side may begin anywhere

    def first(v):
        return 2 * v if neighbours else v

    def second(v):
        return 2 * v + 1 if neighbours else n + v

    @T.macro
    def load(x, rows, i, b, head, s, pair):
        if neighbours and apart:
            for v in T.unroll(2):
                rows[i, v] = x[b, head, s, 2 * pair + v]
        elif neighbours:
            for v in T.vectorized(2 * n):
                rows[i, v] = x[b, head, s, 2 * pair + v]
        else:
            for v in T.vectorized(n):
                rows[i, v] = x[b, head, s, pair + v]
            for v in T.vectorized(n):
                rows[i, n + v] = x[b, head, s, half + pair + v]

    @T.macro
    def load_table(x, row, b, s, pair):
        """Entries as pairs lie: those of both elements side by side, or of the first elements and then of the second."""
        if neighbours and full_tables:
            for c in T.unroll(2 * n // wide):
                for v in T.vectorized(wide):
                    row[c * wide + v] = x[b, s, 2 * pair + c * wide + v]
        else:
            for side in T.unroll(sides):
                for c in T.unroll(n // wide):
                    for v in T.vectorized(wide):
                        row[side * n + c * wide + v] = x[b, s, side * half + pair + c * wide + v]

    @T.macro
    def turn(rows, i, cosine, sine, result):
        """T.fmul keeps float32 products that are rounded out of a fused multiply-add."""
        for v in T.unroll(n):
            one = T.cast(rows[i, first(v)], "float32")
            other = T.cast(rows[i, second(v)], "float32")
            cos_1 = T.cast(cosine[first(v) if full_tables else v], "float32")
            sin_1 = T.cast(sine[first(v) if full_tables else v], "float32")
            cos_2 = T.cast(cosine[second(v) if full_tables else v], "float32")
            sin_2 = T.cast(sine[second(v) if full_tables else v], "float32")
            if one_rounding:
                result[i, first(v)] = T.cast(one * cos_1 - other * sin_1, dtype)
                result[i, second(v)] = T.cast(other * cos_2 + one * sin_2, dtype)
            else:
                one_cos = T.cast(T.cast(T.fmul(one, cos_1), dtype), "float32")
                other_sin = T.cast(T.cast(T.fmul(other, sin_1), dtype), "float32")
                other_cos = T.cast(T.cast(T.fmul(other, cos_2), dtype), "float32")
                one_sin = T.cast(T.cast(T.fmul(one, sin_2), dtype), "float32")
                result[i, first(v)] = T.cast(one_cos - other_sin, dtype)
                result[i, second(v)] = T.cast(other_cos + one_sin, dtype)

    @T.macro
    def rotate(rows, i, cosine, sine, result, out, b, head, s, pair):
        """Every store has elements of `result` of its own: TileLang 0.1.15 may store a stale value of a reused one."""
        turn(rows, i, cosine, sine, result)
        if neighbours and apart:
            for v in T.unroll(2):
                out[b, head, s, 2 * pair + v] = result[i, v]
        elif neighbours:
            for v in T.vectorized(2 * n):
                out[b, head, s, 2 * pair + v] = result[i, v]
        else:
            for v in T.vectorized(n):
                out[b, head, s, pair + v] = result[i, v]
            for v in T.vectorized(n):
                out[b, head, s, half + pair + v] = result[i, n + v]

    @T.prim_func
    def turn_heads(
        q: T.StridedTensor((B, q_heads, S, D), q_strides, dtype),
        k: T.StridedTensor((B, k_heads, S, D), k_strides, dtype),
        cos: T.StridedTensor((table_B, S, D), cos_strides, table_dtype),
        sin: T.StridedTensor((table_B, S, D), sin_strides, table_dtype),
        q_out: T.StridedTensor((B, q_heads, S, D), q_out_strides, dtype),
        k_out: T.StridedTensor((B, k_heads, S, D), k_out_strides, dtype),
    ):
        with T.Kernel(S, B, threads=(columns, groups)) as (s, b):
            if not apart:
                for stride in row_strides:
                    T.assume(stride % (2 * n if neighbours else n) == 0)  # the launch chose n so
                for stride in cos_strides[:2] + sin_strides[:2]:
                    T.assume(stride % wide == 0)
            pair, group = T.get_thread_binding(0) * n, T.get_thread_binding(1)
            table_b = T.min(b, table_B - 1)  # one table for the whole batch, or one for each
            cosine = T.alloc_local((sides * n,), table_dtype)
            sine = T.alloc_local((sides * n,), table_dtype)
            q_rows = T.alloc_local((q_rounds, 2 * n), dtype)
            k_rows = T.alloc_local((max(k_rounds, 1), 2 * n), dtype)
            q_result = T.alloc_local((q_rounds, 2 * n), dtype)
            k_result = T.alloc_local((max(k_rounds, 1), 2 * n), dtype)

            # All loads first: they overlap.
            load_table(cos, cosine, table_b, s, pair)
            load_table(sin, sine, table_b, s, pair)
            for i in T.unroll(q_rounds):
                if group + i * groups < q_heads:
                    load(q, q_rows, i, b, group + i * groups, s, pair)
            for i in T.unroll(k_rounds):
                if group + i * groups < k_heads:
                    load(k, k_rows, i, b, group + i * groups, s, pair)
            for i in T.unroll(q_rounds):
                if group + i * groups < q_heads:
                    rotate(q_rows, i, cosine, sine, q_result, q_out, b, group + i * groups, s, pair)
            for i in T.unroll(k_rounds):
                if group + i * groups < k_heads:
                    rotate(k_rows, i, cosine, sine, k_result, k_out, b, group + i * groups, s, pair)

    return turn_heads


@functools.cache
def kernel_for(form, q_heads, k_heads, D, dtype, table_dtype, vec, table_vec, rounds):
    """The kernel that moves `vec` elements at once, and `table_vec` of a table, or fewer where a thread has fewer of them."""
    neighbours, full_tables = form[:2]
    n = max(1, vec // 2) if neighbours else vec
    wide = min(table_vec, 2 * n if neighbours and full_tables else n)
    if neighbours and vec == 1:
        wide = 1
    groups = max(1, min(-(-max(q_heads, k_heads) // rounds), 1024 // (D // 2 // n)))
    return turn_kernel(*form, q_heads, k_heads, D, dtype, table_dtype, vec, wide, groups)


def _launches(neighbours=False, full_tables=True, one_rounding=True, single=False):
    """Fill in a function that only declares an entry.

    q, q_out: [B, Hq, S, D]; k, k_out: [B, Hkv, S, D]; cos, sin: [1 or B, S, D]; last strides 1, the others free; T is bfloat16,
    float16 or float32, and so is the dtype of the tables. A CTA owns a token (b, s): a thread keeps its part of cos and sin in
    registers for `rounds` heads of q. rounds=None: 4 from 512 tokens on, else 1 (decode).
    """
    form = neighbours, full_tables, one_rounding, single

    def compute(q, k, cos, sin, q_out, k_out, rounds):
        B, q_heads, S, D = q.shape
        if q.numel() == 0 and k.numel() == 0:
            return
        itemsize, table_itemsize = q.dtype.itemsize, cos.dtype.itemsize
        # The widest powers of two, at most 16 bytes, that divide a half of a head (or a head of pairs), strides and addresses.
        bits, addresses = (D if neighbours else D // 2) | 16 // itemsize, 0
        for tensor in (q, k, q_out, k_out):
            b, h, s, _ = tensor.stride()
            bits |= b | h | s
            addresses |= tensor.data_ptr()
        bits |= addresses // itemsize
        table_bits, addresses = (D if neighbours and full_tables else D // 2) | 16 // table_itemsize, 0
        for tensor in (cos, sin):
            b, s, _ = tensor.stride()
            table_bits |= b | s
            addresses |= tensor.data_ptr()
        table_bits |= addresses // table_itemsize
        rounds = rounds or (4 if B * S >= 512 else 1)
        vec, table_vec = bits & -bits, table_bits & -table_bits
        kernel = kernel_for(form, q_heads, k.shape[1], D, q.dtype, cos.dtype, vec, table_vec, rounds)
        kernel(q, k, cos, sin, q_out, k_out)

    if single:

        def run(x, cos, sin, out, *, rounds=None):
            compute(x, x, cos, sin, out, out, rounds)

    else:

        def run(q, k, cos, sin, q_out, k_out, *, rounds=None):
            compute(q, k, cos, sin, q_out, k_out, rounds)

    return lambda declared: run


@_launches()
def run_rope_neox_fp32(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """y[i] = T(x[i] * c[i] - x[i+D/2] * s[i]), y[i+D/2] = T(x[i+D/2] * c[i+D/2] + x[i] * s[i+D/2]) for x = q and x = k.

    c and s are cos and sin [1 or B, S, D]; products and sums in float32.
    """


@_launches(one_rounding=False, single=True)
def run_rope_neox_single(x, cos, sin, out, *, rounds=None):
    """As run_rope_neox_fp32 for one tensor, but each product is rounded to T, and then the sum. cos and sin are in T."""


@_launches(neighbours=True)
def run_rope_interleaved_fp32(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """y[2i] = T(x[2i] * c[2i] - x[2i+1] * s[2i]), y[2i+1] = T(x[2i+1] * c[2i+1] + x[2i] * s[2i+1]) for x = q and x = k.

    c and s are cos and sin [1 or B, S, D]; products and sums in float32.
    """


@_launches(neighbours=True, full_tables=False)
def run_rope_pairs_fp32(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """As run_rope_interleaved_fp32, but entry i of the first half of cos and sin is that of both elements of pair i."""

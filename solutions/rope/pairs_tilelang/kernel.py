"""Rotary embeddings of neighbouring pairs, and by half tables, in TileLang: a CTA a token, tables in registers, one launch."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def turn_kernel(form, q_heads, k_heads, D, pairs, dtype, wide, columns, groups, rounds):
    """Compile for `pairs` pairs of the D elements of a head; run() found that `wide` elements of one can be moved at once.

    One of (columns, groups) threads makes n pairs, or the elements in their place, of every groups-th head, up to `rounds` of
    q; further heads have CTAs of their own. `form` says where a pair lies: "halves" in either half of a head, read and written;
    "pairs" and "complex" side by side from the beginning on, "tail" at the end; "to halves" side by side where it is read, in
    the halves where it is written. The table of "complex" has cosine and sine side by side, in float32. "tail" has no k.
    """
    B, S, table_B = T.dynamic("B S table_B")
    q_strides = (*T.dynamic("q_b q_h q_s", "int64"), 1)
    k_strides = (*T.dynamic("k_b k_h k_s", "int64"), 1)
    q_out_strides = (*T.dynamic("q_out_b q_out_h q_out_s", "int64"), 1)
    k_out_strides = (*T.dynamic("k_out_b k_out_h k_out_s", "int64"), 1)
    cos_strides = (*T.dynamic("cos_b cos_s", "int64"), 1)
    sin_strides = (*T.dynamic("sin_b sin_s", "int64"), 1)
    reads_halves = form == "halves"
    writes_halves = form in ("halves", "to halves")
    one_rounding = form in ("complex", "tail")
    n = wide if reads_halves else max(wide // 2, 1)  # pairs of a thread
    table_wide = n  # elements of a table that are moved at once
    start = D - 2 * pairs if form == "tail" else 0
    rest_end = start if form == "tail" else D  # what is copied ends here
    scalar = wide == 1 and not reads_halves  # rows, or what is copied, may end within two elements
    copies = 2 * pairs < D
    table_width = {"halves": pairs, "tail": pairs, "pairs": 2 * pairs, "to halves": D, "complex": D}[form]
    table_dtype = "float32" if form == "complex" else dtype
    parts = max(1, -(-q_heads // (groups * rounds)))  # CTAs of a token
    k_rounds = -(-k_heads // (groups * parts))

    @T.macro
    def load(x, rows, i, b, head, s, column, turns):
        if reads_halves:
            for v in T.vectorized(n):
                rows[i, v] = x[b, head, s, column + v]
            for v in T.vectorized(n):
                rows[i, n + v] = x[b, head, s, pairs + column + v]
        elif scalar:
            for v in T.unroll(2):
                if turns or column + v < rest_end:
                    rows[i, v] = x[b, head, s, column + v]
        else:
            for v in T.vectorized(wide):
                rows[i, v] = x[b, head, s, column + v]

    @T.macro
    def turn(rows, i, cosine, sine, result):
        """Products are rounded to T, then their sum; T.fmul keeps float32 products out of a fused multiply-add."""
        for v in T.unroll(n):
            even = T.cast(rows[i, v if reads_halves else 2 * v], "float32")
            odd = T.cast(rows[i, n + v if reads_halves else 2 * v + 1], "float32")
            first, second = (v, n + v) if writes_halves else (2 * v, 2 * v + 1)
            if one_rounding:
                result[i, first] = T.cast(even * cosine[v] - odd * sine[v], dtype)
                result[i, second] = T.cast(odd * cosine[v] + even * sine[v], dtype)
            else:
                even_cos = T.cast(T.cast(T.fmul(even, cosine[v]), dtype), "float32")
                odd_sin = T.cast(T.cast(T.fmul(odd, sine[v]), dtype), "float32")
                odd_cos = T.cast(T.cast(T.fmul(odd, cosine[v]), dtype), "float32")
                even_sin = T.cast(T.cast(T.fmul(even, sine[v]), dtype), "float32")
                result[i, first] = T.cast(even_cos - odd_sin, dtype)
                result[i, second] = T.cast(odd_cos + even_sin, dtype)

    @T.macro
    def store(out, values, i, b, head, s, column, pair):
        if writes_halves:
            for v in T.vectorized(n):
                out[b, head, s, pair + v] = values[i, v]
            for v in T.vectorized(n):
                out[b, head, s, pairs + pair + v] = values[i, n + v]
        elif scalar:
            for v in T.unroll(2):
                out[b, head, s, column + v] = values[i, v]
        else:
            for v in T.vectorized(wide):
                out[b, head, s, column + v] = values[i, v]

    @T.macro
    def copy(out, rows, i, b, head, s, column):
        if scalar:
            for v in T.unroll(2):
                if column + v < rest_end:
                    out[b, head, s, column + v] = rows[i, v]
        else:
            for v in T.vectorized(wide):
                out[b, head, s, column + v] = rows[i, v]

    @T.macro
    def rotate(rows, i, cosine, sine, result, out, b, head, s, column, pair, turns):
        """Every store has elements of `result` of its own: TileLang 0.1.15 may store a stale value of a reused one."""
        if turns:
            turn(rows, i, cosine, sine, result)
            store(out, result, i, b, head, s, column, pair)
        else:
            copy(out, rows, i, b, head, s, column)

    @T.macro
    def load_table(cos, sin, cosine, sine, table_b, s, pair):
        if form == "complex":
            numbers = T.alloc_local((2, n), "float32")
            for part in T.unroll(2):
                for v in T.vectorized(table_wide):
                    numbers[part, v] = cos[table_b, s, 2 * pair + part * n + v]
            for v in T.unroll(n):
                cosine[v] = numbers[2 * v // n, 2 * v % n]
                sine[v] = numbers[(2 * v + 1) // n, (2 * v + 1) % n]
        else:
            cos_row = T.alloc_local((n,), dtype)
            sin_row = T.alloc_local((n,), dtype)
            for v in T.vectorized(table_wide):
                cos_row[v] = cos[table_b, s, pair + v]
            for v in T.vectorized(table_wide):
                sin_row[v] = sin[table_b, s, pair + v]
            for v in T.unroll(n):
                cosine[v] = T.cast(cos_row[v], "float32")
                sine[v] = T.cast(sin_row[v], "float32")

    @T.macro
    def turn_token(q, k, cos, sin, q_out, k_out, block, b):
        t, group = T.get_thread_binding(0), T.get_thread_binding(1)
        s, part = (block // parts, block % parts) if parts > 1 else (block, 0)
        q_head, k_head = part * (groups * rounds) + group, part * (groups * k_rounds) + group
        if scalar and start > 0:
            turns = t < pairs
            column = T.if_then_else(t < pairs, start + 2 * t, 2 * (t - pairs))
            pair = t
        else:
            column = t * n if reads_halves else t * 2 * n
            pair = t * n - start // 2
            turns = column >= start if start > 0 else column < 2 * pairs if copies else True
        table_b = T.min(b, table_B - 1)  # one table for the whole batch, or one for each
        cosine = T.alloc_local((n,), "float32")
        sine = T.alloc_local((n,), "float32")
        q_rows = T.alloc_local((rounds, 2 * n), dtype)
        q_result = T.alloc_local((rounds, 2 * n), dtype)

        # All loads first: they overlap.
        if turns:
            load_table(cos, sin, cosine, sine, table_b, s, pair)
        for i in T.unroll(rounds):
            if q_head + i * groups < q_heads:
                load(q, q_rows, i, b, q_head + i * groups, s, column, turns)
        if k_heads > 0:
            k_rows = T.alloc_local((k_rounds, 2 * n), dtype)
            k_result = T.alloc_local((k_rounds, 2 * n), dtype)
            for i in T.unroll(k_rounds):
                if k_head + i * groups < k_heads:
                    load(k, k_rows, i, b, k_head + i * groups, s, column, turns)
        for i in T.unroll(rounds):
            if q_head + i * groups < q_heads:
                rotate(q_rows, i, cosine, sine, q_result, q_out, b, q_head + i * groups, s, column, pair, turns)
        if k_heads > 0:
            for i in T.unroll(k_rounds):
                if k_head + i * groups < k_heads:
                    rotate(k_rows, i, cosine, sine, k_result, k_out, b, k_head + i * groups, s, column, pair, turns)

    @T.prim_func
    def rope(
        q: T.StridedTensor((B, q_heads, S, D), q_strides, dtype),
        k: T.StridedTensor((B, k_heads, S, D), k_strides, dtype),
        cos: T.StridedTensor((table_B, S, table_width), cos_strides, dtype),
        sin: T.StridedTensor((table_B, S, table_width), sin_strides, dtype),
        q_out: T.StridedTensor((B, q_heads, S, D), q_out_strides, dtype),
        k_out: T.StridedTensor((B, k_heads, S, D), k_out_strides, dtype),
    ):
        with T.Kernel(S * parts, B, threads=(columns, groups)) as (block, b):
            for stride in q_strides[:3] + k_strides[:3] + q_out_strides[:3] + k_out_strides[:3]:
                T.assume(stride % wide == 0)  # run() chose it so; it lets the compiler use vector accesses
            for stride in cos_strides[:2] + sin_strides[:2]:
                T.assume(stride % table_wide == 0)
            turn_token(q, k, cos, sin, q_out, k_out, block, b)

    @T.prim_func
    def rope_complex(
        q: T.StridedTensor((B, q_heads, S, D), q_strides, dtype),
        k: T.StridedTensor((B, k_heads, S, D), k_strides, dtype),
        turns: T.StridedTensor((table_B, S, table_width), cos_strides, table_dtype),
        q_out: T.StridedTensor((B, q_heads, S, D), q_out_strides, dtype),
        k_out: T.StridedTensor((B, k_heads, S, D), k_out_strides, dtype),
    ):
        with T.Kernel(S * parts, B, threads=(columns, groups)) as (block, b):
            for stride in q_strides[:3] + k_strides[:3] + q_out_strides[:3] + k_out_strides[:3]:
                T.assume(stride % wide == 0)
            for stride in cos_strides[:2]:
                T.assume(stride % table_wide == 0)
            turn_token(q, k, turns, turns, q_out, k_out, block, b)

    @T.prim_func
    def rope_tail(
        x: T.StridedTensor((B, q_heads, S, D), q_strides, dtype),
        cos: T.StridedTensor((table_B, S, table_width), cos_strides, dtype),
        sin: T.StridedTensor((table_B, S, table_width), sin_strides, dtype),
        out: T.StridedTensor((B, q_heads, S, D), q_out_strides, dtype),
    ):
        with T.Kernel(S * parts, B, threads=(columns, groups)) as (block, b):
            for stride in q_strides[:3] + q_out_strides[:3]:
                T.assume(stride % wide == 0)
            for stride in cos_strides[:2] + sin_strides[:2]:
                T.assume(stride % table_wide == 0)
            turn_token(x, x, cos, sin, out, out, block, b)

    return {"complex": rope_complex, "tail": rope_tail}.get(form, rope)


def _launch(form, heads, tables, outs, pairs, rounds):
    """Heads and outputs [B, H, S, D], tables [1 or B, S, ...]; last strides 1, the others free; T is bf16, fp16 or fp32.

    A CTA owns heads of a token (b, s): a thread keeps its part of cos and sin in registers for `rounds` heads of q.
    rounds=None: 4 from 512 tokens on, else 1 (decode).
    """
    B, q_heads, S, D = heads[0].shape
    if B == 0 or S == 0:
        return
    dtype = heads[0].dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides what rotates, what is copied, all strides and all addresses. Pairs
    # need half as many entries of a table.
    halves = form == "halves"
    bits = 16 // itemsize | (pairs if halves else D | 2 * pairs)
    addresses = 0
    for tensor in (*heads, *outs):
        b, h, s, _ = tensor.stride()
        bits |= b | h | s
        addresses |= tensor.data_ptr()
    bits |= addresses // itemsize
    for tensor in tables:
        b, s, _ = tensor.stride()
        entries = b | s | tensor.data_ptr() // tensor.element_size()
        bits |= entries if halves else 2 * entries
    if rounds is None:
        rounds = 4 if B * S >= 512 else 1
    k_heads = heads[1].shape[1] if len(heads) > 1 else 0
    kernel_for(form, q_heads, k_heads, D, pairs, dtype, bits & -bits, rounds)(*heads, *tables, *outs)


@functools.cache
def kernel_for(form, q_heads, k_heads, D, pairs, dtype, wide, rounds):
    """The kernel of up to 256 threads, or of one head at a time, whose threads have `rounds` heads of q."""
    columns = (pairs if form == "halves" else D) // wide
    if wide == 1 and form != "halves":  # two elements a thread, also of what is copied
        columns = pairs - (2 * pairs - D) // 2
    groups = max(1, min(-(-max(q_heads, k_heads) // rounds), 256 // columns))
    rounds = max(1, min(rounds, -(-q_heads // groups)))
    return turn_kernel(form, q_heads, k_heads, D, pairs, dtype, wide, columns, groups, rounds)


def run_rope_half_tables(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """y = cat(T(T(x1 * cos) - T(x2 * sin)), T(T(x2 * cos) + T(x1 * sin))) for x in q and k, x1 and x2 the halves of a head.

    cos and sin [1 or B, S, D/2] in T.
    """
    _launch("halves", (q, k), (cos, sin), (q_out, k_out), q.shape[3] // 2, rounds)


def run_rope_pairs(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """y[2i] = T(T(x[2i] * c) - T(x[2i+1] * s)), y[2i+1] = T(T(x[2i+1] * c) + T(x[2i] * s)) for a head x of q or k.

    c and s are entry i of the first half of cos and sin [1 or B, S, R] in T; elements from R on are copied.
    """
    _launch("pairs", (q, k), (cos, sin), (q_out, k_out), cos.shape[2] // 2, rounds)


def run_rope_pairs_to_halves(q, k, cos, sin, q_out, k_out, *, rounds=None):
    """y[i] = T(T(x[2i] * c) - T(x[2i+1] * s)), y[i+D/2] = T(T(x[2i+1] * c) + T(x[2i] * s)) for a head x of q or k.

    c and s are entry i of the first half of cos and sin [1 or B, S, D] in T.
    """
    _launch("to halves", (q, k), (cos, sin), (q_out, k_out), q.shape[3] // 2, rounds)


def run_rope_complex_pairs(q, k, turns, q_out, k_out, *, rounds=None):
    """y[2i] = T(x[2i] * c - x[2i+1] * s), y[2i+1] = T(x[2i+1] * c + x[2i] * s) for a head x of q or k, in float32.

    c and s are entries 2i and 2i+1 of turns [1 or B, S, D] in float32.
    """
    _launch("complex", (q, k), (turns,), (q_out, k_out), q.shape[3] // 2, rounds)


def run_rope_tail_pairs(x, cos, sin, out, *, rounds=None):
    """The last 2P elements of each head as in run_rope_complex_pairs, c and s being entry i of cos and sin [1 or B, S, P] in T.

    What comes before them is copied.
    """
    _launch("tail", (x,), (cos, sin), (out,), cos.shape[2], rounds)

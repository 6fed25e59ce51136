"""Attention within sequences that lie one behind the other, TileLang: a CTA finds its sequence by a search among the ends.

Block `begin // rows + i` is the first one of sequence i: sequences before it have no more blocks than that. One warp fetches
tiles by TMA, the others multiply. What TMA cannot address (rows that are not aligned to 16 bytes) is loaded element by element,
without overlap.
"""

import functools

import tilelang
import tilelang.language as T
from _lib.tilelang.split_keys import (
    LEAST_SCORE,
    for_tma,
    one_warp_fetches,
    sign_and_size,
    weigh_differences,
)

LOG2_E = 1.4426950408889634
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0
HALVINGS = 13  # of a search among up to 2**13 - 1 sequences
ROOM = 208 * 1024  # bytes of shared memory for tiles of queries, keys and values


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def packed_kernel(D, dtype, causal, rows, keys, columns, stages):
    """Compile attention of blocks of `rows` queries of a head to the keys of their sequence; zeros behind the last sequence.

    `columns` is D filled up for the tensor cores; TMA gives zeros past D and past M. The scale must be above 0.
    """
    M, Hq, Hkv, ends = T.dynamic("M Hq Hkv ends")
    q_m, q_h, k_m, k_h, v_m, v_h, out_m, out_h = T.dynamic("q_m q_h k_m k_h v_m v_h out_m out_h", "int64")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def packed_attention(
        q: T.StridedTensor((M, Hq, D), (q_m, q_h, 1), dtype),
        k: T.StridedTensor((M, Hkv, D), (k_m, k_h, 1), dtype),
        v: T.StridedTensor((M, Hkv, D), (v_m, v_h, 1), dtype),
        offsets: T.Tensor((ends,), "int32"),
        out: T.StridedTensor((M, Hq, D), (out_m, out_h, 1), dtype),
        scale: T.float32,
    ):
        with T.Kernel(T.truncdiv(M, rows) + ends + 1, Hq, threads=2 * rows) as (turn, head):
            T.assume(q_m % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(q_h % 8 == 0)
            T.assume(k_m % 8 == 0)
            T.assume(k_h % 8 == 0)
            T.assume(v_m % 8 == 0)
            T.assume(v_h % 8 == 0)
            q_tile = T.alloc_shared((rows, columns), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, columns), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            weights = T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            key_head = T.alloc_var("int32")
            sequence = T.alloc_var("int32")
            above = T.alloc_var("int32")
            middle = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            length = T.alloc_var("int32")
            first = T.alloc_var("int32")
            steps = T.alloc_var("int32")

            T.annotate_ws_schedule(
                one_warp_fetches(
                    rows // 16,
                    {"q": ([q_tile], 1), "k": ([k_tile], stages), "v": ([v_tile], stages)},
                    {
                        "steps": ["acquire k", "fetch_k", "commit k", "acquire v", "fetch_v", "commit v"],
                        T.WSScope.ROOT: ["place", "acquire q", "fetch_q", "commit q", "steps"],
                    },
                    {
                        "steps": [
                            *("wait k", "multiply_k", "release k", "weigh"),
                            *("wait v", "clean", "multiply_v", "release v"),
                        ],
                        T.WSScope.ROOT: ["place", "start", "wait q", "steps", "release q", "store"],
                    },
                )
            )
            with T.ws_op("place"):
                key_head = T.truncdiv(head, T.truncdiv(Hq, Hkv))
                # The last sequence that begins no later than this block; one more than the last is what lies behind it.
                sequence = 0
                above = ends - 1
                for _ in T.serial(HALVINGS):
                    middle = T.truncdiv(sequence + above + 1, 2)
                    if T.truncdiv(offsets[middle], rows) + middle <= turn:
                        sequence = middle
                    else:
                        above = middle - 1
                begin = offsets[sequence]
                length = T.if_then_else(sequence < ends - 1, offsets[T.min(sequence + 1, ends - 1)], M) - begin
                # Among the queries of a sequence the last ones see the most keys, and start first.
                first = (T.truncdiv(length + rows - 1, rows) - 1 - (turn - T.truncdiv(begin, rows) - sequence)) * rows
                steps = T.truncdiv((T.min(first + rows, length) if causal else length) + keys - 1, keys)
                if first < 0 or sequence == ends - 1:
                    steps = 0
            T.copy(
                q[begin + T.max(first, 0) : begin + T.max(first, 0) + rows, head, 0:columns],
                q_tile,
                annotations={T.WSID: "fetch_q"},
            )
            with T.ws_op("start"):
                T.clear(acc)
                T.fill(largest, LEAST_SCORE)
                T.clear(sums)
            for step in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                T.copy(
                    k[begin + step * keys : begin + step * keys + keys, key_head, 0:columns],
                    k_tile,
                    annotations={T.WSID: "fetch_k"},
                )
                T.copy(
                    v[begin + step * keys : begin + step * keys + keys, key_head, 0:columns],
                    v_tile,
                    annotations={T.WSID: "fetch_v"},
                )
                T.gemm(
                    q_tile,
                    k_tile,
                    scores,
                    transpose_B=True,
                    policy=full_row,
                    clear_accum=True,
                    annotations={T.WSID: "multiply_k"},
                )
                with T.ws_op("weigh"):
                    if (step + 1) * keys > (first + 1 if causal else length):
                        for i, j in T.Parallel(rows, keys):
                            scores[i, j] = T.if_then_else(
                                step * keys + j < length and (not causal or step * keys + j <= first + i),
                                scores[i, j],
                                -T.infinity("float32"),
                            )
                    weigh_differences(scores, largest, shrink, sums, added, scale, rows, keys)
                    T.copy(scores, weights)
                    for i, j in T.Parallel(rows, columns):
                        acc[i, j] = acc[i, j] * shrink[i]
                with T.ws_op("clean"):
                    # Behind the sequence there is anything, and NaN times a weight of 0 is NaN.
                    if (step + 1) * keys > length:
                        for i, j in T.Parallel(keys, columns):
                            if step * keys + i >= length:
                                v_tile[i, j] = 0
                        T.fence_proxy_async()
                T.gemm(weights, v_tile, acc, policy=full_row, annotations={T.WSID: "multiply_v"})
            with T.ws_op("store"):
                for i in T.Parallel(rows):
                    if sums[i] == 0.0:
                        sums[i] = 1.0  # zeros behind the last sequence
                for i, j in T.Parallel(rows, columns):
                    if first >= 0 and first + i < length and j < D:
                        out[begin + first + i, head, j] = T.cast(acc[i, j] / sums[i], dtype)

    return packed_attention


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def plain_kernel(D, dtype, causal):
    """Compile the kernel for any rows, and for scales of any sign: a warp a query of a head, a key a turn."""
    M, Hq, Hkv, ends = T.dynamic("M Hq Hkv ends")
    q_m, q_h, k_m, k_h, v_m, v_h, out_m, out_h = T.dynamic("q_m q_h k_m k_h v_m v_h out_m out_h", "int64")
    parts = -(-D // 32)

    @T.prim_func
    def packed_plain(
        q: T.StridedTensor((M, Hq, D), (q_m, q_h, 1), dtype),
        k: T.StridedTensor((M, Hkv, D), (k_m, k_h, 1), dtype),
        v: T.StridedTensor((M, Hkv, D), (v_m, v_h, 1), dtype),
        offsets: T.Tensor((ends,), "int32"),
        out: T.StridedTensor((M, Hq, D), (out_m, out_h, 1), dtype),
        sign: T.float32,
        scale: T.float32,
    ):
        with T.Kernel(M, Hq, threads=32) as (token, head):
            key_head = T.truncdiv(head, T.truncdiv(Hq, Hkv))
            lane = T.get_thread_binding(0)
            wanted = T.alloc_local((parts,), "float32")
            acc = T.alloc_local((parts,), "float32")
            largest = T.alloc_var("float32", init=LEAST_SCORE)
            grown = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            score = T.alloc_var("float32", init=0.0)
            shrink = T.alloc_var("float32", init=0.0)
            weight = T.alloc_var("float32", init=0.0)
            sequence = T.alloc_var("int32", init=0)
            above = T.alloc_var("int32", init=0)
            middle = T.alloc_var("int32", init=0)
            begin = T.alloc_var("int32", init=0)
            count = T.alloc_var("int32", init=0)

            above = ends - 1
            for _ in T.serial(HALVINGS):
                middle = T.truncdiv(sequence + above + 1, 2)
                if offsets[middle] <= token:
                    sequence = middle
                else:
                    above = middle - 1
            begin = offsets[sequence]
            if sequence < ends - 1:
                count = (token + 1 if causal else offsets[T.min(sequence + 1, ends - 1)]) - begin
            for p in T.unroll(parts):
                acc[p] = 0.0
                wanted[p] = 0.0
                if p * 32 + lane < D:
                    wanted[p] = T.cast(q[token, head, p * 32 + lane], "float32")
            for key in T.serial(count):
                score = 0.0
                for p in T.unroll(parts):
                    if p * 32 + lane < D:
                        score += wanted[p] * T.cast(k[begin + key, key_head, p * 32 + lane], "float32")
                for step in T.unroll(5):
                    score += T.shfl_xor(score, 1 << step)
                score *= sign
                grown = T.max(largest, score)
                shrink = T.exp2((largest - grown) * scale)
                weight = T.exp2((score - grown) * scale)
                total = total * shrink + weight
                weight = T.cast(T.cast(weight, dtype), "float32")
                for p in T.unroll(parts):
                    acc[p] *= shrink
                    if p * 32 + lane < D:
                        acc[p] += weight * T.cast(v[begin + key, key_head, p * 32 + lane], "float32")
                largest = grown
            for p in T.unroll(parts):
                if p * 32 + lane < D:
                    out[token, head, p * 32 + lane] = T.cast(acc[p] / T.if_then_else(total > 0.0, total, 1.0), dtype)

    return packed_plain


def columns_of(D):
    """Columns of a tile: D filled up to what swizzled tiles and the warps of a product take."""
    return 64 if D <= 64 else 128 if D <= 128 else 256


def run(q, k, v, cu_seqlens, scale, causal, out, *, rows=None, keys=64):
    """out = T(softmax(scale * q k^T) v) within each sequence, zeros behind the last one.

    q and out: [M, Hq, D], k and v: [M, Hkv, D], last stride 1 (any others), cu_seqlens: [N + 1] int32, from 0 up to M; T is
    bfloat16 or float16. Scores, softmax and sums in float32, weights rounded to T for the second product. A CTA owns `rows`
    queries of a head in one sequence (64 or 128; None: 128, or 64 if sequences are short on average), and streams the keys that
    they see, `keys` a step. Nothing is read on the host. Rows that are not aligned to 16 bytes, and scales of 0 or less, take a
    plain kernel, which is slow.
    """
    M, _, D = q.shape
    if q.numel() == 0:
        return
    scale, causal, columns = float(scale) * LOG2_E, bool(causal), columns_of(D)
    if not (scale > 0 and for_tma(q, k, v)):
        plain_kernel(D, q.dtype, causal)(q, k, v, cu_seqlens, out, *sign_and_size(scale))
        return
    rows = rows or (128 if 64 * (cu_seqlens.shape[0] - 1) < M else 64)
    keys = keys if columns < 256 else 64
    stages = max(2, min(4, (ROOM // 2 - rows * columns) // (2 * keys * columns)))
    packed_kernel(D, q.dtype, causal, rows, keys, columns, stages)(q, k, v, cu_seqlens, out, scale)

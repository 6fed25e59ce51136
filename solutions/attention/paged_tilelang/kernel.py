"""Attention over pages of a common cache, TileLang: positions are split among CTAs, and a second kernel joins the parts.

One warp looks pages up and fetches them by TMA, the others multiply. What TMA cannot address (rows that are not aligned to 16
bytes) is loaded element by element, without overlap.
"""

import functools
import itertools

import tilelang
import tilelang.language as T
import torch
from _lib.tilelang.split_keys import (
    LEAST_SCORE,
    for_tma,
    join_kernel,
    multiprocessor_count,
    one_warp_fetches,
    power_of_two,
    sign_and_size,
    weigh,
)

LOG2_E = 1.4426950408889634
MOST_SPLITS = 64
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def decode_kernel(D, P, dtype, rows, keys, columns, stages, whole):
    """Compile attention of the query heads that share a key head to a span of positions: out, or parts without `whole`.

    The heads are the rows of the products, filled up to `rows` with zeros: each key is read once for all of them. Four warps
    share the keys of a step, or the rows where there are 64. A step has several small pages, or a part of a large one. A part
    is sums of values not yet divided, the largest score and the sum of weights. The scale must be above 0.
    """
    B, Hq, Hkv, N, M, splits = T.dynamic("B Hq Hkv N M splits")
    q_b, q_h, out_b, out_h, table_b = T.dynamic("q_b q_h out_b out_h table_b", "int64")
    k_n, k_p, k_h, v_n, v_p, v_h = T.dynamic("k_n k_p k_h v_n v_p v_h", "int64")
    policy = T.GemmWarpPolicy.FullRow if rows == 64 else T.GemmWarpPolicy.FullCol
    piece = min(P, keys)
    # Rows of a part of a tile lie together in 64 columns: that is how tiles are swizzled.
    part = columns if piece == keys else 64
    pieces = list(itertools.product(range(keys // piece), range(0, columns, part)))
    one_out = T.StridedTensor((B, Hq, D), (out_b, out_h, 1), dtype)
    partial_out = T.Tensor((B, Hq, splits, D + 2), "float32")

    @T.prim_func
    def paged_decode(
        q: T.StridedTensor((B, Hq, D), (q_b, q_h, 1), dtype),
        k: T.StridedTensor((N, P, Hkv, D), (k_n, k_p, k_h, 1), dtype),
        v: T.StridedTensor((N, P, Hkv, D), (v_n, v_p, v_h, 1), dtype),
        table: T.StridedTensor((B, M), (table_b, 1), "int32"),
        lengths: T.Tensor((B,), "int32"),
        out: one_out if whole else partial_out,
        spans: T.int32,
        scale: T.float32,
        power: T.float32,
    ):
        with T.Kernel(B * Hkv, spans, threads=128) as (row, split):
            T.assume(k_n % 8 == 0)  # TMA wants rows aligned to 16 bytes; run_decode() checked it
            T.assume(k_p % 8 == 0)
            T.assume(k_h % 8 == 0)
            T.assume(v_n % 8 == 0)
            T.assume(v_p % 8 == 0)
            T.assume(v_h % 8 == 0)
            q_tile = T.alloc_shared((rows, columns), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, columns), dtype)
            weights = T.alloc_shared((rows, keys), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            acc = T.alloc_fragment((rows, columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            steep = T.alloc_fragment((rows,), "float32")
            offset = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            batch = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            group = T.alloc_var("int32")
            length = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            steps = T.alloc_var("int32")

            T.annotate_ws_schedule(
                one_warp_fetches(
                    4,
                    {"k": ([k_tile], stages), "v": ([v_tile], stages)},
                    {
                        "steps": [
                            *("acquire k", *(f"fetch_k{p}_{c}" for p, c in pieces), "commit k"),
                            *("acquire v", *(f"fetch_v{p}_{c}" for p, c in pieces), "commit v"),
                        ],
                        T.WSScope.ROOT: ["place", "steps"],
                    },
                    {
                        "steps": [
                            *("wait k", "multiply_k", "release k", "weigh"),
                            *("wait v", "clean", "multiply_v", "release v"),
                        ],
                        T.WSScope.ROOT: ["place", "start", "steps", "store"],
                    },
                )
            )
            with T.ws_op("place"):
                batch = T.truncdiv(row, Hkv)
                key_head = T.truncmod(row, Hkv)
                group = T.truncdiv(Hq, Hkv)
                length = lengths[batch]
                # Each sequence is split by its own length.
                steps = T.truncdiv(T.truncdiv(length + keys - 1, keys) + spans - 1, spans)
                begin = split * steps * keys
                steps = T.max(T.min(steps, T.truncdiv(length - begin + keys - 1, keys)), 0)
            with T.ws_op("start"):
                for i, j in T.Parallel(rows, columns):
                    q_tile[i, j] = T.if_then_else(i < group and j < D, q[batch, key_head * group + i, j], 0)
                T.clear(acc)
                T.fill(offset, LEAST_SCORE)
                T.clear(sums)
            for step in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                # Entries of the table behind the last page are no pages: its last page takes their place.
                for p, c in pieces:  # unrolled: each is a copy of the schedule
                    T.copy(
                        k[
                            table[batch, T.truncdiv(T.min(begin + step * keys + p * piece, length - 1), P)],
                            T.truncmod(begin + step * keys, P) : T.truncmod(begin + step * keys, P) + piece,
                            key_head,
                            c : c + part,
                        ],
                        k_tile[p * piece : (p + 1) * piece, c : c + part],
                        annotations={T.WSID: f"fetch_k{p}_{c}"},
                    )
                for p, c in pieces:  # unrolled: each is a copy of the schedule
                    T.copy(
                        v[
                            table[batch, T.truncdiv(T.min(begin + step * keys + p * piece, length - 1), P)],
                            T.truncmod(begin + step * keys, P) : T.truncmod(begin + step * keys, P) + piece,
                            key_head,
                            c : c + part,
                        ],
                        v_tile[p * piece : (p + 1) * piece, c : c + part],
                        annotations={T.WSID: f"fetch_v{p}_{c}"},
                    )
                T.gemm(
                    q_tile,
                    k_tile,
                    scores,
                    transpose_B=True,
                    policy=policy,
                    clear_accum=True,
                    annotations={T.WSID: "multiply_k"},
                )
                with T.ws_op("weigh"):
                    if begin + (step + 1) * keys > length:
                        for i, j in T.Parallel(rows, keys):
                            scores[i, j] = T.if_then_else(
                                begin + step * keys + j < length, scores[i, j], -T.infinity("float32")
                            )
                    weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys)
                    T.copy(scores, weights)
                    for i, j in T.Parallel(rows, columns):
                        acc[i, j] = acc[i, j] * shrink[i]
                with T.ws_op("clean"):
                    # Behind the last position a page has anything, and NaN times a weight of 0 is NaN.
                    if begin + (step + 1) * keys > length:
                        for i, j in T.Parallel(keys, columns):
                            if begin + step * keys + i >= length:
                                v_tile[i, j] = 0
                        T.fence_proxy_async()
                T.gemm(weights, v_tile, acc, policy=policy, annotations={T.WSID: "multiply_v"})
            with T.ws_op("store"):
                if whole:
                    for i in T.Parallel(rows):
                        if sums[i] == 0.0:
                            sums[i] = 1.0  # zeros for a sequence without positions
                    for i, j in T.Parallel(rows, columns):
                        if i < group and j < D:
                            out[batch, key_head * group + i, j] = T.cast(acc[i, j] / sums[i], dtype)
                else:
                    for i, j in T.Parallel(rows, columns):
                        if i < group and j < D:
                            out[batch, key_head * group + i, split, j] = acc[i, j]
                    for i in T.Parallel(rows):
                        if i < group:
                            out[batch, key_head * group + i, split, D] = offset[i]
                            out[batch, key_head * group + i, split, D + 1] = sums[i]

    return paged_decode


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def paged_plain_kernel(D, dtype):
    """Compile the kernel for keys that TMA cannot address, and for scales of any sign: a warp a query head, a key a turn."""
    B, Hq, Hkv, N, P, M = T.dynamic("B Hq Hkv N P M")
    q_b, q_h, out_b, out_h, table_b = T.dynamic("q_b q_h out_b out_h table_b", "int64")
    k_n, k_p, k_h, v_n, v_p, v_h = T.dynamic("k_n k_p k_h v_n v_p v_h", "int64")
    parts = -(-D // 32)

    @T.prim_func
    def paged_plain(
        q: T.StridedTensor((B, Hq, D), (q_b, q_h, 1), dtype),
        k: T.StridedTensor((N, P, Hkv, D), (k_n, k_p, k_h, 1), dtype),
        v: T.StridedTensor((N, P, Hkv, D), (v_n, v_p, v_h, 1), dtype),
        table: T.StridedTensor((B, M), (table_b, 1), "int32"),
        lengths: T.Tensor((B,), "int32"),
        out: T.StridedTensor((B, Hq, D), (out_b, out_h, 1), dtype),
        sign: T.float32,
        scale: T.float32,
    ):
        with T.Kernel(B * Hq, threads=32) as row:
            batch, head = T.truncdiv(row, Hq), T.truncmod(row, Hq)
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
            page = T.alloc_var("int32", init=0)
            place = T.alloc_var("int32", init=0)

            for p in T.unroll(parts):
                acc[p] = 0.0
                wanted[p] = 0.0
                if p * 32 + lane < D:
                    wanted[p] = T.cast(q[batch, head, p * 32 + lane], "float32")
            for key in T.serial(lengths[batch]):
                page = table[batch, T.truncdiv(key, P)]
                place = T.truncmod(key, P)
                score = 0.0
                for p in T.unroll(parts):
                    if p * 32 + lane < D:
                        score += wanted[p] * T.cast(k[page, place, key_head, p * 32 + lane], "float32")
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
                        acc[p] += weight * T.cast(v[page, place, key_head, p * 32 + lane], "float32")
                largest = grown
            for p in T.unroll(parts):
                if p * 32 + lane < D:
                    out[batch, head, p * 32 + lane] = T.cast(acc[p] / T.if_then_else(total > 0.0, total, 1.0), dtype)

    return paged_plain


def run_decode(q, k_cache, v_cache, table, lengths, scale, out, *, least=256, stages=3):
    """out = T(softmax(scale * q k^T) v) over the pages of each sequence, zeros for a sequence without positions.

    q and out: [B, Hq, D], caches: [N, P, Hkv, D], table: [B, M], last stride 1 (any others), lengths: [B]; T is bfloat16 or
    float16. Scores, softmax and sums in float32, weights rounded to T for the second product. A CTA owns a key head, all query
    heads that share it, and a span of positions of a sequence, two CTAs a multiprocessor with `stages` tiles of keys and of
    values each. The number of spans depends on shapes alone, `least` or more positions of the longest possible sequence each: no
    length is read on the host. Spans are joined by a second kernel. Rows of caches that are not aligned to 16 bytes, and scales
    of 0 or less, take a plain kernel, which is slow.
    """
    B, Hq, D = q.shape
    P, Hkv = k_cache.shape[1], k_cache.shape[2]
    if q.numel() == 0:
        return
    scale = float(scale) * LOG2_E
    if not (scale > 0 and for_tma(k_cache, v_cache)):
        paged_plain_kernel(D, q.dtype)(q, k_cache, v_cache, table, lengths, out, *sign_and_size(scale))
        return
    group = Hq // Hkv
    rows = 16 if group <= 16 else 32 if group <= 32 else 64
    columns = 64 if D <= 64 else 128 if D <= 128 else 256
    most = min(-(-table.shape[1] * P // least), 2 * multiprocessor_count(q.device.index) // (B * Hkv), MOST_SPLITS)
    spans = max(1, most)
    kernel = decode_kernel(D, P, q.dtype, rows, 8192 // columns, columns, stages, spans == 1)
    args = q, k_cache, v_cache, table, lengths
    if spans == 1:
        kernel(*args, out, spans, scale, power_of_two(scale))
        return
    parts = torch.empty((B, Hq, spans, D + 2), dtype=torch.float32, device=q.device)
    kernel(*args, parts, spans, scale, power_of_two(scale))
    join_kernel(D, q.dtype)(parts.view(B * Hq, spans, D + 2), out)

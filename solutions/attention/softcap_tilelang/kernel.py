"""Attention with a soft cap of its scores and a mask of numbers, TileLang: a block of queries streams all keys.

The mask is added to the capped scores in float32. The least number of its dtype is so large that a score vanishes beside it, so a
row that sees no key has equal weights, as in PyTorch. For that reason no tile of keys is left out. In base 2 that number would be
infinite, so that differences of scores are taken before. One warp fetches tiles by TMA, the others multiply. What TMA cannot
address (rows that are not aligned to 16 bytes) is loaded element by element, without overlap.
"""

import functools

import tilelang
import tilelang.language as T
from _lib.tilelang.split_keys import (
    LEAST_SCORE,
    for_tma,
    multiprocessor_count,
    one_warp_fetches,
    weigh_differences,
)

LOG2_E = 1.4426950408889634
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0
MOST_POWER = 100.0  # of 2, beyond which a tangent is 1
ROOM = 208 * 1024  # bytes of shared memory for tiles of queries, keys and values


def capped(score, softcap, steep):
    """Return softcap * tanh(scale * score / softcap), with tanh(x) = 1 - 2 / (1 + e^(2 x)); `steep` makes 2 x in base 2."""
    return softcap - 2.0 * softcap / (1.0 + T.exp2(T.min(score * steep, MOST_POWER)))


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def attention_kernel(D, dtype, rows, keys, columns, stages):
    """Compile attention of tiles of `rows` positions of a query head to all keys.

    `columns` is D filled up for the tensor cores; TMA gives zeros past D, past S and past L.
    """
    B, Hq, Hkv, S, L, planes = T.dynamic("B Hq Hkv S L planes")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    m_b, m_q, m_k = T.dynamic("m_b m_q m_k", "int64")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def capped_attention(
        q: T.StridedTensor((B, Hq, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, Hkv, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, L, D), (v_b, v_h, v_s, 1), dtype),
        mask: T.StridedTensor((planes, S, L), (m_b, m_q, m_k), dtype),
        out: T.StridedTensor((B, Hq, S, D), (out_b, out_h, out_s, 1), dtype),
        softcap: T.float32,
        steep: T.float32,
    ):
        with T.Kernel(B * Hq, T.ceildiv(S, rows), threads=2 * rows) as (pair, block):
            T.assume(q_b % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(q_h % 8 == 0)
            T.assume(q_s % 8 == 0)
            T.assume(k_b % 8 == 0)
            T.assume(k_h % 8 == 0)
            T.assume(k_s % 8 == 0)
            T.assume(v_b % 8 == 0)
            T.assume(v_h % 8 == 0)
            T.assume(v_s % 8 == 0)
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
            batch = T.alloc_var("int32")
            plane = T.alloc_var("int32")
            head = T.alloc_var("int32")
            key_head = T.alloc_var("int32")

            T.annotate_ws_schedule(
                one_warp_fetches(
                    rows // 16,
                    {"q": ([q_tile], 1), "k": ([k_tile], stages), "v": ([v_tile], stages)},
                    {
                        "steps": ["acquire k", "fetch_k", "commit k", "acquire v", "fetch_v", "commit v"],
                        T.WSScope.ROOT: ["place", "acquire q", "fetch_q", "commit q", "steps"],
                    },
                    {
                        "steps": ["wait k", "multiply_k", "release k", "weigh", "wait v", "multiply_v", "release v"],
                        T.WSScope.ROOT: ["place", "start", "wait q", "steps", "release q", "store"],
                    },
                )
            )
            with T.ws_op("place"):
                batch = T.truncdiv(pair, Hq)
                plane = T.min(batch, planes - 1)  # one mask for all sequences, or one for each
                head = T.truncmod(pair, Hq)
                key_head = T.truncdiv(head, T.truncdiv(Hq, Hkv))
            T.copy(q[batch, head, block * rows, 0], q_tile, annotations={T.WSID: "fetch_q"})
            with T.ws_op("start"):
                T.clear(acc)
                T.fill(largest, LEAST_SCORE)
                T.clear(sums)
            for step in T.Pipelined(T.ceildiv(L, keys), num_stages=stages, annotations={T.WSID: "steps"}):
                T.copy(k[batch, key_head, step * keys, 0], k_tile, annotations={T.WSID: "fetch_k"})
                T.copy(v[batch, key_head, step * keys, 0], v_tile, annotations={T.WSID: "fetch_v"})
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
                    for i, j in T.Parallel(rows, keys):
                        number = T.cast(
                            mask[plane, T.min(block * rows + i, S - 1), T.min(step * keys + j, L - 1)], "float32"
                        )
                        scores[i, j] = T.if_then_else(
                            step * keys + j < L, capped(scores[i, j], softcap, steep) + number, -T.infinity("float32")
                        )
                    weigh_differences(scores, largest, shrink, sums, added, LOG2_E, rows, keys)
                    T.copy(scores, weights)
                    for i, j in T.Parallel(rows, columns):
                        acc[i, j] = acc[i, j] * shrink[i]
                T.gemm(weights, v_tile, acc, policy=full_row, annotations={T.WSID: "multiply_v"})
            with T.ws_op("store"):
                for i, j in T.Parallel(rows, columns):
                    if block * rows + i < S and j < D:
                        out[batch, head, block * rows + i, j] = T.cast(acc[i, j] / sums[i], dtype)

    return capped_attention


# --- What TMA cannot address


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def plain_kernel(D, dtype):
    """Compile the kernel for any rows: a warp a position of a query head, a key a turn."""
    B, Hq, Hkv, S, L, planes = T.dynamic("B Hq Hkv S L planes")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    m_b, m_q, m_k = T.dynamic("m_b m_q m_k", "int64")
    parts = -(-D // 32)

    @T.prim_func
    def capped_plain(
        q: T.StridedTensor((B, Hq, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, Hkv, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, L, D), (v_b, v_h, v_s, 1), dtype),
        mask: T.StridedTensor((planes, S, L), (m_b, m_q, m_k), dtype),
        out: T.StridedTensor((B, Hq, S, D), (out_b, out_h, out_s, 1), dtype),
        softcap: T.float32,
        steep: T.float32,
    ):
        with T.Kernel(B * Hq * S, threads=32) as turn:
            position, row = T.truncmod(turn, S), T.truncdiv(turn, S)
            batch, head = T.truncdiv(row, Hq), T.truncmod(row, Hq)
            plane = T.min(batch, planes - 1)
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

            for p in T.unroll(parts):
                acc[p] = 0.0
                wanted[p] = 0.0
                if p * 32 + lane < D:
                    wanted[p] = T.cast(q[batch, head, position, p * 32 + lane], "float32")
            for key in T.serial(L):
                score = 0.0
                for p in T.unroll(parts):
                    if p * 32 + lane < D:
                        score += wanted[p] * T.cast(k[batch, key_head, key, p * 32 + lane], "float32")
                for step in T.unroll(5):
                    score += T.shfl_xor(score, 1 << step)
                score = capped(score, softcap, steep) + T.cast(mask[plane, position, key], "float32")
                grown = T.max(largest, score)
                shrink = T.exp2((largest - grown) * LOG2_E)
                weight = T.exp2((score - grown) * LOG2_E)
                total = total * shrink + weight
                weight = T.cast(T.cast(weight, dtype), "float32")
                for p in T.unroll(parts):
                    acc[p] *= shrink
                    if p * 32 + lane < D:
                        acc[p] += weight * T.cast(v[batch, key_head, key, p * 32 + lane], "float32")
                largest = grown
            for p in T.unroll(parts):
                if p * 32 + lane < D:
                    out[batch, head, position, p * 32 + lane] = T.cast(acc[p] / total, dtype)

    return capped_plain


# --- Launches


def one_if_shared(mask):
    """Return a mask [B, 1, S, L] as [B, S, L], with one entry if all sequences share it."""
    return mask[:, 0] if mask.stride(0) else mask[:1, 0]


def columns_of(D):
    """Columns of a tile: D filled up to what swizzled tiles and the warps of a product take."""
    return 64 if D <= 64 else 128 if D <= 128 else 256


def run(q, k, v, mask, softcap, scale, out, *, rows=None, keys=64):
    """out = T(w v), w = softmax of softcap * tanh(scale * q k^T / softcap) + mask.

    q and out: [B, Hq, S, D], k and v: [B, Hkv, L, D], last stride 1 (any others), mask: [B, 1, S, L] T, any strides; T is
    bfloat16. Scores, softmax and sums in float32, weights rounded to T for the second product. A CTA owns `rows` positions of a
    head (64 or 128; None: 128, or 64 if CTAs are few) and streams all keys, `keys` a step. Rows that are not aligned to 16 bytes
    take a plain kernel, which is slow.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    steep, masks, columns = 2 * LOG2_E * float(scale) / float(softcap), one_if_shared(mask), columns_of(D)
    if not for_tma(q, k, v):
        plain_kernel(D, q.dtype)(q, k, v, masks, out, softcap, steep)
        return
    rows = rows or (128 if B * Hq * -(-S // 128) >= 2 * multiprocessor_count(q.device.index) else 64)
    keys = keys if columns < 256 else 64
    stages = max(2, min(4, (ROOM // 2 - rows * columns) // (2 * keys * columns)))
    attention_kernel(D, q.dtype, rows, keys, columns, stages)(q, k, v, masks, out, softcap, steep)

"""Attention with a mask of flags, TileLang: only tiles in which some key is seen are read, whatever made the mask.

A prompt is computed in blocks of queries. A single position has its keys dealt out among CTAs. One warp fetches tiles by TMA, the
others multiply. What TMA cannot address (rows that are not aligned to 16 bytes) is loaded element by element, without overlap.
"""

import functools

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
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0
MOST_SPLITS = 64
NEVER = 1 << 30  # a tile behind all others
ROOM = 208 * 1024  # bytes of shared memory for tiles of queries, keys and values


# --- One position


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def decode_kernel(D, dtype, rows, keys, columns, stages, whole):
    """Compile attention of the query heads that share a key head to each `spans`-th tile: out, or parts without `whole`.

    The heads are the rows of the products, filled up to `rows` with zeros: each key is read once for all of them. Four warps
    share the keys of a step, or the rows where there are 64. A part is sums of values not yet divided, the largest score and the
    sum of weights. The scale must be above 0.
    """
    B, Hq, Hkv, L, planes, splits = T.dynamic("B Hq Hkv L planes splits")
    q_b, q_h, out_b, out_h, m_b, m_k = T.dynamic("q_b q_h out_b out_h m_b m_k", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    policy = T.GemmWarpPolicy.FullRow if rows == 64 else T.GemmWarpPolicy.FullCol
    one_out = T.StridedTensor((B, Hq, D), (out_b, out_h, 1), dtype)
    partial_out = T.Tensor((B, Hq, splits, D + 2), "float32")

    @T.prim_func
    def masked_decode(
        q: T.StridedTensor((B, Hq, D), (q_b, q_h, 1), dtype),
        k: T.StridedTensor((B, Hkv, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, L, D), (v_b, v_h, v_s, 1), dtype),
        flags: T.StridedTensor((planes, L), (m_b, m_k), "uint8"),
        out: one_out if whole else partial_out,
        spans: T.int32,
        scale: T.float32,
        power: T.float32,
    ):
        with T.Kernel(B * Hkv, spans, threads=128) as (row, split):
            T.assume(k_b % 8 == 0)  # TMA wants rows aligned to 16 bytes; run_decode() checked it
            T.assume(k_h % 8 == 0)
            T.assume(k_s % 8 == 0)
            T.assume(v_b % 8 == 0)
            T.assume(v_h % 8 == 0)
            T.assume(v_s % 8 == 0)
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
            plane = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            group = T.alloc_var("int32")
            lane = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            steps = T.alloc_var("int32")

            T.annotate_ws_schedule(
                one_warp_fetches(
                    4,
                    {"k": ([k_tile], stages), "v": ([v_tile], stages)},
                    {
                        "steps": ["acquire k", "fetch_k", "commit k", "acquire v", "fetch_v", "commit v"],
                        T.WSScope.ROOT: ["place", "steps"],
                    },
                    {
                        "steps": ["wait k", "multiply_k", "release k", "weigh", "wait v", "multiply_v", "release v"],
                        T.WSScope.ROOT: ["place", "start", "steps", "store"],
                    },
                )
            )
            with T.ws_op("place"):
                batch = T.truncdiv(row, Hkv)
                plane = T.min(batch, planes - 1)  # one mask for all sequences, or one for each
                key_head = T.truncmod(row, Hkv)
                group = T.truncdiv(Hq, Hkv)
                # Of the own tiles (split, split + spans, ...), the first and the last with a key that is seen: each warp looks.
                lane = T.truncmod(T.get_thread_binding(0), 32)
                first = NEVER
                last = 0
                for tile in T.serial(T.truncdiv(T.truncdiv(L + keys - 1, keys) - split + spans - 1, spans)):
                    for p in T.unroll(keys // 32):
                        if (split + tile * spans) * keys + p * 32 + lane < L and flags[
                            plane, T.min((split + tile * spans) * keys + p * 32 + lane, L - 1)
                        ] > 0:
                            first = T.min(first, tile)
                            last = tile + 1
                first = T.warp_reduce_min(first)
                last = T.warp_reduce_max(last)
                steps = T.max(last - first, 0)
            with T.ws_op("start"):
                for i, j in T.Parallel(rows, columns):
                    q_tile[i, j] = T.if_then_else(i < group and j < D, q[batch, key_head * group + i, j], 0)
                T.clear(acc)
                T.fill(offset, LEAST_SCORE)
                T.clear(sums)
            for step in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                T.copy(
                    k[batch, key_head, (split + (first + step) * spans) * keys, 0],
                    k_tile,
                    annotations={T.WSID: "fetch_k"},
                )
                T.copy(
                    v[batch, key_head, (split + (first + step) * spans) * keys, 0],
                    v_tile,
                    annotations={T.WSID: "fetch_v"},
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
                    for i, j in T.Parallel(rows, keys):
                        scores[i, j] = T.if_then_else(
                            (split + (first + step) * spans) * keys + j < L
                            and flags[plane, T.min((split + (first + step) * spans) * keys + j, L - 1)] > 0,
                            scores[i, j],
                            -T.infinity("float32"),
                        )
                    weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys)
                    T.copy(scores, weights)
                    for i, j in T.Parallel(rows, columns):
                        acc[i, j] = acc[i, j] * shrink[i]
                T.gemm(weights, v_tile, acc, policy=policy, annotations={T.WSID: "multiply_v"})
            with T.ws_op("store"):
                if whole:
                    for i in T.Parallel(rows):
                        if sums[i] == 0.0:
                            sums[i] = 1.0  # zeros for a position that sees no key
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

    return masked_decode


# --- A prompt


@functools.cache
@tilelang.jit
def sort_kernel(rows, keys):
    """Compile kinds of tiles of the mask: 2 if each of its queries sees each of its keys, 1 if some flag is set, else 0."""
    S, L, planes, blocks, tiles = T.dynamic("S L planes blocks tiles")
    m_b, m_q, m_k = T.dynamic("m_b m_q m_k", "int64")
    threads = 128
    at_once = threads // keys

    @T.prim_func
    def sort_tiles(
        flags: T.StridedTensor((planes, S, L), (m_b, m_q, m_k), "uint8"),
        kinds: T.Tensor((planes, blocks, tiles), "int32"),
    ):
        with T.Kernel(planes * blocks * tiles, threads=threads) as turn:
            tile, row = T.truncmod(turn, tiles), T.truncdiv(turn, tiles)
            block, plane = T.truncmod(row, blocks), T.truncdiv(row, blocks)
            thread = T.get_thread_binding(0)
            key = tile * keys + thread % keys
            some = T.alloc_var("int32", init=0)
            every = T.alloc_var("int32", init=1)
            found = T.alloc_var("int32", init=0)
            of_warps = T.alloc_shared((2, threads // 32), "int32")
            for step in T.unroll(rows // at_once):
                # Rows behind the last query do not count; keys behind the last one are never seen.
                if block * rows + step * at_once + thread // keys < S:
                    found = 0
                    if key < L and flags[plane, block * rows + step * at_once + thread // keys, T.min(key, L - 1)] > 0:
                        found = 1
                    some = T.max(some, found)
                    every = T.min(every, found)
            some = T.warp_reduce_max(some)
            every = T.warp_reduce_min(every)
            if thread % 32 == 0:
                of_warps[0, thread // 32] = some
                of_warps[1, thread // 32] = every
            T.sync_threads()
            if thread == 0:
                for w in T.unroll(threads // 32):
                    some = T.max(some, of_warps[0, w])
                    every = T.min(every, of_warps[1, w])
                kinds[plane, block, tile] = some + every

    return sort_tiles


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def prefill_kernel(D, dtype, rows, keys, columns, stages):
    """Compile attention of tiles of `rows` positions of a query head to the tiles of keys that any of them sees.

    `columns` is D filled up for the tensor cores; TMA gives zeros past D, past S and past L. The scale must be above 0.
    """
    B, Hq, Hkv, S, L, planes, blocks, tiles = T.dynamic("B Hq Hkv S L planes blocks tiles")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    m_b, m_q, m_k = T.dynamic("m_b m_q m_k", "int64")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def masked_prefill(
        q: T.StridedTensor((B, Hq, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, Hkv, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, L, D), (v_b, v_h, v_s, 1), dtype),
        flags: T.StridedTensor((planes, S, L), (m_b, m_q, m_k), "uint8"),
        kinds: T.Tensor((planes, blocks, tiles), "int32"),
        out: T.StridedTensor((B, Hq, S, D), (out_b, out_h, out_s, 1), dtype),
        scale: T.float32,
        power: T.float32,
    ):
        with T.Kernel(B * Hq, blocks, threads=2 * rows) as (pair, turn):
            T.assume(q_b % 8 == 0)  # TMA wants rows aligned to 16 bytes; run_prefill() checked it
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
            steep = T.alloc_fragment((rows,), "float32")
            offset = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            batch = T.alloc_var("int32")
            plane = T.alloc_var("int32")
            head = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            block = T.alloc_var("int32")
            lane = T.alloc_var("int32")
            low = T.alloc_var("int32")
            high = T.alloc_var("int32")

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
                block = blocks - 1 - turn  # the last positions mostly see the most keys: theirs are the first CTAs
                # The first and the last tile with a key that is seen: each warp looks.
                lane = T.truncmod(T.get_thread_binding(0), 32)
                low = NEVER
                high = 0
                for t in T.serial(T.truncdiv(tiles + 31, 32)):
                    if t * 32 + lane < tiles and kinds[plane, block, T.min(t * 32 + lane, tiles - 1)] > 0:
                        low = T.min(low, t * 32 + lane)
                        high = t * 32 + lane + 1
                low = T.warp_reduce_min(low)
                high = T.warp_reduce_max(high)
            T.copy(q[batch, head, block * rows, 0], q_tile, annotations={T.WSID: "fetch_q"})
            with T.ws_op("start"):
                T.clear(acc)
                T.fill(offset, LEAST_SCORE)
                T.clear(sums)
            for step in T.Pipelined(T.max(high - low, 0), num_stages=stages, annotations={T.WSID: "steps"}):
                T.copy(k[batch, key_head, (low + step) * keys, 0], k_tile, annotations={T.WSID: "fetch_k"})
                T.copy(v[batch, key_head, (low + step) * keys, 0], v_tile, annotations={T.WSID: "fetch_v"})
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
                    if kinds[plane, block, low + step] < 2:
                        for i, j in T.Parallel(rows, keys):
                            scores[i, j] = T.if_then_else(
                                block * rows + i < S
                                and (low + step) * keys + j < L
                                and flags[plane, T.min(block * rows + i, S - 1), T.min((low + step) * keys + j, L - 1)]
                                > 0,
                                scores[i, j],
                                -T.infinity("float32"),
                            )
                    weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys)
                    T.copy(scores, weights)
                    for i, j in T.Parallel(rows, columns):
                        acc[i, j] = acc[i, j] * shrink[i]
                T.gemm(weights, v_tile, acc, policy=full_row, annotations={T.WSID: "multiply_v"})
            with T.ws_op("store"):
                for i in T.Parallel(rows):
                    if sums[i] == 0.0:
                        sums[i] = 1.0  # zeros for a position that sees no key
                for i, j in T.Parallel(rows, columns):
                    if block * rows + i < S and j < D:
                        out[batch, head, block * rows + i, j] = T.cast(acc[i, j] / sums[i], dtype)

    return masked_prefill


# --- What TMA cannot address


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def plain_kernel(D, dtype):
    """Compile the kernel for any rows, and for scales of any sign: a warp a position of a query head, a key a turn."""
    B, Hq, Hkv, S, L, planes = T.dynamic("B Hq Hkv S L planes")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    m_b, m_q, m_k = T.dynamic("m_b m_q m_k", "int64")
    parts = -(-D // 32)

    @T.prim_func
    def masked_plain(
        q: T.StridedTensor((B, Hq, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, Hkv, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, L, D), (v_b, v_h, v_s, 1), dtype),
        flags: T.StridedTensor((planes, S, L), (m_b, m_q, m_k), "uint8"),
        out: T.StridedTensor((B, Hq, S, D), (out_b, out_h, out_s, 1), dtype),
        sign: T.float32,
        scale: T.float32,
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
                if flags[plane, position, key] > 0:
                    score = 0.0
                    for p in T.unroll(parts):
                        if p * 32 + lane < D:
                            score += wanted[p] * T.cast(k[batch, key_head, key, p * 32 + lane], "float32")
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
                            acc[p] += weight * T.cast(v[batch, key_head, key, p * 32 + lane], "float32")
                    largest = grown
            for p in T.unroll(parts):
                if p * 32 + lane < D:
                    out[batch, head, position, p * 32 + lane] = T.cast(
                        acc[p] / T.if_then_else(total > 0.0, total, 1.0), dtype
                    )

    return masked_plain


# --- Launches


def one_if_shared(mask):
    """Return a mask [B, 1, S, L] as bytes [B, S, L], with one entry if all sequences share it."""
    flags = mask.view(torch.uint8)[:, 0]
    return flags if mask.stride(0) else flags[:1]


def columns_of(D):
    """Columns of a tile: D filled up to what swizzled tiles and the warps of a product take."""
    return 64 if D <= 64 else 128 if D <= 128 else 256


def run_prefill(q, k, v, mask, scale, out, *, rows=None, keys=64):
    """out = T(softmax(scale * q k^T over the keys with a flag) v), zeros in rows without such a key.

    q and out: [B, Hq, S, D], k and v: [B, Hkv, L, D], last stride 1 (any others), mask: [B, 1, S, L] bool, any strides; T is
    bfloat16 or float16. Scores, softmax and sums in float32, weights rounded to T for the second product. A first kernel reads
    the mask once and notes for each tile if all, some or none of its flags are set. Then a CTA owns `rows` positions of a head
    (64 or 128; None: 128, or 64 if CTAs are few) and streams the tiles of `keys` keys that one of them sees; it reads the mask
    again for those that are seen in part. Rows that are not aligned to 16 bytes, and scales of 0 or less, take a plain kernel,
    which is slow.
    """
    B, Hq, S, D = q.shape
    L = k.shape[2]
    if q.numel() == 0:
        return
    scale, flags, columns = float(scale) * LOG2_E, one_if_shared(mask), columns_of(D)
    if not (scale > 0 and for_tma(q, k, v)):
        plain_kernel(D, q.dtype)(q, k, v, flags, out, *sign_and_size(scale))
        return
    rows = rows or (128 if B * Hq * -(-S // 128) >= 2 * multiprocessor_count(q.device.index) else 64)
    keys = keys if columns < 256 else 64
    stages = max(2, min(4, (ROOM // 2 - rows * columns) // (2 * keys * columns)))
    blocks, tiles = -(-S // rows), -(-L // keys)
    kinds = torch.empty((flags.shape[0], blocks, tiles), dtype=torch.int32, device=q.device)
    sort_kernel(rows, keys)(flags, kinds)
    prefill_kernel(D, q.dtype, rows, keys, columns, stages)(q, k, v, flags, kinds, out, scale, power_of_two(scale))


def run_decode(q, k, v, mask, scale, out, *, ctas=2, stages=3):
    """out = T(softmax(scale * q k^T over the keys with a flag) v), zeros without such a key.

    q and out: [B, Hq, 1, D], k and v: [B, Hkv, L, D], last stride 1 (any others), mask: [B, 1, 1, L] bool, any strides; T is
    bfloat16 or float16. Scores, softmax and sums in float32, weights rounded to T for the second product. A CTA owns a key head,
    all query heads that share it, and each n-th tile of keys, so that the keys that are seen spread evenly over CTAs wherever
    they lie, `ctas` a multiprocessor; `stages` tiles of keys and of values are on their way. Parts are joined by a second
    kernel. Rows of k or v that are not aligned to 16 bytes, and scales of 0 or less, take a plain kernel, which is slow.
    """
    B, Hq, _, D = q.shape
    Hkv, L = k.shape[1], k.shape[2]
    if q.numel() == 0:
        return
    scale, flags = float(scale) * LOG2_E, one_if_shared(mask)
    if not (scale > 0 and for_tma(k, v)):
        plain_kernel(D, q.dtype)(q, k, v, flags, out, *sign_and_size(scale))
        return
    group = Hq // Hkv
    rows = 16 if group <= 16 else 32 if group <= 32 else 64
    columns = columns_of(D)
    keys = 8192 // columns
    wanted = ctas * multiprocessor_count(q.device.index) // (B * Hkv)
    spans = max(1, min(-(-L // keys), wanted, MOST_SPLITS))
    kernel = decode_kernel(D, q.dtype, rows, keys, columns, stages, spans == 1)
    args = q[:, :, 0], k, v, flags[:, 0]
    if spans == 1:
        kernel(*args, out[:, :, 0], spans, scale, power_of_two(scale))
        return
    parts = torch.empty((B, Hq, spans, D + 2), dtype=torch.float32, device=q.device)
    kernel(*args, parts, spans, scale, power_of_two(scale))
    join_kernel(D, q.dtype)(parts.view(B * Hq, spans, D + 2), out[:, :, 0])

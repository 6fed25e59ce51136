"""Attention with a mask of flags and values of another width than keys, TileLang: only tiles with a key that is seen are read.

One warp fetches tiles by TMA, the others multiply. What TMA cannot address (rows that are not aligned to 16 bytes) is loaded
element by element, without overlap.
"""

import functools

import tilelang
import tilelang.language as T
import torch
from _lib.tilelang.split_keys import (
    LEAST_SCORE,
    for_tma,
    multiprocessor_count,
    one_warp_fetches,
    power_of_two,
    sign_and_size,
    weigh,
)

LOG2_E = 1.4426950408889634
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0
NEVER = 1 << 30  # a tile behind all others
ROOM = 208 * 1024  # bytes of shared memory for tiles of queries, keys and values


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
def prefill_kernel(D, DV, dtype, rows, keys, columns, v_columns, stages):
    """Compile attention of tiles of `rows` positions of a head to the tiles of keys that any of them sees.

    `columns` and `v_columns` are D and DV filled up for the tensor cores; TMA gives zeros past them, past S and past L. The scale
    must be above 0.
    """
    B, H, S, L, planes, blocks, tiles = T.dynamic("B H S L planes blocks tiles")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    m_b, m_q, m_k = T.dynamic("m_b m_q m_k", "int64")
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def masked_prefill(
        q: T.StridedTensor((B, H, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, H, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, H, L, DV), (v_b, v_h, v_s, 1), dtype),
        flags: T.StridedTensor((planes, S, L), (m_b, m_q, m_k), "uint8"),
        kinds: T.Tensor((planes, blocks, tiles), "int32"),
        out: T.StridedTensor((B, H, S, DV), (out_b, out_h, out_s, 1), dtype),
        scale: T.float32,
        power: T.float32,
    ):
        with T.Kernel(B * H, blocks, threads=2 * rows) as (pair, turn):
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
            v_tile = T.alloc_shared((keys, v_columns), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            weights = T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, v_columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            steep = T.alloc_fragment((rows,), "float32")
            offset = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            batch = T.alloc_var("int32")
            plane = T.alloc_var("int32")
            head = T.alloc_var("int32")
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
                batch = T.truncdiv(pair, H)
                plane = T.min(batch, planes - 1)  # one mask for all sequences, or one for each
                head = T.truncmod(pair, H)
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
                T.copy(k[batch, head, (low + step) * keys, 0], k_tile, annotations={T.WSID: "fetch_k"})
                T.copy(v[batch, head, (low + step) * keys, 0], v_tile, annotations={T.WSID: "fetch_v"})
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
                    for i, j in T.Parallel(rows, v_columns):
                        acc[i, j] = acc[i, j] * shrink[i]
                T.gemm(weights, v_tile, acc, policy=full_row, annotations={T.WSID: "multiply_v"})
            with T.ws_op("store"):
                for i in T.Parallel(rows):
                    if sums[i] == 0.0:
                        sums[i] = 1.0  # zeros for a position that sees no key
                for i, j in T.Parallel(rows, v_columns):
                    if block * rows + i < S and j < DV:
                        out[batch, head, block * rows + i, j] = T.cast(acc[i, j] / sums[i], dtype)

    return masked_prefill


# --- What TMA cannot address


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def plain_kernel(D, DV, dtype):
    """Compile the kernel for any rows, and for scales of any sign: a warp a position of a head, a key a turn."""
    B, H, S, L, planes = T.dynamic("B H S L planes")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    m_b, m_q, m_k = T.dynamic("m_b m_q m_k", "int64")
    parts, v_parts = -(-D // 32), -(-DV // 32)

    @T.prim_func
    def masked_plain(
        q: T.StridedTensor((B, H, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, H, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, H, L, DV), (v_b, v_h, v_s, 1), dtype),
        flags: T.StridedTensor((planes, S, L), (m_b, m_q, m_k), "uint8"),
        out: T.StridedTensor((B, H, S, DV), (out_b, out_h, out_s, 1), dtype),
        sign: T.float32,
        scale: T.float32,
    ):
        with T.Kernel(B * H * S, threads=32) as turn:
            position, row = T.truncmod(turn, S), T.truncdiv(turn, S)
            batch, head = T.truncdiv(row, H), T.truncmod(row, H)
            plane = T.min(batch, planes - 1)
            lane = T.get_thread_binding(0)
            wanted = T.alloc_local((parts,), "float32")
            acc = T.alloc_local((v_parts,), "float32")
            largest = T.alloc_var("float32", init=LEAST_SCORE)
            grown = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            score = T.alloc_var("float32", init=0.0)
            shrink = T.alloc_var("float32", init=0.0)
            weight = T.alloc_var("float32", init=0.0)

            for p in T.unroll(v_parts):
                acc[p] = 0.0
            for p in T.unroll(parts):
                wanted[p] = 0.0
                if p * 32 + lane < D:
                    wanted[p] = T.cast(q[batch, head, position, p * 32 + lane], "float32")
            for key in T.serial(L):
                if flags[plane, position, key] > 0:
                    score = 0.0
                    for p in T.unroll(parts):
                        if p * 32 + lane < D:
                            score += wanted[p] * T.cast(k[batch, head, key, p * 32 + lane], "float32")
                    for step in T.unroll(5):
                        score += T.shfl_xor(score, 1 << step)
                    score *= sign
                    grown = T.max(largest, score)
                    shrink = T.exp2((largest - grown) * scale)
                    weight = T.exp2((score - grown) * scale)
                    total = total * shrink + weight
                    weight = T.cast(T.cast(weight, dtype), "float32")
                    for p in T.unroll(v_parts):
                        acc[p] *= shrink
                        if p * 32 + lane < DV:
                            acc[p] += weight * T.cast(v[batch, head, key, p * 32 + lane], "float32")
                    largest = grown
            for p in T.unroll(v_parts):
                if p * 32 + lane < DV:
                    out[batch, head, position, p * 32 + lane] = T.cast(
                        acc[p] / T.if_then_else(total > 0.0, total, 1.0), dtype
                    )

    return masked_plain


# --- Launches


def one_if_shared(mask):
    """Return a mask [B, 1, S, L] as bytes [B, S, L], with one entry if all sequences share it."""
    flags = mask.view(torch.uint8)[:, 0]
    return flags if mask.stride(0) else flags[:1]


def columns_of(size):
    """Columns of a tile: a size filled up to what swizzled tiles and the warps of a product take."""
    return max(64, -(-size // 64) * 64)


def v_columns_of(size):
    """Columns of a tile of values, which are also those of the second product."""
    return 64 if size <= 64 else 128 if size <= 128 else 256


def run(q, k, v, mask, scale, out, *, rows=None, keys=64):
    """out = T(softmax(scale * q k^T over the keys with a flag) v), zeros in rows without such a key.

    q: [B, H, S, D], k: [B, H, L, D], v: [B, H, L, DV], out: [B, H, S, DV], last stride 1 (any others), mask: [B, 1, S, L] bool,
    any strides; T is bfloat16 or float16. Scores, softmax and sums in float32, weights rounded to T for the second product. A
    first kernel reads the mask once and notes for each tile if all, some or none of its flags are set. Then a CTA owns `rows`
    positions of a head (64 or 128; None: 128, or 64 if CTAs are few) and streams the tiles of `keys` keys that one of them sees;
    it reads the mask again for those that are seen in part. Rows that are not aligned to 16 bytes, and scales of 0 or less, take
    a plain kernel, which is slow.
    """
    B, H, S, D = q.shape
    L, DV = v.shape[2], v.shape[3]
    if out.numel() == 0:
        return
    scale, flags = float(scale) * LOG2_E, one_if_shared(mask)
    if not (scale > 0 and for_tma(q, k, v)):
        plain_kernel(D, DV, q.dtype)(q, k, v, flags, out, *sign_and_size(scale))
        return
    columns, v_columns = columns_of(D), v_columns_of(DV)
    rows = rows or (128 if 2 * multiprocessor_count(q.device.index) <= B * H * -(-S // 128) else 64)
    keys = keys if columns + v_columns <= 320 else 64
    stages = max(2, min(4, (ROOM // 2 - rows * columns) // (keys * (columns + v_columns))))
    blocks, tiles = -(-S // rows), -(-L // keys)
    kinds = torch.empty((flags.shape[0], blocks, tiles), dtype=torch.int32, device=q.device)
    sort_kernel(rows, keys)(flags, kinds)
    kernel = prefill_kernel(D, DV, q.dtype, rows, keys, columns, v_columns, stages)
    kernel(q, k, v, flags, kinds, out, scale, power_of_two(scale))

"""Attention to latents, TileLang: they are keys and values of all heads, and their positions are split among CTAs.

One warp fetches latents and rotated keys by TMA, two warpgroups multiply, and a second kernel joins the parts. What TMA cannot
address (rows that are not aligned to 16 bytes) is loaded element by element, without overlap.
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
ROTATED = 64  # columns of a tile of rotated keys
ROOM = 224 * 1024  # bytes of shared memory for tiles; sums over rows take a little more


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def latent_kernel(R, E, dtype, rows, keys, columns, stages, whole):
    """Compile attention of `rows` heads to a span of positions: out, or parts without `whole`.

    Every latent is read once for all of them, and stays in shared memory for both products. A part is sums of latents not yet
    divided, the largest score and the sum of weights. The scale must be above 0.
    """
    B, H, L, splits = T.dynamic("B H L splits")
    q_b, q_h, r_b, r_h, out_b, out_h = T.dynamic("q_b q_h r_b r_h out_b out_h", "int64")
    k_b, k_l, p_b, p_l = T.dynamic("k_b k_l p_b p_l", "int64")
    full_col = T.GemmWarpPolicy.FullCol
    one_out = T.StridedTensor((B, H, R), (out_b, out_h, 1), dtype)
    partial_out = T.Tensor((B, H, splits, R + 2), "float32")

    @T.prim_func
    def latent_decode(
        q_nope: T.StridedTensor((B, H, R), (q_b, q_h, 1), dtype),
        q_pe: T.StridedTensor((B, H, E), (r_b, r_h, 1), dtype),
        latents: T.StridedTensor((B, L, R), (k_b, k_l, 1), dtype),
        rotated: T.StridedTensor((B, L, E), (p_b, p_l, 1), dtype),
        out: one_out if whole else partial_out,
        span: T.int32,
        scale: T.float32,
        power: T.float32,
    ):
        with T.Kernel(B * T.ceildiv(H, rows), T.ceildiv(L, span), threads=256) as (place, split):
            batch, tile = T.truncdiv(place, T.ceildiv(H, rows)), T.truncmod(place, T.ceildiv(H, rows))
            T.assume(k_b % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(k_l % 8 == 0)
            T.assume(p_b % 8 == 0)
            T.assume(p_l % 8 == 0)
            q_tile = T.alloc_shared((rows, columns), dtype)
            r_tile = T.alloc_shared((rows, ROTATED), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            p_tile = T.alloc_shared((keys, ROTATED), dtype)
            weights = T.alloc_shared((rows, keys), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            acc = T.alloc_fragment((rows, columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            steep = T.alloc_fragment((rows,), "float32")
            offset = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            begin = T.alloc_var("int32")
            steps = T.alloc_var("int32")

            T.annotate_ws_schedule(
                one_warp_fetches(
                    8,
                    {"k": ([k_tile, p_tile], stages)},
                    {
                        "steps": ["acquire k", "fetch_p", "fetch_k", "commit k"],
                        T.WSScope.ROOT: ["place", "steps"],
                    },
                    {
                        "steps": ["wait k", "multiply_p", "multiply_k", "weigh", "multiply_v", "release k"],
                        T.WSScope.ROOT: ["place", "start", "steps", "store"],
                    },
                )
            )
            with T.ws_op("place"):
                begin = split * span
                steps = T.truncdiv(T.min(span, L - split * span) + keys - 1, keys)
            with T.ws_op("start"):
                for i, j in T.Parallel(rows, columns):
                    q_tile[i, j] = T.if_then_else(tile * rows + i < H and j < R, q_nope[batch, tile * rows + i, j], 0)
                for i, j in T.Parallel(rows, ROTATED):
                    r_tile[i, j] = T.if_then_else(tile * rows + i < H and j < E, q_pe[batch, tile * rows + i, j], 0)
                T.fence_proxy_async()
                T.clear(acc)
                T.fill(offset, LEAST_SCORE)
                T.clear(sums)
            for step in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                T.copy(rotated[batch, begin + step * keys, 0], p_tile, annotations={T.WSID: "fetch_p"})
                T.copy(latents[batch, begin + step * keys, 0], k_tile, annotations={T.WSID: "fetch_k"})
                T.gemm(
                    r_tile,
                    p_tile,
                    scores,
                    transpose_B=True,
                    policy=full_col,
                    clear_accum=True,
                    annotations={T.WSID: "multiply_p"},
                )
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=full_col, annotations={T.WSID: "multiply_k"})
                with T.ws_op("weigh"):
                    if begin + (step + 1) * keys > L:
                        for i, j in T.Parallel(rows, keys):
                            scores[i, j] = T.if_then_else(
                                begin + step * keys + j < L, scores[i, j], -T.infinity("float32")
                            )
                    weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys)
                    T.copy(scores, weights)
                    for i, j in T.Parallel(rows, columns):
                        acc[i, j] = acc[i, j] * shrink[i]
                T.gemm(weights, k_tile, acc, policy=full_col, annotations={T.WSID: "multiply_v"})
            with T.ws_op("store"):
                if whole:
                    for i, j in T.Parallel(rows, columns):
                        if tile * rows + i < H and j < R:
                            out[batch, tile * rows + i, j] = T.cast(acc[i, j] / sums[i], dtype)
                else:
                    for i, j in T.Parallel(rows, columns):
                        if tile * rows + i < H and j < R:
                            out[batch, tile * rows + i, split, j] = acc[i, j]
                    for i in T.Parallel(rows):
                        if tile * rows + i < H:
                            out[batch, tile * rows + i, split, R] = offset[i]
                            out[batch, tile * rows + i, split, R + 1] = sums[i]

    return latent_decode


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def latent_plain_kernel(R, E, dtype):
    """Compile the kernel for latents that TMA cannot address, and for scales of any sign: a warp a head, a position a turn."""
    B, H, L = T.dynamic("B H L")
    q_b, q_h, r_b, r_h, out_b, out_h = T.dynamic("q_b q_h r_b r_h out_b out_h", "int64")
    k_b, k_l, p_b, p_l = T.dynamic("k_b k_l p_b p_l", "int64")
    parts, rotated_parts = -(-R // 32), -(-E // 32)

    @T.prim_func
    def latent_plain(
        q_nope: T.StridedTensor((B, H, R), (q_b, q_h, 1), dtype),
        q_pe: T.StridedTensor((B, H, E), (r_b, r_h, 1), dtype),
        latents: T.StridedTensor((B, L, R), (k_b, k_l, 1), dtype),
        rotated: T.StridedTensor((B, L, E), (p_b, p_l, 1), dtype),
        out: T.StridedTensor((B, H, R), (out_b, out_h, 1), dtype),
        sign: T.float32,
        scale: T.float32,
    ):
        with T.Kernel(B * H, threads=32) as row:
            batch, head = T.truncdiv(row, H), T.truncmod(row, H)
            lane = T.get_thread_binding(0)
            wanted = T.alloc_local((parts,), "float32")
            turned = T.alloc_local((rotated_parts,), "float32")
            values = T.alloc_local((parts,), "float32")
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
                values[p] = 0.0
                if p * 32 + lane < R:
                    wanted[p] = T.cast(q_nope[batch, head, p * 32 + lane], "float32")
            for p in T.unroll(rotated_parts):
                turned[p] = 0.0
                if p * 32 + lane < E:
                    turned[p] = T.cast(q_pe[batch, head, p * 32 + lane], "float32")
            for key in T.serial(L):
                score = 0.0
                for p in T.unroll(parts):
                    if p * 32 + lane < R:
                        values[p] = T.cast(latents[batch, key, p * 32 + lane], "float32")
                    score += wanted[p] * values[p]
                for p in T.unroll(rotated_parts):
                    if p * 32 + lane < E:
                        score += turned[p] * T.cast(rotated[batch, key, p * 32 + lane], "float32")
                for step in T.unroll(5):
                    score += T.shfl_xor(score, 1 << step)
                score *= sign
                grown = T.max(largest, score)
                shrink = T.exp2((largest - grown) * scale)
                weight = T.exp2((score - grown) * scale)
                total = total * shrink + weight
                weight = T.cast(T.cast(weight, dtype), "float32")
                for p in T.unroll(parts):
                    acc[p] = acc[p] * shrink + weight * values[p]
                largest = grown
            for p in T.unroll(parts):
                if p * 32 + lane < R:
                    out[batch, head, p * 32 + lane] = T.cast(acc[p] / total, dtype)

    return latent_plain


@functools.lru_cache(maxsize=4096)
def default_span(programs, L, least, wanted):
    """Return the positions of a CTA, a multiple of 64: as few as `wanted` CTAs allow, but `least`, or all if these are few."""
    if 2 * least >= L:
        return -(-L // 64) * 64
    splits = min(MOST_SPLITS, max(1, wanted // programs))
    return max(least, -(-L // (splits * 64)) * 64)


def run(q_nope, q_pe, kv_nope, k_rot, scale, out, *, least=128, keys=64):
    """out = T(softmax(scale * (q_nope kv_nope^T + q_pe k_rot^T)) kv_nope): scores, softmax and sums in float32.

    q_nope and out: [B, H, R], q_pe: [B, H, E], kv_nope: [B, L, R], k_rot: [B, L, E], last stride 1 (any others); T is bfloat16 or
    float16. Weights are rounded to T for the second product. A CTA a multiprocessor owns 16 or 64 heads and a span of `least` or
    more positions, and streams their latents, `keys` a step; spans are joined by a second kernel. Latents whose rows are not
    aligned to 16 bytes, and scales of 0 or less, take a plain kernel, which is slow.
    """
    B, H, R = q_nope.shape
    L, E = kv_nope.shape[1], k_rot.shape[2]
    if q_nope.numel() == 0:
        return
    scale = float(scale) * LOG2_E
    if not (scale > 0 and for_tma(kv_nope, k_rot)):
        latent_plain_kernel(R, E, q_nope.dtype)(q_nope, q_pe, kv_nope, k_rot, out, *sign_and_size(scale))
        return
    rows = 16 if H <= 16 else 64
    keys = 64 if rows == 16 else keys  # each of eight warps has 8 columns of their scores
    columns = -(-R // 128) * 128
    width = columns + ROTATED
    stages = max(1, min(4, (ROOM // 2 - rows * (width + keys)) // (keys * width)))
    span = default_span(B * -(-H // rows), L, least, multiprocessor_count(q_nope.device.index))
    splits = -(-L // span)
    kernel = latent_kernel(R, E, q_nope.dtype, rows, keys, columns, stages, splits == 1)
    args = q_nope, q_pe, kv_nope, k_rot
    if splits == 1:
        kernel(*args, out, span, scale, power_of_two(scale))
        return
    parts = torch.empty((B, H, splits, R + 2), dtype=torch.float32, device=out.device)
    kernel(*args, parts, span, scale, power_of_two(scale))
    join_kernel(R, q_nope.dtype)(parts.view(B * H, splits, R + 2), out)

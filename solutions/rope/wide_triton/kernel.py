"""Rotary position embeddings in float32 with tables of any dtype, and the one of a single tensor, Triton.

A program owns a tile of the heads of one token. Neighbouring pairs are loaded and stored as they lie in memory, in whole
vectors, and taken apart in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _turned(first, second, cos_1, sin_1, cos_2, sin_2, dtype: tl.constexpr, ONE_ROUNDING: tl.constexpr):
    # Subtracting a rounded product is the same, bit for bit, as adding the rounded product of the negative.
    if ONE_ROUNDING:
        y_1 = first * cos_1 - second * sin_1
        y_2 = second * cos_2 + first * sin_2
    else:
        y_1 = (first * cos_1).to(dtype).to(tl.float32) - (second * sin_1).to(dtype).to(tl.float32)
        y_2 = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
    return y_1.to(dtype), y_2.to(dtype)


@triton.jit
def _load_pairs(ptrs, mask, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr):
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, (BLOCK_H, WIDTH, 2)))


@triton.jit(do_not_specialize=["S"])
def _turn_tile(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    q_out_stride_b, q_out_stride_h, q_out_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s, S,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, FULL_TABLES: tl.constexpr, ONE_ROUNDING: tl.constexpr,
    BLOCK_H: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # Tiles vary fastest: those of one token are neighbours, share its cos and sin, and read neighbouring memory.
    q_tiles: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    tiles: tl.constexpr = q_tiles + (K_HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    tile = pid % tiles
    token = pid // tiles
    b = (token // S).to(tl.int64)
    s = (token % S).to(tl.int64)
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty

    if tile < q_tiles:
        heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        inside = heads < Q_HEADS
        x_ptrs = q_ptr + b * q_stride_b + s * q_stride_s + heads.to(tl.int64) * q_stride_h
        out_ptrs = q_out_ptr + b * q_out_stride_b + s * q_out_stride_s + heads.to(tl.int64) * q_out_stride_h
    else:
        heads = (tile - q_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        inside = heads < K_HEADS
        x_ptrs = k_ptr + b * k_stride_b + s * k_stride_s + heads.to(tl.int64) * k_stride_h
        out_ptrs = k_out_ptr + b * k_out_stride_b + s * k_out_stride_s + heads.to(tl.int64) * k_out_stride_h

    lanes = tl.arange(0, WIDTH)[None, :]
    dims = tl.arange(0, 2 * WIDTH)[None, :]
    turns = inside & (lanes < PAIRS)
    in_head = inside & (dims < 2 * PAIRS)

    # Every head asks for the same cos and sin, which L1 answers.
    cos_ptrs = cos_ptr + b * cos_stride_b + s * cos_stride_s
    sin_ptrs = sin_ptr + b * sin_stride_b + s * sin_stride_s
    if FULL_TABLES and NEIGHBOURS:
        entries = tl.broadcast_to(dims, (BLOCK_H, 2 * WIDTH))
        cos_1, cos_2 = _load_pairs(cos_ptrs + entries, in_head, BLOCK_H, WIDTH)
        sin_1, sin_2 = _load_pairs(sin_ptrs + entries, in_head, BLOCK_H, WIDTH)
    else:
        entries = tl.broadcast_to(lanes, (BLOCK_H, WIDTH))
        cos_1 = tl.load(cos_ptrs + entries, mask=turns, other=0.0).to(tl.float32)
        sin_1 = tl.load(sin_ptrs + entries, mask=turns, other=0.0).to(tl.float32)
        cos_2, sin_2 = cos_1, sin_1
        if FULL_TABLES:
            cos_2 = tl.load(cos_ptrs + PAIRS + entries, mask=turns, other=0.0).to(tl.float32)
            sin_2 = tl.load(sin_ptrs + PAIRS + entries, mask=turns, other=0.0).to(tl.float32)

    if NEIGHBOURS:
        first, second = _load_pairs(x_ptrs + dims, in_head, BLOCK_H, WIDTH)
        y_1, y_2 = _turned(first, second, cos_1, sin_1, cos_2, sin_2, dtype, ONE_ROUNDING)
        tl.store(out_ptrs + dims, tl.reshape(tl.join(y_1, y_2), (BLOCK_H, 2 * WIDTH)), mask=in_head)
    else:
        first = tl.load(x_ptrs + lanes, mask=turns, other=0.0).to(tl.float32)
        second = tl.load(x_ptrs + PAIRS + lanes, mask=turns, other=0.0).to(tl.float32)
        y_1, y_2 = _turned(first, second, cos_1, sin_1, cos_2, sin_2, dtype, ONE_ROUNDING)
        tl.store(out_ptrs + lanes, y_1, mask=turns)
        tl.store(out_ptrs + PAIRS + lanes, y_2, mask=turns)


def _launch(
    q, k, cos, sin, q_out, k_out, BLOCK_H, num_warps, *, k_heads, neighbours=False, full_tables=True, one_rounding=True
):  # fmt: skip
    """Shapes: q, q_out [B, Hq, S, D]; k, k_out [B, k_heads, S, D]; tables [1 or B, S, D]; unit last stride, any other strides.

    T is bfloat16, float16 or float32, and so is the dtype of the tables. Every cast rounds to nearest even.
    BLOCK_H = None: as many heads as make 1024 values, or 256 below 64 tokens (decode).
    num_warps = None: 16 bytes of a head a thread; fewer in a single warp.
    """
    B, q_heads, S, D = q.shape
    tokens = B * S
    if tokens == 0 or D == 0:
        return
    pairs = D // 2
    # Next powers of two, written out: triton.next_power_of_2 costs microseconds a call.
    width = 1 << (pairs - 1).bit_length()
    all_heads = 1 << (max(q_heads, k_heads, 1) - 1).bit_length()
    block_h = min(BLOCK_H or max(1, (1024 if tokens >= 64 else 256) // (2 * width)), all_heads)
    programs = (q_heads + block_h - 1) // block_h + (k_heads + block_h - 1) // block_h
    if programs == 0:
        return
    warps = num_warps or min(8, max(1, block_h * width * q.element_size() // 256))
    q_b, q_h, q_s, _ = q.stride()
    k_b, k_h, k_s, _ = k.stride()
    q_out_b, q_out_h, q_out_s, _ = q_out.stride()
    k_out_b, k_out_h, k_out_s, _ = k_out.stride()
    cos_b, cos_s, _ = cos.stride()
    sin_b, sin_s, _ = sin.stride()
    if cos.shape[0] == 1:  # one table for the whole batch
        cos_b = sin_b = 0
    # Without contraction: PyTorch rounds each product to float32, or to T, before the sum.
    _turn_tile[(tokens * programs,)](
        q, k, cos, sin, q_out, k_out, q_b, q_h, q_s, k_b, k_h, k_s, cos_b, cos_s, sin_b, sin_s,
        q_out_b, q_out_h, q_out_s, k_out_b, k_out_h, k_out_s, S, q_heads, k_heads, pairs,
        neighbours, full_tables, one_rounding, block_h, width,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def run_rope_neox_fp32(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """y[i] = T(x[i] * c[i] - x[i+D/2] * s[i]), y[i+D/2] = T(x[i+D/2] * c[i+D/2] + x[i] * s[i+D/2]) for x = q and x = k.

    c and s are cos and sin [1 or B, S, D]; products and sums in float32.
    """
    _launch(q, k, cos, sin, q_out, k_out, BLOCK_H, num_warps, k_heads=k.shape[1])


def run_rope_neox_single(x, cos, sin, out, *, BLOCK_H=None, num_warps=None):
    """As run_rope_neox_fp32 for one tensor, but each product is rounded to T, and then the sum. cos and sin are in T."""
    _launch(x, x, cos, sin, out, out, BLOCK_H, num_warps, k_heads=0, one_rounding=False)


def run_rope_interleaved_fp32(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """y[2i] = T(x[2i] * c[2i] - x[2i+1] * s[2i]), y[2i+1] = T(x[2i+1] * c[2i+1] + x[2i] * s[2i+1]) for x = q and x = k.

    c and s are cos and sin [1 or B, S, D]; products and sums in float32.
    """
    _launch(q, k, cos, sin, q_out, k_out, BLOCK_H, num_warps, k_heads=k.shape[1], neighbours=True)


def run_rope_pairs_fp32(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """As run_rope_interleaved_fp32, but entry i of the first half of cos and sin is that of both elements of pair i."""
    _launch(q, k, cos, sin, q_out, k_out, BLOCK_H, num_warps, k_heads=k.shape[1], neighbours=True, full_tables=False)

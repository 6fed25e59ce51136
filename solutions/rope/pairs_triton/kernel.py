"""Rotary position embeddings of neighbouring pairs, and by tables of half a head's width, Triton.

A program owns a tile of the heads of one token. Pairs are loaded and stored as they lie in memory, in whole vectors, and taken
apart in registers. With 16 bytes of a head a thread, cos and sin arrive in the layout that the halves of a pair have then:
nothing goes through shared memory.
"""

import triton
import triton.language as tl


@triton.jit
def _turned(even, odd, cos, sin, dtype: tl.constexpr, ONE_ROUNDING: tl.constexpr):
    # Each product is rounded to T before the sum, as separate PyTorch operations round. Subtracting a rounded product is the
    # same, bit for bit, as adding the rounded product of the negative.
    even, odd, cos, sin = even.to(tl.float32), odd.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    if ONE_ROUNDING:
        first = even * cos - odd * sin
        second = odd * cos + even * sin
    else:
        first = (even * cos).to(dtype).to(tl.float32) - (odd * sin).to(dtype).to(tl.float32)
        second = (odd * cos).to(dtype).to(tl.float32) + (even * sin).to(dtype).to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit(do_not_specialize=["S"])
def _turn_tile(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    q_out_stride_b, q_out_stride_h, q_out_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s, S,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr,
    READS_HALVES: tl.constexpr, WRITES_HALVES: tl.constexpr, COMPLEX: tl.constexpr, ONE_ROUNDING: tl.constexpr,
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

    # Loads of heads are evict_last, although nothing is read again: faster than no policy where there are many (H200).
    if READS_HALVES:
        lanes = tl.arange(0, WIDTH)[None, :]
        turns = inside & (lanes < PAIRS)
        even = tl.load(x_ptrs + lanes, mask=turns, other=0.0, eviction_policy="evict_last")
        odd = tl.load(x_ptrs + PAIRS + lanes, mask=turns, other=0.0, eviction_policy="evict_last")
    else:
        # Where the pairs begin at an odd element, the tile begins one element before the head.
        shift: tl.constexpr = START % 2
        dims = tl.arange(0, WIDTH)[None, :]
        if shift > 0:
            dims = dims - shift
        in_head = inside & (dims < D)
        if shift > 0:
            in_head = in_head & (dims >= 0)
        x = tl.load(x_ptrs + dims, mask=in_head, other=0.0, eviction_policy="evict_last")
        even, odd = tl.split(tl.reshape(x, (BLOCK_H, WIDTH // 2, 2)))
        lanes = tl.arange(0, WIDTH // 2)[None, :]
        if START > 0:
            lanes = lanes - (START + 1) // 2
            turns = inside & (lanes >= 0) & (lanes < PAIRS)
        else:
            turns = inside & (lanes < PAIRS)

    # Every head asks for the same cos and sin, which L1 answers: one row of them for all heads would have to be laid out anew.
    cos_ptrs = cos_ptr + b * cos_stride_b + s * cos_stride_s
    if COMPLEX:
        numbers = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], (BLOCK_H, WIDTH))
        table = tl.load(cos_ptrs + numbers, mask=inside & (numbers < 2 * PAIRS), other=0.0)
        cos, sin = tl.split(tl.reshape(table, (BLOCK_H, WIDTH // 2, 2)))
    else:
        entries = tl.broadcast_to(lanes, (BLOCK_H, lanes.shape[1]))
        cos = tl.load(cos_ptrs + entries, mask=turns, other=0.0)
        sin = tl.load(sin_ptr + b * sin_stride_b + s * sin_stride_s + entries, mask=turns, other=0.0)

    first, second = _turned(even, odd, cos, sin, dtype, ONE_ROUNDING)
    if READS_HALVES or WRITES_HALVES:
        tl.store(out_ptrs + lanes, first, mask=turns)
        tl.store(out_ptrs + PAIRS + lanes, second, mask=turns)
    else:
        if 2 * PAIRS < D:  # the rest of a head passes bit for bit
            first = tl.where(turns, first, even)
            second = tl.where(turns, second, odd)
        tl.store(out_ptrs + dims, tl.reshape(tl.join(first, second), (BLOCK_H, WIDTH)), mask=in_head)


def _launch(
    q, k, cos, sin, q_out, k_out, pairs, BLOCK_H, num_warps,
    *, k_heads, start=0, reads_halves=False, writes_halves=False, complex_table=False, one_rounding=False,
):  # fmt: skip
    """Shapes: q, q_out [B, Hq, S, D]; k, k_out [B, k_heads, S, D]; tables [1 or B, S, ...]; unit last stride, any other strides.

    T is bfloat16, float16 or float32. Every cast rounds to nearest even.
    BLOCK_H = None: as many heads as make 1024 values, or 256 below 64 tokens (decode).
    num_warps = None: 16 bytes of a head a thread, or of either half where halves are read; fewer in a single warp.
    """
    B, q_heads, S, D = q.shape
    tokens = B * S
    if tokens == 0 or D == 0:
        return
    # Next powers of two, written out: triton.next_power_of_2 costs microseconds a call.
    width = 1 << ((pairs if reads_halves else D + start % 2) - 1).bit_length()
    head_size = 2 * width if reads_halves else width
    all_heads = 1 << (max(q_heads, k_heads) - 1).bit_length()
    block_h = min(BLOCK_H or max(1, (1024 if tokens >= 64 else 256) // head_size), all_heads)
    programs = (q_heads + block_h - 1) // block_h + (k_heads + block_h - 1) // block_h
    warps = num_warps or min(8, max(1, block_h * width * q.element_size() // 512))
    q_b, q_h, q_s, _ = q.stride()
    k_b, k_h, k_s, _ = k.stride()
    q_out_b, q_out_h, q_out_s, _ = q_out.stride()
    k_out_b, k_out_h, k_out_s, _ = k_out.stride()
    cos_b, cos_s, _ = cos.stride()
    sin_b, sin_s, _ = sin.stride()
    if cos.shape[0] == 1:  # one table for the whole batch
        cos_b = sin_b = 0
    # Without contraction: a fused multiply-add would skip the rounding of a product when T is float32.
    _turn_tile[(tokens * programs,)](
        q, k, cos, sin, q_out, k_out, q_b, q_h, q_s, k_b, k_h, k_s, cos_b, cos_s, sin_b, sin_s,
        q_out_b, q_out_h, q_out_s, k_out_b, k_out_h, k_out_s, S, q_heads, k_heads, D, start, pairs,
        reads_halves, writes_halves, complex_table, one_rounding, block_h, width,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def run_rope_half_tables(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """y = cat(T(T(x1 * cos) - T(x2 * sin)), T(T(x2 * cos) + T(x1 * sin))) for x = q and x = k, x1 and x2 the halves of a head.

    cos and sin [1 or B, S, D/2] in T.
    """
    pairs, heads = q.shape[3] // 2, k.shape[1]
    _launch(q, k, cos, sin, q_out, k_out, pairs, BLOCK_H, num_warps, k_heads=heads, reads_halves=True)


def run_rope_pairs(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """y[2i] = T(T(x[2i] * c) - T(x[2i+1] * s)), y[2i+1] = T(T(x[2i+1] * c) + T(x[2i] * s)) for x = q and x = k.

    c and s are entry i of the first half of cos and sin [1 or B, S, R] in T; elements from R on are copied.
    """
    _launch(q, k, cos, sin, q_out, k_out, cos.shape[2] // 2, BLOCK_H, num_warps, k_heads=k.shape[1])


def run_rope_pairs_to_halves(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """y[i] = T(T(x[2i] * c) - T(x[2i+1] * s)), y[i+D/2] = T(T(x[2i+1] * c) + T(x[2i] * s)) for x = q and x = k.

    c and s are entry i of the first half of cos and sin [1 or B, S, D] in T.
    """
    pairs, heads = q.shape[3] // 2, k.shape[1]
    _launch(q, k, cos, sin, q_out, k_out, pairs, BLOCK_H, num_warps, k_heads=heads, writes_halves=True)


def run_rope_complex_pairs(q, k, turns, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """y[2i] = T(x[2i] * c - x[2i+1] * s), y[2i+1] = T(x[2i+1] * c + x[2i] * s) for x = q and x = k, in float32.

    c and s are entries 2i and 2i+1 of turns [1 or B, S, D] in float32.
    """
    _launch(
        q, k, turns, turns, q_out, k_out, q.shape[3] // 2, BLOCK_H, num_warps,
        k_heads=k.shape[1], complex_table=True, one_rounding=True,
    )  # fmt: skip


def run_rope_tail_pairs(x, cos, sin, out, *, BLOCK_H=None, num_warps=None):
    """The last 2P elements of each head as in run_rope_complex_pairs, c and s being entry i of cos and sin [1 or B, S, P] in T.

    What comes before them is copied.
    """
    pairs = cos.shape[2]
    start = x.shape[3] - 2 * pairs
    _launch(x, x, cos, sin, out, out, pairs, BLOCK_H, num_warps, k_heads=0, start=start, one_rounding=True)

"""Rotary position embedding (the halves of the first R elements of a head rotate together) of q and k, Triton.

The gradients have a kernel of their own: a program owns a token, where in the forward it owns a tile of heads.
"""

import triton
import triton.language as tl


@triton.jit
def _load_halves(ptrs, dims, mask, HALF: tl.constexpr, EVICTION: tl.constexpr):
    low = tl.load(ptrs + dims, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    high = tl.load(ptrs + HALF + dims, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return low, high


@triton.jit
def _store_halves(ptrs, dims, low, high, mask, HALF: tl.constexpr):
    dtype = ptrs.dtype.scalar.element_ty
    tl.store(ptrs + dims, low.to(dtype), mask=mask)
    tl.store(ptrs + HALF + dims, high.to(dtype), mask=mask)


@triton.jit
def _rotated(low, high, cos_low, cos_high, sin_low, sin_high, dtype: tl.constexpr, BACK: tl.constexpr):
    # Each product is rounded to T before the sum, as separate PyTorch operations round. Subtracting a rounded product is the
    # same, bit for bit, as adding the rounded product of the negative. What one half of a head gives to the other is scaled by
    # the table of the half that receives it, and in the gradients by that of the half that gives it.
    if BACK:
        out_low = (low * cos_low).to(dtype).to(tl.float32) + (high * sin_high).to(dtype).to(tl.float32)
        out_high = (high * cos_high).to(dtype).to(tl.float32) - (low * sin_low).to(dtype).to(tl.float32)
    else:
        out_low = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
        out_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    return out_low, out_high


@triton.jit(do_not_specialize=["S"])
def _rope_tile(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    q_out_stride_b, q_out_stride_h, q_out_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s, S,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    # Tiles vary fastest: those of one token are neighbours, share its cos and sin, and read neighbouring memory.
    q_tiles: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    tiles: tl.constexpr = q_tiles + (K_HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    tile = pid % tiles
    token = pid // tiles
    b = (token // S).to(tl.int64)
    s = (token % S).to(tl.int64)
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    # Where nothing follows, addresses and masks are complete in the branches below: fewer instructions than complete after them.
    start, offset = (0, dims) if REST > 0 else (dims, 0)
    in_half = offset < HALF
    if REST > 0:
        rest = tl.arange(0, triton.next_power_of_2(REST))[None, :]

    if tile < q_tiles:
        heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        inside = (heads < Q_HEADS) & (start < HALF)
        x_ptrs = q_ptr + b * q_stride_b + s * q_stride_s + heads.to(tl.int64) * q_stride_h + start
        out_ptrs = q_out_ptr + b * q_out_stride_b + s * q_out_stride_s + heads.to(tl.int64) * q_out_stride_h + start
    else:
        heads = (tile - q_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        inside = (heads < K_HEADS) & (start < HALF)
        x_ptrs = k_ptr + b * k_stride_b + s * k_stride_s + heads.to(tl.int64) * k_stride_h + start
        out_ptrs = k_out_ptr + b * k_out_stride_b + s * k_out_stride_s + heads.to(tl.int64) * k_out_stride_h + start

    mask = inside & in_half
    # Nothing is stored before all loads are under way. They are evict_last, although nothing is read again: up to 6% faster than
    # no policy, where evict_first is slower (H200).
    if REST > 0:
        copied = tl.load(x_ptrs + 2 * HALF + rest, mask=inside & (rest < REST), eviction_policy="evict_last")
    low, high = _load_halves(x_ptrs, offset, mask, HALF, "evict_last")
    # Every head asks for the same cos and sin, which L1 answers: they arrive in the layout of x. One row of them for all
    # heads would have to be laid out anew, through shared memory and a barrier.
    table_dims = tl.broadcast_to(dims, (BLOCK_H, dims.shape[1]))
    cos_ptrs = cos_ptr + b * cos_stride_b + s * cos_stride_s + table_dims
    sin_ptrs = sin_ptr + b * sin_stride_b + s * sin_stride_s + table_dims
    cos_low, cos_high = _load_halves(cos_ptrs, 0, mask, HALF, "")
    sin_low, sin_high = _load_halves(sin_ptrs, 0, mask, HALF, "")
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    low, high = _rotated(low, high, cos_low, cos_high, sin_low, sin_high, dtype, False)
    _store_halves(out_ptrs, offset, low, high, mask, HALF)
    if REST > 0:
        tl.store(out_ptrs + 2 * HALF + rest, copied, mask=inside & (rest < REST))


@triton.jit
def _rotate_heads_back(
    x_ptr, out_ptr, x_head_stride, out_head_stride, first_head, cos_low, cos_high, sin_low, sin_high,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    heads = first_head + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    heads = heads.to(tl.int64)
    low, high = _load_halves(x_ptr + heads * x_head_stride + dims, 0, mask, HALF, "")
    low, high = _rotated(low, high, cos_low, cos_high, sin_low, sin_high, out_ptr.dtype.element_ty, True)
    _store_halves(out_ptr + heads * out_head_stride + dims, 0, low, high, mask, HALF)


@triton.jit(do_not_specialize=["S"])
def _rope_token_back(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    q_out_stride_b, q_out_stride_h, q_out_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s, S,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    group = pid % GROUPS
    token = pid // GROUPS
    b = (token // S).to(tl.int64)
    s = (token % S).to(tl.int64)

    dims = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    mask = dims < HALF
    cos_ptrs = cos_ptr + b * cos_stride_b + s * cos_stride_s + dims
    sin_ptrs = sin_ptr + b * sin_stride_b + s * sin_stride_s + dims
    cos_low, cos_high = _load_halves(cos_ptrs, 0, mask, HALF, "")
    sin_low, sin_high = _load_halves(sin_ptrs, 0, mask, HALF, "")
    _rotate_heads_back(
        q_ptr + b * q_stride_b + s * q_stride_s, q_out_ptr + b * q_out_stride_b + s * q_out_stride_s, q_stride_h, q_out_stride_h,
        group * BLOCK_Q, cos_low, cos_high, sin_low, sin_high, Q_HEADS, HALF, BLOCK_Q,
    )  # fmt: skip
    _rotate_heads_back(
        k_ptr + b * k_stride_b + s * k_stride_s, k_out_ptr + b * k_out_stride_b + s * k_out_stride_s, k_stride_h, k_out_stride_h,
        group * BLOCK_K, cos_low, cos_high, sin_low, sin_high, K_HEADS, HALF, BLOCK_K,
    )  # fmt: skip


def _launches(kernel, part=False):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    Shapes: q, q_out [B, Hq, S, D]; k, k_out [B, Hkv, S, D]; cos, sin [1 or B, S, R]; unit last stride, any other strides; one
    dtype T in bfloat16, float16, float32; R even, R <= D with `part`, else R = D. Every cast rounds to nearest even.

    _rope_tile: a program owns BLOCK_H heads of q, or of k, of one token. With the layout that models use (all heads of a
    token side by side) it reads one contiguous piece, and its neighbours the rest of the token.
    BLOCK_H = None: as many heads as make 1024 values (2048 with `part` and 512 tokens), or 256 below 64 tokens (decode).
    num_warps = None: 16 values a thread, or fewer in a single warp.

    _rope_token_back: a program owns one token and 1 / GROUPS of its q and of its k heads: cos and sin are read once for all
    of them, and with that layout the program reads one contiguous piece.
    GROUPS = None: 1, or more (up to 16) where there are too few tokens to fill the machine (decode).
    num_warps = None: 16 values of each half of q a thread (8 when the heads are split).
    """
    back = kernel is _rope_token_back

    def run(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, GROUPS=None, num_warps=None):
        B, q_heads, S, D = q.shape
        k_heads = k.shape[1]
        tokens = B * S
        if tokens == 0 or D == 0:
            return
        half = (cos.shape[2] if part else D) // 2
        # Next powers of two, written out: triton.next_power_of_2 costs microseconds a call.
        head_size = 1 << (D - 1).bit_length()
        if back:
            groups = GROUPS or (1 if tokens >= 512 else 4 if tokens >= 64 else 16)
            block_q = 1 << ((q_heads + groups - 1) // groups - 1).bit_length()
            block_k = 1 << ((k_heads + groups - 1) // groups - 1).bit_length()
            # Rounding the blocks up to powers of two may leave the last groups without heads: launch only the others.
            programs = max((q_heads + block_q - 1) // block_q, (k_heads + block_k - 1) // block_k)
            warps = num_warps or min(8, max(1, block_q * head_size // (1024 if programs == 1 else 512)))
            tile = programs, block_q, block_k
        else:
            all_heads = 1 << (max(q_heads, k_heads) - 1).bit_length()
            values = 2048 if part and tokens >= 512 else 1024 if tokens >= 64 else 256
            block_h = min(BLOCK_H or max(1, values // head_size), all_heads)
            programs = (q_heads + block_h - 1) // block_h + (k_heads + block_h - 1) // block_h
            warps = num_warps or min(8, max(1, block_h * head_size // 512))
            tile = D - 2 * half, block_h
        q_b, q_h, q_s, _ = q.stride()
        k_b, k_h, k_s, _ = k.stride()
        q_out_b, q_out_h, q_out_s, _ = q_out.stride()
        k_out_b, k_out_h, k_out_s, _ = k_out.stride()
        cos_b, cos_s, _ = cos.stride()
        sin_b, sin_s, _ = sin.stride()
        if cos.shape[0] == 1:  # one table for the whole batch
            cos_b = sin_b = 0
        # Without contraction: a fused multiply-add would skip the rounding of a product when T is float32.
        kernel[(tokens * programs,)](
            q, k, cos, sin, q_out, k_out, q_b, q_h, q_s, k_b, k_h, k_s, cos_b, cos_s, sin_b, sin_s,
            q_out_b, q_out_h, q_out_s, k_out_b, k_out_h, k_out_s, S, q_heads, k_heads, half, *tile,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip

    return lambda declared: run


@_launches(_rope_tile)
def run_rope_neox(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """y = T(T(x * cos) + T(cat(-x2, x1) * sin)) for x = q and x = k, x1 and x2 being the halves of a head."""


@_launches(_rope_tile, part=True)
def run_rope_partial(q, k, cos, sin, q_out, k_out, *, BLOCK_H=None, num_warps=None):
    """y = cat(T(T(r * cos) + T(cat(-r2, r1) * sin)), p): r is the first R elements of a head of q or k, p the rest."""


@_launches(_rope_token_back)
def run_rope_neox_backward(grad_q_out, grad_k_out, cos, sin, grad_q, grad_k, *, GROUPS=None, num_warps=None):
    """dx = T(T(g * cos) + cat(t2, -t1)), t = T(g * sin), for the gradients g of q and of k; t1 and t2 are halves of a head."""

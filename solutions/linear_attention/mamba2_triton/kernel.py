"""The state-space layer of Mamba-2, Triton: one token in place, or chunks of tokens with the state in registers between them."""

import torch
import triton
import triton.language as tl

# ---- steps ----------------------------------------------------------------------------------------

LEAST = tl.constexpr(-87.0)
"""Smallest logarithm of a decay: exp of it is the smallest normal number, and sums of it keep their digits."""
UPWARDS = tl.constexpr(1.0 + 2.0**-22)
"""Factor on softplus. The result for -0.0152587890625 lies 2e-8 above a rounding to bfloat16, and no other within 3e-7."""


@triton.jit
def _log1p_of_fraction(e):
    """Return log(1 + e) for e in [0, 1]: 2 atanh(s) by its series, s = e / (2 + e)."""
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    return 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))


@triton.jit
def _step(dt, bias):
    """Return softplus(dt + bias) in float32, rounded to the dtype of dt after the sum and at the end."""
    x = (dt.to(tl.float32) + bias.to(tl.float32)).to(dt.dtype).to(tl.float32)
    softplus = tl.maximum(x, 0.0) + _log1p_of_fraction(tl.exp(-tl.abs(x)))
    return tl.where(x > 20.0, x, softplus * UPWARDS).to(dt.dtype).to(tl.float32)


# ---- one token ------------------------------------------------------------------------------------


@triton.jit
def _one_token(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, out_ptr,
    state_b, state_h, state_p, x_b, x_h, dt_b, B_b, B_g, C_b, C_g, out_b, out_h,
    H, group, P, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    rows = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < P) & (cols[None, :] < N)
    state_ptrs = state_ptr + batch * state_b + head * state_h + rows[:, None] * state_p + cols[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0)
    x = tl.load(x_ptr + batch * x_b + head * x_h + rows, mask=rows < P, other=0.0)
    write = tl.load(B_ptr + batch * B_b + head // group * B_g + cols, mask=cols < N, other=0.0).to(tl.float32)
    read = tl.load(C_ptr + batch * C_b + head // group * C_g + cols, mask=cols < N, other=0.0).to(tl.float32)
    step = _step(tl.load(dt_ptr + batch * dt_b + head), tl.load(bias_ptr + head))
    decay = tl.exp(step * tl.load(A_ptr + head))
    skip = tl.load(D_ptr + head).to(tl.float32)
    # The model rounds each of these to T.
    write = (step * write).to(x.dtype).to(tl.float32)
    written = (x.to(tl.float32)[:, None] * write[None, :]).to(x.dtype).to(tl.float32)
    state = state * decay + written
    tl.store(state_ptrs, state, mask=inside)
    total = tl.sum(state.to(x.dtype).to(tl.float32) * read[None, :], axis=1).to(x.dtype).to(tl.float32)
    own = (x.to(tl.float32) * skip).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + batch * out_b + head * out_h + rows, (total + own).to(x.dtype), mask=rows < P)


def run_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    Bmat: torch.Tensor,
    Cmat: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK_P=None,
    num_warps=4,
):
    """Compute state = exp(step A) state + step x Bmat, in place, and out = state Cmat + D x for one token.

    Shapes: state [B, H, P, N], x and out [B, H, P], dt [B, H], Bmat, Cmat [B, G, N], A, D, dt_bias [H]; unit last strides.
    Mapping: a program owns BLOCK_P rows of the state of one head, which it reads and writes once.
    BLOCK_P = None: 4096 numbers of the state, or 1024 if an H200 would have fewer programs than places for them.
    """
    B, H, P, N = state.shape
    if state.numel() == 0:
        return
    block_n = triton.next_power_of_2(N)
    numbers = 4096 if state.numel() >= 4096 * 132 * 4 else 1024
    block_p = BLOCK_P or min(triton.next_power_of_2(P), max(1, numbers // block_n))
    _one_token[(B * H, triton.cdiv(P, block_p))](
        state, x, dt, A, Bmat, Cmat, D, dt_bias, out,
        *state.stride()[:3], *x.stride()[:2], dt.stride(0), *Bmat.stride()[:2], *Cmat.stride()[:2], *out.stride()[:2],
        H, H // Bmat.shape[1], P, N, block_p, block_n,
        num_warps=num_warps,
        # Without contraction: a fused multiply-add of T would skip the rounding of a product.
        enable_fp_fusion=False,
    )  # fmt: skip


# ---- chunks of tokens -----------------------------------------------------------------------------
# Of a chunk, G are the sums of the logarithms of decays within it. Tokens read out = e^G S C + sum over s <= l of
# (C_l B_s) e^(G_l - G_s) step_s x_s, of the state S before the chunk, which becomes e^G_last S + sum of e^(G_last - G) step x B.
# A sequence is cut into segments of chunks if there are too few heads for the machine. The states that the tokens of each
# segment write are then computed first, and every segment starts from the sum of those before it.
#
# Products are of 16 bits. A float32 factor is split into two of bfloat16, so that 16 of its bits count: bfloat16 alone would
# leave results that are no better than bfloat16. Values and directions of bfloat16 enter as they are.

CHUNK = tl.constexpr(64)
HEADS = 16
"""Heads of a program that computes steps; their numbers lie side by side."""
MOST_SEGMENTS = 8


@triton.jit
def _split(x):
    """x in float32 -> two of bfloat16 whose sum has 16 of its bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _add_product(high, low, x, acc):
    """Return acc + (high + low) x in float32; x is split too unless it is bfloat16."""
    if x.dtype == tl.bfloat16:
        acc = tl.dot(low, x, acc)
        acc = tl.dot(high, x, acc)
    else:
        x_high, x_low = _split(x.to(tl.float32))
        acc = tl.dot(low, x_high, acc)
        acc = tl.dot(high, x_low, acc)
        acc = tl.dot(high, x_high, acc)
    return acc


@triton.jit
def _add_product_of(x, y, acc):
    """Return acc + x y in float32 for y in float32; x is split too unless it is bfloat16."""
    high, low = _split(y)
    if x.dtype == tl.bfloat16:
        acc = tl.dot(x, low, acc)
        acc = tl.dot(x, high, acc)
    else:
        x_high, x_low = _split(x.to(tl.float32))
        acc = tl.dot(x_low, high, acc)
        acc = tl.dot(x_high, low, acc)
        acc = tl.dot(x_high, high, acc)
    return acc


@triton.jit
def _steps(
    dt_ptr, A_ptr, bias_ptr, step_ptr, sum_ptr, dt_b, dt_t, T, H, chunks, dt_min, HEADS: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    rows = tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    tokens = chunk * CHUNK + rows
    in_head = heads < H
    inside = (tokens[:, None] < T) & in_head[None, :]
    dt = tl.load(dt_ptr + batch * dt_b + tokens.to(tl.int64)[:, None] * dt_t + heads[None, :], mask=inside, other=0.0)
    bias = tl.load(bias_ptr + heads, mask=in_head, other=0.0)
    A = tl.load(A_ptr + heads, mask=in_head, other=0.0)
    step = tl.maximum(_step(dt, bias[None, :]), dt_min).to(dt.dtype).to(tl.float32)
    step = tl.where(inside, step, 0.0)
    total = tl.cumsum(tl.maximum(step * A[None, :], LEAST), axis=0)
    places = (batch * H + heads[None, :]) * (chunks * CHUNK) + tokens[:, None]
    tl.store(step_ptr + places, step, mask=in_head[None, :])
    tl.store(sum_ptr + places, total, mask=in_head[None, :])


@triton.jit
def _add_chunk(state, x, write, step, total, last):
    """Return the state behind a chunk: e^last state + sum over tokens of e^(last - total) step x write."""
    weight = step * tl.exp(tl.minimum(last - total, 0.0))
    high, low = _split(tl.trans(x).to(tl.float32) * weight[None, :])
    return _add_product(high, low, write, state * tl.exp(last))


@triton.jit
def _write_segments(
    x_ptr, B_ptr, step_ptr, sum_ptr, states_ptr, left_ptr,
    x_b, x_t, x_h, x_p, B_b, B_t, B_g, B_n,
    T, H, group, P, chunks, each, segments, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store what the tokens of every segment but the last leave in the state, and the sum of the logarithms of its decays."""
    blocks = tl.cdiv(P, BLOCK_P)
    pair = tl.program_id(0) // blocks  # of a sequence and a head
    segment = tl.program_id(1)
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    rows, depth = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    cols = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    first = segment * each
    token = (first * CHUNK).to(tl.int64)
    x_ptr += batch * x_b + head * x_h + token * x_t
    B_ptr += batch * B_b + head // group * B_g + token * B_t
    x_offsets = rows[:, None] * x_t + cols[None, :] * x_p
    B_offsets = rows[:, None] * B_t + depth[None, :] * B_n
    place = pair.to(tl.int64) * (chunks * CHUNK) + token
    step_ptr += place
    sum_ptr += place
    state = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    whole = 0.0
    for _ in tl.range(0, each, num_stages=STAGES):  # every segment but the last has all of its chunks, and all tokens
        if WHOLE:
            x = tl.load(x_ptr + x_offsets)
            write = tl.load(B_ptr + B_offsets)
        else:
            x = tl.load(x_ptr + x_offsets, mask=cols[None, :] < P, other=0.0)
            write = tl.load(B_ptr + B_offsets, mask=depth[None, :] < N, other=0.0)
        step, total = tl.load(step_ptr + rows), tl.load(sum_ptr + rows)
        last = tl.load(sum_ptr + CHUNK - 1)
        state = _add_chunk(state, x, write, step, total, last)
        whole += last
        x_ptr += CHUNK * tl.cast(x_t, tl.int64)
        B_ptr += CHUNK * tl.cast(B_t, tl.int64)
        step_ptr += CHUNK
        sum_ptr += CHUNK
    part = pair.to(tl.int64) * (segments - 1) + segment
    if tl.program_id(0) % blocks == 0:
        tl.store(left_ptr + part, whole)
    state_ptrs = states_ptr + (part * P + cols[:, None]) * N + depth[None, :]
    tl.store(state_ptrs, state, mask=(cols[:, None] < P) & (depth[None, :] < N))


@triton.jit
def _scan_chunks(
    x_ptr, B_ptr, C_ptr, D_ptr, step_ptr, sum_ptr, initial_ptr, states_ptr, left_ptr, out_ptr, final_ptr,
    x_b, x_t, x_h, x_p, B_b, B_t, B_g, B_n, C_b, C_t, C_g, C_n,
    initial_b, initial_h, initial_p, out_b, out_t, out_h, final_b, final_h, final_p,
    T, H, group, P, chunks, each, segments, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(P, BLOCK_P)
    pair = tl.program_id(0) // blocks  # of a sequence and a head
    segment = tl.program_id(1)
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    rows, depth = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    cols = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    in_p, in_n = cols[None, :] < P, depth[None, :] < N
    first = segment * each
    token = (first * CHUNK).to(tl.int64)
    # Pointers move to each chunk, so that threads keep offsets of 32 bits only.
    x_ptr += batch * x_b + head * x_h + token * x_t
    B_ptr += batch * B_b + head // group * B_g + token * B_t
    C_ptr += batch * C_b + head // group * C_g + token * C_t
    out_ptr += batch * out_b + head * out_h + token * out_t
    x_offsets = rows[:, None] * x_t + cols[None, :] * x_p
    B_offsets = rows[:, None] * B_t + depth[None, :] * B_n
    C_offsets = rows[:, None] * C_t + depth[None, :] * C_n
    out_offsets = rows[:, None] * out_t + cols[None, :]
    place = pair.to(tl.int64) * (chunks * CHUNK) + token
    step_ptr += place
    sum_ptr += place
    skip = tl.load(D_ptr + head).to(tl.float32)
    # 1. The state before the segment. It has a row for each value, and so has all that is made of it.
    inside = (cols[:, None] < P) & in_n
    state_ptrs = initial_ptr + batch * initial_b + head * initial_h + cols[:, None] * initial_p + depth[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0)
    part = pair.to(tl.int64) * (segments - 1)
    for _ in tl.range(0, segment):
        left = tl.exp(tl.load(left_ptr + part))
        written = tl.load(states_ptr + (part * P + cols[:, None]) * N + depth[None, :], mask=inside, other=0.0)
        state = state * left + written
        part += 1
    count = tl.minimum(each, chunks - first)
    for chunk in tl.range(0, count, num_stages=STAGES):
        if WHOLE:
            x = tl.load(x_ptr + x_offsets)
            write = tl.load(B_ptr + B_offsets)
            read = tl.load(C_ptr + C_offsets)
        else:
            here = (rows < T - (first + chunk) * CHUNK)[:, None]
            x = tl.load(x_ptr + x_offsets, mask=here & in_p, other=0.0)
            write = tl.load(B_ptr + B_offsets, mask=here & in_n, other=0.0)
            read = tl.load(C_ptr + C_offsets, mask=here & in_n, other=0.0)
        step, total = tl.load(step_ptr + rows), tl.load(sum_ptr + rows)
        last = tl.load(sum_ptr + CHUNK - 1)
        # 2. What tokens read of the state.
        high, low = _split(state)
        out = _add_product(high, low, tl.trans(read), tl.zeros([BLOCK_P, CHUNK], dtype=tl.float32))
        # 3. What they read of the chunk itself, in rows of tokens that write. Their own value is on the diagonal.
        if write.dtype == tl.bfloat16:
            pairs = tl.dot(write, tl.trans(read))
        else:
            high, low = _split(write.to(tl.float32))
            pairs = _add_product(high, low, tl.trans(read), tl.zeros([CHUNK, CHUNK], dtype=tl.float32))
        left = tl.exp(tl.where(rows[:, None] <= rows[None, :], total[None, :] - total[:, None], float("-inf")))
        pairs = pairs * left * step[:, None] + tl.where(rows[:, None] == rows[None, :], skip, 0.0)
        out = _add_product_of(tl.trans(x), pairs, out * tl.exp(total)[None, :])
        out = tl.trans(out)
        if WHOLE:
            tl.store(out_ptr + out_offsets, out)
        else:
            here = (rows < T - (first + chunk) * CHUNK)[:, None]
            tl.store(out_ptr + out_offsets, out, mask=here & in_p)
        # 4. The state behind the chunk.
        state = _add_chunk(state, x, write, step, total, last)
        x_ptr += CHUNK * tl.cast(x_t, tl.int64)
        B_ptr += CHUNK * tl.cast(B_t, tl.int64)
        C_ptr += CHUNK * tl.cast(C_t, tl.int64)
        out_ptr += CHUNK * tl.cast(out_t, tl.int64)
        step_ptr += CHUNK
        sum_ptr += CHUNK
    final_ptrs = final_ptr + batch * final_b + head * final_h + cols[:, None] * final_p + depth[None, :]
    if segment == segments - 1:
        tl.store(final_ptrs, state, mask=inside)


def run_chunk(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    Bmat: torch.Tensor,
    Cmat: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor,
    dt_min: float,
    out: torch.Tensor,
    final_state: torch.Tensor,
    *,
    BLOCK_P=None,
    PROGRAMS=264,
    num_stages=2,
    num_warps=None,
):
    """Compute S = exp(step A) S + step x Bmat and out = S Cmat + D x for T tokens one after the other.

    Shapes: x [B, T, H, P] and Bmat, Cmat [B, T, G, N] of any strides; out [B, T, H, P], dt [B, T, H], A, D, dt_bias [H] and
    states [B, H, P, N] with unit last strides. Sums, decays and the state are in float32.
    Mapping: steps and sums of their decays first. Then a program owns BLOCK_P rows of a head's state and goes through the
    chunks of a segment. Segments are as many as give PROGRAMS programs, and at most eight.
    BLOCK_P = None: 64. num_warps = None: one per 16 rows, or two if N > 128.
    """
    B, T, H, P = x.shape
    N = Bmat.shape[3]
    if final_state.numel() == 0:
        return
    size, group = CHUNK.value, H // Bmat.shape[2]
    chunks = triton.cdiv(T, size)
    block_n = max(16, triton.next_power_of_2(N))
    block_p = min(BLOCK_P or 64, max(16, triton.next_power_of_2(P)))
    rows = B * H * triton.cdiv(P, block_p)
    each = triton.cdiv(chunks, max(1, min(triton.cdiv(PROGRAMS, rows), MOST_SEGMENTS, chunks // 2)))
    segments = triton.cdiv(chunks, each)
    is_padded = P % block_p != 0 or block_n != N
    # Two parts of wider inputs need the memory, and so do wide states.
    stages = num_stages if x.dtype == torch.bfloat16 and block_n <= 128 else 1
    warps = num_warps or max(1, block_p // 16) * (2 if block_n > 128 else 1)
    steps = torch.empty(B * H * chunks * size, dtype=torch.float32, device=x.device)
    sums = torch.empty(B * H * chunks * size, dtype=torch.float32, device=x.device)
    parts = B * H * (segments - 1)
    states = torch.empty(parts * P * N, dtype=torch.float32, device=x.device)
    left = torch.empty(parts, dtype=torch.float32, device=x.device)
    _steps[(B * chunks, triton.cdiv(H, HEADS))](
        dt, A, dt_bias, steps, sums, *dt.stride()[:2], T, H, chunks, dt_min, HEADS, num_warps=4
    )
    if segments > 1:
        _write_segments[(rows, segments - 1)](
            x, Bmat, steps, sums, states, left,
            *x.stride(), *Bmat.stride(),
            T, H, group, P, chunks, each, segments, N, block_p, block_n, not is_padded, stages,
            num_warps=warps,
        )  # fmt: skip
    _scan_chunks[(rows, segments)](
        x, Bmat, Cmat, D, steps, sums, initial_state, states, left, out, final_state,
        *x.stride(), *Bmat.stride(), *Cmat.stride(), *initial_state.stride()[:3],
        *out.stride()[:3], *final_state.stride()[:3],
        T, H, group, P, chunks, each, segments, N, block_p, block_n, not is_padded and T % size == 0, stages,
        num_warps=warps,
    )  # fmt: skip

"""The state-space layer of Mamba-2, cuTile: one token in place, or chunks of tokens with the state in registers between them."""

from typing import Annotated

import cuda.tile as ct
import torch
from _lib.cutile.head_rows import is_aligned, move_rows, rounded

# Sizes of heads and states are compile-time constants: tiles that hold whole rows then need no mask.
Heads = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Values = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2,))]
States = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2, 3))]
Written = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO
MINUS_INFINITY = float("-inf")

# ---- steps ----------------------------------------------------------------------------------------

LEAST = -87.0
"""Smallest logarithm of a decay: exp of it is the smallest normal number, and sums of it keep their digits."""
UPWARDS = 1.0 + 2.0**-22
"""Factor on softplus. The result for -0.0152587890625 lies 2e-8 above a rounding to bfloat16, and no other within 3e-7."""


@ct.function
def _log1p_of_fraction(e):
    """Return log(1 + e) for e in [0, 1]: 2 atanh(s) by its series, s = e / (2 + e)."""
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    return 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))


@ct.function
def _step(dt, bias):
    """Return softplus(dt + bias), rounded to the dtype of dt after the sum and at the end."""
    x = (dt + bias).astype(ct.float32)
    softplus = ct.maximum(x, 0.0) + _log1p_of_fraction(ct.exp(-ct.abs(x)))
    return ct.where(x > 20.0, x, softplus * UPWARDS).astype(dt.dtype)


# ---- one token ------------------------------------------------------------------------------------


@ct.kernel
def _one_token(
    state: States, x: Values, dt: ct.Array, A: ct.Array, B: Values, C: Values, D: ct.Array, bias: ct.Array, out: Values,
    TILE_P: Int, TILE_N: Int,
):  # fmt: skip
    heads = x.shape[1]
    batch, head, block = ct.bid(0) // heads, ct.bid(0) % heads, ct.bid(1)
    group = head // (heads // B.shape[1])
    # A, D and bias are of each head, or of each sequence and head.
    old = ct.load(state, (batch, head, block, 0), (1, 1, TILE_P, TILE_N), padding_mode=ZERO).reshape((TILE_P, TILE_N))
    value = ct.load(x, (batch, head, block), (1, 1, TILE_P), padding_mode=ZERO).reshape((TILE_P, 1))
    write = ct.load(B, (batch, group, 0), (1, 1, TILE_N), padding_mode=ZERO).reshape((1, TILE_N))
    read = ct.load(C, (batch, group, 0), (1, 1, TILE_N), padding_mode=ZERO).reshape((1, TILE_N))
    step = _step(ct.load(dt, (batch, head), (1, 1)), ct.load(bias, (ct.bid(0) % bias.shape[0],), (1,)).reshape((1, 1)))
    decay = ct.exp(step.astype(ct.float32) * ct.load(A, (ct.bid(0) % A.shape[0],), (1,)).reshape((1, 1)))
    skip = ct.load(D, (ct.bid(0) % D.shape[0],), (1,)).reshape((1, 1))
    # Products of tiles of T are rounded to T, as in models. Sums are in float32: one in T would be fused with the product.
    written = ((step * write) * value).astype(ct.float32)
    new = old * decay + written
    ct.store(state, (batch, head, block, 0), new.reshape((1, 1, TILE_P, TILE_N)))
    seen = new.astype(x.dtype).astype(ct.float32) * read.astype(ct.float32)
    total = ct.sum(seen, axis=1, keepdims=True).astype(x.dtype).astype(ct.float32)
    own = (value * skip).astype(ct.float32)
    ct.store(out, (batch, head, block), (total + own).astype(out.dtype).reshape((1, 1, TILE_P)))


_ONE_TOKEN = {warps: _one_token.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


# ---- chunks of tokens -----------------------------------------------------------------------------
# Of a chunk, G are the sums of the logarithms of decays within it. Tokens read out = e^G S C + sum over s <= l of
# (C_l B_s) e^(G_l - G_s) step_s x_s, of the state S before the chunk, which becomes e^G_last S + sum of e^(G_last - G) step x B.
# A sequence is cut into segments of chunks if there are too few heads for the machine. The states that the tokens of each
# segment write are then computed first, and every segment starts from the sum of those before it.
#
# A float32 factor of a product is split into two of bfloat16, so that 16 of its bits count.

CHUNK = 64
TILE_H = 16
MOST_SEGMENTS = 8


@ct.function
def _split(x):
    """Return two tiles of bfloat16 whose sum has 16 bits of x, which is in float32."""
    high = x.astype(ct.bfloat16)
    return high, (x - high.astype(ct.float32)).astype(ct.bfloat16)


@ct.function
def _add_product(high, low, x, acc, SPLIT: Flag):
    """Return acc + (high + low) x in float32; x is bfloat16, or is split too."""
    if SPLIT:
        x_high, x_low = _split(x.astype(ct.float32))
        acc = ct.mma(low, x_high, acc)
        acc = ct.mma(high, x_low, acc)
        acc = ct.mma(high, x_high, acc)
    else:
        acc = ct.mma(low, x, acc)
        acc = ct.mma(high, x, acc)
    return acc


@ct.function
def _add_product_of(x, y, acc, SPLIT: Flag):
    """Return acc + x y in float32 for y in float32; x is bfloat16, or is split too."""
    high, low = _split(y)
    if SPLIT:
        x_high, x_low = _split(x.astype(ct.float32))
        acc = ct.mma(x_low, high, acc)
        acc = ct.mma(x_high, low, acc)
        acc = ct.mma(x_high, high, acc)
    else:
        acc = ct.mma(x, low, acc)
        acc = ct.mma(x, high, acc)
    return acc


@ct.kernel(num_worker_warps=4)
def _steps(
    dt: ct.Array, A: ct.Array, bias: ct.Array, steps: ct.Array, sums: ct.Array, tokens: int, dt_min: float,
):  # fmt: skip
    chunks = ct.cdiv(tokens, CHUNK)
    batch, chunk, block = ct.bid(0) // chunks, ct.bid(0) % chunks, ct.bid(1)
    raw = ct.load(dt, (batch, chunk, block), (1, CHUNK, TILE_H), padding_mode=ZERO).reshape((CHUNK, TILE_H))
    biases = ct.load(bias, (block,), (TILE_H,), padding_mode=ZERO).reshape((1, TILE_H))
    rates = ct.load(A, (block,), (TILE_H,), padding_mode=ZERO).reshape((1, TILE_H))
    step = ct.maximum(_step(raw, biases).astype(ct.float32), dt_min).astype(dt.dtype).astype(ct.float32)
    rows = chunk * CHUNK + ct.arange(CHUNK, dtype=ct.int32)[:, None]
    step = ct.where(rows < tokens, step, 0.0)
    total = ct.cumsum(ct.maximum(step * rates, LEAST), axis=0)
    ct.store(steps, (batch, block, chunk), ct.transpose(step).reshape((1, TILE_H, CHUNK)))
    ct.store(sums, (batch, block, chunk), ct.transpose(total).reshape((1, TILE_H, CHUNK)))


@ct.function
def _add_chunk(state, value, write, step, total, last, SPLIT: Flag):
    """Return the state behind a chunk: e^last state + sum over tokens of e^(last - total) step value write."""
    weight = step * ct.exp(ct.minimum(last - total, 0.0))
    high, low = _split(ct.transpose(value).astype(ct.float32) * weight[None, :])
    return _add_product(high, low, write, state * ct.exp(last), SPLIT)


@ct.kernel
def _write_segments(
    x: Heads, B: Heads, steps: ct.Array, sums: ct.Array, states: Written, left: ct.Array, each: int, segments: int,
    SPLIT: Flag, TILE_P: Int, TILE_N: Int,
):  # fmt: skip
    """Store what the tokens of every segment but the last leave in the state, and the sum of the logarithms of its decays."""
    heads = x.shape[2]
    blocks = ct.cdiv(x.shape[3], TILE_P)
    pair, block, segment = ct.bid(0) // blocks, ct.bid(0) % blocks, ct.bid(1)
    batch, head = pair // heads, pair % heads
    group = head // (heads // B.shape[2])
    state = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)
    whole = ct.zeros((1,), dtype=ct.float32)
    for number in range(each):
        chunk = segment * each + number
        value = ct.load(x, (batch, chunk, head, block), (1, CHUNK, 1, TILE_P), padding_mode=ZERO)
        write = ct.load(B, (batch, chunk, group, 0), (1, CHUNK, 1, TILE_N), padding_mode=ZERO)
        step = ct.load(steps, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))
        total = ct.load(sums, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))
        last = ct.load(sums, (batch, head, chunk * CHUNK + CHUNK - 1), (1, 1, 1)).reshape((1,))
        state = _add_chunk(
            state, value.reshape((CHUNK, TILE_P)), write.reshape((CHUNK, TILE_N)), step, total, last, SPLIT
        )
        whole = whole + last
    part = pair * (segments - 1) + segment
    ct.store(states, (part, block, 0), state.reshape((1, TILE_P, TILE_N)))
    if block == 0:
        ct.store(left, (part,), whole)


@ct.kernel
def _scan_chunks(
    x: Heads, B: Heads, C: Heads, D: ct.Array, steps: ct.Array, sums: ct.Array, initial: States, states: Written,
    left: ct.Array, out: Heads, final: States, each: int, segments: int, SPLIT: Flag, TILE_P: Int, TILE_N: Int,
):  # fmt: skip
    heads, chunks = x.shape[2], ct.cdiv(x.shape[1], CHUNK)
    blocks = ct.cdiv(x.shape[3], TILE_P)
    pair, block, segment = ct.bid(0) // blocks, ct.bid(0) % blocks, ct.bid(1)
    batch, head = pair // heads, pair % heads
    group = head // (heads // B.shape[2])
    skip = ct.load(D, (pair % D.shape[0],), (1,)).astype(ct.float32)  # of each head, or of each row
    rows, cols = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
    nothing = ct.zeros((TILE_P, CHUNK), dtype=ct.float32)
    # 1. The state before the segment. It has a row for each value, and so has all that is made of it.
    state = ct.load(initial, (batch, head, block, 0), (1, 1, TILE_P, TILE_N), padding_mode=ZERO)
    state = state.reshape((TILE_P, TILE_N))
    for before in range(segment):
        part = pair * (segments - 1) + before
        written = ct.load(states, (part, block, 0), (1, TILE_P, TILE_N), padding_mode=ZERO).reshape((TILE_P, TILE_N))
        state = state * ct.exp(ct.load(left, (part,), (1,))) + written
    for chunk in range(segment * each, min(segment * each + each, chunks)):
        value = ct.load(x, (batch, chunk, head, block), (1, CHUNK, 1, TILE_P), padding_mode=ZERO)
        value = value.reshape((CHUNK, TILE_P))
        write = ct.load(B, (batch, chunk, group, 0), (1, CHUNK, 1, TILE_N), padding_mode=ZERO)
        write = write.reshape((CHUNK, TILE_N))
        read = ct.load(C, (batch, chunk, group, 0), (1, CHUNK, 1, TILE_N), padding_mode=ZERO)
        read = ct.transpose(read.reshape((CHUNK, TILE_N)))
        step = ct.load(steps, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))
        total = ct.load(sums, (batch, head, chunk), (1, 1, CHUNK)).reshape((CHUNK,))
        last = ct.load(sums, (batch, head, chunk * CHUNK + CHUNK - 1), (1, 1, 1)).reshape((1,))
        # 2. What tokens read of the state.
        high, low = _split(state)
        found = _add_product(high, low, read, nothing, SPLIT)
        # 3. What they read of the chunk itself, in rows of tokens that write. Their own value is on the diagonal.
        square = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)
        if SPLIT:
            high, low = _split(write.astype(ct.float32))
            pairs = _add_product(high, low, read, square, True)
        else:
            pairs = ct.mma(write, read, square)
        kept = ct.exp(ct.where(rows <= cols, total[None, :] - total[:, None], MINUS_INFINITY))
        pairs = pairs * kept * step[:, None] + ct.where(rows == cols, skip[:, None], 0.0)
        found = _add_product_of(ct.transpose(value), pairs, found * ct.exp(total)[None, :], SPLIT)
        ct.store(out, (batch, chunk, head, block), ct.transpose(found).reshape((1, CHUNK, 1, TILE_P)))
        # 4. The state behind the chunk.
        state = _add_chunk(state, value, write, step, total, last, SPLIT)
    if segment == segments - 1:
        ct.store(final, (batch, head, block, 0), state.reshape((1, 1, TILE_P, TILE_N)))


_SCAN = {warps: _scan_chunks.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_WRITE = {warps: _write_segments.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _chunks(x, dt, A, Bmat, Cmat, D, bias, initial, dt_min, out, final, tokens, count, wanted, warps):
    """Compute what run_chunk() does for the first ``count`` sequences, of tensors that the kernels read in place.

    dt is [sequences, T, H], or [1, T, sequences * H] with A and bias of as many. The tokens behind ``tokens`` do nothing.
    """
    (room, _, H, P), N = x.shape, Bmat.shape[3]
    chunks = -(-tokens // CHUNK)
    tile_p = 64
    rows = count * H * (P // tile_p)
    each = -(-chunks // max(1, min(-(-wanted // rows), MOST_SEGMENTS, chunks // 2)))
    segments = -(-chunks // each)
    warps = warps or (8 if N > 128 else 4)
    split, stream = x.dtype != torch.bfloat16, torch.cuda.current_stream()
    steps = torch.empty((dt.shape[0], dt.shape[2], chunks * CHUNK), dtype=torch.float32, device=x.device)
    sums = torch.empty_like(steps)
    parts = rounded(max(1, count * H * (segments - 1)))
    states = torch.empty((parts, P, N), dtype=torch.float32, device=x.device)
    left = torch.empty((parts,), dtype=torch.float32, device=x.device)
    args = (dt, A, bias, steps, sums, tokens, dt_min)
    ct.launch(stream, (dt.shape[0] * chunks, -(-dt.shape[2] // TILE_H), 1), _steps, args)
    steps, sums = steps.view(room, H, -1), sums.view(room, H, -1)
    if segments > 1:
        args = (x, Bmat, steps, sums, states, left, each, segments, split, tile_p, N)
        ct.launch(stream, (rows, segments - 1, 1), _WRITE[warps], args)
    args = (x, Bmat, Cmat, D, steps, sums, initial, states, left, out, final, each, segments, split, tile_p, N)
    ct.launch(stream, (rows, segments, 1), _SCAN[warps], args)


# ---- other sizes and layouts ----------------------------------------------------------------------
# cuTile compiles a kernel for each set of divisible sizes, strides and addresses, and one of chunks takes seconds. They know the
# heads of models in aligned rows of bfloat16. All else is first moved to rows of whole chunks, each of one head and 64 of its
# values. Zeros behind values and directions change nothing.

HIGH = 64
MOVED_AT_ONCE = 1 << 27
"""Numbers of the largest tensor that is moved at once."""


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
    TILE_P=None,
    WARPS=4,
):
    """Compute state = exp(step A) state + step x Bmat, in place, and out = state Cmat + D x for one token.

    Shapes: state [B, H, P, N], x and out [B, H, P], dt [B, H], Bmat, Cmat [B, G, N], A, D, dt_bias [H]; unit last strides.
    Mapping: a block owns TILE_P rows of the state of one head, which it reads and writes once.
    TILE_P = None: 4096 numbers of the state, or 1024 if an H200 would have fewer blocks than places for them.
    Tensors of bfloat16 with P of 64 or 128, N of 64, 128 or 256 and aligned rows are read in place; others are moved, some heads
    at once.
    """
    B, H, P, N = state.shape
    if state.numel() == 0:
        return
    numbers = 4096 if state.numel() >= 4096 * 132 * 4 else 1024

    def compute(state, x, dt, A, Bmat, Cmat, D, bias, out, count):
        _, heads, high, deep = state.shape
        tile_p = min(TILE_P or max(1, numbers // deep), high)
        args = (state, x, dt, A, Bmat, Cmat, D, bias, out, tile_p, deep)
        ct.launch(torch.cuda.current_stream(), (count * heads, high // tile_p, 1), _ONE_TOKEN[WARPS], args)

    is_usual = x.dtype == torch.bfloat16 and P in (64, 128) and N in (64, 128, 256)
    if is_usual and all(map(is_aligned, (state, x, Bmat, Cmat, out))):
        compute(state, x, dt, A, Bmat, Cmat, D, dt_bias, out, B)
        return
    blocks, deep = -(-P // HIGH), 128 if N <= 128 else -(-N // 256) * 256
    every = B * H * blocks
    at_once = max(1, MOVED_AT_ONCE // (HIGH * deep))
    for first in range(0, every, at_once):
        count = min(at_once, every - first)
        room = rounded(count)
        like = {"dtype": x.dtype, "device": x.device}
        states = torch.empty((room, HIGH, deep), dtype=state.dtype, device=x.device)
        values, found = torch.empty((2, room, 1, HIGH), **like)
        writes, reads = torch.empty((2, room, 1, deep), **like)
        raw, skips, biases = torch.empty((3, room, 1, 1), **like)
        rates = torch.empty((room, 1, 1), dtype=torch.float32, device=x.device)
        place = count, first, H, blocks
        move_rows(state.transpose(1, 2), states, *place, skip_t=HIGH)
        move_rows(x[:, None], values, *place, skip_c=HIGH)
        move_rows(Bmat[:, None], writes, *place)
        move_rows(Cmat[:, None], reads, *place)
        move_rows(dt[:, None, :, None], raw, *place)
        for of_heads, of_rows in ((A, rates), (D, skips), (dt_bias, biases)):
            move_rows(of_heads.expand(B, 1, H)[..., None], of_rows, *place)
        compute(
            states[:, None], values, raw[..., 0], rates.view(room), writes, reads, skips.view(room), biases.view(room), found,
            count,
        )  # fmt: skip
        move_rows(state.transpose(1, 2), states, *place, skip_t=HIGH, into=False)
        move_rows(out[:, None], found, *place, skip_c=HIGH, into=False)


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
    BLOCKS=264,
    WARPS=None,
):
    """Compute S = exp(step A) S + step x Bmat and out = S Cmat + D x for T tokens one after the other.

    Shapes: x, out [B, T, H, P], dt [B, T, H], Bmat, Cmat [B, T, G, N], A, D, dt_bias [H], states [B, H, P, N]; unit last
    strides. Sums, decays and the state are in float32.
    Mapping: steps and sums of their decays first. Then a block owns 64 rows of a head's state and goes through the chunks of a
    segment. Segments are as many as give BLOCKS blocks, and at most eight. WARPS = None: 4, or 8 if N > 128.
    Tensors of bfloat16 with P of 64 or 128, N of 64, 128 or 256 and aligned rows are read in place; others are moved first, some
    heads at once.
    """
    B, T, H, P = x.shape
    N = Bmat.shape[3]
    if final_state.numel() == 0:
        return
    is_usual = x.dtype == torch.bfloat16 and P in (64, 128) and N in (64, 128, 256)
    if is_usual and all(map(is_aligned, (x, Bmat, Cmat, initial_state, out, final_state))):
        _chunks(x, dt, A, Bmat, Cmat, D, dt_bias, initial_state, dt_min, out, final_state, T, B, BLOCKS, WARPS)
        return
    blocks, tokens, deep = -(-P // HIGH), -(-T // CHUNK) * CHUNK, 128 if N <= 128 else -(-N // 256) * 256
    every = B * H * blocks
    at_once = max(1, MOVED_AT_ONCE // (max(tokens, HIGH) * deep))
    for first in range(0, every, at_once):
        count = min(at_once, every - first)
        room = rounded(count)
        like = {"dtype": x.dtype, "device": x.device}
        exact = {"dtype": torch.float32, "device": x.device}
        values = torch.empty((room, tokens, HIGH), **like)
        found = torch.empty((room, tokens, HIGH), dtype=out.dtype, device=x.device)
        writes, reads = torch.empty((2, room, tokens, deep), **like)
        before, behind = torch.empty((2, room, HIGH, deep), **exact)
        raw, rates = torch.empty((tokens, room), **like), torch.empty(room, **exact)
        skips, biases = torch.empty((2, room), **like)
        place = count, first, H, blocks
        move_rows(x, values, *place, skip_c=HIGH)
        move_rows(Bmat, writes, *place)
        move_rows(Cmat, reads, *place)
        move_rows(initial_state.transpose(1, 2), before, *place, skip_t=HIGH)
        move_rows(dt[..., None], raw.t()[..., None], *place)
        for of_heads, of_rows in ((A, rates), (D, skips), (dt_bias, biases)):
            move_rows(of_heads.expand(B, 1, H)[..., None], of_rows[:, None, None], *place)
        _chunks(
            values[:, :, None], raw[None], rates, writes[:, :, None], reads[:, :, None], skips, biases, before[:, None], dt_min,
            found[:, :, None], behind[:, None], T, count, BLOCKS, WARPS,
        )  # fmt: skip
        move_rows(out, found, *place, skip_c=HIGH, into=False)
        move_rows(final_state.transpose(1, 2), behind, *place, skip_t=HIGH, into=False)

"""The state-space layer of Mamba-2 over a sequence, Triton: chunks of tokens with the state in registers between them."""

import torch
import triton
import triton.language as tl

# Of a chunk, G are the sums of the logarithms of decays within it. Tokens read out = e^G S C + sum over s <= l of
# (C_l B_s) e^(G_l - G_s) step_s x_s, of the state S before the chunk, which becomes e^G_last S + sum of e^(G_last - G) step x B.
# A sequence is cut into segments of chunks if there are too few heads for the machine. The states that the tokens of each
# segment write are then computed first, and every segment starts from the sum of those before it.
#
# Products are of 16 bits. A float32 factor is split into two of bfloat16, so that 16 of its bits count: bfloat16 alone would
# leave results that are no better than bfloat16. Values and directions of bfloat16 enter as they are.
#
# The kernels of chunks know aligned rows of whole tiles only. What a caller passes in other sizes, strides or dtypes is first
# moved to such rows, so that few variants of the large kernels are compiled.

CHUNK = tl.constexpr(64)
BLOCK_P = tl.constexpr(64)
HEADS = 16
"""Heads of a program that computes steps; their numbers lie side by side."""
MOST_SEGMENTS = 8
MOST_MOVED = 1 << 28
"""Elements of the largest tensors that are moved at once. Whole tiles may be much larger than the sizes of a caller."""
MOST_APART = (1 << 23) - 1
"""Elements between the rows of a tile, of which there are up to 256."""
UNIT_16, UNIT_32 = tl.constexpr(8), tl.constexpr(4)
"""Elements of 2 and of 4 bytes in 16 bytes. Strides are passed in these, so that the compiler knows of their alignment."""

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


@triton.jit(do_not_specialize=["dt_ptr", "A_ptr", "D_ptr", "bias_ptr", "dt_b", "dt_t", "T", "H", "chunks"])
def _steps(
    dt_ptr, A_ptr, D_ptr, bias_ptr, step_ptr, sum_ptr, skip_ptr, dt_b, dt_t, T, H, chunks, dt_min, HEADS: tl.constexpr,
):  # fmt: skip
    """Store steps and sums [B, H, chunks * CHUNK], and D in float32."""
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
    if tl.program_id(0) == 0:
        tl.store(skip_ptr + heads, tl.load(D_ptr + heads, mask=in_head, other=0.0).to(tl.float32), mask=in_head)


# ---- rows of whole tiles --------------------------------------------------------------------------


@triton.jit
def _split(x):
    """x in float32 -> two of bfloat16 whose sum has 16 of its bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


_MOVED = [
    *("from_0", "from_1", "from_2", "from_3", "to_0", "to_1", "to_2"),
    *("rows", "size_1", "size_2", "inside_2", "size_3", "inside_3", "low"),
]


@triton.jit(do_not_specialize=["from_ptr", "to_ptr", *_MOVED])
def _move(
    from_ptr, to_ptr, from_0, from_1, from_2, from_3, to_0, to_1, to_2, low,
    rows, size_1, size_2, inside_2, size_3, inside_3,
    PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy four dimensions, with zeros behind inside_2 and inside_3; of two parts, the second one lies ``low`` units further."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    i_2, i_1, i_0 = row % size_2, row // size_2 % size_1, row // size_2 // size_1
    in_row = row < rows
    from_rows = i_0 * from_0 + i_1 * from_1 + i_2 * from_2
    from_ptrs = from_ptr + from_rows[:, None] + col.to(tl.int64)[None, :] * from_3
    inside = (in_row & (i_2 < inside_2))[:, None] & (col < inside_3)[None, :]
    x = tl.load(from_ptrs, mask=inside, other=0.0)
    to_ptrs = to_ptr + (i_0 * to_0 + i_1 * to_1 + i_2 * to_2)[:, None] + col[None, :]
    stored = in_row[:, None] & (col < size_3)[None, :]
    if PARTS == 2:
        high, rest = _split(x.to(tl.float32))
        tl.store(to_ptrs, high, mask=stored)
        tl.store(to_ptrs + low * tl.cast(UNIT_16, tl.int64), rest, mask=stored)
    else:
        tl.store(to_ptrs, x, mask=stored)


def _move_rows(source, target, parts=1):
    """Copy a tensor of four dimensions into one that is as large in the first two, or into its ``parts`` parts.

    Where the target is larger, it becomes zero; where it is smaller, it takes what it has room for.
    """
    if source.dtype == torch.float32 and parts == 1:
        # Both have unit last strides. Numbers are copied in halves: one kernel less to compile.
        source, target = source.view(torch.bfloat16), target.view(torch.bfloat16)
    whole = target[0] if parts == 2 else target
    low = whole.numel() // UNIT_16.value if parts == 2 else 0
    rows = whole.shape[0] * whole.shape[1] * whole.shape[2]
    _move[(triton.cdiv(rows, 32), triton.cdiv(whole.shape[3], 64))](
        source, target, *source.stride(), *whole.stride()[:3], low,
        rows, *whole.shape[1:3], source.shape[2], whole.shape[3], source.shape[3],
        parts, 32, 64, num_warps=4,
    )  # fmt: skip


def _is_aligned(x, dimension, across):
    """Return True if rows along a dimension begin at multiples of 16 bytes and their elements lie side by side.

    ``across`` is the other dimension of a tile, whose offsets are of 32 bits.
    """
    unit = 16 // x.element_size()
    if x.stride(across) > MOST_APART:
        return False
    others = [place for place, size in enumerate(x.shape) if place != dimension and size > 1]
    is_packed = x.stride(dimension) == 1 and x.data_ptr() % 16 == 0
    return is_packed and all(x.stride(place) % unit == 0 for place in others)


# ---- chunks of tokens -----------------------------------------------------------------------------


@triton.jit
def _load_tile(ptr, low, offsets, here, PARTS: tl.constexpr):
    """Return a tile and its second part, which is the tile itself if there is one part only."""
    x = tl.load(ptr + offsets, mask=here, other=0.0)
    rest = x
    if PARTS == 2:
        rest = tl.load(ptr + low * tl.cast(UNIT_16, tl.int64) + offsets, mask=here, other=0.0)
    return x, rest


@triton.jit
def _add_product(high, low, x, rest, acc, PARTS: tl.constexpr):
    """Return acc + (high + low) (x + rest) in float32, without the product of the two small parts."""
    acc = tl.dot(low, x, acc)
    if PARTS == 2:
        acc = tl.dot(high, rest, acc)
    return tl.dot(high, x, acc)


@triton.jit
def _add_product_of(x, rest, y, acc, PARTS: tl.constexpr):
    """Return acc + (x + rest) y in float32 for y in float32."""
    high, low = _split(y)
    acc = tl.dot(x, low, acc)
    if PARTS == 2:
        acc = tl.dot(rest, high, acc)
    return tl.dot(x, high, acc)


@triton.jit
def _add_chunk(state, x, x_rest, write, write_rest, step, total, last, PARTS: tl.constexpr):
    """Return the state behind a chunk: e^last state + sum over tokens of e^(last - total) step x write, x [values, tokens]."""
    weight = step * tl.exp(tl.minimum(last - total, 0.0))
    value = x.to(tl.float32)
    if PARTS == 2:
        value += x_rest.to(tl.float32)
    high, low = _split(value * weight[None, :])
    return _add_product(high, low, write, write_rest, state * tl.exp(last), PARTS)


@triton.jit
def _tile_offsets(rows, cols, stride, CHANNELS: tl.constexpr):
    """Return offsets [tokens, columns]; one of the two dimensions has unit stride, the other one the stride given."""
    if CHANNELS:
        return rows[:, None] + cols[None, :] * (stride * UNIT_16)
    return rows[:, None] * (stride * UNIT_16) + cols[None, :]


@triton.jit
def _column_offsets(rows, cols, stride, CHANNELS: tl.constexpr):
    """Return offsets [columns, tokens]: a tile that is transposed after it was loaded is multiplied wrongly (Triton 3.6)."""
    if CHANNELS:
        return cols[:, None] * (stride * UNIT_16) + rows[None, :]
    return cols[:, None] + rows[None, :] * (stride * UNIT_16)


@triton.jit
def _rows_of_chunk(ptr, stride, CHANNELS: tl.constexpr):
    """Return the pointer one chunk further."""
    if CHANNELS:
        return ptr + CHUNK
    return ptr + CHUNK * UNIT_16 * tl.cast(stride, tl.int64)


@triton.jit(do_not_specialize=["x_b", "x_r", "x_h", "B_b", "B_r", "B_g", "H", "group", "blocks", "chunks", "each"])
def _write_segments(
    x_ptr, B_ptr, step_ptr, sum_ptr, states_ptr, left_ptr,
    x_b, x_r, x_h, B_b, B_r, B_g,
    H, group, blocks, chunks, each,
    BLOCK_N: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store what the tokens of every segment but the last leave in the state, and the sum of the logarithms of its decays."""
    pair = tl.program_id(0) // blocks  # of a sequence and a head
    block = tl.program_id(0) % blocks
    segment = tl.program_id(1)
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    rows, depth, cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    first = (segment * each).to(tl.int64)
    x_ptr += (batch * x_b + head * x_h) * UNIT_16
    B_ptr += (batch * B_b + head // group * B_g) * UNIT_16
    if CHANNELS:
        x_ptr += first * CHUNK + (block * BLOCK_P).to(tl.int64) * x_r * UNIT_16
        B_ptr += first * CHUNK
    else:
        x_ptr += first * CHUNK * x_r * UNIT_16 + block * BLOCK_P
        B_ptr += first * CHUNK * B_r * UNIT_16
    x_offsets = _column_offsets(rows, cols, x_r, CHANNELS)
    B_offsets = _tile_offsets(rows, depth, B_r, CHANNELS)
    place = (pair.to(tl.int64) * chunks + first) * CHUNK
    step_ptr += place
    sum_ptr += place
    state = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    whole = 0.0
    for _ in tl.range(0, each, num_stages=STAGES):  # every segment but the last has all of its chunks, and all tokens
        x = tl.load(x_ptr + x_offsets)
        write = tl.load(B_ptr + B_offsets)
        step, total = tl.load(step_ptr + rows), tl.load(sum_ptr + rows)
        last = tl.load(sum_ptr + CHUNK - 1)
        state = _add_chunk(state, x, x, write, write, step, total, last, 1)
        whole += last
        x_ptr = _rows_of_chunk(x_ptr, x_r, CHANNELS)
        B_ptr = _rows_of_chunk(B_ptr, B_r, CHANNELS)
        step_ptr += CHUNK
        sum_ptr += CHUNK
    part = pair.to(tl.int64) * tl.num_programs(1) + segment
    if block == 0:
        tl.store(left_ptr + part, whole)
    states_ptr += ((part * blocks + block) * BLOCK_P) * BLOCK_N
    tl.store(states_ptr + cols[:, None] * BLOCK_N + depth[None, :], state)


_STRIDES = [
    *("x_b", "x_r", "x_h", "B_b", "B_r", "B_g", "C_b", "C_r", "C_g"),
    *("initial_b", "initial_h", "initial_p", "out_b", "out_t", "out_h", "final_b", "final_h", "final_p"),
]


_SIZES = ["x_low", "B_low", "C_low", "T", "H", "group", "blocks", "chunks", "each", "segments"]


@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES])
def _scan_chunks(
    x_ptr, B_ptr, C_ptr, skip_ptr, step_ptr, sum_ptr, initial_ptr, states_ptr, left_ptr, out_ptr, final_ptr,
    x_b, x_r, x_h, B_b, B_r, B_g, C_b, C_r, C_g,
    initial_b, initial_h, initial_p, out_b, out_t, out_h, final_b, final_h, final_p,
    x_low, B_low, C_low, T, H, group, blocks, chunks, each, segments,
    BLOCK_N: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) // blocks  # of a sequence and a head
    block = tl.program_id(0) % blocks
    segment = tl.program_id(1)
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    rows, depth, cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    first = segment * each
    token = (first * CHUNK).to(tl.int64)
    left_rows = T - first * CHUNK
    if CHANNELS:
        left_rows = T * UNIT_16 - first * CHUNK
    # Pointers move to each chunk, so that threads keep offsets of 32 bits only.
    x_ptr += (batch * x_b + head * x_h) * UNIT_16
    B_ptr += (batch * B_b + head // group * B_g) * UNIT_16
    C_ptr += (batch * C_b + head // group * C_g) * UNIT_16
    if CHANNELS:
        x_ptr += token + (block * BLOCK_P).to(tl.int64) * x_r * UNIT_16
        B_ptr += token
        C_ptr += token
    else:
        x_ptr += token * x_r * UNIT_16 + block * BLOCK_P
        B_ptr += token * B_r * UNIT_16
        C_ptr += token * C_r * UNIT_16
    out_ptr += (batch * out_b + head * out_h + token * out_t) * UNIT_32 + block * BLOCK_P
    x_offsets = _column_offsets(rows, cols, x_r, CHANNELS)
    B_offsets = _tile_offsets(rows, depth, B_r, CHANNELS)
    C_offsets = _column_offsets(rows, depth, C_r, CHANNELS)
    out_offsets = rows[:, None] * (out_t * UNIT_32) + cols[None, :]
    place = (pair.to(tl.int64) * chunks + first) * CHUNK
    step_ptr += place
    sum_ptr += place
    skip = tl.load(skip_ptr + head)
    # 1. The state before the segment. It has a row for each value, and so has all that is made of it.
    initial_ptr += (batch * initial_b + head * initial_h + (block * BLOCK_P).to(tl.int64) * initial_p) * UNIT_32
    state = tl.load(initial_ptr + cols[:, None] * (initial_p * UNIT_32) + depth[None, :])
    part = pair.to(tl.int64) * (segments - 1)
    states_ptr += ((part * blocks + block) * BLOCK_P) * BLOCK_N
    for _ in tl.range(0, segment):
        left = tl.exp(tl.load(left_ptr + part))
        state = state * left + tl.load(states_ptr + cols[:, None] * BLOCK_N + depth[None, :])
        states_ptr += blocks * BLOCK_P * BLOCK_N
        part += 1
    count = tl.minimum(each, chunks - first)
    for _ in tl.range(0, count, num_stages=STAGES):
        # Values and what is read have a column for each token.
        here = rows < left_rows
        x, x_rest = _load_tile(x_ptr, x_low, x_offsets, here[None, :], PARTS)
        write, write_rest = _load_tile(B_ptr, B_low, B_offsets, here[:, None], PARTS)
        read, read_rest = _load_tile(C_ptr, C_low, C_offsets, here[None, :], PARTS)
        step, total = tl.load(step_ptr + rows), tl.load(sum_ptr + rows)
        last = tl.load(sum_ptr + CHUNK - 1)
        # 2. What tokens read of the state.
        high, low = _split(state)
        nothing = tl.zeros([BLOCK_P, CHUNK], dtype=tl.float32)
        out = _add_product(high, low, read, read_rest, nothing, PARTS)
        # 3. What they read of the chunk itself, in rows of tokens that write. Their own value is on the diagonal.
        pairs = tl.dot(write, read)
        if PARTS == 2:
            pairs = tl.dot(write, read_rest, tl.dot(write_rest, read, pairs))
        left = tl.exp(tl.where(rows[:, None] <= rows[None, :], total[None, :] - total[:, None], float("-inf")))
        pairs = pairs * left * step[:, None] + tl.where(rows[:, None] == rows[None, :], skip, 0.0)
        out = _add_product_of(x, x_rest, pairs, out * tl.exp(total)[None, :], PARTS)
        tl.store(out_ptr + out_offsets, tl.trans(out), mask=here[:, None])
        # 4. The state behind the chunk.
        state = _add_chunk(state, x, x_rest, write, write_rest, step, total, last, PARTS)
        left_rows -= CHUNK
        x_ptr = _rows_of_chunk(x_ptr, x_r, CHANNELS)
        B_ptr = _rows_of_chunk(B_ptr, B_r, CHANNELS)
        C_ptr = _rows_of_chunk(C_ptr, C_r, CHANNELS)
        out_ptr += CHUNK * UNIT_32 * tl.cast(out_t, tl.int64)
        step_ptr += CHUNK
        sum_ptr += CHUNK
    if segment == segments - 1:
        final_ptr += (batch * final_b + head * final_h + (block * BLOCK_P).to(tl.int64) * final_p) * UNIT_32
        tl.store(final_ptr + cols[:, None] * (final_p * UNIT_32) + depth[None, :], state)


def _in_units(x, dimensions, unit):
    return [x.stride(dimension) // unit.value for dimension in dimensions]


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
    PROGRAMS=264,
    num_stages=2,
    num_warps=None,
):
    """Compute S = exp(step A) S + step x Bmat and out = S Cmat + D x for T tokens one after the other.

    Shapes: x [B, T, H, P] and Bmat, Cmat [B, T, G, N] of any strides; out [B, T, H, P], dt [B, T, H], A, D, dt_bias [H] and
    states [B, H, P, N] with unit last strides. Sums, decays and the state are in float32.
    Mapping: steps and sums of their decays first. Then a program owns 64 rows of a head's state and goes through the
    chunks of a segment. Segments are as many as give PROGRAMS programs, and at most eight.
    Tensors of P in 64s, N of 64, 128 or 256 and aligned rows (or, all three, columns) of bfloat16 are read in place; others
    are moved first.
    num_warps = None: four, or eight if N > 128.
    """
    B, T, H, P = x.shape
    N = Bmat.shape[3]
    if final_state.numel() == 0:
        return
    is_wide = x.dtype != torch.bfloat16
    block_n = 256 if is_wide or N > 128 else 128 if N > 64 else 64
    channels = triton.cdiv(P, BLOCK_P.value) * BLOCK_P.value
    is_moved = is_wide or channels > P or block_n > N
    at_once = max(1, MOST_MOVED // (H * channels * max(block_n, T))) if is_moved else B
    for first in range(0, B, at_once):
        some = slice(first, first + at_once)
        _scan(
            x[some], dt[some], A, Bmat[some], Cmat[some], D, dt_bias, initial_state[some], dt_min, out[some],
            final_state[some], block_n, PROGRAMS, num_stages, num_warps,
        )  # fmt: skip


def _scan(
    x, dt, A, Bmat, Cmat, D, dt_bias, initial_state, dt_min, out, final_state, block_n, PROGRAMS, num_stages, num_warps
):
    B, T, H, P = x.shape
    G, N = Bmat.shape[2:]
    is_wide = x.dtype != torch.bfloat16
    blocks = triton.cdiv(P, BLOCK_P.value)
    sizes = blocks * BLOCK_P.value, block_n, block_n
    is_padded = sizes[0] > P or block_n > N
    chunks = triton.cdiv(T, CHUNK.value)
    pairs = B * H

    # 1. Steps, and what has to be moved.
    steps = torch.empty(pairs * chunks * CHUNK.value, dtype=torch.float32, device=x.device)
    sums = torch.empty_like(steps)
    skips = torch.empty(H, dtype=torch.float32, device=x.device)
    _steps[(B * chunks, triton.cdiv(H, HEADS))](
        dt, A, D, dt_bias, steps, sums, skips, *dt.stride()[:2], T, H, chunks, dt_min, HEADS, num_warps=4
    )
    values = x, Bmat, Cmat
    is_whole = [not is_wide and tensor.shape[3] == size for tensor, size in zip(values, sizes, strict=True)]
    in_columns = T % UNIT_16.value == 0 and all(
        whole and _is_aligned(tensor, 1, 3) for tensor, whole in zip(values, is_whole, strict=True)
    )
    rows, lows = [], []
    for tensor, whole, size in zip(values, is_whole, sizes, strict=True):
        if not in_columns and not (whole and _is_aligned(tensor, 3, 1)):
            parts = 2 if is_wide else 1
            shape = (*tensor.shape[:3], size)
            moved = torch.empty((2, *shape) if is_wide else shape, dtype=torch.bfloat16, device=x.device)
            _move_rows(tensor, moved, parts)
            tensor = moved[0] if is_wide else moved
        rows.append(tensor)
        lows.append(tensor.numel() // UNIT_16.value)
    initial, result, final = initial_state, out, final_state
    if is_padded or not _is_aligned(initial, 3, 2):
        initial = torch.empty(B, H, *sizes[:2], dtype=torch.float32, device=x.device)
        _move_rows(initial_state, initial)
    if sizes[0] > P or not _is_aligned(out, 3, 1):
        result = torch.empty(B, T, H, sizes[0], dtype=torch.float32, device=x.device)
    if is_padded or not _is_aligned(final_state, 3, 2):
        final = torch.empty(B, H, *sizes[:2], dtype=torch.float32, device=x.device)

    # 2. Segments, of which the two parts of wider inputs have one: few models need it, and it is one kernel less to compile.
    limit = 1 if is_wide else min(triton.cdiv(PROGRAMS, pairs * blocks), MOST_SEGMENTS, chunks // 2)
    each = triton.cdiv(chunks, max(1, limit))
    segments = triton.cdiv(chunks, each)
    stages = num_stages if block_n <= 128 else 1  # wide states need the memory
    warps = num_warps or (8 if block_n > 128 else 4)
    parts = pairs * (segments - 1)
    states = torch.empty(parts * sizes[0] * block_n, dtype=torch.float32, device=x.device)
    left = torch.empty(parts, dtype=torch.float32, device=x.device)
    order = (0, 3, 2) if in_columns else (0, 1, 2)
    strides = [_in_units(tensor, order, UNIT_16) for tensor in rows]
    if segments > 1:
        _write_segments[(pairs * blocks, segments - 1)](
            *rows[:2], steps, sums, states, left, *strides[0], *strides[1],
            H, H // G, blocks, chunks, each, block_n, in_columns, stages,
            num_warps=warps,
        )  # fmt: skip
    _scan_chunks[(pairs * blocks, segments)](
        *rows, skips, steps, sums, initial, states, left, result, final, *strides[0], *strides[1], *strides[2],
        *_in_units(initial, range(3), UNIT_32), *_in_units(result, range(3), UNIT_32), *_in_units(final, range(3), UNIT_32),
        *lows, T // UNIT_16.value if in_columns else T, H, H // G, blocks, chunks, each, segments,
        block_n, in_columns, 2 if is_wide else 1, stages,
        num_warps=warps,
    )  # fmt: skip

    # 3. Results to where the caller wants them.
    if result is not out:
        _move_rows(result, out)
    if final is not final_state:
        _move_rows(final, final_state)

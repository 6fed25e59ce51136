"""The state-space layer of Mamba-2, TileLang: one token in place, or chunks of tokens with the state in registers."""

import functools

import tilelang
import tilelang.language as T
import torch

# ---- steps ----------------------------------------------------------------------------------------

LEAST = -87.0
"""Smallest logarithm of a decay: exp of it is the smallest normal number, and sums of it keep their digits."""
UPWARDS = 1.0 + 2.0**-22
"""Factor on softplus. The result for -0.0152587890625 lies 2e-8 above a rounding to bfloat16, and no other within 3e-7."""


def rounded(x, dtype):
    """Round to a dtype and widen again."""
    return T.cast(T.cast(x, dtype), "float32")


def step_of(dt, bias, dtype):
    """Return softplus(dt + bias) in float32, rounded to a dtype after the sum and at the end.

    log(1 + e) for e in [0, 1] is 2 atanh(s) by its series, s = e / (2 + e).
    """
    x = rounded(T.cast(dt, "float32") + T.cast(bias, "float32"), dtype)
    e = T.exp(-T.abs(x))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    softplus = T.max(x, 0.0) + 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))
    return rounded(T.if_then_else(x > 20.0, x, softplus * UPWARDS), dtype)


# ---- one token ------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def update_kernel(sizes, dtype, rows, columns, threads, aligned):
    """Compile for states of `sizes` P and N, or of any. `aligned`: rows begin at 16 bytes, and blocks of rows fill them."""
    P, N = sizes or T.dynamic("P N")
    B, H, G = T.dynamic("B H G")
    s_b, s_h, s_p, x_b, x_h, dt_b = T.dynamic("s_b s_h s_p x_b x_h dt_b", "int64")
    w_b, w_g, r_b, r_g, out_b, out_h = T.dynamic("w_b w_g r_b r_g out_b out_h", "int64")

    @T.prim_func
    def update(
        state: T.StridedTensor((B, H, P, N), (s_b, s_h, s_p, 1), "float32"),
        x: T.StridedTensor((B, H, P), (x_b, x_h, 1), dtype),
        dt: T.StridedTensor((B, H), (dt_b, 1), dtype),
        A: T.Tensor((H,), "float32"),
        write: T.StridedTensor((B, G, N), (w_b, w_g, 1), dtype),
        read: T.StridedTensor((B, G, N), (r_b, r_g, 1), dtype),
        D: T.Tensor((H,), dtype),
        bias: T.Tensor((H,), dtype),
        out: T.StridedTensor((B, H, P), (out_b, out_h, 1), dtype),
    ):
        with T.Kernel(B * H, T.ceildiv(P, rows), threads=threads) as (pair, block):
            if aligned:
                T.assume(s_b % 4 == 0)
                T.assume(s_h % 4 == 0)
                T.assume(s_p % 4 == 0)
            tile = T.alloc_fragment((rows, columns), "float32")
            seen = T.alloc_fragment((rows, columns), "float32")
            total = T.alloc_fragment((rows,), "float32")
            values = T.alloc_shared((rows,), "float32")
            writes = T.alloc_shared((columns,), "float32")
            reads = T.alloc_shared((columns,), "float32")
            batch = T.truncdiv(pair, H)
            head = T.truncmod(pair, H)
            group = T.truncdiv(head, T.truncdiv(H, G))
            first = block * rows

            # 1. The state is on its way while the rest is read.
            if aligned:
                for i, j in T.Parallel(rows, columns):
                    tile[i, j] = state[batch, head, first + i, j]
            else:
                for i, j in T.Parallel(rows, columns):
                    tile[i, j] = T.if_then_else(first + i < P and j < N, state[batch, head, first + i, j], 0.0)
            step = T.alloc_var("float32")
            step = step_of(dt[batch, head], bias[head], dtype)
            decay = T.alloc_var("float32")
            decay = T.exp(step * A[head])
            for i in T.Parallel(rows):
                values[i] = T.if_then_else(first + i < P, T.cast(x[batch, head, first + i], "float32"), 0.0)
            for j in T.Parallel(columns):
                writes[j] = T.if_then_else(j < N, rounded(step * T.cast(write[batch, group, j], "float32"), dtype), 0.0)
                reads[j] = T.if_then_else(j < N, T.cast(read[batch, group, j], "float32"), 0.0)

            # 2. The new state, and what is read of it; the model rounds each of these to its dtype.
            for i, j in T.Parallel(rows, columns):
                tile[i, j] = tile[i, j] * decay + rounded(values[i] * writes[j], dtype)
            for i, j in T.Parallel(rows, columns):
                seen[i, j] = rounded(tile[i, j], dtype) * reads[j]
            T.reduce_sum(seen, total, dim=1)
            if aligned:
                for i, j in T.Parallel(rows, columns):
                    state[batch, head, first + i, j] = tile[i, j]
            else:
                for i, j in T.Parallel(rows, columns):
                    if first + i < P and j < N:
                        state[batch, head, first + i, j] = tile[i, j]
            for i in T.Parallel(rows):
                if first + i < P:
                    out[batch, head, first + i] = T.cast(
                        rounded(total[i], dtype) + rounded(values[i] * T.cast(D[head], "float32"), dtype), dtype
                    )

    return update


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
    rows=None,
    threads=128,
):
    """Compute state = exp(step A) state + step x Bmat, in place, and out = state Cmat + D x for one token.

    Shapes: state [B, H, P, N], x and out [B, H, P], dt [B, H], Bmat, Cmat [B, G, N], A, D, dt_bias [H]; unit last strides.
    Mapping: a CTA owns some rows of the state of one head, which it reads and writes once.
    rows = None: 4096 numbers of the state, or 1024 if an H200 would have fewer CTAs than places for them.
    """
    P, N = state.shape[2:]
    if state.numel() == 0:
        return
    columns = max(16, 1 << (N - 1).bit_length())
    numbers = 4096 if state.numel() >= 4096 * 132 * 4 else 1024
    tall = rows or min(64, 1 << (P - 1).bit_length(), max(4, numbers // columns))
    aligned = N in (64, 128, 256) and P in (64, 128) and P % tall == 0
    aligned = aligned and all(step % 4 == 0 for step in (state.storage_offset(), *state.stride()[:3]))
    if not aligned:  # One kernel for many sizes: a compilation takes seconds.
        columns = max(columns, 64)
        tall = 1024 // columns
    sizes = (P, N) if aligned else None
    update_kernel(sizes, x.dtype, tall, columns, threads, aligned)(state, x, dt, A, Bmat, Cmat, D, dt_bias, out)


# ---- chunks of tokens -----------------------------------------------------------------------------
# Of a chunk, G are the sums of the logarithms of decays within it. Tokens read out = e^G S C + sum over s <= l of
# (C_l B_s) e^(G_l - G_s) step_s x_s, of the state S before the chunk, which becomes e^G_last S + sum of e^(G_last - G) step x B.
# A sequence is cut into segments of chunks if there are too few heads for the machine. The states that the tokens of each
# segment write are then computed first, and every segment starts from the sum of those before it.
#
# A float32 factor of a product is split into two of bfloat16, so that 16 of its bits count.

CHUNK = 64
HEADS = 16
MOST_SEGMENTS = 8
# No TMA: TileLang's own schedule for it may wait forever (docs/how-to/write-a-kernel.md).
CHUNK_FLAGS = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True}


@T.macro
def split(wide, high, low, rows, columns):
    """Make two tiles of bfloat16 whose sum has 16 bits of `wide`, which is in float32."""
    for i, j in T.Parallel(rows, columns):
        high[i, j] = T.cast(wide[i, j], "bfloat16")
    for i, j in T.Parallel(rows, columns):
        low[i, j] = T.cast(wide[i, j] - T.cast(high[i, j], "float32"), "bfloat16")


@functools.cache
@tilelang.jit(pass_configs=CHUNK_FLAGS)
def steps_kernel():
    """Compile the steps of chunks, and the sums of the logarithms of their decays."""
    B, N, H, padded = T.dynamic("B N H padded")
    dt_b, dt_t = T.dynamic("dt_b dt_t", "int64")
    dtype = "bfloat16"

    @T.prim_func
    def make_steps(
        dt: T.StridedTensor((B, N, H), (dt_b, dt_t, 1), dtype),
        A: T.Tensor((H,), "float32"),
        bias: T.Tensor((H,), dtype),
        steps: T.Tensor((B, H, padded), "float32"),
        sums: T.Tensor((B, H, padded), "float32"),
        smallest: T.float32,
    ):
        with T.Kernel(B * T.truncdiv(padded, CHUNK), T.ceildiv(H, HEADS), threads=128) as (part, block):
            logs = T.alloc_shared((HEADS, CHUNK), "float32")
            chunks = T.truncdiv(padded, CHUNK)
            batch = T.truncdiv(part, chunks)
            first = T.truncmod(part, chunks) * CHUNK
            for i, j in T.Parallel(HEADS, CHUNK):
                logs[i, j] = 0.0
                if block * HEADS + i < H and first + j < N:
                    logs[i, j] = rounded(
                        T.max(
                            step_of(dt[batch, first + j, block * HEADS + i], bias[block * HEADS + i], dtype), smallest
                        ),
                        dtype,
                    )
            for i, j in T.Parallel(HEADS, CHUNK):
                if block * HEADS + i < H:
                    steps[batch, block * HEADS + i, first + j] = logs[i, j]
            for i, j in T.Parallel(HEADS, CHUNK):
                logs[i, j] = T.max(logs[i, j] * T.if_then_else(block * HEADS + i < H, A[block * HEADS + i], 0.0), LEAST)
            T.cumsum(logs, dim=1)
            for i, j in T.Parallel(HEADS, CHUNK):
                if block * HEADS + i < H:
                    sums[batch, block * HEADS + i, first + j] = logs[i, j]

    return make_steps


@functools.cache
@tilelang.jit(pass_configs=CHUNK_FLAGS)
def segments_kernel(sizes, rows, columns, whole):
    """Compile the states that segments write; `whole`: rows begin at 16 bytes, and blocks fill their tensors."""
    B, L, H, G, padded, parts = T.dynamic("B L H G padded parts")
    x_b, x_t, x_h, w_b, w_t, w_g = T.dynamic("x_b x_t x_h w_b w_t w_g", "int64")
    dtype = "bfloat16"
    P, N = sizes or T.dynamic("P N")
    blocks = T.ceildiv(P, rows)
    policy = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def write_segments(
        x: T.StridedTensor((B, L, H, P), (x_b, x_t, x_h, 1), dtype),
        write: T.StridedTensor((B, L, G, N), (w_b, w_t, w_g, 1), dtype),
        steps: T.Tensor((B, H, padded), "float32"),
        sums: T.Tensor((B, H, padded), "float32"),
        states: T.Tensor((parts, P, N), "float32"),
        left: T.Tensor((parts,), "float32"),
        each: T.int32,
        segments: T.int32,
    ):
        with T.Kernel(B * H * blocks, segments - 1, threads=2 * rows) as (index, segment):
            if whole:
                T.assume(x_b % 8 == 0)
                T.assume(x_t % 8 == 0)
                T.assume(x_h % 8 == 0)
                T.assume(w_b % 8 == 0)
                T.assume(w_t % 8 == 0)
                T.assume(w_g % 8 == 0)
            x_tile = T.alloc_shared((CHUNK, rows), dtype)
            w_tile = T.alloc_shared((CHUNK, columns), dtype)
            weight = T.alloc_shared((CHUNK,), "float32")
            state = T.alloc_fragment((rows, columns), "float32")
            wide = T.alloc_fragment((rows, CHUNK), "float32")
            high = T.alloc_fragment((rows, CHUNK), dtype)
            low = T.alloc_fragment((rows, CHUNK), dtype)
            sum_of_logs = T.alloc_var("float32")
            last = T.alloc_var("float32")
            pair = T.truncdiv(index, blocks)
            start = T.truncmod(index, blocks) * rows
            batch = T.truncdiv(pair, H)
            head = T.truncmod(pair, H)
            group = T.truncdiv(head, T.truncdiv(H, G))

            T.clear(state)
            sum_of_logs = 0.0
            for number in T.serial(each):
                first = (segment * each + number) * CHUNK
                if whole:
                    for i, j in T.Parallel(CHUNK, rows):
                        x_tile[i, j] = x[batch, first + i, head, start + j]
                    for i, j in T.Parallel(CHUNK, columns):
                        w_tile[i, j] = write[batch, first + i, group, j]
                else:
                    for i, j in T.Parallel(CHUNK, rows):
                        x_tile[i, j] = T.if_then_else(start + j < P, x[batch, first + i, head, start + j], 0)
                    for i, j in T.Parallel(CHUNK, columns):
                        w_tile[i, j] = T.if_then_else(j < N, write[batch, first + i, group, j], 0)
                last = sums[batch, head, first + CHUNK - 1]
                for i in T.Parallel(CHUNK):
                    weight[i] = steps[batch, head, first + i] * T.exp(T.min(last - sums[batch, head, first + i], 0.0))
                for i, j in T.Parallel(rows, CHUNK):
                    wide[i, j] = T.cast(x_tile[j, i], "float32") * weight[j]
                split(wide, high, low, rows, CHUNK)
                for i, j in T.Parallel(rows, columns):
                    state[i, j] = state[i, j] * T.exp(last)
                T.gemm(low, w_tile, state, policy=policy)
                T.gemm(high, w_tile, state, policy=policy)
                sum_of_logs = sum_of_logs + last
            for i, j in T.Parallel(rows, columns):
                if start + i < P and j < N:
                    states[pair * (segments - 1) + segment, start + i, j] = state[i, j]
            if start == 0 and T.get_thread_binding(0) == 0:
                left[pair * (segments - 1) + segment] = sum_of_logs

    return write_segments


@functools.cache
@tilelang.jit(pass_configs=CHUNK_FLAGS)
def scan_kernel(sizes, rows, columns, whole):
    """Compile the walk through the chunks, for `sizes` P and N or for any.

    `whole`: rows begin at 16 bytes, and chunks and blocks fill their tensors.
    """
    B, L, H, G, padded, parts = T.dynamic("B L H G padded parts")
    x_b, x_t, x_h, w_b, w_t, w_g, r_b, r_t, r_g = T.dynamic("x_b x_t x_h w_b w_t w_g r_b r_t r_g", "int64")
    out_b, out_t, out_h, i_b, i_h, i_p, f_b, f_h, f_p = T.dynamic("out_b out_t out_h i_b i_h i_p f_b f_h f_p", "int64")
    dtype = "bfloat16"
    P, N = sizes or T.dynamic("P N")
    blocks = T.ceildiv(P, rows)
    policy = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def scan(
        x: T.StridedTensor((B, L, H, P), (x_b, x_t, x_h, 1), dtype),
        write: T.StridedTensor((B, L, G, N), (w_b, w_t, w_g, 1), dtype),
        read: T.StridedTensor((B, L, G, N), (r_b, r_t, r_g, 1), dtype),
        D: T.Tensor((H,), dtype),
        steps: T.Tensor((B, H, padded), "float32"),
        sums: T.Tensor((B, H, padded), "float32"),
        initial: T.StridedTensor((B, H, P, N), (i_b, i_h, i_p, 1), "float32"),
        states: T.Tensor((parts, P, N), "float32"),
        left: T.Tensor((parts,), "float32"),
        out: T.StridedTensor((B, L, H, P), (out_b, out_t, out_h, 1), "float32"),
        final: T.StridedTensor((B, H, P, N), (f_b, f_h, f_p, 1), "float32"),
        each: T.int32,
        segments: T.int32,
    ):
        with T.Kernel(B * H * blocks, segments, threads=2 * rows) as (index, segment):
            if whole:
                T.assume(x_b % 8 == 0)
                T.assume(x_t % 8 == 0)
                T.assume(x_h % 8 == 0)
                T.assume(w_b % 8 == 0)
                T.assume(w_t % 8 == 0)
                T.assume(w_g % 8 == 0)
                T.assume(r_b % 8 == 0)
                T.assume(r_t % 8 == 0)
                T.assume(r_g % 8 == 0)
            x_tile = T.alloc_shared((CHUNK, rows), dtype)
            w_tile = T.alloc_shared((CHUNK, columns), dtype)
            r_tile = T.alloc_shared((CHUNK, columns), dtype)
            high_tile = T.alloc_shared((CHUNK, CHUNK), dtype)
            low_tile = T.alloc_shared((CHUNK, CHUNK), dtype)
            step = T.alloc_shared((CHUNK,), "float32")
            total = T.alloc_shared((CHUNK,), "float32")
            # The state has a row for each value, and so has all that is made of it: it stays in registers between products.
            state = T.alloc_fragment((rows, columns), "float32")
            state_high = T.alloc_fragment((rows, columns), dtype)
            state_low = T.alloc_fragment((rows, columns), dtype)
            found = T.alloc_fragment((rows, CHUNK), "float32")
            wide = T.alloc_fragment((rows, CHUNK), "float32")
            high = T.alloc_fragment((rows, CHUNK), dtype)
            low = T.alloc_fragment((rows, CHUNK), dtype)
            pairs = T.alloc_fragment((CHUNK, CHUNK), "float32")
            pair = T.truncdiv(index, blocks)
            start = T.truncmod(index, blocks) * rows
            batch = T.truncdiv(pair, H)
            head = T.truncmod(pair, H)
            group = T.truncdiv(head, T.truncdiv(H, G))
            chunks = T.truncdiv(padded, CHUNK)
            skip = T.alloc_var("float32")
            skip = T.cast(D[head], "float32")

            # 1. The state before the segment.
            for i, j in T.Parallel(rows, columns):
                state[i, j] = T.if_then_else(start + i < P and j < N, initial[batch, head, start + i, j], 0.0)
            for before in T.serial(segment):
                for i, j in T.Parallel(rows, columns):
                    state[i, j] = state[i, j] * T.exp(left[pair * (segments - 1) + before]) + T.if_then_else(
                        start + i < P and j < N, states[pair * (segments - 1) + before, start + i, j], 0.0
                    )
            for number in T.serial(T.min(each, chunks - segment * each)):
                first = (segment * each + number) * CHUNK
                if whole:
                    for i, j in T.Parallel(CHUNK, rows):
                        x_tile[i, j] = x[batch, first + i, head, start + j]
                    for i, j in T.Parallel(CHUNK, columns):
                        w_tile[i, j] = write[batch, first + i, group, j]
                    for i, j in T.Parallel(CHUNK, columns):
                        r_tile[i, j] = read[batch, first + i, group, j]
                else:
                    for i, j in T.Parallel(CHUNK, rows):
                        x_tile[i, j] = T.if_then_else(
                            first + i < L and start + j < P, x[batch, first + i, head, start + j], 0
                        )
                    for i, j in T.Parallel(CHUNK, columns):
                        w_tile[i, j] = T.if_then_else(first + i < L and j < N, write[batch, first + i, group, j], 0)
                    for i, j in T.Parallel(CHUNK, columns):
                        r_tile[i, j] = T.if_then_else(first + i < L and j < N, read[batch, first + i, group, j], 0)
                for i in T.Parallel(CHUNK):
                    step[i] = steps[batch, head, first + i]
                    total[i] = sums[batch, head, first + i]
                # 2. What tokens read of the chunk itself, in rows of tokens that write; their own value is on the diagonal.
                T.gemm(w_tile, r_tile, pairs, transpose_B=True, policy=policy, clear_accum=True)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    pairs[i, j] = T.if_then_else(
                        i <= j, pairs[i, j] * T.exp(T.min(total[j] - total[i], 0.0)) * step[i], 0.0
                    ) + T.if_then_else(i == j, skip, 0.0)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    high_tile[i, j] = T.cast(pairs[i, j], dtype)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    low_tile[i, j] = T.cast(pairs[i, j] - rounded(pairs[i, j], dtype), dtype)
                # 3. What they read of the state.
                split(state, state_high, state_low, rows, columns)
                T.gemm(state_low, r_tile, found, transpose_B=True, policy=policy, clear_accum=True)
                T.gemm(state_high, r_tile, found, transpose_B=True, policy=policy)
                for i, j in T.Parallel(rows, CHUNK):
                    found[i, j] = found[i, j] * T.exp(total[j])
                T.gemm(x_tile, low_tile, found, transpose_A=True, policy=policy)
                T.gemm(x_tile, high_tile, found, transpose_A=True, policy=policy)
                for i, j in T.Parallel(rows, CHUNK):
                    if first + j < L and start + i < P:
                        out[batch, first + j, head, start + i] = found[i, j]
                # 4. The state behind the chunk.
                for i, j in T.Parallel(rows, CHUNK):
                    wide[i, j] = (
                        T.cast(x_tile[j, i], "float32") * step[j] * T.exp(T.min(total[CHUNK - 1] - total[j], 0.0))
                    )
                split(wide, high, low, rows, CHUNK)
                for i, j in T.Parallel(rows, columns):
                    state[i, j] = state[i, j] * T.exp(total[CHUNK - 1])
                T.gemm(low, w_tile, state, policy=policy)
                T.gemm(high, w_tile, state, policy=policy)
            if segment == segments - 1:
                for i, j in T.Parallel(rows, columns):
                    if start + i < P and j < N:
                        final[batch, head, start + i, j] = state[i, j]

    return scan


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
    ctas=528,
):
    """Compute S = exp(step A) S + step x Bmat and out = S Cmat + D x for T tokens one after the other.

    Shapes: x, out [B, T, H, P], dt [B, T, H], Bmat, Cmat [B, T, G, N], A, D, dt_bias [H], states [B, H, P, N]; unit last
    strides; T in bfloat16. Sums, decays and the state are in float32.
    Mapping: steps and sums of their decays first. Then a CTA owns 64 rows of a head's state, 16 a warp, and goes through the
    chunks of a segment. Segments are as many as give `ctas` CTAs, and at most eight.
    """
    B, tokens, H, P = x.shape
    N = Bmat.shape[3]
    if final_state.numel() == 0:
        return
    chunks = -(-tokens // CHUNK)
    rows = 64
    ctas_of_a_segment = B * H * -(-P // rows)
    each = -(-chunks // max(1, min(-(-ctas // ctas_of_a_segment), MOST_SEGMENTS, chunks // 2)))
    segments = -(-chunks // each)
    steps = torch.empty((B, H, chunks * CHUNK), dtype=torch.float32, device=x.device)
    sums = torch.empty((B, H, chunks * CHUNK), dtype=torch.float32, device=x.device)
    parts = max(1, B * H * (segments - 1))
    states = torch.empty((parts, P, N), dtype=torch.float32, device=x.device)
    left = torch.empty((parts,), dtype=torch.float32, device=x.device)
    # Other sizes than models have share a kernel: a compilation takes seconds.
    is_usual = N in (64, 128) and P in (64, 128)
    sizes = (P, N) if is_usual else None
    columns = N if is_usual else 128
    whole = is_usual
    for given in (x, Bmat, Cmat):
        whole = whole and all(step % 8 == 0 for step in (given.storage_offset(), *given.stride()[:3]))
    steps_kernel()(dt, A, dt_bias, steps, sums, dt_min)
    if segments > 1:
        segments_kernel(sizes, rows, columns, whole)(x, Bmat, steps, sums, states, left, each, segments)
    scan_kernel(sizes, rows, columns, whole and tokens % CHUNK == 0)(
        x, Bmat, Cmat, D, steps, sums, initial_state, states, left, out, final_state, each, segments
    )

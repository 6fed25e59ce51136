"""Casts to and from codes of 8 bits per row, square, channel or block, TileLang: no value in between is stored."""

import functools
import math

import tilelang
import tilelang.language as T

E4M3 = "float8_e4m3fn"
E4M3_MOST = 448.0
E4M3_FLOOR = 1e-4
VALUES = 16  # of a thread: their codes of 8 bits are one store of 16 bytes
GROUP = 128  # channels that share a scale
SQUARE = 32  # rows and columns that share a scale of per_block_cast_32, and channels that share one of FP4 codes


def widest(*multiples):
    """The widest power of two that divides all of these: how many elements an access may take."""
    bits = 0
    for multiple in multiples:
        bits |= multiple
    return bits & -bits


def access_width(x, columns, most=VALUES):
    """Elements of x, at most `most` and 16 bytes, that one access may take; rows of so many columns."""
    size = x.dtype.itemsize
    return widest(columns, x.stride(0), x.data_ptr() // size, 16 // size, most)


@T.macro
def scale_of(amax, scale, inverse, ROUND):
    """What a code is multiplied by, and what a value is multiplied by, which is not quite the reciprocal unless rounded."""
    least = T.alloc_var("float32")
    least = T.max(amax, T.float32(E4M3_FLOOR))
    scale[0] = least / T.float32(E4M3_MOST)
    if ROUND:
        exponent = T.alloc_var("int32")
        exponent = (T.reinterpret(scale[0], "int32") + 0x7FFFFF) >> 23
        scale[0] = T.reinterpret(exponent << 23, "float32")
        inverse[0] = T.reinterpret((254 - exponent) << 23, "float32")
    else:
        inverse[0] = T.float32(E4M3_MOST) / least


# -- a scale a row ---------------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_rows_kernel(H, dtype, rounded, vec, out_vec, threads):
    """Compile for rows of H channels, a CTA each: a thread has VALUES codes at a time."""
    M = T.dynamic("M")
    x_stride, out_stride, scale_row, scale_column = T.dynamic("x_stride out_stride scale_row scale_column", "int64")
    chunks = -(-H // (VALUES * threads))
    kept = chunks * VALUES * dtype.itemsize <= 128  # in registers; longer rows are read again, from the cache
    loop, slots = (T.unroll, chunks) if kept else (T.serial, 1)

    @T.prim_func
    def cast_rows(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        out: T.StridedTensor((M, H), (out_stride, 1), E4M3),
        scales: T.StridedTensor((M, 1), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(M, threads=threads) as row:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            thread = T.get_thread_binding(0)
            values = T.alloc_local((slots, VALUES), dtype)
            codes = T.alloc_local((slots, VALUES), E4M3)
            partial = T.alloc_shared((threads // 32,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)

            for c in loop(chunks):
                column = (c * threads + thread) * VALUES
                slot = c if kept else 0
                for p in T.unroll(VALUES // vec):
                    for v in T.vectorized(vec):
                        values[slot, p * vec + v] = 0
                    if column + p * vec < H:
                        for v in T.vectorized(vec):
                            values[slot, p * vec + v] = x[row, column + p * vec + v]
                for v in T.unroll(VALUES):
                    amax = T.max(amax, T.abs(T.cast(values[slot, v], "float32")))
            amax = T.warp_reduce_max(amax)
            if thread % 32 == 0:
                partial[thread // 32] = amax
            T.sync_threads()
            for w in T.unroll(threads // 32):
                amax = T.max(amax, partial[w])
            scale_of(amax, scale, inverse, rounded)
            if thread == 0:
                scales[row, 0] = scale[0]

            for c in loop(chunks):
                column = (c * threads + thread) * VALUES
                slot = c if kept else 0
                if not kept:
                    for p in T.unroll(VALUES // vec):
                        for v in T.vectorized(vec):
                            values[0, p * vec + v] = 0
                        if column + p * vec < H:
                            for v in T.vectorized(vec):
                                values[0, p * vec + v] = x[row, column + p * vec + v]
                for v in T.vectorized(VALUES):  # the cast saturates
                    codes[slot, v] = T.cast(T.cast(values[slot, v], "float32") * inverse[0], E4M3)
                for p in T.unroll(VALUES // out_vec):
                    if column + p * out_vec < H:
                        for v in T.vectorized(out_vec):
                            out[row, column + p * out_vec + v] = codes[slot, p * out_vec + v]

    return cast_rows


def run_per_row_cast(x, round_scale, out, scale, *, threads=None):
    """out = codes of x, scale = what they are multiplied by, per token; a power of two if asked.

    x: [M, H] in bfloat16 or float32, out: [M, H] in float8_e4m3fn, both with last stride 1; scale: [M, 1] float32 of any strides.
    threads None: as many as have 32 values each, at most 256.
    """
    M, H = x.shape
    if M == 0:
        return
    threads = threads or min(256, 32 * -(-H // 1024))
    vec, out_vec = access_width(x, H), access_width(out, H)
    cast_rows_kernel(H, x.dtype, bool(round_scale), vec, out_vec, threads)(x, out, scale)


# -- squares ---------------------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_squares_kernel(H, dtype, rounded, vec, out_vec, threads):
    """Compile for rows of H columns: a warp has a block of 32 x 32, its neighbour the next of these rows."""
    M = T.dynamic("M")
    x_stride, out_stride, scale_row, scale_column = T.dynamic("x_stride out_stride scale_row scale_column", "int64")
    across = -(-H // SQUARE)
    warps = threads // 32

    @T.prim_func
    def cast_squares(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        out: T.StridedTensor((M, H), (out_stride, 1), E4M3),
        scales: T.StridedTensor((T.ceildiv(M, SQUARE), across), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(T.ceildiv(T.ceildiv(M, SQUARE) * across, warps), threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            thread = T.get_thread_binding(0)
            square = block * warps + thread // 32
            down = square // across
            strip = square % across
            row = down * SQUARE + thread % 32 // 2  # and 16 rows on
            column = strip * SQUARE + thread % 2 * VALUES
            values = T.alloc_local((2, VALUES), dtype)
            codes = T.alloc_local((2, VALUES), E4M3)
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)

            for i in T.unroll(2):
                for c in T.unroll(VALUES // vec):
                    for v in T.vectorized(vec):
                        values[i, c * vec + v] = 0
                    if row + i * 16 < M and column + c * vec < H:
                        for v in T.vectorized(vec):
                            values[i, c * vec + v] = x[row + i * 16, column + c * vec + v]
            for i in T.unroll(2):
                for v in T.unroll(VALUES):
                    amax = T.max(amax, T.abs(T.cast(values[i, v], "float32")))
            amax = T.warp_reduce_max(amax)
            scale_of(amax, scale, inverse, rounded)
            if down * SQUARE < M and thread % 32 == 0:
                scales[down, strip] = scale[0]
            for i in T.unroll(2):
                for v in T.vectorized(VALUES):  # the cast saturates
                    codes[i, v] = T.cast(T.cast(values[i, v], "float32") * inverse[0], E4M3)
                for c in T.unroll(VALUES // out_vec):
                    if row + i * 16 < M and column + c * out_vec < H:
                        for v in T.vectorized(out_vec):
                            out[row + i * 16, column + c * out_vec + v] = codes[i, c * out_vec + v]

    return cast_squares


def run_per_block_cast_32(x, round_scale, out, scale, *, threads=256):
    """out = codes of x, scale = what they are multiplied by, per block of 32 x 32; a power of two if asked.

    x: [M, H] in bfloat16 or float32, out: [M, H] in float8_e4m3fn, both with last stride 1; scale: [ceil(M / 32), ceil(H / 32)]
    float32 of any strides.
    """
    M, H = x.shape
    if M == 0:
        return
    vec, out_vec = access_width(x, H), access_width(out, H)
    cast_squares_kernel(H, x.dtype, bool(round_scale), vec, out_vec, threads)(x, out, scale)


# -- back from codes -------------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_back_kernel(H, rows, columns, shared, vec, out_vec, threads, repeat):
    """Compile for H columns and blocks of rows x columns: a thread has VALUES columns, `shared` of which have one scale."""
    M = T.dynamic("M")
    x_stride, out_stride, scale_row, scale_column = T.dynamic("x_stride out_stride scale_row scale_column", "int64")
    chunks = -(-H // VALUES)  # of a row; they are numbered along rows and then down
    scales_of_chunk = VALUES // shared

    @T.prim_func
    def cast_back(
        x: T.StridedTensor((M, H), (x_stride, 1), E4M3),
        scales: T.StridedTensor((T.ceildiv(M, rows), -(-H // columns)), (scale_row, scale_column), "float32"),
        out: T.StridedTensor((M, H), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(M * chunks, threads * repeat), threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            first = block * (threads * repeat) + T.get_thread_binding(0)
            codes = T.alloc_local((repeat, VALUES), E4M3)
            values = T.alloc_local((repeat, VALUES), "bfloat16")
            factor = T.alloc_local((repeat, scales_of_chunk), "float32")

            for i in T.unroll(repeat):  # all loads first: they overlap
                row = (first + i * threads) // chunks
                column = (first + i * threads) % chunks * VALUES
                for c in T.unroll(VALUES // vec):
                    for v in T.vectorized(vec):
                        codes[i, c * vec + v] = T.cast(0.0, E4M3)
                    if row < M and column + c * vec < H:
                        for v in T.vectorized(vec):
                            codes[i, c * vec + v] = x[row, column + c * vec + v]
                for s in T.unroll(scales_of_chunk):
                    factor[i, s] = 0.0
                    if row < M and column + s * shared < H:
                        factor[i, s] = scales[row // rows, (column + s * shared) // columns]
            for i in T.unroll(repeat):
                row = (first + i * threads) // chunks
                column = (first + i * threads) % chunks * VALUES
                for v in T.unroll(VALUES):
                    values[i, v] = T.cast(T.cast(codes[i, v], "float32") * factor[i, v // shared], "bfloat16")
                for c in T.unroll(VALUES // out_vec):
                    if row < M and column + c * out_vec < H:
                        for v in T.vectorized(out_vec):
                            out[row, column + c * out_vec + v] = values[i, c * out_vec + v]

    return cast_back


def run_cast_back(x, scale, block_rows, block_columns, out, *, threads=256, repeat=2):
    """out = x * scale of its block, one product in float32, rounded once.

    x: [M, H] in float8_e4m3fn, out: [M, H] in bfloat16, both with last stride 1; scale: [ceil(M / block_rows),
    ceil(H / block_columns)] float32 of any strides.
    """
    M, H = x.shape
    if M == 0:
        return
    shared = VALUES if block_columns >= H else math.gcd(block_columns, VALUES)
    vec, out_vec = access_width(x, H), access_width(out, H)
    cast_back_kernel(H, block_rows, block_columns, shared, vec, out_vec, threads, repeat)(x, scale, out)


# -- a scale per token and 128 channels ------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def swiglu_and_cast_kernel(H, dtype, rounded, vec, out_vec, threads):
    """Compile for rows of H results: groups are numbered along rows and then down, so that short rows share a CTA."""
    P, W = T.dynamic("P"), T.dynamic("W")
    x_stride, out_stride, scale_row, scale_column = T.dynamic("x_stride out_stride scale_row scale_column", "int64")
    lanes = GROUP // VALUES  # threads of a group, neighbours in a warp
    groups = -(-H // GROUP)

    @T.prim_func
    def swiglu_and_cast(
        x: T.StridedTensor((P, 2 * H), (x_stride, 1), dtype),
        weights: T.Tensor((W,), "float32"),
        weight_of_row: T.Tensor((P,), "int32"),
        expert_of_row: T.Tensor((P,), "int32"),
        limit: T.float32,
        out: T.StridedTensor((P, H), (out_stride, 1), E4M3),
        scales: T.StridedTensor((P, groups), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(T.ceildiv(P * groups * lanes, threads), threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            place = block * threads + T.get_thread_binding(0)
            row = place // lanes // groups
            group = place // lanes % groups
            column = group * GROUP + place % lanes * VALUES
            gates = T.alloc_local((VALUES,), dtype)
            ups = T.alloc_local((VALUES,), dtype)
            values = T.alloc_local((VALUES,), "float32")
            codes = T.alloc_local((VALUES,), E4M3)
            expert = T.alloc_local((1,), "int32")
            source = T.alloc_local((1,), "int32")
            weight = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)

            expert[0] = T.if_then_else(row < P, expert_of_row[row], -1)
            source[0] = T.if_then_else(row < P, weight_of_row[row], -1)
            weight[0] = T.if_then_else(source[0] >= 0, weights[source[0]], 0.0)
            for c in T.unroll(VALUES // vec):
                for v in T.vectorized(vec):
                    gates[c * vec + v] = 0
                for v in T.vectorized(vec):
                    ups[c * vec + v] = 0
                # A row of another device is not read.
                if row < P and expert[0] >= 0 and column + c * vec < H:
                    for v in T.vectorized(vec):
                        gates[c * vec + v] = x[row, column + c * vec + v]
                    for v in T.vectorized(vec):
                        ups[c * vec + v] = x[row, H + column + c * vec + v]
            for v in T.unroll(VALUES):
                gate = T.min(T.cast(gates[v], "float32"), limit)
                up = T.min(T.max(T.cast(ups[v], "float32"), -limit), limit)
                # The accurate exponential and division: their last bits decide about scales near a power of two.
                value = gate / (1.0 + T.exp(-gate)) * up * weight[0]
                values[v] = T.Select(expert[0] >= 0, value, T.float32(0.0))
            for v in T.unroll(VALUES):
                amax = T.max(amax, T.abs(values[v]))
            for step in T.unroll(lanes.bit_length() - 1):
                amax = T.max(amax, T.shfl_xor(amax, 1 << step))
            scale_of(amax, scale, inverse, rounded)
            for v in T.vectorized(VALUES):  # the cast saturates
                codes[v] = T.cast(values[v] * inverse[0], E4M3)
            for c in T.unroll(VALUES // out_vec):
                if row < P and column + c * out_vec < H:
                    for v in T.vectorized(out_vec):
                        out[row, column + c * out_vec + v] = codes[c * out_vec + v]
            if row < P and place % lanes == 0:
                scales[row, group] = scale[0]

    return swiglu_and_cast


def run_swiglu_and_per_token_cast(
    x, weights, weight_of_row, expert_of_row, limit, round_scale, out, scale, *, threads=256
):
    """out = codes of silu(gate) * up * weight, scale = what they are multiplied by, per token and 128 channels.

    x: [P, 2 * H] = [gate | up] in bfloat16 or float32, out: [P, H] in float8_e4m3fn, both with last stride 1; weights: [M, K]
    float32, weight_of_row and expert_of_row: [P] int32, all contiguous; scale: [P, ceil(H / 128)] float32 of any strides.
    """
    P, H = out.shape
    if P == 0:
        return
    vec, out_vec = access_width(x, H), access_width(out, H)
    kernel = swiglu_and_cast_kernel(H, x.dtype, bool(round_scale), vec, out_vec, threads)
    kernel(x, weights.view(-1), weight_of_row, expert_of_row, float(limit), out, scale)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def requantise_kernel(H, side, rounded, vec, out_vec, threads):
    """Compile for rows of H codes with a scale per side x side: the VALUES columns of a thread have one scale of x."""
    M = T.dynamic("M")
    x_stride, in_row, in_column = T.dynamic("x_stride in_row in_column", "int64")
    out_stride, scale_row, scale_column = T.dynamic("out_stride scale_row scale_column", "int64")
    lanes = GROUP // VALUES  # threads of a group, neighbours in a warp
    groups = -(-H // GROUP)

    @T.prim_func
    def requantise(
        x: T.StridedTensor((M, H), (x_stride, 1), E4M3),
        scale_in: T.StridedTensor((T.ceildiv(M, side), -(-H // side)), (in_row, in_column), "float32"),
        out: T.StridedTensor((M, H), (out_stride, 1), E4M3),
        scales: T.StridedTensor((M, groups), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(T.ceildiv(M * groups * lanes, threads), threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            place = block * threads + T.get_thread_binding(0)
            row = place // lanes // groups
            group = place // lanes % groups
            column = group * GROUP + place % lanes * VALUES
            given = T.alloc_local((VALUES,), E4M3)
            codes = T.alloc_local((VALUES,), E4M3)
            factor = T.alloc_local((2,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)

            for c in T.unroll(VALUES // vec):
                for v in T.vectorized(vec):
                    given[c * vec + v] = T.cast(0.0, E4M3)
                if row < M and column + c * vec < H:
                    for v in T.vectorized(vec):
                        given[c * vec + v] = x[row, column + c * vec + v]
            factor[0] = 0.0
            if row < M and column < H:
                factor[0] = scale_in[row // side, column // side]
            for v in T.unroll(VALUES):
                amax = T.max(amax, T.abs(T.cast(given[v], "float32")))
            amax = amax * factor[0]
            for step in T.unroll(lanes.bit_length() - 1):
                amax = T.max(amax, T.shfl_xor(amax, 1 << step))
            scale_of(amax, scale, inverse, rounded)
            factor[1] = factor[0] * inverse[0]
            for v in T.vectorized(VALUES):  # the cast saturates
                codes[v] = T.cast(T.cast(given[v], "float32") * factor[1], E4M3)
            for c in T.unroll(VALUES // out_vec):
                if row < M and column + c * out_vec < H:
                    for v in T.vectorized(out_vec):
                        out[row, column + c * out_vec + v] = codes[c * out_vec + v]
            if row < M and place % lanes == 0:
                scales[row, group] = scale[0]

    return requantise


def run_per_token_requantise(x, scale_in, block, round_scale, out, scale, *, threads=256):
    """out = codes of x * scale_in per token and 128 channels, scale = what they are multiplied by.

    x: [M, H] and out: [M, H] in float8_e4m3fn with last stride 1; scale_in: [ceil(M / block), ceil(H / block)], block 32 or 128,
    and scale: [M, ceil(H / 128)], float32 of any strides.
    """
    M, H = x.shape
    if M == 0:
        return
    vec, out_vec = access_width(x, H), access_width(out, H)
    requantise_kernel(H, block, bool(round_scale), vec, out_vec, threads)(x, scale_in, out, scale)


# -- a scale a channel -----------------------------------------------------------------------------------------------------


TOKENS = 128  # of a CTA
CHANNELS = 64  # of a CTA that turns codes round
RUN = 4  # tokens that a thread has of a channel, whose codes are a word


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_transposed_kernel(H, dtype, group, rounded, vec, out_vec):
    """Compile for rows of H channels: 256 threads have 4 tokens of 8 channels each, a warp 16 tokens of all 64."""
    M = T.dynamic("M")
    x_stride, out_stride, scale_row, scale_column = T.dynamic("x_stride out_stride scale_row scale_column", "int64")
    strips = -(-H // CHANNELS)
    across = 8  # channels of a thread; as many threads have the channels of a token
    warps = TOKENS // 16
    together = group // 16  # warps whose tokens share a scale
    threads = 32 * warps
    passes = CHANNELS * TOKENS // RUN // threads

    @T.prim_func
    def cast_transposed(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        out: T.StridedTensor((H, M), (out_stride, 1), E4M3),
        scales: T.StridedTensor((M // group, H), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, TOKENS) * strips, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            T.assume(M % group == 0)  # so a word of codes ends within its row
            thread = T.get_thread_binding(0)
            first = block // strips * TOKENS
            start = block % strips * CHANNELS
            row = first + thread // across * RUN
            column = start + thread % across * across
            values = T.alloc_local((RUN, across), dtype)
            largest = T.alloc_local((across,), "float32")
            inverses = T.alloc_local((across,), "float32")
            scaled = T.alloc_local((across, RUN), "float32")
            turned = T.alloc_local((across, RUN), E4M3)
            codes = T.alloc_local((passes, RUN), E4M3)
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)
            partial = T.alloc_shared((warps, CHANNELS), "float32")
            # Four bytes more a channel, so that the words of neighbouring channels lie in other banks.
            tile = T.alloc_shared((CHANNELS, TOKENS + RUN), E4M3)

            for i in T.unroll(RUN):  # all loads first: they overlap
                for c in T.unroll(across // vec):
                    for v in T.vectorized(vec):
                        values[i, c * vec + v] = 0
                    if row + i < M and column + c * vec < H:
                        for v in T.vectorized(vec):
                            values[i, c * vec + v] = x[row + i, column + c * vec + v]
            for v in T.unroll(across):
                largest[v] = 0.0
                for i in T.unroll(RUN):
                    largest[v] = T.max(largest[v], T.abs(T.cast(values[i, v], "float32")))
                largest[v] = T.max(largest[v], T.shfl_xor(largest[v], 8))
                largest[v] = T.max(largest[v], T.shfl_xor(largest[v], 16))
            if thread % 32 < across:
                for v in T.unroll(across):
                    partial[thread // 32, thread % across * across + v] = largest[v]
            T.sync_threads()
            # A thread per channel and group of tokens.
            if thread < CHANNELS * (TOKENS // group):
                for w in T.unroll(together):
                    amax = T.max(amax, partial[thread // CHANNELS * together + w, thread % CHANNELS])
                scale_of(amax, scale, inverse, rounded)
                if first + thread // CHANNELS * group < M and start + thread % CHANNELS < H:
                    scales[first // group + thread // CHANNELS, start + thread % CHANNELS] = scale[0]
                # Nobody else reads this element before the barrier.
                partial[thread // CHANNELS * together, thread % CHANNELS] = inverse[0]
            T.sync_threads()
            for v in T.unroll(across):
                inverses[v] = partial[thread // 32 // together * together, thread % across * across + v]
            for v in T.unroll(across):
                for i in T.unroll(RUN):
                    scaled[v, i] = T.cast(values[i, v], "float32") * inverses[v]
                for i in T.vectorized(RUN):  # the cast saturates
                    turned[v, i] = T.cast(scaled[v, i], E4M3)
            T.sync_threads()  # the compiler gives `tile` the address of `partial`, which is read above
            for v in T.unroll(across):
                for i in T.vectorized(RUN):
                    tile[thread % across * across + v, thread // across * RUN + i] = turned[v, i]
            T.sync_threads()
            for p in T.unroll(passes):  # a warp has the tokens of a channel
                for i in T.vectorized(RUN):
                    codes[p, i] = tile[p * warps + thread // 32, thread % 32 * RUN + i]
                for c in T.unroll(RUN // out_vec):
                    if start + p * warps + thread // 32 < H and first + thread % 32 * RUN + c * out_vec < M:
                        for v in T.vectorized(out_vec):
                            out[start + p * warps + thread // 32, first + thread % 32 * RUN + c * out_vec + v] = codes[
                                p, c * out_vec + v
                            ]

    return cast_transposed


def run_per_channel_cast_and_transpose(x, group, round_scale, out, scale):
    """out = codes of x turned round, scale = what they are multiplied by, per channel and `group` tokens, 32 or 128.

    x: [M, H] in bfloat16, M a multiple of group, out: [H, M] in float8_e4m3fn, both with last stride 1; scale: [M / group, H]
    float32 of any strides.
    """
    M, H = x.shape
    if M == 0:
        return
    vec, out_vec = access_width(x, H, 8), access_width(out, M, RUN)
    cast_transposed_kernel(H, x.dtype, group, bool(round_scale), vec, out_vec)(x, out, scale)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_gathered_kernel(H, rounded, vec, out_vec, threads):
    """Compile for rows of H codes: a CTA has 128 gathered rows of the 128 channels that share a scale of x."""
    tokens, N = T.dynamic("tokens"), T.dynamic("N")
    x_stride, in_row, in_column = T.dynamic("x_stride in_row in_column", "int64")
    out_stride, scale_row, scale_column = T.dynamic("out_stride scale_row scale_column", "int64")
    strips = -(-H // GROUP)
    down = threads // 8  # rows of a pass: eight threads a row
    passes = TOKENS // down
    warps = threads // 32

    @T.prim_func
    def cast_gathered(
        x: T.StridedTensor((tokens, H), (x_stride, 1), E4M3),
        scale_in: T.StridedTensor((tokens, strips), (in_row, in_column), "float32"),
        token_of_row: T.Tensor((N,), "int32"),
        out: T.StridedTensor((N, H), (out_stride, 1), E4M3),
        scales: T.StridedTensor((T.ceildiv(N, TOKENS), H), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, TOKENS) * strips, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            thread = T.get_thread_binding(0)
            strip = block % strips
            row = block // strips * TOKENS + thread // 8
            column = strip * GROUP + thread % 8 * VALUES
            token = T.alloc_local((passes,), "int32")
            factor = T.alloc_local((passes,), "float32")
            values = T.alloc_local((passes, VALUES), E4M3)
            codes = T.alloc_local((passes, VALUES), E4M3)
            largest = T.alloc_local((VALUES,), "float32")
            inverses = T.alloc_local((VALUES,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)
            partial = T.alloc_shared((warps, GROUP), "float32")

            for i in T.unroll(passes):
                token[i] = T.if_then_else(row + i * down < N, token_of_row[row + i * down], -1)
            for i in T.unroll(passes):  # all loads first: they overlap
                factor[i] = T.if_then_else(token[i] >= 0, scale_in[token[i], strip], 0.0)
                for c in T.unroll(VALUES // vec):
                    for v in T.vectorized(vec):
                        values[i, c * vec + v] = T.cast(0.0, E4M3)
                    if token[i] >= 0 and column + c * vec < H:
                        for v in T.vectorized(vec):
                            values[i, c * vec + v] = x[token[i], column + c * vec + v]
            for v in T.unroll(VALUES):
                largest[v] = 0.0
                for i in T.unroll(passes):
                    largest[v] = T.max(largest[v], T.abs(T.cast(values[i, v], "float32") * factor[i]))
                # The four rows of a warp, then the warps.
                largest[v] = T.max(largest[v], T.shfl_xor(largest[v], 8))
                largest[v] = T.max(largest[v], T.shfl_xor(largest[v], 16))
            if thread % 32 < 8:
                for v in T.unroll(VALUES):
                    partial[thread // 32, thread % 8 * VALUES + v] = largest[v]
            T.sync_threads()
            if thread < GROUP:
                for w in T.unroll(warps):
                    amax = T.max(amax, partial[w, thread])
                scale_of(amax, scale, inverse, rounded)
                if strip * GROUP + thread < H:
                    scales[block // strips, strip * GROUP + thread] = scale[0]
                partial[0, thread] = inverse[0]  # nobody else reads this column before the barrier
            T.sync_threads()
            for v in T.unroll(VALUES):
                inverses[v] = partial[0, thread % 8 * VALUES + v]
            for i in T.unroll(passes):
                for v in T.vectorized(VALUES):  # y is rounded to float32 before it is scaled; the cast saturates
                    codes[i, v] = T.cast(T.cast(values[i, v], "float32") * factor[i] * inverses[v], E4M3)
                for c in T.unroll(VALUES // out_vec):
                    if row + i * down < N and column + c * out_vec < H:
                        for v in T.vectorized(out_vec):
                            out[row + i * down, column + c * out_vec + v] = codes[i, c * out_vec + v]

    return cast_gathered


def run_per_channel_cast_fused(x, scale_in, token_of_row, round_scale, out, scale, *, threads=256):
    """out = codes of the gathered rows of x * scale_in per channel and 128 rows, scale = what they are multiplied by.

    x: [T, H] and out: [N, H] in float8_e4m3fn with last stride 1; scale_in: [T, ceil(H / 128)] and scale: [ceil(N / 128), H]
    float32 of any strides; token_of_row: [N] int32, contiguous, -1 for a row of zeros.
    """
    N, H = out.shape
    if N == 0:
        return
    vec, out_vec = access_width(x, H), access_width(out, H)
    cast_gathered_kernel(H, bool(round_scale), vec, out_vec, threads)(x, scale_in, token_of_row, out, scale)


# -- FP4 codes under a coarser scale ---------------------------------------------------------------------------------------


def fp4_value(code):
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, from the exponent in bits 1 and 2 and the mantissa in bit 0."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    size = T.Select(exponent == 0, mantissa * (126 << 23), normal)
    return T.reinterpret(size | ((code >> 3) << 31), "float32")


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_lossless_kernel(H, vec, out_vec, threads):
    """Compile for rows of H codes: a CTA has a block of 128 x 128, eight threads a row, two of them a scale of x."""
    M = T.dynamic("M")
    x_stride, in_row, in_column = T.dynamic("x_stride in_row in_column", "int64")
    out_stride, scale_row, scale_column = T.dynamic("out_stride scale_row scale_column", "int64")
    across = -(-H // GROUP)
    down = threads // 8  # rows of a pass
    passes = GROUP // down
    warps = threads // 32
    packed = VALUES // 2

    @T.prim_func
    def cast_lossless(
        x: T.StridedTensor((M, H // 2), (x_stride, 1), "uint8"),
        scale_in: T.StridedTensor((M, H // SQUARE), (in_row, in_column), "float32"),
        out: T.StridedTensor((M, H), (out_stride, 1), E4M3),
        scales: T.StridedTensor((T.ceildiv(M, GROUP), across), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, GROUP) * across, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            thread = T.get_thread_binding(0)
            row = block // across * GROUP + thread // 8
            column = block % across * GROUP + thread % 8 * VALUES
            given = T.alloc_local((passes, packed), "uint8")
            scale = T.alloc_local((passes,), "float32")
            factor = T.alloc_local((passes,), "float32")
            values = T.alloc_local((passes, VALUES), "float32")
            codes = T.alloc_local((passes, VALUES), E4M3)
            partial = T.alloc_shared((warps,), "int32")
            largest = T.alloc_var("int32", init=0)
            lowered = T.alloc_var("int32", init=0)

            for i in T.unroll(passes):  # all loads first: they overlap
                scale[i] = 0.0
                if row + i * down < M and column < H:
                    scale[i] = scale_in[row + i * down, column // SQUARE]
                for c in T.unroll(packed // vec):
                    for v in T.vectorized(vec):
                        given[i, c * vec + v] = T.cast(0, "uint8")
                    if row + i * down < M and column // 2 + c * vec < H // 2:
                        for v in T.vectorized(vec):
                            given[i, c * vec + v] = x[row + i * down, column // 2 + c * vec + v]
            for i in T.unroll(passes):
                largest = T.max(largest, T.reinterpret(scale[i], "int32") >> 23)
            for step in T.unroll(5):
                largest = T.max(largest, T.shfl_xor(largest, 1 << step))
            if thread % 32 == 0:
                partial[thread // 32] = largest
            T.sync_threads()
            for w in T.unroll(warps):
                largest = T.max(largest, partial[w])
            lowered = T.max(largest - 6, 0)
            if thread == 0:
                scales[block // across, block % across] = T.reinterpret(lowered << 23, "float32")
            for i in T.unroll(passes):
                # A power of two, by which a code is multiplied without rounding.
                factor[i] = T.reinterpret(((T.reinterpret(scale[i], "int32") >> 23) - lowered + 127) << 23, "float32")
                for v in T.unroll(packed):
                    values[i, 2 * v] = fp4_value(T.cast(given[i, v], "int32") & 15) * factor[i]
                    values[i, 2 * v + 1] = fp4_value(T.cast(given[i, v], "int32") >> 4) * factor[i]
                for v in T.vectorized(VALUES):
                    codes[i, v] = T.cast(values[i, v], E4M3)
                for c in T.unroll(VALUES // out_vec):
                    if row + i * down < M and column + c * out_vec < H:
                        for v in T.vectorized(out_vec):
                            out[row + i * down, column + c * out_vec + v] = codes[i, c * out_vec + v]

    return cast_lossless


def run_per_block_cast_lossless(x, scale_in, out, scale, *, threads=256):
    """out = codes of the values of x, scale = the largest of scale_in in a block of 128 x 128, divided by 64.

    x: [M, H / 2] bytes, out: [M, H] in float8_e4m3fn, both with last stride 1, H a multiple of 32; scale_in: [M, H / 32], powers
    of two of which none is less than 2^-11 of the largest of its block, and scale: [ceil(M / 128), ceil(H / 128)], float32 of
    any strides.
    """
    M, H = out.shape
    if M == 0:
        return
    vec, out_vec = access_width(x, H // 2, VALUES // 2), access_width(out, H)
    cast_lossless_kernel(H, vec, out_vec, threads)(x, scale_in, out, scale)

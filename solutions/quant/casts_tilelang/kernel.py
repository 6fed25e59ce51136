"""Casts to codes of 8, 4 and 12 bits with a scale a block, in TileLang: the variants differ in compile-time constants alone."""

import functools
import math

import tilelang
import tilelang.language as T

E4M3_MOST = 448.0
FP4_MOST = 6.0
E5M6_MOST = 65024.0
E4M3_FLOOR = 1e-4
FP4_FLOOR = 6 * 2.0**-126
VALUES = 16  # of a thread: their codes of 8 bits are one store of 16 bytes


def widest(*multiples):
    """The widest power of two that divides all of these: how many elements an access may take."""
    bits = 0
    for multiple in multiples:
        bits |= multiple
    return bits & -bits


def load_width(x, columns):
    """Elements of x that one load of at most 16 bytes may take, rows of so many columns."""
    size = x.dtype.itemsize
    return widest(columns, x.stride(0), x.data_ptr() // size, 16 // size)


def store_width(out, columns, most):
    """Elements of out, of a byte each, that one store may take; rows of so many columns."""
    return widest(columns, out.stride(0), out.data_ptr(), most)


@T.macro
def scale_of(amax, scale, inverse, MOST, FLOOR, ROUND):
    """What a code is multiplied by, and what a value is multiplied by, which is not quite the reciprocal unless rounded."""
    least = T.alloc_var("float32")
    least = T.max(amax, T.float32(FLOOR))
    scale[0] = least / T.float32(MOST)
    if ROUND:
        exponent = T.alloc_var("int32")
        exponent = (T.reinterpret(scale[0], "int32") + 0x7FFFFF) >> 23
        scale[0] = T.reinterpret(exponent << 23, "float32")
        inverse[0] = T.reinterpret((254 - exponent) << 23, "float32")
    else:
        inverse[0] = T.float32(MOST) / least


def fp4_code(scaled):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 as its place among them, a tie as the even place; the sign is bit 3."""
    size = T.abs(scaled)
    code = T.cast(size > 0.25, "int32") + T.cast(size >= 0.75, "int32") + T.cast(size > 1.25, "int32")
    code += T.cast(size >= 1.75, "int32") + T.cast(size > 2.5, "int32") + T.cast(size >= 3.5, "int32")
    code += T.cast(size > 5.0, "int32")
    return code | (((T.reinterpret(scaled, "int32") >> 31) & 1) << 3)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_groups_kernel(H, dtype, group, pack, fp4, rounded, vec, out_vec, threads):
    """Compile for rows of H channels: `group` of them share a scale, `pack` groups a word of exponents.

    A thread has VALUES values of a group, whose threads are neighbours. At most `threads` of them share a CTA: a part of a
    row, or several short rows. Loads take `vec` elements, stores `out_vec` bytes.
    """
    M = T.dynamic("M")
    x_stride, out_stride, scale_row, scale_column = T.dynamic("x_stride out_stride scale_row scale_column", "int64")
    lanes = group // VALUES
    groups = -(-H // group)
    words = -(-groups // pack)  # units of work in a row
    needed = words * pack * lanes  # threads of a row
    parts = -(-needed // threads)  # CTAs of a row
    across = -(-needed // (parts * lanes * pack)) * lanes * pack
    step = 32 // math.gcd(across, 32)  # rows that fill whole warps
    if across * step > threads:
        across, step = -(-across // 32) * 32, 1
    down = threads // across // step * step
    stored = VALUES // 2 if fp4 else VALUES
    columns = H // 2 if fp4 else H
    code = "uint8" if fp4 else "float8_e4m3fn"
    most, floor = (FP4_MOST, FP4_FLOOR) if fp4 else (E4M3_MOST, E4M3_FLOOR)

    @T.prim_func
    def cast_groups(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        out: T.StridedTensor((M, columns), (out_stride, 1), code),
        scales: T.StridedTensor((M, words), (scale_row, scale_column), "int32" if pack == 4 else "float32"),
    ):
        # Parts of a row vary fastest, so neighbouring CTAs read neighbouring memory.
        with T.Kernel(T.ceildiv(M, down) * parts, threads=(across, down)) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            thread = T.get_thread_binding(0)
            row = block // parts * down + T.get_thread_binding(1)
            place = (block % parts * across + thread) // lanes
            column = (block % parts * across + thread) * VALUES
            values = T.alloc_local((VALUES,), dtype)
            codes = T.alloc_local((stored,), code)
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)

            for c in T.unroll(VALUES // vec):
                for v in T.vectorized(vec):
                    values[c * vec + v] = 0
                if row < M and column + c * vec < H:
                    for v in T.vectorized(vec):
                        values[c * vec + v] = x[row, column + c * vec + v]
            for v in T.unroll(VALUES):
                amax = T.max(amax, T.abs(T.cast(values[v], "float32")))
            for step in T.unroll(lanes.bit_length() - 1):
                amax = T.max(amax, T.shfl_xor(amax, 1 << step))
            scale_of(amax, scale, inverse, most, floor, rounded)

            if fp4:
                for v in T.unroll(stored):
                    low = fp4_code(T.cast(values[2 * v], "float32") * inverse[0])
                    high = fp4_code(T.cast(values[2 * v + 1], "float32") * inverse[0])
                    codes[v] = T.cast(low | (high << 4), "uint8")
            else:
                for v in T.vectorized(VALUES):  # the cast saturates
                    codes[v] = T.cast(T.cast(values[v], "float32") * inverse[0], code)
            first = column // 2 if fp4 else column
            for c in T.unroll(stored // out_vec):
                if row < M and first + c * out_vec < columns:
                    for v in T.vectorized(out_vec):
                        out[row, first + c * out_vec + v] = codes[c * out_vec + v]
            if pack == 4:
                word = T.alloc_var("int32")
                exponent = (T.reinterpret(scale[0], "int32") >> 23) << (place % 4 * 8)
                word = T.Select(place < groups, exponent, 0)
                word |= T.shfl_xor(word, lanes)
                word |= T.shfl_xor(word, 2 * lanes)
                if row < M and place < groups and thread % (4 * lanes) == 0:
                    scales[row, place // 4] = word
            else:
                if row < M and place < groups and thread % lanes == 0:
                    scales[row, place] = scale[0]

    return cast_groups


def _run_groups(x, out, scale, round_scale, group, pack, fp4, threads):
    M, H = x.shape
    if M == 0:
        return
    vec = load_width(x, H)
    out_vec = store_width(out, out.shape[1], VALUES // 2 if fp4 else VALUES)
    cast_groups_kernel(H, x.dtype, group, pack, fp4, bool(round_scale), vec, out_vec, threads)(x, out, scale)


def run_per_token_cast(x, round_scale, out, scale, *, threads=256):
    """out = codes of x, scale = what they are multiplied by, per token and 128 channels; a power of two if asked.

    x: [M, H] in bfloat16 or float32, out: [M, H] in float8_e4m3fn, both with last stride 1; scale: [M, ceil(H / 128)] float32 of
    any strides: what lies between its elements is not touched.
    """
    _run_groups(x, out, scale, round_scale, 128, 1, False, threads)


def run_per_token_cast_ue8m0(x, out, scale, *, threads=256):
    """out = codes of x, scale = the exponents of the powers of two that they are multiplied by, four a word.

    x: [M, H] in bfloat16 or float32, out: [M, H] in float8_e4m3fn, both with last stride 1; scale: [M, ceil(H / 512)] int32 of
    any strides.
    """
    _run_groups(x, out, scale, True, 128, 4, False, threads)


def run_per_token_cast_mxfp8(x, out, scale, *, threads=256):
    """The same per token and 32 channels; scale: [M, ceil(H / 128)] int32."""
    _run_groups(x, out, scale, True, 32, 4, False, threads)


def run_per_token_cast_fp4(x, round_scale, out, scale, *, threads=256):
    """out = codes of x, two a byte, the even channel low; scale = what they are multiplied by, per token and 32 channels.

    x: [M, H] in bfloat16 or float32, H even, out: [M, H / 2] bytes, both with last stride 1; scale: [M, ceil(H / 32)] float32 of
    any strides.
    """
    _run_groups(x, out, scale, round_scale, 32, 1, True, threads)


# -- a scale a row ---------------------------------------------------------------------------------------------------------


def e5m6_code(value):
    """float16 cut toward zero, without its last four bits; up where its last bit and the 17 bits left out say so."""
    bits = T.reinterpret(value, "int32")
    exponent = (bits >> 23) & 0xFF
    normal = ((bits & 0x7FFFFFFF) - (112 << 23)) >> 17
    subnormal = ((bits & 0x7FFFFF) | 0x800000) >> T.min(T.max(130 - exponent, 0), 31)
    code = T.Select(exponent >= 113, normal, T.Select(exponent >= 103, subnormal, 0))
    up = T.cast(((code & 1) + (bits & 0x1FFFF)) > 0x10000, "int32")
    return (code + up) | (((bits >> 31) & 1) << 11)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_rows_kernel(H, dtype, rounded, vec, out_vec, threads):
    """Compile for rows of H channels, a CTA each: a thread has eight codes at a time, which are twelve bytes."""
    M = T.dynamic("M")
    x_stride, out_stride, scale_row = T.dynamic("x_stride out_stride scale_row", "int64")
    chunks = -(-H // (8 * threads))
    kept = chunks * 8 * dtype.itemsize <= 128  # in registers; longer rows are read again, from the cache
    loop, slots = (T.unroll, chunks) if kept else (T.serial, 1)

    @T.prim_func
    def cast_rows(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        out: T.StridedTensor((M, 3 * H // 2), (out_stride, 1), "uint8"),
        scales: T.StridedTensor((M, 1), (scale_row, 1), "float32"),
    ):
        with T.Kernel(M, threads=threads) as row:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            thread = T.get_thread_binding(0)
            values = T.alloc_local((slots, 8), dtype)
            code = T.alloc_local((8,), "int32")
            word = T.alloc_local((3,), "int32")
            codes = T.alloc_local((12,), "uint8")
            partial = T.alloc_shared((threads // 32,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)

            for c in loop(chunks):
                column = (c * threads + thread) * 8
                slot = c if kept else 0
                if column < H:
                    for p in T.unroll(8 // vec):
                        for v in T.vectorized(vec):
                            values[slot, p * vec + v] = x[row, column + p * vec + v]
                    for v in T.unroll(8):
                        amax = T.max(amax, T.abs(T.cast(values[slot, v], "float32")))
            amax = T.warp_reduce_max(amax)
            if thread % 32 == 0:
                partial[thread // 32] = amax
            T.sync_threads()
            for w in T.unroll(threads // 32):
                amax = T.max(amax, partial[w])
            scale_of(amax, scale, inverse, E5M6_MOST, E4M3_FLOOR, rounded)
            if thread == 0:
                scales[row, 0] = scale[0]

            for c in loop(chunks):
                column = (c * threads + thread) * 8
                slot = c if kept else 0
                if column < H:
                    if not kept:
                        for p in T.unroll(8 // vec):
                            for v in T.vectorized(vec):
                                values[0, p * vec + v] = x[row, column + p * vec + v]
                    for v in T.unroll(8):
                        code[v] = e5m6_code(T.cast(values[slot, v], "float32") * inverse[0])
                    word[0] = (code[0] << 20) | (code[1] << 8) | (code[2] >> 4)
                    word[1] = (code[2] << 28) | (code[3] << 16) | (code[4] << 4) | (code[5] >> 8)
                    word[2] = (code[5] << 24) | (code[6] << 12) | code[7]
                    for v in T.unroll(12):
                        codes[v] = T.cast((word[v // 4] >> (v % 4 * 8)) & 0xFF, "uint8")
                    for p in T.unroll(12 // out_vec):
                        for v in T.vectorized(out_vec):
                            out[row, column // 8 * 12 + p * out_vec + v] = codes[p * out_vec + v]

    return cast_rows


def run_per_token_cast_e5m6(x, round_scale, out, scale, *, threads=None):
    """out = codes of x, eight in twelve bytes, scale = what they are multiplied by, a power of two if asked.

    x: [M, H] in bfloat16 or float32, H a multiple of 8, out: [M, 3 * H / 2] bytes, both with last stride 1; scale: [M, 1]
    float32. threads None: as many as have 16 or more values each, at most 256.
    """
    M, H = x.shape
    if M == 0:
        return
    vec = min(8, load_width(x, H))
    out_vec = store_width(out, 12, 4)
    threads = threads or min(256, 32 * -(-H // 512))
    cast_rows_kernel(H, x.dtype, bool(round_scale), vec, out_vec, threads)(x, out, scale)


# -- blocks of several tokens ----------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_blocks_kernel(H, dtype, channels, rounded, vec, out_vec, threads):
    """Compile for rows of H columns: a CTA has a block of 128 x 128, which shares a scale, or each column its own."""
    M = T.dynamic("M")
    x_stride, out_stride, scale_row, scale_column = T.dynamic("x_stride out_stride scale_row scale_column", "int64")
    across = -(-H // 128)
    down = threads // 8  # rows of a pass: eight threads a row
    passes = 128 // down
    warps = threads // 32

    @T.prim_func
    def cast_blocks(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        out: T.StridedTensor((M, H), (out_stride, 1), "float8_e4m3fn"),
        scales: T.StridedTensor((T.ceildiv(M, 128), H if channels else across), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, 128) * across, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            thread = T.get_thread_binding(0)
            row = block // across * 128 + thread // 8
            column = block % across * 128 + thread % 8 * VALUES
            values = T.alloc_local((passes, VALUES), dtype)
            codes = T.alloc_local((VALUES,), "float8_e4m3fn")
            partial = T.alloc_shared((warps, 128), "float32")
            largest = T.alloc_local((VALUES,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            inverses = T.alloc_local((VALUES,), "float32")
            amax = T.alloc_var("float32", init=0.0)

            for i in T.unroll(passes):  # all loads first: they overlap
                for c in T.unroll(VALUES // vec):
                    for v in T.vectorized(vec):
                        values[i, c * vec + v] = 0
                    if row + i * down < M and column + c * vec < H:
                        for v in T.vectorized(vec):
                            values[i, c * vec + v] = x[row + i * down, column + c * vec + v]
            for v in T.unroll(VALUES):
                largest[v] = 0.0
                for i in T.unroll(passes):
                    largest[v] = T.max(largest[v], T.abs(T.cast(values[i, v], "float32")))
            if channels:
                for v in T.unroll(VALUES):
                    # The four rows of a warp, then the warps.
                    largest[v] = T.max(largest[v], T.shfl_xor(largest[v], 8))
                    largest[v] = T.max(largest[v], T.shfl_xor(largest[v], 16))
                if thread % 32 < 8:
                    for c in T.unroll(VALUES // 4):
                        for v in T.vectorized(4):
                            partial[thread // 32, thread % 8 * VALUES + c * 4 + v] = largest[c * 4 + v]
                T.sync_threads()
                if thread < 128:
                    for w in T.unroll(warps):
                        amax = T.max(amax, partial[w, thread])
                    scale_of(amax, scale, inverse, E4M3_MOST, E4M3_FLOOR, rounded)
                    if block % across * 128 + thread < H:
                        scales[block // across, block % across * 128 + thread] = scale[0]
                    partial[0, thread] = inverse[0]  # nobody else reads this column before the barrier
                T.sync_threads()
                for c in T.unroll(VALUES // 4):
                    for v in T.vectorized(4):
                        inverses[c * 4 + v] = partial[0, thread % 8 * VALUES + c * 4 + v]
            else:
                for v in T.unroll(VALUES):
                    amax = T.max(amax, largest[v])
                amax = T.warp_reduce_max(amax)
                if thread % 32 == 0:
                    partial[0, thread // 32] = amax
                T.sync_threads()
                for w in T.unroll(warps):
                    amax = T.max(amax, partial[0, w])
                scale_of(amax, scale, inverse, E4M3_MOST, E4M3_FLOOR, rounded)
                if thread == 0:
                    scales[block // across, block % across] = scale[0]
                for v in T.unroll(VALUES):
                    inverses[v] = inverse[0]
            for i in T.unroll(passes):
                for v in T.vectorized(VALUES):  # the cast saturates
                    codes[v] = T.cast(T.cast(values[i, v], "float32") * inverses[v], "float8_e4m3fn")
                for c in T.unroll(VALUES // out_vec):
                    if row + i * down < M and column + c * out_vec < H:
                        for v in T.vectorized(out_vec):
                            out[row + i * down, column + c * out_vec + v] = codes[c * out_vec + v]

    return cast_blocks


def _run_blocks(x, round_scale, out, scale, channels, threads):
    M, H = x.shape
    if M == 0:
        return
    vec, out_vec = load_width(x, H), store_width(out, H, VALUES)
    cast_blocks_kernel(H, x.dtype, channels, bool(round_scale), vec, out_vec, threads)(x, out, scale)


def run_per_block_cast(x, round_scale, out, scale, *, threads=256):
    """out = codes of x, scale = what they are multiplied by, per block of 128 x 128; a power of two if asked.

    x: [M, H] in bfloat16 or float32, out: [M, H] in float8_e4m3fn, both with last stride 1; scale: [ceil(M / 128),
    ceil(H / 128)] float32 of any strides. A CTA reads its block once.
    """
    _run_blocks(x, round_scale, out, scale, False, threads)


def run_per_channel_cast(x, round_scale, out, scale, *, threads=256):
    """out = codes of x, scale = what they are multiplied by, per channel and 128 tokens; a power of two if asked.

    x: [M, H] in bfloat16, out: [M, H] in float8_e4m3fn, both with last stride 1, M a multiple of 128; scale: [M / 128, H]
    float32 of any strides.
    """
    _run_blocks(x, round_scale, out, scale, True, threads)

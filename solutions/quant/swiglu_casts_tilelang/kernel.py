"""The activation of experts with its casts for training, TileLang: per channel for the weights' gradient, and its backward."""

import functools

import tilelang
import tilelang.language as T

E4M3 = "float8_e4m3fn"
BF16 = "bfloat16"
E4M3_MOST = 448.0
E4M3_FLOOR = 1e-4
VALUES = 16  # of a thread: their codes of 8 bits are one store of 16 bytes
TOKENS = 128  # of a CTA that casts per channel
CHANNELS = 64  # of such a CTA
RUN = 4  # tokens that a thread has of a channel, whose codes are a word


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


# -- per channel -----------------------------------------------------------------------------------------------------------


def activation(gate, up, limit):
    """silu(gate) * up: the accurate exponential and division, whose last bits decide how values are rounded."""
    gate = T.min(gate, limit)
    return gate / (T.float32(1) + T.exp(-gate)) * T.min(T.max(up, -limit), limit)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_channels_kernel(H, dtype, group, rounded, transposed, vec, out_vec):
    """Compile for rows of H results: 256 threads have 4 tokens of 8 channels each, a warp 16 tokens of all 64."""
    P = T.dynamic("P")
    x_stride, out_stride, scale_row, scale_column = T.dynamic("x_stride out_stride scale_row scale_column", "int64")
    strips = -(-H // CHANNELS)
    across = 8  # channels of a thread; as many threads have the channels of a token
    warps = TOKENS // 16
    together = group // 16  # warps whose tokens share a scale
    threads = 32 * warps
    passes = CHANNELS * TOKENS // RUN // threads

    @T.prim_func
    def cast_channels(
        x: T.StridedTensor((P, 2 * H), (x_stride, 1), dtype),
        limit: T.float32,
        out: T.StridedTensor((H, P) if transposed else (P, H), (out_stride, 1), E4M3),
        scales: T.StridedTensor((P // group, H), (scale_row, scale_column), "float32"),
    ):
        with T.Kernel(T.ceildiv(P, TOKENS) * strips, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(out_stride % out_vec == 0)
            T.assume(P % group == 0)  # so a word of codes ends within its row
            thread = T.get_thread_binding(0)
            first = block // strips * TOKENS
            start = block % strips * CHANNELS
            row = first + thread // across * RUN
            column = start + thread % across * across
            values = T.alloc_local((RUN, across), dtype)
            ups = T.alloc_local((RUN, across), dtype)
            largest = T.alloc_local((across,), "float32")
            inverses = T.alloc_local((across,), "float32")
            scaled = T.alloc_local((across, RUN), "float32")
            turned = T.alloc_local((across, RUN), E4M3)
            straight = T.alloc_local((RUN, across), E4M3)
            codes = T.alloc_local((passes, RUN), E4M3)
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            amax = T.alloc_var("float32", init=0.0)
            partial = T.alloc_shared((warps, CHANNELS), "float32")

            for i in T.unroll(RUN):  # all loads first: they overlap
                for c in T.unroll(across // vec):
                    for v in T.vectorized(vec):
                        values[i, c * vec + v] = 0
                    for v in T.vectorized(vec):
                        ups[i, c * vec + v] = 0
                    if row + i < P and column + c * vec < H:
                        for v in T.vectorized(vec):
                            values[i, c * vec + v] = x[row + i, column + c * vec + v]
                        for v in T.vectorized(vec):
                            ups[i, c * vec + v] = x[row + i, H + column + c * vec + v]
            for i in T.unroll(RUN):
                for v in T.unroll(across):
                    found = activation(T.cast(values[i, v], "float32"), T.cast(ups[i, v], "float32"), limit)
                    values[i, v] = T.cast(found, dtype)
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
                if first + thread // CHANNELS * group < P and start + thread % CHANNELS < H:
                    scales[first // group + thread // CHANNELS, start + thread % CHANNELS] = scale[0]
                # Nobody else reads this element before the barrier.
                partial[thread // CHANNELS * together, thread % CHANNELS] = inverse[0]
            T.sync_threads()
            for v in T.unroll(across):
                inverses[v] = partial[thread // 32 // together * together, thread % across * across + v]
            if transposed:
                # Four bytes more a channel, so that the words of neighbouring channels lie in other banks.
                tile = T.alloc_shared((CHANNELS, TOKENS + RUN), E4M3)
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
                        if start + p * warps + thread // 32 < H and first + thread % 32 * RUN + c * out_vec < P:
                            for v in T.vectorized(out_vec):
                                out[start + p * warps + thread // 32, first + thread % 32 * RUN + c * out_vec + v] = (
                                    codes[p, c * out_vec + v]
                                )
            else:
                for i in T.unroll(RUN):
                    for v in T.vectorized(across):  # the cast saturates
                        straight[i, v] = T.cast(T.cast(values[i, v], "float32") * inverses[v], E4M3)
                    for c in T.unroll(across // out_vec):
                        if row + i < P and column + c * out_vec < H:
                            for v in T.vectorized(out_vec):
                                out[row + i, column + c * out_vec + v] = straight[i, c * out_vec + v]

    return cast_channels


def _run_channels(x, group, limit, round_scale, out, scale, transposed):
    P, H = x.shape[0], x.shape[1] // 2
    if P == 0:
        return
    vec = access_width(x, H, 8)
    out_vec = access_width(out, P, RUN) if transposed else access_width(out, H, 8)
    kernel = cast_channels_kernel(H, x.dtype, group, bool(round_scale), transposed, vec, out_vec)
    kernel(x, float(limit), out, scale)


def run_swiglu_and_per_channel_cast(x, group, limit, round_scale, out, scale):
    """out = codes of bfloat16(silu(gate) * up), scale = what they are multiplied by, per channel and `group` tokens.

    x: [P, 2 * H] = [gate | up] in bfloat16, P a multiple of group (32 or 128), out: [P, H] in float8_e4m3fn, both with last
    stride 1; scale: [P / group, H] float32 of any strides.
    """
    _run_channels(x, group, limit, round_scale, out, scale, False)


def run_swiglu_and_per_channel_cast_transpose(x, group, limit, round_scale, out, scale):
    """The same with out [H, P]: the codes of a channel lie side by side."""
    _run_channels(x, group, limit, round_scale, out, scale, True)


# -- backward --------------------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def backward_kernel(H, group, rounded, vec, wide_vec, out_vec, threads):
    """Compile for rows of H results, a CTA each: a thread has VALUES channels of both halves at a time.

    vec: elements that an access of x and its codes takes; wide_vec: of grad_out, out and grad_x; out_vec: of grad_x_codes.
    """
    P, C = T.dynamic("P"), T.dynamic("C")
    x_stride, in_row, in_column, grad_stride = T.dynamic("x_stride in_row in_column grad_stride", "int64")
    out_stride, grad_x_stride, codes_stride = T.dynamic("out_stride grad_x_stride codes_stride", "int64")
    scale_row, scale_column = T.dynamic("scale_row scale_column", "int64")
    lanes = group // VALUES  # threads of a group, neighbours in a warp
    passes = -(-H // (VALUES * threads))
    groups = H // group

    @T.prim_func
    def backward(
        x: T.StridedTensor((P, 2 * H), (x_stride, 1), E4M3),
        x_scale: T.StridedTensor((P, 2 * groups), (in_row, in_column), "float32"),
        grad_out: T.StridedTensor((P, H), (grad_stride, 1), BF16),
        weights: T.Tensor((C,), "float32"),
        weight_of_row: T.Tensor((P,), "int32"),
        row_of_choice: T.Tensor((C,), "int32"),
        limit: T.float32,
        out: T.StridedTensor((P, H), (out_stride, 1), BF16),
        grad_x: T.StridedTensor((P, 2 * H), (grad_x_stride, 1), BF16),
        grad_x_codes: T.StridedTensor((P, 2 * H), (codes_stride, 1), E4M3),
        scales: T.StridedTensor((P, 2 * groups), (scale_row, scale_column), "float32"),
        grad_weights: T.Tensor((C,), "float32"),
    ):
        with T.Kernel(T.max(P, T.ceildiv(C, threads)), threads=threads) as row:
            T.assume(x_stride % vec == 0)  # run() chose them so; it lets the compiler use vector accesses
            T.assume(grad_stride % wide_vec == 0)
            T.assume(out_stride % wide_vec == 0)
            T.assume(grad_x_stride % wide_vec == 0)
            T.assume(codes_stride % out_vec == 0)
            thread = T.get_thread_binding(0)
            given = T.alloc_local((2, VALUES), E4M3)
            grads = T.alloc_local((VALUES,), BF16)
            made = T.alloc_local((VALUES,), BF16)
            values = T.alloc_local((2, VALUES), "float32")
            wide = T.alloc_local((2, VALUES), BF16)
            codes = T.alloc_local((VALUES,), E4M3)
            partial = T.alloc_shared((threads // 32,), "float32")
            scale = T.alloc_local((1,), "float32")
            inverse = T.alloc_local((1,), "float32")
            source = T.alloc_local((1,), "int32")
            place = T.alloc_local((1,), "int32")
            weight = T.alloc_local((1,), "float32")
            factor = T.alloc_local((2,), "float32")
            amax = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)

            # Choices that have no row.
            source[0] = T.if_then_else(row * threads + thread < C, row_of_choice[row * threads + thread], 0)
            if source[0] < 0:
                grad_weights[row * threads + thread] = 0.0
            place[0] = T.if_then_else(row < P, weight_of_row[row], -1)
            weight[0] = T.if_then_else(place[0] >= 0, weights[place[0]], 0.0)
            for c in T.serial(passes):
                column = (c * threads + thread) * VALUES
                for p in T.unroll(VALUES // vec):
                    for v in T.vectorized(vec):
                        given[0, p * vec + v] = T.cast(0.0, E4M3)
                    for v in T.vectorized(vec):
                        given[1, p * vec + v] = T.cast(0.0, E4M3)
                    if row < P and column + p * vec < H:
                        for v in T.vectorized(vec):
                            given[0, p * vec + v] = x[row, column + p * vec + v]
                        for v in T.vectorized(vec):
                            given[1, p * vec + v] = x[row, H + column + p * vec + v]
                for p in T.unroll(VALUES // wide_vec):
                    for v in T.vectorized(wide_vec):
                        grads[p * wide_vec + v] = 0
                    if row < P and column + p * wide_vec < H:
                        for v in T.vectorized(wide_vec):
                            grads[p * wide_vec + v] = grad_out[row, column + p * wide_vec + v]
                factor[0] = 0.0
                factor[1] = 0.0
                if row < P and column < H:
                    factor[0] = x_scale[row, column // group]
                    factor[1] = x_scale[row, groups + column // group]
                for v in T.unroll(VALUES):
                    free_gate = T.cast(given[0, v], "float32") * factor[0]
                    free_up = T.cast(given[1, v], "float32") * factor[1]
                    gate = T.min(free_gate, limit)
                    up = T.min(T.max(free_up, -limit), limit)
                    grad = T.cast(grads[v], "float32")
                    # The accurate exponential and divisions: scales depend on their last bits.
                    divisor = T.float32(1) + T.exp(-gate)
                    sigmoid = T.float32(1) / divisor
                    activated = gate / divisor * up
                    part = grad * weight[0] * sigmoid
                    slope = gate * (T.float32(1) - sigmoid) + T.float32(1)  # the compiler fuses it
                    made[v] = T.cast(activated * weight[0], BF16)
                    total = total + grad * activated
                    values[0, v] = T.Select(free_gate <= limit, part * up * slope, T.float32(0))
                    values[1, v] = T.Select(T.abs(free_up) <= limit, part * gate, T.float32(0))
                for p in T.unroll(VALUES // wide_vec):
                    if row < P and column + p * wide_vec < H:
                        for v in T.vectorized(wide_vec):
                            out[row, column + p * wide_vec + v] = made[p * wide_vec + v]
                for half in T.unroll(2):
                    amax = 0.0
                    for v in T.unroll(VALUES):
                        amax = T.max(amax, T.abs(values[half, v]))
                    for step in T.unroll(lanes.bit_length() - 1):
                        amax = T.max(amax, T.shfl_xor(amax, 1 << step))
                    scale_of(amax, scale, inverse, rounded)
                    for v in T.vectorized(VALUES):
                        wide[half, v] = T.cast(values[half, v], BF16)
                    for v in T.vectorized(VALUES):  # the cast saturates
                        codes[v] = T.cast(values[half, v] * inverse[0], E4M3)
                    for p in T.unroll(VALUES // wide_vec):
                        if row < P and column + p * wide_vec < H:
                            for v in T.vectorized(wide_vec):
                                grad_x[row, half * H + column + p * wide_vec + v] = wide[half, p * wide_vec + v]
                    for p in T.unroll(VALUES // out_vec):
                        if row < P and column + p * out_vec < H:
                            for v in T.vectorized(out_vec):
                                grad_x_codes[row, half * H + column + p * out_vec + v] = codes[p * out_vec + v]
                    if row < P and column < H and thread % lanes == 0:
                        scales[row, half * groups + column // group] = scale[0]
            total = T.warp_reduce_sum(total)
            if thread % 32 == 0:
                partial[thread // 32] = total
            T.sync_threads()
            if thread == 0 and place[0] >= 0:
                total = 0.0
                for w in T.unroll(threads // 32):
                    total = total + partial[w]
                grad_weights[place[0]] = total

    return backward


def run_swiglu_backward_and_per_token_cast(
    x,
    x_scale,
    grad_out,
    weights,
    weight_of_row,
    row_of_choice,
    group,
    limit,
    round_scale,
    out,
    grad_x,
    grad_x_codes,
    grad_x_scale,
    grad_weights,
    *,
    threads=128,
):
    """out = silu(gate) * up * weight, the gradient of x = [gate | up] with its codes and scales, and that of the weights.

    x: [P, 2 * H] in float8_e4m3fn, H a multiple of group (32 or 128), grad_out and out: [P, H] and grad_x: [P, 2 * H] in
    bfloat16, grad_x_codes: [P, 2 * H] in float8_e4m3fn, all with last stride 1; x_scale and grad_x_scale: [P, 2 * H / group]
    float32 of any strides; weights and grad_weights: [M, K] float32, weight_of_row: [P] and row_of_choice: [M, K] int32, all
    contiguous.
    """
    P, H = out.shape
    if P == 0:  # no rows that a kernel could be given
        grad_weights.zero_()
        return
    wide_vec = min(access_width(wide, H) for wide in (grad_out, out, grad_x))
    vec, out_vec = access_width(x, H), access_width(grad_x_codes, H)
    kernel = backward_kernel(H, group, bool(round_scale), vec, wide_vec, out_vec, threads)
    given = (x, x_scale, grad_out, weights.view(-1), weight_of_row, row_of_choice.view(-1), float(limit))
    kernel(*given, out, grad_x, grad_x_codes, grad_x_scale, grad_weights.view(-1))

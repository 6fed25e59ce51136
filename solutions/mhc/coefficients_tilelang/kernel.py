"""The coefficients of hyper-connections, TileLang: the projection of all streams of a token, gates, Sinkhorn steps.

The projection reads all streams and is bound by memory; the rest is a handful of float32 values a token and bound by latency.
"""

import functools

import tilelang
import tilelang.language as T
import torch

FEW_TOKENS = 64  # up to this many a CTA of the last step has one token's coefficients, else several
FINISH_THREADS = 256
BATCH = 8  # loads of a thread in flight where partial sums are added


def _pow2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _matrix_steps(C):
    """Sinkhorn of matrices of C streams by neighbouring lanes of a warp, as a macro, and the layout of a matrix.

    A lane has one element of it, or some of one column. Sums are exchanges among these lanes.
    """
    side = _pow2(C)
    lanes = min(32, side * side)
    per = side * side // lanes
    apart = lanes // side  # rows between two elements of a lane

    @T.macro
    def row_sum(values, totals):
        for e in T.unroll(per):
            totals[e] = values[e]
            for step in T.unroll(side.bit_length() - 1):
                totals[e] += T.shfl_xor(totals[e], 1 << step)

    @T.macro
    def divide_columns(values, total, eps, column):
        total[0] = 0.0
        for e in T.unroll(per):
            total[0] += values[e]
        for step in T.unroll(apart.bit_length() - 1):
            total[0] += T.shfl_xor(total[0], side << step)
        total[0] = T.if_then_else(column < C, total[0] + eps, 1.0)  # not 0 / 0 outside
        for e in T.unroll(per):
            values[e] = values[e] / total[0]

    @T.macro
    def normalise(mixing, totals, total, repeat, eps, column, first_row):
        for e in T.unroll(per):
            totals[e] = T.if_then_else(column < C, mixing[e], -T.infinity("float32"))
            for step in T.unroll(side.bit_length() - 1):
                totals[e] = T.max(totals[e], T.shfl_xor(totals[e], 1 << step))
            mixing[e] = T.if_then_else(column < C, T.exp(mixing[e] - totals[e]), 0.0)
        row_sum(mixing, totals)
        for e in T.unroll(per):
            real = column < C and first_row + e * apart < C
            mixing[e] = T.if_then_else(real, mixing[e] / totals[e] + eps, 0.0)
        divide_columns(mixing, total, eps, column)
        for _ in T.serial(repeat - 1):
            row_sum(mixing, totals)
            for e in T.unroll(per):
                mixing[e] = mixing[e] / T.if_then_else(first_row + e * apart < C, totals[e] + eps, 1.0)
            divide_columns(mixing, total, eps, column)

    return side, lanes, per, apart, normalise


@functools.cache
@tilelang.jit
def sinkhorn_kernel(C, threads):
    """Compile for C streams."""
    M = T.dynamic("M")
    side, lanes, per, apart, normalise = _matrix_steps(C)

    @T.prim_func
    def sinkhorn(
        z: T.Tensor((M, C, C), "float32"), repeat: T.int32, eps: T.float32, out: T.Tensor((M, C, C), "float32")
    ):
        with T.Kernel(T.ceildiv(M * lanes, threads), threads=threads) as block:
            thread = block * threads + T.get_thread_binding(0)
            token = thread // lanes
            column = thread % side
            first_row = thread % lanes // side
            mixing = T.alloc_local((per,), "float32")
            totals = T.alloc_local((per,), "float32")
            total = T.alloc_local((1,), "float32")
            for e in T.unroll(per):
                mixing[e] = 0.0
                if token < M and column < C and first_row + e * apart < C:
                    mixing[e] = z[token, first_row + e * apart, column]
            normalise(mixing, totals, total, repeat, eps, column, first_row)
            for e in T.unroll(per):
                if token < M and column < C and first_row + e * apart < C:
                    out[token, first_row + e * apart, column] = mixing[e]

    return sinkhorn


def run_sinkhorn(z, repeat, eps, out, *, threads=128):
    """out = z's row softmax + eps, divided by columns, then repeat - 1 times by rows and by columns (sums + eps); float32.

    z, out: [M, C, C], contiguous, C <= 8. All steps run in registers, in one launch.
    """
    M, C = z.shape[:2]
    if M:
        sinkhorn_kernel(C, threads)(z, repeat, eps, out)


@functools.cache
@tilelang.jit
def split_mixes_kernel(C, threads):
    """Compile for C streams; a thread has one projected value of a token."""
    M = T.dynamic("M")
    J = C * (C + 2)

    @T.prim_func
    def split_mixes(
        mixes: T.Tensor((M, J), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((J,), "float32"),
        post_mult: T.float32,
        pre_eps: T.float32,
        pre: T.Tensor((M, C), "float32"),
        post: T.Tensor((M, C), "float32"),
        comb: T.Tensor((M, C * C), "float32"),
    ):
        with T.Kernel(T.ceildiv(M * J, threads), threads=threads) as block:
            at = block * threads + T.get_thread_binding(0)
            token = at // J
            j = at % J
            score = T.alloc_local((1,), "float32")
            if token < M:
                score[0] = mixes[token, j]
                if j < C:
                    score[0] = score[0] * scale[0] + base[j]
                    pre[token, j] = 1.0 / (1.0 + T.exp(-score[0])) + pre_eps
                elif j < 2 * C:
                    score[0] = score[0] * scale[1] + base[j]
                    post[token, j - C] = 1.0 / (1.0 + T.exp(-score[0])) * post_mult
                else:
                    comb[token, j - 2 * C] = score[0] * scale[2] + base[j]

    return split_mixes


def run_pre_split_mixes(mixes, scale, base, streams, post_mult, pre_eps, pre, post, comb, *, threads=128):
    """z = mixes * scale of its part + base; pre = sigmoid(z) + pre_eps, post = post_mult * sigmoid(z), comb = z; float32.

    Shapes: mixes [M, C * (C + 2)], base of one row, scale [3], pre and post [M, C], comb [M, C, C]; contiguous, C = streams.
    """
    M = mixes.shape[0]
    if M:
        matrices = comb.view(M, streams * streams)
        split_mixes_kernel(streams, threads)(mixes, scale, base, post_mult, pre_eps, pre, post, matrices)


@functools.cache
@tilelang.jit
def head_mix_kernel(C, threads):
    """Compile for C streams; a thread has one value of a token."""
    M = T.dynamic("M")

    @T.prim_func
    def head_mix(
        mix: T.Tensor((M, C), "float32"),
        scale: T.Tensor((1,), "float32"),
        base: T.Tensor((C,), "float32"),
        eps: T.float32,
        out: T.Tensor((M, C), "float32"),
    ):
        with T.Kernel(T.ceildiv(M * C, threads), threads=threads) as block:
            at = block * threads + T.get_thread_binding(0)
            token = at // C
            j = at % C
            if token < M:
                out[token, j] = 1.0 / (1.0 + T.exp(-(mix[token, j] * scale[0] + base[j]))) + eps

    return head_mix


def run_head_compute_mix(mix, scale, base, eps, out, *, threads=128):
    """out[M, C] = sigmoid(mix * scale + base) + eps; scale [1], base [C], all float32 and contiguous."""
    M, C = mix.shape
    if M:
        head_mix_kernel(C, threads)(mix, scale, base, eps, out)


# -- projection ----------------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.disable_wgmma": True})  # tiles are written by threads, which wgmma reads another way
def partial_kernel(J, K, dtype, width, block_m, block_k, steps, vec, fn_vec, threads):
    """Compile the products of a run of `steps` blocks of columns for a tile of tokens, with their sums of squares in column J.

    float32 weights meet the streams on tensor cores without loss: a weight is the sum of three bfloat16 numbers, side by side in
    a tile, and each product of two bfloat16 numbers is exact in float32; float32 streams are three numbers too. Each block of
    columns starts from zero and is added in float32, so that the truncation of long sums in tensor cores does not add up.
    """
    M = T.dynamic("M")
    splits = -(-K // (steps * block_k))
    parts = 3 if str(dtype) == "torch.float32" else 1
    lanes, fn_lanes = block_k // vec, block_k // fn_vec  # threads a row
    rows, fn_rows = threads // lanes, threads // fn_lanes  # rows at once
    passes, fn_passes = -(-block_m // rows), -(-width // fn_rows)
    stored = -(-block_m * (J + 1) // threads)

    @T.macro
    def load(x, fn, values, factors, token, column, thread):
        for p in T.unroll(passes):
            for v in T.vectorized(vec):
                values[p, v] = 0
            row = p * rows + thread // lanes
            if row < block_m and token + row < M and column + thread % lanes * vec < K:
                for v in T.vectorized(vec):
                    values[p, v] = x[token + row, column + thread % lanes * vec + v]
        for p in T.unroll(fn_passes):
            for v in T.vectorized(fn_vec):
                factors[p, v] = 0
            row = p * fn_rows + thread // fn_lanes
            if row < J and column + thread % fn_lanes * fn_vec < K:
                for v in T.vectorized(fn_vec):
                    factors[p, v] = fn[row, column + thread % fn_lanes * fn_vec + v]

    @T.macro
    def store_parts(tile, row, apart, column, values, p, count, pieces, rest):
        """Three bfloat16 numbers whose sum is a float32 one to the last bit, in rows of a tile that lie `apart`."""
        for v in T.unroll(count):
            rest[0] = T.cast(values[p, v], "float32")
            for n in T.unroll(3):
                pieces[n, v] = T.cast(rest[0], "bfloat16")
                rest[0] = rest[0] - T.cast(pieces[n, v], "float32")
        for n in T.unroll(3):
            for v in T.vectorized(count):
                tile[n * apart + row, column + v] = pieces[n, v]

    @T.prim_func
    def partial_products(
        x: T.Tensor((M, K), dtype), fn: T.Tensor((J, K), "float32"), out: T.Tensor((splits, M, J + 1), "float32")
    ):
        with T.Kernel(T.ceildiv(M, block_m), splits, threads=threads) as (tile, split):
            thread = T.get_thread_binding(0)
            x_tile = T.alloc_shared((parts * block_m, block_k), "bfloat16")
            fn_tile = T.alloc_shared((3 * width, block_k), "bfloat16")
            all_products = T.alloc_shared((parts * block_m, 3 * width), "float32")
            all_squares = T.alloc_shared((block_m, lanes), "float32")
            sums = T.alloc_fragment((parts * block_m, 3 * width), "float32")
            total = T.alloc_fragment((parts * block_m, 3 * width), "float32")
            values = T.alloc_local((passes, vec), dtype)
            factors = T.alloc_local((fn_passes, fn_vec), "float32")
            squares = T.alloc_local((passes,), "float32")
            rest = T.alloc_local((1,), "float32")
            pieces = T.alloc_local((3, max(vec, fn_vec)), "bfloat16")

            T.clear(total)
            for p in T.unroll(passes):
                squares[p] = 0.0
            load(x, fn, values, factors, tile * block_m, split * steps * block_k, thread)
            for step in T.serial(steps):
                for p in T.unroll(passes):
                    row = p * rows + thread // lanes
                    for v in T.unroll(vec):
                        squares[p] += T.cast(values[p, v], "float32") * T.cast(values[p, v], "float32")
                    if row < block_m:
                        if parts == 3:
                            store_parts(x_tile, row, block_m, thread % lanes * vec, values, p, vec, pieces, rest)
                        else:
                            for v in T.vectorized(vec):
                                x_tile[row, thread % lanes * vec + v] = values[p, v]
                for p in T.unroll(fn_passes):
                    row = p * fn_rows + thread // fn_lanes
                    if row < width:
                        store_parts(fn_tile, row, width, thread % fn_lanes * fn_vec, factors, p, fn_vec, pieces, rest)
                T.sync_threads()
                if step + 1 < steps:
                    load(x, fn, values, factors, tile * block_m, (split * steps + step + 1) * block_k, thread)
                T.gemm(x_tile, fn_tile, sums, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(parts * block_m, 3 * width):
                    total[i, j] = total[i, j] + sums[i, j]
                T.sync_threads()

            for i, j in T.Parallel(parts * block_m, 3 * width):
                all_products[i, j] = total[i, j]
            for p in T.unroll(passes):
                if p * rows + thread // lanes < block_m:
                    all_squares[p * rows + thread // lanes, thread % lanes] = squares[p]
            T.sync_threads()
            for q in T.serial(stored):
                i = (q * threads + thread) // (J + 1)
                j = (q * threads + thread) % (J + 1)
                if i < block_m and tile * block_m + i < M:
                    rest[0] = 0.0
                    if j < J:
                        for n in T.unroll(parts * 3):  # the smallest first
                            rest[0] += all_products[(parts - 1 - n % parts) * block_m + i, (2 - n // parts) * width + j]
                    else:
                        for lane in T.serial(lanes):
                            rest[0] += all_squares[i, lane]
                    out[split, tile * block_m + i, j] = rest[0]

    return partial_products


def _vector(H, *tensors):
    """The widest power of two of elements, at most 16 bytes, that divides a row and all addresses."""
    itemsize = tensors[0].element_size()
    bits = H | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.data_ptr() // itemsize
    return bits & -bits


def _partials(residual, fn, block_m, splits):
    """float32 [splits, M, J + 1]: products in the first J columns, sums of squares in the last."""
    M = residual.shape[0]
    J, K = fn.shape
    width = -(-J // 32) * 32
    wide = residual.element_size() == 4
    block_m = 16 if wide or width > 32 else block_m or (64 if M >= 1024 else 16)  # what registers hold
    block_k = 64 if wide or width > 32 else 128
    tiles, blocks = -(-M // block_m), -(-K // block_k)
    # About four CTAs a multiprocessor of an H200, and two blocks of columns each where that leaves enough of them.
    splits = min(blocks, splits or max(1, min(-(-blocks // (1 if tiles == 1 else 2)), 512 // tiles, 128)))
    steps = -(-blocks // splits)
    partial = torch.empty((-(-blocks // steps), M, J + 1), dtype=torch.float32, device=residual.device)
    x = residual.view(M, K)
    threads = 256 if block_m == 64 else 128
    vectors = _vector(K, x), _vector(K, fn)
    partial_kernel(J, K, x.dtype, width, block_m, block_k, steps, *vectors, threads)(x, fn, partial)
    return partial


@functools.cache
@tilelang.jit
def norm_finish_kernel(J, K, splits, threads):
    """Compile the sums of `splits` partial sums; a thread has one projected value of a token."""
    M = T.dynamic("M")

    @T.prim_func
    def norm_finish(
        partial: T.Tensor((splits, M, J + 1), "float32"),
        eps: T.float32,
        mixes: T.Tensor((M, J), "float32"),
        rstd: T.Tensor((M,), "float32"),
    ):
        with T.Kernel(T.ceildiv(M * J, threads), threads=threads) as block:
            at = block * threads + T.get_thread_binding(0)
            token = at // J
            j = at % J
            sums = T.alloc_local((2,), "float32")
            if token < M:
                sums[0] = 0.0
                sums[1] = 0.0
                for batch in T.serial(-(-splits // BATCH)):
                    for b in T.unroll(BATCH):
                        if batch * BATCH + b < splits:
                            sums[0] += partial[batch * BATCH + b, token, j]
                            sums[1] += partial[batch * BATCH + b, token, J]
                sums[1] = T.rsqrt(sums[1] * (1.0 / K) + eps)
                mixes[token, j] = sums[0] * sums[1]
                if j == 0:
                    rstd[token] = sums[1]

    return norm_finish


def run_norm_fn(residual, fn, eps, mixes, rstd, *, block_m=None, splits=None):
    """mixes[M, J] = (x @ fn.T) * rstd, rstd[M] = rsqrt(mean(x^2) + eps), for x = residual [M, C, H] with a token's streams flat.

    fn [J, C * H] in float32, residual in bfloat16 or float32; contiguous, J <= 127. Products are those of float32.
    Two launches: partial sums over runs of columns, and their sum in a fixed order.
    block_m = None: 64 tokens a tile where there are many, else 16; splits = None: by how many tiles there are.
    """
    if residual.shape[0]:
        partial = _partials(residual, fn, block_m, splits)
        norm_finish_kernel(*fn.shape, partial.shape[0], 128)(partial, eps, mixes, rstd)


@T.macro
def add_splits(partial, shared, sums, first, tokens, begin, count, last, splits, groups, M, thread):
    """shared[g, t, v] = every `groups`-th partial sum of value begin + v of token first + t; v = count is the sum of squares.

    A thread has one token, one value and one group; all threads of the CTA take part.
    """
    value = thread % (count + 1)
    t = thread // (count + 1) % tokens
    group = thread // ((count + 1) * tokens)
    if group < groups:
        sums[0] = 0.0
        if first + t < M:
            for batch in T.serial(T.ceildiv(splits, groups * BATCH)):
                for b in T.unroll(BATCH):
                    split = (batch * BATCH + b) * groups + group
                    if split < splits:
                        sums[0] += partial[split, first + t, T.if_then_else(value < count, begin + value, last)]
        shared[group, t, value] = sums[0]


def _collapse(C, H, J, dtype, splits, vec, threads):
    """The weighted sum of a token's streams for a block of columns, as a macro, and how many such blocks and groups there are.

    Its gates are computed here once more. Tokens go backwards: the last that the projection has read are still in the L2.
    """
    columns = threads * vec
    blocks = -(-H // columns)
    full = H % columns == 0
    groups = min(_pow2(splits), threads // (C + 1))

    @T.macro
    def collapse(place, partial, residual, scale, base, out, rms_eps, gate_eps, shared, gates, sums, M):
        thread = T.get_thread_binding(0)
        token = M - 1 - place // blocks
        column = (place % blocks * threads + thread) * vec
        streams = T.alloc_local((C, vec), dtype)
        total = T.alloc_local((vec,), "float32")
        result = T.alloc_local((vec,), dtype)
        if full or column < H:
            for c in T.unroll(C):
                for v in T.vectorized(vec):
                    streams[c, v] = residual[token, c, column + v]
        add_splits(partial, shared, sums, token, 1, 0, C, J, splits, groups, M, thread)
        T.sync_threads()
        if thread < C:
            sums[0] = 0.0
            sums[1] = 0.0
            for g in T.serial(groups):
                sums[0] += shared[g, 0, thread]
                sums[1] += shared[g, 0, C]
            sums[0] = sums[0] * T.rsqrt(sums[1] * (1.0 / (C * H)) + rms_eps) * scale[0] + base[thread]
            gates[thread] = 1.0 / (1.0 + T.exp(-sums[0])) + gate_eps
        T.sync_threads()
        if full or column < H:
            for v in T.unroll(vec):
                total[v] = 0.0
            for c in T.unroll(C):
                for v in T.unroll(vec):
                    total[v] += gates[c] * T.cast(streams[c, v], "float32")
            for v in T.unroll(vec):
                result[v] = T.cast(total[v], dtype)
            for v in T.vectorized(vec):
                out[token, column + v] = result[v]

    return blocks, groups, collapse


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def pre_finish_kernel(C, H, dtype, splits, tokens, vec, threads):
    """Compile for C streams of H elements and `splits` partial sums.

    The first CTAs have post and comb of `tokens` tokens each, all others a block of columns of one token's sum of streams: so
    the steps of Sinkhorn, all latency, run beside the reading of the streams.
    """
    M = T.dynamic("M")
    J = C * (C + 2)
    side, lanes, per, apart, normalise = _matrix_steps(C)
    blocks, groups, collapse = _collapse(C, H, J, dtype, splits, vec, threads)
    coefficients = C * (C + 1)  # those of post, then those of comb
    own_groups = min(_pow2(splits), threads // (tokens * (coefficients + 1)))

    @T.prim_func
    def pre_finish(
        partial: T.Tensor((splits, M, J + 1), "float32"),
        residual: T.Tensor((M, C, H), dtype),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((J,), "float32"),
        rms_eps: T.float32,
        pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        repeat: T.int32,
        post: T.Tensor((M, C), "float32"),
        comb: T.Tensor((M, C, C), "float32"),
        layer_input: T.Tensor((M, H), dtype),
    ):
        with T.Kernel(T.ceildiv(M, tokens) + M * blocks, threads=threads) as block:
            thread = T.get_thread_binding(0)
            shared = T.alloc_shared((groups, 1, C + 1), "float32")
            gates = T.alloc_shared((C,), "float32")
            own = T.alloc_shared((own_groups, tokens, coefficients + 1), "float32")
            values = T.alloc_shared((tokens, coefficients), "float32")
            sums = T.alloc_local((2,), "float32")
            mixing = T.alloc_local((per,), "float32")
            totals = T.alloc_local((per,), "float32")
            total = T.alloc_local((1,), "float32")
            if block < T.ceildiv(M, tokens):
                add_splits(
                    partial, own, sums, block * tokens, tokens, C, coefficients, J, splits, own_groups, M, thread
                )
                T.sync_threads()
                if thread < tokens * coefficients:
                    t = thread // coefficients
                    j = thread % coefficients
                    sums[0] = 0.0
                    sums[1] = 0.0
                    for g in T.serial(own_groups):
                        sums[0] += own[g, t, j]
                        sums[1] += own[g, t, coefficients]
                    sums[0] = sums[0] * T.rsqrt(sums[1] * (1.0 / (C * H)) + rms_eps)
                    sums[0] = sums[0] * scale[T.if_then_else(j < C, 1, 2)] + base[C + j]
                    values[t, j] = sums[0]
                    if j < C and block * tokens + t < M:
                        post[block * tokens + t, j] = post_mult / (1.0 + T.exp(-sums[0]))
                T.sync_threads()
                t = thread // lanes
                column = thread % side
                first_row = thread % lanes // side
                for e in T.unroll(per):
                    mixing[e] = 0.0
                    if t < tokens and column < C and first_row + e * apart < C:
                        mixing[e] = values[t, C + (first_row + e * apart) * C + column]
                normalise(mixing, totals, total, repeat, sinkhorn_eps, column, first_row)
                for e in T.unroll(per):
                    if t < tokens and block * tokens + t < M and column < C and first_row + e * apart < C:
                        comb[block * tokens + t, first_row + e * apart, column] = mixing[e]
            else:
                place = block - T.ceildiv(M, tokens)
                collapse(place, partial, residual, scale, base, layer_input, rms_eps, pre_eps, shared, gates, sums, M)

    return pre_finish


def run_pre_fused(
    residual,
    fn,
    scale,
    base,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    repeat,
    post,
    comb,
    layer_input,
    *,
    block_m=None,
    splits=None,
):
    """norm_fn, split_mixes, Sinkhorn and apply_mix of one sublayer: post [M, C], comb [M, C, C], layer_input [M, H].

    Shapes: residual [M, C, H] and layer_input in bfloat16 or float32, fn [C * (C + 2), C * H], scale [3], base [C * (C + 2)],
    post and comb in float32; contiguous, C <= 8. Products are those of float32.
    Two launches: partial sums of the projection, and everything else. The streams are read twice, the second time in part
    from the L2. block_m, splits: as in run_norm_fn.
    """
    M, C, H = residual.shape
    if M == 0:
        return
    partial = _partials(residual, fn, block_m, splits)
    # Every coefficient and every element of a matrix has a thread of its own.
    tokens = 1 if M <= FEW_TOKENS else min(8, FINISH_THREADS // max(C * (C + 1) + 1, min(32, _pow2(C) ** 2)))
    vec = _vector(H, residual, layer_input)
    kernel = pre_finish_kernel(C, H, residual.dtype, partial.shape[0], tokens, vec, FINISH_THREADS)
    scalars = rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat
    kernel(partial, residual, scale, base, *scalars, post, comb, layer_input)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def head_finish_kernel(C, H, dtype, splits, vec, threads):
    """Compile for C streams of H elements and `splits` partial sums; a CTA has a block of columns of one token."""
    M = T.dynamic("M")
    blocks, groups, collapse = _collapse(C, H, C, dtype, splits, vec, threads)

    @T.prim_func
    def head_finish(
        partial: T.Tensor((splits, M, C + 1), "float32"),
        residual: T.Tensor((M, C, H), dtype),
        scale: T.Tensor((1,), "float32"),
        base: T.Tensor((C,), "float32"),
        rms_eps: T.float32,
        eps: T.float32,
        out: T.Tensor((M, H), dtype),
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            shared = T.alloc_shared((groups, 1, C + 1), "float32")
            gates = T.alloc_shared((C,), "float32")
            sums = T.alloc_local((2,), "float32")
            collapse(block, partial, residual, scale, base, out, rms_eps, eps, shared, gates, sums, M)

    return head_finish


def run_head_fused(residual, fn, scale, base, rms_eps, eps, out, *, block_m=None, splits=None, threads=256):
    """out[M, H] = T(sum over c of w[M, c] * residual[M, c, H]), w = sigmoid(scale * fn of the normalised streams + base) + eps.

    Shapes: residual [M, C, H] and out in bfloat16 or float32; fn [C, C * H], scale [1], base [C] in float32; contiguous, C <= 8.
    Products are those of float32. Two launches, as run_pre_fused; `threads` of a CTA that collapses streams.
    """
    M, C, H = residual.shape
    if M:
        partial = _partials(residual, fn, block_m, splits)
        kernel = head_finish_kernel(C, H, out.dtype, partial.shape[0], _vector(H, residual, out), threads)
        kernel(partial, residual, scale, base, rms_eps, eps, out)

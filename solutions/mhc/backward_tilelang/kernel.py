"""The gradients of hyper-connections, TileLang.

Streams are read once, and a token's coefficients get their gradients, dot products over its columns, in the same pass. Sums over
tokens are partial sums in a fixed order and their sum: no atomics, so that results repeat bit for bit.
"""

import functools

import tilelang
import tilelang.language as T
import torch

SUM_THREADS = 512  # threads of the one CTA that adds up partial sums over tokens


def _pow2(value: int) -> int:
    return 1 << (value - 1).bit_length()


# -- streams -------------------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def expand_backward_kernel(C, H, dtype, vec, threads):
    """Compile for C streams of H elements, of which a thread reads `vec` at a time."""
    M = T.dynamic("M")
    blocks = -(-H // (threads * vec))
    full = H % (threads * vec) == 0

    @T.prim_func
    def expand_backward(grad_out: T.Tensor((M, C, H), dtype), grad_x: T.Tensor((M, H), dtype)):
        with T.Kernel(M * blocks, threads=threads) as block:
            token = block // blocks
            column = (block % blocks * threads + T.get_thread_binding(0)) * vec
            grads = T.alloc_local((C, vec), dtype)
            total = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)
            if full or column < H:
                for c in T.unroll(C):
                    for v in T.vectorized(vec):
                        grads[c, v] = grad_out[token, c, column + v]
                for v in T.unroll(vec):
                    total[v] = 0.0
                for c in T.unroll(C):
                    for v in T.unroll(vec):
                        total[v] += T.cast(grads[c, v], "float32")
                for v in T.unroll(vec):
                    result[v] = T.cast(total[v], dtype)
                for v in T.vectorized(vec):
                    grad_x[token, column + v] = result[v]

    return expand_backward


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def apply_backward_kernel(C, H, dtype, vec, threads):
    """Compile for C streams of H elements, which the threads of a CTA walk through `vec` at a time; a CTA has one token."""
    M = T.dynamic("M")
    warps = threads // 32
    steps = -(-H // (threads * vec))
    full = H % (threads * vec) == 0

    @T.prim_func
    def apply_backward(
        residual: T.Tensor((M, C, H), dtype),
        mix: T.Tensor((M, C), "float32"),
        grad_out: T.Tensor((M, H), dtype),
        grad_residual: T.Tensor((M, C, H), dtype),
        grad_mix: T.Tensor((M, C), "float32"),
    ):
        with T.Kernel(M, threads=threads) as token:
            thread = T.get_thread_binding(0)
            streams = T.alloc_local((C, vec), dtype)
            grads = T.alloc_local((vec,), dtype)
            result = T.alloc_local((vec,), dtype)
            weights = T.alloc_local((C,), "float32")
            dots = T.alloc_local((C,), "float32")
            sums = T.alloc_shared((warps, C), "float32")
            for c in T.unroll(C):
                weights[c] = mix[token, c]
                dots[c] = 0.0
            for step in T.serial(steps):
                column = (step * threads + thread) * vec
                if full or column < H:
                    for v in T.vectorized(vec):
                        grads[v] = grad_out[token, column + v]
                    for c in T.unroll(C):
                        for v in T.vectorized(vec):
                            streams[c, v] = residual[token, c, column + v]
                    for c in T.unroll(C):
                        for v in T.unroll(vec):
                            dots[c] += T.cast(streams[c, v], "float32") * T.cast(grads[v], "float32")
                        for v in T.unroll(vec):
                            result[v] = T.cast(weights[c] * T.cast(grads[v], "float32"), dtype)
                        for v in T.vectorized(vec):
                            grad_residual[token, c, column + v] = result[v]
            for c in T.unroll(C):
                dots[c] = T.warp_reduce_sum(dots[c])
            if thread % 32 == 0:
                for c in T.unroll(C):
                    sums[thread // 32, c] = dots[c]
            T.sync_threads()
            if thread < C:
                dots[0] = 0.0
                for w in T.unroll(warps):
                    dots[0] += sums[w, thread]
                grad_mix[token, thread] = dots[0]

    return apply_backward


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def post_backward_kernel(C, H, dtype, vec, threads):
    """Compile for C streams of H elements, which the threads of a CTA walk through `vec` at a time; a CTA has one token."""
    M = T.dynamic("M")
    warps = threads // 32
    steps = -(-H // (threads * vec))
    full = H % (threads * vec) == 0
    count = C + C * C  # dot products of a token: those of post, then those of comb, input stream first

    @T.prim_func
    def post_backward(
        y: T.Tensor((M, H), dtype),
        residual: T.Tensor((M, C, H), dtype),
        post: T.Tensor((M, C), "float32"),
        comb: T.Tensor((M, C, C), "float32"),
        grad_out: T.Tensor((M, C, H), dtype),
        grad_y: T.Tensor((M, H), dtype),
        grad_residual: T.Tensor((M, C, H), dtype),
        grad_post: T.Tensor((M, C), "float32"),
        grad_comb: T.Tensor((M, C * C), "float32"),
    ):
        with T.Kernel(M, threads=threads) as token:
            thread = T.get_thread_binding(0)
            output = T.alloc_local((vec,), dtype)
            stream = T.alloc_local((vec,), dtype)
            grads = T.alloc_local((C, vec), dtype)
            total = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)
            dots = T.alloc_local((count,), "float32")
            sums = T.alloc_shared((warps, count), "float32")
            for n in T.unroll(count):
                dots[n] = 0.0
            for step in T.serial(steps):
                column = (step * threads + thread) * vec
                if full or column < H:
                    for v in T.vectorized(vec):
                        output[v] = y[token, column + v]
                    for o in T.unroll(C):
                        for v in T.vectorized(vec):
                            grads[o, v] = grad_out[token, o, column + v]
                    for v in T.unroll(vec):
                        total[v] = 0.0
                    for o in T.unroll(C):
                        for v in T.unroll(vec):
                            total[v] += post[token, o] * T.cast(grads[o, v], "float32")
                            dots[o] += T.cast(output[v], "float32") * T.cast(grads[o, v], "float32")
                    for v in T.unroll(vec):
                        result[v] = T.cast(total[v], dtype)
                    for v in T.vectorized(vec):
                        grad_y[token, column + v] = result[v]
                    for i in T.unroll(C):
                        for v in T.vectorized(vec):
                            stream[v] = residual[token, i, column + v]
                        for v in T.unroll(vec):
                            total[v] = 0.0
                        for o in T.unroll(C):
                            for v in T.unroll(vec):
                                total[v] += comb[token, i, o] * T.cast(grads[o, v], "float32")
                                dots[C + i * C + o] += T.cast(stream[v], "float32") * T.cast(grads[o, v], "float32")
                        for v in T.unroll(vec):
                            result[v] = T.cast(total[v], dtype)
                        for v in T.vectorized(vec):
                            grad_residual[token, i, column + v] = result[v]
            for n in T.unroll(count):
                dots[n] = T.warp_reduce_sum(dots[n])
            if thread % 32 == 0:
                for n in T.unroll(count):
                    sums[thread // 32, n] = dots[n]
            T.sync_threads()
            if thread < count:
                dots[0] = 0.0
                for w in T.unroll(warps):
                    dots[0] += sums[w, thread]
                if thread < C:
                    grad_post[token, thread] = dots[0]
                else:
                    grad_comb[token, thread - C] = dots[0]

    return post_backward


def _vector(H, *tensors):
    """The widest power of two of elements, at most 16 bytes, that divides a row and all addresses."""
    itemsize = tensors[0].element_size()
    bits = H | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.data_ptr() // itemsize
    return bits & -bits


def run_expand_backward(grad_out, grad_x, *, threads=128):
    """grad_x[M, H] = T(sum over c of grad_out[M, c, H]), the sum in float32; contiguous, T bfloat16 or float32."""
    M, C, H = grad_out.shape
    if M:
        expand_backward_kernel(C, H, grad_x.dtype, _vector(H, grad_out, grad_x), threads)(grad_out, grad_x)


def run_pre_apply_mix_backward(residual, mix, grad_out, grad_residual, grad_mix, *, threads=128):
    """grad_residual[m, c] = T(mix[m, c] * grad_out[m]), grad_mix[m, c] = the dot product of residual[m, c] and grad_out[m].

    Shapes: residual and its gradient [M, C, H], grad_out [M, H] in T (bfloat16 or float32), mix and its gradient [M, C] in
    float32; contiguous, C <= 8. `threads` is a multiple of 32.
    """
    M, C, H = residual.shape
    if M:
        vec = _vector(H, residual, grad_out, grad_residual)
        kernel = apply_backward_kernel(C, H, grad_residual.dtype, vec, threads)
        kernel(residual, mix, grad_out, grad_residual, grad_mix)


def run_post_backward(y, residual, post, comb, grad_out, grad_y, grad_residual, grad_post, grad_comb, *, threads=128):
    """The four gradients of mhc_post; sums in float32, each rounded once.

    grad_y = sum over o of post[o] * grad_out[o], grad_residual[i] = sum over o of comb[i, o] * grad_out[o],
    grad_post[o] = <grad_out[o], y>, grad_comb[i, o] = <residual[i], grad_out[o]>.
    Shapes: y [M, H], residual and grad_out [M, C, H] in T (bfloat16 or float32), post [M, C], comb [M, C, C] in float32;
    contiguous, C <= 4. `threads` is a multiple of 32.
    """
    M, C, H = residual.shape
    if M:
        vec = _vector(H, y, residual, grad_out, grad_y, grad_residual)
        kernel = post_backward_kernel(C, H, grad_y.dtype, vec, threads)
        matrices = grad_comb.view(M, C * C)
        kernel(y, residual, post, comb, grad_out, grad_y, grad_residual, grad_post, matrices)


# -- coefficients --------------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit
def sinkhorn_backward_kernel(C, repeat, side, threads):
    """Compile for C streams and `repeat` column steps; `side` is C's next power of two.

    A matrix belongs to `lanes` neighbouring lanes of a warp, a lane has one element of it, or some of one column. Sums are
    exchanges among these lanes.
    """
    M = T.dynamic("M")
    lanes = min(32, side * side)
    per = side * side // lanes
    apart = lanes // side  # rows between two elements of a lane
    row_steps = max(1, repeat - 1)

    @T.macro
    def column_sum(values, total):
        total[0] = 0.0
        for e in T.unroll(per):
            total[0] += values[e]
        for step in T.unroll(apart.bit_length() - 1):
            total[0] += T.shfl_xor(total[0], side << step)

    @T.macro
    def row_sum(values, totals):
        for e in T.unroll(per):
            totals[e] = values[e]
            for step in T.unroll(side.bit_length() - 1):
                totals[e] += T.shfl_xor(totals[e], 1 << step)

    @T.prim_func
    def sinkhorn_backward(
        z: T.Tensor((M, C, C), "float32"),
        grad_out: T.Tensor((M, C, C), "float32"),
        eps: T.float32,
        grad_z: T.Tensor((M, C, C), "float32"),
    ):
        with T.Kernel(T.ceildiv(M * lanes, threads), threads=threads) as block:
            thread = block * threads + T.get_thread_binding(0)
            token = thread // lanes
            column = thread % side
            first_row = thread % lanes // side
            soft = T.alloc_local((per,), "float32")
            mixing = T.alloc_local((per,), "float32")
            grad = T.alloc_local((per,), "float32")
            products = T.alloc_local((per,), "float32")
            totals = T.alloc_local((per,), "float32")
            total = T.alloc_local((1,), "float32")
            columns = T.alloc_local((repeat,), "float32")  # what the steps divided by
            rows = T.alloc_local((row_steps, per), "float32")
            for e in T.unroll(per):
                soft[e] = 0.0
                grad[e] = 0.0
                if token < M and column < C and first_row + e * apart < C:
                    soft[e] = z[token, first_row + e * apart, column]
                    grad[e] = grad_out[token, first_row + e * apart, column]
                totals[e] = T.if_then_else(column < C, soft[e], -T.infinity("float32"))
                for step in T.unroll(side.bit_length() - 1):
                    totals[e] = T.max(totals[e], T.shfl_xor(totals[e], 1 << step))
                soft[e] = T.if_then_else(column < C, T.exp(soft[e] - totals[e]), 0.0)
            row_sum(soft, totals)
            for e in T.unroll(per):
                real = column < C and first_row + e * apart < C
                soft[e] = T.if_then_else(real, soft[e] / totals[e], 0.0)
                mixing[e] = T.if_then_else(real, soft[e] + eps, 0.0)
            for step in T.unroll(repeat):
                if step > 0:
                    row_sum(mixing, totals)
                    for e in T.unroll(per):
                        rows[step - 1, e] = T.if_then_else(first_row + e * apart < C, totals[e] + eps, 1.0)
                        mixing[e] = mixing[e] / rows[step - 1, e]
                column_sum(mixing, total)
                columns[step] = T.if_then_else(column < C, total[0] + eps, 1.0)  # not 0 / 0 outside
                for e in T.unroll(per):
                    mixing[e] = mixing[e] / columns[step]
            # Back: a matrix times what it was divided by is the one before it.
            for back in T.unroll(repeat):
                for e in T.unroll(per):
                    products[e] = grad[e] * mixing[e]
                column_sum(products, total)
                for e in T.unroll(per):
                    grad[e] = (grad[e] - total[0]) / columns[repeat - 1 - back]
                    mixing[e] = mixing[e] * columns[repeat - 1 - back]
                if back < repeat - 1:
                    for e in T.unroll(per):
                        products[e] = grad[e] * mixing[e]
                    row_sum(products, totals)
                    for e in T.unroll(per):
                        grad[e] = (grad[e] - totals[e]) / rows[repeat - 2 - back, e]
                        mixing[e] = mixing[e] * rows[repeat - 2 - back, e]
            for e in T.unroll(per):
                products[e] = grad[e] * soft[e]
            row_sum(products, totals)
            for e in T.unroll(per):
                if token < M and column < C and first_row + e * apart < C:
                    grad_z[token, first_row + e * apart, column] = soft[e] * (grad[e] - totals[e])

    return sinkhorn_backward


def run_sinkhorn_backward(z, grad_out, repeat, eps, grad_z, *, threads=128):
    """grad_z of mhc_sinkhorn through all of its steps, in registers.

    z, grad_out, grad_z: [M, C, C] in float32, contiguous, C <= 8. A kernel is compiled for each repeat.
    """
    M, C = z.shape[:2]
    if M:
        sinkhorn_backward_kernel(C, repeat, _pow2(C), threads)(z, grad_out, eps, grad_z)


@functools.cache
@tilelang.jit
def split_backward_kernel(C, J, width, groups):
    """Compile for C streams and J projected values a token, `width` their next power of two; a CTA has a run of tokens.

    Each of `groups` groups of threads takes a token at a time, a thread one value of it. A CTA leaves its sums of the
    gradients, and of these times the values. J = C is the gate of the final collapse, which has the first part alone.
    """
    M, runs = T.dynamic("M runs")
    head = J == C
    parts = 1 if head else 3
    of_comb = (
        C if head else C * C
    )  # the gate of the final collapse has no other gradients, and is given its own in their place

    @T.prim_func
    def split_backward(
        mixes: T.Tensor((M, J), "float32"),
        scale: T.Tensor((parts,), "float32"),
        base: T.Tensor((J,), "float32"),
        grad_pre: T.Tensor((M, C), "float32"),
        grad_post: T.Tensor((M, C), "float32"),
        grad_comb: T.Tensor((M, of_comb), "float32"),
        post_mult: T.float32,
        per_run: T.int32,
        grad_mixes: T.Tensor((M, J), "float32"),
        partial: T.Tensor((runs, 2, J), "float32"),
    ):
        with T.Kernel(runs, threads=(width, groups)) as run:
            j, group = T.get_thread_binding(0), T.get_thread_binding(1)
            first = run * per_run
            last = T.min(first + per_run, M)
            factor = T.alloc_local((1,), "float32")
            shift = T.alloc_local((1,), "float32")
            grad = T.alloc_local((1,), "float32")
            sums = T.alloc_local((2,), "float32")
            shared = T.alloc_shared((2, groups, width), "float32")
            factor[0] = 0.0
            shift[0] = 0.0
            if j < J:
                shift[0] = base[j]
                if head:
                    factor[0] = scale[0]
                else:
                    factor[0] = scale[T.if_then_else(j < C, 0, T.if_then_else(j < 2 * C, 1, 2))]
            sums[0] = 0.0
            sums[1] = 0.0
            for step in T.serial(T.ceildiv(last - first, groups)):
                token = first + step * groups + group
                if token < last and j < J:
                    value = mixes[token, j]
                    score = value * factor[0] + shift[0]
                    # sigmoid(z) * sigmoid(-z): 1 - sigmoid(z) has no digits left where z is large.
                    slope = 1.0 / (1.0 + T.exp(-score)) * (1.0 / (1.0 + T.exp(score)))
                    if head:
                        grad[0] = slope * grad_pre[token, j]
                    else:
                        if j < C:
                            grad[0] = slope * grad_pre[token, j]
                        elif j < 2 * C:
                            grad[0] = slope * post_mult * grad_post[token, j - C]
                        else:
                            grad[0] = grad_comb[token, j - 2 * C]
                    grad_mixes[token, j] = grad[0] * factor[0]
                    sums[0] += grad[0]
                    sums[1] += grad[0] * value
            shared[0, group, j] = sums[0]
            shared[1, group, j] = sums[1]
            T.sync_threads()
            if group == 0 and j < J:
                sums[0] = 0.0
                sums[1] = 0.0
                for g in T.serial(groups):
                    sums[0] += shared[0, g, j]
                    sums[1] += shared[1, g, j]
                partial[run, 0, j] = sums[0]
                partial[run, 1, j] = sums[1]

    return split_backward


@functools.cache
@tilelang.jit
def split_sums_kernel(C, J, width, groups):
    """Compile for rows of J sums: adds up those of `count` runs in a fixed order; zeros where there are none."""
    rows = T.dynamic("rows")
    parts = 1 if J == C else 3

    @T.prim_func
    def split_sums(
        partial: T.Tensor((rows, 2, J), "float32"),
        count: T.int32,
        grad_scale: T.Tensor((parts,), "float32"),
        grad_base: T.Tensor((J,), "float32"),
    ):
        with T.Kernel(1, threads=(width, groups)) as _:
            j, group = T.get_thread_binding(0), T.get_thread_binding(1)
            sums = T.alloc_local((2,), "float32")
            shared = T.alloc_shared((2, groups, width), "float32")
            sums[0] = 0.0
            sums[1] = 0.0
            for step in T.serial(T.ceildiv(count, groups)):
                if step * groups + group < count and j < J:
                    sums[0] += partial[step * groups + group, 0, j]
                    sums[1] += partial[step * groups + group, 1, j]
            shared[0, group, j] = sums[0]
            shared[1, group, j] = sums[1]
            T.sync_threads()
            if group == 0 and j < J:
                sums[0] = 0.0
                sums[1] = 0.0
                for g in T.serial(groups):
                    sums[0] += shared[0, g, j]
                    sums[1] += shared[1, g, j]
                grad_base[j] = sums[0]
                shared[1, 0, j] = sums[1]  # which no other thread reads before the barrier
            T.sync_threads()
            if group == 0 and j < parts:
                begin = j * C
                end = T.if_then_else(j == 2, J, begin + C)
                sums[0] = 0.0
                for at in T.serial(end - begin):
                    sums[0] += shared[1, 0, begin + at]
                grad_scale[j] = sums[0]

    return split_sums


def _run_split_backward(inputs, grads, post_mult, grad_mixes, grad_scale, grad_base, streams, runs):
    M, J = grad_mixes.shape
    width = _pow2(J)
    groups = max(1, 128 // width)
    tiles = max(1, -(-M // groups))
    per_run = -(-tiles // runs) * groups  # whole groups of tokens, as even as they go
    used = -(-M // per_run)  # no run may be empty
    partial = torch.empty((max(used, 1), 2, J), dtype=torch.float32, device=grad_mixes.device)
    if used:
        kernel = split_backward_kernel(streams, J, width, groups)
        kernel(*inputs, *grads, post_mult, per_run, grad_mixes, partial)
    split_sums_kernel(streams, J, width, max(1, SUM_THREADS // width))(partial, used, grad_scale, grad_base)


def run_pre_split_mixes_backward(
    mixes,
    scale,
    base,
    streams,
    post_mult,
    grad_pre,
    grad_post,
    grad_comb,
    grad_mixes,
    grad_scale,
    grad_base,
    *,
    runs=264,
):
    """The gradients of mhc_pre_split_mixes; those of scale [3] and base [C * (C + 2)] are sums over tokens, zero without any.

    Shapes: mixes and its gradient [M, C * (C + 2)], gradients of pre and post [M, C], of comb [M, C, C]; float32, contiguous,
    C <= 8. At most `runs` CTAs have a run of tokens each, whose sums a second kernel adds up.
    """
    grads = grad_pre, grad_post, grad_comb.view(-1, streams * streams)
    outputs = grad_mixes, grad_scale, grad_base
    _run_split_backward((mixes, scale, base), grads, post_mult, *outputs, streams, runs)


def run_head_compute_mix_backward(mix, scale, base, grad_out, grad_mix, grad_scale, grad_base, *, runs=264):
    """The gradients of mhc_head_compute_mix; those of scale [1] and base [C] are sums over tokens, zero without any."""
    grads = grad_out, grad_out, grad_out  # the gate of the final collapse has one part
    outputs = grad_mix, grad_scale, grad_base
    _run_split_backward((mix, scale, base), grads, 1.0, *outputs, mix.shape[1], runs)


# -- projection ----------------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.disable_wgmma": True})  # tiles are written by threads, which wgmma reads another way
def norm_backward_kernel(J, K, dtype, width, block_m, block_k, tiles, vec, fn_vec, threads):
    """Compile for a run of `tiles` tiles of tokens and a block of columns: their gradient, and a sum of that of the projection.

    float32 factors are sums of three bfloat16 numbers, so that tensor cores lose nothing: of two such factors the products below
    the last bit are left out, also where the result is rounded to bfloat16, since terms may cancel. `width` is J, rounded up.
    """
    M, runs = T.dynamic("M runs")
    wide = str(dtype) == "torch.float32"
    parts = 3 if wide else 1  # of the streams
    blocks = -(-K // block_k)
    lanes, fn_lanes = block_k // vec, block_k // fn_vec  # threads a row
    rows, fn_rows = threads // lanes, threads // fn_lanes  # rows at once
    passes, fn_passes = -(-block_m // rows), -(-width // fn_rows)
    # Pairs of parts whose products are added, the smallest first: of the gradient and fn, then of the gradient and the streams.
    of_streams = (2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)
    of_fn = of_streams if wide else ((2, 0), (1, 0), (0, 0))

    @T.macro
    def store_parts(tiles_of, row, column, values, p, count, pieces, rest):
        """Three bfloat16 numbers whose sum is a float32 one to the last bit, each in a tile of its own."""
        for v in T.unroll(count):
            rest[0] = T.cast(values[p, v], "float32")
            for n in T.unroll(3):
                pieces[n, v] = T.cast(rest[0], "bfloat16")
                rest[0] = rest[0] - T.cast(pieces[n, v], "float32")
        for v in T.vectorized(count):
            tiles_of[0][row, column + v] = pieces[0, v]
        for v in T.vectorized(count):
            tiles_of[1][row, column + v] = pieces[1, v]
        for v in T.vectorized(count):
            tiles_of[2][row, column + v] = pieces[2, v]

    @T.prim_func
    def norm_backward(
        x: T.Tensor((M, K), dtype),
        fn: T.Tensor((J, K), "float32"),
        mixes: T.Tensor((M, J), "float32"),
        rstd: T.Tensor((M,), "float32"),
        grad_mixes: T.Tensor((M, J), "float32"),
        grad_x: T.Tensor((M, K), dtype),
        partial: T.Tensor((runs, J, K), "float32"),
    ):
        with T.Kernel(blocks, runs, threads=threads) as (block, run):
            thread = T.get_thread_binding(0)
            x_tiles = [T.alloc_shared((block_m, block_k), "bfloat16") for _ in range(parts)]
            fn_tiles = [T.alloc_shared((width, block_k), "bfloat16") for _ in range(3)]
            grad_tiles = [T.alloc_shared((block_m, width), "bfloat16") for _ in range(3)]
            results = T.alloc_shared((block_m, block_k), "float32")
            fn_results = T.alloc_shared((width, block_k), "float32")
            along = T.alloc_shared((block_m,), "float32")
            to_x = T.alloc_fragment((block_m, block_k), "float32")
            added = T.alloc_fragment((width, block_k), "float32")
            to_fn = T.alloc_fragment((width, block_k), "float32")
            values = T.alloc_local((passes, vec), dtype)
            factors = T.alloc_local((1, fn_vec), "float32")
            grads = T.alloc_local((1, 1), "float32")
            written = T.alloc_local((vec,), dtype)
            pieces = T.alloc_local((3, max(vec, fn_vec)), "bfloat16")
            rest = T.alloc_local((1,), "float32")
            column = block * block_k + thread % lanes * vec
            fn_column = block * block_k + thread % fn_lanes * fn_vec

            T.clear(to_fn)
            for p in T.unroll(fn_passes):
                row = p * fn_rows + thread // fn_lanes
                for v in T.vectorized(fn_vec):
                    factors[0, v] = 0
                if row < J and fn_column < K:
                    for v in T.vectorized(fn_vec):
                        factors[0, v] = fn[row, fn_column + v]
                if row < width:
                    store_parts(fn_tiles, row, thread % fn_lanes * fn_vec, factors, 0, fn_vec, pieces, rest)
            for step in T.serial(tiles):
                first = (run * tiles + step) * block_m
                for p in T.unroll(passes):
                    for v in T.vectorized(vec):
                        values[p, v] = 0
                    row = p * rows + thread // lanes
                    if row < block_m and first + row < M and column < K:
                        for v in T.vectorized(vec):
                            values[p, v] = x[first + row, column + v]
                    if row < block_m:
                        if wide:
                            store_parts(x_tiles, row, thread % lanes * vec, values, p, vec, pieces, rest)
                        else:
                            for v in T.vectorized(vec):
                                x_tiles[0][row, thread % lanes * vec + v] = values[p, v]
                for q in T.serial(-(-block_m * width // threads)):
                    row = (q * threads + thread) // width
                    j = (q * threads + thread) % width
                    if row < block_m:
                        grads[0, 0] = 0.0
                        if first + row < M and j < J:
                            grads[0, 0] = grad_mixes[first + row, j] * rstd[first + row]
                        store_parts(grad_tiles, row, j, grads, 0, 1, pieces, rest)
                if thread < block_m:
                    rest[0] = 0.0
                    if first + thread < M:
                        for j in T.serial(J):
                            rest[0] += grad_mixes[first + thread, j] * mixes[first + thread, j]
                        rest[0] = rest[0] * rstd[first + thread] * rstd[first + thread] * (1.0 / K)
                    along[thread] = rest[0]
                T.sync_threads()

                T.clear(to_x)
                for left, right in of_streams:
                    T.gemm(grad_tiles[left], fn_tiles[right], to_x)
                T.clear(added)
                for left, right in of_fn:
                    T.gemm(grad_tiles[left], x_tiles[right], added, transpose_A=True)
                for j, k in T.Parallel(width, block_k):
                    to_fn[j, k] = to_fn[j, k] + added[j, k]
                for i, k in T.Parallel(block_m, block_k):
                    results[i, k] = to_x[i, k]
                T.sync_threads()

                for p in T.unroll(passes):
                    row = p * rows + thread // lanes
                    if row < block_m and first + row < M and column < K:
                        for v in T.unroll(vec):
                            written[v] = T.cast(
                                results[row, thread % lanes * vec + v] - T.cast(values[p, v], "float32") * along[row],
                                dtype,
                            )
                        for v in T.vectorized(vec):
                            grad_x[first + row, column + v] = written[v]
                T.sync_threads()  # the tiles are read to the end

            for j, k in T.Parallel(width, block_k):
                fn_results[j, k] = to_fn[j, k]
            T.sync_threads()
            for p in T.unroll(fn_passes):
                row = p * fn_rows + thread // fn_lanes
                if row < J and fn_column < K:
                    for v in T.vectorized(fn_vec):
                        partial[run, row, fn_column + v] = fn_results[row, thread % fn_lanes * fn_vec + v]

    return norm_backward


@functools.cache
@tilelang.jit
def sum_runs_kernel(total, threads):
    """Compile the sums of `count` rows in a fixed order; zeros where there are none."""
    rows = T.dynamic("rows")

    @T.prim_func
    def sum_runs(partial: T.Tensor((rows, total), "float32"), count: T.int32, out: T.Tensor((total,), "float32")):
        with T.Kernel(T.ceildiv(total, threads), threads=threads) as block:
            at = block * threads + T.get_thread_binding(0)
            sums = T.alloc_local((1,), "float32")
            if at < total:
                sums[0] = 0.0
                for run in T.serial(count):
                    sums[0] += partial[run, at]
                out[at] = sums[0]

    return sum_runs


def run_norm_fn_backward(
    residual, fn, mixes, rstd, grad_mixes, eps, grad_residual, grad_fn, *, block_m=None, runs_of_tokens=None
):
    """The gradients of mhc_norm_fn for the streams and the projection, from what the forward gave; eps is in rstd already.

    With p = grad_mixes * rstd: grad_residual = T(p @ fn - x * rstd^2 * sum(grad_mixes * mixes) / K), grad_fn = p.T @ x, for x =
    residual [M, C, H] with a token's K = C * H values flat.
    Shapes: residual and its gradient in bfloat16 or float32; fn and its gradient [J, K], mixes and its gradient [M, J], rstd
    [M] in float32; contiguous, J <= 128. The streams are read once; one launch, and one that adds up runs of tokens where
    there are several.
    runs_of_tokens = None: as many as make two CTAs a multiprocessor of an H200.
    """
    M = residual.shape[0]
    J, K = fn.shape
    width = -(-J // 32) * 32
    wide = residual.element_size() == 4
    block_m = 32 if wide or width > 32 else block_m or (32 if M < 512 else 64)
    block_k = 64 if wide or width > 32 else 128
    blocks, tiles = -(-K // block_k), -(-M // block_m)
    per_run = -(-tiles // min(tiles, runs_of_tokens or max(1, 264 // blocks))) if M else 1
    runs = -(-tiles // per_run)
    partial = grad_fn if runs == 1 else torch.empty((max(runs, 1), J, K), dtype=torch.float32, device=residual.device)
    partial = partial.view(-1, J, K)
    if runs:
        x, grad_x = residual.view(M, K), grad_residual.view(M, K)
        vectors = _vector(K, x, grad_x), _vector(K, fn, partial)
        kernel = norm_backward_kernel(J, K, x.dtype, width, block_m, block_k, per_run, *vectors, 128)
        kernel(x, fn, mixes, rstd, grad_mixes, grad_x, partial)
    if runs != 1:
        sum_runs_kernel(J * K, 256)(partial.view(-1, J * K), runs, grad_fn.view(J * K))

"""The coefficients of hyper-connections, TileLang: gates and Sinkhorn steps, a handful of float32 values a token."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def sinkhorn_kernel(C, threads):
    """Compile for C streams, whose next power of two is `side`.

    A matrix belongs to `lanes` neighbouring lanes of a warp, a lane has one element of it, or some of one column. Sums are
    exchanges among these lanes.
    """
    M = T.dynamic("M")
    side = 1 << (C - 1).bit_length()
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

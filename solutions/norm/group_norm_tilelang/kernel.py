"""Group norm and its gradients, TileLang: pieces of channels leave moments, and each joins those of its group; no atomics."""

import functools

import tilelang
import tilelang.language as T
import torch
from _lib.tilelang.vocabulary_rows import load_vector, reduce_block

# A group's first value is subtracted before anything is summed: a mean that is many deviations away from zero then costs no
# digits, and a group of equal values gives exactly zero. Its row is ``row - row % D``: with ``row // D * D``, TileLang 0.1.15
# fails to compile 10 channels of 4,096 places ("lanes of a scalable vector").


@T.macro
def load_piece(source, row, begin, S, vec, repeat, threads, thread, loaded):
    """Load the piece of a channel that begins at a column; zeros behind the channel's end."""
    for i in T.unroll(repeat):
        if S % (threads * repeat * vec) != 0:
            for v in T.vectorized(vec):
                loaded[i, v] = 0
        if begin + (i * threads + thread) * vec < S:
            load_vector(source, row, begin + (i * threads + thread) * vec, vec, loaded, i)


@T.macro
def join(
    moments, start, parts, pieces, width, S, size, eps, threads, thread, warps, first_shared, second_shared, mean, rstd
):
    """Leave the mean of a group, less its first value, and the reciprocal of its deviation."""
    mean[0] = 0.0
    for step in T.serial(T.ceildiv(parts, threads)):
        part = step * threads + thread
        if part < parts:
            mean[0] += T.cast(T.min(S - part % pieces * width, width), "float32") * moments[start + part, 0]
    reduce_block("sum", thread, warps, mean, first_shared)
    mean[0] = mean[0] * (1.0 / size)
    rstd[0] = 0.0
    for step in T.serial(T.ceildiv(parts, threads)):
        part = step * threads + thread
        if part < parts:
            off = moments[start + part, 0] - mean[0]
            rstd[0] += moments[start + part, 1] + T.cast(T.min(S - part % pieces * width, width), "float32") * off * off
    reduce_block("sum", thread, warps, rstd, second_shared)
    rstd[0] = T.rsqrt(rstd[0] * (1.0 / size) + eps)


@functools.cache
@tilelang.jit
def moments_kernel(D, S, dtype, vec, threads, repeat):
    """Compile for D channels of S places a group: the mean of each piece, less the group's first value, and its squares."""
    R, P = T.dynamic("R P")
    warps, width = threads // 32, threads * repeat * vec
    pieces = -(-S // width)

    @T.prim_func
    def moments_of(x: T.Tensor((R, S), dtype), moments: T.Tensor((P, 2), "float32")):
        with T.Kernel(P, threads=threads) as block:
            thread = T.get_thread_binding(0)
            row, begin = block // pieces, block % pieces * width
            values = T.alloc_local((repeat, vec), dtype)
            mean = T.alloc_local((1,), "float32")
            squares = T.alloc_local((1,), "float32")
            first_shared = T.alloc_shared((warps,), "float32")
            second_shared = T.alloc_shared((warps,), "float32")
            first = T.alloc_var("float32", init=0.0)
            first = T.cast(x[row - row % D, 0], "float32")
            load_piece(x, row, begin, S, vec, repeat, threads, thread, values)
            mean[0] = 0.0
            for i in T.unroll(repeat):
                if begin + (i * threads + thread) * vec < S:
                    for v in T.unroll(vec):
                        mean[0] += T.cast(values[i, v], "float32") - first
            reduce_block("sum", thread, warps, mean, first_shared)
            mean[0] = mean[0] / T.cast(T.min(S - begin, width), "float32")
            squares[0] = 0.0
            for i in T.unroll(repeat):
                if begin + (i * threads + thread) * vec < S:
                    for v in T.unroll(vec):
                        centred = T.cast(values[i, v], "float32") - first - mean[0]
                        squares[0] += centred * centred
            reduce_block("sum", thread, warps, squares, second_shared)
            if thread == 0:
                moments[block, 0] = mean[0]
                moments[block, 1] = squares[0]

    return moments_of


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def normalise_kernel(G, D, S, dtype, vec, threads, repeat):
    """Compile for G groups of D channels of S places: normalises each piece."""
    R, P = T.dynamic("R P")
    warps, width, size = threads // 32, threads * repeat * vec, float(D * S)
    pieces = -(-S // width)

    @T.prim_func
    def normalise(
        x: T.Tensor((R, S), dtype),
        weight: T.Tensor((G * D,), dtype),
        bias: T.Tensor((G * D,), dtype),
        moments: T.Tensor((P, 2), "float32"),
        eps: T.float32,
        out: T.Tensor((R, S), dtype),
    ):
        with T.Kernel(P, threads=threads) as block:
            thread = T.get_thread_binding(0)
            row, begin = block // pieces, block % pieces * width
            values = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            mean = T.alloc_local((1,), "float32")
            rstd = T.alloc_local((1,), "float32")
            first_shared = T.alloc_shared((warps,), "float32")
            second_shared = T.alloc_shared((warps,), "float32")
            first = T.alloc_var("float32", init=0.0)
            scale = T.alloc_var("float32", init=0.0)
            shift = T.alloc_var("float32", init=0.0)
            first = T.cast(x[row - row % D, 0], "float32")
            scale = T.cast(weight[row % (G * D)], "float32")
            shift = T.cast(bias[row % (G * D)], "float32")
            load_piece(x, row, begin, S, vec, repeat, threads, thread, values)
            start = (row - row % D) * pieces
            shared = (first_shared, second_shared)
            join(moments, start, D * pieces, pieces, width, S, size, eps, threads, thread, warps, *shared, mean, rstd)
            for i in T.unroll(repeat):
                column = begin + (i * threads + thread) * vec
                if column < S:
                    for v in T.unroll(vec):
                        normed = (T.cast(values[i, v], "float32") - first - mean[0]) * rstd[0]
                        result[v] = T.cast(normed * scale + shift, dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return normalise


@functools.cache
@tilelang.jit
def gradient_sums_kernel(G, D, S, dtype, vec, threads, repeat):
    """Compile for the sums of each piece: of the incoming gradient, and of its product with the normalised piece."""
    R, P = T.dynamic("R P")
    warps, width, size = threads // 32, threads * repeat * vec, float(D * S)
    pieces = -(-S // width)

    @T.prim_func
    def gradient_sums(
        x: T.Tensor((R, S), dtype),
        grad_out: T.Tensor((R, S), dtype),
        moments: T.Tensor((P, 2), "float32"),
        eps: T.float32,
        sums: T.Tensor((P, 2), "float32"),
    ):
        with T.Kernel(P, threads=threads) as block:
            thread = T.get_thread_binding(0)
            row, begin = block // pieces, block % pieces * width
            values = T.alloc_local((repeat, vec), dtype)
            grads = T.alloc_local((repeat, vec), dtype)
            mean = T.alloc_local((1,), "float32")
            rstd = T.alloc_local((1,), "float32")
            of_shift = T.alloc_local((1,), "float32")
            of_scale = T.alloc_local((1,), "float32")
            first_shared = T.alloc_shared((warps,), "float32")
            second_shared = T.alloc_shared((warps,), "float32")
            third_shared = T.alloc_shared((warps,), "float32")
            fourth_shared = T.alloc_shared((warps,), "float32")
            first = T.alloc_var("float32", init=0.0)
            first = T.cast(x[row - row % D, 0], "float32")
            load_piece(x, row, begin, S, vec, repeat, threads, thread, values)
            load_piece(grad_out, row, begin, S, vec, repeat, threads, thread, grads)
            start = (row - row % D) * pieces
            shared = (first_shared, second_shared)
            join(moments, start, D * pieces, pieces, width, S, size, eps, threads, thread, warps, *shared, mean, rstd)
            of_shift[0] = 0.0
            of_scale[0] = 0.0
            for i in T.unroll(repeat):
                if begin + (i * threads + thread) * vec < S:
                    for v in T.unroll(vec):
                        normed = (T.cast(values[i, v], "float32") - first - mean[0]) * rstd[0]
                        of_shift[0] += T.cast(grads[i, v], "float32")
                        of_scale[0] += T.cast(grads[i, v], "float32") * normed
            reduce_block("sum", thread, warps, of_shift, third_shared)
            reduce_block("sum", thread, warps, of_scale, fourth_shared)
            if thread == 0:
                sums[block, 0] = of_shift[0]
                sums[block, 1] = of_scale[0]

    return gradient_sums


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gradient_of_x_kernel(G, D, S, dtype, vec, threads, repeat):
    """Compile for the gradient of each piece from the sums of its group."""
    R, P = T.dynamic("R P")
    warps, width, size = threads // 32, threads * repeat * vec, float(D * S)
    pieces = -(-S // width)
    parts = D * pieces

    @T.prim_func
    def gradient_of_x(
        x: T.Tensor((R, S), dtype),
        weight: T.Tensor((G * D,), dtype),
        grad_out: T.Tensor((R, S), dtype),
        moments: T.Tensor((P, 2), "float32"),
        sums: T.Tensor((P, 2), "float32"),
        eps: T.float32,
        grad_x: T.Tensor((R, S), dtype),
    ):
        with T.Kernel(P, threads=threads) as block:
            thread = T.get_thread_binding(0)
            row, begin = block // pieces, block % pieces * width
            values = T.alloc_local((repeat, vec), dtype)
            grads = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            mean = T.alloc_local((1,), "float32")
            rstd = T.alloc_local((1,), "float32")
            common = T.alloc_local((1,), "float32")
            along = T.alloc_local((1,), "float32")
            first_shared = T.alloc_shared((warps,), "float32")
            second_shared = T.alloc_shared((warps,), "float32")
            third_shared = T.alloc_shared((warps,), "float32")
            fourth_shared = T.alloc_shared((warps,), "float32")
            first = T.alloc_var("float32", init=0.0)
            scale = T.alloc_var("float32", init=0.0)
            first = T.cast(x[row - row % D, 0], "float32")
            scale = T.cast(weight[row % (G * D)], "float32")
            load_piece(x, row, begin, S, vec, repeat, threads, thread, values)
            load_piece(grad_out, row, begin, S, vec, repeat, threads, thread, grads)
            start = (row - row % D) * pieces
            shared = (first_shared, second_shared)
            join(moments, start, parts, pieces, width, S, size, eps, threads, thread, warps, *shared, mean, rstd)
            common[0] = 0.0
            along[0] = 0.0
            for step in T.serial(T.ceildiv(parts, threads)):
                part = step * threads + thread
                if part < parts:
                    of_channel = T.cast(weight[(row - row % D) % (G * D) + part // pieces], "float32")
                    common[0] += of_channel * sums[start + part, 0]
                    along[0] += of_channel * sums[start + part, 1]
            reduce_block("sum", thread, warps, common, third_shared)
            reduce_block("sum", thread, warps, along, fourth_shared)
            for i in T.unroll(repeat):
                column = begin + (i * threads + thread) * vec
                if column < S:
                    for v in T.unroll(vec):
                        normed = (T.cast(values[i, v], "float32") - first - mean[0]) * rstd[0]
                        across = T.cast(grads[i, v], "float32") * scale - common[0] * (1.0 / size)
                        result[v] = T.cast(rstd[0] * (across - normed * (along[0] * (1.0 / size))), dtype)
                    for v in T.vectorized(vec):
                        grad_x[row, column + v] = result[v]

    return gradient_of_x


@functools.cache
@tilelang.jit
def sum_parts_kernel(C, dtype):
    """Compile for C channels: adds up the sums of images and pieces of each in a fixed order; zeros if there are none."""
    P = T.dynamic("P")

    @T.prim_func
    def sum_parts(
        sums: T.Tensor((P, 2), "float32"),
        count: T.int32,
        pieces: T.int32,
        grad_weight: T.Tensor((C,), dtype),
        grad_bias: T.Tensor((C,), dtype),
    ):
        with T.Kernel(C, threads=32) as channel:
            thread = T.get_thread_binding(0)
            of_shift = T.alloc_local((1,), "float32")
            of_scale = T.alloc_local((1,), "float32")
            of_shift[0] = 0.0
            of_scale[0] = 0.0
            for step in T.serial(T.ceildiv(count, 32)):
                part = step * 32 + thread
                if part < count:
                    of_shift[0] += sums[(part // pieces * C + channel) * pieces + part % pieces, 0]
                    of_scale[0] += sums[(part // pieces * C + channel) * pieces + part % pieces, 1]
            of_shift[0] = T.warp_reduce_sum(of_shift[0])
            of_scale[0] = T.warp_reduce_sum(of_scale[0])
            if thread == 0:
                grad_bias[channel] = T.cast(of_shift[0], dtype)
                grad_weight[channel] = T.cast(of_scale[0], dtype)

    return sum_parts


def _shape(tensors, threads, repeat):
    """Return the channels as rows, and the elements of a vector, threads and vectors of a thread; no warp is without a column."""
    B, G, D, S = tensors[0].shape
    itemsize = tensors[0].dtype.itemsize
    bits = S | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.data_ptr() // itemsize
    vec = bits & -bits
    while repeat > 1 and (repeat // 2) * threads * vec >= S:
        repeat //= 2
    threads = max(32, min(threads, 32 * -(-S // (32 * vec * repeat))))
    return B * G * D, (vec, threads, repeat), -(-S // (threads * repeat * vec))


def _moments(rows, pieces, D, numbers):
    moments = torch.empty((rows.shape[0] * pieces, 2), dtype=torch.float32, device=rows.device)
    moments_kernel(D, rows.shape[1], rows.dtype, *numbers)(rows, moments)
    return moments


def run_group_norm(x, weight, bias, eps, out, *, threads=256, repeat=2):
    """out[B, G, D, S] = T((x - mean) * rsqrt(var + eps) * weight[G, D] + bias[G, D]), moments of each [D, S]; float32 inside.

    All tensors are contiguous and of one dtype T in bfloat16, float16, float32. A CTA has `repeat` vectors of `threads` threads
    of one channel. The first kernel leaves a mean and a sum of squares for each piece. The second joins those of its group, and
    reads its piece again.
    """
    if x.numel() == 0:
        return
    _, G, D, S = x.shape
    rows, numbers, pieces = _shape((x, out), threads, repeat)
    of_rows = x.view(rows, S)
    moments = _moments(of_rows, pieces, D, numbers)
    kernel = normalise_kernel(G, D, S, x.dtype, *numbers)
    kernel(of_rows, weight.view(-1), bias.view(-1), moments, eps, out.view(rows, S))


def run_group_norm_backward(x, weight, grad_out, eps, grad_x, grad_weight, grad_bias, *, threads=256, repeat=2):
    """grad_x = T(r * (h - mean(h) - n * mean(h * n))); grad_weight and grad_bias are the sums of grad_out * n and grad_out.

    r = rsqrt(var + eps), n = (x - mean) * r, h = grad_out * weight, means of each [D, S]; float32 inside and in the sums, one
    rounding to T. Shapes and pieces as run_group_norm. Both sums of a piece serve the gradients of scale and shift, and with
    the weights of the group's channels that of x. The order of all sums depends on the shape only.
    """
    B, G, D, S = x.shape
    if G * D == 0:
        return
    pieces, sums = 0, torch.empty((1, 2), dtype=torch.float32, device=x.device)
    if x.numel():
        rows, numbers, pieces = _shape((x, grad_out, grad_x), threads, repeat)
        of_rows, grads = x.view(rows, S), grad_out.view(rows, S)
        moments = _moments(of_rows, pieces, D, numbers)
        sums = torch.empty_like(moments)
        shape = (G, D, S, x.dtype, *numbers)
        gradient_sums_kernel(*shape)(of_rows, grads, moments, eps, sums)
        gradient_of_x_kernel(*shape)(of_rows, weight.view(-1), grads, moments, sums, eps, grad_x.view(rows, S))
    sum_parts_kernel(G * D, x.dtype)(sums, B * pieces, max(pieces, 1), grad_weight.view(-1), grad_bias.view(-1))

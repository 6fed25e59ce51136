"""Softmax over the last axis in TileLang: short rows are read once into registers, long ones twice with a running sum."""

import functools

import tilelang
import tilelang.language as T
import torch

KEPT_ELEMENTS = 32  # of its row that a thread keeps in registers, as float32; longer rows take the second kernel


@T.macro
def reduce_block(kind, thread, row, warps, value, partial):
    """Leave in value[0] the max or the sum over the warps that share a row."""
    value[0] = T.warp_reduce_max(value[0]) if kind == "max" else T.warp_reduce_sum(value[0])
    if warps > 1:
        if thread % 32 == 0:
            partial[row, thread // 32] = value[0]
        T.sync_threads()
        value[0] = partial[row, 0]
        for w in T.unroll(1, warps):
            value[0] = T.max(value[0], partial[row, w]) if kind == "max" else value[0] + partial[row, w]


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def softmax_short_kernel(N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check
    exp = T.exp if dtype == torch.float32 else T.__exp  # the cast to a 16-bit T hides the fast one's last bits

    @T.prim_func
    def softmax_short(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            loaded = T.alloc_local((chunks, vec), dtype)
            values = T.alloc_local((chunks, vec), "float32")
            result = T.alloc_local((vec,), dtype)
            partial_max = T.alloc_shared((rows, warps), "float32")
            partial_sum = T.alloc_shared((rows, warps), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")

            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                if not full:
                    for v in T.vectorized(vec):
                        loaded[c, v] = -T.infinity(dtype)
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        loaded[c, v] = x[row, column + v]
            top[0] = -T.infinity("float32")
            for c in T.unroll(chunks):
                for v in T.unroll(vec):
                    values[c, v] = T.cast(loaded[c, v], "float32")
                    top[0] = T.max(top[0], values[c, v])
            reduce_block("max", thread, local_row, warps, top, partial_max)

            total[0] = 0.0
            for c in T.unroll(chunks):
                for v in T.unroll(vec):
                    values[c, v] = exp(values[c, v] - top[0])
                    total[0] += values[c, v]
            reduce_block("sum", thread, local_row, warps, total, partial_sum)
            total[0] = 1.0 / total[0]

            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        result[v] = T.cast(values[c, v] * total[0], dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return softmax_short


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def softmax_long_kernel(N, dtype, vec, threads, repeat):
    """Compile for rows of N elements: a CTA of `threads` threads a row, with `repeat` loads of `vec` in flight each."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    warps = threads // 32
    steps = -(-N // (threads * vec * repeat))
    exp = T.exp if dtype == torch.float32 else T.__exp  # the cast to a 16-bit T hides the fast one's last bits

    @T.prim_func
    def softmax_long(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(M, threads=threads) as row:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(out_stride % vec == 0)
            thread = T.get_thread_binding(0)
            loaded = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            partial_max = T.alloc_shared((1, warps), "float32")
            partial_sum = T.alloc_shared((1, warps), "float32")
            own_top = T.alloc_local((1,), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            safe = T.alloc_var("float32", init=0.0)

            own_top[0] = -T.infinity("float32")
            total[0] = 0.0
            for step in T.serial(steps):
                for i in T.unroll(repeat):
                    column = ((step * repeat + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        loaded[i, v] = -T.infinity(dtype)
                    if column < N:
                        for v in T.vectorized(vec):
                            loaded[i, v] = x[row, column + v]
                top[0] = own_top[0]
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        top[0] = T.max(top[0], T.cast(loaded[i, v], "float32"))
                # While all is -inf, subtract 0: exp(-inf - 0) adds nothing, exp(-inf + inf) would be NaN.
                safe = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
                total[0] = total[0] * exp(own_top[0] - safe)
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        total[0] += exp(T.cast(loaded[i, v], "float32") - safe)
                own_top[0] = top[0]
            reduce_block("max", thread, 0, warps, top, partial_max)
            safe = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
            total[0] = total[0] * exp(own_top[0] - safe)
            reduce_block("sum", thread, 0, warps, total, partial_sum)
            total[0] = 1.0 / total[0]  # a row of -inf alone: 0 * (1 / 0) is NaN, as it should be

            for reverse in T.serial(steps):  # backwards, from the part of the row that the caches hold
                for i in T.unroll(repeat):
                    column = (((steps - 1 - reverse) * repeat + i) * threads + thread) * vec
                    if column < N:
                        for v in T.vectorized(vec):
                            loaded[i, v] = x[row, column + v]
                for i in T.unroll(repeat):
                    column = (((steps - 1 - reverse) * repeat + i) * threads + thread) * vec
                    if column < N:
                        for v in T.unroll(vec):
                            result[v] = T.cast(exp(T.cast(loaded[i, v], "float32") - safe) * total[0], dtype)
                        for v in T.vectorized(vec):
                            out[row, column + v] = result[v]

    return softmax_long


@functools.cache
def default_shape(N, vec):
    """Threads a row and rows a CTA: 16 elements a thread, four warps a CTA where a row needs fewer."""
    threads = min(1024, 32 * -(-N // (max(vec, 16) * 32)))
    return threads, max(1, 128 // threads)


def run(x, out, *, threads=None, rows=None, repeat=4):
    """out = exp(x - max(x)) / sum(exp(x - max(x))) over the last axis, in float32, rounded to T once.

    x, out: [M, N] with last stride 1 (any row stride); T is bfloat16, float16 or float32. A row of at most
    threads * 32 elements is kept in the registers of `threads` threads (a multiple of 32), `rows` rows a CTA; a longer
    one has a CTA of 1024 threads, which read it twice, `repeat` vectors in flight each. None chooses from N alone.
    """
    M, N = x.shape
    if M == 0:
        return
    dtype = x.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, both strides and both addresses.
    bits = N | x.stride(0) | out.stride(0) | (x.data_ptr() | out.data_ptr()) // itemsize | 16 // itemsize
    vec = bits & -bits
    if threads is None or rows is None:
        chosen = default_shape(N, vec)
        threads, rows = threads or chosen[0], rows or chosen[1]
    rows = min(rows, 1024 // threads)
    if threads * KEPT_ELEMENTS >= N:
        softmax_short_kernel(N, dtype, vec, threads, rows)(x, out)
    else:
        softmax_long_kernel(N, dtype, vec, 1024, repeat)(x, out)

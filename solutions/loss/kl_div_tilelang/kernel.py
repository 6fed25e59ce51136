"""Kullback-Leibler divergence of rows and its gradient, TileLang: one read of both inputs, then one read and one write."""

import functools

import tilelang
import tilelang.language as T
import torch

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several CTAs read
MIN_PIECE = 8192  # columns


@T.macro
def reduce_sum(thread, warps, value, partial):
    """Leave in value[0] the sum over the warps of a CTA."""
    value[0] = T.warp_reduce_sum(value[0])
    if warps > 1:
        if thread % 32 == 0:
            partial[thread // 32] = value[0]
        T.sync_threads()
        value[0] = partial[0]
        for w in T.unroll(1, warps):
            value[0] = value[0] + partial[w]


@functools.cache
@tilelang.jit
def kl_div_kernel(V, dtype, vec, threads, repeat, pieces, log_target):
    """Compile for V columns: a CTA of `threads` threads a row or piece of it, `repeat` loads of `vec` in flight of each input."""
    M = T.dynamic("M")
    x_stride, target_stride = T.dynamic("x_stride target_stride", "int64")
    warps = threads // 32
    steps = -(-V // (threads * vec * repeat * pieces))  # of a piece

    @T.prim_func
    def kl_div(
        log_probs: T.StridedTensor((M, V), (x_stride, 1), dtype),
        target: T.StridedTensor((M, V), (target_stride, 1), dtype),
        sums: T.Tensor((M, pieces), "float32"),
    ):
        with T.Kernel(M * pieces, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(target_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row, piece = block // pieces, block % pieces
            x = T.alloc_local((repeat, vec), dtype)
            wanted = T.alloc_local((repeat, vec), dtype)
            partial = T.alloc_shared((warps,), "float32")
            total = T.alloc_local((1,), "float32")
            value = T.alloc_var("float32", init=0.0)
            chance = T.alloc_var("float32", init=0.0)

            total[0] = 0.0
            for step in T.serial(steps):
                for i in T.unroll(repeat):
                    column = (((piece * steps + step) * repeat + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        x[i, v] = T.cast(0.0, dtype)
                        wanted[i, v] = -T.infinity(dtype) if log_target else T.cast(0.0, dtype)
                    if column < V:
                        for v in T.vectorized(vec):
                            x[i, v] = log_probs[row, column + v]
                        for v in T.vectorized(vec):
                            wanted[i, v] = target[row, column + v]
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        value = T.cast(wanted[i, v], "float32")
                        chance = T.exp(value) if log_target else value
                        if not log_target:
                            value = T.log(value)
                        if chance != 0.0:
                            total[0] += chance * (value - T.cast(x[i, v], "float32"))
            reduce_sum(thread, warps, total, partial)
            if thread == 0:
                sums[row, piece] = total[0]

    return kl_div


@functools.cache
@tilelang.jit
def add_pieces_kernel(pieces):
    """Compile for rows in `pieces` pieces: a thread a row adds up their sums."""
    M = T.dynamic("M")

    @T.prim_func
    def add_pieces(sums: T.Tensor((M, pieces), "float32"), loss: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, 32), threads=32) as block:
            row = block * 32 + T.get_thread_binding(0)
            total = T.alloc_local((1,), "float32")
            if row < M:
                total[0] = 0.0
                for piece in T.serial(pieces):
                    total[0] += sums[row, piece]
                loss[row] = total[0]

    return add_pieces


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def kl_div_backward_kernel(V, dtype, vec, threads, repeat, log_target):
    """Compile for V columns: a CTA of `threads` threads has threads * repeat * vec columns of a row."""
    M = T.dynamic("M")
    target_stride, grad_stride = T.dynamic("target_stride grad_stride", "int64")
    blocks = -(-V // (threads * repeat * vec))

    @T.prim_func
    def kl_div_backward(
        target: T.StridedTensor((M, V), (target_stride, 1), dtype),
        grad_loss: T.Tensor((M,), "float32"),
        grad_log_probs: T.StridedTensor((M, V), (grad_stride, 1), dtype),
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            T.assume(target_stride % vec == 0)  # run_backward() chose vec so; it lets the compiler use vector accesses
            T.assume(grad_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row = block // blocks
            first = (block % blocks * repeat * threads + thread) * vec
            wanted = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            factor = T.alloc_var("float32", init=0.0)
            value = T.alloc_var("float32", init=0.0)

            for i in T.unroll(repeat):
                if first + i * threads * vec < V:
                    for v in T.vectorized(vec):
                        wanted[i, v] = target[row, first + i * threads * vec + v]
            factor = -grad_loss[row]
            for i in T.unroll(repeat):
                if first + i * threads * vec < V:
                    for v in T.unroll(vec):
                        value = T.cast(wanted[i, v], "float32")
                        if log_target:
                            value = T.exp(value)
                        result[v] = T.cast(value * factor, dtype)
                    for v in T.vectorized(vec):
                        grad_log_probs[row, first + i * threads * vec + v] = result[v]

    return kl_div_backward


def _vector(*tensors):
    """Return the widest power of two, up to 16 bytes, that divides rows, strides and addresses, in elements."""
    itemsize = tensors[0].dtype.itemsize
    bits = tensors[0].shape[1] | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.stride(0) | tensor.data_ptr() // itemsize
    return bits & -bits


def run(log_probs, target, log_target, loss, *, threads=256, repeat=2):
    """Write loss [M] = sum(p * (log(p) - log_probs)) in float32, p being the target or, with log_target, its exponential.

    log_probs and target [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32. A CTA reads `repeat`
    vectors of each a thread at a time. Few rows are cut into pieces, and a second kernel adds these up.
    """
    M, V = log_probs.shape
    if M == 0:
        return
    vec = _vector(log_probs, target)
    threads = max(32, min(threads, 32 * -(-V // (32 * vec * repeat))))
    pieces = 1 if M >= FEW_ROWS else max(1, min(FEW_ROWS // M, V // MIN_PIECE))
    sums = loss.view(M, 1) if pieces == 1 else torch.empty((M, pieces), dtype=torch.float32, device=loss.device)
    kl_div_kernel(V, log_probs.dtype, vec, threads, repeat, pieces, log_target)(log_probs, target, sums)
    if pieces > 1:
        add_pieces_kernel(pieces)(sums, loss)


def run_backward(target, grad_loss, log_target, grad_log_probs, *, threads=256, repeat=2):
    """Write grad_log_probs [M, V] = T(-p * grad_loss), p being the target or, with log_target, its exponential.

    target and grad_log_probs with unit last stride and any row stride; grad_loss [M] float32. A thread has `repeat` vectors.
    """
    M, V = target.shape
    if M == 0:
        return
    vec = _vector(target, grad_log_probs)
    threads = max(32, min(threads, 32 * -(-V // (32 * vec * repeat))))
    kernel = kl_div_backward_kernel(V, target.dtype, vec, threads, repeat, log_target)
    kernel(target, grad_loss, grad_log_probs)

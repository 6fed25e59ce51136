"""Divergences of rows and their gradients, TileLang: Kullback-Leibler and Jensen-Shannon, one read of both and one write."""

import functools

import tilelang
import tilelang.language as T
import torch
from _lib.tilelang.vocabulary_rows import (
    add_pieces_kernel,
    exp_over,
    load_vector,
    log1p,
    reduce_block,
    row_pieces,
    row_threads,
    store_zeros,
    vector,
)

# KL(p | q) at beta 0, KL(q | p) at beta 1, the divergences from a mixture, and KL(p | q) of a p that is no logarithm.
FORWARD, REVERSE, MIXED, PLAIN = 0, 1, 2, 3


@functools.cache
@tilelang.jit
def divergence_kernel(V, dtype, vec, threads, repeat, pieces, kind, labeled):
    """Compile for V columns: a CTA of `threads` threads a row or piece of it, `repeat` loads of `vec` in flight of each input."""
    M = T.dynamic("M")
    x_stride, y_stride = T.dynamic("x_stride y_stride", "int64")
    warps = threads // 32
    steps = -(-V // (threads * vec * repeat * pieces))  # of a piece
    exp = T.exp if dtype == torch.float32 else T.__exp
    nothing = T.cast(0.0, dtype) if kind == PLAIN else -T.infinity(dtype)

    @T.prim_func
    def divergence(
        student: T.StridedTensor((M, V), (x_stride, 1), dtype),
        teacher: T.StridedTensor((M, V), (y_stride, 1), dtype),
        labels: T.Tensor((M,), "int64" if labeled else "float32"),
        sums: T.Tensor((M, pieces), "float32"),
        beta: T.float32,
        ignore_index: T.int64,
    ):
        with T.Kernel(M * pieces, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # the entry function chose vec so; it lets the compiler use vector accesses
            T.assume(y_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row, piece = block // pieces, block % pieces
            xs = T.alloc_local((repeat, vec), dtype)
            ys = T.alloc_local((repeat, vec), dtype)
            partial = T.alloc_shared((warps,), "float32")
            total = T.alloc_local((1,), "float32")
            small = T.alloc_local((1,), "float32")
            mixed = T.alloc_local((1,), "float32")
            above = T.alloc_local((1,), "float32")
            x = T.alloc_var("float32", init=0.0)
            y = T.alloc_var("float32", init=0.0)
            far = T.alloc_var("float32", init=0.0)
            weight = T.alloc_var("float32", init=0.0)
            chance = T.alloc_var("float32", init=0.0)
            active = T.alloc_var("int32", init=steps)

            if labeled:
                active = T.if_then_else(labels[row] == ignore_index, 0, steps)  # an ignored row is not read
            total[0] = 0.0
            for step in T.serial(active):
                for i in T.unroll(repeat):
                    column = (((piece * steps + step) * repeat + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        xs[i, v] = nothing
                        ys[i, v] = nothing
                    if column < V:
                        load_vector(student, row, column, vec, xs, i)
                        load_vector(teacher, row, column, vec, ys, i)
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        x = T.cast(xs[i, v], "float32")
                        y = T.cast(ys[i, v], "float32")
                        if kind == REVERSE:
                            chance = exp(x)
                            if chance != 0.0:
                                total[0] += chance * (x - y)
                        elif kind == MIXED:
                            if T.max(x, y) != -T.infinity("float32"):
                                weight = T.if_then_else(x >= y, beta, 1.0 - beta)
                                far = T.min(x - y, y - x)
                                exp_over(exp, far, 1, small)
                                # The mixture over the larger of both probabilities is 1 + weight * small.
                                log1p(weight * small[0], mixed, above)
                                chance = 0.0
                                if small[0] != -1.0:
                                    chance = (1.0 + small[0]) * far
                                total[0] += exp(T.max(x, y)) * (weight * chance - mixed[0] * above[0])
                        else:
                            chance = y if kind == PLAIN else exp(y)
                            if chance != 0.0:
                                total[0] += chance * ((T.log(y) if kind == PLAIN else y) - x)
            reduce_block("sum", thread, warps, total, partial)
            if thread == 0:
                sums[row, piece] = total[0]

    return divergence


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def gradients_kernel(V, dtype, vec, threads, repeat, kind, labeled):
    """Compile for V columns: a CTA of `threads` threads has threads * repeat * vec columns of a row."""
    M = T.dynamic("M")
    x_stride, y_stride, grad_stride = T.dynamic("x_stride y_stride grad_stride", "int64")
    blocks = -(-V // (threads * repeat * vec))
    of_student = kind in (REVERSE, MIXED)  # else the gradient is the teacher's, and the student is not read
    exp = T.exp if dtype == torch.float32 else T.__exp

    @T.prim_func
    def gradients(
        student: T.StridedTensor((M, V), (x_stride, 1), dtype),
        teacher: T.StridedTensor((M, V), (y_stride, 1), dtype),
        labels: T.Tensor((M,), "int64" if labeled else "float32"),
        grad_loss: T.Tensor((M,), "float32"),
        grad: T.StridedTensor((M, V), (grad_stride, 1), dtype),
        beta: T.float32,
        ignore_index: T.int64,
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # the entry function chose vec so; it lets the compiler use vector accesses
            T.assume(y_stride % vec == 0)
            T.assume(grad_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row = block // blocks
            first = (block % blocks * repeat * threads + thread) * vec
            xs = T.alloc_local((repeat, vec), dtype)
            ys = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            small = T.alloc_local((1,), "float32")
            mixed = T.alloc_local((1,), "float32")
            above = T.alloc_local((1,), "float32")
            x = T.alloc_var("float32", init=0.0)
            y = T.alloc_var("float32", init=0.0)
            far = T.alloc_var("float32", init=0.0)
            chance = T.alloc_var("float32", init=0.0)
            factor = T.alloc_var("float32", init=0.0)
            learned = T.alloc_var("int32", init=1)

            if labeled:
                learned = T.if_then_else(labels[row] == ignore_index, 0, 1)
            if learned == 0:
                store_zeros(grad, row, first, V, vec, repeat, threads * vec, dtype)
            else:
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        if of_student:
                            load_vector(student, row, first + i * threads * vec, vec, xs, i)
                        load_vector(teacher, row, first + i * threads * vec, vec, ys, i)
                factor = grad_loss[row]
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        for v in T.unroll(vec):
                            y = T.cast(ys[i, v], "float32")
                            if kind == PLAIN:
                                chance = -y
                            elif kind == FORWARD:
                                chance = -exp(y)
                            else:
                                x = T.cast(xs[i, v], "float32")
                                chance = exp(x)
                                if chance != 0.0:
                                    if kind == REVERSE:
                                        chance = chance * (x - y + 1.0)
                                    else:
                                        # Beyond 80 the exponential ends, and the mixture is nothing but the teacher.
                                        far = y - x
                                        exp_over(exp, T.min(far, 80.0), 1, small)
                                        log1p(beta * small[0], mixed, above)
                                        above[0] += T.if_then_else(far <= 80.0, 0.0, far - 80.0)
                                        chance = (beta - 1.0) * chance * above[0]
                            result[v] = T.cast(chance * factor, dtype)
                        for v in T.vectorized(vec):
                            grad[row, first + i * threads * vec + v] = result[v]

    return gradients


def _write_divergence(x, y, labels, beta, ignore_index, kind, loss, threads, repeat):
    """Launch the sums of rows, in pieces if rows are few; labels None: of all rows."""
    M, V = x.shape
    if M == 0:
        return
    vec = vector(x, y)
    threads = row_threads(V, vec, threads, repeat)
    pieces = row_pieces(x)
    sums = loss.view(M, 1) if pieces == 1 else torch.empty((M, pieces), dtype=torch.float32, device=loss.device)
    kernel = divergence_kernel(V, x.dtype, vec, threads, repeat, pieces, kind, labels is not None)
    kernel(x, y, loss if labels is None else labels, sums, beta, ignore_index)
    if pieces > 1:
        add_pieces_kernel(pieces)(sums, loss)


def _write_gradients(x, y, labels, grad_loss, beta, ignore_index, kind, grad, threads, repeat):
    """Launch the gradients of blocks of rows; labels None: of all rows."""
    M, V = y.shape
    if M == 0:
        return
    vec = vector(x, y, grad)
    threads = row_threads(V, vec, threads, repeat)
    kernel = gradients_kernel(V, y.dtype, vec, threads, repeat, kind, labels is not None)
    kernel(x, y, grad_loss if labels is None else labels, grad_loss, grad, beta, ignore_index)


def _kind(beta):
    return FORWARD if beta == 0 else REVERSE if beta == 1 else MIXED


def run_kl_div(log_probs, target, log_target, loss, *, threads=256, repeat=2):
    """Write loss [M] = sum(p * (log(p) - log_probs)) in float32, p being the target or, with log_target, its exponential.

    log_probs and target [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32. A CTA reads `repeat`
    vectors of each a thread at a time. Few rows are cut into pieces, and a second kernel adds these up.
    """
    _write_divergence(log_probs, target, None, 0.0, 0, FORWARD if log_target else PLAIN, loss, threads, repeat)


def run_kl_div_backward(target, grad_loss, log_target, grad_log_probs, *, threads=256, repeat=2):
    """Write grad_log_probs [M, V] = T(-p * grad_loss), p being the target or, with log_target, its exponential.

    target and grad_log_probs with unit last stride and any row stride; grad_loss [M] float32. A thread has `repeat` vectors.
    """
    kind = FORWARD if log_target else PLAIN
    _write_gradients(target, target, None, grad_loss, 0.0, 0, kind, grad_log_probs, threads, repeat)


def run_jsd(student, teacher, labels, beta, ignore_index, loss, *, threads=256, repeat=2):
    """Write loss [M] = beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q, in float32; 0 for ignored rows.

    student (log q) and teacher (log p) [M, V] as for run_kl_div; labels [M] int64. With beta 0 the loss is KL(p | q), with
    beta 1 it is KL(q | p).
    """
    _write_divergence(student, teacher, labels, beta, ignore_index, _kind(beta), loss, threads, repeat)


def run_jsd_backward(student, teacher, labels, grad_loss, beta, ignore_index, grad_student, *, threads=256, repeat=1):
    """Write grad_student [M, V] = T((1 - beta) q log(q / m) * grad_loss), m = beta p + (1 - beta) q; 0 for ignored rows.

    With beta 0 it is -p * grad_loss, with beta 1 it is q (log(q / p) + 1) * grad_loss. A thread has `repeat` vectors.
    """
    kind = _kind(beta)
    _write_gradients(student, teacher, labels, grad_loss, beta, ignore_index, kind, grad_student, threads, repeat)

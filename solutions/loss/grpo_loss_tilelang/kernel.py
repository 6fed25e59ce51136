"""The clipped policy loss of tokens and its gradient, TileLang: one read of the logits, then one read and one write."""

import functools

import tilelang
import tilelang.language as T
import torch
from _lib.tilelang.vocabulary_rows import (
    exp_over,
    grow,
    join,
    load_vector,
    row_pieces,
    row_threads,
    store_zeros,
    vector,
)


@functools.cache
@tilelang.jit
def statistics_kernel(V, dtype, vec, threads, repeat, pieces):
    """Compile for V columns: a CTA of `threads` threads a row or piece of it, `repeat` loads of `vec` in flight each."""
    M = T.dynamic("M")
    stride = T.dynamic("stride", "int64")
    warps = threads // 32
    steps = -(-V // (threads * vec * repeat * pieces))  # of a piece
    exp = T.exp if dtype == torch.float32 else T.__exp

    @T.prim_func
    def statistics(
        logits: T.StridedTensor((M, V), (stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        parts: T.Tensor((M, pieces, 2), "float32"),
        per_temperature: T.float32,
        ignore_index: T.int64,
    ):
        with T.Kernel(M * pieces, threads=threads) as block:
            T.assume(stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            thread = T.get_thread_binding(0)
            row, piece = block // pieces, block % pieces
            loaded = T.alloc_local((repeat, vec), dtype)
            partial_max = T.alloc_shared((warps,), "float32")
            partial_sum = T.alloc_shared((warps,), "float32")
            own_top = T.alloc_local((1,), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            base = T.alloc_local((1,), "float32")
            active = T.alloc_var("int32", init=0)

            active = T.if_then_else(labels[row] == ignore_index, 0, steps)  # a masked row is not read
            own_top[0] = -T.infinity("float32")
            top[0] = -T.infinity("float32")
            total[0] = 0.0
            for step in T.serial(active):
                for i in T.unroll(repeat):
                    column = (((piece * steps + step) * repeat + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        loaded[i, v] = -T.infinity(dtype)
                    if column < V:
                        load_vector(logits, row, column, vec, loaded, i)
                grow(exp, loaded, repeat, vec, per_temperature, own_top, top, base, total)
            join(exp, thread, warps, per_temperature, own_top, top, base, total, partial_max, partial_sum)
            if thread == 0:
                parts[row, piece, 0] = top[0]
                parts[row, piece, 1] = total[0]

    return statistics


@functools.cache
@tilelang.jit
def losses_kernel(V, dtype, pieces):
    """Compile for rows in `pieces` pieces: a thread a row joins them and computes the loss."""
    M = T.dynamic("M")
    stride = T.dynamic("stride", "int64")

    @T.prim_func
    def losses(
        logits: T.StridedTensor((M, V), (stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        parts: T.Tensor((M, pieces, 2), "float32"),
        old_logp: T.Tensor((M,), "float32"),
        ref_logp: T.Tensor((M,), "float32"),
        advantages: T.Tensor((M,), "float32"),
        loss: T.Tensor((M,), "float32"),
        logp: T.Tensor((M,), "float32"),
        row_max: T.Tensor((M,), "float32"),
        log_sum: T.Tensor((M,), "float32"),
        per_temperature: T.float32,
        beta: T.float32,
        least: T.float32,
        most: T.float32,
        ignore_index: T.int64,
    ):
        with T.Kernel(T.ceildiv(M, 32), threads=32) as block:
            row = block * 32 + T.get_thread_binding(0)
            top = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            safe = T.alloc_var("float32", init=0.0)
            found = T.alloc_var("float32", init=0.0)
            ratio = T.alloc_var("float32", init=0.0)
            bounded = T.alloc_var("float32", init=0.0)
            apart = T.alloc_var("float32", init=0.0)
            divergence = T.alloc_local((1,), "float32")
            label = T.alloc_var("int64", init=0)
            if row < M:
                label = labels[row]
                if label == ignore_index:
                    loss[row] = 0.0
                    logp[row] = 0.0
                    row_max[row] = 0.0
                    log_sum[row] = 0.0
                else:
                    top = -T.infinity("float32")
                    total = 0.0
                    for piece in T.serial(pieces):
                        top = T.max(top, parts[row, piece, 0])
                    safe = T.if_then_else(top == -T.infinity("float32"), 0.0, top)
                    for piece in T.serial(pieces):
                        total += parts[row, piece, 1] * T.exp((parts[row, piece, 0] - safe) * per_temperature)
                    # A row of -inf has the sum 0, and +inf or NaN in a row leave NaN in the sum.
                    total = T.if_then_else(top == -T.infinity("float32"), T.float32(float("nan")), T.log(total))
                    top = T.if_then_else(T.isnan(total), total, top)
                    found = T.float32(float("nan"))  # a label that is neither a column nor ignored is an error
                    if label >= 0 and label < V:
                        found = (T.cast(logits[row, label], "float32") - top) * per_temperature - total
                    ratio = T.exp(found - old_logp[row])
                    bounded = T.if_then_else(ratio < least, least, T.if_then_else(ratio > most, most, ratio))
                    apart = ref_logp[row] - found
                    exp_over(T.exp, apart, 2, divergence)
                    ratio = ratio * advantages[row]
                    bounded = bounded * advantages[row]
                    if beta == 0.0:  # ref_logp is any numbers then
                        divergence[0] = 0.0
                    loss[row] = beta * divergence[0] - T.if_then_else(bounded < ratio, bounded, ratio)
                    logp[row] = found
                    row_max[row] = top
                    log_sum[row] = total

    return losses


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def gradients_kernel(V, dtype, vec, threads, repeat):
    """Compile for V columns: a CTA of `threads` threads has threads * repeat * vec columns of a row."""
    M = T.dynamic("M")
    stride, grad_stride = T.dynamic("stride grad_stride", "int64")
    blocks = -(-V // (threads * repeat * vec))
    exp = T.exp if dtype == torch.float32 else T.__exp

    @T.prim_func
    def gradients(
        logits: T.StridedTensor((M, V), (stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        logp: T.Tensor((M,), "float32"),
        row_max: T.Tensor((M,), "float32"),
        log_sum: T.Tensor((M,), "float32"),
        old_logp: T.Tensor((M,), "float32"),
        ref_logp: T.Tensor((M,), "float32"),
        advantages: T.Tensor((M,), "float32"),
        grad_loss: T.Tensor((M,), "float32"),
        grad_logits: T.StridedTensor((M, V), (grad_stride, 1), dtype),
        per_temperature: T.float32,
        beta: T.float32,
        least: T.float32,
        most: T.float32,
        ignore_index: T.int64,
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            T.assume(stride % vec == 0)  # run_backward() chose vec so; it lets the compiler use vector accesses
            T.assume(grad_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row = block // blocks
            first = (block % blocks * repeat * threads + thread) * vec
            loaded = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            pull = T.alloc_local((1,), "float32")
            of_label = T.alloc_local((1,), "float32")
            label = T.alloc_var("int64", init=0)
            top = T.alloc_var("float32", init=0.0)
            rest = T.alloc_var("float32", init=0.0)
            ratio = T.alloc_var("float32", init=0.0)
            factor = T.alloc_var("float32", init=0.0)
            off = T.alloc_var("float32", init=0.0)

            label = labels[row]
            if label == ignore_index:
                store_zeros(grad_logits, row, first, V, vec, repeat, threads * vec, dtype)
            else:
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        load_vector(logits, row, first + i * threads * vec, vec, loaded, i)
                top = row_max[row]
                rest = log_sum[row]
                ratio = T.exp(logp[row] - old_logp[row])
                factor = advantages[row]
                if (factor < 0.0 and ratio < least) or (factor > 0.0 and ratio > most):
                    ratio = 0.0
                exp_over(T.exp, ref_logp[row] - logp[row], 1, pull)
                if beta == 0.0:
                    pull[0] = 0.0
                exp_over(T.exp, logp[row], 1, of_label)
                factor = (ratio * factor + beta * pull[0]) * grad_loss[row] * per_temperature
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        for v in T.unroll(vec):
                            off = exp((T.cast(loaded[i, v], "float32") - top) * per_temperature - rest)
                            if label == first + i * threads * vec + v:
                                off = of_label[0]
                            result[v] = T.cast(off * factor, dtype)
                        for v in T.vectorized(vec):
                            grad_logits[row, first + i * threads * vec + v] = result[v]

    return gradients


def run(
    logits,
    labels,
    old_logp,
    ref_logp,
    advantages,
    temperature,
    beta,
    eps_low,
    eps_high,
    ignore_index,
    loss,
    logp,
    row_max,
    log_sum,
    *,
    threads=512,
    repeat=4,
):
    """Write loss = beta (exp(d) - d - 1) - min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = exp(logp - old), d = ref - logp.

    logits [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32; labels [M] int64; old_logp,
    ref_logp, advantages and all outputs [M] float32. A CTA reads a row, or a piece of it, once. A second kernel joins the pieces
    and computes the losses, a row a thread. The row of an ignored label is not read.
    """
    M, V = logits.shape
    if M == 0:
        return
    vec = vector(logits)
    threads = row_threads(V, vec, threads, repeat)
    pieces = row_pieces(logits)
    parts = torch.empty((M, pieces, 2), dtype=torch.float32, device=logits.device)
    numbers = (1 / temperature, beta, 1 - eps_low, 1 + eps_high, ignore_index)
    statistics_kernel(V, logits.dtype, vec, threads, repeat, pieces)(logits, labels, parts, numbers[0], ignore_index)
    tensors = (logits, labels, parts, old_logp, ref_logp, advantages, loss, logp, row_max, log_sum)
    losses_kernel(V, logits.dtype, pieces)(*tensors, *numbers)


def run_backward(
    logits,
    labels,
    logp,
    row_max,
    log_sum,
    old_logp,
    ref_logp,
    advantages,
    grad_loss,
    temperature,
    beta,
    eps_low,
    eps_high,
    ignore_index,
    grad_logits,
    *,
    threads=256,
    repeat=2,
):
    """Write grad_logits [M, V] = T((p - (1 at the token)) * c * grad_loss / temperature); 0 for masked rows.

    c = r A, or 0 if r is clipped, plus beta (exp(ref - logp) - 1); p = exp((logits - row_max) / temperature - log_sum). logits
    and grad_logits with unit last stride and any row stride; labels [M] int64; all others [M] float32. A thread has `repeat`
    vectors of a row.
    """
    M, V = logits.shape
    if M == 0:
        return
    vec = vector(logits, grad_logits)
    threads = row_threads(V, vec, threads, repeat)
    numbers = (1 / temperature, beta, 1 - eps_low, 1 + eps_high, ignore_index)
    tensors = (logits, labels, logp, row_max, log_sum, old_logp, ref_logp, advantages, grad_loss, grad_logits)
    gradients_kernel(V, logits.dtype, vec, threads, repeat)(*tensors, *numbers)

"""The heads of a student and a teacher, their divergence and its gradients in chunks of tokens, TileLang: five kernels each."""

import functools

import tilelang
import tilelang.language as T
import torch
from _lib.tilelang.vocabulary_rows import grow, join, load_vector, reduce_block
from kernel import BLOCK_K, BLOCK_M, _is_aligned, _padded, multiprocessor_count, product_kernel

FORWARD, REVERSE, MIXED = 0, 1, 2  # KL(p | q) at beta 0, KL(q | p) at beta 1, and the divergences from a mixture
REPEAT = 2  # vectors of each input that a thread has in flight


@T.macro
def log_mixture(x, y, beta, weight, above):
    """Leave in above[0] the logarithm of the mixture over the larger of the probabilities exp(x) and exp(y)."""
    weight[0] = T.if_then_else(x >= y, beta, 1.0 - beta)
    above[0] = T.log(1.0 - weight[0] + weight[0] * T.__exp(-T.abs(x - y)))


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def logits_to_gradients_kernel(V, dtype, vec, threads, kind):
    """Compile for V columns: store the loss of a row, and write the gradient of the student's logits over them."""
    M = T.dynamic("M")
    x_stride, y_stride = T.dynamic("x_stride y_stride", "int64")
    warps = threads // 32
    steps = -(-V // (threads * vec * REPEAT))

    @T.prim_func
    def logits_to_gradients(
        student: T.StridedTensor((M, V), (x_stride, 1), dtype),
        teacher: T.StridedTensor((M, V), (y_stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        grad_loss: T.Tensor((M,), "float32"),
        loss: T.Tensor((M,), "float32"),
        per_temperature: T.float32,
        beta: T.float32,
        ignore_index: T.int64,
    ):
        with T.Kernel(M, threads=threads) as row:
            T.assume(x_stride % vec == 0)
            T.assume(y_stride % vec == 0)
            thread = T.get_thread_binding(0)
            xs = T.alloc_local((REPEAT, vec), dtype)
            ys = T.alloc_local((REPEAT, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            x_tops = T.alloc_shared((warps,), "float32")
            y_tops = T.alloc_shared((warps,), "float32")
            x_totals = T.alloc_shared((warps,), "float32")
            y_totals = T.alloc_shared((warps,), "float32")
            teachers = T.alloc_shared((warps,), "float32")
            students = T.alloc_shared((warps,), "float32")
            x_top = T.alloc_local((1,), "float32")
            y_top = T.alloc_local((1,), "float32")
            x_total = T.alloc_local((1,), "float32")
            y_total = T.alloc_local((1,), "float32")
            of_teacher = T.alloc_local((1,), "float32")
            of_student = T.alloc_local((1,), "float32")
            weight = T.alloc_local((1,), "float32")
            above = T.alloc_local((1,), "float32")
            x_own = T.alloc_local((1,), "float32")
            y_own = T.alloc_local((1,), "float32")
            base = T.alloc_local((1,), "float32")
            x = T.alloc_var("float32", init=0.0)
            y = T.alloc_var("float32", init=0.0)
            factor = T.alloc_var("float32", init=0.0)
            grad = T.alloc_var("float32", init=0.0)
            active = T.alloc_var("int32", init=0)

            active = T.if_then_else(labels[row] == ignore_index, 0, steps)  # an ignored row is not read
            # 1. Statistics of both rows, of each thread first.
            x_top[0] = -T.infinity("float32")
            y_top[0] = -T.infinity("float32")
            x_own[0] = -T.infinity("float32")
            y_own[0] = -T.infinity("float32")
            x_total[0] = 0.0
            y_total[0] = 0.0
            for step in T.serial(active):
                for i in T.unroll(REPEAT):
                    column = ((step * REPEAT + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        xs[i, v] = -T.infinity(dtype)
                        ys[i, v] = -T.infinity(dtype)
                    if column < V:
                        load_vector(student, row, column, vec, xs, i)
                        load_vector(teacher, row, column, vec, ys, i)
                grow(T.__exp, xs, REPEAT, vec, per_temperature, x_own, x_top, base, x_total)
                grow(T.__exp, ys, REPEAT, vec, per_temperature, y_own, y_top, base, y_total)
            join(T.__exp, thread, warps, per_temperature, x_own, x_top, base, x_total, x_tops, x_totals)
            join(T.__exp, thread, warps, per_temperature, y_own, y_top, base, y_total, y_tops, y_totals)
            x_total[0] = T.log(x_total[0])
            y_total[0] = T.log(y_total[0])
            # 2. The divergences. Backwards: the end of the row was read last and is still in cache.
            of_teacher[0] = 0.0
            of_student[0] = 0.0
            for back in T.serial(active):
                for i in T.unroll(REPEAT):
                    column = (((steps - 1 - back) * REPEAT + i) * threads + thread) * vec
                    if column < V:
                        load_vector(student, row, column, vec, xs, i)
                        load_vector(teacher, row, column, vec, ys, i)
                        for v in T.unroll(vec):
                            x = (T.cast(xs[i, v], "float32") - x_top[0]) * per_temperature - x_total[0]
                            y = (T.cast(ys[i, v], "float32") - y_top[0]) * per_temperature - y_total[0]
                            if kind == FORWARD:
                                of_teacher[0] += T.__exp(y) * (y - x)
                            elif kind == REVERSE:
                                of_student[0] += T.__exp(x) * (x - y)
                            else:
                                log_mixture(x, y, beta, weight, above)
                                of_teacher[0] -= T.__exp(y) * (above[0] + T.max(x - y, 0.0))
                                of_student[0] -= T.__exp(x) * (above[0] + T.max(y - x, 0.0))
            reduce_block("sum", thread, warps, of_teacher, teachers)
            reduce_block("sum", thread, warps, of_student, students)
            if thread == 0:
                if kind == MIXED:
                    loss[row] = beta * of_teacher[0] + (1.0 - beta) * of_student[0]
                else:
                    loss[row] = of_teacher[0] + of_student[0]  # one of them is 0, and both of an ignored row
            # 3. The gradient.
            factor = grad_loss[row] * per_temperature
            for step in T.serial(steps):
                for i in T.unroll(REPEAT):
                    column = ((step * REPEAT + i) * threads + thread) * vec
                    if column < V:
                        if active == 0:
                            for v in T.unroll(vec):
                                result[v] = T.cast(0.0, dtype)
                        else:
                            load_vector(student, row, column, vec, xs, i)
                            load_vector(teacher, row, column, vec, ys, i)
                            for v in T.unroll(vec):
                                x = (T.cast(xs[i, v], "float32") - x_top[0]) * per_temperature - x_total[0]
                                y = (T.cast(ys[i, v], "float32") - y_top[0]) * per_temperature - y_total[0]
                                if kind == FORWARD:
                                    grad = T.__exp(x) - T.__exp(y)
                                elif kind == REVERSE:
                                    grad = T.__exp(x) * (x - y - of_student[0])
                                else:
                                    log_mixture(x, y, beta, weight, above)
                                    grad = T.min(x - y, 0.0) - above[0] - of_student[0]
                                    grad = (1.0 - beta) * T.__exp(x) * grad
                                result[v] = T.cast(grad * factor, dtype)
                        for v in T.vectorized(vec):
                            student[row, column + v] = result[v]

    return logits_to_gradients


def run(
    hidden,
    weight,
    teacher_hidden,
    teacher_weight,
    labels,
    grad_loss,
    temperature,
    beta,
    ignore_index,
    loss,
    grad_hidden,
    grad_weight,
    *,
    CHUNK=2048,
    block_N=256,
    threads=512,
):
    """Write the divergence of each token and the gradients of sum(loss * grad_loss) for the student.

    hidden, grad_hidden [M, H], weight, grad_weight [V, H], teacher_hidden [M, G] and teacher_weight [V, G] in T (bfloat16);
    labels [M] int64; grad_loss, loss [M] float32. CHUNK tokens at a time: both logits in T, the losses and the gradient of the
    student's logits in their place, then both products with it. With several chunks, the gradient of the weight is added up in
    a float32 tensor of its size. Inputs that TMA cannot address are copied, which is slow.
    """
    M, H = hidden.shape
    G, V = teacher_hidden.shape[1], weight.shape[0]
    if M == 0:
        grad_weight.zero_()
        return
    dtype, multiprocessors = hidden.dtype, multiprocessor_count(hidden.device.index)
    inputs = (hidden, weight, teacher_hidden, teacher_weight)
    hidden, weight, teacher_hidden, teacher_weight = (
        one if _is_aligned(one) else _padded(one).copy_(one) for one in inputs
    )
    stages = 192 * 1024 // ((BLOCK_M + block_N) * BLOCK_K * 2)
    chunks = -(-M // CHUNK)
    rows = -(-M // chunks)
    logits, taught = torch.empty((2, rows, -(-V // 8) * 8), dtype=dtype, device=hidden.device)[:, :, :V]
    none = torch.empty((1, 1), dtype=torch.float32, device=hidden.device)
    partial = torch.empty((V, H), dtype=torch.float32, device=hidden.device) if chunks > 1 else none
    vec = 8 if V % 8 == 0 else V & -V
    threads = max(64, min(threads, 32 * -(-V // (32 * vec * REPEAT))))
    common = (False, False, block_N, stages, multiprocessors)
    to_logits = product_kernel(None, V, H, dtype, True, True, *common)
    to_taught = product_kernel(None, V, G, dtype, True, True, *common)
    to_hidden = product_kernel(None, H, V, dtype, True, False, *common)
    kind = FORWARD if beta == 0 else REVERSE if beta == 1 else MIXED
    to_gradients = logits_to_gradients_kernel(V, dtype, vec, threads, kind)
    numbers = (1 / temperature, beta, ignore_index)
    for start in range(0, M, rows):
        stop = min(M, start + rows)
        chunk, other, part = logits[: stop - start], taught[: stop - start], hidden[start:stop]
        to_logits(part, weight, chunk, none)
        to_taught(teacher_hidden[start:stop], teacher_weight, other, none)
        to_gradients(chunk, other, labels[start:stop], grad_loss[start:stop], loss[start:stop], *numbers)
        to_hidden(chunk, weight, grad_hidden[start:stop], none)
        adds, keeps = start > 0, stop < M
        shape = (V, H, stop - start, dtype, False, False)
        to_weight = product_kernel(*shape, adds, keeps, block_N, stages, multiprocessors)
        to_weight(chunk, part, grad_weight, partial if adds or keeps else none)

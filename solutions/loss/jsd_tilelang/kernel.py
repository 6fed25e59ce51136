"""Generalised Jensen-Shannon divergence of rows and its gradient, TileLang: one read of both inputs, and one write."""

import functools

import tilelang
import tilelang.language as T
import torch

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several CTAs read
MIN_PIECE = 8192  # columns

FORWARD, REVERSE, MIXED = 0, 1, 2  # KL(p | q) at beta 0, KL(q | p) at beta 1, and the divergences from a mixture


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


@T.macro
def expm1(x, exp, found):
    """Leave in found[0] exp(x) - 1, near 0 by its series: the difference would have no correct digit there."""
    found[0] = x * T.float32(1 / 40320) + T.float32(1 / 5040)
    found[0] = found[0] * x + T.float32(1 / 720)
    found[0] = found[0] * x + T.float32(1 / 120)
    found[0] = found[0] * x + T.float32(1 / 24)
    found[0] = found[0] * x + T.float32(1 / 6)
    found[0] = found[0] * x + T.float32(1 / 2)
    found[0] = found[0] * x + T.float32(1)
    found[0] = found[0] * x
    if x >= 0.4 or x <= -0.4:
        found[0] = exp(x) - 1.0


@T.macro
def log1p(x, total, found):
    """Leave in found[0] log(1 + x), with the rounding of the sum put back."""
    total[0] = 1.0 + x
    found[0] = T.log(total[0]) + (x - (total[0] - 1.0)) / total[0]


@functools.cache
@tilelang.jit
def jsd_kernel(V, dtype, vec, threads, repeat, pieces, kind):
    """Compile for V columns: a CTA of `threads` threads a row or piece of it, `repeat` loads of `vec` in flight of each input."""
    M = T.dynamic("M")
    x_stride, y_stride = T.dynamic("x_stride y_stride", "int64")
    warps = threads // 32
    steps = -(-V // (threads * vec * repeat * pieces))  # of a piece
    exp = T.exp if dtype == torch.float32 else T.__exp

    @T.prim_func
    def jsd(
        student: T.StridedTensor((M, V), (x_stride, 1), dtype),
        teacher: T.StridedTensor((M, V), (y_stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        sums: T.Tensor((M, pieces), "float32"),
        beta: T.float32,
        ignore_index: T.int64,
    ):
        with T.Kernel(M * pieces, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
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
            active = T.alloc_var("int32", init=0)

            active = T.if_then_else(labels[row] == ignore_index, 0, steps)  # an ignored row is not read
            total[0] = 0.0
            for step in T.serial(active):
                for i in T.unroll(repeat):
                    column = (((piece * steps + step) * repeat + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        xs[i, v] = -T.infinity(dtype)
                        ys[i, v] = -T.infinity(dtype)
                    if column < V:
                        for v in T.vectorized(vec):
                            xs[i, v] = student[row, column + v]
                        for v in T.vectorized(vec):
                            ys[i, v] = teacher[row, column + v]
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        x = T.cast(xs[i, v], "float32")
                        y = T.cast(ys[i, v], "float32")
                        if kind == FORWARD:
                            chance = exp(y)
                            if chance != 0.0:
                                total[0] += chance * (y - x)
                        elif kind == REVERSE:
                            chance = exp(x)
                            if chance != 0.0:
                                total[0] += chance * (x - y)
                        elif T.max(x, y) != -T.infinity("float32"):
                            weight = T.if_then_else(x >= y, beta, 1.0 - beta)
                            far = T.min(x - y, y - x)
                            expm1(far, exp, small)
                            # The mixture over the larger of both probabilities is 1 + weight * small.
                            log1p(weight * small[0], mixed, above)
                            chance = 0.0
                            if small[0] != -1.0:
                                chance = (1.0 + small[0]) * far
                            total[0] += exp(T.max(x, y)) * (weight * chance - mixed[0] * above[0])
            reduce_sum(thread, warps, total, partial)
            if thread == 0:
                sums[row, piece] = total[0]

    return jsd


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
def jsd_backward_kernel(V, dtype, vec, threads, repeat, kind):
    """Compile for V columns: a CTA of `threads` threads has threads * repeat * vec columns of a row."""
    M = T.dynamic("M")
    x_stride, y_stride, grad_stride = T.dynamic("x_stride y_stride grad_stride", "int64")
    blocks = -(-V // (threads * repeat * vec))
    exp = T.exp if dtype == torch.float32 else T.__exp

    @T.prim_func
    def jsd_backward(
        student: T.StridedTensor((M, V), (x_stride, 1), dtype),
        teacher: T.StridedTensor((M, V), (y_stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        grad_loss: T.Tensor((M,), "float32"),
        grad_student: T.StridedTensor((M, V), (grad_stride, 1), dtype),
        beta: T.float32,
        ignore_index: T.int64,
    ):
        with T.Kernel(M * blocks, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run_backward() chose vec so; it lets the compiler use vector accesses
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

            if labels[row] == ignore_index:
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        for v in T.vectorized(vec):
                            grad_student[row, first + i * threads * vec + v] = T.cast(0.0, dtype)
            else:
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        for v in T.vectorized(vec):
                            xs[i, v] = student[row, first + i * threads * vec + v]
                        for v in T.vectorized(vec):
                            ys[i, v] = teacher[row, first + i * threads * vec + v]
                factor = grad_loss[row]
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        for v in T.unroll(vec):
                            x = T.cast(xs[i, v], "float32")
                            y = T.cast(ys[i, v], "float32")
                            if kind == FORWARD:
                                chance = -exp(y)
                            else:
                                chance = exp(x)
                                if chance != 0.0:
                                    if kind == REVERSE:
                                        chance = chance * (x - y + 1.0)
                                    else:
                                        # Beyond 80 the exponential ends, and the mixture is nothing but the teacher.
                                        far = y - x
                                        expm1(T.min(far, 80.0), exp, small)
                                        log1p(beta * small[0], mixed, above)
                                        above[0] += T.if_then_else(far <= 80.0, 0.0, far - 80.0)
                                        chance = (beta - 1.0) * chance * above[0]
                            result[v] = T.cast(chance * factor, dtype)
                        for v in T.vectorized(vec):
                            grad_student[row, first + i * threads * vec + v] = result[v]

    return jsd_backward


def _vector(*tensors):
    """Return the widest power of two, up to 16 bytes, that divides rows, strides and addresses, in elements."""
    itemsize = tensors[0].dtype.itemsize
    bits = tensors[0].shape[1] | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.stride(0) | tensor.data_ptr() // itemsize
    return bits & -bits


def _kind(beta):
    return FORWARD if beta == 0 else REVERSE if beta == 1 else MIXED


def run(student, teacher, labels, beta, ignore_index, loss, *, threads=256, repeat=2):
    """Write loss [M] = beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q, in float32; 0 for ignored rows.

    student (log q) and teacher (log p) [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32;
    labels [M] int64. With beta 0 the loss is KL(p | q), with beta 1 it is KL(q | p). A CTA reads `repeat` vectors of each a
    thread at a time. Few rows are cut into pieces, and a second kernel adds these up.
    """
    M, V = student.shape
    if M == 0:
        return
    vec = _vector(student, teacher)
    threads = max(32, min(threads, 32 * -(-V // (32 * vec * repeat))))
    pieces = 1 if M >= FEW_ROWS else max(1, min(FEW_ROWS // M, V // MIN_PIECE))
    sums = loss.view(M, 1) if pieces == 1 else torch.empty((M, pieces), dtype=torch.float32, device=loss.device)
    kernel = jsd_kernel(V, student.dtype, vec, threads, repeat, pieces, _kind(beta))
    kernel(student, teacher, labels, sums, beta, ignore_index)
    if pieces > 1:
        add_pieces_kernel(pieces)(sums, loss)


def run_backward(student, teacher, labels, grad_loss, beta, ignore_index, grad_student, *, threads=256, repeat=1):
    """Write grad_student [M, V] = T((1 - beta) q log(q / m) * grad_loss), m = beta p + (1 - beta) q; 0 for ignored rows.

    With beta 0 it is -p * grad_loss, with beta 1 it is q (log(q / p) + 1) * grad_loss. student (log q), teacher (log p) and
    grad_student with unit last stride and any row stride; labels [M] int64, grad_loss [M] float32.
    """
    M, V = student.shape
    if M == 0:
        return
    vec = _vector(student, teacher, grad_student)
    threads = max(32, min(threads, 32 * -(-V // (32 * vec * repeat))))
    kernel = jsd_backward_kernel(V, student.dtype, vec, threads, repeat, _kind(beta))
    kernel(student, teacher, labels, grad_loss, grad_student, beta, ignore_index)

"""Cross entropy of rows of logits and its gradient, TileLang: one read of the logits, then one read and one write."""

import functools

import tilelang
import tilelang.language as T
import torch

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several CTAs read
MIN_PIECE = 16384  # columns


@T.macro
def reduce_block(kind, thread, warps, value, partial):
    """Leave in value[0] the max or the sum over the warps of a CTA."""
    value[0] = T.warp_reduce_max(value[0]) if kind == "max" else T.warp_reduce_sum(value[0])
    if warps > 1:
        if thread % 32 == 0:
            partial[thread // 32] = value[0]
        T.sync_threads()
        value[0] = partial[0]
        for w in T.unroll(1, warps):
            value[0] = T.max(value[0], partial[w]) if kind == "max" else value[0] + partial[w]


@T.macro
def store_row(row, of_label, top, total, is_ignored, loss, row_max, log_sum):
    """Store what a row's maximum and sum give. Both terms of the loss are at least 0: nothing cancels."""
    if is_ignored:
        loss[row] = 0.0
        row_max[row] = 0.0
        log_sum[row] = 0.0
    else:
        # A row of -inf has the sum 0, and +inf or NaN in a row leave NaN in the sum.
        total[0] = T.if_then_else(top[0] == -T.infinity("float32"), T.float32(float("nan")), T.log(total[0]))
        top[0] = T.if_then_else(T.isnan(total[0]), total[0], top[0])
        loss[row] = total[0] + (top[0] - of_label[0])
        row_max[row] = top[0]
        log_sum[row] = total[0]


@functools.cache
@tilelang.jit
def cross_entropy_kernel(V, dtype, vec, threads, repeat, pieces):
    """Compile for V columns: a CTA of `threads` threads a row or piece of it, `repeat` loads of `vec` in flight each."""
    M = T.dynamic("M")
    stride = T.dynamic("stride", "int64")
    warps = threads // 32
    width = threads * vec * repeat
    steps = -(-V // (width * pieces))  # of a piece
    exp = T.exp if dtype == torch.float32 else T.__exp

    @T.prim_func
    def cross_entropy(
        logits: T.StridedTensor((M, V), (stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        parts: T.Tensor((M, pieces, 2), "float32"),
        loss: T.Tensor((M,), "float32"),
        row_max: T.Tensor((M,), "float32"),
        log_sum: T.Tensor((M,), "float32"),
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
            of_label = T.alloc_local((1,), "float32")
            safe = T.alloc_var("float32", init=0.0)
            label = T.alloc_var("int64", init=0)
            active = T.alloc_var("int32", init=0)

            label = labels[row]
            active = T.if_then_else(label == ignore_index, 0, steps)  # an ignored row is not read
            own_top[0] = -T.infinity("float32")
            top[0] = -T.infinity("float32")
            total[0] = 0.0
            for step in T.serial(active):
                for i in T.unroll(repeat):
                    column = (((piece * steps + step) * repeat + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        loaded[i, v] = -T.infinity(dtype)
                    if column < V:
                        for v in T.vectorized(vec):
                            loaded[i, v] = logits[row, column + v]
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
            reduce_block("max", thread, warps, top, partial_max)
            safe = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
            total[0] = total[0] * exp(own_top[0] - safe)
            reduce_block("sum", thread, warps, total, partial_sum)
            if thread == 0:
                if pieces > 1:
                    parts[row, piece, 0] = top[0]
                    parts[row, piece, 1] = total[0]
                else:
                    of_label[0] = T.float32(float("nan"))  # a label that is neither a column nor ignored is an error
                    if label >= 0 and label < V:
                        of_label[0] = T.cast(logits[row, label], "float32")
                    store_row(row, of_label, top, total, label == ignore_index, loss, row_max, log_sum)

    return cross_entropy


@functools.cache
@tilelang.jit
def join_pieces_kernel(V, dtype, pieces):
    """Compile for rows in `pieces` pieces: a thread a row adds up their statistics."""
    M = T.dynamic("M")
    stride = T.dynamic("stride", "int64")

    @T.prim_func
    def join_pieces(
        logits: T.StridedTensor((M, V), (stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        parts: T.Tensor((M, pieces, 2), "float32"),
        loss: T.Tensor((M,), "float32"),
        row_max: T.Tensor((M,), "float32"),
        log_sum: T.Tensor((M,), "float32"),
        ignore_index: T.int64,
    ):
        with T.Kernel(T.ceildiv(M, 32), threads=32) as block:
            row = block * 32 + T.get_thread_binding(0)
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            of_label = T.alloc_local((1,), "float32")
            safe = T.alloc_var("float32", init=0.0)
            label = T.alloc_var("int64", init=0)
            if row < M:
                label = labels[row]
                top[0] = -T.infinity("float32")
                total[0] = 0.0
                for piece in T.serial(pieces):
                    top[0] = T.max(top[0], parts[row, piece, 0])
                safe = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
                for piece in T.serial(pieces):
                    total[0] += parts[row, piece, 1] * T.exp(parts[row, piece, 0] - safe)
                of_label[0] = T.float32(float("nan"))
                if label >= 0 and label < V:
                    of_label[0] = T.cast(logits[row, label], "float32")
                store_row(row, of_label, top, total, label == ignore_index, loss, row_max, log_sum)

    return join_pieces


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def cross_entropy_backward_kernel(V, dtype, vec, threads, repeat):
    """Compile for V columns: a CTA of `threads` threads has threads * repeat * vec columns of a row."""
    M = T.dynamic("M")
    stride, grad_stride = T.dynamic("stride grad_stride", "int64")
    blocks = -(-V // (threads * repeat * vec))
    exp = T.exp if dtype == torch.float32 else T.__exp

    @T.prim_func
    def cross_entropy_backward(
        logits: T.StridedTensor((M, V), (stride, 1), dtype),
        labels: T.Tensor((M,), "int64"),
        row_max: T.Tensor((M,), "float32"),
        log_sum: T.Tensor((M,), "float32"),
        grad_loss: T.Tensor((M,), "float32"),
        grad_logits: T.StridedTensor((M, V), (grad_stride, 1), dtype),
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
            label = T.alloc_var("int64", init=0)
            top = T.alloc_var("float32", init=0.0)
            rest = T.alloc_var("float32", init=0.0)
            factor = T.alloc_var("float32", init=0.0)
            score = T.alloc_var("float32", init=0.0)
            off = T.alloc_var("float32", init=0.0)

            label = labels[row]
            if label == ignore_index:
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        for v in T.vectorized(vec):
                            grad_logits[row, first + i * threads * vec + v] = T.cast(0.0, dtype)
            else:
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        for v in T.vectorized(vec):
                            loaded[i, v] = logits[row, first + i * threads * vec + v]
                top = row_max[row]
                rest = log_sum[row]
                factor = grad_loss[row]
                for i in T.unroll(repeat):
                    if first + i * threads * vec < V:
                        for v in T.unroll(vec):
                            score = (T.cast(loaded[i, v], "float32") - top) - rest
                            off = exp(score)
                            if label == first + i * threads * vec + v:
                                # exp(score) - 1; near 0 by its series, as the difference would have no correct digit
                                off = T.exp(score) - 1.0
                                if score > -0.4:
                                    off = score / 8.0 + 1.0
                                    for divisor in T.unroll(6):
                                        off = score / T.cast(7 - divisor, "float32") * off + 1.0
                                    off = score * off
                            result[v] = T.cast(off * factor, dtype)
                        for v in T.vectorized(vec):
                            grad_logits[row, first + i * threads * vec + v] = result[v]

    return cross_entropy_backward


def _vector(*tensors):
    """Return the widest power of two, up to 16 bytes, that divides rows, strides and addresses, in elements."""
    itemsize = tensors[0].dtype.itemsize
    bits = tensors[0].shape[1] | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.stride(0) | tensor.data_ptr() // itemsize
    return bits & -bits


def run(logits, labels, ignore_index, loss, row_max, log_sum, *, threads=512, repeat=4):
    """Write loss = log_sum + row_max - logits[label], row_max and log_sum, all [M] in float32; 0 for ignored rows.

    logits [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32; labels [M] int64. A CTA of
    `threads` threads reads a row once, `repeat` vectors in flight in each. Few rows are cut into pieces, and a second kernel
    joins these.
    """
    M, V = logits.shape
    if M == 0:
        return
    vec = _vector(logits)
    threads = max(32, min(threads, 32 * -(-V // (32 * vec * repeat))))
    pieces = 1 if M >= FEW_ROWS else max(1, min(FEW_ROWS // M, V // MIN_PIECE))
    parts = torch.empty((M, pieces, 2), dtype=torch.float32, device=logits.device)  # not used by rows in one piece
    arguments = (logits, labels, parts, loss, row_max, log_sum, ignore_index)
    cross_entropy_kernel(V, logits.dtype, vec, threads, repeat, pieces)(*arguments)
    if pieces > 1:
        join_pieces_kernel(V, logits.dtype, pieces)(*arguments)


def run_backward(logits, labels, row_max, log_sum, grad_loss, ignore_index, grad_logits, *, threads=256, repeat=2):
    """Write grad_logits [M, V] = T((exp(logits - row_max - log_sum) - (1 at the label)) * grad_loss); 0 for ignored rows.

    logits and grad_logits with unit last stride and any row stride; labels [M] int64; row_max, log_sum and grad_loss [M]
    float32. A thread has `repeat` vectors of a row.
    """
    M, V = logits.shape
    if M == 0:
        return
    vec = _vector(logits, grad_logits)
    threads = max(32, min(threads, 32 * -(-V // (32 * vec * repeat))))
    kernel = cross_entropy_backward_kernel(V, logits.dtype, vec, threads, repeat)
    kernel(logits, labels, row_max, log_sum, grad_loss, grad_logits, ignore_index)

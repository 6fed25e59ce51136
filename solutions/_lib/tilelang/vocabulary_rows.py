"""Rows of a vocabulary that are read once: whole, in pieces if rows are few, or in blocks of columns; and numbers near 0."""

import functools

import tilelang
import tilelang.language as T

FEW_ROWS = 512  # below about four a multiprocessor, rows are cut into pieces that several CTAs read
MIN_PIECE = 4096  # columns


def vector(*tensors):
    """Return the widest power of two, up to 16 bytes, that divides rows, strides and addresses, in elements."""
    itemsize = tensors[0].dtype.itemsize
    bits = tensors[0].shape[1] | 16 // itemsize
    for tensor in tensors:
        bits |= tensor.stride(0) | tensor.data_ptr() // itemsize
    return bits & -bits


def row_threads(V, vec, threads, repeat):
    """Return the threads of a CTA, at most ``threads``: no warp is without a column of the V."""
    return max(32, min(threads, 32 * -(-V // (32 * vec * repeat))))


def row_pieces(x):
    """Return the pieces of each row of x [M, V]."""
    M, V = x.shape
    return 1 if M >= FEW_ROWS else max(1, min(FEW_ROWS // M, V // MIN_PIECE))


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
def load_vector(source, row, column, vec, loaded, i):
    """Load the vector i of a thread."""
    for v in T.vectorized(vec):
        loaded[i, v] = source[row, column + v]


@T.macro
def store_zeros(target, row, first, V, vec, repeat, step, dtype):
    """Store zeros in `repeat` vectors of a thread, the gradients of a row that is not learned."""
    for i in T.unroll(repeat):
        if first + i * step < V:
            for v in T.vectorized(vec):
                target[row, first + i * step + v] = T.cast(0.0, dtype)


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


@T.macro
def base_of(top, base):
    """Leave in base[0] what to subtract: 0 while all is -inf, as exp(-inf - 0) adds nothing, and exp(-inf + inf) is NaN."""
    base[0] = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])


@T.macro
def grow(exp, loaded, repeat, vec, per_temperature, own, top, base, total):
    """Add the loaded columns to the maximum of a thread and its sum of exp((x - maximum) / temperature)."""
    for i in T.unroll(repeat):
        for v in T.unroll(vec):
            top[0] = T.max(top[0], T.cast(loaded[i, v], "float32"))
    base_of(top, base)
    total[0] = total[0] * exp((own[0] - base[0]) * per_temperature)
    for i in T.unroll(repeat):
        for v in T.unroll(vec):
            total[0] += exp((T.cast(loaded[i, v], "float32") - base[0]) * per_temperature)
    own[0] = top[0]


@T.macro
def join(exp, thread, warps, per_temperature, own, top, base, total, partial_max, partial_sum):
    """Leave in top[0] and total[0] the maximum and the sum over the threads of a CTA."""
    reduce_block("max", thread, warps, top, partial_max)
    base_of(top, base)
    total[0] = total[0] * exp((own[0] - base[0]) * per_temperature)
    reduce_block("sum", thread, warps, total, partial_sum)


@T.macro
def exp_over(exp, x, terms, found):
    """Leave in found[0] exp(x) - 1, and less x too for two `terms`, near 0 by the series: a difference has no correct digit."""
    found[0] = x * T.float32(1 / 40320) + T.float32(1 / 5040)
    found[0] = found[0] * x + T.float32(1 / 720)
    found[0] = found[0] * x + T.float32(1 / 120)
    found[0] = found[0] * x + T.float32(1 / 24)
    found[0] = found[0] * x + T.float32(1 / 6)
    found[0] = found[0] * x + T.float32(1 / 2)
    found[0] = x * (x * found[0] + (0.0 if terms == 2 else 1.0))
    if x >= 0.4 or x <= -0.4:
        found[0] = exp(x) - 1.0 - (x if terms == 2 else 0.0)


@T.macro
def log1p(x, total, found):
    """Leave in found[0] log(1 + x), with the rounding of the sum put back, and 1 + x in total[0]."""
    total[0] = 1.0 + x
    found[0] = T.log(total[0]) + (x - (total[0] - 1.0)) / total[0]

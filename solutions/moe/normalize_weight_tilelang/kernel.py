"""Each row divided by its sum, which is added up in order, in TileLang: a thread a row."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def normalize_weight_kernel(K, vec, threads):
    """Compile for rows of K weights, of which a thread moves `vec` at a time."""
    M = T.dynamic("M")

    @T.prim_func
    def normalize_weight(
        weights: T.Tensor((M, K), "float32"), denominator: T.Tensor((M,), "float32"), out: T.Tensor((M, K), "float32")
    ):
        with T.Kernel(T.ceildiv(M, threads), threads=threads) as block:
            row = block * threads + T.get_thread_binding(0)
            values = T.alloc_local((K,), "float32")
            result = T.alloc_local((vec,), "float32")
            total = T.alloc_var("float32", init=1e-20)

            if row < M:
                for c in T.unroll(K // vec):
                    for v in T.vectorized(vec):
                        values[c * vec + v] = weights[row, c * vec + v]
                for k in T.unroll(K):  # one after the other: the order is part of the Definition
                    total += values[k]
                denominator[row] = total
                for c in T.unroll(K // vec):
                    for v in T.unroll(vec):
                        result[v] = values[c * vec + v] / total
                    for v in T.vectorized(vec):
                        out[row, c * vec + v] = result[v]

    return normalize_weight


def run(weights, denominator, out, *, threads=128):
    """denominator = 1e-20 + sum of the row, in order; out = weights / denominator, correctly rounded.

    weights, out: [M, K], denominator: [M], all float32 and contiguous; K <= 64. A row belongs to one thread, since the order
    of its sum is fixed and rows are short; neighbouring threads read neighbouring rows.
    """
    M, K = weights.shape
    if M == 0:
        return
    # The widest power of two, at most 16 bytes, that divides the rows and the addresses.
    bits = K | (weights.data_ptr() | out.data_ptr()) // 4 | 4
    normalize_weight_kernel(K, bits & -bits, threads)(weights, denominator, out)

"""The first of equal ids of each row, in place, in TileLang: a thread a row."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def unique_kernel(K, vec, threads):
    """Compile for rows of K ids, of which a thread moves `vec` at a time."""
    M = T.dynamic("M")

    @T.prim_func
    def unique(ids: T.Tensor((M, K), "int64")):
        with T.Kernel(T.ceildiv(M, threads), threads=threads) as block:
            row = block * threads + T.get_thread_binding(0)
            values = T.alloc_local((K,), "int64")
            result = T.alloc_local((K,), "int64")

            if row < M:
                for c in T.unroll(K // vec):
                    for v in T.vectorized(vec):
                        values[c * vec + v] = ids[row, c * vec + v]
                for k in T.unroll(K):
                    result[k] = values[k]
                    for j in T.unroll(k):
                        if values[j] == values[k]:
                            result[k] = T.int64(-1)
                for c in T.unroll(K // vec):
                    for v in T.vectorized(vec):
                        ids[row, c * vec + v] = result[c * vec + v]

    return unique


def run(ids, *, threads=128):
    """In each row of ids the first of equal ids stays and the others become -1, in place.

    ids: [M, K], int64, contiguous; K <= 32. A row belongs to one thread, which compares its ids in registers.
    """
    M, K = ids.shape
    if M == 0:
        return
    # Two ids a load where the rows and the address allow it.
    bits = K | ids.data_ptr() // 8 | 2
    unique_kernel(K, bits & -bits, threads)(ids)

"""Indices of the K largest scores of each row, in TileLang: a warp a row."""

import functools

import tilelang
import tilelang.language as T

ABSENT = -0x7FFFFFFF
"""The place in the order of what is not there or not left: below that of -infinity."""


def order_of(value):
    """An integer of the same order as a float32, and equal for both zeros."""
    bits = T.reinterpret(T.if_then_else(value == T.float32(0), T.float32(0), value), "int32")
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@functools.cache
@tilelang.jit
def topk_kernel(E, K, vec, warps):
    """Compile for rows of E scores, loaded `vec` at a time; `warps` rows a thread block."""
    M = T.dynamic("M")
    stride = T.dynamic("stride", "int64")
    chunks = -(-E // (32 * vec))

    @T.prim_func
    def topk(scores: T.StridedTensor((M, E), (stride, 1), "float32"), out: T.Tensor((M, K), "int64")):
        with T.Kernel(T.ceildiv(M, warps), threads=(32, warps)) as block:
            T.assume(stride % vec == 0)  # run() chose vec so
            lane = T.get_thread_binding(0)
            row = block * warps + T.get_thread_binding(1)
            values = T.alloc_local((chunks, vec), "float32")
            keys = T.alloc_local((chunks, vec), "int32")
            best = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)
            mine = T.alloc_var("int32", init=0)

            if row < M:
                for c in T.unroll(chunks):  # all loads first: they overlap
                    if (c * 32 + lane) * vec < E:
                        for v in T.vectorized(vec):
                            values[c, v] = scores[row, (c * 32 + lane) * vec + v]
                for c in T.unroll(chunks):
                    for v in T.unroll(vec):
                        keys[c, v] = T.int32(ABSENT)
                        if (c * 32 + lane) * vec < E:
                            keys[c, v] = order_of(values[c, v])
                for k in T.serial(K):  # lane k has choice k
                    best = T.int32(ABSENT)
                    for c in T.unroll(chunks):
                        for v in T.unroll(vec):
                            best = T.max(best, keys[c, v])
                    best = T.warp_reduce_max(best)
                    first = E
                    for c in T.unroll(chunks):
                        for v in T.unroll(vec):
                            if keys[c, v] == best and (c * 32 + lane) * vec + v < first:
                                first = (c * 32 + lane) * vec + v
                    first = T.warp_reduce_min(first)
                    for c in T.unroll(chunks):
                        for v in T.unroll(vec):
                            if (c * 32 + lane) * vec + v == first:
                                keys[c, v] = T.int32(ABSENT)
                    if lane == k:
                        mine = first
                if lane < K:
                    out[row, lane] = T.cast(mine, "int64")

    return topk


def run(scores, top_k, topk_idx, *, warps=4):
    """topk_idx[m] = indices of the top_k largest scores[m], largest first; of equal scores the smaller index first.

    scores: [M, E] float32, unit last stride and any row stride; topk_idx: [M, K <= 32] int64, contiguous. -inf is a score like
    any other. A row belongs to one warp, which keeps it in registers as integers of the scores' order.
    """
    M, E = scores.shape
    if M == 0:
        return
    # The widest power of two, at most 16 bytes, that divides the rows and the address.
    bits = E | scores.stride(0) | scores.data_ptr() // 4 | 4
    topk_kernel(E, top_k, bits & -bits, warps)(scores, topk_idx)

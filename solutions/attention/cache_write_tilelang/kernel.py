"""New keys and values written into a cache of fixed size, TileLang: both tensors in one launch, 16 bytes a thread."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def write_kernel(H, D, Dv, dtype, vec, rows):
    """Compile for H heads of D and Dv elements. One of (max(D, Dv) / vec, rows) threads moves `vec` elements of a position."""
    B, L, S = T.dynamic("B L S")
    k_cache_strides = (*T.dynamic("k_cache_b k_cache_h k_cache_s", "int64"), 1)
    v_cache_strides = (*T.dynamic("v_cache_b v_cache_h v_cache_s", "int64"), 1)
    k_strides = (*T.dynamic("k_b k_h k_s", "int64"), 1)
    v_strides = (*T.dynamic("v_b v_h v_s", "int64"), 1)
    row_strides = k_cache_strides[:3] + v_cache_strides[:3] + k_strides[:3] + v_strides[:3]

    @T.prim_func
    def write(
        k_cache: T.StridedTensor((B, H, L, D), k_cache_strides, dtype),
        v_cache: T.StridedTensor((B, H, L, Dv), v_cache_strides, dtype),
        k: T.StridedTensor((B, H, S, D), k_strides, dtype),
        v: T.StridedTensor((B, H, S, Dv), v_strides, dtype),
        start: T.Tensor((1,), "int64"),
    ):
        with T.Kernel(T.ceildiv(S, rows), B * H, threads=(max(D, Dv) // vec, rows)) as (block, bh):
            for stride in row_strides:
                T.assume(stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            b, h = bh // H, bh % H
            column = T.get_thread_binding(0) * vec
            row = block * rows + T.get_thread_binding(1)
            new_k = T.alloc_local((vec,), dtype)
            new_v = T.alloc_local((vec,), dtype)
            place = T.alloc_local((1,), "int64")
            # All loads first: they wait for memory at the same time.
            place[0] = start[0] + T.cast(row, "int64")
            if row < S:
                if column < D:
                    for e in T.vectorized(vec):
                        new_k[e] = k[b, h, row, column + e]
                if column < Dv:
                    for e in T.vectorized(vec):
                        new_v[e] = v[b, h, row, column + e]
                # A wrong start writes to no other memory.
                if place[0] >= 0 and place[0] < L:
                    if column < D:
                        for e in T.vectorized(vec):
                            k_cache[b, h, place[0], column + e] = new_k[e]
                    if column < Dv:
                        for e in T.vectorized(vec):
                            v_cache[b, h, place[0], column + e] = new_v[e]

    return write


def run(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    *,
    threads=128,
):
    """Position start + s of k_cache and v_cache becomes position s of k and v, in place.

    Shapes: k_cache [B, H, L, D], v_cache [B, H, L, Dv], k [B, H, S, D], v [B, H, S, Dv], start [1] in int64;
    rows of D and Dv are contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: a CTA of at most about `threads` threads moves positions of one head of k and of v, one position a thread.
    """
    B, H, S, D = k.shape
    if B == 0:
        return
    Dv = v.shape[3]
    itemsize = k.dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides both widths, all strides and all addresses.
    bits = D | Dv | 16 // itemsize
    addresses = 0
    for tensor in (k_cache, v_cache, k, v):
        b, h, s, _ = tensor.stride()
        bits |= b | h | s
        addresses |= tensor.data_ptr()
    bits |= addresses // itemsize
    vec = bits & -bits
    rows = 1 if S == 1 else max(1, threads * vec // max(D, Dv))
    write_kernel(H, D, Dv, k.dtype, vec, rows)(k_cache, v_cache, k, v, start)

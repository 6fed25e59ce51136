"""New keys and values behind those of earlier positions, TileLang: both tensors are copied in one launch, 16 bytes a thread."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def concat_kernel(H, D, Dv, dtype, vec, rows, rounds):
    """Compile for H heads of D and Dv elements.

    One of (max(D, Dv) / vec, rows) threads copies `vec` elements of `rounds` positions.
    """
    B, L, S, N = T.dynamic("B L S N")
    past_k_strides = (*T.dynamic("past_k_b past_k_h past_k_s", "int64"), 1)
    past_v_strides = (*T.dynamic("past_v_b past_v_h past_v_s", "int64"), 1)
    k_strides = (*T.dynamic("k_b k_h k_s", "int64"), 1)
    v_strides = (*T.dynamic("v_b v_h v_s", "int64"), 1)
    k_out_strides = (*T.dynamic("k_out_b k_out_h k_out_s", "int64"), 1)
    v_out_strides = (*T.dynamic("v_out_b v_out_h v_out_s", "int64"), 1)
    row_strides = past_k_strides[:3] + past_v_strides[:3] + k_strides[:3] + v_strides[:3]
    row_strides += k_out_strides[:3] + v_out_strides[:3]

    @T.macro
    def copy(past, new, out, kept, b, h, first, column, width):
        """All loads first: they overlap."""
        if column < width:
            for i in T.unroll(rounds):
                if first + i * rows < L:
                    for e in T.vectorized(vec):
                        kept[i, e] = past[b, h, first + i * rows, column + e]
                elif first + i * rows < N:
                    for e in T.vectorized(vec):
                        kept[i, e] = new[b, h, first + i * rows - L, column + e]
            for i in T.unroll(rounds):
                if first + i * rows < N:
                    for e in T.vectorized(vec):
                        out[b, h, first + i * rows, column + e] = kept[i, e]

    @T.prim_func
    def concat(
        past_k: T.StridedTensor((B, H, L, D), past_k_strides, dtype),
        past_v: T.StridedTensor((B, H, L, Dv), past_v_strides, dtype),
        k: T.StridedTensor((B, H, S, D), k_strides, dtype),
        v: T.StridedTensor((B, H, S, Dv), v_strides, dtype),
        k_out: T.StridedTensor((B, H, N, D), k_out_strides, dtype),
        v_out: T.StridedTensor((B, H, N, Dv), v_out_strides, dtype),
    ):
        with T.Kernel(T.ceildiv(N, rows * rounds), B * H, 2, threads=(max(D, Dv) // vec, rows)) as (block, bh, which):
            for stride in row_strides:
                T.assume(stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            column = T.get_thread_binding(0) * vec
            first = block * (rows * rounds) + T.get_thread_binding(1)
            kept = T.alloc_local((rounds, vec), dtype)
            if which == 0:
                copy(past_k, k, k_out, kept, bh // H, bh % H, first, column, D)
            else:
                copy(past_v, v, v_out, kept, bh // H, bh % H, first, column, Dv)

    return concat


def run(
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    rounds=4,
):
    """k_out = past_k and then k; v_out = past_v and then v, along the positions.

    Shapes: past_k [B, H, L, D], past_v [B, H, L, Dv], k [B, H, S, D], v [B, H, S, Dv], k_out [B, H, L + S, D],
    v_out [B, H, L + S, Dv]; rows of D and Dv are contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: a CTA of about 256 threads copies a block of positions of one head of k or of v, `rounds` positions a thread.
    """
    B, H, _, D = k_out.shape
    if B == 0:
        return
    Dv = v_out.shape[3]
    itemsize = k.dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides both widths, all strides and all addresses.
    bits = D | Dv | 16 // itemsize
    addresses = 0
    for tensor in (past_k, past_v, k, v, k_out, v_out):
        b, h, s, _ = tensor.stride()
        bits |= b | h | s
        addresses |= tensor.data_ptr()
    bits |= addresses // itemsize
    vec = bits & -bits
    rows = max(1, 256 * vec // max(D, Dv))
    concat_kernel(H, D, Dv, k.dtype, vec, rows, rounds)(past_k, past_v, k, v, k_out, v_out)

"""Rows of tokens moved to their experts' places and added up again, in TileLang: 16 bytes a thread and load."""

import functools

import tilelang
import tilelang.language as T
import torch

CLEARED = 8  # rows of padding that a thread block looks at
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def widest(*multiples):
    """The widest power of two that divides all of these: how many elements an access may take."""
    bits = 0
    for multiple in multiples:
        bits |= multiple
    return bits & -bits


def width(x, out, columns):
    """Elements of two tensors of one dtype that one access of at most 16 bytes may take, rows of so many columns."""
    size = x.element_size()
    return widest(columns, x.stride(0), (x.data_ptr() | out.data_ptr()) // size, 16 // size)


@T.macro
def copy_part(x, slots, owner, out, unit, column, M, P, H, K, kind, vec):
    """`vec` elements of a token's row to the rows of its choices; or, behind the tokens, zeros to rows of padding."""
    values = T.alloc_local((vec,), kind)
    slot = T.alloc_local((K,), "int32")
    last = T.alloc_var("int32", init=-1)
    padding = T.alloc_var("int32", init=0)

    if unit < M:
        for k in T.unroll(K):
            slot[k] = slots[unit, k]
        for k in T.unroll(K):
            last = T.max(last, slot[k])
        if column < H and last >= 0:  # a token without any row here is not read
            for v in T.vectorized(vec):
                values[v] = x[unit, column + v]
            for k in T.unroll(K):
                if slot[k] >= 0:
                    for v in T.vectorized(vec):
                        out[T.cast(slot[k], "int64"), column + v] = values[v]
    else:
        for v in T.unroll(vec):
            values[v] = 0
        for r in T.unroll(CLEARED):
            padding = 0  # what lies behind the last row is none
            if (unit - M) * CLEARED + r < P:
                padding = owner[(unit - M) * CLEARED + r]
            if padding < 0 and column < H:
                for v in T.vectorized(vec):
                    out[T.cast((unit - M) * CLEARED + r, "int64"), column + v] = values[v]


@T.macro
def copy_scales(scales, slots, owner, scales_out, unit, thread, M, P, S, K, threads):
    """The same for all scales of a token, one a thread, of any strides."""
    slot = T.alloc_local((K,), "int32")
    value = T.alloc_var("int32", init=0)
    padding = T.alloc_var("int32", init=0)

    if unit < M:
        for k in T.unroll(K):
            slot[k] = slots[unit, k]
        for c in T.serial(T.ceildiv(S, threads)):
            if c * threads + thread < S:
                value = scales[unit, c * threads + thread]
                for k in T.unroll(K):
                    if slot[k] >= 0:
                        scales_out[T.cast(slot[k], "int64"), c * threads + thread] = value
    else:
        for r in T.unroll(CLEARED):
            padding = 0  # what lies behind the last row is none
            if (unit - M) * CLEARED + r < P:
                padding = owner[(unit - M) * CLEARED + r]
            if padding < 0:
                for c in T.serial(T.ceildiv(S, threads)):
                    if c * threads + thread < S:
                        scales_out[T.cast((unit - M) * CLEARED + r, "int64"), c * threads + thread] = 0


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def expand_kernel(H, K, kind, vec, threads):
    """Compile for rows of H elements of an integer type and K choices; accesses take `vec` elements."""
    M, P = T.dynamic("M"), T.dynamic("P")
    x_stride = T.dynamic("x_stride", "int64")
    strips = -(-H // (threads * vec))

    @T.prim_func
    def expand(
        x: T.StridedTensor((M, H), (x_stride, 1), kind),
        slots: T.Tensor((M, K), "int32"),
        owner: T.Tensor((P,), "int32"),
        out: T.Tensor((P, H), kind),
    ):
        # Strips of a row vary fastest, so neighbouring blocks read neighbouring memory.
        with T.Kernel((M + T.ceildiv(P, CLEARED)) * strips, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so
            column = (block % strips * threads + T.get_thread_binding(0)) * vec
            copy_part(x, slots, owner, out, block // strips, column, M, P, H, K, kind, vec)

    return expand


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def expand_with_scales_kernel(H, S, K, kind, vec, threads):
    """Compile for rows of H elements and S scales: a block more for each token, and for each rows of padding, moves scales."""
    M, P = T.dynamic("M"), T.dynamic("P")
    x_stride = T.dynamic("x_stride", "int64")
    scale_row, scale_column, out_row, out_column = T.dynamic("scale_row scale_column out_row out_column", "int64")
    strips = -(-H // (threads * vec))

    @T.prim_func
    def expand_with_scales(
        x: T.StridedTensor((M, H), (x_stride, 1), kind),
        scales: T.StridedTensor((M, S), (scale_row, scale_column), "int32"),
        slots: T.Tensor((M, K), "int32"),
        owner: T.Tensor((P,), "int32"),
        out: T.Tensor((P, H), kind),
        scales_out: T.StridedTensor((P, S), (out_row, out_column), "int32"),
    ):
        with T.Kernel((M + T.ceildiv(P, CLEARED)) * (strips + 1), threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so
            thread = T.get_thread_binding(0)
            strip = block % (strips + 1)
            if strip < strips:
                column = (strip * threads + thread) * vec
                copy_part(x, slots, owner, out, block // (strips + 1), column, M, P, H, K, kind, vec)
            else:
                copy_scales(scales, slots, owner, scales_out, block // (strips + 1), thread, M, P, S, K, threads)

    return expand_with_scales


def _without_tokens(x, slots):
    """A token without any row, where there is none: no tensor may be empty."""
    return x.new_empty(1, x.shape[1]), slots.new_full((1, slots.shape[1]), -1)


def run_expand_to_fused(x, token_topk_to_pos, pos_to_expert, out, *, threads=128):
    """out[p] = x[t] for p = token_topk_to_pos[t, k] >= 0, zeros where pos_to_expert[p] < 0: bits and not values.

    x: [M, H] with last stride 1, out: [P, H], of one dtype of 1, 2 or 4 bytes; token_topk_to_pos: [M, K] and pos_to_expert: [P]
    int32, which agree with one another; K at most 32. A thread reads 16 bytes of a row once and stores them for every choice.
    """
    if out.shape[0] == 0:
        return
    if x.shape[0] == 0:
        x, token_topk_to_pos = _without_tokens(x, token_topk_to_pos)
    H, kind = x.shape[1], _INTEGERS[x.element_size()]
    kernel = expand_kernel(H, token_topk_to_pos.shape[1], kind, width(x, out, H), threads)
    kernel(x.view(kind), token_topk_to_pos, pos_to_expert, out.view(kind))


def run_expand_to_fused_with_sf(x, scale, token_topk_to_pos, pos_to_expert, out, scale_out, *, threads=128):
    """The same for float8_e4m3fn codes and their scales, or words of scales: scale_out[p] = scale[t], zeros for padding.

    x: [M, H] with last stride 1, out: [P, H]; scale: [M, S] and scale_out: [P, S] of 4-byte elements and any strides: what lies
    between their elements is not touched.
    """
    if out.shape[0] == 0:
        return
    if x.shape[0] == 0:
        x, token_topk_to_pos = _without_tokens(x, token_topk_to_pos)
        scale = scale.new_empty(1, scale.shape[1])
    H, S, kind = x.shape[1], scale.shape[1], _INTEGERS[x.element_size()]
    kernel = expand_with_scales_kernel(H, S, token_topk_to_pos.shape[1], kind, width(x, out, H), threads)
    scales, scales_out = scale.view(torch.int32), scale_out.view(torch.int32)
    kernel(x.view(kind), scales, token_topk_to_pos, pos_to_expert, out.view(kind), scales_out)


# -- back to the tokens ----------------------------------------------------------------------------------------------------


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def reduce_kernel(H, K, dtype, out_dtype, weighted, scaled, final, vec, out_vec, threads):
    """Compile for rows of H elements and K choices. Tensors that a variant does not have are not read.

    Loads take `vec` elements, which a thread adds up; stores `out_vec`, of which that is a multiple.
    """
    M, P = T.dynamic("M"), T.dynamic("P")
    MW, PS = T.dynamic("MW"), T.dynamic("PS")
    x_stride = T.dynamic("x_stride", "int64")
    strips = -(-H // (threads * vec))

    @T.prim_func
    def reduce(
        x: T.StridedTensor((P, H), (x_stride, 1), dtype),
        weights: T.Tensor((MW, K), "float32"),
        row_scales: T.Tensor((PS,), "float32"),
        slots: T.Tensor((M, K), "int32"),
        scale: T.Tensor((1,), "float32"),
        out: T.Tensor((M, H), out_dtype),
    ):
        with T.Kernel(M * strips, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so
            token = block // strips
            column = (block % strips * threads + T.get_thread_binding(0)) * vec
            slot = T.alloc_local((K,), "int32")
            factor = T.alloc_local((K,), "float32")
            rows = T.alloc_local((K, vec), dtype)
            total = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), out_dtype)

            for k in T.unroll(K):
                slot[k] = slots[token, k]
                factor[k] = weights[token, k] if weighted else T.float32(1.0)
            for v in T.unroll(vec):
                total[v] = 0.0
            if column < H:
                for k in T.unroll(K):  # all loads first: they overlap
                    if slot[k] >= 0:
                        for v in T.vectorized(vec):
                            rows[k, v] = x[T.cast(slot[k], "int64"), column + v]
                        if scaled:
                            factor[k] = factor[k] * row_scales[slot[k]]
                for k in T.unroll(K):
                    if slot[k] >= 0:
                        for v in T.unroll(vec):
                            total[v] += T.cast(rows[k, v], "float32") * factor[k]
                if final:
                    for v in T.unroll(vec):
                        total[v] = T.min(T.max(total[v] * scale[0], T.float32(-448.0)), T.float32(448.0))
                for v in T.vectorized(vec):
                    result[v] = T.cast(total[v], out_dtype)
                for c in T.unroll(vec // out_vec):
                    for v in T.vectorized(out_vec):
                        out[T.cast(token, "int64"), column + c * out_vec + v] = result[c * out_vec + v]

    return reduce


def _run_reduce(x, weights, row_scale, slots, scale, out, threads):
    M, H = out.shape
    if M == 0:
        return
    if x.shape[0] == 0:  # no choice has a row; no tensor may be empty
        x = x.new_empty(1, H)
        row_scale = None if row_scale is None else row_scale.new_empty(1)
    size, out_size = x.element_size(), out.element_size()
    vec = widest(H, x.stride(0), x.data_ptr() // size, 16 // size)
    out_vec = widest(vec, out.data_ptr() // out_size, 16 // out_size)
    weighted, scaled, final = (value is not None for value in (weights, row_scale, scale))
    unread = torch.empty(1, slots.shape[1], dtype=torch.float32, device=x.device)
    reduce_kernel(H, slots.shape[1], x.dtype, out.dtype, weighted, scaled, final, vec, out_vec, threads)(
        x,
        weights if weighted else unread,
        row_scale if scaled else unread.view(-1),
        slots,
        scale if final else unread.view(-1)[:1],
        out,
    )


def run_reduce_fused(x, weights, token_topk_to_pos, out, *, threads=128):
    """out[t] = T(sum over k of weights[t, k] * x[token_topk_to_pos[t, k]]), fused in float32 and in order; -1 adds nothing.

    x: [P, H] with last stride 1, out: [M, H] in bfloat16, float16 or float32; weights: [M, K] float32, token_topk_to_pos: [M, K]
    int32, K at most 32. A thread asks for 16 bytes of the rows of all choices at once; tokens without any give zeros.
    """
    _run_reduce(x, weights, None, token_topk_to_pos, None, out, threads)


def run_reduce_fused_unweighted(x, token_topk_to_pos, out, *, threads=128):
    """The same without weights: out[t] = T(sum over k of x[token_topk_to_pos[t, k]])."""
    _run_reduce(x, None, None, token_topk_to_pos, None, out, threads)


def run_reduce_fused_scaled(x, row_scale, weights, token_topk_to_pos, out, *, threads=128):
    """The same with weights[t, k] * row_scale[p] for a weight, rounded to float32 first.

    x: [P, H] in float8_e4m3fn, row_scale: [P] float32, out: [M, H] bfloat16.
    """
    _run_reduce(x, weights, row_scale, token_topk_to_pos, None, out, threads)


def run_reduce_fused_to_fp8(x, weights, token_topk_to_pos, scale, out, *, threads=128):
    """The same times scale[0], clamped to +-448 and rounded to float8_e4m3fn.

    x: [P, H] in bfloat16 or float32, scale: [1] float32, out: [M, H] float8_e4m3fn.
    """
    _run_reduce(x, weights, None, token_topk_to_pos, scale, out, threads)

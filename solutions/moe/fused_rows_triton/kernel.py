"""Rows of tokens moved to their experts' places and added up again, Triton: each row is read once, in vectors."""

import torch
import triton
import triton.language as tl

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _where_a_row(mask, slot):
    """The mask, or nothing of it where `slot` is -1; compared as a block, since the interpreter joins no block with a scalar."""
    return mask & (tl.zeros(mask.shape, tl.int32) + slot >= 0)


@triton.jit
def _copy_row(from_ptr, to_ptr, from_column, to_row, to_column, slot_ptr, last, cols, mask, K: tl.constexpr):
    """One row of a token, or a part of it, to the row of each of its choices; `last` is the largest of these, or -1."""
    values = tl.load(from_ptr + cols * from_column, mask=_where_a_row(mask, last), other=0)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + k)
        to_ptrs = to_ptr + slot.to(tl.int64) * to_row + cols * to_column
        tl.store(to_ptrs, values, mask=_where_a_row(mask, slot))


@triton.jit
def _clear_rows(to_ptr, to_row, to_column, rows, padding, cols, mask):
    zeros = tl.zeros([rows.shape[0], cols.shape[0]], to_ptr.dtype.element_ty)
    tl.store(
        to_ptr + rows.to(tl.int64)[:, None] * to_row + cols[None, :] * to_column,
        zeros,
        mask=padding[:, None] & mask[None, :],
    )


@triton.jit(do_not_specialize=["tokens", "rows"])
def _expand(
    x_ptr,
    scale_ptr,
    slots_ptr,
    owner_ptr,
    out_ptr,
    scale_out_ptr,
    x_row,
    scale_row,
    scale_column,
    scale_out_row,
    scale_out_column,
    tokens,
    rows,
    H: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """A program copies a strip of a token's row, or all of its scales; those behind the tokens clear CLEARED rows of padding."""
    strips = (H + BLOCK_H - 1) // BLOCK_H
    across = strips + (1 if S > 0 else 0)
    unit = tl.program_id(0) // across
    strip = tl.program_id(0) % across
    cols = strip * BLOCK_H + tl.arange(0, BLOCK_H)
    groups = tl.arange(0, BLOCK_S)
    if unit < tokens:
        token = unit.to(tl.int64)
        choices = tl.arange(0, BLOCK_K)
        slots = tl.load(slots_ptr + token * K + choices, mask=choices < K, other=-1)
        last = tl.max(slots, axis=0)  # of a token without any row here nothing is read
        if strip < strips:
            _copy_row(x_ptr + token * x_row, out_ptr, 1, H, 1, slots_ptr + token * K, last, cols, cols < H, K)
        elif S > 0:
            _copy_row(
                scale_ptr + token * scale_row,
                scale_out_ptr,
                scale_column,
                scale_out_row,
                scale_out_column,
                slots_ptr + token * K,
                last,
                groups,
                groups < S,
                K,
            )
    else:
        below = (unit - tokens) * CLEARED + tl.arange(0, CLEARED)
        padding = tl.load(owner_ptr + below, mask=below < rows, other=0) < 0
        if strip < strips:
            _clear_rows(out_ptr, H, 1, below, padding, cols, cols < H)
        elif S > 0:
            _clear_rows(scale_out_ptr, scale_out_row, scale_out_column, below, padding, groups, groups < S)


def _run_expand(x, scale, slots, owner, out, scale_out, bytes_, num_warps):
    tokens, H = x.shape
    rows, K = owner.shape[0], slots.shape[1]
    kind = _INTEGERS[x.element_size()]
    block_h = bytes_ // x.element_size()
    S = 0 if scale is None else scale.shape[1]
    cleared = 8
    units = tokens + (rows + cleared - 1) // cleared
    if units == 0:
        return
    strides = (0, 0, 0, 0)
    if scale is None:
        scale, scale_out = slots, slots  # never touched
    else:
        strides = (*scale.stride(), *scale_out.stride())
        scale, scale_out = scale.view(torch.int32), scale_out.view(torch.int32)
    _expand[(units * ((H + block_h - 1) // block_h + (S > 0)),)](
        x.view(kind),
        scale,
        slots,
        owner,
        out.view(kind),
        scale_out,
        x.stride(0),
        *strides,
        tokens,
        rows,
        H,
        S,
        K,
        1 << (K - 1).bit_length(),
        block_h,
        1 << max(S - 1, 0).bit_length(),
        cleared,
        num_warps=num_warps,
    )


def run_expand_to_fused(
    x: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    out: torch.Tensor,
    *,
    BYTES=2048,
    num_warps=4,
):
    """out[p] = x[t] for p = token_topk_to_pos[t, k] >= 0, zeros where pos_to_expert[p] < 0: bits and not values.

    Shapes: x [M, H] with unit last stride and out [P, H], of one dtype of 1, 2 or 4 bytes; token_topk_to_pos [M, K] and
    pos_to_expert [P] int32, which agree with one another; K <= 32.
    Mapping: a program reads BYTES of a row once and stores them for every choice; programs of their own clear the padding.
    """
    _run_expand(x, None, token_topk_to_pos, pos_to_expert, out, None, BYTES, num_warps)


def run_expand_to_fused_with_sf(
    x: torch.Tensor,
    scale: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    *,
    BYTES=2048,
    num_warps=4,
):
    """The same for float8_e4m3fn codes and their scales, or words of scales: scale_out[p] = scale[t], zeros for padding.

    Shapes: x [M, H] with unit last stride, out [P, H]; scale [M, S] and scale_out [P, S] of 4-byte elements and any strides,
    S <= 4096: what lies between their elements is not touched.
    """
    _run_expand(x, scale, token_topk_to_pos, pos_to_expert, out, scale_out, BYTES, num_warps)


# -- back to the tokens ----------------------------------------------------------------------------------------------------


@triton.jit
def _reduce(
    x_ptr,
    weights_ptr,
    row_scale_ptr,
    slots_ptr,
    final_ptr,
    out_ptr,
    x_row,
    H: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A program has a strip of a token: no load depends on another choice's, so that all of them are on their way at once."""
    strips = (H + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // strips).to(tl.int64)
    cols = tl.program_id(0) % strips * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = cols < H
    total = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slots_ptr + token * K + k)
        factor = 1.0
        if WEIGHTED:
            factor = tl.load(weights_ptr + token * K + k)
        if SCALED:
            factor = factor * tl.load(row_scale_ptr + slot, mask=slot >= 0, other=0.0)
        row_ptrs = x_ptr + slot.to(tl.int64) * x_row + cols
        row = tl.load(row_ptrs, mask=_where_a_row(mask, slot), other=0.0).to(tl.float32)
        if WEIGHTED:  # the weight of a choice without a row may be no number
            total = tl.fma(row, tl.zeros([BLOCK_H], tl.float32) + tl.where(slot >= 0, factor, 0.0), total)
        else:
            total += row
    if FINAL:
        # Saturating: the cast alone may make a NaN of what is too large.
        total = tl.minimum(tl.maximum(total * tl.load(final_ptr), -448.0), 448.0)
    tl.store(out_ptr + token * H + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def _run_reduce(x, weights, row_scale, slots, final, out, bytes_, num_warps):
    tokens, H = out.shape
    if tokens == 0:
        return
    block_h = bytes_ // x.element_size()
    _reduce[(tokens * ((H + block_h - 1) // block_h),)](
        x,
        slots if weights is None else weights,  # what is None is never touched
        slots if row_scale is None else row_scale,
        slots,
        slots if final is None else final,
        out,
        x.stride(0),
        H,
        slots.shape[1],
        weights is not None,
        row_scale is not None,
        final is not None,
        block_h,
        num_warps=num_warps,
    )


def run_reduce_fused(
    x: torch.Tensor,
    weights: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    out: torch.Tensor,
    *,
    BYTES=2048,
    num_warps=4,
):
    """out[t] = T(sum over k of weights[t, k] * x[token_topk_to_pos[t, k]]), fused in float32 and in order; -1 adds nothing.

    Shapes: x [P, H] with unit last stride and out [M, H] in bfloat16, float16 or float32; weights [M, K] float32,
    token_topk_to_pos [M, K] int32, K <= 32.
    Mapping: a program adds up BYTES of a token's rows; tokens without any give zeros.
    """
    _run_reduce(x, weights, None, token_topk_to_pos, None, out, BYTES, num_warps)


def run_reduce_fused_unweighted(
    x: torch.Tensor, token_topk_to_pos: torch.Tensor, out: torch.Tensor, *, BYTES=2048, num_warps=4
):
    """The same without weights: out[t] = T(sum over k of x[token_topk_to_pos[t, k]])."""
    _run_reduce(x, None, None, token_topk_to_pos, None, out, BYTES, num_warps)


def run_reduce_fused_scaled(
    x: torch.Tensor,
    row_scale: torch.Tensor,
    weights: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    out: torch.Tensor,
    *,
    BYTES=2048,
    num_warps=4,
):
    """The same with weights[t, k] * row_scale[p] for a weight, rounded to float32 first.

    Shapes: x [P, H] in float8_e4m3fn, row_scale [P] float32, out [M, H] bfloat16.
    """
    _run_reduce(x, weights, row_scale, token_topk_to_pos, None, out, BYTES, num_warps)


def run_reduce_fused_to_fp8(
    x: torch.Tensor,
    weights: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    BYTES=2048,
    num_warps=4,
):
    """The same times scale[0], clamped to +-448 and rounded to float8_e4m3fn.

    Shapes: x [P, H] in bfloat16 or float32, scale [1] float32, out [M, H] float8_e4m3fn.
    """
    _run_reduce(x, weights, None, token_topk_to_pos, scale, out, BYTES, num_warps)

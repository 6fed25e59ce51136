"""Rows of tokens moved to their experts' places and added up again: each row is read once."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: aligned rows are then moved 16 bytes at a time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]

CLEARED = 8  # rows of padding that a block looks at
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@ct.function
def _copy_part(source, slots, out, token, last, cols, inside, K):
    """Some columns of a token's row to the rows of its choices; `last` is the largest of these, or -1."""
    values = ct.gather(source, (token, cols), mask=inside & (last >= 0), check_bounds=False)
    for k in ct.static_iter(range(K)):
        slot = ct.gather(slots, (token, k), check_bounds=False)
        ct.scatter(out, (slot, cols), values, mask=inside & (slot >= 0), check_bounds=False)


@ct.function
def _clear_rows(out, rows, padding, cols, inside):
    zeros = ct.zeros((rows.shape[0], cols.shape[0]), dtype=out.dtype)
    mask = padding[:, None] & inside[None, :]
    ct.scatter(out, (rows[:, None], cols[None, :]), zeros, mask=mask, check_bounds=False)


@ct.function
def _last_row(slots, token, TILE_K):
    """The largest row of a token's choices, -1 without any."""
    choices = ct.arange(TILE_K, dtype=ct.int32)
    inside = choices < slots.shape[1]
    return ct.max(ct.gather(slots, (token, choices), mask=inside, padding_value=-1, check_bounds=False))


@ct.function
def _padding_rows(owner, first, TILE):
    rows = first + ct.arange(TILE, dtype=ct.int32)
    found = ct.gather(owner, rows, mask=rows < owner.shape[0], padding_value=0, check_bounds=False)
    return rows, found < 0


@ct.kernel
def _expand(x: Rows, slots: Rows, owner: ct.Array, out: Rows, tokens: int, K: Int, TILE_K: Int, TILE: Int, TILE_R: Int):
    columns = out.shape[1]
    strips = ct.cdiv(columns, TILE)
    unit = ct.bid(0) // strips
    cols = (ct.bid(0) - unit * strips) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < columns
    if unit < tokens:
        _copy_part(x, slots, out, unit, _last_row(slots, unit, TILE_K), cols, inside, K)
    else:
        rows, padding = _padding_rows(owner, (unit - tokens) * TILE_R, TILE_R)
        _clear_rows(out, rows, padding, cols, inside)


@ct.kernel
def _expand_with_scales(
    x: Rows,
    scale: ct.Array,
    slots: Rows,
    owner: ct.Array,
    out: Rows,
    scale_out: ct.Array,
    tokens: int,
    K: Int,
    TILE_K: Int,
    TILE: Int,
    TILE_S: Int,
    TILE_R: Int,
):
    """A block more for each token, and for each TILE_R rows of padding, moves the scales, whose strides may be any."""
    columns = out.shape[1]
    strips = ct.cdiv(columns, TILE)
    unit = ct.bid(0) // (strips + 1)
    strip = ct.bid(0) - unit * (strips + 1)
    cols = strip * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < columns
    groups = ct.arange(TILE_S, dtype=ct.int32)
    in_scales = groups < scale.shape[1]
    if unit < tokens:
        last = _last_row(slots, unit, TILE_K)
        if strip < strips:
            _copy_part(x, slots, out, unit, last, cols, inside, K)
        else:
            _copy_part(scale, slots, scale_out, unit, last, groups, in_scales, K)
    else:
        rows, padding = _padding_rows(owner, (unit - tokens) * TILE_R, TILE_R)
        if strip < strips:
            _clear_rows(out, rows, padding, cols, inside)
        else:
            _clear_rows(scale_out, rows, padding, groups, in_scales)


_EXPAND = {warps: _expand.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_EXPAND_WITH_SCALES = {warps: _expand_with_scales.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_expand_to_fused(
    x: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    out: torch.Tensor,
    *,
    BYTES: int = 2048,
    WARPS: int = 4,
) -> None:
    """out[p] = x[t] for p = token_topk_to_pos[t, k] >= 0, zeros where pos_to_expert[p] < 0: bits and not values.

    x: [M, H] with unit last stride, out: [P, H], of one dtype of 1, 2 or 4 bytes; token_topk_to_pos: [M, K] and pos_to_expert:
    [P] int32, which agree with one another; K <= 32. A block reads BYTES of a row once and stores them for every choice; blocks
    of their own clear the padding.
    """
    M, H = x.shape
    P, K = pos_to_expert.shape[0], token_topk_to_pos.shape[1]
    if P == 0:
        return
    kind, tile = _INTEGERS[x.element_size()], BYTES // x.element_size()
    x, out = x.view(kind), out.view(kind)
    if M == 0:  # nothing is read of these
        x, token_topk_to_pos = out, pos_to_expert.view(-1, 1)
    args = (x, token_topk_to_pos, pos_to_expert, out, M, K, 1 << (K - 1).bit_length(), tile, CLEARED)
    blocks = (M + -(-P // CLEARED)) * -(-H // tile)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _EXPAND[WARPS], args)


def run_expand_to_fused_with_sf(
    x: torch.Tensor,
    scale: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    *,
    BYTES: int = 2048,
    WARPS: int = 4,
) -> None:
    """The same for float8_e4m3fn codes and their scales, or words of scales: scale_out[p] = scale[t], zeros for padding.

    x: [M, H] with unit last stride, out: [P, H]; scale: [M, S] and scale_out: [P, S] of 4-byte elements and any strides,
    S <= 4096: what lies between their elements is not touched.
    """
    M, H = x.shape
    P, K, S = pos_to_expert.shape[0], token_topk_to_pos.shape[1], scale.shape[1]
    if P == 0:
        return
    kind, tile = _INTEGERS[x.element_size()], BYTES // x.element_size()
    x, out, scale, scale_out = x.view(kind), out.view(kind), scale.view(torch.int32), scale_out.view(torch.int32)
    if M == 0:  # nothing is read of these
        x, scale, token_topk_to_pos = out, scale_out, pos_to_expert.view(-1, 1)
    tile_k, tile_s = 1 << (K - 1).bit_length(), 1 << (S - 1).bit_length()
    args = (x, scale, token_topk_to_pos, pos_to_expert, out, scale_out, M, K, tile_k, tile, tile_s, CLEARED)
    blocks = (M + -(-P // CLEARED)) * (-(-H // tile) + 1)
    ct.launch(torch.cuda.current_stream(), (blocks, 1, 1), _EXPAND_WITH_SCALES[WARPS], args)


# -- back to the tokens ----------------------------------------------------------------------------------------------------


@ct.kernel
def _reduce(
    x: Rows,
    weights: Rows,
    row_scale: ct.Array,
    slots: Rows,
    scale: ct.Array,
    out: Rows,
    K: Int,
    WEIGHTED: Flag,
    SCALED: Flag,
    FINAL: Flag,
    TILE: Int,
):
    """A block has a part of a token: no load depends on another choice's, so that all of them are on their way at once."""
    columns = out.shape[1]
    strips = ct.cdiv(columns, TILE)
    token = ct.bid(0) // strips
    cols = (ct.bid(0) - token * strips) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < columns
    total = ct.zeros((TILE,), dtype=ct.float32)
    for k in ct.static_iter(range(K)):
        slot = ct.gather(slots, (token, k), check_bounds=False)
        here = slot >= 0
        row = ct.gather(x, (slot, cols), mask=inside & here, padding_value=0, check_bounds=False).astype(ct.float32)
        if WEIGHTED:
            factor = ct.gather(weights, (token, k), check_bounds=False)
            if SCALED:
                factor = factor * ct.gather(row_scale, slot, mask=here, padding_value=0, check_bounds=False)
            # The weight of a choice without a row may be no number.
            total = total + row * ct.where(here, factor, 0.0)
        else:
            total = total + row
    if FINAL:
        total = ct.minimum(ct.maximum(total * ct.gather(scale, 0, check_bounds=False), -448.0), 448.0)
        # Codes as bytes.
        ct.scatter(
            out, (token, cols), ct.bitcast(total.astype(ct.float8_e4m3fn), ct.uint8), mask=inside, check_bounds=False
        )
    else:
        ct.scatter(out, (token, cols), total.astype(out.dtype), mask=inside, check_bounds=False)


_REDUCE = {warps: _reduce.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _run_reduce(x, weights, row_scale, slots, scale, out, BYTES, WARPS):
    M, H = out.shape
    if M == 0:
        return
    if x.shape[0] == 0:  # no choice has a row, and nothing is read
        x = x.new_empty(1, H)
        row_scale = None if row_scale is None else row_scale.new_empty(1)
    tile, K = BYTES // x.element_size(), slots.shape[1]
    weighted, scaled, final = (value is not None for value in (weights, row_scale, scale))
    args = (
        x,
        weights if weighted else slots,  # what is None is not read
        row_scale if scaled else slots.view(-1),
        slots,
        scale if final else slots.view(-1),
        out.view(torch.uint8) if final else out,
        K,
        weighted,
        scaled,
        final,
        tile,
    )
    ct.launch(torch.cuda.current_stream(), (M * -(-H // tile), 1, 1), _REDUCE[WARPS], args)


def run_reduce_fused(
    x: torch.Tensor,
    weights: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    out: torch.Tensor,
    *,
    BYTES: int = 2048,
    WARPS: int = 4,
) -> None:
    """out[t] = T(sum over k of weights[t, k] * x[token_topk_to_pos[t, k]]), in fp32 and in order; -1 adds nothing.

    x: [P, H] with unit last stride, out: [M, H] in bf16, fp16 or fp32; weights: [M, K] float32, token_topk_to_pos: [M, K] int32,
    K <= 32. A block adds up BYTES of a token's rows; tokens without any give zeros.
    """
    _run_reduce(x, weights, None, token_topk_to_pos, None, out, BYTES, WARPS)


def run_reduce_fused_unweighted(
    x: torch.Tensor, token_topk_to_pos: torch.Tensor, out: torch.Tensor, *, BYTES: int = 2048, WARPS: int = 4
) -> None:
    """The same without weights: out[t] = T(sum over k of x[token_topk_to_pos[t, k]])."""
    _run_reduce(x, None, None, token_topk_to_pos, None, out, BYTES, WARPS)


def run_reduce_fused_scaled(
    x: torch.Tensor,
    row_scale: torch.Tensor,
    weights: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    out: torch.Tensor,
    *,
    BYTES: int = 2048,
    WARPS: int = 4,
) -> None:
    """The same with weights[t, k] * row_scale[p] for a weight, rounded to float32 first.

    x: [P, H] in float8_e4m3fn, row_scale: [P] float32, out: [M, H] bf16.
    """
    _run_reduce(x, weights, row_scale, token_topk_to_pos, None, out, BYTES, WARPS)


def run_reduce_fused_to_fp8(
    x: torch.Tensor,
    weights: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    BYTES: int = 2048,
    WARPS: int = 4,
) -> None:
    """The same times scale[0], clamped to +-448 and rounded to float8_e4m3fn.

    x: [P, H] in bf16 or fp32, scale: [1] float32, out: [M, H] float8_e4m3fn.
    """
    _run_reduce(x, weights, None, token_topk_to_pos, scale, out, BYTES, WARPS)

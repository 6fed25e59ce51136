"""The activation of experts with its casts for training, cuTile: per channel for the weights' gradient, and its backward.

All of them gather and scatter with masks: tiles that are stored whole write 16 bytes at a time, past the end of a row of codes
whose length is no multiple of 16.
"""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the compiler knows which accesses are aligned and complete.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]


@ct.function
def _scale_and_inverse(amax, ROUND):
    """What a code is multiplied by, and what a value is multiplied by, which is not quite the reciprocal unless rounded."""
    amax = ct.maximum(amax, 1e-4)
    # Tile by tile and not by a number: a division by a constant might become a product with its rounded reciprocal.
    most = ct.full(amax.shape, 448.0, dtype=ct.float32)
    scale = ct.truediv(amax, most)
    inverse = ct.truediv(most, amax)
    if ROUND:
        exponent = (ct.bitcast(scale, ct.int32) + 0x7FFFFF) >> 23
        scale = ct.bitcast(exponent << 23, ct.float32)
        inverse = ct.bitcast((254 - exponent) << 23, ct.float32)
    return scale, inverse


@ct.function
def _e4m3_bytes(scaled):
    return ct.bitcast(ct.minimum(ct.maximum(scaled, -448.0), 448.0).astype(ct.float8_e4m3fn), ct.uint8)


# -- per channel -----------------------------------------------------------------------------------------------------------


@ct.kernel
def _swiglu_and_cast_channels(
    x: Rows,
    out: ct.Array,
    scale_out: ct.Array,
    limit: float,
    ROUND: Flag,
    TRANSPOSE: Flag,
    GROUP: Int,
    COUNT: Int,
    TILE_H: Int,
):
    """GROUP tokens share a scale a channel; a block has COUNT times as many tokens and TILE_H channels."""
    channels = x.shape[1] // 2
    strips = ct.cdiv(channels, TILE_H)
    down = ct.bid(0) // strips
    rows = (down * (COUNT * GROUP) + ct.arange(COUNT * GROUP, dtype=ct.int32))[:, None]
    cols = (ct.bid(0) % strips * TILE_H + ct.arange(TILE_H, dtype=ct.int32))[None, :]
    mask = rows < x.shape[0]
    if channels % TILE_H != 0:
        mask = mask & (cols < channels)
    gate = ct.gather(x, (rows, cols), mask=mask, check_bounds=False).astype(ct.float32)
    up = ct.gather(x, (rows, cols + channels), mask=mask, check_bounds=False).astype(ct.float32)
    gate = ct.minimum(gate, limit)
    up = ct.minimum(ct.maximum(up, -limit), limit)
    # The division must round as IEEE asks, and exp is CUDA's expf: their last bits decide how values are rounded.
    value = (ct.truediv(gate, 1.0 + ct.exp(-gate)) * up).astype(x.dtype).astype(ct.float32)
    grouped = ct.reshape(value, (COUNT, GROUP, TILE_H))
    scale, inverse = _scale_and_inverse(ct.max(ct.abs(grouped), axis=1), ROUND)
    codes = ct.reshape(_e4m3_bytes(grouped * inverse[:, None, :]), (COUNT * GROUP, TILE_H))
    if TRANSPOSE:
        across, along = ct.transpose(cols), ct.transpose(rows)
        inside = (across < channels) & (along < x.shape[0])
        ct.scatter(out, (across, along), ct.transpose(codes), mask=inside, check_bounds=False)
    else:
        ct.scatter(out, (rows, cols), codes, mask=mask, check_bounds=False)
    groups = (down * COUNT + ct.arange(COUNT, dtype=ct.int32))[:, None]
    in_scales = (groups * GROUP < x.shape[0]) & (cols < channels)
    ct.scatter(scale_out, (groups, cols), scale, mask=in_scales, check_bounds=False)


_CHANNELS = {warps: _swiglu_and_cast_channels.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _run_channels(x, group, limit, round_scale, out, scale, transpose, tile_h, warps):
    P, H = x.shape[0], x.shape[1] // 2
    if P == 0:
        return
    grid = (-(-P // 128) * -(-H // tile_h), 1, 1)
    flags = (bool(round_scale), transpose)
    args = (x, out.view(torch.uint8), scale, float(limit), *flags, group, 128 // group, tile_h)
    ct.launch(torch.cuda.current_stream(), grid, _CHANNELS[warps], args)


def run_swiglu_and_per_channel_cast(
    x, group, limit, round_scale, out, scale, *, TILE_H: int = 64, WARPS: int = 8
) -> None:
    """out = codes of bfloat16(silu(gate) * up), scale = what they are multiplied by, per channel and `group` tokens.

    x: [P, 2 * H] = [gate | up] in bf16, P a multiple of group (32 or 128), out: [P, H] in float8_e4m3fn, both with unit last
    stride; scale: [P / group, H] float32 of any strides.
    """
    _run_channels(x, group, limit, round_scale, out, scale, False, TILE_H, WARPS)


def run_swiglu_and_per_channel_cast_transpose(
    x, group, limit, round_scale, out, scale, *, TILE_H: int = 64, WARPS: int = 8
) -> None:
    """The same with out [H, P]: the codes of a channel lie side by side."""
    _run_channels(x, group, limit, round_scale, out, scale, True, TILE_H, WARPS)


# -- backward --------------------------------------------------------------------------------------------------------------


@ct.function
def _store_gradient(grad, row, cols, group, mask, there, grad_x, codes, scale_out, ROUND):
    """Groups of channels, as they are and cast."""
    ct.scatter(grad_x, (row, cols), grad.astype(grad_x.dtype), mask=mask, check_bounds=False)
    scale, inverse = _scale_and_inverse(ct.max(ct.abs(grad), axis=1), ROUND)
    ct.scatter(codes, (row, cols), _e4m3_bytes(grad * inverse[:, None]), mask=mask, check_bounds=False)
    ct.scatter(scale_out, (row, group), scale, mask=there, check_bounds=False)


@ct.kernel
def _swiglu_backward_and_cast(
    x: Rows,
    x_scale: ct.Array,
    grad_out: Rows,
    weights: ct.Array,
    weight_of_row: ct.Array,
    row_of_choice: ct.Array,
    out: Rows,
    grad_x: Rows,
    codes: Rows,
    scale_out: ct.Array,
    grad_weights: ct.Array,
    limit: float,
    GROUP: Int,
    ROUND: Flag,
    GROUPS: Int,
    ZEROED: Int,
):
    """A block has a row, GROUPS groups of either half at a time, and zeroes those of ZEROED choices that have no row."""
    channels = out.shape[1]
    choice = ct.bid(0) * ZEROED + ct.arange(ZEROED, dtype=ct.int32)
    in_choices = choice < row_of_choice.shape[0]
    source = ct.gather(row_of_choice, choice, mask=in_choices, check_bounds=False)
    nothing = ct.zeros((ZEROED,), dtype=ct.float32)
    ct.scatter(grad_weights, choice, nothing, mask=in_choices & (source < 0), check_bounds=False)
    if ct.bid(0) < out.shape[0]:
        row = ct.bid(0)
        place = ct.gather(weight_of_row, row + ct.arange(1, dtype=ct.int32), check_bounds=False)
        weight = ct.gather(weights, place, mask=place >= 0, check_bounds=False)[:, None]
        total = ct.zeros((GROUPS, GROUP), dtype=ct.float32)
        for first in range(0, channels // GROUP, GROUPS):
            group = first + ct.arange(GROUPS, dtype=ct.int32)
            there = group * GROUP < channels
            cols = group[:, None] * GROUP + ct.arange(GROUP, dtype=ct.int32)[None, :]
            mask = cols < channels
            gate_scale = ct.gather(x_scale, (row, group), mask=there, check_bounds=False)
            up_scale = ct.gather(x_scale, (row, group + channels // GROUP), mask=there, check_bounds=False)
            gate = ct.gather(x, (row, cols), mask=mask, check_bounds=False)
            up = ct.gather(x, (row, cols + channels), mask=mask, check_bounds=False)
            gate = ct.bitcast(gate, ct.float8_e4m3fn).astype(ct.float32) * gate_scale[:, None]
            up = ct.bitcast(up, ct.float8_e4m3fn).astype(ct.float32) * up_scale[:, None]
            grad = ct.gather(grad_out, (row, cols), mask=mask, check_bounds=False).astype(ct.float32)
            gate_moves = gate <= limit
            up_moves = ct.abs(up) <= limit
            gate = ct.minimum(gate, limit)
            up = ct.minimum(ct.maximum(up, -limit), limit)
            # The divisions must round as IEEE asks, and exp is CUDA's expf: scales depend on their last bits.
            divisor = 1.0 + ct.exp(-gate)
            sigmoid = ct.truediv(ct.full(divisor.shape, 1.0, dtype=ct.float32), divisor)
            activated = ct.truediv(gate, divisor) * up
            part = grad * weight * sigmoid
            grad_gate = ct.where(gate_moves, part * up * (gate * (1.0 - sigmoid) + 1.0), 0.0)
            grad_up = ct.where(up_moves, part * gate, 0.0)
            ct.scatter(out, (row, cols), (activated * weight).astype(out.dtype), mask=mask, check_bounds=False)
            total = total + ct.where(mask, grad * activated, 0.0)
            _store_gradient(grad_gate, row, cols, group, mask, there, grad_x, codes, scale_out, ROUND)
            _store_gradient(
                grad_up, row, cols + channels, group + channels // GROUP, mask, there, grad_x, codes, scale_out, ROUND
            )
        whole = ct.sum(ct.sum(total, axis=1), axis=0, keepdims=True)
        ct.scatter(grad_weights, place, whole, mask=place >= 0, check_bounds=False)


_BACKWARD = {warps: _swiglu_backward_and_cast.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
ZEROED = 256


def run_swiglu_backward_and_per_token_cast(
    x,
    x_scale,
    grad_out,
    weights,
    weight_of_row,
    row_of_choice,
    group,
    limit,
    round_scale,
    out,
    grad_x,
    grad_x_codes,
    grad_x_scale,
    grad_weights,
    *,
    TILE: int = 1024,
    WARPS: int = 4,
) -> None:
    """out = silu(gate) * up * weight, the gradient of x = [gate | up] with its codes and scales, and that of the weights.

    x: [P, 2 * H] in float8_e4m3fn, H a multiple of group (32 or 128), grad_out and out: [P, H] and grad_x: [P, 2 * H] in bf16,
    grad_x_codes: [P, 2 * H] in float8_e4m3fn, all with unit last stride; x_scale and grad_x_scale: [P, 2 * H / group] float32 of
    any strides; weights and grad_weights: [M, K] float32, weight_of_row: [P] and row_of_choice: [M, K] int32, all contiguous. A
    block takes TILE channels of either half of its row at a time.
    """
    P, H = out.shape
    if P == 0:  # no rows that a kernel could be given
        grad_weights.zero_()
        return
    choices = row_of_choice.numel()
    groups = min(max(1, TILE // group), 1 << (H // group - 1).bit_length())
    given = (x.view(torch.uint8), x_scale, grad_out, weights.view(-1), weight_of_row, row_of_choice.view(-1))
    made = (out, grad_x, grad_x_codes.view(torch.uint8), grad_x_scale, grad_weights.view(-1))
    args = (*given, *made, float(limit), group, bool(round_scale), groups, ZEROED)
    ct.launch(torch.cuda.current_stream(), (max(P, -(-choices // ZEROED)), 1, 1), _BACKWARD[WARPS], args)

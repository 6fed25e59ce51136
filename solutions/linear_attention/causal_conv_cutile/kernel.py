"""Depthwise causal convolutions of width 4 with SiLU, cuTile: over a whole sequence, or one step with a state."""

from typing import Annotated

import cuda.tile as ct
import torch

# The number of channels is a compile-time constant, so that aligned channels are read 16 bytes at a time.
Sequences = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2,))]
Weights = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0, 1))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]

WIDTH = 4
MINUS_LOG2_E = -1.4426950408889634


@ct.function
def _columns(tile, TILE: Int):
    """Take a tile [TILE, 4] apart; it is read whole, because its columns are strided in memory."""
    columns = ()
    for j in ct.static_iter(range(WIDTH)):
        columns += (ct.extract(tile, (0, j), shape=(TILE, 1)).reshape((TILE,)),)
    return columns


@ct.function
def _activated(total, out):
    # Both are rounded to T: the sum as the result of a convolution, and its SiLU.
    total = total.astype(out.dtype).astype(ct.float32)
    if out.dtype == ct.float32:
        # FULL division is within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
        result = ct.truediv(total, 1.0 + ct.exp(-total), rounding_mode=ct.RoundingMode.FULL)
    else:
        # The cast hides the last bits. An accurate exponential and FULL division would take longer than the memory does.
        divisor = 1.0 + ct.exp2(total * MINUS_LOG2_E, flush_to_zero=True)
        result = ct.truediv(total, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    return result.astype(out.dtype)


# ---- whole sequences ------------------------------------------------------------------------------


@ct.function
def _walk(x, weight, bias, out, BIAS: Int, TILE_S: Int, TILE_D: Int):
    """Walk along TILE_S positions of TILE_D channels: every input is read once."""
    length = x.shape[1]
    channels = x.shape[2]
    tiles_d = ct.cdiv(channels, TILE_D)  # a constant: blocks walk along channels first
    tiles_s = ct.cdiv(length, TILE_S)
    cols = ct.bid(0) % tiles_d * TILE_D + ct.arange(TILE_D, dtype=ct.int32)
    first = ct.bid(0) // tiles_d % tiles_s * TILE_S
    batch = ct.bid(0) // tiles_d // tiles_s
    in_d = cols < channels

    rows = ()
    for i in ct.static_iter(range(TILE_S + WIDTH - 1)):  # all loads before the first use
        position = first + (i - (WIDTH - 1))
        inside = in_d & (position >= 0) & (position < length)
        rows += (ct.gather(x, (batch, position, cols), mask=inside, check_bounds=False),)
    taps = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    tile = ct.gather(weight, (cols[:, None], taps), mask=in_d[:, None], check_bounds=False).astype(ct.float32)
    weights = _columns(tile, TILE_D)
    if BIAS:
        biases = ct.gather(bias, cols, mask=in_d, check_bounds=False).astype(ct.float32)
    for i in ct.static_iter(range(TILE_S)):
        total = rows[i].astype(ct.float32) * weights[0]
        for j in ct.static_iter(range(1, WIDTH)):
            total = total + rows[i + j].astype(ct.float32) * weights[j]
        if BIAS:
            total = total + biases
        inside = in_d & (first + i < length)
        ct.scatter(out, (batch, first + i, cols), _activated(total, out), mask=inside, check_bounds=False)


@ct.kernel
def _convolution(x: Sequences, weight: Weights, out: Sequences, TILE_S: Int, TILE_D: Int):
    _walk(x, weight, weight, out, 0, TILE_S, TILE_D)


@ct.kernel
def _convolution_bias(x: Sequences, weight: Weights, bias: Vector, out: Sequences, TILE_S: Int, TILE_D: Int):
    _walk(x, weight, bias, out, 1, TILE_S, TILE_D)


_PLAIN = {warps: _convolution.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_BIASED = {warps: _convolution_bias.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _shape(x, tile_s, warps):
    """Return the tile and the grid of a convolution of x [B, D, S]."""
    B, D, S = x.shape
    # 16 positions read 19; fewer would read more of them twice, but short sequences fill the machine only in small parts.
    tile_s = tile_s or (16 if B * D * S >= 1 << 22 else 4)
    tile_d = warps * 32 * (16 // x.element_size())
    return tile_s, tile_d, (B * -(-D // tile_d) * -(-S // tile_s), 1, 1)


def run_causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, TILE_S: int | None = None, WARPS: int = 4
) -> None:
    """out[b, d, s] = T(silu(T(sum over j of weight[d, j] * x[b, d, s - 3 + j]))): sums in fp32, two roundings.

    x and out are [B, D, S] with any strides, fast if those of D are 1, weight[D, 4]; T = bf16, fp16 or fp32. A block walks along
    TILE_S positions of as many channels as WARPS (4 or 8) warps load at once; None chooses by the amount of work.
    """
    if x.numel() == 0:
        return
    tile_s, tile_d, grid = _shape(x, TILE_S, WARPS)
    args = (x.transpose(1, 2), weight, out.transpose(1, 2), tile_s, tile_d)
    ct.launch(torch.cuda.current_stream(), grid, _PLAIN[WARPS], args)


def run_causal_conv1d_bias(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE_S: int | None = None,
    WARPS: int = 4,
) -> None:
    """Compute run_causal_conv1d with bias [D] added to the sum before it is rounded."""
    if x.numel() == 0:
        return
    tile_s, tile_d, grid = _shape(x, TILE_S, WARPS)
    args = (x.transpose(1, 2), weight, bias, out.transpose(1, 2), tile_s, tile_d)
    ct.launch(torch.cuda.current_stream(), grid, _BIASED[WARPS], args)


# ---- one step -------------------------------------------------------------------------------------


@ct.function
def _step(inputs, weight, of_weight, inside, out, channels, TILE: Int):
    """Write the output of channels whose four inputs are known."""
    taps = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    tile = ct.gather(weight, (of_weight[:, None], taps), mask=inside[:, None], check_bounds=False).astype(ct.float32)
    weights = _columns(tile, TILE)
    total = inputs[0].astype(ct.float32) * weights[0]
    for j in ct.static_iter(range(1, WIDTH)):
        total = total + inputs[j].astype(ct.float32) * weights[j]
    ct.scatter(out, channels, _activated(total, out), mask=inside, check_bounds=False)


@ct.kernel
def _update(x: ct.Array, state: ct.Array, weight: Weights, out: ct.Array, TILE: Int):
    channels = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = channels < out.shape[0]
    taps = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    newest = ct.gather(x, channels, mask=inside, check_bounds=False)
    kept = _columns(ct.gather(state, (channels[:, None], taps), mask=inside[:, None], check_bounds=False), TILE)
    older = ct.cat((kept[1][:, None], kept[2][:, None]), 1)
    newer = ct.cat((kept[3][:, None], newest[:, None]), 1)
    shifted = ct.cat((older, newer), 1)
    ct.scatter(state, (channels[:, None], taps), shifted, mask=inside[:, None], check_bounds=False)
    inputs = (kept[1], kept[2], kept[3], newest)
    _step(inputs, weight, channels % weight.shape[0], inside, out, channels, TILE)


@ct.kernel
def _update_packed(x: ct.Array, state: ct.Array, weight: Weights, out: ct.Array, TILE: Int):
    """Read and write the state of a channel as one number of 64 bits, which a thread shifts by 16 of them."""
    channels = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = channels < out.shape[0]
    packed = ct.gather(state, channels, mask=inside, check_bounds=False)
    newest = ct.gather(x, channels, mask=inside, check_bounds=False)
    bits = ct.bitcast(newest, ct.uint16).astype(ct.uint64)
    ct.scatter(state, channels, packed >> 16 | bits << 48, mask=inside, check_bounds=False)
    inputs = ()
    for j in ct.static_iter(range(1, WIDTH)):
        inputs += (ct.bitcast((packed >> 16 * j).astype(ct.uint16), out.dtype),)
    inputs += (newest,)
    _step(inputs, weight, channels % weight.shape[0], inside, out, channels, TILE)


_UPDATE = {warps: _update.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_UPDATE_PACKED = {warps: _update_packed.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE: int | None = None,
    WARPS: int = 4,
) -> None:
    """conv_state = its last three inputs and x, in place; out = T(silu(T(sum over j of weight[d, j] * conv_state[b, d, j]))).

    x and out are [B, D, 1], conv_state [B, D, 4], weight [D, 4], contiguous; T = bf16, fp16 or fp32, fewer than 2**29 channels. A
    block handles TILE channels; None: 128, or 256 where there are many.
    """
    count = out.numel()
    if count == 0:
        return
    TILE = TILE or (256 if count >= 1 << 17 else 128)
    if out.element_size() == 2 and conv_state.storage_offset() % WIDTH == 0:
        kernel, state = _UPDATE_PACKED[WARPS], conv_state.view(-1).view(torch.uint64)
    else:
        kernel, state = _UPDATE[WARPS], conv_state.view(-1, WIDTH)
    args = (x.view(-1), state, weight, out.view(-1), TILE)
    ct.launch(torch.cuda.current_stream(), (-(-count // TILE), 1, 1), kernel, args)

"""One step of a depthwise causal convolution of width 4 with a bias and SiLU, cuTile; the state is shifted in place."""

from typing import Annotated

import cuda.tile as ct
import torch

# The number of channels is a compile-time constant, so that aligned channels are read 16 bytes at a time.
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
def _step(inputs, weight, bias, owners, inside, out, channels, TILE: Int):
    """Write the output of channels whose four inputs are known."""
    taps = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    tile = ct.gather(weight, (owners[:, None], taps), mask=inside[:, None], check_bounds=False).astype(ct.float32)
    weights = _columns(tile, TILE)
    total = inputs[0].astype(ct.float32) * weights[0]
    for j in ct.static_iter(range(1, WIDTH)):
        total = total + inputs[j].astype(ct.float32) * weights[j]
    total = total + ct.gather(bias, owners, mask=inside, check_bounds=False).astype(ct.float32)
    # Both are rounded to T: the sum as the result of a convolution, and its SiLU.
    total = total.astype(out.dtype).astype(ct.float32)
    if out.dtype == ct.float32:
        # FULL division is within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
        result = ct.truediv(total, 1.0 + ct.exp(-total), rounding_mode=ct.RoundingMode.FULL)
    else:
        # The cast hides the last bits.
        divisor = 1.0 + ct.exp2(total * MINUS_LOG2_E, flush_to_zero=True)
        result = ct.truediv(total, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    ct.scatter(out, channels, result.astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _update(x: ct.Array, state: ct.Array, weight: Weights, bias: Vector, out: ct.Array, TILE: Int):
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
    _step(inputs, weight, bias, channels % weight.shape[0], inside, out, channels, TILE)


@ct.kernel
def _update_packed(x: ct.Array, state: ct.Array, weight: Weights, bias: Vector, out: ct.Array, TILE: Int):
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
    _step(inputs, weight, bias, channels % weight.shape[0], inside, out, channels, TILE)


_UPDATE = {warps: _update.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_UPDATE_PACKED = {warps: _update_packed.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE: int | None = None,
    WARPS: int = 4,
) -> None:
    """conv_state = its last three inputs and x; out = T(silu(T(sum over j of weight[d, j] * conv_state[b, d, j] + bias[d]))).

    x and out are [B, D, 1], conv_state [B, D, 4], weight [D, 4], bias [D], contiguous; T = bf16, fp16 or fp32, fewer than 2**29
    channels. A block handles TILE channels; None: 128, or 256 where there are many.
    """
    count = out.numel()
    if count == 0:
        return
    TILE = TILE or (256 if count >= 1 << 17 else 128)
    if out.element_size() == 2 and conv_state.storage_offset() % WIDTH == 0:
        kernel, state = _UPDATE_PACKED[WARPS], conv_state.view(-1).view(torch.uint64)
    else:
        kernel, state = _UPDATE[WARPS], conv_state.view(-1, WIDTH)
    args = (x.view(-1), state, weight, bias, out.view(-1), TILE)
    ct.launch(torch.cuda.current_stream(), (-(-count // TILE), 1, 1), kernel, args)

"""Depthwise causal convolutions of width 4 with SiLU, Triton: over a whole sequence, or one step with a state."""

import torch
import triton
import triton.language as tl

WIDTH = tl.constexpr(4)
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
VECTOR_BYTES = 16
WARP = 32


@triton.jit
def _weights(weight_ptr, cols, in_d, PACKED: tl.constexpr):
    """Read the four weights of each channel, in fp32."""
    T: tl.constexpr = weight_ptr.dtype.element_ty
    if PACKED:
        # The 8 bytes of a channel at once: a tile [BLOCK_D, 4] is read as fast, but then every row of inputs is moved through
        # shared memory into the layout of the weights.
        packed = tl.load(weight_ptr.to(tl.pointer_type(tl.int64)) + cols, mask=in_d, other=0)
        w0 = packed.to(tl.int16).to(T, bitcast=True).to(tl.float32)
        w1 = (packed >> 16).to(tl.int16).to(T, bitcast=True).to(tl.float32)
        w2 = (packed >> 32).to(tl.int16).to(T, bitcast=True).to(tl.float32)
        w3 = (packed >> 48).to(tl.int16).to(T, bitcast=True).to(tl.float32)
    else:
        ptrs = weight_ptr + cols * WIDTH
        w0 = tl.load(ptrs, mask=in_d, other=0.0).to(tl.float32)
        w1 = tl.load(ptrs + 1, mask=in_d, other=0.0).to(tl.float32)
        w2 = tl.load(ptrs + 2, mask=in_d, other=0.0).to(tl.float32)
        w3 = tl.load(ptrs + 3, mask=in_d, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


def _is_packed(weight):
    """Tell if the weights of a channel are 8 aligned bytes."""
    return weight.element_size() == 2 and weight.data_ptr() % 8 == 0


@triton.jit
def _activated(total, dtype: tl.constexpr):
    # Both are rounded to T: the sum as the result of a convolution, and its SiLU. The cast to a 16-bit T hides the last bits of
    # the shorter exponential.
    total = total.to(dtype).to(tl.float32)
    power = tl.exp(-total) if dtype == tl.float32 else tl.exp2(total * MINUS_LOG2_E)
    return (total / (1.0 + power)).to(dtype)


# ---- whole sequences ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["S"])
def _channels_last(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_b,
    x_s,
    out_b,
    out_s,
    S,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Walk along BLOCK_S positions of BLOCK_D channels that are next to each other: every input is read once."""
    T: tl.constexpr = out_ptr.dtype.element_ty
    column_blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    position_blocks = (S + BLOCK_S - 1) // BLOCK_S
    pid = tl.program_id(0)
    cols = pid % column_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = cols < D
    first = pid // column_blocks % position_blocks * BLOCK_S
    batch = (pid // column_blocks // position_blocks).to(tl.int64)
    x_ptrs = x_ptr + batch * x_b + (first.to(tl.int64) - (WIDTH - 1)) * x_s + cols
    out_ptrs = out_ptr + batch * out_b + first.to(tl.int64) * out_s + cols

    # All reads before the first write, so that all are in flight: the compiler cannot tell that out is not x.
    rows = ()
    for i in tl.static_range(BLOCK_S + WIDTH - 1):
        position = first + (i - (WIDTH - 1))
        end = tl.where((position >= 0) & (position < S), D, 0)
        rows += (tl.load(x_ptrs, mask=cols < end, other=0.0, eviction_policy="evict_last"),)
        x_ptrs += x_s
    w0, w1, w2, w3 = _weights(weight_ptr, cols, in_d, PACKED)
    if BIAS:
        bias = tl.load(bias_ptr + cols, mask=in_d, other=0.0).to(tl.float32)
    for i in tl.static_range(BLOCK_S):
        total = rows[i].to(tl.float32) * w0
        total += rows[i + 1].to(tl.float32) * w1
        total += rows[i + 2].to(tl.float32) * w2
        total += rows[i + 3].to(tl.float32) * w3
        if BIAS:
            total += bias
        tl.store(out_ptrs, _activated(total, T), mask=cols < tl.where(first + i < S, D, 0))
        out_ptrs += out_s


@triton.jit(do_not_specialize=["S"])
def _any_strides(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_b,
    x_d,
    x_s,
    out_b,
    out_d,
    out_s,
    S,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Read a tile four times, one position apart: three of them come from L1."""
    T: tl.constexpr = out_ptr.dtype.element_ty
    column_blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    position_blocks = (S + BLOCK_S - 1) // BLOCK_S
    pid = tl.program_id(0)
    cols = pid % column_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = cols < D
    positions = pid // column_blocks % position_blocks * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    batch = (pid // column_blocks // position_blocks).to(tl.int64)
    mask = (positions < S) & in_d[None, :]
    x_ptrs = x_ptr + batch * x_b + cols[None, :].to(tl.int64) * x_d + (positions.to(tl.int64) - (WIDTH - 1)) * x_s
    weights = _weights(weight_ptr, cols, in_d, PACKED)
    total = tl.zeros([BLOCK_S, BLOCK_D], dtype=tl.float32)
    for i in tl.static_range(WIDTH):
        inside = mask & (positions + (i - (WIDTH - 1)) >= 0)
        total += tl.load(x_ptrs + i * x_s, mask=inside, other=0.0).to(tl.float32) * weights[i][None, :]
    if BIAS:
        total += tl.load(bias_ptr + cols, mask=in_d, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + batch * out_b + cols[None, :].to(tl.int64) * out_d + positions.to(tl.int64) * out_s
    tl.store(out_ptrs, _activated(total, T), mask=mask)


def _convolve(x, weight, bias, out, block_s, num_warps):
    B, D, S = x.shape
    if x.numel() == 0:
        return
    packed = _is_packed(weight)
    if x.stride(1) != 1 or out.stride(1) != 1:
        grid = (B * ((D + 31) // 32) * ((S + 63) // 64),)
        strides = (*x.stride(), *out.stride())
        _any_strides[grid](x, weight, bias, out, *strides, S, D, bias is not None, packed, 64, 32, num_warps=4)
        return
    vector = VECTOR_BYTES // x.element_size() * WARP
    # 16 positions read 19; fewer would read more of them twice, but short sequences fill the machine only in small parts.
    many = B * D * S >= 1 << 22
    block_s = block_s or (16 if many else 4)
    num_warps = num_warps or (2 if many else 1)
    block_d = vector * num_warps
    grid = (B * ((D + block_d - 1) // block_d) * ((S + block_s - 1) // block_s),)
    strides = (x.stride(0), x.stride(2), out.stride(0), out.stride(2))
    _channels_last[grid](
        x, weight, bias, out, *strides, S, D, bias is not None, packed, block_s, block_d, num_warps=num_warps
    )


def run_causal_conv1d(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, BLOCK_S=None, num_warps=None):
    """out[b, d, s] = T(silu(T(sum over j of weight[d, j] * x[b, d, s - 3 + j]))): sums in fp32, two roundings.

    Shapes: x, out [B, D, S] with any strides, weight [D, 4] contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: if channels are next to each other in x and out, a program walks along BLOCK_S positions of num_warps * 32 vectors
    of channels; None chooses both by the amount of work. Other strides take tiles of 64 positions and 32 channels.
    """
    _convolve(x, weight, None, out, BLOCK_S, num_warps)


def run_causal_conv1d_bias(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, *, BLOCK_S=None, num_warps=None
):
    """Compute run_causal_conv1d with bias [D] added to the sum before it is rounded."""
    _convolve(x, weight, bias, out, BLOCK_S, num_warps)


# ---- one step -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])
def _update(x_ptr, state_ptr, weight_ptr, out_ptr, count, D: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    T: tl.constexpr = out_ptr.dtype.element_ty
    channels = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < count
    taps = tl.arange(0, WIDTH)[None, :]
    state_ptrs = state_ptr + channels[:, None] * WIDTH + taps
    # A channel's state is read and written whole: 8 bytes in half precision.
    state = tl.load(state_ptrs, mask=inside[:, None], other=0.0)
    newest = tl.load(x_ptr + channels, mask=inside, other=0.0)
    w0, w1, w2, w3 = _weights(weight_ptr, channels % D, inside, PACKED)
    even, odd = tl.split(state.reshape(BLOCK, 2, 2))
    _, second = tl.split(even)
    first, third = tl.split(odd)
    shifted = tl.join(tl.join(first, third), tl.join(second, newest))  # first, second, third, newest
    tl.store(state_ptrs, shifted.reshape(BLOCK, WIDTH), mask=inside[:, None])
    total = first.to(tl.float32) * w0 + second.to(tl.float32) * w1
    total += third.to(tl.float32) * w2 + newest.to(tl.float32) * w3
    tl.store(out_ptr + channels, _activated(total, T), mask=inside)


def run_causal_conv1d_update(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None
):
    """conv_state = its last three inputs and x, in place; out = T(silu(T(sum over j of weight[d, j] * conv_state[b, d, j]))).

    Shapes: x, out [B, D, 1], conv_state [B, D, 4], weight [D, 4], contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: BLOCK channels a program; None: 128, or 256 where there are many.
    num_warps = None: 2 channels a thread.
    """
    _, D, _ = out.shape
    count = out.numel()
    if count == 0:
        return
    block = BLOCK or (256 if count >= 1 << 17 else 128)
    grid = ((count + block - 1) // block,)
    warps = num_warps or max(1, block // 64)
    _update[grid](x, conv_state, weight, out, count, D, _is_packed(weight), block, num_warps=warps)

"""One step of a depthwise causal convolution of width 4 with a bias and SiLU, Triton; the state is shifted in place."""

import torch
import triton
import triton.language as tl

WIDTH = tl.constexpr(4)
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit(do_not_specialize=["count"])
def _update(
    x_ptr, state_ptr, weight_ptr, bias_ptr, out_ptr, count, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    dtype = out_ptr.dtype.element_ty
    channels = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < count
    owner = channels % D
    taps = tl.arange(0, WIDTH)[None, :]
    state_ptrs = state_ptr + channels[:, None] * WIDTH + taps
    # The state and the weights of a channel are read whole: 8 bytes in half precision.
    state = tl.load(state_ptrs, mask=inside[:, None], other=0.0)
    weight = tl.load(weight_ptr + owner[:, None] * WIDTH + taps, mask=inside[:, None], other=0.0)
    newest = tl.load(x_ptr + channels, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + owner, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(state.reshape(BLOCK, 2, 2))
    _, second = tl.split(even)
    first, third = tl.split(odd)
    shifted = tl.join(tl.join(first, third), tl.join(second, newest))  # first, second, third, newest
    shifted = shifted.reshape(BLOCK, WIDTH)
    tl.store(state_ptrs, shifted, mask=inside[:, None])
    total = tl.sum(shifted.to(tl.float32) * weight.to(tl.float32), axis=1) + bias
    # Both are rounded to T: the sum as the result of a convolution, and its SiLU. The cast to a 16-bit T hides the last bits of
    # the shorter exponential.
    total = total.to(dtype).to(tl.float32)
    power = tl.exp(-total) if dtype == tl.float32 else tl.exp2(total * MINUS_LOG2_E)
    tl.store(out_ptr + channels, (total / (1.0 + power)).to(dtype), mask=inside)


def run(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=None,
):
    """conv_state = its last three inputs and x; out = T(silu(T(sum over j of weight[d, j] * conv_state[b, d, j] + bias[d]))).

    Shapes: x, out [B, D, 1], conv_state [B, D, 4], weight [D, 4], bias [D], contiguous; one dtype T in bfloat16, float16,
    float32.
    Mapping: BLOCK channels a program; None: 128, or 256 where there are many.
    num_warps = None: 2 channels a thread.
    """
    _, D, _ = out.shape
    count = out.numel()
    if count == 0:
        return
    block = BLOCK or (256 if count >= 1 << 17 else 128)
    warps = num_warps or max(1, block // 64)
    _update[((count + block - 1) // block,)](x, conv_state, weight, bias, out, count, D, block, num_warps=warps)

"""The activation of experts with its casts for training, Triton: per channel for the weights' gradient, and its backward."""

import triton
import triton.language as tl

MOST = tl.constexpr(448.0)
FLOOR = tl.constexpr(1e-4)


@triton.jit
def _scale_and_inverse(amax, ROUND: tl.constexpr):
    """What a code is multiplied by, and what a value is multiplied by, which is not quite the reciprocal unless rounded."""
    amax = tl.maximum(amax, FLOOR)
    most = tl.zeros_like(amax) + MOST
    if ROUND:
        # amax / 448, rounded up to a power of two, without the division: the exponents' difference, and one more where the
        # mantissa of amax is above that of 448. The quotient as it is rounded lies above 1 then.
        bits = amax.to(tl.int32, bitcast=True)
        most_bits = most.to(tl.int32, bitcast=True)
        exponent = ((bits + 0x7FFFFF - (most_bits & 0x7FFFFF)) >> 23) - (most_bits >> 23) + 127
        exponent = tl.where(bits >= 0x7F800000, 255, exponent)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        # The divisions must round as IEEE asks, or codes land one off.
        scale = tl.div_rn(amax, most)
        inverse = tl.div_rn(most, amax)
    return scale, inverse


@triton.jit
def _exp(x):
    """e^x by the steps of CUDA's expf, whose last bit decides how values are rounded: 2^n times 2^r, r from 0 to 1."""
    part = tl.minimum(tl.maximum(tl.fma(x, 0.0057249800302088260651, 0.5), 0.0), 1.0)
    n = tl.floor(part * 252.0) - 126.0
    r = tl.fma(x, 1.925963033500011079e-08, tl.fma(x, 1.4426950216293334961, -n))
    return tl.exp2(r) * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


# -- per channel -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["P", "limit"])
def _swiglu_and_cast_channels(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride, scale_row, scale_column, limit, P, H,
    TOKENS: tl.constexpr, COUNT: tl.constexpr, BLOCK_H: tl.constexpr, ROUND: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens share a scale a channel; a program has COUNT times as many tokens and BLOCK_H channels."""
    strips = tl.cdiv(H, BLOCK_H)
    first = (tl.program_id(0) // strips).to(tl.int64) * COUNT
    cols = tl.program_id(0) % strips * BLOCK_H + tl.arange(0, BLOCK_H)
    # Eight channels a thread, in the store too: codes then need no way through shared memory to be 16 a thread.
    cols = tl.max_contiguous(tl.multiple_of(cols, 8), 8)
    rows = first * TOKENS + tl.arange(0, TOKENS * COUNT)
    mask = (rows < P)[:, None] & (cols < H)[None, :]
    x_ptrs = x_ptr + rows[:, None] * x_stride + cols[None, :]
    gate = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    up = tl.load(x_ptrs + H, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = (tl.div_rn(gate, 1.0 + _exp(-gate)) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    grouped = tl.reshape(value, [COUNT, TOKENS, BLOCK_H])
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(grouped), axis=1), ROUND)
    scaled = tl.reshape(grouped * inverse[:, None, :], [COUNT * TOKENS, BLOCK_H])
    codes = scaled.to(out_ptr.dtype.element_ty)  # saturates, so what exceeds the largest by rounding is the largest
    if TRANSPOSE:
        out_ptrs = out_ptr + cols.to(tl.int64)[:, None] * out_stride + rows[None, :]
        tl.store(out_ptrs, tl.trans(codes), mask=(cols < H)[:, None] & (rows < P)[None, :])
    else:
        tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], codes, mask=mask)
    groups = first + tl.arange(0, COUNT)
    in_scales = (groups * TOKENS < P)[:, None] & (cols < H)[None, :]
    tl.store(scale_ptr + groups[:, None] * scale_row + cols[None, :] * scale_column, scale, mask=in_scales)


def _run_channels(x, group, limit, round_scale, out, scale, transpose, block_h, num_warps):
    P, H = x.shape[0], x.shape[1] // 2
    if P == 0:
        return
    _swiglu_and_cast_channels[(-(-P // 128) * -(-H // block_h),)](
        x, out, scale, x.stride(0), out.stride(0), scale.stride(0), scale.stride(1), float(limit), P, H,
        group, 128 // group, block_h, bool(round_scale), transpose, num_warps=num_warps,
    )  # fmt: skip


def run_swiglu_and_per_channel_cast(x, group, limit, round_scale, out, scale, *, BLOCK_H=64, num_warps=8):
    """out = codes of bfloat16(silu(gate) * up), scale = what they are multiplied by, per channel and `group` tokens.

    Shapes: x [P, 2 * H] = [gate | up] in bfloat16, P a multiple of group (32 or 128), and out [P, H] in float8_e4m3fn with unit
    last stride; scale [P / group, H] float32 of any strides.
    """
    _run_channels(x, group, limit, round_scale, out, scale, False, BLOCK_H, num_warps)


def run_swiglu_and_per_channel_cast_transpose(x, group, limit, round_scale, out, scale, *, BLOCK_H=64, num_warps=8):
    """The same with out [H, P]: the codes of a channel lie side by side."""
    _run_channels(x, group, limit, round_scale, out, scale, True, BLOCK_H, num_warps)


# -- backward --------------------------------------------------------------------------------------------------------------


@triton.jit
def _store_gradient(grad, grad_x_ptrs, codes_ptrs, scale_ptrs, mask, in_scales, ROUND: tl.constexpr):
    """Groups of channels [GROUPS, GROUP], as they are and cast."""
    tl.store(grad_x_ptrs, grad.to(grad_x_ptrs.dtype.element_ty), mask=mask)
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(grad), axis=1), ROUND)
    tl.store(codes_ptrs, (grad * inverse[:, None]).to(codes_ptrs.dtype.element_ty), mask=mask)
    tl.store(scale_ptrs, scale, mask=in_scales)


@triton.jit(do_not_specialize=["P", "choices", "limit"])
def _swiglu_backward_and_cast(
    x_ptr, x_scale_ptr, grad_out_ptr, weights_ptr, weight_of_row_ptr, row_of_choice_ptr,
    out_ptr, grad_x_ptr, codes_ptr, scale_ptr, grad_weights_ptr,
    x_stride, x_scale_row, x_scale_column, grad_out_stride, out_stride, grad_x_stride, codes_stride,
    scale_row, scale_column, limit, P, choices, H,
    GROUP: tl.constexpr, ROUND: tl.constexpr, GROUPS: tl.constexpr, ZEROED: tl.constexpr,
):  # fmt: skip
    """A program has a row, GROUPS groups of either half at a time, and zeroes those of ZEROED choices that have no row."""
    program = tl.program_id(0)
    choice = program * ZEROED + tl.arange(0, ZEROED)
    source = tl.load(row_of_choice_ptr + choice, mask=choice < choices, other=0)
    tl.store(grad_weights_ptr + choice, tl.zeros([ZEROED], dtype=tl.float32), mask=(choice < choices) & (source < 0))
    if program < P:
        row = program.to(tl.int64)
        place = tl.load(weight_of_row_ptr + row)
        weight = tl.load(weights_ptr + place, mask=place >= 0, other=0.0)
        total = tl.zeros([GROUPS, GROUP], dtype=tl.float32)
        for first in range(0, H // GROUP, GROUPS):
            group = first + tl.arange(0, GROUPS)
            there = group * GROUP < H
            cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            mask = cols < H
            x_ptrs = x_ptr + row * x_stride + cols
            scale_ptrs = x_scale_ptr + row * x_scale_row + group * x_scale_column
            up_scale_ptrs = scale_ptrs + (H // GROUP) * x_scale_column
            gate_scale = tl.load(scale_ptrs, mask=there, other=0.0)[:, None]
            up_scale = tl.load(up_scale_ptrs, mask=there, other=0.0)[:, None]
            gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32) * gate_scale
            up = tl.load(x_ptrs + H, mask=mask, other=0.0).to(tl.float32) * up_scale
            grad = tl.load(grad_out_ptr + row * grad_out_stride + cols, mask=mask, other=0.0).to(tl.float32)
            gate_moves = gate <= limit
            up_moves = tl.abs(up) <= limit
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            divisor = 1.0 + _exp(-gate)
            sigmoid = tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)
            activated = tl.div_rn(gate, divisor) * up
            part = grad * weight * sigmoid
            grad_gate = tl.where(gate_moves, part * up * tl.fma(gate, 1.0 - sigmoid, 1.0), 0.0)
            grad_up = tl.where(up_moves, part * gate, 0.0)
            out = (activated * weight).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * out_stride + cols, out, mask=mask)
            total += tl.where(mask, grad * activated, 0.0)
            grad_x_ptrs = grad_x_ptr + row * grad_x_stride + cols
            codes_ptrs = codes_ptr + row * codes_stride + cols
            scale_ptrs = scale_ptr + row * scale_row + group * scale_column
            up_scale_ptrs = scale_ptrs + (H // GROUP) * scale_column
            _store_gradient(grad_gate, grad_x_ptrs, codes_ptrs, scale_ptrs, mask, there, ROUND)
            _store_gradient(grad_up, grad_x_ptrs + H, codes_ptrs + H, up_scale_ptrs, mask, there, ROUND)
        tl.store(grad_weights_ptr + place, tl.sum(tl.sum(total, axis=1), axis=0), mask=place >= 0)


ZEROED = 256


def run_swiglu_backward_and_per_token_cast(
    x, x_scale, grad_out, weights, weight_of_row, row_of_choice, group, limit, round_scale,
    out, grad_x, grad_x_codes, grad_x_scale, grad_weights, *, BLOCK=1024, num_warps=4,
):  # fmt: skip
    """out = silu(gate) * up * weight, the gradient of x = [gate | up] with its codes and scales, and that of the weights.

    Shapes: x [P, 2 * H] in float8_e4m3fn, H a multiple of group (32 or 128), grad_out and out [P, H] and grad_x [P, 2 * H] in
    bfloat16, grad_x_codes [P, 2 * H] in float8_e4m3fn, all with unit last stride; x_scale and grad_x_scale [P, 2 * H / group]
    float32 of any strides; weights and grad_weights [M, K] float32, weight_of_row [P] and row_of_choice [M, K] int32, all
    contiguous. A program takes BLOCK channels of either half of its row at a time.
    """
    P, H = out.shape
    choices = row_of_choice.numel()
    groups = min(max(1, BLOCK // group), 1 << (H // group - 1).bit_length())
    _swiglu_backward_and_cast[(max(P, -(-choices // ZEROED)),)](
        x, x_scale, grad_out, weights, weight_of_row, row_of_choice, out, grad_x, grad_x_codes, grad_x_scale, grad_weights,
        x.stride(0), x_scale.stride(0), x_scale.stride(1), grad_out.stride(0), out.stride(0), grad_x.stride(0),
        grad_x_codes.stride(0), grad_x_scale.stride(0), grad_x_scale.stride(1), float(limit), P, choices, H,
        group, bool(round_scale), groups, ZEROED, num_warps=num_warps,
    )  # fmt: skip

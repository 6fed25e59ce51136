"""The activation of experts with its casts for training, eager PyTorch: what a model runs that has no kernel for them."""

import torch


def _scale_and_inverse(amax, round_scale):
    limit = torch.full_like(amax, 448.0)  # a tensor, since dividing by a number multiplies by its rounded reciprocal
    scale, inverse = amax / limit, limit / amax
    if round_scale:
        exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
        scale = (exponent << 23).view(torch.float32)
        inverse = ((254 - exponent) << 23).view(torch.float32)
    return scale, inverse


def _to_e4m3(scaled):
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def run_swiglu_and_per_channel_cast(x, group, limit, round_scale):
    """x [P, 2 * H] -> codes [P, H], scales [P / group, H]."""
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    y = (gate / (1.0 + torch.exp(-gate)) * up).to(x.dtype)
    blocks = y.float().unflatten(0, (y.shape[0] // group, group))
    scale, inverse = _scale_and_inverse(blocks.abs().amax(dim=1).clamp(min=1e-4), round_scale)
    return _to_e4m3((blocks * inverse[:, None]).flatten(0, 1)), scale


def run_swiglu_and_per_channel_cast_transpose(x, group, limit, round_scale):
    """x [P, 2 * H] -> codes [H, P], scales [P / group, H]."""
    codes, scale = run_swiglu_and_per_channel_cast(x, group, limit, round_scale)
    return codes.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn), scale


def run_swiglu_backward_and_per_token_cast(
    x, x_scale, grad_out, topk_weights, weight_of_row, row_of_choice, group, limit, round_scale
):
    """Codes [P, 2 * H], scales, gradient [P, H], tables -> y [P, H], gradient of x and its cast [P, 2 * H], of weights [M, K]."""
    wide = x.float() * x_scale.repeat_interleave(group, dim=1)
    gate, up = wide.chunk(2, dim=-1)
    gate_cut, up_cut = gate > limit, up.abs() > limit
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    weight = torch.where(weight_of_row >= 0, topk_weights.flatten()[weight_of_row.clamp(min=0).long()], 0.0)
    divisor = 1.0 + torch.exp(-gate)
    sigmoid = 1.0 / divisor
    activated = gate / divisor * up
    grad = grad_out.float()
    part = grad * weight[:, None] * sigmoid
    slope = torch.addcmul(torch.ones_like(gate), gate, 1.0 - sigmoid)
    grad_gate = (part * up * slope).masked_fill(gate_cut, 0.0)
    grad_x = torch.cat([grad_gate, (part * gate).masked_fill(up_cut, 0.0)], dim=1)
    blocks = grad_x.unflatten(1, (grad_x.shape[1] // group, group))
    scale, inverse = _scale_and_inverse(blocks.abs().amax(dim=-1).clamp(min=1e-4), round_scale)
    codes = _to_e4m3((blocks * inverse.unsqueeze(-1)).flatten(1))
    sums = torch.cat([(grad * activated).sum(dim=1), grad.new_zeros(1)])
    grad_weights = sums[row_of_choice.long()]  # -1 is the zero at the end
    out = (activated * weight[:, None]).to(torch.bfloat16)
    return out, grad_x.to(torch.bfloat16), codes, scale, grad_weights

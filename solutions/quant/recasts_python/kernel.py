"""From codes to codes of another block, and from gathered rows, eager PyTorch: back to float32 first."""

import torch
import torch.nn.functional as F

BLOCK = 128


def _scale_and_inverse(amax, round_scale):
    limit = torch.full_like(amax, 448.0)  # a tensor, since dividing by a number multiplies by its rounded reciprocal
    scale, inverse = amax / limit, limit / amax
    if round_scale:
        exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
        scale = (exponent << 23).view(torch.float32)
        inverse = ((254 - exponent) << 23).view(torch.float32)
    return scale, inverse


def run_per_token_requantise(x, scale_in, block, round_scale):
    """Codes [M, H], scales of blocks -> codes [M, H], scales [M, ceil(H / 128)]."""
    rows, columns = x.shape
    factor = scale_in.repeat_interleave(block, dim=0)[:rows].repeat_interleave(block, dim=1)[:, :columns]
    wide, factor = x.float(), factor.contiguous()
    groups = F.pad((wide * factor).abs(), (0, -columns % BLOCK)).unflatten(1, (-(-columns // BLOCK), BLOCK))
    scale, inverse = _scale_and_inverse(groups.amax(dim=-1).clamp(min=1e-4), round_scale)
    codes = wide * (factor * inverse.repeat_interleave(BLOCK, dim=1)[:, :columns])
    return codes.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def run_per_channel_cast_fused(x, scale_in, token_of_row, round_scale):
    """Codes [T, H], scales [T, ceil(H / 128)], rows of x [N] -> codes [N, H], scales [ceil(N / 128), H]."""
    rows, channels = token_of_row.shape[0], x.shape[1]
    token = token_of_row.clamp(min=0).long()
    values = x.view(torch.uint8)[token].view(torch.float8_e4m3fn).float()
    values = values * scale_in[token].repeat_interleave(BLOCK, dim=1)[:, :channels]
    values = torch.where((token_of_row >= 0).unsqueeze(1), values, 0.0)
    blocks = F.pad(values, (0, 0, 0, -rows % BLOCK)).unflatten(0, (-(-rows // BLOCK), BLOCK))
    scale, inverse = _scale_and_inverse(blocks.abs().amax(dim=1).clamp(min=1e-4), round_scale)
    codes = (blocks * inverse[:, None]).flatten(0, 1)[:rows]
    return codes.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale

"""Casts to codes of 8, 4 and 12 bits and back, eager PyTorch: what a model runs that has no kernel for them."""

import torch
import torch.nn.functional as F

FP4_FLOOR = 6 * 2.0**-126


def _scale_and_inverse(amax, most, round_scale):
    limit = torch.full_like(amax, most)  # a tensor, since dividing by a number multiplies by its rounded reciprocal
    scale, inverse = amax / limit, limit / amax
    if round_scale:
        exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
        scale = (exponent << 23).view(torch.float32)
        inverse = ((254 - exponent) << 23).view(torch.float32)
    return scale, inverse


def _to_e4m3(scaled):
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _in_groups(x, group):
    """x [M, H] -> [M, ceil(H / group), group] in float32, zeros at the end."""
    return F.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-(-x.shape[1] // group), group))


def _cast_groups(x, group, round_scale):
    blocks = _in_groups(x, group)
    scale, inverse = _scale_and_inverse(blocks.abs().amax(dim=-1).clamp(min=1e-4), 448.0, round_scale)
    return _to_e4m3((blocks * inverse.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]), scale


def _packed(scale):
    """Powers of two [M, G] -> their exponents, four a word [M, ceil(G / 4)]."""
    exponent = F.pad(scale.view(torch.int32) >> 23, (0, -scale.shape[1] % 4))
    words = exponent.unflatten(1, (exponent.shape[1] // 4, 4))
    return words[..., 0] | (words[..., 1] << 8) | (words[..., 2] << 16) | (words[..., 3] << 24)


def run_per_token_cast(x, round_scale):
    """x [M, H] -> codes [M, H], scales [M, ceil(H / 128)]."""
    return _cast_groups(x, 128, round_scale)


def run_per_token_cast_ue8m0(x):
    """x [M, H] -> codes [M, H], scales [M, ceil(H / 512)]: four exponents a word."""
    codes, scale = _cast_groups(x, 128, True)
    return codes, _packed(scale)


def run_per_token_cast_mxfp8(x):
    """x [M, H] -> codes [M, H], scales [M, ceil(H / 128)]: four exponents a word."""
    codes, scale = _cast_groups(x, 32, True)
    return codes, _packed(scale)


def run_per_row_cast(x, round_scale):
    """x [M, H] -> codes [M, H], scales [M, 1]."""
    amax = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-4)
    scale, inverse = _scale_and_inverse(amax, 448.0, round_scale)
    return _to_e4m3(x.float() * inverse), scale


def run_per_token_cast_fp4(x, round_scale):
    """x [M, H] -> bytes [M, H / 2], scales [M, ceil(H / 32)]."""
    channels = x.shape[1]
    blocks = _in_groups(x, 32)
    scale, inverse = _scale_and_inverse(blocks.abs().amax(dim=-1).clamp(min=FP4_FLOOR), 6.0, round_scale)
    scaled = (blocks * inverse.unsqueeze(-1)).flatten(1)[:, :channels]
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for even, odd in ((0.25, 0.75), (1.25, 1.75), (2.5, 3.5)):
        code += (size > even).to(torch.uint8) + (size >= odd).to(torch.uint8)
    code += (size > 5.0).to(torch.uint8)
    code += torch.signbit(scaled).to(torch.uint8) * 8
    pairs = code.unflatten(1, (channels // 2, 2))
    return pairs[..., 0] + pairs[..., 1] * 16, scale


def run_per_token_cast_e5m6(x, round_scale):
    """x [M, H] -> bytes [M, 3 * H / 2], scales [M, 1]."""
    wide = x.float()
    scale, inverse = _scale_and_inverse(wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4), 65024.0, round_scale)
    bits = (wide * inverse).view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    # Cut to float16 without its last four bits, of which those below 2 ** -14 are steps of 2 ** -20.
    cut = ((bits & 0x7FFFFFFF) - (112 << 23)) >> 17
    small = (((bits & 0x7FFFFF) | 0x800000) >> (126 - exponent).clamp(0, 24)) >> 4
    code = torch.where(exponent >= 113, cut, torch.where(exponent >= 103, small, torch.zeros_like(cut)))
    code = code + (((code & 1) + (bits & 0x1FFFF)) > 0x10000).to(torch.int32) + (((bits >> 31) & 1) << 11)
    eight = code.unflatten(1, (x.shape[1] // 8, 8))
    top = (eight[..., 0] << 20) + (eight[..., 1] << 8) + (eight[..., 2] >> 4)
    middle = (eight[..., 2] << 28) + (eight[..., 3] << 16) + (eight[..., 4] << 4) + (eight[..., 5] >> 8)
    last = (eight[..., 5] << 24) + (eight[..., 6] << 12) + eight[..., 7]
    return torch.stack([top, middle, last], dim=-1).flatten(1).view(torch.uint8), scale


def _cast_blocks(x, block, round_scale):
    rows, columns = x.shape
    padded = F.pad(x.float(), (0, -columns % block, 0, -rows % block))
    down, across = padded.shape[0] // block, padded.shape[1] // block
    blocks = padded.unflatten(1, (across, block)).unflatten(0, (down, block))
    scale, inverse = _scale_and_inverse(blocks.abs().amax(dim=(1, 3)).clamp(min=1e-4), 448.0, round_scale)
    return _to_e4m3((blocks * inverse[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]), scale


def run_per_block_cast(x, round_scale):
    """x [M, H] -> codes [M, H], scales [ceil(M / 128), ceil(H / 128)]."""
    return _cast_blocks(x, 128, round_scale)


def run_per_block_cast_32(x, round_scale):
    """x [M, H] -> codes [M, H], scales [ceil(M / 32), ceil(H / 32)]."""
    return _cast_blocks(x, 32, round_scale)


def _cast_channels(x, group, round_scale):
    blocks = x.float().unflatten(0, (x.shape[0] // group, group))
    scale, inverse = _scale_and_inverse(blocks.abs().amax(dim=1).clamp(min=1e-4), 448.0, round_scale)
    return _to_e4m3((blocks * inverse[:, None]).flatten(0, 1)), scale


def run_per_channel_cast(x, round_scale):
    """x [M, H] -> codes [M, H], scales [M / 128, H]."""
    return _cast_channels(x, 128, round_scale)


def run_per_channel_cast_and_transpose(x, group, round_scale):
    """x [M, H] -> codes [H, M], scales [M / group, H]."""
    codes, scale = _cast_channels(x, group, round_scale)
    return codes.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn), scale


def run_swiglu_and_per_token_cast(x, topk_weights, weight_of_row, expert_of_row, limit, round_scale):
    """x [P, 2 * H] -> codes [P, H], scales [P, ceil(H / 128)]."""
    gate, up = x.float().chunk(2, dim=-1)
    weight = torch.where(weight_of_row >= 0, topk_weights.flatten()[weight_of_row.clamp(min=0).long()], 0.0)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    value = gate / (1.0 + torch.exp(-gate)) * up * weight.unsqueeze(1)
    return _cast_groups(torch.where((expert_of_row >= 0).unsqueeze(1), value, 0.0), 128, round_scale)


def run_cast_back(x, scale, block_rows, block_columns):
    """Codes [M, H], scales [ceil(M / block_rows), ceil(H / block_columns)] -> values [M, H] in bfloat16."""
    spread = scale.repeat_interleave(block_rows, dim=0)[: x.shape[0]]
    return (x.float() * spread.repeat_interleave(block_columns, dim=1)[:, : x.shape[1]]).to(torch.bfloat16)

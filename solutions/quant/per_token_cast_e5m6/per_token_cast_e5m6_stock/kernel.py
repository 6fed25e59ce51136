"""Codes of 12 bits with one scale a row, eager PyTorch."""

import torch


def run(x: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, H] -> bytes [M, 3 * H / 2], scales [M, 1]."""
    wide = x.float()
    amax = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    limit = torch.full_like(amax, 65024.0)
    scale, inverse = amax / limit, limit / amax
    if round_scale:
        exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
        scale = (exponent << 23).view(torch.float32)
        inverse = ((254 - exponent) << 23).view(torch.float32)
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

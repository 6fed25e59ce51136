"""Codes of 4 bits, two a byte, with a scale per 32 channels, eager PyTorch."""

import torch
import torch.nn.functional as F

BLOCK = 32
SMALLEST = 6 * 2.0**-126


def run(x: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, H] -> bytes [M, H / 2], scales [M, ceil(H / 32)]."""
    channels = x.shape[1]
    blocks = -(-channels // BLOCK)
    wide = F.pad(x.float(), (0, blocks * BLOCK - channels)).unflatten(1, (blocks, BLOCK))
    amax = wide.abs().amax(dim=-1).clamp(min=SMALLEST)
    limit = torch.full_like(amax, 6.0)
    scale, inverse = amax / limit, limit / amax
    if round_scale:
        exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
        scale = (exponent << 23).view(torch.float32)
        inverse = ((254 - exponent) << 23).view(torch.float32)
    scaled = (wide * inverse.unsqueeze(-1)).flatten(1)[:, :channels]
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for even, odd in ((0.25, 0.75), (1.25, 1.75), (2.5, 3.5)):
        code += (size > even).to(torch.uint8) + (size >= odd).to(torch.uint8)
    code += (size > 5.0).to(torch.uint8)
    code += torch.signbit(scaled).to(torch.uint8) * 8
    pairs = code.unflatten(1, (channels // 2, 2))
    return pairs[..., 0] + pairs[..., 1] * 16, scale

"""Dropout with the mask of a seed and an offset, by PyTorch's integer kernels. torch.nn.functional.dropout draws other masks."""

import torch

LOW = 0xFFFFFFFF


def _product(factor, value):
    """Return the high and the low 32 bits of a product of 32-bit numbers in int64."""
    low, high = value & 0xFFFF, value >> 16
    first = (factor & 0xFFFF) * low
    second = (factor >> 16) * low + (first >> 16)
    third = (factor & 0xFFFF) * high + (second & 0xFFFF)
    return (factor >> 16) * high + (second >> 16) + (third >> 16), (third & 0xFFFF) << 16 | first & 0xFFFF


def run(x: torch.Tensor, state: torch.Tensor, p: float) -> torch.Tensor:
    """x [N], state [2] (seed, offset) -> x / (1 - p), or 0 for an element whose random bits are less than p * 2**32."""
    block = torch.arange(-(-x.numel() // 4), device=x.device)
    a, b = block & LOW, block >> 32
    c, d = (state[1] & LOW).expand_as(block), (state[1] >> 32 & LOW).expand_as(block)
    first, second = state[0] & LOW, state[0] >> 32 & LOW
    for _ in range(10):
        high, low = _product(0xD2511F53, a)
        other, c_low = _product(0xCD9E8D57, c)
        a, b, c, d = other ^ b ^ first, c_low, high ^ d ^ second, low
        first, second = first + 0x9E3779B9 & LOW, second + 0xBB67AE85 & LOW
    bits = torch.stack((a, b, c, d), dim=-1).flatten()[: x.numel()]
    return (x.float() / (1 - p)).masked_fill_(bits < int(p * 2**32), 0.0).to(x.dtype)

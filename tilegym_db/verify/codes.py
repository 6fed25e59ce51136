"""Quantised formats as codes: neighbours on the number line differ by one, whatever the format's bits are."""

from __future__ import annotations

import torch

__all__ = ["code_values", "ordered_codes"]

_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ordered_codes(value: torch.Tensor, bits: int, *, signed_zeros: bool) -> torch.Tensor:
    """Codes as int32 in the order of the values they stand for; two codes of 4 bits come out of each byte, the low first.

    Args:
        value: the quantised tensor.
        bits: of a code.
        signed_zeros: put -0 one below 0. Else both are one code: the sign of what is too small for a code depends on whether
            products and sums are fused, since a product that underflows to 0 loses it before it is added to 0.
    """
    code = _split(value, bits)
    sign = 1 << (bits - 1)
    return torch.where(code >= sign, sign - int(signed_zeros) - code, code)


def code_values(value: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers that the codes stand for, as float32, laid out as :func:`ordered_codes` lays them out."""
    if bits == 8:
        return value.float()
    magnitudes = torch.tensor(_FP4_MAGNITUDES, device=value.device)
    code = _split(value, bits)
    return magnitudes[(code & 7).long()] * torch.where(code >= 8, -1.0, 1.0)


def _split(value: torch.Tensor, bits: int) -> torch.Tensor:
    code = value.contiguous().view(torch.uint8).to(torch.int32)
    return code if bits == 8 else torch.stack([code & 15, code >> 4], dim=-1).flatten(-2)

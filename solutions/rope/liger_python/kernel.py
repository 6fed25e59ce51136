"""Rotary embedding by Liger-Kernel, which writes over the storage of what it is given."""

import torch
from liger_kernel.ops.rope import rope_forward


def _copy(x: torch.Tensor) -> torch.Tensor:
    """The same values with heads after tokens in memory, as Liger-Kernel reads them."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def run_rope_neox(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, D] -> rotated q and k."""
    return rope_forward(_copy(q), _copy(k), cos, sin)[:2]

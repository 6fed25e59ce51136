"""Attention with a soft cap of its scores and a mask of numbers in PyTorch: the eager code of transformers' Gemma-2."""

import torch
from _lib.python.attention_heads import repeated


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, softcap: float, scale: float
) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, L, D], mask [B, 1, S, L] -> [B, Hq, S, D].

    Each step is rounded to T, except for the softmax, whose weights are rounded.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = repeated(k, group), repeated(v, group)
    scores = torch.matmul(q, keys.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    weights = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    # Heads after tokens in memory, which is how the model goes on.
    return torch.matmul(weights, values).transpose(1, 2).contiguous().transpose(1, 2)

"""Attention with values narrower than keys in PyTorch: scaled_dot_product_attention as transformers calls it."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ALIGNMENT = 16
"""Bytes that a load of PyTorch's kernels takes at once: on a GPU some of them stop at rows that start elsewhere."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start * x.element_size() % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _in_model_order(out: torch.Tensor) -> torch.Tensor:
    """Lay heads out after tokens in memory, which is how the model goes on."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, H, S, D], k [B, H, L, D], v [B, H, L, Dv] -> [B, H, S, Dv]; causal unless S is 1."""
    out = torch.nn.functional.scaled_dot_product_attention(
        _aligned(q), _aligned(k), _aligned(v), dropout_p=0.0, is_causal=q.shape[2] > 1, scale=scale
    )
    return _in_model_order(out)


def run_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the same by cuDNN, whatever PyTorch would pick."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return run(q, k, v, scale)


def run_efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the same by PyTorch's memory-efficient kernel, whatever PyTorch would pick."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return run(q, k, v, scale)

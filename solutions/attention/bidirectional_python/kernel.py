"""Attention to all keys, and of packed sequences, in PyTorch: scaled_dot_product_attention as transformers calls it."""

import itertools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ALIGNMENT = 16
"""Bytes that a load of PyTorch's kernels takes at once: on a GPU some of them stop at rows that start elsewhere."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start * x.element_size() % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, L, D] -> [B, Hq, S, D]."""
    out = torch.nn.functional.scaled_dot_product_attention(
        _aligned(q), _aligned(k), _aligned(v), dropout_p=0.0, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    # Heads after tokens in memory, which is how the model goes on.
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def run_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The same, by cuDNN alone."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return run(q, k, v, scale)


def run_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """q [M, Hq, D], k and v [M, Hkv, D], cu_seqlens [N + 1] -> [M, Hq, D]: one call for each sequence, as vision towers do it."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    ends = cu_seqlens.tolist()
    for low, high in itertools.pairwise(ends):
        if high > low:
            queries, keys, values = (_aligned(x[None, low:high].transpose(1, 2)) for x in (q, k, v))
            found = torch.nn.functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=causal and high - low > 1,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[low:high] = found[0].transpose(0, 1)
    return out

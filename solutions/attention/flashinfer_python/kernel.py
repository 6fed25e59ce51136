"""Attention by FlashInfer, for a single sequence."""

import torch
from flashinfer.decode import single_decode_with_kv_cache
from flashinfer.prefill import single_prefill_with_kv_cache

ALIGNMENT = 8
"""Elements of 16 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [1, Hq, S, D], k and v [1, Hkv, S, D] -> [1, Hq, S, D]."""
    queries, keys, values = _aligned(q)[0].transpose(0, 1), _aligned(k)[0], _aligned(v)[0]
    out = single_prefill_with_kv_cache(queries, keys, values, causal=True, kv_layout="HND", sm_scale=scale)
    return out.transpose(0, 1)[None]


def run_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [1, Hq, 1, D], k and v [1, Hkv, L, D] -> [1, Hq, 1, D].

    Several query heads share a key head in the models served: tensor cores are faster then, as FlashInfer's documentation says.
    """
    queries, keys, values = _aligned(q)[0, :, 0].contiguous(), _aligned(k)[0], _aligned(v)[0]
    shared = q.shape[1] != k.shape[1]
    if not shared:  # this kernel takes no strides
        keys, values = keys.contiguous(), values.contiguous()
    out = single_decode_with_kv_cache(queries, keys, values, kv_layout="HND", use_tensor_cores=shared, sm_scale=scale)
    return out[None, :, None]

"""Attention with a mask of flags in PyTorch: scaled_dot_product_attention as transformers calls it."""

import torch

ALIGNMENT = 16
"""Bytes that a load of PyTorch's kernels takes at once: on a GPU some of them stop at rows that start elsewhere."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start * x.element_size() % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, size = x.shape
    if times == 1:
        return x
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def _in_model_order(out: torch.Tensor) -> torch.Tensor:
    """Lay heads out after tokens in memory, which is how the model goes on."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, L, D], mask [B, 1, S, L] -> [B, Hq, S, D]. With a mask, key heads are repeated."""
    group = q.shape[1] // k.shape[1]
    keys, values = (_repeated(_aligned(x), group) for x in (k, v))
    return _in_model_order(
        torch.nn.functional.scaled_dot_product_attention(_aligned(q), keys, values, attn_mask=mask, scale=scale)
    )


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, 1, D], k and v [B, Hkv, L, D], mask [B, 1, 1, L] -> [B, Hq, 1, D].

    The query heads of a key head are rows of one product, as in transformers since 5.23. Earlier releases repeat the key heads.
    """
    batch, heads, _, size = q.shape
    rows = _aligned(q).reshape(batch, k.shape[1], heads // k.shape[1], size)
    out = torch.nn.functional.scaled_dot_product_attention(rows, _aligned(k), _aligned(v), attn_mask=mask, scale=scale)
    return _in_model_order(out.reshape(batch, heads, 1, size))


def decode_repeated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [B, Hq, 1, D], k and v [B, Hkv, L, D], mask [B, 1, 1, L] -> [B, Hq, 1, D], with repeated key heads."""
    return prefill(q, k, v, mask, scale)

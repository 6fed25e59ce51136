"""Attention with a sink in PyTorch: the eager code of transformers' gpt-oss, and FlashAttention with the sink put in after it."""

import torch

ALIGNMENT = 8
"""Elements of 16 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, size = x.shape
    if times == 1:
        return x
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, mask, scale: float) -> torch.Tensor:
    """Each step is rounded to T: the scores, what they are scaled to, the logits less their maximum, the weights."""
    group = q.shape[1] // k.shape[1]
    keys, values = _repeated(k, group), _repeated(v, group)
    scores = torch.matmul(q, keys.transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    sink = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    logits = torch.cat([scores, sink], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = torch.nn.functional.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    # Heads after tokens in memory, which is how the model goes on.
    return torch.matmul(weights, values).transpose(1, 2).contiguous().transpose(1, 2)


def prefill_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, S, D], sinks [Hq] -> [B, Hq, S, D].

    A model makes its mask once for all layers. It is made here in every call, of one sequence: S^2 numbers beside the B Hq S^2
    of the scores.
    """
    positions = torch.arange(q.shape[2], device=q.device)
    behind = positions[:, None] - positions
    mask = torch.full(behind.shape, torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    return _eager(q, k, v, sinks, mask.masked_fill_((behind >= 0) & (behind < window), 0.0), scale)


def decode_eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, 1, D], k and v [B, Hkv, L, D], sinks [Hq] -> [B, Hq, 1, D]. Without the mask of zeros that a model adds."""
    return _eager(q, k, v, sinks, None, scale)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, is_causal: bool, scale: float):
    """The operator gives the logarithm of each row's sum of exponentials, from which the share that a sink leaves follows."""
    found = torch.ops.aten._scaled_dot_product_flash_attention.default(
        _aligned(q), _aligned(k), _aligned(v), 0.0, is_causal, scale=scale
    )
    share = torch.sigmoid(found[1] - sinks.float()[:, None])
    out = (found[0].float() * share[..., None]).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def prefill_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, S, D], sinks [Hq] -> [B, Hq, S, D]; for a window that holds the whole sequence."""
    return _flash(q, k, v, sinks, True, scale)


def decode_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, 1, D], k and v [B, Hkv, L, D], sinks [Hq] -> [B, Hq, 1, D]."""
    return _flash(q, k, v, sinks, False, scale)

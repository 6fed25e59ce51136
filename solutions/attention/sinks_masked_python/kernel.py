"""Attention with a sink and a mask of numbers in PyTorch: the eager code of transformers' gpt-oss."""

import torch


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, size = x.shape
    if times == 1:
        return x
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, L, D], sinks [Hq], mask [B, 1, S, L] -> [B, Hq, S, D].

    Each step is rounded to T: the scores, what they are scaled to, their sum with the mask, the logits less their maximum, and
    the weights.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = _repeated(k, group), _repeated(v, group)
    scores = torch.matmul(q, keys.transpose(2, 3)) * scale + mask
    sink = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    logits = torch.cat([scores, sink], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = torch.nn.functional.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    # Heads after tokens in memory, which is how the model goes on.
    return torch.matmul(weights, values).transpose(1, 2).contiguous().transpose(1, 2)

"""The gradients of the eager attention of transformers' gpt-oss: its products and roundings, and those of autograd behind it."""

import torch

PAD = 8
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, size = x.shape
    if times == 1:
        return x
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def _added(x: torch.Tensor, times: int) -> torch.Tensor:
    """Add up what the query heads of a key head give."""
    return x if times == 1 else x.unflatten(1, (x.shape[1] // times, times)).sum(dim=2)


def _weights(q, keys, sinks, window: int, scale: float) -> torch.Tensor:
    """The weights of all keys and of the sink, [B, Hq, S, S + 1], each step rounded to T."""
    positions = torch.arange(q.shape[2], device=q.device)
    behind = positions[:, None] - positions
    mask = torch.full(behind.shape, torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    scores = torch.matmul(q, keys.transpose(2, 3)) * scale
    scores = scores + mask.masked_fill_((behind >= 0) & (behind < window), 0.0)
    sink = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    logits = torch.cat([scores, sink], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return torch.nn.functional.softmax(logits, dim=-1, dtype=logits.dtype)


def _worth(grad_out: torch.Tensor, values: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
    """Return grad_out values^T - along, rounded once: where one weight is nearly one, the two are nearly equal.

    So the sum along the row is part of the product, as two numbers of T, each times 1. PAD keeps rows at multiples of 16 bytes.
    """
    high = along.to(grad_out.dtype)
    low = (along - high.float()).to(grad_out.dtype)
    none = high.new_zeros(()).expand(*high.shape[:-1], PAD - 2)
    one = values.new_ones(()).expand(*values.shape[:-1], PAD)
    return torch.matmul(torch.cat([grad_out, -high, -low, none], -1), torch.cat([values, one], -1).transpose(2, 3))


def _laid_out(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Lay a gradient out as the tensor that it belongs to: heads after tokens, or in the order of the shape."""
    if like.stride(1) < like.stride(2):
        return grad.transpose(1, 2).contiguous().transpose(1, 2)
    return grad.contiguous()


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    out: torch.Tensor,
    grad_out: torch.Tensor,
) -> Gradients:
    """q, out, grad_out [B, Hq, S, D], k and v [B, Hkv, S, D], sinks [Hq] -> the gradients of q, k, v and sinks.

    Autograd has kept the weights, which are computed again here. Behind the products it runs as many elementwise operations: the
    gradients of the softmax, of the slice before it, and of the scale.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = _repeated(k, group), _repeated(v, group)
    weights = _weights(q, keys, sinks, window, scale)
    of_keys = weights[..., :-1]
    grad_v = _added(torch.matmul(of_keys.transpose(2, 3), grad_out), group)
    along = (out.float() * grad_out.float()).sum(dim=-1, keepdim=True)
    worth = _worth(grad_out, values, along)
    grad_scores = worth.mul_(of_keys).mul_(scale)
    grad_q = torch.matmul(grad_scores, keys)
    grad_k = _added(torch.matmul(grad_scores.transpose(2, 3), q), group)
    grad_sinks = -(weights[..., -1:].float() * along).sum(dim=(0, 2, 3))
    return _laid_out(grad_q, q), _laid_out(grad_k, k), _laid_out(grad_v, v), grad_sinks.to(sinks.dtype)

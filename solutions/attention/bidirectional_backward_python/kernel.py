"""Gradients of attention without a mask by the operators of PyTorch that autograd runs behind scaled_dot_product_attention.

Autograd has kept the log-sum-exp of the forward. It is no input here, so the forward is computed again.
"""

import torch

ALIGNMENT = 16
"""Bytes that a load of PyTorch's kernels takes at once: on a GPU some of them stop at rows that start elsewhere."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    aligned = all(start * x.element_size() % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1]))
    if aligned and x.stride(-1) == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _laid_out(grads: Gradients, *likes: torch.Tensor) -> Gradients:
    """Lay gradients out as the tensors that they belong to: heads after tokens, or in the order of the shape."""
    grad_q, grad_k, grad_v = (
        grad.transpose(1, 2).contiguous().transpose(1, 2) if like.stride(1) < like.stride(2) else grad.contiguous()
        for grad, like in zip(grads, likes, strict=True)
    )
    return grad_q, grad_k, grad_v


def _in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, grad_out: torch.Tensor) -> Gradients:
    """The same as three products, for what the fused kernels do not take."""
    batch, group = q.shape[0], q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    queries, grad = q.float(), grad_out.float()
    weights = torch.softmax(queries @ keys.mT * scale, dim=-1)
    grad_weights = grad @ values.mT
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    by_head = (batch, k.shape[1], group, *k.shape[2:])
    grad_k, grad_v = ((x.mT @ y).view(by_head).sum(2) for x, y in ((grad_scores, queries), (weights, grad)))
    return (grad_scores @ keys).to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor, grad_out: torch.Tensor
) -> Gradients:
    """q, out, grad_out [B, Hq, S, D], k and v [B, Hkv, L, D] -> the gradients of q, k and v."""
    if q.numel() == 0 or (q.is_cuda and (q.dtype == torch.float32 or q.shape[3] % 8)):
        return _laid_out(_in_float32(q, k, v, scale, grad_out), q, k, v)
    a, b, c, grad, given = (_aligned(x) for x in (q, k, v, grad_out, out))
    if q.is_cuda:
        made = torch.ops.aten._scaled_dot_product_flash_attention.default(a, b, c, 0.0, False, False, scale=scale)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            grad, a, b, c, given, made[1], made[2], made[3], made[4], made[5], 0.0, False, made[6], made[7], scale=scale
        )
    else:
        _, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(a, b, c, 0.0, False, scale=scale)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, a, b, c, given, sums, 0.0, False, scale=scale
        )
    return _laid_out(grads, q, k, v)

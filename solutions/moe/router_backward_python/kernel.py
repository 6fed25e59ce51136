"""Gradient of the router of Qwen3-MoE and OLMoE as autograd computes it behind transformers' code: eager, step by step."""

import torch


def run(
    logits: torch.Tensor, top_k: int, renormalise: bool, ids: torch.Tensor, grad_weights: torch.Tensor
) -> torch.Tensor:
    """logits [M, E], ids and grad_weights [M, K] -> [M, E]. Autograd has kept the probabilities; here they are computed again."""
    probabilities = torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float32)
    grad = grad_weights.to(torch.float32)
    if renormalise:
        chosen = probabilities.gather(-1, ids)
        total = chosen.sum(dim=-1, keepdim=True)
        grad = (grad - (grad * chosen).sum(dim=-1, keepdim=True) / total) / total
    grad_probabilities = torch.zeros_like(probabilities).scatter_(-1, ids, grad)
    parts = grad_probabilities * probabilities
    return torch.addcmul(parts, probabilities, parts.sum(dim=-1, keepdim=True), value=-1).to(logits.dtype)

"""The router of Qwen3-MoE, OLMoE and Qwen3-Next as transformers runs it: a softmax, a top-k, and a division."""

import torch


def run(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, E] -> weights [M, K] in the dtype of the logits, ids [M, K]."""
    probabilities = torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float32)
    weights, ids = torch.topk(probabilities, top_k, dim=-1)
    if renormalise:
        weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids

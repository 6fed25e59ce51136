"""Routers as transformers runs them, in eager PyTorch."""

import torch


def run_topk_softmax(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of Qwen3-MoE, OLMoE and Qwen3-Next as transformers runs it: a softmax, a top-k, and a division.

    logits [M, E] -> weights [M, K] in the dtype of the logits, ids [M, K].
    """
    probabilities = torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float32)
    weights, ids = torch.topk(probabilities, top_k, dim=-1)
    if renormalise:
        weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids


def run_topk_then_softmax(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of gpt-oss as transformers runs it: a top-k, and a softmax of what it found.

    logits [M, E] -> weights [M, K] in the dtype of the logits, ids [M, K].
    """
    values, ids = torch.topk(logits, top_k, dim=-1)
    return torch.nn.functional.softmax(values, dim=1, dtype=values.dtype), ids


def run_topk_softmax_groups(
    logits: torch.Tensor, top_k: int, groups: int, kept_groups: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of DeepSeek-V2 as transformers runs it.

    logits [M, E] -> weights [M, K], ids [M, K].
    """
    experts = logits.shape[-1]
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    if kept_groups < groups:
        group_scores = scores.view(-1, groups, experts // groups).max(dim=-1).values
        best = torch.topk(group_scores, k=kept_groups, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(group_scores).scatter_(1, best, 1)
        mask = mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
        scores = scores.masked_fill(~mask.bool(), 0.0)
    weights, ids = torch.topk(scores, k=top_k, dim=-1, sorted=False)
    return weights * scale, ids


def run_topk_sigmoid_bias_groups(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of DeepSeek-V3 as transformers runs it.

    logits [M, E], bias [E] -> weights [M, K], ids [M, K].
    """
    experts = logits.shape[-1]
    scores = logits.sigmoid()
    choice = scores + bias
    group_scores = choice.view(-1, groups, experts // groups).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(group_scores, k=kept_groups, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores).scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
    choice = choice.masked_fill(~mask.bool(), float("-inf"))
    ids = torch.topk(choice, k=top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids

"""The router of DeepSeek-V2 as transformers runs it."""

import torch


def run(
    logits: torch.Tensor, top_k: int, groups: int, kept_groups: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, E] -> weights [M, K], ids [M, K]."""
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

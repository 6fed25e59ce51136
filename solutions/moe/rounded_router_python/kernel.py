"""Routers that round each step to the dtype of their scores, as transformers runs them, in eager PyTorch."""

import torch


def _share(scores: torch.Tensor, left: torch.Tensor, jitter_eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the share of the best expert that is left in a softmax over those close to it, and its id."""
    best, chosen = left.max(dim=-1, keepdim=True)
    is_far = ((best - scores) / scores.abs().clamp(min=best)) > (2 * jitter_eps)
    return torch.softmax(left.masked_fill(is_far, float("-inf")), dim=-1).gather(-1, chosen), chosen


def run_sparsemixer_top2(scores: torch.Tensor, jitter_eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of Phi-3.5-MoE: scores [M, E] -> weights [M, 2] in the dtype of the scores, ids [M, 2]."""
    weight, first = _share(scores, scores, jitter_eps)
    other, second = _share(scores, torch.scatter(scores, -1, first, float("-inf")), jitter_eps)
    return torch.concat((weight, other), dim=-1), torch.concat((first, second), dim=-1)


def run_topk_softmax_rounded(
    logits: torch.Tensor, top_k: int, renormalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of Mistral 4 with one group: logits [M, E] -> weights [M, K] in the dtype of the logits, ids [M, K]."""
    scores = logits.softmax(-1)
    ids = torch.topk(scores, k=top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids

"""Routers that rank with a bias added, as transformers runs them, in eager PyTorch."""

import torch


def run_topk_softmax_bias(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, renormalise: bool, least: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of ERNIE 4.5 and LongCat-Flash: logits [M, E], bias [E] -> weights [M, K], ids [M, K]."""
    scores = logits.softmax(dim=-1)
    _, ids = torch.topk(scores + bias, top_k, dim=-1)
    weights = torch.gather(scores, dim=-1, index=ids)
    if renormalise:
        weights = weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=least)
    return weights * scale, ids


def run_topk_sigmoid_bias_rounded(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, renormalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of LFM2-MoE: logits [M, E], bias [E] -> weights [M, K] in the dtype of the logits, ids [M, K]."""
    scores = logits.sigmoid()
    _, ids = torch.topk(scores + bias, k=top_k, dim=-1)
    weights = torch.gather(scores, dim=1, index=ids)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-6)
    return weights * scale, ids

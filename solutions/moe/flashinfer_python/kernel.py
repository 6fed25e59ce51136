"""Routing as DeepSeek-V3 has it, by FlashInfer."""

import torch
from flashinfer.fused_moe import fused_topk_deepseek


def run_topk_sigmoid_bias_groups(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, E], bias [E] -> weights [M, K], ids [M, K]. It always divides the weights by their sum."""
    if not renormalise:
        raise ValueError("flashinfer.fused_moe.fused_topk_deepseek divides the weights of each token by their sum")
    weights = torch.empty(logits.shape[0], top_k, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int32, device=logits.device)
    fused_topk_deepseek(logits, bias, groups, kept_groups, top_k, scale, weights, ids)
    return weights, ids.long()

"""The routers of DeepSeek-V4 as transformers runs them, in eager PyTorch."""

import torch


def run_topk_sqrtsoftplus_bias(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of all layers but the first.

    logits [M, E], bias [E] -> weights [M, K] in the dtype of the logits, ids [M, K].
    """
    scores = torch.nn.functional.softplus(logits).sqrt()
    ids = torch.topk(scores + bias, top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def run_table_router(
    logits: torch.Tensor, token_ids: torch.Tensor, table: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of the first layers: the experts of a token are in a table.

    logits [M, E], token_ids [M], table [V, K] -> weights [M, K] in the dtype of the logits, ids [M, K].
    """
    scores = torch.nn.functional.softplus(logits).sqrt()
    ids = table[token_ids.reshape(-1)].long()
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids

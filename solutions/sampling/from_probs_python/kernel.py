"""Sampling in eager PyTorch: a sort, what is kept of the sorted row, and a search in its cumulative sum."""

import torch


def _draw(ordered: torch.Tensor, order: torch.Tensor, kept: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One of the kept indices of each row: what is kept comes first, and each has a part of 0 to the sum of what is kept."""
    kept = kept & (ordered > 0)
    mass = torch.where(kept, ordered, 0.0).cumsum(dim=-1)
    found = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)
    last = kept.sum(dim=-1, keepdim=True) - 1  # a product with the sum may round up to it
    return order.gather(-1, torch.minimum(found, last))[:, 0]


def _by_rank(ordered: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    columns = ordered.shape[-1]
    rank = torch.where((top_k < 1) | (top_k > columns), columns, top_k).long()
    return ordered >= ordered.gather(-1, rank[:, None] - 1)


def _by_mass(ordered: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    mass = ordered.cumsum(dim=-1)
    count = ((mass - ordered) < top_p[:, None] * mass[:, -1:]).sum(dim=-1, keepdim=True)
    count = torch.where(top_p[:, None] >= 1, ordered.shape[-1], count.clamp_min(1))
    return ordered >= ordered.gather(-1, count - 1)


def run_top_k(probs: torch.Tensor, top_k: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """probs [B, V], top_k [B], uniform [B] -> samples [B]."""
    ordered, order = probs.sort(dim=-1, descending=True)
    return _draw(ordered, order, _by_rank(ordered, top_k), uniform)


def run_top_p(probs: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """probs [B, V], top_p [B], uniform [B] -> samples [B]."""
    ordered, order = probs.sort(dim=-1, descending=True)
    return _draw(ordered, order, _by_mass(ordered, top_p), uniform)


def run_top_k_top_p(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """probs [B, V], top_k [B], top_p [B], uniform [B] -> samples [B]."""
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered = torch.where(_by_rank(ordered, top_k), ordered, 0.0)
    return _draw(ordered, order, _by_mass(ordered, top_p), uniform)


def run_min_p(probs: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """probs [B, V], min_p [B], uniform [B] -> samples [B]."""
    ordered, order = probs.sort(dim=-1, descending=True)
    return _draw(ordered, order, ordered >= min_p[:, None].clamp_max(1) * ordered[:, :1], uniform)


def run_greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits [B, V] -> ids [B]."""
    return torch.argmax(logits, dim=-1)

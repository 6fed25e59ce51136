"""Routing within groups of experts, in eager PyTorch."""

import torch


def run_topk_sum_and_topk_group_idx(
    scores: torch.Tensor, num_group_sum_topk: int, num_topk_groups: int
) -> torch.Tensor:
    """The best groups by the sum of their best experts: a stable sort, since torch.topk does not say which of equals it takes.

    scores [M, G, S] -> groups [M, num_topk_groups], best first.
    """
    worth = torch.topk(scores, num_group_sum_topk, dim=-1, sorted=False).values.sum(dim=-1)
    return torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, :num_topk_groups].contiguous()


def run_top2_sum_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: int,
    mask: torch.Tensor,
    fix_routing_mask: torch.Tensor,
    to_physical_map: torch.Tensor,
    logical_count: torch.Tensor,
    unmapped_topk_idx: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole router, without masks that depend on the data, which would wait for the GPU.

    logits [M, E], unmapped_topk_idx [M, num_topk], overwritten -> ids, weights [M, num_topk + num_shared_experts].
    """
    tokens, experts = logits.shape
    if scoring_func == 2:
        scores, ranked = torch.softmax(logits, dim=-1), logits + bias
    else:
        scores = logits.sigmoid() if scoring_func == 0 else torch.nn.functional.softplus(logits).sqrt()
        ranked = scores + bias
    if num_groups != num_topk_groups:
        by_group = ranked.view(tokens, num_groups, experts // num_groups)
        best = run_topk_sum_and_topk_group_idx(by_group, 2, num_topk_groups)
        closed = torch.ones(tokens, num_groups, dtype=torch.bool, device=logits.device).scatter_(1, best, False)
        ranked = by_group.masked_fill(closed.unsqueeze(-1), float("-inf")).view(tokens, experts)
    chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :num_topk]
    chosen = torch.where(fix_routing_mask.unsqueeze(1), unmapped_topk_idx, chosen)
    active = mask.unsqueeze(1)
    unmapped_topk_idx.copy_(torch.where(active, chosen, -1))
    known = torch.where(active, chosen, 0)
    weights = scores.gather(1, known)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20) * routed_scaling_factor

    shared = torch.arange(experts, experts + num_shared_experts, device=logits.device).expand(tokens, -1)
    logical = torch.cat([known, shared], dim=1)
    weights = torch.cat([weights, torch.ones_like(shared, dtype=torch.float32)], dim=1)
    token = torch.arange(tokens, device=logits.device).unsqueeze(1)
    copy = (ep_rank + token * 23333) % logical_count[logical]
    ids = to_physical_map[logical, copy].long()
    per_rank = (experts + to_physical_map.shape[1] - 1) // num_ep_ranks
    ours = active & ((ids // per_rank) % num_tp_ranks == tp_rank)
    ids = ids - tp_rank * per_rank
    ids = ids - ids // (per_rank * num_tp_ranks) * (per_rank * num_tp_ranks - per_rank)
    return torch.where(ours, ids, -1), torch.where(active, weights, 0.0)

"""What is done with the ids that a router chose, in eager PyTorch."""

import torch


def run_group_count(ids: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Occurrences of each group in eager PyTorch, without a mask that depends on the data, which would wait for the GPU.

    ids [M, K] -> counts [num_groups].
    """
    flat = ids.reshape(-1)
    bins = torch.where((flat >= 0) & (flat < num_groups), flat, num_groups)
    counts = torch.zeros(num_groups + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32))[:num_groups].clone()


def run_aux_fi(ids: torch.Tensor, num_experts: int, num_aux_topk: int) -> torch.Tensor:
    """Relative frequency of each expert in eager PyTorch, without a mask that depends on the data, which would wait for the GPU.

    ids [M, K] -> frequency [num_experts].
    """
    if ids.shape[0] == 0:
        return torch.zeros(num_experts, dtype=torch.float32, device=ids.device)
    flat = ids.reshape(-1)
    bins = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, bins, torch.ones_like(bins))[:num_experts]
    return counts.float() * num_experts / (ids.shape[0] * num_aux_topk)


def run_moe_offsets(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorted order, its inverse and the experts' ends, as transformers' grouped experts find them: two sorts, a histogram, a sum.

    ids [M, K] -> perm [M K], offs [num_experts], inverse [M K].
    """
    flat = ids.reshape(-1)
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    ordered, perm = torch.sort(keys, stable=True)
    inverse = torch.argsort(perm, stable=True)
    # histc and not bincount, which waits for the GPU; on the CPU it takes floating point alone.
    values = ordered.float() if ids.device.type == "cpu" else ordered.int()
    # One bin more for ids of no expert, without which the bounds of a single expert's would be equal, and taken for absent.
    counts = torch.histc(values, bins=num_experts + 1, min=0, max=num_experts)[:num_experts]
    return perm, torch.cumsum(counts, dim=0, dtype=torch.int32), inverse


def run_mask_indices_by_tp(
    ids: torch.Tensor, num_experts: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int
) -> torch.Tensor:
    """Expert ids of one tensor-parallel rank, renumbered, in eager PyTorch: one small kernel a step.

    ids [M, K] -> this rank's numbers [M, K], -1 for the experts of others.
    """
    per_rank = num_experts // num_ep_ranks
    per_group = num_tp_ranks * per_rank
    invalid = (ids < 0) | ((ids // per_rank) % num_tp_ranks != tp_rank)
    value = ids - tp_rank * per_rank
    value = value - (value // per_group) * (per_group - per_rank)
    return value.masked_fill_(invalid | (value < 0), -1)


def run_inplace_unique_group_indices(ids: torch.Tensor) -> tuple[()]:
    """The first of equal ids of each row, in eager PyTorch: by a stable sort.

    ids [M, K], overwritten: repeated ids of a row become -1. There is nothing else to return.
    """
    values, order = torch.sort(ids, dim=1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[:, 1:] = values[:, 1:] == values[:, :-1]
    repeated = torch.zeros_like(again).scatter_(1, order, again)
    ids.masked_fill_(repeated, -1)
    return ()


def run_normalize_weight(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights over their sum in eager PyTorch, in the order that the Definition states.

    weights [M, K] -> denominator [M], weights / denominator [M, K].
    """
    denominator = torch.full((weights.shape[0],), 1e-20, dtype=torch.float32, device=weights.device)
    for choice in range(weights.shape[1]):
        denominator = denominator + weights[:, choice]
    return denominator, weights / denominator.unsqueeze(1)

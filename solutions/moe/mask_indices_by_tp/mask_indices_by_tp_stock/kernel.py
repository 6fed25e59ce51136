"""Expert ids of one tensor-parallel rank, renumbered, in eager PyTorch: one small kernel a step."""

import torch


def run(ids: torch.Tensor, num_experts: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> torch.Tensor:
    """ids [M, K] -> this rank's numbers [M, K], -1 for the experts of others."""
    per_rank = num_experts // num_ep_ranks
    per_group = num_tp_ranks * per_rank
    invalid = (ids < 0) | ((ids // per_rank) % num_tp_ranks != tp_rank)
    value = ids - tp_rank * per_rank
    value = value - (value // per_group) * (per_group - per_rank)
    return value.masked_fill_(invalid | (value < 0), -1)

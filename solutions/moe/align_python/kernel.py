"""Rows of a grouped product in whole tiles of one expert each, in eager PyTorch."""

import torch


def run(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorted rows, the tiles' experts and where they end, without a size that depends on the data, which would wait for the GPU.

    topk_ids [M, K] int32 -> sorted_token_ids [P], expert_ids [P / block_size], num_tokens_post_padded [1], all int32.
    """
    flat = topk_ids.reshape(-1).long()
    count = flat.numel()
    size = (count + (block_size - 1) * min(num_experts, count)) // block_size * block_size
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    owners, order = torch.sort(keys, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    padded = (counts + block_size - 1) // block_size * block_size
    ends = torch.cumsum(padded, dim=0)
    first_slots, first_sorted = ends - padded, torch.cumsum(counts, dim=0) - counts
    slots = torch.arange(count, device=flat.device) - first_sorted[owners] + first_slots[owners]
    # Ids of no expert go to one slot more, which nobody sees.
    slots = torch.where(owners < num_experts, slots, size)
    rows = torch.full((size + 1,), count, dtype=torch.int32, device=flat.device)
    rows = rows.scatter_(0, slots, order.int())[:size].clone()
    firsts = torch.arange(0, size, block_size, device=flat.device)
    experts = torch.searchsorted(ends[:num_experts], firsts, right=True).int()
    total = ends[num_experts - 1 : num_experts]
    return rows, torch.where(firsts < total, experts, -1), total.int()

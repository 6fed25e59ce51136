"""Tables of a buffer of rows by expert, in eager PyTorch."""

import torch


def run_get_fused_mapping(
    ids: torch.Tensor, num_experts: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tables by a stable sort and scattered copies, without a mask that depends on the data, which would wait for the GPU.

    ids [M, K] -> pos_to_expert, pos_to_token, pos_to_token_topk [P], token_topk_to_pos [M, K], expert_start, expert_end and
    num_tokens_per_expert [num_experts], all int32; P is what any ids may need.
    """
    tokens, choices = ids.shape
    flat = ids.reshape(-1)
    rows = (flat.numel() + (alignment - 1) * num_experts) // alignment * alignment
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    aligned = (counts + alignment - 1) // alignment * alignment
    end = aligned.cumsum(0)
    start = end - aligned
    owner, order = torch.sort(keys, stable=True)
    row = start[owner] + torch.arange(flat.numel(), device=ids.device) - (counts.cumsum(0) - counts)[owner]
    # Ids of no expert go to one row more, which is cut off.
    known = owner < num_experts
    row = torch.where(known, row, rows)

    def by_row(values: torch.Tensor) -> torch.Tensor:
        return torch.full((rows + 1,), -1, dtype=torch.int32, device=ids.device).scatter_(0, row, values.int())[:rows]

    by_choice = torch.empty(flat.numel(), dtype=torch.int32, device=ids.device)
    by_choice.scatter_(0, order, torch.where(known, row, -1).int())
    experts = [part[:num_experts].int() for part in (start, end, aligned)]
    return (
        by_row(owner),
        by_row(torch.div(order, choices, rounding_mode="floor")),
        by_row(order),
        by_choice.view(tokens, choices),
        experts[0],
        experts[1],
        experts[2],
    )

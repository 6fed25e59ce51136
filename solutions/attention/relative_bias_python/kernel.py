"""The bias of each position and key from that of each distance, eager PyTorch."""

import torch


def run(values: torch.Tensor, positions: int) -> torch.Tensor:
    """values [H, P] -> [1, H, S, P - S + 1], with heads last in memory."""
    query = torch.arange(positions, device=values.device)[:, None]
    key = torch.arange(values.shape[1] - positions + 1, device=values.device)[None, :]
    found = torch.nn.functional.embedding(key - query + positions - 1, values.t())
    return found.permute([2, 0, 1]).unsqueeze(0)

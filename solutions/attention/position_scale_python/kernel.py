"""The factor of queries by their position, as transformers computes it in each layer: eager, one kernel a step."""

import torch


def run(positions: torch.Tensor, beta: float, original: int) -> torch.Tensor:
    """positions [B, S] -> factors [B, 1, S, 1] in float32; as Ministral 3 and Mistral 4."""
    scaling = 1 + beta * torch.log(1 + torch.floor(positions.float() / original))
    return scaling[:, None, :, None]

"""New keys and values behind those of earlier positions, eager PyTorch."""

import torch


def run(
    past_k: torch.Tensor, past_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """past_k [B, H, L, D], past_v [B, H, L, Dv], k [B, H, S, D], v [B, H, S, Dv] -> [B, H, L + S, D], [B, H, L + S, Dv]."""
    return torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)

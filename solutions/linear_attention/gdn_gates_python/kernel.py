"""Decay and writing strength of a Gated DeltaNet layer, as transformers runs them: eager, one kernel a step."""

import torch
import torch.nn.functional as F


def run(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [M, H], A_log, dt_bias [H] -> g [M, H] in float32, beta [M, H]; as Qwen3.5 and Qwen3-Next."""
    beta = b.sigmoid()
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return g, beta

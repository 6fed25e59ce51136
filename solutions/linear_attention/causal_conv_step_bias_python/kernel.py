"""One step of a depthwise causal convolution with a bias, as transformers runs it without the causal-conv1d library."""

import torch
import torch.nn.functional as F


def run(x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [B, D, 1], conv_state [B, D, W] (overwritten), weight [D, W], bias [D] -> [B, D, 1]."""
    inputs = torch.cat([conv_state, x], dim=-1)
    conv_state.copy_(inputs[:, :, 1:])
    # One window more than is needed, which is dropped.
    windows = F.conv1d(inputs, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return F.silu(windows[:, :, -1:])

"""Depthwise causal convolutions, as transformers runs them without the causal-conv1d library: conv1d, then SiLU."""

import torch
import torch.nn.functional as F


def _convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Pad both ends, convolve, and drop what lies behind the last position."""
    padded = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    return F.silu(padded[:, :, : x.shape[2]])


def run_causal_conv1d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [B, D, S], weight [D, W] -> [B, D, S]."""
    return _convolved(x, weight, None)


def run_causal_conv1d_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [B, D, S], weight [D, W], bias [D] -> [B, D, S]."""
    return _convolved(x, weight, bias)


def run_causal_conv1d_update(x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [B, D, 1], conv_state [B, D, W] (overwritten), weight [D, W] -> [B, D, 1]."""
    inputs = torch.cat([conv_state, x], dim=-1)
    conv_state.copy_(inputs[:, :, 1:])
    # One window more than is needed, which is dropped.
    windows = F.conv1d(inputs, weight.unsqueeze(1), groups=weight.shape[0])
    return F.silu(windows[:, :, -1:])

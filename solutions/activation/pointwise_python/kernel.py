"""Activations of MLPs without a gate, as PyTorch and transformers run them: eager ATen kernels."""

import math

import torch


def run_gelu(x: torch.Tensor) -> torch.Tensor:
    """x [M, I] -> [M, I]; as torch.nn.GELU and GELUActivation."""
    return torch.nn.functional.gelu(x)


def run_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x [M, I] -> [M, I]; as GELUTanh, and GELU with approximate='tanh'."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def run_gelu_new(x: torch.Tensor) -> torch.Tensor:
    """x [M, I] -> [M, I]; as NewGELUActivation: eight kernels."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def run_quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x [M, I] -> [M, I]; as QuickGELUActivation: three kernels."""
    return x * torch.sigmoid(1.702 * x)


def run_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """x [M, I] -> [M, I]; as ReLUSquaredActivation: two kernels."""
    return torch.square(torch.nn.functional.relu(x))

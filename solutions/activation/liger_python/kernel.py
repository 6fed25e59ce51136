"""Gated activations by Liger-Kernel."""

import torch
from liger_kernel.ops.geglu import geglu_forward
from liger_kernel.ops.swiglu import swiglu_forward, swiglu_fused_gate_up_forward


def run_swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a, b [M, I] -> [M, I]."""
    return swiglu_forward(a, b)[2]


def run_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [M, 2 * I] -> [M, I]."""
    return swiglu_fused_gate_up_forward(x)[1]


def run_gelu_tanh_and_mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a, b [M, I] -> [M, I]."""
    return geglu_forward(a, b)[2]

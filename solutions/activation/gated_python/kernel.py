"""Gated activations and their gradients as transformers and autograd run them: eager, rounded after every step."""

import torch


def run_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [M, 2 I] -> [M, I]. SiLU is rounded before the product, once more than the Definition does."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def run_swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a, b [M, I] -> [M, I], two kernels."""
    return torch.nn.functional.silu(a) * b


def run_gelu_tanh_and_mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a, b [M, I] -> [M, I], as in Gemma-3: two kernels."""
    return torch.nn.functional.gelu(a, approximate="tanh") * b


def run_swiglu_backward(a: torch.Tensor, b: torch.Tensor, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b, grad_out [M, I] -> the gradients of a and b [M, I].

    Autograd has kept silu(a); here it is computed again, so that 22 bytes an element are moved in half precision instead of 18.
    """
    activated = torch.nn.functional.silu(a)
    return torch.ops.aten.silu_backward(grad_out * b, a), grad_out * activated

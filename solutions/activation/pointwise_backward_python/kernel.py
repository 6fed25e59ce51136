"""The gradients of activations of MLPs without a gate, as autograd computes them behind transformers' code: eager ATen kernels.

Autograd has kept what each operation needs. Here the values of the forward are computed again, except for the two forms of GELU
that are one operation.
"""

import math

import torch


def run_gelu_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """x, grad_out [M, I] -> the gradient of x [M, I]; behind torch.nn.GELU and GELUActivation."""
    return torch.ops.aten.gelu_backward(grad_out, x)


def run_gelu_tanh_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """x, grad_out [M, I] -> the gradient of x [M, I]; behind GELUTanh, and GELU with approximate='tanh'."""
    return torch.ops.aten.gelu_backward(grad_out, x, approximate="tanh")


def run_gelu_new_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """x, grad_out [M, I] -> the gradient of x [M, I]; behind NewGELUActivation."""
    tanh = torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
    grad_inner = torch.ops.aten.tanh_backward(grad_out * (0.5 * x), tanh)
    grad_sum = grad_inner * math.sqrt(2.0 / math.pi)
    grad_cube = grad_sum * 0.044715 * (3.0 * torch.pow(x, 2.0))
    return grad_out * (1.0 + tanh) * 0.5 + (grad_sum + grad_cube)


def run_quick_gelu_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """x, grad_out [M, I] -> the gradient of x [M, I]; behind QuickGELUActivation."""
    sigmoid = torch.sigmoid(1.702 * x)
    return grad_out * sigmoid + torch.ops.aten.sigmoid_backward(grad_out * x, sigmoid) * 1.702


def run_relu_squared_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """x, grad_out [M, I] -> the gradient of x [M, I]; behind ReLUSquaredActivation."""
    kept = torch.nn.functional.relu(x)
    return torch.ops.aten.threshold_backward(grad_out * (2.0 * kept), kept, 0)

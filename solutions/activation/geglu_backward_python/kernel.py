"""The gradients of GELU's tanh form of one tensor times another, as autograd computes them: three ATen kernels and one more."""

import torch


def run(a: torch.Tensor, b: torch.Tensor, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b, grad_out [M, I] -> the gradients of a and b [M, I].

    Autograd has kept gelu(a); here it is computed again, so that 22 bytes an element are moved in half precision instead of 18.
    """
    activated = torch.nn.functional.gelu(a, approximate="tanh")
    return torch.ops.aten.gelu_backward(grad_out * b, a, approximate="tanh"), grad_out * activated

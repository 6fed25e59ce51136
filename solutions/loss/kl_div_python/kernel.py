"""Kullback-Leibler divergence of rows and its gradient by PyTorch's own kernels, in float32."""

import torch
import torch.nn.functional as F


def run(log_probs: torch.Tensor, target: torch.Tensor, log_target: bool) -> torch.Tensor:
    """log_probs, target [M, V] -> the divergence of each row [M] in float32."""
    terms = F.kl_div(log_probs.float(), target.float(), reduction="none", log_target=log_target)
    terms.masked_fill_(target == (-torch.inf if log_target else 0.0), 0.0)  # PyTorch multiplies 0 by infinity there
    return terms.sum(dim=-1)


def run_backward(target: torch.Tensor, grad_loss: torch.Tensor, log_target: bool) -> torch.Tensor:
    """target [M, V], grad_loss [M] -> the gradient of the log-probabilities [M, V]."""
    chance = target.float().exp() if log_target else target
    grad = torch.empty_like(target, memory_format=torch.contiguous_format)
    return torch.mul(chance, -grad_loss[:, None], out=grad)

"""The loss of direct preference optimisation and its gradients by PyTorch's own kernels."""

import torch
import torch.nn.functional as F


def run(
    chosen: torch.Tensor, rejected: torch.Tensor, ref_chosen: torch.Tensor, ref_rejected: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probabilities [N] -> loss and margin of each pair [N]."""
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return -F.logsigmoid(margin), margin


def run_backward(margin: torch.Tensor, grad_loss: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """margin, grad_loss [N] -> the gradients of the chosen and of the rejected log-probabilities [N]."""
    grad_rejected = torch.sigmoid(-margin) * (beta * grad_loss)
    return -grad_rejected, grad_rejected

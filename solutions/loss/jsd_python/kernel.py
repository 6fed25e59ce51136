"""Generalised Jensen-Shannon divergence of rows and its gradient by PyTorch's own kernels, as trainers compute it."""

import math

import torch
import torch.nn.functional as F


def run(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta: float, ignore_index: int
) -> torch.Tensor:
    """student, teacher [M, V], labels [M] -> the divergence of each token [M] in float32; 0 for an ignored one."""
    x, y = student.float(), teacher.float()
    if beta == 0:
        terms = F.kl_div(x, y, reduction="none", log_target=True)
    elif beta == 1:
        terms = F.kl_div(y, x, reduction="none", log_target=True)
    else:
        mixture = torch.logaddexp(x + math.log1p(-beta), y + math.log(beta))
        terms = F.kl_div(mixture, y, reduction="none", log_target=True).mul_(beta)
        terms.add_(F.kl_div(mixture, x, reduction="none", log_target=True), alpha=1 - beta)
    return terms.sum(dim=-1).masked_fill_(labels == ignore_index, 0.0)


def run_backward(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor,
    beta: float,
    ignore_index: int,
) -> torch.Tensor:
    """student, teacher [M, V], labels, grad_loss [M] -> the gradient of the student's log-probabilities [M, V]."""
    x, y = student.float(), teacher.float()
    if beta == 0:
        found = y.exp().neg_()
    elif beta == 1:
        found = (x - y).add_(1.0).mul_(x.exp())
    else:
        mixture = torch.logaddexp(x + math.log1p(-beta), y + math.log(beta))
        found = (x - mixture).mul_(x.exp()).mul_(1 - beta)
    grad = torch.empty_like(student, memory_format=torch.contiguous_format)
    torch.mul(found, grad_loss[:, None], out=grad)
    return grad.masked_fill_((labels == ignore_index)[:, None], 0.0)

"""Generalised Jensen-Shannon divergence of rows and its gradient by PyTorch's own kernels, as trainers compute it."""

import math

import torch
import torch.nn.functional as F


def _terms(log_probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the terms of KL(target | log_probs); PyTorch multiplies 0 by infinity where the target has no probability."""
    return F.kl_div(log_probs, target, reduction="none", log_target=True).masked_fill_(target == -torch.inf, 0.0)


def run(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta: float, ignore_index: int
) -> torch.Tensor:
    """student, teacher [M, V], labels [M] -> the divergence of each token [M] in float32; 0 for an ignored one."""
    x, y = student.float(), teacher.float()
    if beta == 0:
        terms = _terms(x, y)
    elif beta == 1:
        terms = _terms(y, x)
    else:
        mixture = torch.logaddexp(x + math.log1p(-beta), y + math.log(beta))
        terms = _terms(mixture, y).mul_(beta)
        terms.add_(_terms(mixture, x), alpha=1 - beta)
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
    elif beta < (0.25 if student.dtype == torch.float32 else 2.0**-7):
        # The mixture is almost the student: a difference of their logarithms would have few correct digits.
        far = y - x
        above = torch.expm1(far.clamp(max=80.0)).mul_(beta).log1p_()
        above.add_(far.sub_(80.0).clamp_(min=0.0))  # beyond 80 the exponential ends, and the mixture is the teacher
        found = above.mul_(x.exp()).mul_(beta - 1)
    else:
        mixture = torch.logaddexp(x + math.log1p(-beta), y + math.log(beta))
        found = (x - mixture).mul_(x.exp()).mul_(1 - beta)
    grad = torch.empty_like(student, memory_format=torch.contiguous_format)
    torch.mul(found, grad_loss[:, None], out=grad)
    if beta != 0:  # 0 times infinity
        grad.masked_fill_(student == -torch.inf, 0.0)
    return grad.masked_fill_((labels == ignore_index)[:, None], 0.0)

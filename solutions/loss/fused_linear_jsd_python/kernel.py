"""The heads of a student and a teacher, their divergence and both gradients by PyTorch's own kernels; all logits in memory."""

import math

import torch
import torch.nn.functional as F


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor,
    temperature: float,
    beta: float,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [M, H], weight [V, H], teacher_hidden [M, G], teacher_weight [V, G] -> loss [M], gradients of hidden and weight."""
    ignored = labels == ignore_index
    x = torch.log_softmax(F.linear(hidden, weight).float().div_(temperature), dim=-1)
    y = torch.log_softmax(F.linear(teacher_hidden, teacher_weight).float().div_(temperature), dim=-1)
    q = x.exp()
    if beta == 0:
        p = y.exp()
        loss = (y - x).mul_(p).sum(dim=-1)
        grad = q.sub_(p)
    elif beta == 1:
        apart = x.sub_(y)
        loss = (apart * q).sum(dim=-1)
        grad = apart.sub_(loss[:, None]).mul_(q)
    else:
        mixture = torch.logaddexp(x + math.log1p(-beta), y + math.log(beta))
        of_teacher = (y - mixture).mul_(y.exp()).sum(dim=-1)
        apart = x.sub_(mixture)
        of_student = (apart * q).sum(dim=-1)
        loss = beta * of_teacher + (1 - beta) * of_student
        grad = apart.sub_(of_student[:, None]).mul_(q).mul_(1 - beta)
    factor = (grad_loss / temperature).masked_fill_(ignored, 0.0)
    rounded = torch.empty(grad.shape, dtype=hidden.dtype, device=hidden.device)
    torch.mul(grad, factor[:, None], out=rounded)
    return loss.masked_fill_(ignored, 0.0), rounded @ weight, rounded.T @ hidden

"""Cross entropy and its gradients by PyTorch's own kernels, as transformers computes them in float32."""

import torch
import torch.nn.functional as F


def run(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [M, V], labels [M] -> loss, row_max, log_sum [M] in float32; all 0 for an ignored row."""
    ignored = labels == ignore_index
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = F.nll_loss(log_probabilities, labels, ignore_index=ignore_index, reduction="none")
    row_max, place = logits.max(dim=-1)
    log_sum = -log_probabilities.gather(-1, place[:, None])[:, 0]
    row_max = torch.where(log_sum.isnan(), log_sum, row_max.float())
    return loss, row_max.masked_fill(ignored, 0.0), log_sum.masked_fill(ignored, 0.0)


def run_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """logits [M, V], labels, row_max, log_sum, grad_loss [M] -> the gradient of the logits [M, V]."""
    ignored = labels == ignore_index
    label = torch.where(ignored, 0, labels)[:, None]
    off = torch.softmax(logits, dim=-1, dtype=torch.float32)
    of_label = logits.gather(-1, label).float() - row_max[:, None] - log_sum[:, None]
    off.scatter_(-1, label, torch.expm1(of_label))
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    torch.mul(off, grad_loss[:, None], out=grad)
    return grad.masked_fill_(ignored[:, None], 0.0)


def run_linear(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, grad_loss: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [M, H], weight [V, H], labels, grad_loss [M] -> loss [M] and the gradients of hidden and weight.

    All logits are in memory at once, in T and in float32, as in a model that is not patched.
    """
    logits = F.linear(hidden, weight)
    loss, row_max, log_sum = run(logits, labels, ignore_index)
    grad = run_backward(logits, labels, row_max, log_sum, grad_loss, ignore_index)
    return loss, grad @ weight, grad.T @ hidden

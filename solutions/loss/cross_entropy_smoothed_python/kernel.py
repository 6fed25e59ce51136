"""Cross entropy with label smoothing and z-loss, and its gradient, by PyTorch's own kernels in float32."""

import torch
import torch.nn.functional as F


def run(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, z_weight: float, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [M, V], labels [M] -> loss, row_max, log_sum [M] in float32; all 0 for an ignored row."""
    ignored = labels == ignore_index
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = F.nll_loss(log_probabilities, labels, ignore_index=ignore_index, reduction="none")
    row_max, place = logits.max(dim=-1)
    log_sum = -log_probabilities.gather(-1, place[:, None])[:, 0]
    row_max = torch.where(log_sum.isnan(), log_sum, row_max.float())
    loss = (1 - smoothing) * loss - smoothing * log_probabilities.mean(dim=-1) + z_weight * (row_max + log_sum).square()
    return loss.masked_fill(ignored, 0.0), row_max.masked_fill(ignored, 0.0), log_sum.masked_fill(ignored, 0.0)


def run_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_loss: torch.Tensor,
    smoothing: float,
    z_weight: float,
    ignore_index: int,
) -> torch.Tensor:
    """logits [M, V], labels, row_max, log_sum, grad_loss [M] -> the gradient of the logits [M, V]."""
    ignored = labels == ignore_index
    label = torch.where(ignored, 0, labels)[:, None]
    off = torch.softmax(logits, dim=-1, dtype=torch.float32)
    of_label = logits.gather(-1, label).float() - row_max[:, None] - log_sum[:, None]
    pull = 1 + 2 * z_weight * (row_max + log_sum)[:, None]
    off.mul_(pull).sub_(smoothing / logits.shape[1])
    at_label = torch.expm1(of_label) + (pull - 1) * torch.exp(of_label) + (smoothing - smoothing / logits.shape[1])
    off.scatter_(-1, label, at_label)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    torch.mul(off, grad_loss[:, None], out=grad)
    return grad.masked_fill_(ignored[:, None], 0.0)

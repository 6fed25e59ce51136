"""The head of a language model that is not trained, its loss and the gradient of its argument, by PyTorch's own kernels."""

import torch
import torch.nn.functional as F


def run(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, grad_loss: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [M, H], weight [V, H], labels, grad_loss [M] -> loss [M] and the gradient of hidden.

    All logits are in memory at once, in T and in float32, as in a model that is not patched.
    """
    ignored = labels == ignore_index
    logits = F.linear(hidden, weight)
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = F.nll_loss(log_probabilities, labels, ignore_index=ignore_index, reduction="none")
    label = torch.where(ignored, 0, labels)[:, None]
    off = log_probabilities.exp()
    off.scatter_(-1, label, torch.expm1(log_probabilities.gather(-1, label)))
    grad = torch.empty_like(logits)
    torch.mul(off, grad_loss[:, None], out=grad)
    return loss, grad.masked_fill_(ignored[:, None], 0.0) @ weight

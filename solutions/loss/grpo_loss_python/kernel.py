"""The clipped policy loss of tokens and its gradient by PyTorch's own kernels, as trainers compute it in float32."""

import torch


def run(
    logits: torch.Tensor,
    labels: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    advantages: torch.Tensor,
    temperature: float,
    beta: float,
    eps_low: float,
    eps_high: float,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [M, V], all others [M] -> loss, logp, row_max, log_sum [M] in float32; all 0 for a masked row."""
    masked = labels == ignore_index
    row_max, place = logits.max(dim=-1)
    row_max = row_max.float()
    scores = logits.float()
    if temperature != 1:
        scores = scores.div_(temperature) if scores is not logits else scores / temperature
    log_probabilities = torch.log_softmax(scores, dim=-1)
    log_sum = -log_probabilities.gather(-1, place[:, None])[:, 0]
    logp = log_probabilities.gather(-1, torch.where(masked, 0, labels)[:, None])[:, 0]
    ratio = torch.exp(logp - old_logp)
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    if beta != 0:
        apart = ref_logp - logp
        loss.add_(torch.expm1(apart) - apart, alpha=beta)
    row_max = torch.where(log_sum.isnan(), log_sum, row_max)
    return tuple(value.masked_fill(masked, 0.0) for value in (loss, logp, row_max, log_sum))


def run_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    logp: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    advantages: torch.Tensor,
    grad_loss: torch.Tensor,
    temperature: float,
    beta: float,
    eps_low: float,
    eps_high: float,
    ignore_index: int,
) -> torch.Tensor:
    """logits [M, V], all others [M] -> the gradient of the logits [M, V]."""
    masked = labels == ignore_index
    ratio = torch.exp(logp - old_logp)
    is_clipped = ((advantages < 0) & (ratio < 1 - eps_low)) | ((advantages > 0) & (ratio > 1 + eps_high))
    factor = (ratio * advantages).masked_fill_(is_clipped, 0.0)
    if beta != 0:
        factor.add_(torch.expm1(ref_logp - logp), alpha=beta)
    factor.mul_(grad_loss).div_(temperature)
    scores = logits.float()
    if temperature != 1:
        scores = scores.div_(temperature) if scores is not logits else scores / temperature
    off = torch.softmax(scores, dim=-1)
    off.scatter_(-1, torch.where(masked, 0, labels)[:, None], torch.expm1(logp)[:, None])
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    torch.mul(off, factor[:, None], out=grad)
    return grad.masked_fill_(masked[:, None], 0.0)

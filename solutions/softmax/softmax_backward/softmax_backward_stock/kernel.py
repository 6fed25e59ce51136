"""The gradient of softmax from its saved output, eager PyTorch."""

import torch


def run(out: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """out, grad_out [M, N] -> the gradient of the scores [M, N]."""
    weighted = out.to(torch.float32) * grad_out.to(torch.float32)
    return torch.addcmul(weighted, out.to(torch.float32), weighted.sum(-1, keepdim=True), value=-1).to(out.dtype)

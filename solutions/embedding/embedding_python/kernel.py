"""Rows of a table of embeddings and the gradient of the table, by PyTorch's own kernels."""

import torch
import torch.nn.functional as F


def run(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int) -> torch.Tensor:
    """ids [M], weight [V, H] -> the row of each id [M, H]."""
    return F.embedding(ids, weight, None if padding_idx < 0 else padding_idx)


def run_backward(ids: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, padding_idx: int) -> torch.Tensor:
    """ids [M], grad_out [M, H] -> the sum of the gradients of each row's tokens [V, H]."""
    if not grad_out.is_cuda:  # there PyTorch rounds after every token
        grad_out = grad_out.float()
    sums = torch.ops.aten.embedding_dense_backward(grad_out, ids, weight.shape[0], padding_idx, False)
    return sums.to(weight.dtype)

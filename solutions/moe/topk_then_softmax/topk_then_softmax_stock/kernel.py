"""The router of gpt-oss as transformers runs it: a top-k, and a softmax of what it found."""

import torch


def run(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, E] -> weights [M, K] in the dtype of the logits, ids [M, K]."""
    values, ids = torch.topk(logits, top_k, dim=-1)
    return torch.nn.functional.softmax(values, dim=1, dtype=values.dtype), ids

"""Softmax of rows by FlashInfer, as it has it for the logits of a vocabulary."""

import torch
from flashinfer.sampling import softmax

ALIGNMENT = 4
"""Elements of 32 bits that a load of the library's kernel takes at once."""


def run_softmax(x: torch.Tensor) -> torch.Tensor:
    """x [M, N] -> [M, N]."""
    return softmax(x if x.storage_offset() % ALIGNMENT == 0 else x.clone())

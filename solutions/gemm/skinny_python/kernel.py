"""Linear layers on the same rows as models call them: cuBLAS on a GPU."""

import torch
from torch.nn.functional import linear, silu


def run_qkv(
    x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K], wq [NQ, K], wk [NK, K], wv [NV, K] -> [M, NQ], [M, NK], [M, NV]."""
    return linear(x, wq), linear(x, wk), linear(x, wv)


def run_swiglu(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor) -> torch.Tensor:
    """x [M, K], wg and wu [I, K] -> [M, I]."""
    return silu(linear(x, wg)) * linear(x, wu)

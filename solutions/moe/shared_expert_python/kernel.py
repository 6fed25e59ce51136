"""The shared expert added to the routed ones, as transformers adds it."""

import torch


def run_shared_expert_add(routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """The experts' output plus the shared expert's, as transformers adds them.

    routed, shared [M, N] -> [M, N].
    """
    return routed + shared


def run_shared_expert_gate(
    routed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor
) -> torch.Tensor:
    """The gated shared expert, as transformers adds it: a linear layer of one column, then three elementwise kernels.

    routed, x, shared [M, N], weight [1, N] -> [M, N].
    """
    gate = torch.nn.functional.sigmoid(torch.nn.functional.linear(x, weight))
    return routed + gate * shared

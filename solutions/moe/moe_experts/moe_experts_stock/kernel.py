"""Experts of a mixture, one after the other, eager PyTorch."""

import torch
import torch.nn.functional as F


def run(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K], gate_up [E, 2 I, H], down [E, H, I] -> [M, H]."""
    experts, choices = gate_up.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(-1, experts, device=x.device), right=True).tolist()
    rows = torch.zeros(flat.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    for expert in range(experts):
        first, last = ends[expert], ends[expert + 1]
        if first == last:
            continue
        chosen = order[first:last]
        gate, up = F.linear(x[chosen // choices], gate_up[expert]).chunk(2, dim=-1)
        found = F.linear(F.silu(gate) * up, down[expert])
        rows[chosen] = (found * weights.flatten()[chosen, None]).to(torch.float32)
    return rows.unflatten(0, ids.shape).sum(dim=1).to(x.dtype)

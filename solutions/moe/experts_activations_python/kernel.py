"""Experts of a mixture with other code between the products, as PyTorch's own products: one by one, grouped, or all at once.

Weights are [E, 2 I, H] with gate rows first, or [E, I, H] without a gate, and [E, H, I]. Those of Llama 4 are [E, H, 2 I] with
gate columns first and [E, I, H].
"""

import torch
import torch.nn.functional as F


def _gelu_tanh_and_mul(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _squared_relu(first: torch.Tensor) -> torch.Tensor:
    return F.relu(first).square()


def _oai(alpha: float, limit: float):
    def activation(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return (up.clamp(min=-limit, max=limit) + 1) * (gate * torch.sigmoid(gate * alpha))

    return activation


def _group(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat ids sorted by expert, those of no expert last: the order, their experts, and where each expert's end."""
    flat = ids.flatten()
    keys, order = torch.sort(torch.where((flat >= 0) & (flat < experts), flat, experts))
    ends = torch.searchsorted(keys, torch.arange(experts, device=ids.device), right=True)
    return order, keys, ends.to(torch.int32)


def _one_by_one(x, ids, weights, first_w, second_w, activation) -> torch.Tensor:
    choices = ids.shape[1]
    order, _, ends = _group(ids, first_w.shape[0])
    rows = torch.zeros(order.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if first == last:
            continue
        chosen, first = order[first:last], last
        found = F.linear(activation(F.linear(x[chosen // choices], first_w[expert])), second_w[expert])
        rows[chosen] = (found * weights.flatten()[chosen, None]).to(torch.float32)
    return rows.unflatten(0, ids.shape).sum(dim=1).to(x.dtype)


def _grouped(x, ids, weights, first_w, second_w, activation) -> torch.Tensor:
    # torch's grouped product reads only from addresses that 16 divides.
    first_w, second_w = (w.clone() if w.data_ptr() % 16 else w for w in (first_w, second_w))
    product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    choices, experts = ids.shape[1], first_w.shape[0]
    order, keys, ends = _group(ids, experts)
    inner = activation(product(x[order // choices], first_w.transpose(-2, -1), offs=ends))
    found = product(inner, second_w.transpose(-2, -1), offs=ends)
    weighted = (found * weights.flatten()[order, None]).masked_fill_((keys >= experts)[:, None], 0.0)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    return weighted[place].view(-1, choices, x.shape[1]).sum(dim=1).to(x.dtype)


def run_gelu_stock(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; expert by expert."""
    return _one_by_one(x, ids, weights, gate_up, down, _gelu_tanh_and_mul)


def run_gelu_grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; ids sorted, two grouped products."""
    return _grouped(x, ids, weights, gate_up, down, _gelu_tanh_and_mul)


def run_relu2_stock(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; expert by expert."""
    return _one_by_one(x, ids, weights, up, down, _squared_relu)


def run_relu2_grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; ids sorted, two grouped products."""
    return _grouped(x, ids, weights, up, down, _squared_relu)


def run_oai_stock(x, ids, weights, gate_up, down, alpha: float, limit: float) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; expert by expert."""
    return _one_by_one(x, ids, weights, gate_up, down, _oai(alpha, limit))


def run_oai_grouped(x, ids, weights, gate_up, down, alpha: float, limit: float) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; ids sorted, two grouped products."""
    return _grouped(x, ids, weights, gate_up, down, _oai(alpha, limit))


def run_dense_stock(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [E, S, H] -> [E, S, H]; two batched products over all rows, those of zeros too."""
    gate, up = torch.bmm(x, gate_up).chunk(2, dim=-1)
    return torch.bmm(up * F.silu(gate), down)

"""Experts of a mixture as PyTorch's own products: expert by expert, grouped by expert, or batched over copies of the weights.

Weights are [E, 2 I, H] with gate rows first and [E, H, I]; those of gpt-oss [E, H, 2 I] with gate in the even columns and
[E, I, H], with biases.
"""

import torch
import torch.nn.functional as F


def _silu_and_mul(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def _clamped(limit: float):
    def activation(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)

    return activation


def _oai(alpha: float, limit: float):
    def activation(both: torch.Tensor) -> torch.Tensor:
        gate = both[..., 0::2].clamp(max=limit)
        up = both[..., 1::2].clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return activation


def _group(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat ids sorted by expert, those of no expert last: the order, their experts, and where each expert's end."""
    flat = ids.flatten()
    keys, order = torch.sort(torch.where((flat >= 0) & (flat < experts), flat, experts))
    ends = torch.searchsorted(keys, torch.arange(experts, device=ids.device), right=True)
    return order, keys, ends.to(torch.int32)


def _sum_choices(
    found: torch.Tensor, shares: torch.Tensor, used: torch.Tensor, place: torch.Tensor | None, choices: int
) -> torch.Tensor:
    """Rows times weights, zero where no expert was, put in place, and the rows of each token added."""
    weighted = (found * shares[:, None]).masked_fill_(~used[:, None], 0.0)
    if place is not None:
        weighted = weighted[place]
    return weighted.view(-1, choices, found.shape[1]).sum(dim=1).to(found.dtype)


def _one_by_one(x, ids, weights, gate_up, down, activation, biases=None):
    choices, experts = ids.shape[1], gate_up.shape[0]
    order, _, ends = _group(ids, experts)
    rows = torch.zeros(order.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if first == last:
            continue
        chosen, first = order[first:last], last
        if biases is None:
            found = F.linear(activation(F.linear(x[chosen // choices], gate_up[expert])), down[expert])
        else:
            inner = activation(x[chosen // choices] @ gate_up[expert] + biases[0][expert])
            found = inner @ down[expert] + biases[1][expert]
        rows[chosen] = (found * weights.flatten()[chosen, None]).to(torch.float32)
    return rows.unflatten(0, ids.shape).sum(dim=1).to(x.dtype)


def _aligned(weights: torch.Tensor) -> torch.Tensor:
    """A copy of what does not begin where torch's grouped product may read it."""
    return weights.clone() if weights.data_ptr() % 16 else weights


def _grouped(x, ids, weights, gate_up, down, activation, biases=None):
    gate_up, down = _aligned(gate_up), _aligned(down)
    product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    choices, experts = ids.shape[1], gate_up.shape[0]
    order, keys, ends = _group(ids, experts)
    if biases is None:
        gate_up, down = gate_up.transpose(-2, -1), down.transpose(-2, -1)
    both = product(x[order // choices], gate_up, offs=ends)
    if biases is not None:
        owners = keys.clamp(max=experts - 1)
        both = both.add_(biases[0][owners])
    found = product(activation(both), down, offs=ends)
    if biases is not None:
        found = found.add_(biases[1][owners])
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    return _sum_choices(found, weights.flatten()[order], keys < experts, place, choices)


def _batched(x, ids, weights, gate_up, down, activation, biases=None):
    flat = ids.flatten()
    used = (flat >= 0) & (flat < gate_up.shape[0])
    experts = torch.where(used, flat, 0)
    rows = x.repeat_interleave(ids.shape[1], dim=0)
    if biases is None:
        inner = activation(torch.bmm(gate_up[experts], rows[..., None])[..., 0])
        found = torch.bmm(down[experts], inner[..., None])[..., 0]
    else:
        inner = activation(torch.bmm(rows[:, None], gate_up[experts])[:, 0].add_(biases[0][experts]))
        found = torch.bmm(inner[:, None], down[experts])[:, 0].add_(biases[1][experts])
    return _sum_choices(found, weights.flatten(), used, None, ids.shape[1])


def run_stock(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; expert by expert."""
    return _one_by_one(x, ids, weights, gate_up, down, _silu_and_mul)


def run_grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; ids sorted, two grouped products."""
    return _grouped(x, ids, weights, gate_up, down, _silu_and_mul)


def run_batched(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; the weights of every pair are copied."""
    return _batched(x, ids, weights, gate_up, down, _silu_and_mul)


def run_clamp_stock(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; expert by expert."""
    return _one_by_one(x, ids, weights, gate_up, down, _clamped(limit))


def run_clamp_grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; ids sorted, two grouped products."""
    return _grouped(x, ids, weights, gate_up, down, _clamped(limit))


def run_clamp_batched(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float
) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; the weights of every pair are copied."""
    return _batched(x, ids, weights, gate_up, down, _clamped(limit))


def run_oai_stock(x, ids, weights, gate_up, gate_up_bias, down, down_bias, alpha, limit) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; expert by expert."""
    return _one_by_one(x, ids, weights, gate_up, down, _oai(alpha, limit), (gate_up_bias, down_bias))


def run_oai_grouped(x, ids, weights, gate_up, gate_up_bias, down, down_bias, alpha, limit) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; ids sorted, two grouped products."""
    return _grouped(x, ids, weights, gate_up, down, _oai(alpha, limit), (gate_up_bias, down_bias))


def run_oai_batched(x, ids, weights, gate_up, gate_up_bias, down, down_bias, alpha, limit) -> torch.Tensor:
    """x [M, H], ids and weights [M, K] -> [M, H]; the weights of every pair are copied."""
    return _batched(x, ids, weights, gate_up, down, _oai(alpha, limit), (gate_up_bias, down_bias))


def run_gemm_stock(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x [S, K], w [E, N, K], offs [E] -> [S, N]; a product for each group."""
    out = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
    first = 0
    for group, last in enumerate(offs.tolist()):
        if last > first:
            out[first:last] = F.linear(x[first:last], w[group])
        first = last
    return out


def run_gemm_torch(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x [S, K], w [E, N, K], offs [E] -> [S, N]; torch's grouped product, which leaves rows behind the last group unwritten."""
    product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    found = product(x, w.transpose(-2, -1), offs=offs)
    return found.masked_fill_((torch.arange(x.shape[0], device=x.device) >= offs[-1])[:, None], 0.0)

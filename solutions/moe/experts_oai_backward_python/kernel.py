"""Gradients of the experts of gpt-oss as autograd computes them behind transformers' grouped experts, eager PyTorch.

Autograd has kept the rows of both products; here they are computed again. Weights are [E, H, 2 I] with gate in the even columns
and [E, I, H].
"""

import torch
import torch.nn.functional as F


def _sorted(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat ids sorted by expert, those of no expert last: the order, their experts, and where each expert's end."""
    flat = ids.flatten()
    keys, order = torch.sort(torch.where((flat >= 0) & (flat < experts), flat, experts), stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, device=ids.device), right=True)
    return order, keys, ends.to(torch.int32)


def _is_read(*tensors: torch.Tensor) -> bool:
    """Return True if torch's grouped products can read tensors: on a GPU, contiguous rows of whole 16 bytes."""
    return all(
        one.is_cuda
        and one.is_contiguous()
        and one.data_ptr() % 16 == 0
        and one.shape[-1] * one.element_size() % 16 == 0
        for one in tensors
    )


def _grouped(rows: torch.Tensor, other: torch.Tensor, ends: torch.Tensor, fast: bool) -> torch.Tensor:
    """Multiply the rows of each group by its matrix of other [E, K, N]; rows after the last group are any numbers."""
    if fast:
        product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
        return product(rows, other, offs=ends)
    found = rows.new_zeros(rows.shape[0], other.shape[2])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if last > first:
            found[first:last] = rows[first:last] @ other[expert]
        first = last
    return found


def _of_weights(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, fast: bool) -> torch.Tensor:
    """Return left^T right of each group of rows, [E, N, K]; zeros for a group without rows."""
    if fast:
        product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
        return product(left.T, right, offs=ends)
    found = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if last > first:
            found[expert] = left[first:last].T @ right[first:last]
        first = last
    return found


def _of_biases(rows: torch.Tensor, keys: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the sum of the rows of each group, [E, N], added in float32, in one order; the groups' numbers are sorted."""
    sums = torch.zeros(experts + 1, rows.shape[1], dtype=torch.float32, device=rows.device)
    return sums.index_put_((keys,), rows.float(), accumulate=True)[:experts].to(rows.dtype)


def run(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float,
    limit: float,
    grad_out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """x, grad_out [M, H], ids, weights [M, K] -> the gradients of x, weights, gate_up, its bias, down, and its bias."""
    choices, experts = ids.shape[1], gate_up.shape[0]
    order, keys, ends = _sorted(ids, experts)
    token, unused, owners = order // choices, (keys >= experts)[:, None], keys.clamp(max=experts - 1)
    rows, share = x[token], weights.flatten()[order, None]
    given = grad_out[token].masked_fill_(unused, 0)
    fast = _is_read(rows, gate_up, down, down.new_empty(1, down.shape[1])) and order.shape[0] > 0  # and inner's rows
    both = _grouped(rows, gate_up, ends, fast).add_(gate_up_bias[owners]).masked_fill_(unused, 0)
    gate, up = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(min=-limit, max=limit)
    sigmoid, more = torch.sigmoid(gate * alpha), up + 1
    opened = gate * sigmoid
    inner = more * opened
    found = _grouped(inner, down, ends, fast).add_(down_bias[owners]).masked_fill_(unused, 0)
    grad_share = (given * found).sum(dim=-1)
    grad_found = given * share
    grad_down = _of_weights(inner, grad_found, ends, fast)
    grad_inner = _grouped(grad_found, down.transpose(1, 2), ends, fast).masked_fill_(unused, 0)
    grad_opened = grad_inner * more
    grad_scaled = torch.ops.aten.sigmoid_backward(grad_opened * gate, sigmoid)
    grad_both = torch.empty_like(both)
    grad_both[:, 0::2] = torch.where(both[:, 0::2] < limit, grad_opened * sigmoid + grad_scaled * alpha, 0)
    grad_both[:, 1::2] = torch.where(both[:, 1::2].abs() < limit, grad_inner * opened, 0)
    grad_gate_up = _of_weights(rows, grad_both, ends, fast)
    grad_rows = _grouped(grad_both, gate_up.transpose(1, 2), ends, fast).masked_fill_(unused, 0)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    grad_x = grad_rows[place].view(*ids.shape, x.shape[1]).sum(dim=1)
    return (
        grad_x.to(x.dtype),
        grad_share[place].view(ids.shape).to(weights.dtype),
        grad_gate_up,
        _of_biases(grad_both, keys, experts),
        grad_down,
        _of_biases(grad_found, keys, experts),
    )

"""Gradients of the experts of a mixture as autograd computes them behind transformers' grouped experts, eager PyTorch.

Autograd has kept the rows of both products; here they are computed again.
"""

import torch
import torch.nn.functional as F


def _sorted(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of flat ids by expert, those of no expert last, and where each expert's end."""
    flat = ids.flatten()
    keys, order = torch.sort(torch.where((flat >= 0) & (flat < experts), flat, experts), stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, device=ids.device), right=True)
    return order, ends.to(torch.int32)


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
    """Multiply the rows of each group by its matrix of other [E, K, N]; rows after the last group give zeros."""
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


def run(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    grad_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, grad_out [M, H], ids, weights [M, K] -> the gradients of x, weights, gate_up [E, 2 I, H] and down [E, H, I]."""
    choices, experts = ids.shape[1], gate_up.shape[0]
    order, ends = _sorted(ids, experts)
    token, used = order // choices, torch.arange(order.shape[0], device=x.device) < ends[-1]
    rows, share = x[token], weights.flatten()[order, None]
    given = grad_out[token].masked_fill_(~used[:, None], 0)
    fast = _is_read(rows, gate_up, down) and order.shape[0] > 0
    gate, up = _grouped(rows, gate_up.transpose(1, 2), ends, fast).masked_fill_(~used[:, None], 0).chunk(2, dim=-1)
    opened = F.silu(gate)
    inner = opened * up
    found = _grouped(inner, down.transpose(1, 2), ends, fast).masked_fill_(~used[:, None], 0)
    grad_share = (given * found).sum(dim=-1)
    grad_found = given * share
    grad_down = _of_weights(grad_found, inner, ends, fast)
    grad_inner = _grouped(grad_found, down, ends, fast).masked_fill_(~used[:, None], 0)
    grad_gate = torch.ops.aten.silu_backward(grad_inner * up, gate)
    grad_both = torch.cat((grad_gate, grad_inner * opened), dim=-1)
    grad_gate_up = _of_weights(grad_both, rows, ends, fast)
    grad_rows = _grouped(grad_both, gate_up, ends, fast).masked_fill_(~used[:, None], 0)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    grad_x = grad_rows[place].view(*ids.shape, x.shape[1]).sum(dim=1)
    return grad_x.to(x.dtype), grad_share[place].view(ids.shape).to(weights.dtype), grad_gate_up, grad_down

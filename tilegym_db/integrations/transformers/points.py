"""The patched forwards: flatten to the Definition's axes (a view), try the dispatcher, else run the stock code.

Outputs are allocated here with the strides that the stock code would give them, so that what follows in the model sees the
same layout. Nothing here is ever copied: a tensor that cannot be viewed in the Definition's shape runs stock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Attempt", "mlp_forward", "norm_forward", "rope_function"]

Attempt = Callable[..., bool]
"""``attempt(*inputs, *outputs) -> bool``: False means that nothing was done."""

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled


def norm_forward(stock: Callable[..., Any], attempt: Attempt, eps_attribute: str) -> Callable[..., Any]:
    """Forward of an RMSNorm over the last axis: x [..., N] -> [..., N]."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        # A tracer must see plain PyTorch; autograd must see operations it can differentiate.
        if _is_compiling() or (_grad_enabled() and (hidden_states.requires_grad or self.weight.requires_grad)):
            return stock(self, hidden_states)
        rows = _rows(hidden_states)
        if rows is None:
            return stock(self, hidden_states)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if attempt(rows, self.weight, getattr(self, eps_attribute), out):
            return out.view(hidden_states.shape)
        return stock(self, hidden_states)

    return forward


def mlp_forward(stock: Callable[..., Any], attempt: Attempt) -> Callable[..., Any]:
    """Forward of a gated MLP: the projections stay, the activation and the product become one call."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        if _is_compiling() or (_grad_enabled() and (x.requires_grad or self.gate_proj.weight.requires_grad)):
            return stock(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate_rows, up_rows = _rows(gate), _rows(up)
        if gate_rows is not None and up_rows is not None:
            out = torch.empty_like(gate_rows, memory_format=torch.contiguous_format)
            if attempt(gate_rows, up_rows, out):
                return self.down_proj(out.view(gate.shape))
        return self.down_proj(self.act_fn(gate) * up)

    return forward


def rope_function(stock: Callable[..., Any], attempt: Attempt) -> Callable[..., Any]:
    """``apply_rotary_pos_emb`` for q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [B or 1, S, D]."""

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        if unsqueeze_dim != 1 or _is_compiling() or (_grad_enabled() and (q.requires_grad or k.requires_grad)):
            return stock(q, k, cos, sin, unsqueeze_dim)
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        if attempt(q, k, cos, sin, q_out, k_out):
            return q_out, k_out
        return stock(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


def _rows(value: torch.Tensor) -> torch.Tensor | None:
    """[..., N] as [M, N] without a copy, or None where the strides do not allow it."""
    if value.dim() == 2:
        return value
    if value.dim() < 2 or value.numel() == 0:
        return None
    if value.is_contiguous():
        return value.view(-1, value.shape[-1])
    try:
        return value.view(-1, value.shape[-1])
    except RuntimeError:  # PyTorch's own answer to "can these strides be merged?"
        return None

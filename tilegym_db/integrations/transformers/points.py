"""The patched forwards: flatten to the Definition's axes (a view), try the dispatcher, else run the stock code.

Outputs are allocated here with the strides that the stock code would give them, so that what follows in the model sees the
same layout. Nothing here is ever copied: a tensor that cannot be viewed in the Definition's shape runs stock.

Every forward asks first whether anything but plain eager inference is going on. A compiler is answered before anything else
happens, so that what it traces is the stock code alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["Attempt", "Site", "attention_forward", "mlp_forward", "norm_forward", "rope_function"]

Attempt = Callable[..., bool]
"""``attempt(*inputs, *outputs) -> bool``: False means that nothing was done."""

IN_TRAINING = "the module is in training mode; model.eval() ends it"
NEEDS_GRAD = "a gradient may be asked for; torch.no_grad() or torch.inference_mode() says that none is"
TRACED = "a tracer, a transform (torch.func, forward-mode AD) or a dispatch mode must see PyTorch operations"
NOT_PLAIN = "the input is no plain tensor"
NOT_ROWS = "the input cannot be viewed as rows without a copy"
OTHER_ACTIVATION = "the activation was replaced, or has hooks"
UNPATCHED = "unpatched"

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_jit_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_Tensor = torch.Tensor


class Site:
    """What all modules of one group share: the dispatcher's ``attempt``, and the calls that never got that far.

    ``bypassed`` counts those by reason. ``close`` sends every call to the stock code from then on, also where somebody kept
    a bound method of a patched module.
    """

    __slots__ = ("attempt", "bypassed", "is_open")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.bypassed: dict[str, int] = {}
        self.is_open = True

    def close(self) -> None:
        """Let no call through any more."""
        self.is_open = False

    def bypass(self, reason: str) -> None:
        """Count a call that is left to the stock code."""
        self.bypassed[reason] = self.bypassed.get(reason, 0) + 1

    def leaves(self, training: bool, *tensors: Any) -> bool:
        """Whether the call must run the stock code whatever was measured; if so it is counted.

        Args:
            training: the module's flag. Checkpointed training runs its forward without grad and again with it, and both
                must compute the same.
            tensors: what a gradient may flow to; the first is the activation.
        """
        if training:
            self.bypass(IN_TRAINING)
        elif type(tensors[0]) is not _Tensor:
            self.bypass(NOT_PLAIN)
        elif _grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self.bypass(NEEDS_GRAD)
        elif _dispatch_modes() or _jit_tracing() or _functorch_level() or forward_ad._current_level >= 0:
            self.bypass(TRACED)
        elif not self.is_open:
            self.bypass(UNPATCHED)
        else:
            return False
        return True


def norm_forward(stock: Callable[..., Any], site: Site, eps_attribute: str) -> Callable[..., Any]:
    """Forward of an RMSNorm over the last axis: x [..., N] -> [..., N]."""

    @functools.wraps(stock)
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if _is_compiling():
            return stock(self, hidden_states)
        weight = self.weight
        if site.leaves(self.training, hidden_states, weight):
            return stock(self, hidden_states)
        rows = _rows(hidden_states)
        if rows is None:
            site.bypass(NOT_ROWS)
            return stock(self, hidden_states)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if site.attempt(rows, weight, getattr(self, eps_attribute), out):
            return out.view_as(hidden_states)
        return stock(self, hidden_states)

    return forward


def mlp_forward(stock: Callable[..., Any], site: Site, activation: Any) -> Callable[..., Any]:
    """Forward of a gated MLP: the projections stay, the activation and the product become one call.

    ``activation`` is what was probed: the class of the activation module, or the function itself.
    """

    @functools.wraps(stock)
    def forward(self: Any, x: torch.Tensor) -> Any:
        if _is_compiling() or site.leaves(self.training, x):
            return stock(self, x)
        act_fn = self.act_fn
        if not _is_as_probed(act_fn, activation):
            site.bypass(OTHER_ACTIVATION)
            return stock(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        # From here on the stock code is repeated, not called: the projections must not run twice.
        if not site.leaves(False, gate, up):
            gate_rows, up_rows = _rows(gate), _rows(up)
            if gate_rows is None or up_rows is None:
                site.bypass(NOT_ROWS)
            else:
                out = torch.empty_like(gate_rows, memory_format=torch.contiguous_format)
                if site.attempt(gate_rows, up_rows, out):
                    return self.down_proj(out.view_as(gate))
        return self.down_proj(act_fn(gate) * up)

    return forward


def _is_as_probed(act_fn: Any, activation: Any) -> bool:
    if not isinstance(act_fn, torch.nn.Module):
        return act_fn is activation
    return type(act_fn) is activation and not (
        act_fn._forward_hooks or act_fn._forward_pre_hooks or "forward" in vars(act_fn)
    )


def attention_forward(stock: Callable[..., Any], shadow: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Forward of attention: ``shadow``, the same code with another rotary function, or ``stock`` itself."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return stock(self, *args, **kwargs)
        if self.training:
            site.bypass(IN_TRAINING)
            return stock(self, *args, **kwargs)
        return shadow(self, *args, **kwargs)

    return forward


def rope_function(stock: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """``apply_rotary_pos_emb`` for q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [B or 1, S, D]."""

    @functools.wraps(stock)
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        if unsqueeze_dim != 1 or _is_compiling() or site.leaves(False, q, k, cos, sin):
            return stock(q, k, cos, sin, unsqueeze_dim)
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        if site.attempt(q, k, cos, sin, q_out, k_out):
            return q_out, k_out
        return stock(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


def _rows(value: torch.Tensor) -> torch.Tensor | None:
    """[..., N] as [M, N] without a copy; None where the strides do not allow it, or N is not the innermost one."""
    if value.dim() == 2 and value.stride(1) == 1:
        return value
    if value.dim() < 2 or value.numel() == 0:
        return None
    if value.is_contiguous() or _has_mergeable_rows(value):
        return value.view(-1, value.shape[-1])
    return None


def _has_mergeable_rows(value: torch.Tensor) -> bool:
    """Whether the leading axes, from the last to the first, are steps of one constant stride."""
    *leading, last = zip(value.shape, value.stride(), strict=True)
    steps = [(size, stride) for size, stride in leading if size != 1]
    follow = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(steps))
    return last[1] == 1 and follow

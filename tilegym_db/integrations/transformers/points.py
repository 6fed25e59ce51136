"""The patched forwards: flatten to the Definition's axes (a view), ask for a kernel, else run the stock code.

Outputs are allocated only for a call that a kernel serves. Norms, MLPs and full-width rotations get the strides that the stock
code gives them, so that what follows in the model sees the same layout; a partial rotation keeps the layout of q and k, where
stock's concatenation makes it contiguous. Nothing here is ever copied: a tensor that cannot be viewed in the Definition's shape
runs stock.

Every forward asks first whether it is being compiled: then the call becomes an operator that compilers know, or stock code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilegym_db.integrations.transformers.fusion import is_owned
from tilegym_db.integrations.transformers.rebind import unpatched_class
from tilegym_db.integrations.transformers.site import (
    HAS_HOOKS,
    HELD,
    IN_TRAINING,
    NOT_ROWS,
    OTHER_ACTIVATION,
    UNPATCHED,
    Operator,
    Site,
)

__all__ = [
    "add_norm_function",
    "attention_forward",
    "gated_mlp_forward",
    "layer_forward",
    "norm_forward",
    "packed_mlp_forward",
    "rope_function",
    "rows",
]

_is_compiling = torch.compiler.is_compiling
_hooks_of_all_modules = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
)


def norm_forward(stock: Callable[..., Any], site: Site, eps_attribute: str) -> Callable[..., Any]:
    """Forward of an RMSNorm over the last axis: x [..., N] -> [..., N]."""

    def serve(self: Any, x: torch.Tensor) -> torch.Tensor | None:
        weight = self.weight
        operator = None
        if _is_compiling():
            operator = site.traced(self.training, x, weight)
            if operator is None:
                return None
        elif site.leaves(self.training, x, weight):
            return None
        if x.dim() == 4 and not x.is_contiguous():
            # Heads before tokens, in memory behind them: the rows are the same, their order does not matter.
            heads_last = x.transpose(1, 2)
            if heads_last.is_contiguous():
                out = norm(self, heads_last, operator)
                return None if out is None else out.transpose(1, 2)
        return norm(self, x, operator)

    def norm(self: Any, x: torch.Tensor, operator: Operator | None) -> torch.Tensor | None:
        weight, eps = self.weight, getattr(self, eps_attribute)
        if operator is not None:
            traced: torch.Tensor | None = operator.call(x, weight, eps, operator.name) if _are_rows(x) else None
            return traced
        matrix = rows(x)
        if matrix is None:
            site.bypass(NOT_ROWS)
            return None
        out: torch.Tensor | None = site.ask(self.training, matrix, weight, eps)
        return out if out is None or matrix is x else out.view(x.shape)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models call norms by position. What the parameter is named differs, so that a call by keyword is for stock.
        out = serve(self, args[0]) if len(args) == 1 and not kwargs else None
        return stock(self, *args, **kwargs) if out is None else out

    return forward


def gated_mlp_forward(stock: Callable[..., Any], site: Site, activation: Any) -> Callable[..., Any]:
    """Forward of a gated MLP: the projections stay, the activation and the product become one call.

    ``activation`` is what was probed: the class of the activation module, or the function itself.
    """

    @functools.wraps(stock)
    def forward(self: Any, x: torch.Tensor) -> Any:
        act_fn = self.act_fn
        if _leaves_mlp(self, act_fn, activation, site, x):
            return stock(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        # From here on the stock code is repeated, not called: the projections must not run twice.
        out = _activate(site, self.training, gate, up)
        return self.down_proj(act_fn(gate) * up if out is None else out)

    return forward


def packed_mlp_forward(stock: Callable[..., Any], site: Site, activation: Any) -> Callable[..., Any]:
    """As :func:`gated_mlp_forward`, with gate and up in the two halves of one projection."""

    @functools.wraps(stock)
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        activation_fn = self.activation_fn
        if _leaves_mlp(self, activation_fn, activation, site, hidden_states):
            return stock(self, hidden_states)
        both = self.gate_up_proj(hidden_states)
        out = _activate(site, self.training, both)
        if out is None:
            gate, up = both.chunk(2, dim=-1)
            out = up * activation_fn(gate)
        return self.down_proj(out)

    return forward


def _leaves_mlp(module: Any, function: Any, activation: Any, site: Site, x: torch.Tensor) -> bool:
    """Whether an MLP runs its own code from the start."""
    if _is_compiling():
        return site.traced(module.training, x) is None or not _is_as_probed(function, activation)
    if site.leaves(module.training, x):
        return True
    if not _is_as_probed(function, activation):
        site.bypass(OTHER_ACTIVATION)
        return True
    return False


def _activate(site: Site, training: bool, *projections: torch.Tensor) -> torch.Tensor | None:
    """The gated activation of projections [..., I], or of a packed one [..., 2 I]; None where stock code must do it."""
    if _is_compiling():
        operator = site.traced(training, *projections)
        if operator is None or not all(_are_rows(projection) for projection in projections):
            return None
        traced: torch.Tensor = operator.call(*projections, operator.name)
        return traced
    if site.leaves(training, *projections):
        return None
    matrices = [rows(projection) for projection in projections]
    if any(matrix is None for matrix in matrices):
        site.bypass(NOT_ROWS)
        return None
    out = site.ask(training, *matrices)
    return None if out is None else out.view(*projections[0].shape[:-1], out.shape[-1])


def _is_as_probed(act_fn: Any, activation: Any) -> bool:
    if not isinstance(act_fn, torch.nn.Module):
        return act_fn is activation
    return type(act_fn) is activation and not _has_hooks(act_fn)


def attention_forward(
    stock: Callable[..., Any],
    shadow: Callable[..., Any],
    training_shadow: Callable[..., Any] | None,
    sites: Sequence[Site],
) -> Callable[..., Any]:
    """Forward of attention: a shadow, the same code with another rotary or attention function, or ``stock`` itself.

    Args:
        stock: the forward of the class.
        shadow: for modules that do not train.
        training_shadow: for those that do, which the functions in it cannot tell by what they are given; None for stock.
        sites: of the functions in the shadows; a patch opens and closes all of them together.
    """
    untrained = [site for site in sites if training_shadow is None or site.training is None]

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_compiling, training = _is_compiling(), self.training
        if not sites[0].is_open or (training and (is_compiling or training_shadow is None)):
            if not is_compiling:
                for site in sites:
                    site.bypass(IN_TRAINING if training else UNPATCHED)
            return stock(self, *args, **kwargs)
        if training and training_shadow is not None:
            for site in untrained:
                site.bypass(IN_TRAINING)
            return training_shadow(self, *args, **kwargs)
        return shadow(self, *args, **kwargs)

    return forward


def rope_function(stock: Callable[..., Any], site: Site, *, training: bool = False) -> Callable[..., Any]:
    """``apply_rotary_pos_emb`` for q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [B or 1, S, R], R <= D.

    ``training`` is the flag of the modules whose forward calls it.
    """

    @functools.wraps(stock)
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        served = None
        if unsqueeze_dim != 1:
            pass
        elif _is_compiling():
            operator = site.traced(training, q, k, cos, sin)
            if operator is not None:
                served = operator.call(q, k, cos, sin, operator.name)
        elif not site.leaves(training, q, k, cos, sin):
            served = site.ask(training, q, k, cos, sin)
        return stock(q, k, cos, sin, unsqueeze_dim) if served is None else served

    return apply_rotary_pos_emb


def layer_forward(stock: Callable[..., Any], fused: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Forward of a layer: ``fused``, the same code with the sum and its norm as one call, or ``stock`` itself."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or self.training or not site.is_open:
            if not _is_compiling():
                site.bypass(IN_TRAINING if self.training else UNPATCHED)
            return stock(self, *args, **kwargs)
        return fused(self, *args, **kwargs)

    return forward


def add_norm_function(site: Site, eps_attribute: str, norm_class: type) -> Callable[..., Any]:
    """``add_norm(layer, norm, residual, hidden) -> (normed, total)`` for what a rewritten forward passes.

    ``residual`` is only read. ``hidden`` may become the sum, since the layer's code drops it there and
    :func:`~tilegym_db.integrations.transformers.fusion.is_owned` makes sure that nobody else has it.

    Args:
        site: the call site of the fused Definition.
        eps_attribute: where the norm keeps its epsilon.
        norm_class: of the norms that were probed, as it was without a patch.
    """

    def fused(norm: Any, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        matrices = rows(residual), rows(hidden)
        if matrices[0] is None or matrices[1] is None or residual.shape != hidden.shape:
            site.bypass(NOT_ROWS)
            return None
        out: torch.Tensor | None = site.serve(*matrices, norm.weight, getattr(norm, eps_attribute))
        return None if out is None else out.view(hidden.shape)

    def add_norm(layer: Any, norm: Any, residual: torch.Tensor, hidden: torch.Tensor) -> Any:
        if unpatched_class(norm) is not norm_class or _has_hooks(norm) or any(_hooks_of_all_modules):
            site.bypass(HAS_HOOKS)
        elif not site.leaves(norm.training, hidden, residual, norm.weight):
            if type(residual) is not torch.Tensor or not is_owned(hidden):
                site.bypass(HELD)
            else:
                out = fused(norm, residual, hidden)
                if out is not None:
                    return out, hidden
        total = residual + hidden
        return norm(total), total

    return add_norm


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def rows(value: torch.Tensor) -> torch.Tensor | None:
    """[..., N] as [M, N] without a copy; None where the strides do not allow it, or N is not the innermost one."""
    if value.dim() == 2 and value.stride(1) == 1:
        return value
    return value.view(-1, value.shape[-1]) if _are_rows(value) else None


def _are_rows(value: torch.Tensor) -> bool:
    if value.dim() < 2 or value.numel() == 0:
        return False
    return value.is_contiguous() or _has_mergeable_rows(value)


def _has_mergeable_rows(value: torch.Tensor) -> bool:
    """Whether the leading axes, from the last to the first, are steps of one constant stride."""
    *leading, last = zip(value.shape, value.stride(), strict=True)
    steps = [(size, stride) for size, stride in leading if size != 1]
    follow = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(steps))
    return last[1] == 1 and follow

"""A residual sum and its norm as one call across two modules: a layer's forward is rewritten.

A Definition states in ``serving.includes`` the norm that it computes of the sum. Its first two inputs are the operands. The
others are those of the norm, in the attributes where the norm keeps them. It overwrites one operand. Training asks for the
Definition in ``serving.in_training``, which overwrites none: autograd may have kept either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilegym_db.models.call_site import (
    AUTOCAST,
    HAS_HOOKS,
    HELD,
    IN_TRAINING,
    NOT_PLAIN,
    NOT_ROWS,
    CallSite,
    has_hooks,
    is_autocast,
    rows,
    shadow_function,
    unpatched_class,
)
from tilegym_db.models.found import (
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    of_class,
)
from tilegym_db.models.parts import norm as norm_part
from tilegym_db.models.probe import Draw, Probe, device_of
from tilegym_db.models.rewrite import called_for, fused_norms, is_owned, plain_forward, rewritten
from tilegym_db.models.upstream_code import decorated_alike, without_checkpointing
from tilegym_db.records.definition_parts import ModelCode

AFTER = ("norm",)
"""A layer is found by the norms in it."""
OPERANDS = 2
DROPPED = "the layer drops the sum, whose gradient would be zeros that a kernel reads; the norm is served alone"
LEAVES = "both operands are leaves, and one kernel would write the gradients of both into the same memory"

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the layers that add to their residual stream and then call a norm that was found."""
    norms = {
        id(module): index for index, group in enumerate(others) if group.kind == "norm" for module in group.modules
    }
    called = of_class(_called)
    modules = []
    for module in model.modules():
        if not any(id(child) in norms for child in module._modules.values()):
            continue
        names = [name for name in called(module) if id(module._modules.get(name)) in norms]
        key = tuple((name, norms[id(module._modules[name])]) for name in names)
        modules += [ModuleOfPart(module, name, key) for name in names]
    return [
        replace(found, norm=others[norms[id(getattr(found.modules[0], found.function))]])
        for found in grouped("add_norm", modules)
    ]


def _called(cls: type[Module]) -> tuple[str, ...]:
    forward = plain_forward(cls)
    return () if forward is None else fused_norms(forward)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Return the Definitions that include the norm that was found."""
    norm = found.norm
    if norm is None or norm.reason or norm.match is None:
        return f"its {found.function} stays stock: {'' if norm is None else norm.reason}"
    fused = [
        definition
        for definition in known.definitions("add_norm")
        if definition.serving is not None and definition.serving.includes == norm.definition
    ]
    if not fused:
        return f"no definition describes a residual sum and {norm.definition} of it"
    return MatchCandidates(
        [DefinitionMatch(one, _code(one.serving.code, norm.match)) for one in fused]  # type: ignore[union-attr]
    )


def _code(own: Sequence[ModelCode], norm: DefinitionMatch) -> ModelCode:
    """Return the attributes and constants of the inputs: those of the norm, unless the fused Definition states others."""
    return own[0] if own else norm.code


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Add random rows to a random residual and run the norm on the sum; return the norm and the sum."""
    norm = getattr(module, found.function)
    definition, draw = match.definition, Draw(device_of(norm))
    twin, x, kept = norm_part.random_norm(norm, match, draw, OPERANDS)
    residual = draw(*x.shape)
    with torch.no_grad():
        total = residual + x
        out = type(norm).forward(twin, total)
    operands = dict(zip(list(definition.inputs)[:OPERANDS], (x, residual), strict=True))
    return {**operands, **kept}, (out, total)


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return a layer's forward with each sum and its norm as one call."""
    plain = plain_forward(calls[0].found.module_class)
    assert plain is not None, "the group was found by its source"
    functions = {called_for(found.function): _function_of(found, site) for found, site in calls}
    rewrote, forget = shadow_function(rewritten(plain, *(found.function for found, _ in calls)), functions)
    sites = [site for _, site in calls]
    sites[0].shadows.append(forget)
    return layer_forward(stock, decorated_alike(without_checkpointing(stock), rewrote), sites)


def _function_of(found: ModuleGroup, site: CallSite) -> Callable[..., Any]:
    assert found.match is not None, "only confirmed groups are patched"
    norm = getattr(found.modules[0], found.function)
    names = list(found.match.definition.inputs)[OPERANDS:]
    weights = [names.index(name) for name in found.match.definition.tensor_inputs[OPERANDS:]]
    return add_norm_function(site, norm_part.attributes_of(found.match, OPERANDS), unpatched_class(norm), weights)


def layer_forward(
    stock: Callable[..., Any], fused: Callable[..., Any], sites: Sequence[CallSite]
) -> Callable[..., Any]:
    """Return the forward of a layer: ``fused`` in eager code, else ``stock``; in training, if gradients have a Definition."""
    every = tuple(sites)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_untrained = self.training and all([site.training is None for site in every])
        if _is_compiling() or is_untrained or not any([site.is_open for site in every]):
            if not _is_compiling():
                for site in every:
                    site.bypass(IN_TRAINING if is_untrained else site.closed)
            return stock(self, *args, **kwargs)
        return fused(self, *args, **kwargs)

    return forward


def _needs_gradient(*values: Any) -> bool:
    return any([isinstance(value, torch.Tensor) and value.requires_grad for value in values])


def _are_leaves(residual: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Return True if autograd keeps the gradient of both operands. It takes views of one tensor as they are, without a copy."""
    return residual.is_leaf and hidden.is_leaf and residual.requires_grad and hidden.requires_grad


def add_norm_function(
    site: CallSite, attributes: Sequence[str | float], norm_class: type, weights: Sequence[int] = (0,)
) -> Callable[..., Any]:
    """Return ``add_norm(layer, norm, residual, (hidden,), keeps_sum) -> (normed, total)``, which a rewritten forward calls.

    ``residual`` is only read. ``hidden`` may become the sum, but not in training: the layer's code drops it there, and
    :func:`~tilegym_db.models.rewrite.is_owned` makes sure that no other code holds it.

    Args:
        site: the call site of the fused Definition.
        attributes: the norm's attributes or constants for the inputs after the two operands, in order.
        norm_class: the class of the norms that were probed, without a patch.
        weights: the places in ``attributes`` of those that are tensors, which may need a gradient.
    """
    inputs_of = norm_part.kept_by(tuple(attributes), tuple(weights))
    is_cast = norm_part.is_cast(norm_class)
    first = weights[0] if weights else None

    def as_rows(residual: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        matrices = rows(residual), rows(hidden)
        if matrices[0] is None and is_cast and residual.dim() > 2 and residual.numel():
            # The patches of an image, transposed: stock code copies every sum of them, and here the sum has rows from now on.
            matrices = residual.reshape(-1, residual.shape[-1]), matrices[1]
        if matrices[0] is None or matrices[1] is None or residual.shape != hidden.shape:
            site.bypass(NOT_ROWS)
            return None
        return matrices  # type: ignore[return-value]

    def fused(kept: list[Any], residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        matrices = as_rows(residual, hidden)
        if matrices is None:
            return None
        out: torch.Tensor | None = site.serve(*matrices, *kept)
        if out is None:
            site.unserved()
            return None
        return out.view_as(hidden)

    def trained(is_training: bool, kept: list[Any], residual: torch.Tensor, hidden: torch.Tensor) -> Any:
        matrices = as_rows(residual, hidden)
        made = None if matrices is None else site.ask(is_training, *matrices, *kept)
        return None if made is None else tuple([one.view(hidden.shape) for one in made])

    def add_norm(
        layer: Any, norm: Any, residual: torch.Tensor, box: tuple[torch.Tensor], keeps_sum: bool = True
    ) -> Any:
        (hidden,) = box
        if unpatched_class(norm) is not norm_class or has_hooks(norm):
            site.bypass(HAS_HOOKS)
        elif not site.falls_back(norm.training, hidden, residual, *(kept := inputs_of(norm, hidden))):
            if is_cast and is_autocast(hidden):
                site.bypass(AUTOCAST)
            elif first is not None and type(kept[first]) not in norm_part.PLAIN_WEIGHTS:
                site.bypass(NOT_PLAIN)
            elif norm.training or (torch.is_grad_enabled() and _needs_gradient(residual, hidden, *kept)):
                if type(residual) is not torch.Tensor:
                    site.bypass(NOT_PLAIN)
                elif not keeps_sum:
                    site.bypass(DROPPED)
                elif _are_leaves(residual, hidden):
                    site.bypass(LEAVES)
                elif (made := trained(norm.training, kept, residual, hidden)) is not None:
                    return made
            elif type(residual) is not torch.Tensor or not is_owned(box):
                site.bypass(HELD)
            else:
                out = fused(kept, residual, hidden)
                if out is not None:
                    return out, hidden
        total = residual + hidden
        return norm(total), total

    return add_norm

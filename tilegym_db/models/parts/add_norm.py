"""A residual sum and its norm as one call across two modules: a layer's forward is rewritten.

A Definition states in ``serving.includes`` the norm that it computes of the sum. Its first two inputs are the operands. The
others are those of the norm, in the attributes where the norm keeps them. It overwrites one operand. Training asks for the
Definition in ``serving.in_training``, which overwrites none: autograd may have kept either.

The last sum of a layer and the first norm of the next one are also one call. The layer leaves the normed rows on the sum, and the
next layer takes them if it gets the same tensor, unchanged, and norms it with the same module. Otherwise it norms its input.
Only the forward of a model has such sums. Other code that calls layers may change weights between two of them.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from tilegym_db.models.probe import Draw, Probe, are_close, device_of
from tilegym_db.models.rewrite import (
    FIRST_NORM,
    LAST_SUM,
    called_for,
    first_norm,
    fused_norms,
    is_owned,
    plain_forward,
    rewritten,
)
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
        replace(
            found, norm=others[norm], followers=_followers(model, found, {key for key in norms if norms[key] == norm})
        )
        for found in grouped("add_norm", modules)
        for norm in (norms[id(getattr(found.modules[0], found.function))],)
    ]


def _followers(model: Module, found: ModuleGroup, alike: set[int]) -> tuple[tuple[Module, Module], ...]:
    """Return pairs of layers in a row that are both in a group. The second norms its input first, by a norm of ``alike``."""
    first = of_class(_first)
    layers = {id(layer) for layer in found.modules if id(layer._modules.get(first(layer))) in alike}
    rows_of_layers = [[*one._modules.values()] for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    return tuple(
        (before, after)
        for row in rows_of_layers
        for before, after in itertools.pairwise(row)
        if before is not None and after is not None and {id(before), id(after)} <= layers
    )


def _first(cls: type[Module]) -> str:
    forward = plain_forward(cls)
    return "" if forward is None else first_norm(forward)


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


def AGREES(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Return True if the sums have the same bits, and their norms differ by roundings only: the norm alone had its bits."""
    return are_close(returned, expected) and torch.equal(returned[-1], expected[-1])


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return a layer's forward with each sum and its norm as one call."""
    plain = plain_forward(calls[0].found.module_class)
    assert plain is not None, "the group was found by its source"
    asked = {found.function: _function_of(found, site) for found, site in calls}
    functions: dict[str, Any] = {called_for(name): function for name, function in asked.items()}
    # Groups whose norms are those of the first norm have the same pairs of layers.
    chained = next((found for found, _ in calls if found.followers), None)
    if chained is not None:
        file = plain.__code__.co_filename
        functions |= ends_of(asked[chained.function], first_norm(plain), chained.followers, file)
    names = [found.function for found, _ in calls]
    rewrote, forget = shadow_function(rewritten(plain, *names, with_ends=chained is not None), functions)
    sites = [site for _, site in calls]
    sites[0].shadows.append(forget)
    return layer_forward(stock, decorated_alike(without_checkpointing(stock), rewrote), sites)


def _function_of(found: ModuleGroup, site: CallSite) -> Callable[..., Any]:
    assert found.match is not None, "only confirmed groups are patched"
    norm = getattr(found.modules[0], found.function)
    names = list(found.match.definition.inputs)[OPERANDS:]
    weights = [names.index(name) for name in found.match.definition.tensor_inputs[OPERANDS:]]
    return add_norm_function(site, norm_part.attributes_of(found.match, OPERANDS), unpatched_class(norm), weights)


NORMED = "_tilegym_db_normed"
"""The attribute of a sum, between two layers, with the norm of the next layer, the version of the sum and the normed rows."""
MAX_UNREAD = 64
"""Normed rows that no layer took. Code between the layers changes their sums, so the next ones norm what they get."""
MAX_CALLERS = 12
"""Calls between the forward of a model and the last sum of its layer: wrappers of PyTorch, transformers and this package."""

_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled


def ends_of(
    add_norm: Callable[..., Any], name: str, followers: Sequence[tuple[Module, Module]], file: str
) -> dict[str, Callable[..., Any]]:
    """Return the functions that the rewritten forward of a layer calls for its last sum and its first norm.

    Args:
        name: the attribute of the first norm.
        followers: layers and the ones after them.
        file: with the forward of the layers and that of the model that calls them.
    """
    after = {id(layer): (weakref.ref(layer), weakref.ref(later)) for layer, later in followers}
    unread = [0]

    def last_sum(layer: Any, residual: Any, box: tuple[Any], is_swapped: bool = False) -> Any:
        norm = None if unread[0] > MAX_UNREAD else _norm_after(after, layer, name)
        may_ask = norm is not None and not (norm.training or _grad_enabled() or _is_inference())
        # Without gradients a tensor of inference mode may come from within the layer; it has no version.
        may_ask = may_ask and type(box[0]) is torch.Tensor and not box[0].is_inference() and _is_called_in(file)
        made = add_norm(None, norm, residual, box) if may_ask else None
        if made is None:  # the operands may be tuples, whose order counts
            return box[0] + residual if is_swapped else residual + box[0]
        normed, total = made
        setattr(total, NORMED, (norm, total._version, normed))
        unread[0] += 1
        return total

    def first_norm(norm: Any, x: Any) -> Any:
        left = getattr(x, NORMED, None)
        if left is None:
            return norm(x)
        delattr(x, NORMED)
        its_norm, version, normed = left
        # The rows have no gradient, and a caller may enable gradients between two layers.
        if its_norm is not norm or norm.training or _grad_enabled() or _is_inference() or x._version != version:
            return norm(x)
        unread[0] -= 1
        return normed

    return {LAST_SUM: last_sum, FIRST_NORM: first_norm}


def _norm_after(after: Mapping[int, tuple[Any, Any]], layer: Module, name: str) -> Module | None:
    """Return the first norm of the layer after a layer; None if there is none, or if either has hooks.

    Hooks may bring weights to this device, or change the sum, also where its version does not tell.
    """
    own, later = after.get(id(layer), (_nothing, _nothing))
    following = later()
    if following is None or own() is not layer or has_hooks(layer) or has_hooks(following):
        return None
    found: Module | None = following._modules.get(name)
    return found


def _is_called_in(file: str) -> bool:
    """Return True if a ``forward`` in a file calls the layer whose forward asks :func:`ends_of` for its last sum."""
    frame: Any = sys._getframe(3)  # the caller of that forward
    for _ in range(MAX_CALLERS):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def _nothing() -> None:
    return None


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

    Without a kernel, the layer's own operations run. If ``layer`` is None, the result is None then, as the caller has them.
    ``residual`` is only read. ``hidden`` may become the sum, but not in training: the layer's code drops it there, and
    :func:`~tilegym_db.models.rewrite.is_owned` makes sure that no other code holds it.

    Args:
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
        if layer is None:
            return None
        total = residual + hidden
        return norm(total), total

    return add_norm

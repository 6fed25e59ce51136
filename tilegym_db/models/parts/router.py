"""Routers of mixtures: the product stays, and the code that chooses experts from its scores becomes one call.

The first input of a Definition is the scores [M, E], and its outputs are the weights and the ids [M, K]. A tensor with one value
per token, [M, ...], is an argument of the forward after the hidden states. Every other input is an attribute of the module. It
has the same name unless ``serving.code`` states another, or states a constant.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.call_site import AUTOCAST, IN_TRAINING, NOT_PLAIN, NOT_ROWS, CallSite, shadow_function
from tilegym_db.models.found import (
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    is_plain,
    methods,
    of_class,
)
from tilegym_db.models.parts.mlp import likeness
from tilegym_db.models.probe import ROWS, Draw, Probe, device_of
from tilegym_db.models.rewrite import ROUTE, is_routing, with_route
from tilegym_db.records import Definition
from tilegym_db.records.dtypes import INTEGER_DTYPES

WEIGHT = "weight"
HIDDEN = "hidden_dim"
"""Attribute of every router of transformers with the size of its hidden states."""
SPACING = 1 / 32
"""Step of the scores in the probe. They are different multiples of it, which bf16 holds exactly up to 512 experts."""
BIAS = 0.1
WORDS = 8
"""Tokens in the vocabulary of the probe; each has a row in a table."""
UNDESCRIBED = {
    "a377593016464ea5": "no definition describes routing weights in float32 from scores of another dtype",
}
"""Known code that no Definition describes: Mixtral."""

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules with a matrix as weight whose code computes scores and returns them with two more results."""
    routes = of_class(_routes)
    modules = []
    for module in model.modules():
        weight = module._parameters.get(WEIGHT)
        if weight is not None and weight.dim() == 2 and routes(module):
            modules.append(ModuleOfPart(module, detail=(likeness(module), weight.shape)))
    return grouped("router", modules)


def _routes(cls: type[Module]) -> bool:
    forward: Any = cls.forward
    return is_plain(forward) and not forward.__code__.co_freevars and is_routing(forward)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward."""
    cls = found.module_class
    matches = known.look_up("router", cls.forward, methods(cls), "its router forward", UNDESCRIBED)
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run a router with the same number of experts on the rows of a unit matrix, so that its scores are its weights."""
    draw, twin = Draw(device_of(module)), copy.copy(module)
    experts = module._parameters[WEIGHT].shape[0]  # type: ignore[union-attr]
    inputs = _drawn(module, match, draw, experts)
    if isinstance(inputs, str):
        return inputs
    if not hasattr(module, HIDDEN):
        return f"it has no {HIDDEN}"
    ranks = torch.stack([draw(experts).float().argsort() for _ in range(ROWS)], dim=1)
    scores = (SPACING * (ranks - experts // 2)).to(torch.bfloat16)
    zeros = {name: scores.new_zeros(experts) for name in module._parameters if name != WEIGHT}
    passed = {name: inputs[name] for name in _passed(match.definition)}
    kept = {
        match.attribute(name): value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and name not in passed
    }
    vars(twin).update({HIDDEN: ROWS})
    vars(twin)["_parameters"] = {**module._parameters, **zeros, WEIGHT: scores}
    vars(twin)["_buffers"] = {**module._buffers, **kept}
    states = torch.eye(ROWS, dtype=torch.bfloat16, device=scores.device)
    try:
        with torch.no_grad():
            logits, weights, ids = type(module).forward(twin, states, *passed.values())
    except (
        IndexError,
        RuntimeError,
        TypeError,
    ) as error:  # a model's code may raise for settings that do not fit together
        return f"it cannot be probed: {type(error).__name__}: {error}"
    return {next(iter(match.definition.inputs)): logits, **inputs}, (weights, ids)


def _passed(definition: Definition) -> tuple[str, ...]:
    """Return the inputs that are arguments after the hidden states, in order: tensors with one value per token."""
    (_, scores), *others = definition.inputs.items()
    tokens = (scores.shape or ())[:1]
    return tuple(name for name, spec in others if spec.shape and spec.shape[:1] == tokens)


def _drawn(module: Module, match: DefinitionMatch, draw: Draw, experts: int) -> dict[str, Any] | str:
    """Return every input but the scores, with the module's settings and random tensors; or the reason if one is missing."""
    inputs: dict[str, Any] = {}
    passed = _passed(match.definition)
    for name, spec in list(match.definition.inputs.items())[1:]:
        kept = getattr(module, match.attribute(name), None)
        if spec.is_scalar:
            reason = match.why_no_number(module, name)
            if reason:
                return reason
            inputs[name] = match.value(module, name)
        elif name in passed:
            inputs[name] = draw(WORDS).float().argsort()[:ROWS]
        elif not isinstance(kept, torch.Tensor):
            return f"it has no {match.attribute(name)}"
        elif kept.dim() == 2:  # a table with the experts of each token
            rows = [draw(experts).float().argsort()[: kept.shape[1]] for _ in range(WORDS)]
            inputs[name] = torch.stack(rows).to(getattr(torch, spec.dtype))
        else:
            inputs[name] = BIAS * draw(experts).to(getattr(torch, spec.dtype))
    return inputs


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a router: hidden states [..., H] -> (scores [M, E], weights [M, K], ids [M, K])."""
    ((found, site),) = calls
    assert found.match is not None, "only confirmed groups are patched"
    routed, forget = shadow_function(with_route(stock), {ROUTE: route_function(site, found.match)})
    site.shadows.append(forget)
    return routed_forward(stock, routed, site)


def routed_forward(stock: Callable[..., Any], routed: FunctionType, site: CallSite) -> Callable[..., Any]:
    """Return the forward of a router: ``routed`` in inference, else ``stock``."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training or not site.is_open:
            if not _is_compiling():
                site.bypass(IN_TRAINING if self.training else site.closed)
            return stock(self, *args, **kwargs)
        return routed(self, *args, **kwargs)

    return forward


def route_function(site: CallSite, match: DefinitionMatch) -> Callable[..., Any]:
    """Return ``route(module, scores [M, E], *others) -> (weights, ids)`` by a kernel, or None to go on in the model's code.

    ``others`` are the arguments of the forward after the hidden states.
    """
    definition = match.definition
    passed = _passed(definition)
    kept = [(name, spec) for name, spec in list(definition.inputs.items())[1:] if name not in passed]
    tensors = [match.attribute(name) for name, spec in kept if not spec.is_scalar and spec.dtype not in INTEGER_DTYPES]

    def inputs_of(module: Any, others: Sequence[Any]) -> list[Any]:
        values = {name: match.value(module, name) for name, _ in kept}
        values |= {name: tokens.reshape(-1) for name, tokens in zip(passed, others, strict=False)}
        return [values[name] for name in list(definition.inputs)[1:]]

    def route(module: Any, scores: torch.Tensor, *others: Any) -> Any:
        if type(scores) is torch.Tensor and not scores.is_meta and torch.is_autocast_enabled(scores.device.type):
            if not _is_compiling():
                site.bypass(AUTOCAST)
            return None
        plain = all(type(tokens) is torch.Tensor for tokens in others[: len(passed)])
        if _is_compiling():
            operator = site.traced(module.training, scores, *[getattr(module, name) for name in tensors])
            if operator is None or scores.dim() != 2 or not plain:
                return None
            return operator.call(scores, *inputs_of(module, others), operator.name)
        if site.falls_back(module.training, scores):
            return None
        if scores.dim() != 2 or not plain:
            site.bypass(NOT_ROWS if plain else NOT_PLAIN)
            return None
        return site.ask(module.training, scores, *inputs_of(module, others))

    return route

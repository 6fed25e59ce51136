"""The forget gate of Kimi Delta Attention: two linear layers stay, and the decays that follow from their output become one call.

A Definition states the fingerprint of the forward and the names of the layers, ``first`` and ``second``. Its first input is the
output of the second one, [M, H, K]; the others are the logarithms of rates [H] and the biases [H, K] of the module.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tilegym_db.models.call_site import AUTOCAST, NOT_ROWS, CallSite, is_autocast
from tilegym_db.models.found import (
    WRAPPED,
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    methods,
    of_class,
)
from tilegym_db.models.probe import Draw, Probe, are_close, device_of
from tilegym_db.models.upstream_code import of_models

KIND = "forget_gate"
FIRST, SECOND = "first", "second"
"""The roles of the linear layers in ``serving.code``."""
LEADING = (2, 3)
"""Sequences and tokens of the probe."""
AGREES = are_close

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward a Definition states."""
    is_stated = of_class(lambda cls: known.is_stated(KIND, cls.forward))
    return grouped(
        KIND, [ModuleOfPart(module, detail=device_of(module)) for module in model.modules() if is_stated(module)]
    )


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward."""
    cls = found.module_class
    if hasattr(cls.forward, "__wrapped__"):
        return WRAPPED
    matches = known.look_up(KIND, cls.forward, methods(cls), "its forward", {})
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the forward with layers that pass everything on, and with drawn tensors."""
    first, *kept = match.definition.tensor_inputs
    rates = kept[0]
    layers = {match.attribute(FIRST), match.attribute(SECOND)}
    missing = [name for name in (*layers, *map(match.attribute, kept)) if not hasattr(module, name)]
    if missing:
        return f"it has no {missing[0]}, which serving.code of {match.definition.name} names"
    draw, twin = Draw(device_of(module)), copy.copy(module)
    values = {name: draw(*getattr(module, match.attribute(name)).shape) for name in kept}
    vars(twin)["_modules"] = {**module._modules, **dict.fromkeys(layers, torch.nn.Identity())}
    vars(twin)["_parameters"] = {
        **module._parameters,
        **{match.attribute(name): torch.nn.Parameter(value, requires_grad=False) for name, value in values.items()},
    }
    heads = values[rates].numel()
    x = draw(*LEADING, max(value.numel() for value in values.values()))
    try:
        with torch.no_grad():
            decays = found.module_class.forward(twin, x)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    shaped = (one.view(heads, -1) if name != rates else one.view(heads) for name, one in values.items())
    inputs = {first: x.view(-1, heads, x.shape[-1] // heads), **dict(zip(values, shaped, strict=True))}
    return inputs, (decays.flatten(0, 1),)


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a gate: hidden states [..., N] -> decays [..., H, K]."""
    ((found, site),) = calls
    match = found.match
    assert match is not None, "only confirmed groups are patched"
    layers = match.attribute(FIRST), match.attribute(SECOND)
    return gate_forward(stock, site, layers, [match.attribute(name) for name in match.definition.tensor_inputs[1:]])


def gate_forward(
    stock: Callable[..., Any], site: CallSite, layers: tuple[str, str], kept: Sequence[str]
) -> Callable[..., Any]:
    """Return the forward; ``layers`` are the names of both layers, and ``kept`` those of the tensors after the first input."""

    def why_stock(states: torch.Tensor) -> str:
        if is_autocast(states):
            return AUTOCAST
        return "" if states.dim() == 3 and states.numel() else NOT_ROWS

    @functools.wraps(stock)
    def forward(self: Any, hidden_states: Any) -> Any:
        rates, biases = tensors = [getattr(self, name) for name in kept]
        if _is_compiling() or site.falls_back(self.training, hidden_states, *tensors):
            return stock(self, hidden_states)
        reason = why_stock(hidden_states)
        if reason:
            site.bypass(reason)
            return stock(self, hidden_states)
        first, second = (getattr(self, name) for name in layers)
        x = second(first(hidden_states))
        shape = rates.numel(), biases.numel() // rates.numel()
        decays = site.ask(self.training, x.reshape(-1, *shape), rates.view(-1), biases.view(shape))
        if decays is not None:
            return decays.view(*x.shape[:-1], *decays.shape[1:])
        # The layers do not run again: their output stands in for the hidden states, and identities for the layers.
        return stock(_Passing(self, layers), x)

    return forward


class _Passing:
    """A stand-in for a module whose two layers pass everything on."""

    def __init__(self, module: Module, layers: tuple[str, str]) -> None:
        self._module, self._layers = module, layers

    def __getattr__(self, name: str) -> Any:
        return torch.nn.Identity() if name in self._layers else getattr(self._module, name)

"""Hyper-connections: a module that reads all residual streams and returns a sub-layer's input, sometimes with coefficients.

The first input of a Definition is the streams [M, C, H], and every output begins with M. Every other input is an attribute of
the module. It has the same name unless ``serving.code`` states another, or states a constant. If the attribute is a module, such
as a norm without a weight, the input is its ``eps``. The attribute for the role ``streams`` has the number of streams.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tilegym_db.models.call_site import AUTOCAST, HAS_HOOKS, NOT_ROWS, CallSite, has_hooks, unpatched_class
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
from tilegym_db.models.parts.mlp import likeness
from tilegym_db.models.probe import ROWS, SIZE, Draw, Probe, device_of
from tilegym_db.records import Definition
from tilegym_db.records.dtypes import Scalar

KIND = "hyper_connection"
STREAMS, EPS = "streams", "eps"
KEPT = frozenset({"fn", "base", "scale"})
"""Parameters of the hyper-connections of transformers, with or without the prefix ``hc_``."""
PREFIX = "hc_"
WEIGHT_SCALE = 1 / 16
"""Scale of the values in a probe: with values near one, every sigmoid of a sum of hundreds of products would be 0 or 1."""
UNDESCRIBED = {
    mark: "no definition describes hyper-connections without a mixing matrix"
    for mark in ("3f08635c27f3a843", "f439b6968ef1a9bf")
}
"""Known code that no Definition describes: HY-V4."""

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules with a projection, a base and scales, or whose code a Definition states."""
    is_stated = of_class(lambda cls: known.is_stated(KIND, cls.forward))
    return grouped(
        KIND,
        [
            ModuleOfPart(module, key=tuple(_children(module).values()), detail=likeness(module))
            for module in model.modules()
            if is_stated(module) or {name.removeprefix(PREFIX) for name in module._parameters} >= KEPT
        ],
    )


def _children(module: Module) -> dict[str, type[Module]]:
    """Return the classes of a module's submodules, without a patch."""
    return {name: unpatched_class(child) for name, child in module._modules.items() if child is not None}


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward and of the submodules that it calls."""
    cls = found.module_class
    if hasattr(cls.forward, "__wrapped__"):
        return WRAPPED
    callees = {**methods(cls), **{name: child.forward for name, child in _children(found.modules[0]).items()}}
    matches = known.look_up(KIND, cls.forward, callees, "its hyper-connection forward", UNDESCRIBED)
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the module's code on random streams with random weights in float32."""
    definition, draw = match.definition, Draw(device_of(module))
    streams = getattr(module, match.attribute(STREAMS), None)
    missing = [name for name in kept_by(definition) if _missing(module, match, name)]
    if missing or type(streams) is not int:
        lacking = match.attribute(missing[0] if missing else STREAMS)
        return f"it has no {lacking}, which serving.code of {definition.name} names"
    first, *weights = definition.tensor_inputs
    axes = _axes(definition, streams)
    x = draw(*definition.shape_of(first, axes))
    drawn = {name: WEIGHT_SCALE * draw(*definition.shape_of(name, axes)).float() for name in weights}
    numbers = {name: _number(module, match, name) for name in kept_by(definition) if name not in drawn}
    twin = copy.copy(module)
    parameters = {
        match.attribute(name): torch.nn.Parameter(value, requires_grad=False) for name, value in drawn.items()
    }
    vars(twin)["_parameters"] = {**module._parameters, **parameters}
    try:
        with torch.no_grad():
            out = type(module).forward(twin, x.unsqueeze(0))
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # a model's code may raise for settings that do not fit together
        return f"it cannot be probed: {type(error).__name__}: {error}"
    outputs = out if isinstance(out, tuple) else (out,)
    return {first: x, **drawn, **numbers}, tuple(value.squeeze(0) for value in outputs)


def kept_by(definition: Definition) -> tuple[str, ...]:
    """Return the inputs that a module keeps: all but the streams."""
    return tuple(definition.inputs)[1:]


def _missing(module: Module, match: DefinitionMatch, name: str) -> bool:
    return name not in match.code.constants and not hasattr(module, match.attribute(name))


def _axes(definition: Definition, streams: int) -> dict[str, int]:
    """Return the sizes of the axes of a Definition, whose first input is [tokens, streams, size]."""
    tokens, of_streams, _ = definition.inputs[next(iter(definition.inputs))].shape or ()
    sizes = {tokens: ROWS, of_streams: streams}
    return {name: axis.value or sizes.get(name, SIZE) for name, axis in definition.axes.items()}


def _number(module: Module, match: DefinitionMatch, name: str) -> Any:
    """Return a number that a module keeps, that its submodule keeps as ``eps``, or that is a constant of its code."""
    value = match.value(module, name)
    return getattr(value, EPS, None) if isinstance(value, Module) else value


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of hyper-connections: streams [..., C, H] -> outputs of the Definition, with [...] in place of M."""
    ((found, site),) = calls
    match = found.match
    assert match is not None, "only confirmed groups are patched"
    constants: dict[str, Scalar] = dict(match.code.constants)
    kept = [(match.attribute(name), constants.get(name)) for name in kept_by(match.definition)]
    return connection_forward(stock, site, kept, _children(found.modules[0]))


def connection_forward(
    stock: Callable[..., Any],
    site: CallSite,
    kept: Sequence[tuple[str, Scalar | None]],
    children: dict[str, type[Module]],
) -> Callable[..., Any]:
    """Return the forward of hyper-connections, as :func:`forward` describes it.

    Args:
        kept: (attribute, constant in its place) of each input after the streams, in order.
        children: the classes of the probed submodules, which must still be the same and have no hooks.
    """

    def inputs_of(self: Any) -> list[Any]:
        found = [getattr(self, name) if constant is None else constant for name, constant in kept]
        return [value.eps if isinstance(value, Module) else value for value in found]

    def serve(self: Any, x: torch.Tensor) -> Any:
        given, reason = inputs_of(self), why_stock(self, x, children)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        if _is_compiling():
            # The weights are float32 for streams of any dtype, and the code states its conversions.
            operator = site.traced(self.training, x)
            if reason or operator is None or site.traced(self.training, *tensors) is None:
                return None
            return _leading(x, operator.call(x.view(-1, *x.shape[-2:]), *given, operator.name))
        if site.falls_back(self.training, x, *tensors):
            return None
        if reason:
            site.bypass(reason)
            return None
        out = site.ask(self.training, x.view(-1, *x.shape[-2:]), *given)
        return None if out is None else _leading(x, out)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = serve(self, args[0]) if len(args) == 1 and not kwargs else None
        return stock(self, *args, **kwargs) if out is None else out

    return forward


def why_stock(module: Module, x: torch.Tensor, children: dict[str, type[Module]]) -> str:
    """Return the reason if streams are left to the model's own code; ``children`` as in :func:`connection_forward`."""
    for name, cls in children.items():
        child = module._modules[name]
        if child is None or unpatched_class(child) is not cls or has_hooks(child):
            return HAS_HOOKS
    if type(x) is torch.Tensor and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return AUTOCAST
    return "" if is_stack(x) else NOT_ROWS


def is_stack(x: torch.Tensor) -> bool:
    """Return True if streams [..., C, H] are a view of [M, C, H]."""
    return x.dim() >= 3 and x.numel() > 0 and x.is_contiguous()


def _leading(x: torch.Tensor, outputs: Any) -> Any:
    """View outputs [M, ...] with the leading axes of the streams [..., C, H] in place of M."""
    leading = x.shape[:-2]
    if isinstance(outputs, torch.Tensor):
        return outputs.view(*leading, *outputs.shape[1:])
    return tuple(value.view(*leading, *value.shape[1:]) for value in outputs)

"""Norms with a gate: a module with a weight that is called with the activation and its gate.

The first two inputs of a Definition are the activation and the gate, [M, N] each. Every other input is an attribute of the
module, of the same name unless ``serving.code`` states another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tilegym_db.models.call_site import NOT_ROWS, OTHER_ACTIVATION, CallSite, are_rows, rows
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
from tilegym_db.models.parts.norm import attributes_of, normalises, random_norm, takes_gate, weight_of
from tilegym_db.models.probe import Draw, Probe, device_of
from tilegym_db.models.upstream_code import of_models

KIND = "gated_norm"
ACTIVATIONS = 2
ACTIVATION = "activation"
"""The attribute with the name of the gate's activation, if the module has one."""

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules without submodules that have a vector as weight, normalise and take a gate."""
    is_gated = of_class(lambda cls: normalises(cls) and takes_gate(cls))
    modules = []
    for module in model.modules():
        weight = weight_of(module)
        if not module._modules and weight is not None and is_gated(module):
            detail = (weight.shape, weight.dtype, weight.device, getattr(module, ACTIVATION, None))
            modules.append(ModuleOfPart(module, detail=detail))
    return grouped(KIND, modules)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward; for other sources, the bits of the probe decide alone."""
    cls = found.module_class
    if hasattr(cls.forward, "__wrapped__"):
        return WRAPPED
    matches = known.look_up(KIND, cls.forward, methods(cls), "its gated norm forward", {})
    if isinstance(matches, str):
        matches = known.nominated(KIND) or matches
    return matches if isinstance(matches, str) else MatchCandidates(matches, known.definitions(KIND))


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run a norm of any size on random rows and gates with random weights."""
    missing = [name for name in map(str, attributes_of(match, ACTIVATIONS)) if not hasattr(module, name)]
    if missing:
        return f"it has no {missing[0]}, which serving.code of {match.definition.name} names"
    twin, x, inputs = random_norm(module, match, draw := Draw(device_of(module)), ACTIVATIONS)
    gate = draw(*x.shape)
    try:
        with torch.no_grad():
            out = type(module).forward(twin, x, gate)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    return {**dict(zip(match.definition.inputs, (x, gate), strict=False)), **inputs}, (out,)


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a norm with a gate: x [..., N], gate [..., N] -> [..., N]."""
    ((found, site),) = calls
    match = found.match
    assert match is not None, "only confirmed groups are patched"
    names = tuple(map(str, attributes_of(match, ACTIVATIONS)))
    of_tensors = {match.attribute(name) for name in match.definition.tensor_inputs[ACTIVATIONS:]}
    activation = getattr(found.modules[0], ACTIVATION, None)
    return gated_norm_forward(
        stock, site, names, [names.index(name) for name in names if name in of_tensors], activation
    )


def gated_norm_forward(
    stock: Callable[..., Any], site: CallSite, names: Sequence[str], weights: Sequence[int], activation: Any
) -> Callable[..., Any]:
    """Return the forward; ``names`` are the attributes for the inputs after the gate, and ``weights`` those of tensors."""

    def serve(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor | None:
        kept = [getattr(self, name) for name in names]
        tensors = (x, gate, *[kept[index] for index in weights])
        is_as_probed = getattr(self, ACTIVATION, None) == activation and gate.shape == x.shape
        if _is_compiling():
            operator = site.traced(self.training, *tensors)
            if operator is None or not is_as_probed or not are_rows(x) or not are_rows(gate):
                return None
            traced: torch.Tensor = operator.call(x, gate, *kept, operator.name)
            return traced
        if site.falls_back(self.training, *tensors):
            return None
        matrix, opening = rows(x), rows(gate)
        if not is_as_probed or matrix is None or opening is None:
            site.bypass(NOT_ROWS if is_as_probed else OTHER_ACTIVATION)
            return None
        out: torch.Tensor | None = site.ask(self.training, matrix, opening, *kept)
        return out if out is None or matrix is x else out.view(x.shape)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models pass both by position; a norm without its gate is another operator.
        is_usual = len(args) == ACTIVATIONS and not kwargs and isinstance(args[1], torch.Tensor)
        out = serve(self, *args) if is_usual else None
        return stock(self, *args, **kwargs) if out is None else out

    return forward

"""Modules of any kind without submodules: tensors in, tensors out, and nothing else changes.

A Definition states the fingerprint of the forward and of the methods that it calls. Its inputs are parameters of the forward, or
attributes of the module, such as its weights. So a module that ``task from-model`` has cut out of a model needs no file here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.any_code import Signature, ask, probed
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
from tilegym_db.models.probe import Probe, device_of

KIND = "module"

Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules without submodules whose forward a Definition states.

    A module that a part before this one serves, or that belongs to such a module, is left to that part.
    """
    if not known.fingerprints(KIND):
        return ()
    is_stated = of_class(lambda cls: known.is_stated(KIND, cls.forward))
    owners = [module for group in others if not group.reason for module in group.modules]
    taken = {id(one) for owner in owners for one in (owner, *owner.children())}
    modules = [module for module in model.modules() if not module._modules and id(module) not in taken]
    return grouped(
        KIND, [ModuleOfPart(one, key=device_of(one), detail=device_of(one)) for one in modules if is_stated(one)]
    )


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward, and of the methods and functions that it calls."""
    cls: Any = found.module_class
    if hasattr(cls.forward, "__wrapped__"):
        return WRAPPED
    callees = {**cls.forward.__globals__, **methods(cls)}
    matches = known.look_up(KIND, cls.forward, callees, "its forward", {})
    return matches if isinstance(matches, str) else MatchCandidates(matches, known.definitions(KIND))


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the forward on drawn inputs of the sizes that its code states, with drawn weights."""
    signature = _signature(found, match)
    missing = signature.missing_attribute(module)
    if missing:
        return f"it has no {missing}, which serving.code of {match.definition.name} names"
    for name, expected in match.code.fixed.items():
        if name not in signature.names and getattr(module, name) != expected:
            return f"its {name} is not {expected}, which serving.code of {match.definition.name} states"

    def call(arguments: dict[str, Any], attributes: dict[str, Any]) -> Any:
        twin = copy.copy(module)
        held = vars(twin)
        held["_parameters"], held["_buffers"] = dict(module._parameters), dict(module._buffers)
        for name, value in attributes.items():
            if name in held["_parameters"]:
                held["_parameters"][name] = torch.nn.Parameter(value, requires_grad=False)
            elif name in held["_buffers"]:
                held["_buffers"][name] = value
            else:
                held[name] = value
        return found.module_class.forward(twin, **arguments)

    return probed(signature, call, device_of(module))


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward that asks for a kernel first."""
    ((found, site),) = calls
    assert found.match is not None, "only confirmed groups are patched"
    signature = _signature(found, found.match)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = ask(signature, site, self, args, kwargs)
        return stock(self, *args, **kwargs) if results is None else results[0]

    return forward


def _signature(found: ModuleGroup, match: DefinitionMatch) -> Signature:
    code: Any = found.module_class.forward
    assert isinstance(code, FunctionType), "candidates have looked at it"
    return Signature(match, code, is_method=True)

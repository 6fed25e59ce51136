"""Functions of any kind that a forward calls: tensors in, tensors out, and nothing else changes.

A Definition states the fingerprint of the function and of the functions that it calls. Its inputs are parameters of the function.
So a function that ``task from-model`` has cut out of a model needs no file here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.any_code import Signature, ask, probed
from tilegym_db.models.call_site import CallSite
from tilegym_db.models.called_functions import OWN, callee, functions_called, replacements, unwrapped_function
from tilegym_db.models.found import (
    WRAPPED,
    DefinitionMatch,
    FunctionOverrides,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    of_class,
)
from tilegym_db.models.probe import Probe, device_of
from tilegym_db.models.upstream_code import undecorated

KIND = "function"
AFTER = ("module",)

Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward calls a function that a Definition states, once per function.

    A function that a part before this one serves is left to that part.
    """
    if not known.fingerprints(KIND):
        return ()
    taken = {(id(module), group.function) for group in others if not group.reason for module in group.modules}
    called = of_class(lambda cls: hasattr(undecorated(cls.forward), "__wrapped__"))
    modules = []
    for module in model.modules():
        for place in () if called(module) else functions_called(module):
            function = function_of(module, place)
            if (id(module), place) not in taken and known.is_stated(KIND, function):
                device = device_of(module)
                modules.append(ModuleOfPart(module, place, key=(id(callee(module, place)), device), detail=device))
    return grouped(KIND, modules)


def function_of(module: Module, place: str) -> FunctionType | str:
    """Return the Python function that runs when a module's forward calls that name, or the reason if other code runs."""
    return unwrapped_function(callee(module, place), place.removeprefix(OWN))


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the function and of those that it calls."""
    if hasattr(undecorated(found.module_class.forward), "__wrapped__"):
        return WRAPPED
    function = function_of(found.modules[0], found.function)
    if isinstance(function, str):
        return function
    matches = known.look_up(KIND, function, function.__globals__, f"its {function.__name__}", {})
    return matches if isinstance(matches, str) else MatchCandidates(matches, known.definitions(KIND))


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the function on drawn inputs of the sizes that its code states."""
    function = function_of(module, found.function)
    assert isinstance(function, FunctionType), "candidates have looked at it"
    signature = Signature(match, function, is_method=False)
    other = next((source for source in signature.sources.values() if source not in signature.names), "")
    if other:
        return f"it has no parameter {other}, which serving.code of {match.definition.name} names"

    def call(arguments: dict[str, Any], attributes: dict[str, Any]) -> Any:
        return function(**arguments)

    return probed(signature, call, device_of(module))


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the functions for a forward in place of the original ones."""
    functions, rewrites = replacements(calls, _function_of, of_any_module=True)
    return FunctionOverrides(functions, {}, [site for _, site in calls], rewrites)


def _function_of(
    found: ModuleGroup, site: CallSite, stock: Callable[..., Any], function: FunctionType
) -> Callable[..., Any]:
    assert found.match is not None, "only confirmed groups are patched"
    signature = Signature(found.match, function, is_method=False)

    @functools.wraps(stock)
    def served(*args: Any, **kwargs: Any) -> Any:
        results = ask(signature, site, None, args, kwargs)
        return stock(*args, **kwargs) if results is None else results[0]

    return served

"""Rotary embeddings: a function that an attention forward calls, replaced for that forward alone.

The inputs of a Definition are the function's first arguments, in order; its other arguments must keep their defaults. A table of
complex numbers is an input in float32, with heads of any dtype: real and imaginary parts alternate, as they do in memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.call_site import CallSite, has_hooks
from tilegym_db.models.called_functions import function_inside
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
    names_in_code,
    of_class,
)
from tilegym_db.models.probe import ROWS, SIZE, Probe, device_of, drawn_inputs
from tilegym_db.models.upstream_code import undecorated
from tilegym_db.records import Definition

ROTARY = "apply_rotary"
SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "H": 4, "S": ROWS, "D": SIZE, "R": SIZE // 2, "P": SIZE // 4, "Bc": 2}
"""Sizes of the probe. Tables are half as wide as a head, if they may be narrower than one."""

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward calls a rotary function, once per function."""
    rotary = of_class(lambda cls: tuple(name for name in names_in_code(cls.forward) if name.startswith(ROTARY)))
    return grouped(
        "rope",
        [
            ModuleOfPart(module, name, detail=next((parameter.device for parameter in module.parameters()), None))
            for module in model.modules()
            for name in rotary(module)
        ],
    )


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the function that the forward's module has."""
    forward: Any = undecorated(found.module_class.forward)
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    function = stock_function(forward.__globals__.get(found.function))
    if not isinstance(function, FunctionType):
        kind = type(function).__name__
        return f"its {found.function} is of type {kind}, neither a function nor a module around one"
    matches = known.look_up("rope", function, function.__globals__, f"its {found.function}", {})
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def stock_function(called: Any) -> Any:
    """Return the function that a forward calls: ``called``, or the one inside a module around it.

    The module is still what the probe and stock code call.
    """
    if not isinstance(called, Module) or has_hooks(called) or next(called.parameters(), None) is not None:
        return called
    return function_inside(called) or called


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the function on random heads. The halves of the tables differ, because some variants read only one half."""
    forward: Any = undecorated(type(module).forward)
    return probe_function(forward.__globals__[found.function], match, device_of(module))


def probe_function(function: Callable[..., Any], match: DefinitionMatch, device: torch.device) -> Probe:
    """Probe the function itself; see :func:`probe`."""
    inputs = drawn_inputs(match.definition, SIZES, device)
    complex_tables = _complex_tables(match.definition)
    inputs |= {name: inputs[name].float() for name in complex_tables}
    given = {name: _as_complex(value) if name in complex_tables else value for name, value in inputs.items()}
    with torch.no_grad():
        returned = function(*given.values())
    return dict(inputs), returned if isinstance(returned, tuple) else (returned,)


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the rotary functions for an attention forward, in place of the original ones."""
    own = undecorated(stock).__globals__

    def replaced(training: bool) -> dict[str, Any]:
        return {
            found.function: _rope_function_of(own[found.function], found, site, training)
            for found, site in calls
            if site.training is not None or not training
        }

    return FunctionOverrides(replaced(False), replaced(True), [site for _, site in calls])


def _rope_function_of(
    stock: Callable[..., Any], found: ModuleGroup, site: CallSite, training: bool
) -> Callable[..., Any]:
    assert found.match is not None, "only confirmed groups are patched"
    definition = found.match.definition
    tables = _complex_tables(definition)
    places = tuple(index for index, name in enumerate(definition.inputs) if name in tables)
    turned = [spec.shape for spec in definition.outputs.values()]
    kept = tuple(index for index, spec in enumerate(definition.inputs.values()) if spec.shape not in turned)
    return rope_function(stock, site, len(definition.inputs), training=training, complex_tables=places, tables=kept)


def _complex_tables(definition: Definition) -> set[str]:
    """Return the inputs that are complex in a model."""
    return {name for name in definition.tensor_inputs if definition.inputs[name].dtype == "float32"}


def _as_complex(table: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(table.reshape(*table.shape[:-1], -1, 2))


def _as_real(given: tuple[Any, ...], places: Iterable[int]) -> tuple[Any, ...]:
    """Return the arguments with complex tables in the Definition's form; tables of another dtype stay and are not served."""
    return tuple(
        torch.view_as_real(value).flatten(-2)
        if index in places and isinstance(value, torch.Tensor) and value.dtype == torch.complex64
        else value
        for index, value in enumerate(given)
    )


def _in_rows(given: tuple[Any, ...], places: Iterable[int]) -> tuple[Any, ...]:
    """Return the arguments with a copy of each table that is transposed in memory, because no kernel takes it.

    gpt-oss makes such tables: a transposed product of frequencies and positions. They are small compared with queries and keys,
    so the copy costs less than stock code.
    """
    for index in places:  # runs at every call: a generator would take longer
        table = given[index]
        if isinstance(table, torch.Tensor) and table.dim() and table.stride(-1) > 1:
            given = (*given[:index], table.contiguous(), *given[index + 1 :])
    return given


def rope_function(
    stock: Callable[..., Any],
    site: CallSite,
    inputs: int,
    *,
    training: bool = False,
    complex_tables: tuple[int, ...] = (),
    tables: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Return a rotary function, such as ``(q [B, Hq, S, D], k [B, Hkv, S, D], cos, sin [B or 1, S, R]) -> (q, k)``.

    Args:
        stock: the function of the model.
        site: the call site.
        inputs: how many of its arguments are inputs of the Definition.
        training: the flag of the modules whose forward calls it.
        complex_tables: the indices of the inputs that are complex in the model.
        tables: the indices of the inputs that are tables of cosines, sines or complex rotations.
    """
    function = stock_function(stock)
    parameters = list(inspect.signature(function).parameters.values())[inputs:]
    defaults = {parameter.name: parameter.default for parameter in parameters}

    @functools.wraps(function)
    def apply_rotary(*args: Any, **kwargs: Any) -> Any:
        served, given = None, _as_real(args[:inputs], complex_tables) if complex_tables else args[:inputs]
        if len(given) != inputs or not _are_defaults(
            {**dict(zip(defaults, args[inputs:], strict=False)), **kwargs}, defaults
        ):
            pass
        elif _is_compiling():
            given = _in_rows(given, tables)
            operator = site.traced(training, *given)
            if operator is not None:
                served = operator.call(*given, operator.name)
        elif not site.falls_back(training, *given):
            served = site.ask(training, *_in_rows(given, tables))
        return stock(*args, **kwargs) if served is None else served

    return apply_rotary


def _are_defaults(extra: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    for name, value in extra.items():
        default = defaults.get(name, inspect.Parameter.empty)
        if value is not default and not (isinstance(value, int) and isinstance(default, int) and value == default):
            return False
    return True

"""Rotary embeddings: a function that an attention forward calls, replaced for that forward alone.

A function is found by its name, and known by its results (:mod:`tilegym_db.models.rotary_code`). A table of complex numbers is an
input in float32, with heads of any dtype: real and imaginary parts alternate, as they do in memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
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
from tilegym_db.models.probe import Probe, device_of
from tilegym_db.models.rotary_code import (
    FLAT,
    FULL_WIDTH,
    OF_TWO_AXES,
    PREFIXED,
    SHARED,
    SIZES,
    UNSQUEEZE,
    RotaryCall,
    RotaryCode,
    package_of,
    possible_codes,
    probed,
    rotary_code,
)
from tilegym_db.models.upstream_code import NO_FINGERPRINT, fingerprint, undecorated
from tilegym_db.records.serving import ModelCode

ROTARY = "apply_rotary"
OTHER_TABLES = "its tables have another dtype than those that it was written for"

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
    """Return the Definition whose bits the function gives that the forward's module has."""
    forward: Any = undecorated(found.module_class.forward)
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    function = stock_function(forward.__globals__.get(found.function))
    if not isinstance(function, FunctionType):
        kind = type(function).__name__
        return f"its {found.function} is of type {kind}, neither a function nor a module around one"
    if package_of(function) != package_of(forward):
        return (
            f"its {found.function} is that of {function.__module__}, and kernels are compared with the model's own code"
        )
    device = device_of(found.samples[0])
    code = rotary_code(function, known, torch.device("cpu") if device.type == "meta" else device, found.function)
    if isinstance(code, str):
        return code
    own = ModelCode(fingerprint=fingerprint(function) or NO_FINGERPRINT)
    return MatchCandidates([DefinitionMatch(code.definition, own, code)])


def stock_function(called: Any) -> Any:
    """Return the function that a forward calls: ``called``, or the one inside a module around it.

    The module is still what the probe and stock code call.
    """
    if not isinstance(called, Module) or has_hooks(called) or next(called.parameters(), None) is not None:
        return called
    return function_inside(called) or called


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the function on random heads, in the first way to call it in which it has results of the right shapes."""
    forward: Any = undecorated(type(module).forward)
    return probe_function(forward.__globals__[found.function], match, device_of(module))


def probe_function(function: Callable[..., Any], match: DefinitionMatch, device: torch.device) -> Probe | str:
    """Probe the function itself; see :func:`probe`."""
    for code in possible_codes(stock_function(function), [match.definition]):
        for sizes, call, wide in itertools.product((SIZES, {**SIZES, **FULL_WIDTH}), code.calls, code.table_kinds):
            found = probed(function, code, call, sizes, device, wide=wide)
            if found is not None and _are_heads(found, code):
                return found
    return f"it cannot be run on heads and tables as {match.definition.name} has them"


def _are_heads(found: Probe, code: RotaryCode) -> bool:
    """Return True if the results of a probe have the shapes and dtypes of its heads."""
    inputs, outputs = found
    heads = [list(inputs.values())[place] for place in code.heads]
    return [(one.shape, one.dtype) for one in outputs] == [(one.shape, one.dtype) for one in heads]


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
    return rope_function(stock, site, found.match.details, training=training)


def _as_real(given: list[Any], places: Iterable[int]) -> list[Any]:
    """Return the arguments with complex tables in the Definition's form; tables of another dtype stay and are not served."""
    return [
        torch.view_as_real(value).flatten(-2)
        if index in places and isinstance(value, torch.Tensor) and value.dtype == torch.complex64
        else value
        for index, value in enumerate(given)
    ]


def _in_rows(given: list[Any], places: Iterable[int]) -> list[Any]:
    """Return the arguments with a copy of each table that is transposed in memory, because no kernel takes it.

    gpt-oss makes such tables: a transposed product of frequencies and positions. They are small compared with queries and keys,
    so the copy costs less than stock code.
    """
    for index in places:  # runs at every call: a generator would take longer
        table = given[index]
        if table.dim() and table.stride(-1) > 1:
            given[index] = table.contiguous()
    return given


def rope_function(
    stock: Callable[..., Any], site: CallSite, code: RotaryCode, *, training: bool = False
) -> Callable[..., Any]:
    """Return a rotary function, such as ``(q [B, Hq, S, D], k [B, Hkv, S, D], cos, sin [B or 1, S, R]) -> (q, k)``.

    Args:
        stock: the function of the model.
        site: the call site.
        code: the Definition that it computes, and how.
        training: the flag of the modules whose forward calls it.
    """
    names, order, heads, tables, defaults = code.names, code.order, code.heads, code.tables, code.defaults
    count, single = len(names), len(code.definition.outputs) == 1
    is_complex, has_own_tables, is_in_order = code.is_complex, code.has_own_tables, order == (*range(len(order)),)
    ways = frozenset(code.calls)
    of_three_axes = {one.unsqueeze: one for one in code.calls if one.form not in OF_TWO_AXES}
    usual = defaults.get(UNSQUEEZE)
    head, table = order[heads[0]], order[tables[0]]

    def way_of(given: tuple[Any, ...], extra: dict[str, Any]) -> RotaryCall | None:
        """Return the way in which a call passes its arguments; None if the function was not understood for it."""
        if len(given) != count or not all([isinstance(one, torch.Tensor) for one in given]):
            return None
        unsqueeze = extra.pop(UNSQUEEZE, usual) if extra else usual
        if extra and not _are_defaults(extra, defaults):
            return None
        value = None if unsqueeze == usual else unsqueeze
        q, wide = given[head], given[table]
        if q.dim() == 4 and wide.dim() == 3:
            return of_three_axes.get(value)
        form = FLAT if q.dim() == 3 else SHARED if q.dim() == 4 and q.shape[2] == wide.shape[0] else PREFIXED
        way = RotaryCall(form, value)
        is_possible = way in ways and wide.dim() == 2 and (form != PREFIXED or wide.shape[0] < q.shape[2])
        return way if is_possible else None

    def has_right_tables(given: Sequence[torch.Tensor]) -> bool:
        dtype, wide = given[heads[0]].dtype, given[tables[0]].dtype
        return (code.same and wide is dtype) or (wide is torch.float32 and (code.wide or wide is dtype))

    @functools.wraps(stock_function(stock))
    def apply_rotary(*args: Any, **kwargs: Any) -> Any:
        taken, extra = args[:count], kwargs
        if kwargs:
            named = [kwargs[name] for name in names[len(taken) :] if name in kwargs]
            taken, extra = (*taken, *named), {name: value for name, value in kwargs.items() if name not in names}
        if len(args) > count:
            extra = {**extra, **dict(zip(defaults, args[count:], strict=False))}
        way = way_of(taken, extra)
        if way is None:
            return stock(*args, **kwargs)
        own = list(taken) if is_in_order else [taken[place] for place in order]
        given = way.inputs(_as_real(own, tables) if is_complex else own, heads)
        served = None
        if _is_compiling():
            # A Definition may state the dtype of tables; else PyTorch alone defines the result of mixed dtypes.
            asked = [given[place] for place in heads] if has_own_tables else given
            operator = site.traced(training, *asked)
            if operator is not None and (not has_own_tables or has_right_tables(given)):
                served = operator.call(*_in_rows(given, tables), operator.name)
        elif not site.falls_back(training, *given):
            if has_own_tables and not has_right_tables(given):
                site.bypass(OTHER_TABLES)
            else:
                served = site.ask(training, *_in_rows(given, tables))
        if served is None:
            return stock(*args, **kwargs)
        found = way.outputs((served,) if single else served, own, heads)
        return found[0] if single else found

    return apply_rotary


def _are_defaults(extra: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    for name, value in extra.items():
        default = defaults.get(name, Parameter.empty)
        if value is not default and not (isinstance(value, int) and isinstance(default, int) and value == default):
            return False
    return True

"""Rotary embeddings: a function that an attention forward calls, replaced for that forward alone.

A function is found by its name, and known by its results (:func:`rotary_code`). A table of complex numbers is an
input in float32, with heads of any dtype: real and imaginary parts alternate, as they do in memory.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from types import FunctionType
from typing import Any, NamedTuple

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
from tilegym_db.models.probe import ROWS, SIZE, Probe, device_of, drawn_inputs, matching_definitions
from tilegym_db.models.upstream_code import NO_FINGERPRINT, fingerprint, of_models, undecorated, why_not_plain
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import ModelCode

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


# ---- what a rotary function computes --------------------------------------------------------------
# Recognise what a rotary function computes by its results: in which form it takes heads and tables, and of which Definition.
#
# The function runs on random heads in every form in which models pass them. Its arguments are heads and then tables, whatever
# their order in a Definition; all others must keep their defaults.

PREFIX = 3
"""Tokens of a probe before those that rotate."""
SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "H": 4, "S": ROWS, "D": SIZE, "R": SIZE // 2, "P": SIZE // 4, "Bc": 2}
"""Sizes of the probe. Tables are half as wide as a head, if they may be narrower than one."""
ONE_TOKEN = {"B": 1, "Hq": 3, "H": 3, "S": 1, "Bc": 1}
"""Changes of the sizes for a second probe, of one token."""
NARROW = {"R", "P"}
"""Axes of tables that may be narrower than a head."""
FULL_WIDTH = {"R": SIZE}
"""Changes of the sizes for code that takes tables as wide as a head only, of which it may read a half."""
TABLES = ("cos", "sin", "freqs")
"""Beginnings of the names of arguments that are tables."""
UNSQUEEZE = "unsqueeze_dim"
HEADS_FIRST, TOKENS_FIRST, FLAT, SHARED, PREFIXED = "heads_first", "tokens_first", "flat", "shared", "prefixed"
"""The ways to pass heads: [B, H, S, D] as a Definition has them; [B, S, H, D]; [S, H, D] with tables [S, R]; [B, H, S, D] with
tables [S, R]; and [B, H, P + S, D] with such tables, if the first P tokens stay as they are."""
OF_TWO_AXES = (FLAT, SHARED, PREFIXED)
"""The ways with tables [S, R]."""


class RotaryCall(NamedTuple):
    """A way to call a function.

    Attributes:
        form: the way to pass heads.
        unsqueeze: the value of the argument ``unsqueeze_dim``; None for its default.
    """

    form: str
    unsqueeze: int | None = None

    def inputs(self, given: Sequence[Any], heads: Sequence[int]) -> list[Any]:
        """Return the arguments of a call, in the order of a Definition, as that Definition has them."""
        if self.form == HEADS_FIRST:
            return list(given)
        if self.form == TOKENS_FIRST:
            return [one.transpose(1, 2) if place in heads else one for place, one in enumerate(given)]
        if self.form == FLAT:
            return [one[None].transpose(1, 2) if place in heads else one[None] for place, one in enumerate(given)]
        if self.form == SHARED:
            return [one if place in heads else one[None] for place, one in enumerate(given)]
        length = next(one.shape[0] for place, one in enumerate(given) if place not in heads)
        return [one[:, :, one.shape[2] - length :] if place in heads else one[None] for place, one in enumerate(given)]

    def arguments(self, inputs: Sequence[Any], heads: Sequence[int]) -> list[Any]:
        """Return the arguments of a call whose :meth:`inputs` are given."""
        if self.form == HEADS_FIRST:
            return list(inputs)
        if self.form == TOKENS_FIRST:
            return [one.transpose(1, 2) if place in heads else one for place, one in enumerate(inputs)]
        if self.form == FLAT:
            return [one.transpose(1, 2)[0] if place in heads else one[0] for place, one in enumerate(inputs)]
        if self.form == SHARED:
            return [one if place in heads else one[0] for place, one in enumerate(inputs)]
        before = [
            one[:, :, :1].expand(-1, -1, PREFIX, -1) if place in heads else None for place, one in enumerate(inputs)
        ]
        return [
            one[0] if first is None else torch.cat((first, one), dim=2)
            for first, one in zip(before, inputs, strict=True)
        ]

    def outputs(self, found: Sequence[Any], given: Sequence[Any], heads: Sequence[int]) -> tuple[Any, ...]:
        """Return the results of a Definition as the function returns them."""
        if self.form in (HEADS_FIRST, SHARED):
            return tuple(found)
        if self.form == TOKENS_FIRST:
            return tuple(one.transpose(1, 2) for one in found)
        if self.form == FLAT:
            return tuple(one.transpose(1, 2)[0] for one in found)
        whole = [given[place] for place in heads]
        return tuple(
            torch.cat((one[:, :, : one.shape[2] - turned.shape[2]], turned), dim=2)
            for one, turned in zip(whole, found, strict=True)
        )


class RotaryCode(NamedTuple):
    """A Definition that a function computes.

    Attributes:
        definition: the Definition.
        order: for each of its inputs, the place of the argument.
        names: the names of these arguments, in the order of the function.
        defaults: the values that all other arguments must have.
        heads: the places of heads among the inputs.
        calls: the ways to call the function in which it computes the Definition.
        wide: True if tables may be float32 beside heads of another dtype.
        same: True if tables may have the dtype of the heads.
    """

    definition: Definition
    order: tuple[int, ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    heads: tuple[int, ...]
    calls: tuple[RotaryCall, ...]
    wide: bool = False
    same: bool = True

    @property
    def tables(self) -> tuple[int, ...]:
        """The places of tables among the inputs."""
        return tuple(place for place in range(len(self.order)) if place not in self.heads)

    @property
    def is_complex(self) -> bool:
        """True if the table is of complex numbers in the model, and of real ones in the Definition."""
        return bool(complex_tables(self.definition))

    @property
    def has_own_tables(self) -> bool:
        """True if the dtype of the tables is not that of the heads."""
        dtypes = {spec.dtype for place, spec in enumerate(self.definition.inputs.values()) if place in self.tables}
        return not self.is_complex and dtypes != {
            spec.dtype for place, spec in enumerate(self.definition.inputs.values()) if place in self.heads
        }

    @property
    def table_kinds(self) -> tuple[bool, ...]:
        """True for tables in float32 beside heads of another dtype, False for tables of the heads' dtype."""
        return (True, False) if self.has_own_tables else (False,)


def complex_tables(definition: Definition) -> set[str]:
    """Return the inputs that are complex in a model."""
    return {name for name in definition.tensor_inputs if definition.inputs[name].dtype == "float32"}


def as_complex(table: torch.Tensor) -> torch.Tensor:
    """Return a table of complex numbers from one of their alternating real and imaginary parts."""
    return torch.view_as_complex(table.reshape(*table.shape[:-1], -1, 2))


def rotary_code(function: FunctionType, known: KnownCode, device: torch.device, name: str) -> RotaryCode | str:
    """Return the known Definition that a function computes, or the reason with its ``name`` if there is none."""
    reached = _reached(function)
    key = (*map(id, reached), id(known.catalog), device)
    kept = _answers.get(function)
    if kept is None or kept[0] != key:
        kept = (key, (reached, known.catalog), _rotary_code(function, reached, known, device, name))
        _answers[function] = kept
    return kept[2]


_answers: weakref.WeakKeyDictionary[FunctionType, tuple[Any, Any, RotaryCode | str]] = weakref.WeakKeyDictionary()
"""Function -> the last answer, by the identity of the functions that it calls and of the catalog, which it keeps alive."""


def _rotary_code(
    function: FunctionType, reached: Iterable[Any], known: KnownCode, device: torch.device, name: str
) -> RotaryCode | str:
    reason = why_not_plain(reached)
    if reason:
        return reason
    codes = possible_codes(function, known.definitions("rope"))
    found = _agreeing(function, codes, SIZES, device, known)
    # Code that takes narrower tables also computes what takes full ones only.
    found = [one for one in found if not NARROW.isdisjoint(one.definition.axes)] or found
    if not found:
        narrow = [one for one in codes if not FULL_WIDTH.keys().isdisjoint(one.definition.axes)]
        found = _agreeing(function, narrow, {**SIZES, **FULL_WIDTH}, device, known)
    # Code that casts back to the dtype of the heads was written for tables in float32, which no other code returns so.
    found = [one for one in found if one.wide] or found
    if len(found) == 1:
        return found[0]
    mark = fingerprint(function)
    where = f" (fingerprint {mark})" if mark else ""
    if not found:
        return f"the results of its {name} are the bits of no definition{where}"
    return f"the results of its {name} are the bits of {' and '.join(one.definition.name for one in found)}{where}"


def _agreeing(
    function: FunctionType,
    codes: Iterable[RotaryCode],
    sizes: Mapping[str, int],
    device: torch.device,
    known: KnownCode,
) -> list[RotaryCode]:
    """Return the codes whose Definitions give the same bits as a function, with the ways of calling it for which they do."""
    found = []
    for one in codes:
        answers = {
            (call, wide)
            for call in one.calls
            for wide in one.table_kinds
            if _agrees(function, one, call, sizes, device, known, wide=wide)
        }
        if answers:
            calls = tuple(call for call in one.calls if {(call, True), (call, False)} & answers)
            kinds = {wide for _, wide in answers}
            found.append(one._replace(calls=calls, wide=True in kinds, same=False in kinds))
    return found


def _reached(function: FunctionType) -> list[FunctionType]:
    """Return a function and those outside of PyTorch that it calls, directly or not."""
    reached = [function]
    for one in reached:
        for name in names_in_code(one):
            called = one.__globals__.get(name)
            is_new = isinstance(called, FunctionType) and called not in reached
            if is_new and package_of(called) != package_of(torch.split):
                reached.append(called)  # type: ignore[arg-type]
    return reached


def package_of(function: Any) -> str:
    """Return the name of the package that a function is written in."""
    return str(function.__module__).partition(".")[0]


def possible_codes(function: FunctionType, definitions: Iterable[Definition]) -> list[RotaryCode]:
    """Return the Definitions that a function may compute, each with all ways to call it.

    Such a Definition has as many heads and as many tables as the function has arguments of each kind.
    """
    parameters = [
        one for one in inspect.signature(function).parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    tables = [place for place, one in enumerate(parameters) if one.name.startswith(TABLES)]
    if not tables or tables[0] == 0:
        return []
    taken, others = parameters[: tables[-1] + 1], parameters[tables[-1] + 1 :]
    names = tuple(one.name for one in taken)
    defaults = {one.name: one.default for one in others}
    heads = [place for place in range(len(taken)) if place not in tables]
    found = []
    for definition in definitions:
        turned = [spec.shape for spec in definition.outputs.values()]
        inputs = list(definition.inputs)
        own = tuple(place for place, name in enumerate(inputs) if definition.inputs[name].shape in turned)
        own_tables = [name for place, name in enumerate(inputs) if place not in own]
        if (len(own), len(own_tables)) != (len(heads), len(tables)):
            continue
        placed = {inputs[place]: at for place, at in zip(own, heads, strict=True)}
        for name, at in zip(
            own_tables, tables, strict=True
        ):  # by name if they have one: some code takes sin before cos
            placed[name] = names.index(name) if name in names else at
        calls = _calls(defaults, is_complex=bool(complex_tables(definition)))
        found.append(RotaryCode(definition, tuple(placed[name] for name in inputs), names, defaults, own, calls))
    return found


def _calls(defaults: Mapping[str, Any], *, is_complex: bool) -> tuple[RotaryCall, ...]:
    """Return the ways to call a function whose arguments after the tables have these defaults."""
    calls = [RotaryCall(HEADS_FIRST), RotaryCall(TOKENS_FIRST)]
    if not is_complex:
        calls += [RotaryCall(form) for form in OF_TWO_AXES]
    if type(defaults.get(UNSQUEEZE)) is int:
        ways = {0: SHARED, 1: HEADS_FIRST, 2: TOKENS_FIRST}
        calls += [RotaryCall(form, value) for value, form in ways.items() if value != defaults[UNSQUEEZE]]
    return tuple(calls)


def _agrees(
    function: FunctionType,
    code: RotaryCode,
    call: RotaryCall,
    sizes: Mapping[str, int],
    device: torch.device,
    known: KnownCode,
    *,
    wide: bool,
) -> bool:
    """Return True if a function gives the bits of a Definition, for several tokens and for one."""
    both = (sizes, {**sizes, **ONE_TOKEN})
    probes = (probed(function, code, call, one, device, wide=wide) for one in both)
    wanted = [code.definition.name]
    return all(
        one is not None and matching_definitions(one, [code.definition], known.catalog) == wanted for one in probes
    )


def probed(
    function: Callable[..., Any],
    code: RotaryCode,
    call: RotaryCall,
    sizes: Mapping[str, int],
    device: torch.device,
    *,
    wide: bool,
) -> Probe | None:
    """Run a function on random heads; None if it cannot run so.

    The halves of the tables differ, because some variants read only one half. Wide tables have more bits than bf16 holds.
    """
    if call.form in OF_TWO_AXES:
        sizes = {**sizes, "Bc": 1, **({"B": 1} if call.form == FLAT else {})}
    inputs = drawn_inputs(code.definition, sizes, device)
    names = list(inputs)
    for place in code.tables:
        if wide or code.is_complex:
            inputs[names[place]] = inputs[names[place]].float() * (1.001 if wide else 1.0)
    values = [
        as_complex(one) if code.is_complex and place in code.tables else one
        for place, one in enumerate(inputs.values())
    ]
    arguments = call.arguments(values, code.heads)
    given = dict(zip(code.order, arguments, strict=True))
    extra = {} if call.unsqueeze is None else {UNSQUEEZE: call.unsqueeze}
    try:
        with torch.no_grad():
            returned = function(*[given[place] for place in range(len(code.names))], **extra)
            if isinstance(returned, tuple) != (len(code.definition.outputs) > 1):
                return None
            results = list(returned) if isinstance(returned, tuple) else [returned]
            heads = [arguments[place] for place in code.heads]
            if call.form == PREFIXED and not all(
                torch.equal(one[:, :, :PREFIX], head[:, :, :PREFIX]) for one, head in zip(results, heads, strict=True)
            ):
                return None
            return inputs, _turned_back(call, results)
    except of_models():
        return None


def _turned_back(call: RotaryCall, results: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return what a function returned as the Definition has it."""
    if call.form == PREFIXED:
        return tuple(one[:, :, PREFIX:] for one in results)
    return tuple(call.inputs(results, range(len(results))))

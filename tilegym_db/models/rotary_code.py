"""Recognise what a rotary function computes by its results: in which form it takes heads and tables, and of which Definition.

The function runs on random heads in every form in which models pass them. Its arguments are heads and then tables, whatever their
order in a Definition; all others must keep their defaults.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.found import KnownCode, names_in_code
from tilegym_db.models.probe import ROWS, SIZE, Probe, drawn_inputs, matching_definitions
from tilegym_db.models.upstream_code import fingerprint, of_models, why_not_plain
from tilegym_db.records import Definition

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
    """Return the Definition that a function computes, or the reason if there is none.

    Args:
        function: the function.
        known: the Definitions.
        device: the device of the probe.
        name: the name of the function in the reason.
    """
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
    """Return the codes whose Definitions have the bits of a function, with the ways to call it that show it."""
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
    """Return the Definitions with as many heads and tables as a function has arguments, with all ways to call it."""
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

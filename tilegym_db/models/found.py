"""What was found in a model: groups of modules that play one part, and the code that a Definition says it computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.models.call_site import CallSite
from tilegym_db.models.probe import Probe
from tilegym_db.models.upstream_code import fingerprint
from tilegym_db.records import Definition
from tilegym_db.records.serving import ModelCode

FLOATS = ("float32", "float16", "bfloat16")
REPLACED = "its forward is already replaced on the instance (accelerate, Liger or kernels?); left alone"
WRAPPED = "its forward is wrapped by a decorator, whose part is not known"

Module = torch.nn.Module
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ModuleGroup:
    """All modules of one class that play one part in the model.

    ``kind`` is the part, a module of :mod:`tilegym_db.models.parts`. ``function`` tells several of one forward
    apart: the rotary function of a rope, the norm that a layer calls with its residual sum, the Definition that some calls of an
    attention are. ``samples`` are the modules to probe, which speak for the others. ``norm`` is what was found of the norm that a
    layer calls. ``before`` is what the patched forward calls first, through a call site of its own. ``match`` is what the site
    computes once that is confirmed. ``reason`` says why the site stays stock; empty if it may be patched.
    """

    kind: str
    module_class: type[Module]
    modules: tuple[Module, ...]
    function: str = ""
    samples: tuple[Module, ...] = ()
    norm: ModuleGroup | None = None
    before: UpstreamOp | None = None
    definition: str = ""
    match: DefinitionMatch | None = None
    reason: str = ""


class UpstreamOp(NamedTuple):
    """A Definition whose outputs are inputs of what a site computes; ``stock(*inputs)`` gives them by its stock solution."""

    definition: Definition
    stock: Callable[..., Any] | None


class DefinitionMatch(NamedTuple):
    """A Definition that a piece of code may compute, and the entry of its ``serving.code`` that says so."""

    definition: Definition
    code: ModelCode

    def attribute(self, name: str) -> str:
        """Where a module keeps an input of the Definition, or what plays a role in its code."""
        return self.code.attributes.get(name, name)

    def value(self, module: Module, name: str) -> Any:
        """Return an input that a module keeps, or that its code has as a constant; None if it has no such attribute."""
        constant = self.code.constants.get(name)
        value = getattr(module, self.attribute(name), None) if constant is None else constant
        # A whole number stands for another in a model's code; a Definition takes what it says.
        return float(value) if type(value) is int and self.definition.inputs[name].dtype in FLOATS else value

    def why_no_number(self, module: Module, name: str) -> str:
        """Return why what a module has for a number of the Definition is none; empty if it is one."""
        value, dtype = self.value(module, name), self.definition.inputs[name].dtype
        expected = bool if dtype == "bool" else float if dtype in FLOATS else int
        if type(value) is expected:
            return ""
        return f"its {self.attribute(name)} is {value!r}, no number that {self.definition.name} takes"


class MatchCandidates(NamedTuple):
    """``matches`` are what a piece of code may compute; ``alternatives``, what its bits must differ from besides."""

    matches: Sequence[DefinitionMatch]
    alternatives: Sequence[Definition] = ()


class FunctionOverrides(NamedTuple):
    """What a forward is to see in place of functions that it calls: in inference, and in training where it can.

    ``counting`` are the call sites that count what training leaves to stock.
    """

    inference: Mapping[str, Any]
    training: Mapping[str, Any]
    counting: Sequence[CallSite]


class PartCall(NamedTuple):
    """A group of modules with its call site."""

    found: ModuleGroup
    site: CallSite


class OwnCode(NamedTuple):
    """The model's own code of a part that it can run in several ways.

    ``way`` is the name of the one that is set. ``call(*inputs) -> output`` runs the one that is set when it is called, on the
    inputs of the Definition; None if no Definition describes the part.
    """

    way: str
    call: Callable[..., Any] | None


class Part(Protocol):
    """One kind of part of a model: a module of :mod:`tilegym_db.models.parts`.

    It may have ``own_code(found) -> OwnCode`` besides, where a model has several ways to compute it.
    """

    def find(self, model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
        """Return the groups of modules that look like it; ``others`` are those of the parts that it comes after."""

    def candidates(self, found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
        """What their code may compute, or why no Definition describes it."""

    def probe(self, found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
        """Random inputs and what the module's own code gives for them, or why it cannot be probed."""

    def forward(self, stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any] | FunctionOverrides:
        """Return the forward that asks for a kernel first, or what the forward is to see in place of functions that it
        calls.
        """


@dataclass(frozen=True)
class KnownCode:
    """The code that the Definitions of a catalog say they compute, by part and fingerprint."""

    catalog: Catalog
    undescribed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def _by_part(self) -> dict[str, dict[str, list[DefinitionMatch]]]:
        found: dict[str, dict[str, list[DefinitionMatch]]] = {}
        for definition in self.catalog.definitions.values():
            if definition.serving is not None and definition.serving.part is not None:
                codes = found.setdefault(definition.serving.part, {})
                for code in definition.serving.code:
                    codes.setdefault(code.fingerprint, []).append(DefinitionMatch(definition, code))
        for codes in found.values():
            for matches in codes.values():  # what most models compute is named first
                matches.sort(key=lambda match: (-len(match.code.models), match.definition.name))
        return found

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that Definitions name."""
        return tuple(sorted(self._by_part))

    def definitions(self, part: str) -> list[Definition]:
        """Return every Definition of a part, by name."""
        return [
            definition
            for definition in self.catalog.definitions.values()
            if definition.serving is not None and definition.serving.part == part
        ]

    def is_stated(self, part: str, function: Any) -> bool:
        """Return True if a Definition of a part states this very code."""
        return (fingerprint(function) or "") in self._by_part.get(part, {})

    def look_up(
        self, part: str, function: Any, callees: Mapping[str, Any], what: str, undescribed: Mapping[str, str]
    ) -> list[DefinitionMatch] | str:
        """Return the Definitions of a part that a function may compute, or why there are none.

        Args:
            part: the kind of part.
            function: whose source is looked up.
            callees: where it finds the functions that it calls, by name.
            what: names the function in the reason.
            undescribed: fingerprint -> why no Definition describes code that is known all the same.
        """
        mark = fingerprint(function) or ""
        matches = self._by_part.get(part, {}).get(mark)
        if matches is None:
            told = f" (fingerprint {mark})" if mark else ""
            return undescribed.get(mark) or f"{what} is no variant that is known{told}"
        for match in matches:
            for name, known in match.code.calls.items():
                if fingerprint(callees.get(name)) != known:
                    return f"{what} relies on a {name} that is not the one known with it"
        return matches


class ModuleOfPart(NamedTuple):
    """A module that plays a part: what it is grouped by, and what it is like to a probe."""

    module: Module
    function: str = ""
    key: Hashable = None
    detail: Hashable = None


def grouped(kind: str, parts: Iterable[ModuleOfPart]) -> Iterator[ModuleGroup]:
    """Modules as groups: of one class, function and key, with or without a forward of the instance's own."""
    groups: dict[Any, dict[Hashable, list[Module]]] = {}
    for one in parts:
        key = (one.function, type(one.module), one.key, "forward" in vars(one.module))
        groups.setdefault(key, {}).setdefault(None, []).append(one.module)
        groups[key].setdefault((one.detail,), []).append(one.module)
    for (function, cls, _, is_replaced), by_detail in groups.items():
        modules = tuple(by_detail.pop(None))
        samples = tuple(alike[0] for alike in by_detail.values())
        yield ModuleGroup(kind, cls, modules, function, samples, reason=REPLACED if is_replaced else "")


def of_class(ask: Callable[[type[Module]], Answer]) -> Callable[[Module], Answer]:
    """Return a question about the class of a module, asked once for each class."""
    answers: dict[type[Module], Answer] = {}

    def asked(module: Module) -> Answer:
        cls = type(module)
        if cls not in answers:
            answers[cls] = ask(cls)
        return answers[cls]

    return asked


def names_in_code(function: Any) -> tuple[str, ...]:
    """Return the globals and attributes that a function's code names."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else tuple(code.co_names)


def methods(cls: type[Module]) -> dict[str, Any]:
    """Return the methods of a class and its bases, the class's own ones first."""
    return {name: value for owner in reversed(cls.__mro__) for name, value in vars(owner).items()}


def is_plain(function: Any) -> bool:
    """Return True if a function is one of plain source, not wrapped and not built in."""
    return isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")

"""Groups of modules that play one part in a model, and the code of which a Definition says that it computes the same."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.models.call_site import CallSite, runs_class_forward
from tilegym_db.models.probe import Probe
from tilegym_db.models.upstream_code import fingerprint
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import ModelCode

FLOATS = ("float32", "float16", "bfloat16")
REPLACED = "its forward is already replaced on the instance (Liger or kernels?); left alone"
WRAPPED = "its forward is wrapped by a decorator, whose part is not known"

Module = torch.nn.Module
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ModuleGroup:
    """All modules of one class that play one part in the model.

    Attributes:
        kind: the part, a module of :mod:`tilegym_db.models.parts`.
        function: distinguishes groups that share one forward. It is the rotary function of a rope, the norm that a layer calls
            with its residual sum, or the Definition of some calls of an attention.
        samples: the modules to probe, which represent the others.
        norm: the group of the norm that a layer calls.
        followers: a layer and the one after it, for layers whose last sum is what the next one norms first.
        before: the operator that the patched forward calls first, through another call site.
        match: the Definition that the site computes, once a probe has confirmed it.
        reason: the reason for stock code only; empty if the group may be patched.
    """

    kind: str
    module_class: type[Module]
    modules: tuple[Module, ...]
    function: str = ""
    samples: tuple[Module, ...] = ()
    norm: ModuleGroup | None = None
    followers: tuple[tuple[Module, Module], ...] = ()
    before: UpstreamOp | None = None
    definition: str = ""
    match: DefinitionMatch | None = None
    reason: str = ""


class UpstreamOp(NamedTuple):
    """A Definition whose outputs a call site takes as inputs; ``stock(*inputs)`` computes them by its stock solution."""

    definition: Definition
    stock: Callable[..., Any] | None


CONFIG = "config"
OF_CONFIG = f"{CONFIG}."
"""Beginning of the name of a setting that code reads from the config of its module at each call."""


class DefinitionMatch(NamedTuple):
    """A Definition that a piece of code may compute, and the entry of its ``serving.code`` that states this code.

    ``details`` are what the part found out about code of another text, for its forward.
    """

    definition: Definition
    code: ModelCode
    details: Any = None

    def attribute(self, name: str) -> str:
        """Return the name of the module's attribute for an input of the Definition or for a role in its code."""
        return self.code.attributes.get(name, name)

    def value(self, module: Module, name: str) -> Any:
        """Return an input that a module keeps or that its code has as a constant; None if it has no such attribute."""
        constant = self.code.constants.get(name)
        value = setting(module, self.attribute(name)) if constant is None else constant
        # Model code may pass an int for a float; the Definition states the type.
        return float(value) if type(value) is int and self.definition.inputs[name].dtype in FLOATS else value

    def why_no_number(self, module: Module, name: str) -> str:
        """Return the reason if the module's value is no number of the Definition's type; empty if it is one."""
        value, dtype = self.value(module, name), self.definition.inputs[name].dtype
        expected = bool if dtype == "bool" else float if dtype in FLOATS else int
        if type(value) is expected:
            return ""
        return f"its {self.attribute(name)} is {value!r}, no number that {self.definition.name} takes"


def setting(module: Module, name: str) -> Any:
    """Return an attribute of a module, or of its config if the name begins with ``config.``; None if there is none."""
    if name.startswith(OF_CONFIG):
        return getattr(getattr(module, CONFIG, None), name[len(OF_CONFIG) :], None)
    return getattr(module, name, None)


class MatchCandidates(NamedTuple):
    """The Definitions that a piece of code may compute. Its bits must differ from those of each of the ``alternatives``."""

    matches: Sequence[DefinitionMatch]
    alternatives: Sequence[Definition] = ()


class FunctionOverrides(NamedTuple):
    """Replacements for functions that a forward calls: in inference, and in training if a derivative exists.

    The ``counting`` call sites count the calls that training leaves to stock code. Each of ``rewrites`` changes the syntax tree
    of the forward first, so that it calls a function in place of a method of the module or of an expression.
    """

    inference: Mapping[str, Any]
    training: Mapping[str, Any]
    counting: Sequence[CallSite]
    rewrites: Sequence[Callable[[ast.FunctionDef], None]] = ()


class MemberOverrides(NamedTuple):
    """Members of a class, such as a property through which the forward finds a function; the forward may be among them."""

    members: Mapping[str, Any]


class PartCall(NamedTuple):
    """A group of modules with its call site."""

    found: ModuleGroup
    site: CallSite


class OwnCode(NamedTuple):
    """The model's own code of a part that has several execution modes.

    ``way`` is the name of the current mode. ``call(*inputs) -> output`` runs the mode that is current at that time, on the
    inputs of the Definition; it is None if no Definition describes the part.
    """

    way: str
    call: Callable[..., Any] | None


class Part(Protocol):
    """One kind of part of a model: a module of :mod:`tilegym_db.models.parts`.

    A part that changes what a caller sees has ``OPTION``, the name of the option of a patch that states that the caller agrees.
    A part whose code has several execution modes also has ``own_code(found) -> OwnCode``. One whose results need not have the
    same bits has ``AGREES(returned, expected) -> bool``. One that replaces a single expression has ``IS_INNER``: other parts of
    the forward get the result as their stock code.
    """

    def find(self, model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
        """Return the groups of modules that look like it; ``others`` are the groups of the parts before it."""

    def candidates(self, found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
        """Return the Definitions that their code may compute, or the reason if no Definition describes it."""

    def probe(self, found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
        """Return random inputs and the results of the module's own code, or the reason if it cannot be probed."""

    def forward(
        self, stock: Any, calls: Sequence[PartCall]
    ) -> Callable[..., Any] | FunctionOverrides | MemberOverrides:
        """Return the forward that asks for a kernel first, or replacements for functions or members that it uses."""


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
            for matches in codes.values():  # the Definition that most models compute comes first
                matches.sort(key=lambda match: (-len(match.code.models), match.definition.name))
        return found

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that Definitions name, sorted."""
        return tuple(sorted(self._by_part))

    def definitions(self, part: str) -> list[Definition]:
        """Return every Definition of a part, by name."""
        return [
            definition
            for definition in self.catalog.definitions.values()
            if definition.serving is not None and definition.serving.part == part
        ]

    def nominated(self, part: str) -> list[DefinitionMatch]:
        """Return the Definitions of a part, each with its first code: a probe decides about code of another text."""
        return [
            DefinitionMatch(definition, definition.serving.code[0])
            for definition in self.definitions(part)
            if definition.serving is not None and definition.serving.code
        ]

    def fingerprints(self, part: str) -> frozenset[str]:
        """Return the fingerprints of all code that Definitions of a part state."""
        return frozenset(self._by_part.get(part, {}))

    def stating(self, part: str, mark: str) -> list[DefinitionMatch]:
        """Return the Definitions of a part that state code with a fingerprint."""
        return self._by_part.get(part, {}).get(mark, [])

    def is_stated(self, part: str, function: Any) -> bool:
        """Return True if a Definition of a part states exactly this code."""
        return (fingerprint(function) or "") in self._by_part.get(part, {})

    def look_up(
        self, part: str, function: Any, callees: Mapping[str, Any], what: str, undescribed: Mapping[str, str]
    ) -> list[DefinitionMatch] | str:
        """Return the Definitions of a part that a function may compute, or the reason if there is no such Definition.

        Args:
            part: the kind of part.
            function: the function whose source is looked up.
            callees: name -> function, for the functions that it may call.
            what: the name of the function in the reason.
            undescribed: fingerprint -> reason, for known code that no Definition describes.
        """
        mark = fingerprint(function) or ""
        matches = self._by_part.get(part, {}).get(mark)
        if matches is None:
            suffix = f" (fingerprint {mark})" if mark else ""
            return undescribed.get(mark) or f"{what} is no variant that is known{suffix}"
        for match in matches:
            for name, known in match.code.calls.items():
                if fingerprint(callees.get(name)) != known:
                    return f"{what} relies on a {name} that is not the one known with it"
        return matches


class ModuleOfPart(NamedTuple):
    """A module that plays a part, the key of its group, and the details that distinguish it for a probe."""

    module: Module
    function: str = ""
    key: Hashable = None
    detail: Hashable = None


def grouped(kind: str, parts: Iterable[ModuleOfPart]) -> Iterator[ModuleGroup]:
    """Group modules by class, function, key, and by whether the forward of the class runs."""
    groups: dict[Any, dict[Hashable, list[Module]]] = {}
    for one in parts:
        key = (one.function, type(one.module), one.key, not runs_class_forward(one.module))
        groups.setdefault(key, {}).setdefault(None, []).append(one.module)
        groups[key].setdefault((one.detail,), []).append(one.module)
    for (function, cls, _, is_replaced), by_detail in groups.items():
        modules = tuple(by_detail.pop(None))
        samples = tuple(alike[0] for alike in by_detail.values())
        yield ModuleGroup(kind, cls, modules, function, samples, reason=REPLACED if is_replaced else "")


def of_class(ask: Callable[[type[Module]], Answer]) -> Callable[[Module], Answer]:
    """Return a function that asks a question about the class of a module, once per class."""
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
    """Return True if a function is written in Python and is not wrapped."""
    return isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")


# ---- modules that no Definition describes ---------------------------------------------------------
# The modules of a model that compute, and that no Definition describes: the rows of a report beside its call sites.

NO_DEFINITION = "no definition describes it"
GLUE = "sums, products, masks or copies between its submodules; no definition describes them"
ADDED = "added to the model after the patch (PEFT copies modules_to_save); unpatch() and patch() again to serve it"
LIBRARY = "a library call; no definition describes it"
LOOKUP = "a library call; patch leaves look-ups of embeddings to it"
PRODUCTS = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
IDLE = (torch.nn.Identity, torch.nn.Dropout, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
COMPUTES = {
    *("baddbmm", "bmm", "conv1d", "cumsum", "einsum", "exp", "layer_norm", "matmul", "pow", "rsqrt"),
    *("scaled_dot_product_attention", "sigmoid", "silu", "softmax"),
}
"""Names in the code of a module that has submodules and also computes itself, such as a mixer or an attention."""
COMBINES = {
    *("add_", "cat", "clamp", "masked_fill", "repeat", "stack", "sum", "to", "where"),
    *("create_bidirectional_sliding_window_mask", "create_chunked_causal_mask", "create_sliding_window_causal_mask"),
}
"""Names in the code of a module that only combines what its submodules return; arithmetic does so too."""
POSITIONS = "arange"
ARITHMETIC = {"+", "-", "*", "/", "@", "**"}


class Undescribed(NamedTuple):
    """All modules of one class that no call site has, and the reason."""

    module_class: str
    modules: int
    reason: str


class Newcomers:
    """The modules that a model had when it was patched, to find those that other code has added since.

    PEFT copies the modules of ``modules_to_save``, and a copy runs stock code. It keeps the model and its modules weakly.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Remember the modules of a model."""
        self._model = weakref.ref(model)
        self._known = weakref.WeakSet(model.modules())

    def of_classes(self, names: Collection[str]) -> tuple[Undescribed, ...]:
        """Return the modules of classes with these names that the model has now and had not when it was patched."""
        model = self._model()
        added = [] if model is None else [module for module in model.modules() if module not in self._known]
        counts = Counter(type(module).__name__ for module in added)
        return tuple(Undescribed(name, counts[name], ADDED) for name in names if counts[name])


def undescribed(model: torch.nn.Module, found: Iterable[ModuleGroup]) -> tuple[Undescribed, ...]:
    """Return the classes of modules that compute and are in no group, in the order of the model.

    Submodules without weights belong to the module that has them, for example the activation of an MLP.
    """
    known = {id(module) for group in found for module in group.modules}
    seen: set[int] = set()
    counts: dict[type[torch.nn.Module], int] = {}
    reasons: dict[type[torch.nn.Module], str] = {}

    def visit(module: torch.nn.Module, *, is_described: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_known = id(module) in known
        is_part = is_described and not module._modules and not module._parameters
        if not is_known and not is_part and (reason := _reason(module)):
            counts[type(module)] = counts.get(type(module), 0) + 1
            reasons[type(module)] = reason
        for child in module.children():
            visit(child, is_described=is_known)

    visit(model, is_described=False)
    return tuple(Undescribed(cls.__name__, count, reasons[cls]) for cls, count in counts.items())


def _reason(module: torch.nn.Module) -> str:
    """Return the reason why a module that computes has no call site; empty if it computes nothing."""
    if isinstance(module, IDLE):
        return ""
    if isinstance(module, PRODUCTS) and _is_of_library(type(module)):
        return LIBRARY
    if isinstance(module, torch.nn.Embedding) and _is_of_library(type(module)):
        return LOOKUP
    has_weights = any(value is not None for value in module._parameters.values())
    cls: Any = type(module)
    names, combines = _own_code(cls)
    if has_weights or not module._modules or not COMPUTES.isdisjoint(names):
        return NO_DEFINITION
    return GLUE if combines or not COMBINES.isdisjoint(names) else ""


def _is_of_library(cls: type[Module]) -> bool:
    """Return True if the forward of a class is one of torch.nn, and not that of a router that is also a linear layer."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    return owner.__module__.startswith(torch.nn.__name__)


@functools.cache
def _own_code(cls: Any) -> tuple[frozenset[str], bool]:
    """Return the names in a class's forward and in its methods that the forward names, and True if there is arithmetic."""
    named = names_in_code(cls.forward)
    base = vars(torch.nn.Module)
    own = [method for name, method in methods(cls).items() if name in named and name not in base]
    codes = [inspect.unwrap(one) for one in (cls.forward, *own) if callable(one)]
    arithmetic = any(_has_arithmetic(code) for code in codes if isinstance(code, FunctionType))
    return frozenset().union(*map(names_in_code, codes)), arithmetic


def _has_arithmetic(function: FunctionType) -> bool:
    """Return True if a line of a function has arithmetic and no ``arange``, which numbers positions."""
    starts, line = dict(dis.findlinestarts(function.__code__)), 0
    arithmetic, numbering = set[int](), set[int]()
    for step in dis.get_instructions(function):
        line = starts.get(step.offset) or line
        if step.argval == POSITIONS:
            numbering.add(line)
        elif step.opname == "BINARY_OP" and step.argrepr.rstrip("=") in ARITHMETIC:
            arithmetic.add(line)
    return bool(arithmetic - numbering)

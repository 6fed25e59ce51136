"""The modules of a model that compute, and that no Definition describes: the rows of a report beside its call sites."""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.found import ModuleGroup, methods, names_in_code

NO_DEFINITION = "no definition describes it"
GLUE = "sums, products, masks or copies between its submodules; no definition describes them"
ADDED = "added to the model after the patch (PEFT copies modules_to_save); unpatch() and patch() again to serve it"
LIBRARY = "a library call; no definition describes it"
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
    if isinstance(module, PRODUCTS):
        return LIBRARY
    has_weights = any(value is not None for value in module._parameters.values())
    cls: Any = type(module)
    names, combines = _own_code(cls)
    if has_weights or not module._modules or not COMPUTES.isdisjoint(names):
        return NO_DEFINITION
    return GLUE if combines or not COMBINES.isdisjoint(names) else ""


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

"""Functions that the forward of a module calls, by the name of a global or of an attribute of the module.

transformers puts a decorator around such a function. It runs the function of a package if that is installed, and else the code
below it in PyTorch. Only that code is what kernels were measured against.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import change_class, runs_class_forward, shadow_function, subclass
from tilegym_db.models.found import WRAPPED, ModuleGroup, ModuleOfPart, PartCall, grouped, names_in_code, of_class
from tilegym_db.models.probe import device_of
from tilegym_db.models.rewrite import is_name, method_calls
from tilegym_db.models.upstream_code import decorated_alike, undecorated, wrapper_codes

OWN = "self."
"""Beginning of the name of a function that is an attribute of the module."""
CALL = "_tilegym_db_call_"
"""Beginning of the function that a rewritten forward calls in place of an attribute: ``CALL<name>(self, ...)``."""

PACKED = ("seqlens", "seq_idx", "cu_seq")
"""Parts of the names of arguments that mark the sequences of a packed batch."""

Module = torch.nn.Module


class Arguments(NamedTuple):
    """The parameters of a function. ``reads_others`` is True if its code may read arguments that have no parameter."""

    names: tuple[str, ...]
    reads_others: bool

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without those that are None or that the function ignores."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return {name: value for name, value in given.items() if value is not None and self._counts(name)}

    def _counts(self, name: str) -> bool:
        return name in self.names or self.reads_others or any(part in name for part in PACKED)


def arguments_of(function: FunctionType) -> Arguments:
    """Return the parameters of a function."""
    parameters = inspect.signature(function).parameters.values()
    others = {parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD}
    read = {one.argval for one in dis.get_instructions(function) if one.opname.startswith("LOAD")}
    names = tuple(parameter.name for parameter in parameters if parameter.name not in others)
    return Arguments(names, bool(others & read))


def groups(
    kind: str, model: Module, patterns: Sequence[str], detail: Callable[[Module], Any] = device_of
) -> Iterator[ModuleGroup]:
    """Yield the modules whose forward calls a function with one of ``patterns`` in its name, once per function."""
    named = of_class(
        lambda cls: tuple(name for name in names_in_code(cls.forward) if any([pattern in name for pattern in patterns]))
    )
    return grouped(
        kind,
        [
            ModuleOfPart(module, found, key=(id(callee(module, found)), detail(module)), detail=detail(module))
            for module in model.modules()
            for name in named(module)
            if (found := _place(module, name))
        ],
    )


def _place(module: Module, name: str) -> str:
    """Return the name of a function with :data:`OWN` before it if it is an attribute; empty if there is no such function."""
    forward: Any = inspect.unwrap(type(module).forward)
    is_global = any(one.opname == "LOAD_GLOBAL" and one.argval == name for one in dis.get_instructions(forward))
    place = name if is_global else OWN + name
    return place if callable(callee(module, place)) else ""


def callee(module: Module, name: str) -> Any:
    """Return the function of a name that a module's forward calls; None if there is none."""
    if name.startswith(OWN):
        own = name.removeprefix(OWN)
        return vars(module).get(own, module._modules.get(own))
    forward: Any = inspect.unwrap(type(module).forward)
    return forward.__globals__.get(name)


def plain_function(found: ModuleGroup) -> FunctionType | str:
    """Return the code in PyTorch that runs when a forward calls its function, or the reason if other code runs."""
    if hasattr(undecorated(found.module_class.forward), "__wrapped__"):
        return WRAPPED
    name = found.function.removeprefix(OWN)
    function = unwrapped_function(callee(found.modules[0], found.function), name)
    if isinstance(function, str):
        return function
    if function.__module__ != inspect.unwrap(found.module_class.forward).__module__:
        return f"its {name} is that of {function.__module__}, and the kernels were measured against PyTorch code"
    return function


def unwrapped_function(function: Any, name: str) -> FunctionType | str:
    """Return the code in PyTorch that runs when a function of that name is called, or the reason if other code runs."""
    while True:
        if isinstance(function, Module):  # made by the kernels package around a function
            if not runs_class_forward(function):
                return f"its {name} is replaced by the kernels package"
            function = function_inside(function)
        elif isinstance(function, FunctionType) and function.__code__ in _falling_back():
            function = _held(function).get("implementation")
        else:
            break
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return (
            f"its {name} is of type {type(function).__name__}, not a plain function (replaced by the kernels package?)"
        )
    return function


def function_inside(module: Module) -> FunctionType | None:
    """Return the one function that the forward of a module's class keeps; None if it keeps several or none.

    If the package ``kernels`` is installed, transformers puts a function into a module whose forward passes all arguments on.
    """
    inside = [value for value in _held(type(module).forward).values() if isinstance(value, FunctionType)]
    return inside[0] if len(inside) == 1 else None


def _held(function: Any) -> dict[str, Any]:
    """Return the values that a function keeps in its closure, by name; a cell may be empty."""
    held = {}
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(function.__code__.co_freevars if cells else (), cells, strict=True):
        with contextlib.suppress(ValueError):
            held[name] = cell.cell_contents
    return held


@cache
def _falling_back() -> frozenset[CodeType]:
    """Return the code of the wrappers that run a package's function, or else the one below."""
    try:
        from transformers.integrations import hub_kernels
    except ImportError:
        return frozenset()
    return wrapper_codes(getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None))


def replacements(
    calls: Sequence[PartCall],
    make: Callable[[ModuleGroup, Any, Callable[..., Any], FunctionType], Callable[..., Any]],
    *,
    of_any_module: bool = False,
) -> tuple[dict[str, Any], list[Callable[[ast.FunctionDef], None]]]:
    """Return the functions for a forward in place of the original ones, and the rewrites for those that are attributes.

    Args:
        make: ``make(found, site, stock, function)`` returns the function that asks for a kernel, and otherwise calls ``stock``,
            whose code in PyTorch is ``function``.
        of_any_module: True if the functions need not be of the same module of Python as the forward.
    """
    functions: dict[str, Any] = {}
    attributes = []
    for found, site in calls:
        stock = callee(found.modules[0], found.function)
        function = unwrapped_function(stock, found.function) if of_any_module else plain_function(found)
        assert isinstance(function, FunctionType), "only confirmed groups are patched"
        made, name = make(found, site, stock, function), found.function
        if name.startswith(OWN):
            name = name.removeprefix(OWN)
            attributes.append(name)
            functions[CALL + name] = _of_module(name, stock, made)
        else:
            functions[name] = made
    return functions, [_call_attributes(attributes)] if attributes else []


def _of_module(name: str, probed: Any, made: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(module, name)
        return made(*args, **kwargs) if own is probed else own(*args, **kwargs)

    return call


def _call_attributes(names: Collection[str]) -> Callable[[ast.FunctionDef], None]:
    """Return a rewrite that turns ``self.name(...)`` into ``CALL<name>(self, ...)``."""

    def name_of(call: ast.Call, method: ast.Attribute) -> str | None:
        return CALL + method.attr if is_name(method.value, "self") and method.attr in names else None

    return method_calls(name_of)


# ---- seams ----------------------------------------------------------------------------------------
# Seams of a model: places at which it can be cut, with tensors on both sides.
#
# A seam is a function that the forward of a module calls, by the name of a global or of an attribute of the module. Or it is a
# module without submodules. Functions are found in the code of the forward, and watched in a copy of it.

Around = Callable[["Seam", Callable[..., Any]], Callable[..., Any]]
"""``around(seam, function)`` returns a function that runs in place of ``function``."""


class Seam(NamedTuple):
    """A function that the modules of a class call, or the modules themselves if ``function`` is empty."""

    module_class: type[Module]
    function: str = ""
    """The name that the forward calls it by; of an attribute with :data:`OWN` before it."""

    @property
    def name(self) -> str:
        """The name in tables: that of the class, and of the function after a point."""
        called = self.function.removeprefix(OWN)
        return f"{self.module_class.__name__}.{called}" if called else self.module_class.__name__

    def modules(self, model: Module) -> list[Module]:
        """Return the modules of its class in a model."""
        return [module for module in model.modules() if type(module) is self.module_class]

    def code(self, model: Module) -> FunctionType | str:
        """Return the Python function that runs, without known wrappers, or the reason if other code runs."""
        module = self.modules(model)[0]
        if not self.function:
            forward = self.module_class.forward
            if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__"):
                return forward
            return "its forward is wrapped by a decorator, so its code is not the whole computation"
        return unwrapped_function(callee(module, self.function), self.function.removeprefix(OWN))


def functions_called(module: Module) -> tuple[str, ...]:
    """Return the Python functions that the forward of a module's class names, as globals or as attributes of the module."""
    forward: Any = undecorated(type(module).forward)
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or not runs_class_forward(module):
        return ()
    places: dict[str, None] = {}
    for one in dis.get_instructions(forward):
        if one.opname == "LOAD_GLOBAL":
            places[str(one.argval)] = None
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.argval in vars(module):
            places[OWN + str(one.argval)] = None
    return tuple(place for place in places if _is_function_of_models(module, place))


def _is_function_of_models(module: Module, place: str) -> bool:
    function = callee(module, place)
    if not isinstance(function, FunctionType):
        return False
    return not str(function.__module__).startswith("torch.")


def function_seams(model: Module) -> list[Seam]:
    """Return a seam for each function that a forward in the model names, in the order of the model."""
    return [
        Seam(type(module), place)
        for module in {type(module): module for module in model.modules()}.values()
        for place in functions_called(module)
    ]


@contextlib.contextmanager
def watched(model: Module, seams: Iterable[Seam], around: Around) -> Iterator[None]:
    """Run ``around(seam, function)`` in place of each function of the seams inside a ``with`` block.

    The modules of this model get a class with a copied forward for that time. No global of a module of Python changes.
    """
    by_class: dict[type[Module], list[Seam]] = {}
    for seam in seams:
        by_class.setdefault(seam.module_class, []).append(seam)
    with contextlib.ExitStack() as undo:
        for cls, own in by_class.items():
            modules = own[0].modules(model)
            replaced = {}
            for seam in own:
                if not seam.function.startswith(OWN):
                    replaced[seam.function] = around(seam, callee(modules[0], seam.function))
                    continue
                name = seam.function.removeprefix(OWN)
                for module in modules:
                    undo.callback(vars(module).__setitem__, name, vars(module)[name])
                    vars(module)[name] = around(seam, vars(module)[name])
            if replaced:
                forward: Any = undecorated(cls.forward)
                shadow, forget = shadow_function(forward, replaced)
                undo.callback(forget)
                ours = subclass(cls, decorated_alike(cls.forward, shadow))
                for module in modules:
                    undo.callback(change_class, module, cls)
                    change_class(module, ours)
        yield

"""Functions that the forward of a module calls, by the name of a global or of an attribute of the module.

transformers puts a decorator around such a function. It runs the function of a package if that is installed, and else the code
below it in PyTorch. Only that code is what kernels were measured against.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import runs_class_forward
from tilegym_db.models.found import WRAPPED, ModuleGroup, ModuleOfPart, PartCall, grouped, names_in_code, of_class
from tilegym_db.models.probe import device_of
from tilegym_db.models.upstream_code import undecorated, wrapper_codes

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
    kind: str, model: Module, pattern: str, detail: Callable[[Module], Any] = device_of
) -> Iterator[ModuleGroup]:
    """Yield the modules whose forward calls a function with ``pattern`` in its name, once per function."""
    named = of_class(lambda cls: tuple(name for name in names_in_code(cls.forward) if pattern in name))
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
        calls: the groups and their call sites.
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
    return functions, [lambda function: _AttributeCalls(attributes).visit(function)] if attributes else []


def _of_module(name: str, probed: Any, made: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(module, name)
        return made(*args, **kwargs) if own is probed else own(*args, **kwargs)

    return call


class _AttributeCalls(ast.NodeTransformer):
    """A transformer that turns ``self.name(...)`` into ``CALL<name>(self, ...)``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name(id="self") as owner, attr=name) if name in self._names:
                function = ast.copy_location(ast.Name(CALL + name, ctx=ast.Load()), node.func)
                return ast.copy_location(ast.Call(function, [owner, *node.args], node.keywords), node)
        return node

"""Seams of a model: places at which it can be cut, with tensors on both sides.

A seam is a function that the forward of a module calls, by the name of a global or of an attribute of the module. Or it is a
module without submodules. Functions are found in the code of the forward, and watched in a copy of it.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import change_class, runs_class_forward, shadow_function, subclass
from tilegym_db.models.called_functions import OWN, callee, unwrapped_function
from tilegym_db.models.upstream_code import decorated_alike, undecorated

Module = torch.nn.Module
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

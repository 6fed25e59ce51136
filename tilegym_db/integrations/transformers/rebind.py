"""Ways to give one instance other behaviour without touching its class, its module or its ``__dict__``."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

__all__ = ["has_hooks", "is_patched", "shadow_function", "subclass", "unpatched_class"]

_MARK = "_tilegym_db_replaces"
_numbers = itertools.count()


def subclass(base: type[torch.nn.Module], forward: Callable[..., Any]) -> type[torch.nn.Module]:
    """A class that differs from ``base`` in ``forward`` only.

    It keeps the name, so that configs keyed by class name go on working; copying or pickling an instance gives back the base
    class, so that nothing of this package ends up in a checkpoint.
    """

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Protocol 1 has the class among its arguments; picklers refuse another class there in the later ones.
        reduced: Any = base.__reduce_ex__(self, min(int(protocol), 1))
        function, arguments, *rest = reduced
        restored = tuple(base if argument is patched else argument for argument in arguments)
        return (function, restored, *rest)

    namespace = {
        "forward": forward,
        "__reduce_ex__": reduce_ex,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        _MARK: base,
    }
    patched = type(base.__name__, (base,), namespace)
    return patched


def is_patched(module: torch.nn.Module) -> bool:
    """True where the module's class, or one that it derives from, was made by :func:`subclass`."""
    return hasattr(type(module), _MARK)


def unpatched_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The module's class, or what it was before :func:`subclass` made another of it."""
    cls = type(module)
    replaced: type[torch.nn.Module] | None = vars(cls).get(_MARK)
    return cls if replaced is None else replaced


def shadow_function(function: FunctionType, replacements: Mapping[str, Any]) -> tuple[FunctionType, Callable[[], Any]]:
    """The same code, reading its globals from a module of its own in which some are replaced; and what removes that module.

    The module is registered under a private name because tracers look a function's globals up by module name. It is removed
    by the second result, or with the function.
    """
    shadow = ModuleType(f"{function.__module__}__tilegym_db_{next(_numbers)}")
    private = {"__name__", "__spec__", "__loader__"}
    vars(shadow).update({name: value for name, value in function.__globals__.items() if name not in private})
    vars(shadow).update(replacements)
    sys.modules[shadow.__name__] = shadow
    copied = FunctionType(
        function.__code__, vars(shadow), function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__ = function.__qualname__
    forget = weakref.finalize(copied, sys.modules.pop, shadow.__name__, None)
    forget.atexit = False
    return copied, forget


def has_hooks(module: Any) -> bool:
    """Whether calling a module does more than its class's forward: hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))

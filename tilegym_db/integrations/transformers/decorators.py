"""Decorators of transformers whose part in a forward is known: what is under them, and other code under the same ones.

``deprecate_kwarg`` renames arguments that callers pass by an older name. What is patched goes on taking these names, so it gets
the model's own decorator around it. The wrapper for gradient checkpointing does nothing outside of training.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any

__all__ = ["decorated_alike", "is_renaming", "undecorated", "without_checkpointing", "wrapper_codes"]


def undecorated(forward: Any) -> Any:
    """What a forward is under the decorators that rename its arguments; ``forward`` itself where it has none."""
    while _renames(forward):
        forward = forward.__wrapped__
    return forward


def decorated_alike(forward: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under the decorators that :func:`undecorated` takes off ``forward``."""
    if not _renames(forward):
        return function
    inner = decorated_alike(forward.__wrapped__, function)
    cells = tuple(CellType(inner) if _holds(cell, forward.__wrapped__) else cell for cell in forward.__closure__)
    around = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, cells)
    around.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(around, inner)


def without_checkpointing(forward: Any) -> Any:
    """A layer's forward out of the wrapper for gradient checkpointing; ``forward`` itself where it has none."""
    if isinstance(forward, FunctionType) and forward.__code__ in _checkpointing_codes():
        return getattr(forward, "__wrapped__", None)
    return forward


def is_renaming(decorator: ast.expr, scope: Mapping[str, Any]) -> bool:
    """Whether a decorator in a function's source is one that renames arguments; ``scope`` has the globals of the function."""
    match decorator:
        case ast.Call(func=ast.Name(id=name)):
            made_by = getattr(scope.get(name), "__code__", None)
            return made_by is not None and made_by is getattr(_deprecate_kwarg(), "__code__", None)
    return False


def _renames(forward: Any) -> bool:
    return (
        isinstance(forward, FunctionType)
        and forward.__code__ in _renaming_codes()
        and any(_holds(cell, getattr(forward, "__wrapped__", None)) for cell in forward.__closure__ or ())
    )


def _holds(cell: CellType, value: Any) -> bool:
    return cell.cell_contents is value and value is not None


@cache
def _renaming_codes() -> frozenset[CodeType]:
    return wrapper_codes(_deprecate_kwarg())


def _deprecate_kwarg() -> Any:
    try:
        from transformers.utils.deprecation import deprecate_kwarg
    except ImportError:
        return None
    return deprecate_kwarg


@cache
def _checkpointing_codes() -> frozenset[CodeType]:
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return frozenset()
    defined = vars(GradientCheckpointingLayer).get("__init_subclass__")
    return frozenset(_codes_in(getattr(getattr(defined, "__func__", None), "__code__", None)))


def wrapper_codes(decorator: Any) -> frozenset[CodeType]:
    """The code of the wrappers that a decorator with arguments puts around functions: two functions deep in it."""
    made = _codes_in(getattr(decorator, "__code__", None))
    return frozenset(inner for code in made for inner in _codes_in(code))


def _codes_in(code: CodeType | None) -> Iterator[CodeType]:
    """The code of the functions that a function defines."""
    return (const for const in getattr(code, "co_consts", ()) if isinstance(const, CodeType))

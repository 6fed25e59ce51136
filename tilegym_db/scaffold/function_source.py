"""Writes a function of a notebook or module, with everything it uses, into one self-contained file.

Modules become imports. Functions and kernels of the same notebook or module are copied, and plain values are written
out. A tensor or closure cannot be written out, so it is refused by name.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from tilegym_db.errors import UsageError

_PLAIN = (bool, int, float, str, bytes, type(None))
_LANGUAGES = {"triton": "triton", "tilelang": "tilelang", "cuda.tile": "cutile"}


def function_source(function: Callable[..., Any], *, is_bare: bool = False) -> str:
    """Return one Python file that defines the function at its top level, under the same name.

    Args:
        function: defined with ``def`` in a file or a cell of a notebook.
        is_bare: leave out decorators, and annotations that name anything other than tensors and builtin types.

    Raises:
        UsageError: its source is not known, or it uses something that cannot be written into a file; names it.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise UsageError(
            f"a function of Python is needed, defined with def, not {type(function).__name__}.",
            code="function_expected",
        )
    found = _Collected(is_bare)
    found.take(_plain(function), function.__name__)
    parts = [*sorted(found.imports), *found.values, *found.functions]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def rewritten_source(functions: Sequence[ast.FunctionDef], scope: Mapping[str, Any], module: str) -> str:
    """Return one Python file with functions given as syntax trees, and everything of their scope that they use.

    Args:
        functions: in the order of the file, without decorators.
        scope: the globals of the code that they were written from.
        module: the name of its module.

    Raises:
        UsageError: they use something that cannot be written into a file; names it.
    """
    found = _Collected(True)
    own = {function.name for function in functions}
    for function in functions:
        for name in _names(function, scope):
            if name not in own:
                found.use(name, scope[name], module)
    parts = [*sorted(found.imports), *found.values, *found.functions, *map(ast.unparse, functions)]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def language_of(source: str) -> str:
    """Return the kernel language of a file by its imports; ``python`` if it imports none of the three tile languages."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}  # from cuda import tile
    for package, language in _LANGUAGES.items():
        if any(name == package or name.startswith(f"{package}.") for name in names):
            return language
    return "python"


class _Collected:
    """The contents of a file: imports, values, and functions in definition order."""

    def __init__(self, is_bare: bool = False) -> None:
        self._is_bare = is_bare
        self.imports: set[str] = set()
        self.values: list[str] = []
        self.functions: list[str] = []
        self._seen: dict[str, Any] = {}

    def take(self, function: FunctionType, name: str) -> None:
        """Add a function after everything it uses."""
        text, tree = _parsed(function, name)
        if self._is_bare:
            text, tree = _bare(text, tree)
        if function.__closure__:
            inner = ", ".join(function.__code__.co_freevars)
            raise UsageError(
                f"'{name}' uses {inner} of the function around it. Pass it as an argument, or define it outside.",
                code="closure_variable",
            )
        self._seen[name] = function
        for used in _names(tree, function.__globals__):
            self.use(used, function.__globals__[used], function.__module__)
        self.functions.append(text)

    def use(self, name: str, value: Any, module: str) -> None:
        """Add a global that code of a module reads."""
        if name in self._seen:
            return
        self._seen[name] = value
        plain = _plain(value)
        if isinstance(value, ModuleType):
            self.imports.add(f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else ""))
        elif isinstance(plain, FunctionType) and plain.__module__ == module:
            self.take(plain, name)
        elif isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value)):
            self.values.append(f"{name} = {value!r}")
        else:
            self._import_from(name, value)

    def _import_from(self, name: str, value: Any) -> None:
        """Return ``from module import name`` if that import gives this exact value."""
        home, known_as = getattr(value, "__module__", None), getattr(value, "__qualname__", name)
        if home in (None, "__main__", "builtins") or not str(known_as).isidentifier():
            raise UsageError(
                f"'{name}' is a {type(value).__name__}, which cannot be written into a separate file. Make it a "
                "number, a text, a function or an argument.",
                code="global_unwritable",
            )
        self.imports.add(f"from {home} import {known_as}" + (f" as {name}" if known_as != name else ""))


def _plain(value: Any) -> Any:
    """Return the function below a kernel's decorator."""
    inner = getattr(value, "fn", None)
    return inner if isinstance(inner, FunctionType) else value


def _parsed(function: Any, name: str) -> tuple[str, ast.Module]:
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise UsageError(f"{name!r} is no function defined with 'def'.", code="function_expected")
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise UsageError(
            f"the source of '{name}' is not known. Define it in a file or in a cell of a notebook.",
            code="source_unknown",
        ) from None
    return text, ast.parse(text)


def _bare(text: str, tree: ast.Module) -> tuple[str, ast.Module]:
    """Return the text and tree of a function without its decorators, and without annotations that need an import."""
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef), "only functions defined with def are parsed"
    lines = text.splitlines(keepends=True)[function.lineno - 1 :]
    function.decorator_list = []
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [function.returns, *(one.annotation for one in named if one is not None)]
    used = {node.id for one in annotations if one is not None for node in ast.walk(one) if isinstance(node, ast.Name)}
    if all(name == "torch" or hasattr(builtins, name) for name in used):
        return "".join(lines), tree
    for one in named:
        if one is not None:
            one.annotation = None
    function.returns = None
    return ast.unparse(tree), tree


def _names(tree: ast.AST, scope: Mapping[str, Any]) -> list[str]:
    """Return the module-level names that a function reads, in a fixed order, with annotations and decorators."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return sorted(name for name in read if name in scope and not hasattr(builtins, name))

"""A fingerprint of what a function's source does, blind to the names it uses.

Two ``forward`` methods that differ in variable names, annotations, docstrings or formatting have one fingerprint; two that
differ in any operation, attribute or constant do not. It only nominates: a behavioural probe confirms.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

__all__ = ["fingerprint", "source_fingerprint"]


@functools.lru_cache(maxsize=4096)
def fingerprint(function: Callable[..., Any]) -> str | None:
    """16 hex digits, or None where the source is not to be had (built-in, generated, wrapped in C)."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return source_fingerprint(source)


def source_fingerprint(source: str) -> str | None:
    """As :func:`fingerprint`, from the text of one function."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    names: dict[str, str] = {}
    for argument in _arguments(function.args):
        names[argument.arg] = f"v{len(names)}"
    normalised = _Normalise(names)
    body = [normalised.visit(statement) for statement in _without_docstring(function.body)]
    parameters = [names[argument.arg] for argument in _arguments(function.args)]
    # Unparsed, not dumped: the text of a tree is the same in every Python version, its dump is not.
    text = ast.unparse(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])))
    defaults = [ast.unparse(value) for value in function.args.defaults]
    return hashlib.sha256(repr((parameters, defaults, text)).encode()).hexdigest()[:16]


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    extra = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_docstring = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_docstring else body


class _Normalise(ast.NodeTransformer):
    """Renames parameters and local variables in order of appearance; globals and attributes keep their names."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Store) and node.id not in self._names:
            self._names[node.id] = f"v{len(self._names)}"
        return ast.Name(id=self._names.get(node.id, node.id), ctx=node.ctx)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        # The right side is evaluated before the names on the left exist.
        value = self.visit(node.value)
        targets = [self.visit(target) for target in node.targets]
        return ast.Assign(targets=targets, value=value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return ast.Assign(targets=[self.visit(node.target)], value=self.visit(node.value))

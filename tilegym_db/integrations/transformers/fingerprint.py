"""A fingerprint of what a function's source does, blind to the names of its local variables.

Two ``forward`` methods that differ in local names, annotations, docstrings or formatting have one fingerprint; two that
differ in any operation, attribute, constant or parameter do not. Parameter names count because callers may pass them by
keyword. It only nominates: a behavioural probe confirms.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

__all__ = ["fingerprint", "once_per_function", "source_fingerprint"]

Answer = TypeVar("Answer")


def once_per_function(ask: Callable[[FunctionType], Answer]) -> Callable[[FunctionType], Answer]:
    """A question about the source of a function, which does not change while the function lives: asked once."""
    answers: weakref.WeakKeyDictionary[FunctionType, Answer] = weakref.WeakKeyDictionary()

    @functools.wraps(ask)
    def asked(function: FunctionType) -> Answer:
        if function not in answers:
            answers[function] = ask(function)
        return answers[function]

    return asked


def fingerprint(function: Any) -> str | None:
    """16 hex digits, or None where the code that runs is not to be had as source.

    That is so for what is built in, generated, or wrapped: a wrapper shows the source of what it wraps and does more.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return None
    return _of_source(function)


@once_per_function
def _of_source(function: FunctionType) -> str | None:
    try:
        source = inspect.getsource(function)
    except OSError:
        return None
    return source_fingerprint(source)


def source_fingerprint(source: str) -> str | None:
    """As :func:`fingerprint`, from the text of one function; None where it is anything else."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:  # a lambda in the middle of an expression, for one
        return None
    function = tree.body[0] if tree.body else None
    if not isinstance(function, ast.FunctionDef):
        return None
    parameters = [argument.arg for argument in _arguments(function.args)]
    normalised = _Normalise(parameters)
    body = [normalised.visit(statement) for statement in _without_docstring(function.body)]
    # Unparsed, not dumped: the text of a tree is the same in every Python version, its dump is not.
    text = ast.unparse(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])))
    defaults = [ast.unparse(value) for value in (*function.args.defaults, *function.args.kw_defaults) if value]
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
    """Renames local variables in order of appearance; parameters, globals and attributes keep their names."""

    def __init__(self, parameters: list[str]) -> None:
        self._names = {name: name for name in parameters}
        self._locals = 0

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Store) and node.id not in self._names:
            self._names[node.id] = f"${self._locals}"  # no identifier, so that no global can have this name
            self._locals += 1
        return ast.Name(id=self._names.get(node.id, node.id), ctx=node.ctx)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        # The right side is evaluated before the names on the left exist.
        value = self.visit(node.value)
        targets = [self.visit(target) for target in node.targets]
        return ast.Assign(targets=targets, value=value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        value = self.visit(node.value)
        return ast.Assign(targets=[self.visit(node.target)], value=value)

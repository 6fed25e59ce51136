"""Recognise code that only computes: its results depend on its arguments, and running it leaves nothing behind.

A probe runs a piece of code on a few inputs. Its answer holds for all inputs only if the code takes no decision by them, and
holds for all calls only if the code keeps nothing and draws nothing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any

from tilegym_db.models.upstream_code import once_per_function

UNSTEADY = ("dropout", "rand", "training", "bernoulli", "item", "tolist", "print", "cuda_graph")
"""Parts of names of functions and attributes whose value is not one of the arguments alone, or that wait for a device."""


def why_not_plain(functions: Iterable[Any]) -> str:
    """Return the reason if one of some functions does more than compute; empty if all only compute."""
    for function in functions:
        reason = "" if not isinstance(function, FunctionType) else _why_not(function)
        if reason:
            return reason
    return ""


@once_per_function
def _why_not(function: FunctionType) -> str:
    tree = _tree(function)
    if tree is None:
        return f"there is no source of its {function.__name__}"
    given = {argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)} - {"self"}
    for node in ast.walk(tree):
        reason = _of_node(node, given)
        if reason:
            return f"its {function.__name__} {reason}"
    return ""


def _tree(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of the code that runs; a decorator that returned the function itself is irrelevant."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError):
        return None
    return body[0] if body and isinstance(body[0], ast.FunctionDef) else None


def _of_node(node: ast.AST, given: Collection[str]) -> str:
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
            return "writes to an object"
        case ast.Global() | ast.Nonlocal() | ast.Yield() | ast.Await() | ast.While():
            return "keeps a state"
        case ast.Attribute(attr=name) | ast.Name(id=name) if any(part in name for part in UNSTEADY):
            return f"uses {name}"
        case ast.Call(func=ast.Attribute(attr=name)) if name.endswith("_") and not name.startswith("_"):
            return f"calls {name}, which overwrites"
        case ast.If(test=test) | ast.IfExp(test=test) if _decides_by(test, given):
            return "takes a decision by its arguments"
    return ""


def _decides_by(test: ast.expr, given: Collection[str]) -> bool:
    """Return True if a condition reads an argument other than to compare it with None."""
    match test:
        case ast.Compare(left=ast.Name(), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return False
    return any(isinstance(node, ast.Name) and node.id in given for node in ast.walk(test))

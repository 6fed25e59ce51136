"""Recognise the forward of a gated MLP, ``self.w2(silu(self.w1(x)) * self.w3(x))``, whatever its attributes are called."""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any, NamedTuple

from tilegym_db.models.rewrite import parsed
from tilegym_db.models.upstream_code import once_per_function


class GatedCode(NamedTuple):
    """The attributes of a gated MLP. ``activation`` is empty if the forward calls a function of its module."""

    gate: str
    up: str
    output: str
    activation: str


def gated_code(forward: Any) -> GatedCode | None:
    """Return the attributes that a forward uses as a gated MLP does; None for any other forward."""
    return _of_source(forward) if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") else None


@once_per_function
def _of_source(forward: FunctionType) -> GatedCode | None:
    function = parsed(forward)
    names = [] if function is None else [argument.arg for argument in function.args.args]
    if function is None or len(names) != 2 or function.args.vararg or function.args.kwarg or function.args.kwonlyargs:
        return None
    result = _result(function)
    match result and _called(result, names[0]):
        case (output, ast.BinOp(left=left, op=ast.Mult(), right=right)):
            pass
        case _:
            return None
    for gate, up in ((left, right), (right, left)):  # a product has the same bits in either order
        activated, second = _activated(gate, names[0]), _called(up, names[0])
        if activated is None or second is None or not _is(second[1], names[1]):
            continue
        first = _called(activated[1], names[0])
        if first is not None and _is(first[1], names[1]):
            found = GatedCode(first[0], second[0], output, activated[0])
            return found if len({*found}) == len(found) else None
    return None


def _result(function: ast.FunctionDef) -> ast.expr | None:
    """Return the returned expression with each local variable replaced by its value; None if the code does more."""
    values: dict[str, ast.expr] = {}
    for statement in function.body:
        match statement:
            case ast.Expr(value=ast.Constant()):
                continue
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name not in values:
                values[name] = _Inlined(values).visit(value)
            case ast.Return(value=ast.expr() as value) if statement is function.body[-1]:
                result: ast.expr = _Inlined(values).visit(value)
                is_all = all(isinstance(value, ast.Constant) for value in values.values())
                return result if is_all else None  # a variable that the result does not use is more code
            case _:
                return None
    return None


class _Inlined(ast.NodeTransformer):
    """Replaces each variable by its value, once: a second use would compute the value again."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._values:
            value, self._values[node.id] = self._values[node.id], ast.Constant(None)
            return value
        return node


def _called(node: ast.expr, owner: str) -> tuple[str, ast.expr] | None:
    """Return (attribute, argument) of ``self.attribute(argument)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute), args=[argument], keywords=[]) if (
            name == owner
        ):
            return attribute, argument
    return None


def _activated(node: ast.expr, owner: str) -> tuple[str, ast.expr] | None:
    """Return (attribute, argument) of an activation; the attribute of a function with any options is empty."""
    match _called(node, owner), node:
        case None, ast.Call(args=[argument]):
            return "", argument
        case found, _:
            return found


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name

"""Constraints that speak of contents (``num_kv_indices == kv_indptr[-1].item()``), evaluated without ``eval``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tilegym_db.errors import RecordError

__all__ = ["Unknown", "check_content_constraints", "constraint_problem", "holds"]

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.BitAnd: operator.and_,
}  # fmt: skip
_METHODS = frozenset({"item", "max", "min", "sum", "all", "any", "numel", "size", "dim", "diff"})
_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "min": min, "max": max, "abs": abs, "all": all, "any": any}
MAX_DEPTH = 64


class Unknown(Exception):
    """The constraint uses what this evaluator does not know; it is then not checked, and that is said."""


def holds(text: str, values: Mapping[str, Any]) -> bool:
    """Whether a constraint holds for sizes (by axis) and tensors or numbers (by input).

    Raises:
        Unknown: it uses a name, a method or syntax that is not known.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _is_true(_value(tree, values, 0))
    except (
        SyntaxError,
        AttributeError,
        IndexError,
        TypeError,
        ValueError,
        ZeroDivisionError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise Unknown(f"{text!r} cannot be evaluated: {error}") from None


def constraint_problem(text: str, names: Collection[str]) -> str | None:
    """Why :func:`holds` can never evaluate a constraint over these axes and inputs; None where it may."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{text!r} is no expression: {error}"
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name not in names and not (id(node) in called and name in _FUNCTIONS):
                return f"{text!r} uses '{name}', which is no axis and no input"
            case ast.Attribute(attr=name) if name not in (_METHODS if id(node) in called else {"shape"}):
                return f"{text!r} uses '.{name}', which is not known here"
            case ast.Call(keywords=[_, *_]) | ast.Lambda() | ast.IfExp() | ast.NamedExpr() | ast.Starred():
                return f"{ast.unparse(node)!r} is not known here"
            case ast.comprehension() | ast.Dict() | ast.Set() | ast.JoinedStr() | ast.Await():
                return f"{text!r} is no comparison of sizes and contents"
            case ast.BinOp(op=op) | ast.UnaryOp(op=op) if type(op) not in _OPERATORS:
                return f"{ast.unparse(node)!r} is not known here"
    return None


def check_content_constraints(texts: Collection[str], axes: Collection[str], inputs: Collection[str]) -> None:
    """Each can be evaluated, and names axes and inputs only."""
    for number, text in enumerate(texts):
        problem = constraint_problem(text, {*axes, *inputs})
        if problem is not None:
            raise RecordError(f"content_constraints[{number}]: {problem}", code="content_constraint")


def _value(node: ast.expr, values: Mapping[str, Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Unknown("it is nested too deeply")

    def of(child: ast.expr) -> Any:
        return _value(child, values, depth + 1)

    match node:
        case ast.Constant(value=int() | float() | bool()):
            return node.value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](of(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](of(left), of(right))
        case ast.BoolOp(op=op, values=parts):
            results = (_is_true(of(part)) for part in parts)
            return all(results) if isinstance(op, ast.And) else any(results)
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _OPERATORS for op in ops):
            operands = [of(left), *(of(item) for item in comparators)]
            found = [_OPERATORS[type(op)](a, b) for op, a, b in zip(ops, operands, operands[1:], strict=False)]
            return found[0] if len(found) == 1 else all(_is_true(item) for item in found)
        case ast.Subscript(value=value, slice=index):
            return of(value)[_index(index, of)]
        case ast.Attribute(value=value, attr="shape"):
            return tuple(of(value).shape)
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=args, keywords=[]) if method in _METHODS:
            return getattr(of(value), method)(*(of(item) for item in args))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(of(item) for item in args))
    raise Unknown(f"{ast.unparse(node)!r} is not known here")


def _is_true(value: Any) -> bool:
    """A comparison of tensors holds where it does for every element."""
    return bool(value.all() if hasattr(value, "numel") else value)


def _index(node: ast.expr, of: Callable[[ast.expr], Any]) -> Any:
    if isinstance(node, ast.Slice):
        return slice(*(None if part is None else of(part) for part in (node.lower, node.upper, node.step)))
    if isinstance(node, ast.Tuple):
        return tuple(_index(item, of) for item in node.elts)
    return of(node)

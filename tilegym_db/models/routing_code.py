"""Recognise the forward of a router: scores, a choice of experts by them, and the rest, which may scale the weights.

It looks for one shape of code in any class: ``return scores, weights, ids`` at the end. The statements after the last one that
assigns the scores, up to any place at which only weights and ids are needed later, are a choice that a kernel may make.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

from tilegym_db.models.rewrite import ROUTE, parsed, recompiled
from tilegym_db.models.upstream_code import once_per_function

SERVED = "_tilegym_db_chosen"
RECORD = "_tilegym_db_record"
"""The function that :func:`recording` calls with scores, weights and ids."""


class Choice(NamedTuple):
    """Statements ``start`` to ``stop`` of a block of code, the names that they define, and the attributes that they read."""

    start: int
    stop: int
    weights: str
    ids: str
    reads: tuple[str, ...]


class _Block(NamedTuple):
    """The block of statements that assigns the scores last, the place after that, and the statements after the block."""

    body: list[ast.stmt]
    start: int
    rest: list[ast.stmt]


@once_per_function
def choices(forward: FunctionType) -> tuple[Choice, ...]:
    """Return the statements of a router's forward that a kernel may replace, the longest first; empty for other code."""
    function = parsed(forward)
    names = None if function is None else _returned(function)
    if function is None or names is None or len(function.args.args) < 2:
        return ()
    scores, ids = names
    body, start, rest = _block(function.body, scores, [])
    last = next((place for place, one in enumerate(body) if isinstance(one, ast.Return)), len(body))
    found = []
    for stop in range(last, start, -1):
        inside, later = body[start:stop], [*body[stop:], *rest]
        live = _names(inside, ast.Store) & _names(later, ast.Load)
        if len(live) == 2 and ids in live:
            (weights,) = live - {ids}
            found.append(Choice(start, stop, weights, ids, _attributes(inside, function.args.args[0].arg)))
    return tuple(found)


def _returned(function: ast.FunctionDef) -> tuple[str, str] | None:
    """Return the names of the scores and of the ids if a function returns them at its end, with the weights between them."""
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returns) != 1 or returns[0] is not function.body[-1]:
        return None
    match returns[0].value:
        case ast.Tuple(elts=[ast.Name(id=scores), _, ast.Name(id=ids)]) if scores != ids:
            return scores, ids
    return None


def _block(body: list[ast.stmt], scores: str, rest: list[ast.stmt]) -> _Block:
    last = max((place for place, one in enumerate(body) if scores in _names([one], ast.Store)), default=len(body) - 1)
    last_one = body[last]
    if isinstance(last_one, ast.With):
        inner = _block(last_one.body, scores, [*body[last + 1 :], *rest])
        if inner.start < len(inner.body):
            return inner
    return _Block(body, last + 1, rest)


def _names(statements: Iterable[ast.stmt], kind: type[ast.expr_context]) -> set[str]:
    """Return the variables that statements assign or read; ``x /= y`` reads ``x`` too."""
    nodes = [node for one in statements for node in ast.walk(one)]
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
    if kind is ast.Load:
        found |= {one.target.id for one in nodes if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name)}
    return found


def _attributes(statements: Iterable[ast.stmt], owner: str) -> tuple[str, ...]:
    nodes = [node for one in statements for node in ast.walk(one)]
    return tuple(
        dict.fromkeys(
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner
        )
    )


def routed(forward: FunctionType, choice: Choice) -> FunctionType:
    """Return the same function that first asks :data:`ROUTE` for weights and ids; its choice runs if that returns None.

    It passes the module, the scores, the hidden states and all further arguments.
    """

    def change(function: ast.FunctionDef, body: list[ast.stmt], scores: str) -> None:
        given = [argument.arg for argument in function.args.args]
        call = ", ".join([given[0], scores, *given[1:]])
        asked, chosen = ast.parse(f"{SERVED} = {ROUTE}({call})\n{choice.weights}, {choice.ids} = {SERVED} or ()").body
        assert isinstance(chosen, ast.Assign), "the text above has an assignment"
        chosen.value = ast.Name(SERVED, ast.Load())
        is_left = ast.Compare(ast.Name(SERVED, ast.Load()), [ast.Is()], [ast.Constant(None)])
        own = body[choice.start : choice.stop]
        body[choice.start : choice.stop] = [asked, ast.If(is_left, own, [chosen])]

    return _changed(forward, change)


def recording(forward: FunctionType, choice: Choice) -> FunctionType:
    """Return the same function that passes scores, weights and ids to :data:`RECORD` after its choice."""

    def change(function: ast.FunctionDef, body: list[ast.stmt], scores: str) -> None:
        body[choice.stop : choice.stop] = ast.parse(f"{RECORD}({scores}, {choice.weights}, {choice.ids})").body

    return _changed(forward, change)


def _changed(forward: FunctionType, change: Callable[[ast.FunctionDef, list[ast.stmt], str], Any]) -> FunctionType:
    function = parsed(forward)
    names = None if function is None else _returned(function)
    assert function is not None, "ask choices first"
    assert names is not None, "ask choices first"
    body = _block(function.body, names[0], []).body
    before = body[0]
    change(function, body, names[0])
    for statement in body:
        for node in ast.walk(statement):
            if not hasattr(node, "lineno") and isinstance(node, ast.stmt | ast.expr):
                ast.copy_location(node, before)
    return recompiled(forward, function)

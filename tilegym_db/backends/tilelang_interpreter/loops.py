"""Which loops may run all their iterations at once: those of which no iteration needs another one's result."""

from __future__ import annotations

from typing import Any

from tvm import arith, ir, tirx

__all__ = ["MOST_AT_ONCE", "PARALLEL", "SERIAL", "THREAD_BINDING", "runs_at_once"]

SERIAL, PARALLEL, THREAD_BINDING = 0, 1, 4
MOST_AT_ONCE = 64
"""Iterations of a loop that is not parallel by its kind: each of them takes memory."""
_PLAIN = frozenset({"SeqStmt", "BufferStore", "IfThenElse", "Bind"})


def runs_at_once(loop: Any) -> bool:
    """Whether a loop that is not parallel by its kind gives the same, iteration after iteration or all at once.

    So it does where what it stores to is read and written at one place an iteration, which no other iteration has.
    """
    extent = loop.extent
    if type(extent).__name__ != "IntImm" or not 1 < int(extent.value) <= MOST_AT_ONCE:
        return False
    accesses: dict[Any, list[Any]] = {}
    stored, plain = set(), True

    def visit(node: Any) -> None:
        nonlocal plain
        if isinstance(node, tirx.Stmt):
            plain &= type(node).__name__ in _PLAIN
        elif type(node).__name__ == "Call":
            plain &= "atomic" not in str(node.op)
        if type(node).__name__ in ("BufferLoad", "BufferStore"):
            accesses.setdefault(node.buffer.data, []).append(node.indices)
        if type(node).__name__ == "BufferStore":
            stored.add(node.buffer.data)

    tirx.stmt_functor.post_order_visit(loop.body, visit)
    return plain and all(_one_place(accesses[data], loop.loop_var) for data in stored)


def _one_place(accesses: list[Any], variable: Any) -> bool:
    first = accesses[0]
    if any(not ir.structural_equal(first, other) for other in accesses[1:]):
        return False
    return any(_differs(index, variable) for index in first)


def _differs(index: Any, variable: Any) -> bool:
    """Whether an index is another one in each iteration."""
    found = arith.detect_linear_equation(index, [variable])
    return len(found) == 2 and type(found[0]).__name__ == "IntImm" and int(found[0].value) != 0

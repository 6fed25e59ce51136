"""One decision for a span of sizes: of a cache that grows by one position a step, so that every step is a new shape.

Deciding about a shape takes a hundred times as long as a call whose shape is known. A decision rests on the measured point that
is nearest in log space, and on the constraints of its candidates. The sizes of one axis for which a point is the nearest are an
interval, whatever the other axes are; constraints that are bounds of the axis hold on an interval as well. So where both ends of
a span are decided alike, the kernel is verified, declared and faster at every size between them, by the rule that picks it at the
ends. Only which of several such kernels is the fastest may differ inside.

A span of sizes that are left to stock code may hold some that a kernel serves, where its constraints pick out scattered sizes or
it was verified for one alone. Those may be left to stock too, which costs speed and nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tilegym_db.errors import TilegymDBError
from tilegym_db.records import Definition
from tilegym_db.records.binding import Binding
from tilegym_db.records.expressions import names_in, parse_expression
from tilegym_db.resolver.decide import Decision

__all__ = ["alike_span", "answer", "are_bounds_of", "octave", "span_around"]


def octave(size: int) -> tuple[int, int]:
    """The sizes from one power of two up to the next that ``size`` lies among; a span is never longer."""
    low = 1 << (max(size, 1).bit_length() - 1)
    return low, 2 * low - 1


def span_around(size: int, is_alike: Callable[[int], bool]) -> tuple[int, int]:
    """The sizes around one, within its octave, up to which both ends are decided alike.

    Args:
        size: what was decided; not asked about again.
        is_alike: whether another size is decided as it is. True on an interval around it; asked about 2 log2 of them at most.
    """
    low, high = octave(size)
    return min(size, _farthest(size, low, is_alike)), _farthest(size, high, is_alike)


def _farthest(inside: int, limit: int, is_alike: Callable[[int], bool]) -> int:
    """The last size from ``inside`` towards ``limit`` that is alike, by bisection."""
    if limit == inside or is_alike(limit):
        return limit
    outside = limit
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        if is_alike(middle):
            inside = middle
        else:
            outside = middle
    return inside


def answer(decision: Decision) -> tuple[Any, ...]:
    """What two decisions must share to be alike: the kernel with its source and config, and the measured point it rests on."""
    candidate, axes = decision.evidence.candidate, decision.evidence.axes
    kernel = None if candidate is None else (str(candidate), candidate.solution_digest)
    return kernel, decision.evidence.gpu, None if axes is None else tuple(sorted(axes.items()))


def are_bounds_of(axis: str, definition: Definition, decision: Decision) -> bool:
    """Whether what limits a decided kernel to some sizes of an axis are bounds, as ``L >= 2`` is and ``L % 16 == 0`` is not."""
    own: Iterable[str] = () if decision.solution is None else decision.solution.record.spec.constraints
    texts = (*definition.constraints, *own)
    return all(_is_bound(parse_expression(text), axis) for text in texts if axis in names_in(text)[0])


def _is_bound(node: ast.expr, axis: str) -> bool:
    """Whether an expression compares the axis itself with something that does not depend on it."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return False
    sides = (node.left, node.comparators[0])
    itself = [isinstance(side, ast.Name) and side.id == axis for side in sides]
    free = [axis not in names_in(ast.unparse(side))[0] for side in sides]
    is_order = isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return is_order and ((itself[0] and free[1]) or (itself[1] and free[0]))


def alike_span(
    axis: str, binding: Binding, decision: Decision, definition: Definition, choose: Callable[[Binding], Decision]
) -> tuple[int, int]:
    """The sizes of an axis around that of a call which are decided as the call is.

    Args:
        axis: of the Definition.
        binding: the call.
        decision: what was decided about it.
        definition: the operator.
        choose: decides about the same call of another size.
    """
    size = binding.axes[axis]
    if not are_bounds_of(axis, definition, decision):
        return size, size
    picked = answer(decision)

    def is_alike(other: int) -> bool:
        try:
            return answer(choose(replace(binding, axes={**binding.axes, axis: other}))) == picked
        except TilegymDBError:
            return False

    return span_around(size, is_alike)

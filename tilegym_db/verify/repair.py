"""Turns random sizes into sizes that meet the usual constraints, which they would seldom meet by chance."""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilegym_db.errors import RecordError
from tilegym_db.records.expressions import evaluate, evaluate_bool, parse_expression

__all__ = ["repaired"]

_PASSES = 2  # meeting one constraint (R <= D) may break another (R % 2 == 0)


def repaired(
    constraints: Sequence[str],
    axes: Mapping[str, int],
    fixed: Mapping[str, int],
    dtypes: Mapping[str, str],
    generator: random.Random,
) -> dict[str, int]:
    """The axes, changed where a constraint of a known form asks for it.

    Known are multiples (``N % 8 == 0``, ``N * sizeof(T) % 16 == 0``), bounds and equalities between an axis and an axis or
    number, and ``and`` and ``or`` of these. Others are left to the caller, who must check the result anyway.

    Args:
        constraints: of the Definition and the Solution.
        axes: the sizes that may be changed.
        fixed: the sizes of const axes, which may not.
        dtypes: what ``sizeof`` looks up.
        generator: chooses among alternatives.
    """
    repair = _Repair({**fixed, **axes}, frozenset(axes), dtypes, generator)
    for _ in range(_PASSES):
        broken = [text for text in constraints if not repair.holds(text)]
        for text in broken:
            repair.meet(parse_expression(text))
        if not broken:
            break
    return {name: repair.sizes[name] for name in axes}


@dataclass
class _Repair:
    sizes: dict[str, int]
    movable: frozenset[str]
    dtypes: Mapping[str, str]
    generator: random.Random

    def holds(self, text: str) -> bool:
        try:
            return evaluate_bool(text, self.sizes, self.dtypes)
        except RecordError:
            return False

    def meet(self, node: ast.expr) -> None:
        match node:
            case ast.BoolOp(op=ast.Or(), values=values):
                self.meet(self.generator.choice(values))
            case ast.BoolOp(op=ast.And(), values=values):
                for value in values:
                    self.meet(value)
            case ast.Compare(
                left=ast.BinOp(left=left, op=ast.Mod(), right=divisor),
                ops=[ast.Eq()],
                comparators=[ast.Constant(value=0)],
            ):
                self._make_multiple(left, divisor)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for one, op, other in zip((left, *comparators), ops, comparators, strict=False):
                    self._meet_comparison(one, op, other)

    def _make_multiple(self, left: ast.expr, divisor: ast.expr) -> None:
        """Round the one axis of ``left`` (``N``, ``2*N``, ``N * sizeof(T)``) down to a multiple, but not to zero."""
        names = [node.id for node in ast.walk(left) if isinstance(node, ast.Name) and node.id in self.movable]
        modulus = self._value(divisor)
        if len(names) != 1 or not modulus:
            return
        (name,) = names
        factor = self._value(left, {name: 1})
        if factor and factor == int(factor):
            step = int(modulus) // math.gcd(int(modulus), int(factor))
            self.sizes[name] = max(step, self.sizes[name] // step * step)

    def _meet_comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> None:
        """Move the axis that stands alone on the left, else the one on the right, to the other side's value."""
        slack = {ast.Lt: -1, ast.Gt: 1}.get(type(op), 0)
        for moving, other, sign in ((left, right, 1), (right, left, -1)):
            target = self._value(other)
            if not isinstance(moving, ast.Name) or moving.id not in self.movable or target is None:
                continue
            size, wanted = self.sizes[moving.id], int(target) + sign * slack
            if isinstance(op, ast.Eq):
                self.sizes[moving.id] = wanted
            elif isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                is_upper = isinstance(op, ast.Lt | ast.LtE) == (sign == 1)
                self.sizes[moving.id] = min(size, wanted) if is_upper else max(size, wanted)
            return

    def _value(self, node: ast.expr, changed: Mapping[str, int] | None = None) -> float | None:
        try:
            return float(evaluate(ast.unparse(node), {**self.sizes, **(changed or {})}, self.dtypes))
        except RecordError:
            return None

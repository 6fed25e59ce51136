"""Judges what a Solution gave on contents that it had not seen before, beside what stock code gives there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilegym_db.bench.runner import Runner
from tilegym_db.bench.stock_witness import MOST_DROPPED
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.verifier import Failure, judge

__all__ = ["wrong_on_unseen"]


def wrong_on_unseen(runner: Runner, contents: Sequence[Expected], found: Sequence[Mapping[str, Any]]) -> Failure | None:
    """Why the outputs on contents that a Solution had not seen before refute it, or None.

    Stock code rounds more often than its Definition does, and so fails a few contents: where everything is tiny, or where an
    output is the small difference of large terms. That proves nothing about it, nor about a kernel that gives what stock code
    gives there, unless such contents are more than are drawn.
    """
    definition, record = runner.definition, runner.solution.record
    judged = [judge(definition, record, *one) for one in zip(contents, found, strict=True)]
    wrong = [number for number, outcome in enumerate(judged) if isinstance(outcome, Failure)]
    few = len(wrong) <= MOST_DROPPED * len(contents)
    refuting = (
        number for number in wrong if not (few and _gives_what_stock_gives(runner, contents[number], found[number]))
    )
    worst = next((judged[number] for number in refuting), None)
    if not isinstance(worst, Failure):
        return None
    reason = f"wrong on contents that it had not seen before: {worst.reason}"
    return Failure("REJECTED", reason, "", "fresh contents", None, worst.case, worst.output, worst.verdict)


def _gives_what_stock_gives(runner: Runner, expected: Expected, outputs: Mapping[str, Any]) -> bool:
    """Whether stock code is refused on these contents too, and these outputs are as near to its own as the gates ask."""
    definition, record, witness = runner.definition, runner.solution.record, runner.verification.witness
    if record.spec.provides == "stock":
        return True
    stock = None if witness is None else witness.outputs(expected)
    if stock is None or not isinstance(judge(definition, record, expected, stock), Failure):
        return False
    truth = {name: value.to(expected.outputs[name].dtype) for name, value in stock.items()}
    return not isinstance(judge(definition, record, replace(expected, outputs=truth), outputs), Failure)

"""What holds between a Definition's self-test and its reference."""

from __future__ import annotations

from collections.abc import Collection

from tilegym_db.records.base import SeveralProblems
from tilegym_db.records.definition_parts import SelfTest
from tilegym_db.records.python_source import check_function

__all__ = ["check_self_test"]


def check_self_test(test: SelfTest | None, reference: str, inputs: Collection[str]) -> None:
    """Raise :class:`SeveralProblems` for a formulation that takes other inputs, and for mistakes planted nowhere."""
    if test is None:
        return
    problems = []
    try:
        check_function(test.independent, "self_test.independent", tuple(inputs))
    except ValueError as error:
        problems.append(str(error))
    problems += [
        f"self_test.planted_errors[{index}]: {planted.find!r} does not occur in the reference"
        for index, planted in enumerate(test.planted_errors)
        if planted.find not in reference
    ]
    if problems:
        raise SeveralProblems(problems)

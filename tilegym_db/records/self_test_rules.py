"""What holds between a Definition's self-test and its reference."""

from __future__ import annotations

from collections.abc import Collection

from tilegym_db.errors import RecordError
from tilegym_db.records.base import problems_of
from tilegym_db.records.definition_parts import SelfTest
from tilegym_db.records.python_source import check_function

__all__ = ["check_self_test"]


def check_self_test(test: SelfTest | None, reference: str, inputs: Collection[str]) -> None:
    """Raise :class:`RecordError` if a formulation takes other inputs, or if a planted mistake does not occur in the reference."""
    if test is None:
        return
    faults = list(problems_of(lambda: check_function(test.independent, "self_test.independent", tuple(inputs))))
    faults += [
        RecordError(
            f"self_test.planted_errors[{index}]: {planted.find!r} does not occur in the reference",
            code="planted_error_absent",
        )
        for index, planted in enumerate(test.planted_errors)
        if planted.find not in reference
    ]
    if faults:
        raise RecordError.of(faults)

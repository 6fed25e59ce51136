"""How many of its cases stock code may fail, and other Solutions with it."""

from __future__ import annotations

import pytest

from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.gates import PASSED
from tilegym_db.verification.session import FuzzOutcome, conclude_fuzz
from tilegym_db.verification.verifier import Failure

PAIRS = [(OracleCase(Case(Call("op", {"N": size}, {})), {}, {}, {}), None) for size in (1, 2, 3, 4)]


def failures(count: int, *, status: str, excused: bool = True) -> list[Failure]:
    verdict = PASSED if status == "INCORRECT_NUMERICAL" else None
    return [
        Failure(status, "at a case", case=expected.case, verdict=verdict, excused=excused)  # type: ignore[arg-type]
        for expected, _ in PAIRS[:count]
    ]


@pytest.mark.parametrize(
    ("status", "count", "is_stock", "passes"),
    [
        ("INCORRECT_NUMERICAL", 1, False, True),
        ("INCORRECT_NUMERICAL", 2, False, False),
        ("INCORRECT_NUMERICAL", 2, True, True),
        ("INCORRECT_NUMERICAL", 3, True, False),
        ("RUNTIME_ERROR", 3, True, True),
        ("RUNTIME_ERROR", 4, True, False),
    ],
)
def test_some_cases_of_stock_code_are_dropped(status: str, count: int, is_stock: bool, passes: bool) -> None:
    found = conclude_fuzz(FuzzOutcome(), PAIRS, failures(count, status=status), is_stock=is_stock)
    assert isinstance(found, FuzzOutcome) == passes
    if isinstance(found, FuzzOutcome):
        assert (len(found.passed), len(found.dropped)) == (4 - count, count)


def test_one_failure_that_is_not_excused_refuses() -> None:
    found = conclude_fuzz(FuzzOutcome(), PAIRS, failures(1, status="RUNTIME_ERROR", excused=False), is_stock=True)
    assert isinstance(found, Failure)


@pytest.mark.parametrize(("fails", "passed"), [("first", [2.0]), ("other", [1.0, 2.0])])
def test_a_call_that_was_not_made_counts_nowhere(fails: str, passed: list[float]) -> None:
    def case(rows: int, eps: float, contents: str) -> OracleCase:
        return OracleCase(Case(Call("op", {"N": rows}, {}, {}, {"eps": eps}), contents), {}, {}, {})

    first, other = case(1, 1.0, "normal"), case(1, 9.0, "wide")
    pairs = [(first, other), (case(2, 2.0, "normal"), None)]
    at = first if fails == "first" else other
    failure = Failure("INCORRECT_NUMERICAL", "at a case", case=at.case, verdict=PASSED, excused=True)
    found = conclude_fuzz(FuzzOutcome(), pairs, [failure])
    assert isinstance(found, FuzzOutcome)
    assert [call["eps"] for call in found.scalars] == passed
    assert (len(found.passed), len(found.dropped)) == (len(passed), 1)

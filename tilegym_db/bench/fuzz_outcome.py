"""What came of the fuzz cases of one Solution: those it passed, those that proved nothing, or why it failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilegym_db.bench.case_queue import Pair
from tilegym_db.bench.stock_witness import MOST_DROPPED
from tilegym_db.records.dtypes import Scalar
from tilegym_db.verify.verifier import Failure

__all__ = ["FuzzOutcome", "conclude_fuzz"]


@dataclass
class FuzzOutcome:
    """The fuzz cases that a Solution passed, and those that proved nothing."""

    passed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    scalars: list[Mapping[str, Scalar]] = field(default_factory=list)
    """Those of each case that was passed."""


def conclude_fuzz(fuzz: FuzzOutcome, proving: Sequence[Pair], failures: Sequence[Failure]) -> FuzzOutcome | Failure:
    """What passed, or the first failure that stock code is not guilty of as well."""
    excused = [failure for failure in failures if failure.excused]
    refuted = [failure for failure in failures if not failure.excused]
    if refuted or len(excused) > max(1, MOST_DROPPED * len(proving)):
        return (refuted or excused)[0]
    lost = {str(failure.case) for failure in excused}
    fuzz.dropped += [f"{failure.case}: stock code fails it as well" for failure in excused]
    for pair in proving:
        cases = [expected.case for expected in pair if expected is not None and str(expected.case) not in lost]
        fuzz.passed += [str(case) for case in cases]
        fuzz.scalars += [case.scalars for case in cases]
    return fuzz

"""Fuzz cases are checked from the smallest to the largest, so that a failure is reported at the smallest case that shows it."""

from __future__ import annotations

from types import SimpleNamespace

from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification import session
from tilegym_db.verification.session import Verification


def test_fuzz_cases_are_checked_by_their_size(operator, monkeypatch):
    seen = []

    class Expected:
        def __init__(self, case):
            self.case = case

    class Cache:
        def get(self, case):
            return Expected(case)

    class Handle:
        definition = operator()
        solution = SimpleNamespace(record=SimpleNamespace(spec=SimpleNamespace(provides="other")))

        class policy:
            in_turn = False

        class limits:
            fuzz_workers = 1

    checking = Verification(Handle(), processors=session.Processors(1))
    monkeypatch.setattr(
        Verification, "_check_pair", lambda self, handle, queue, number, pair: seen.append(pair[0].case)
    )
    monkeypatch.setattr(Verification, "_start_helpers", lambda *_: None)
    sizes = [{"M": 64, "N": 8}, {"M": 1, "N": 1}, {"M": 2, "N": 300}]
    cases = [Case(Call("row_scale", axes, {"T": "float32"}, {}, {"factor": 1.0})) for axes in sizes]
    checking._check_fuzz_cases(cases, Cache(), {})
    assert [case.call.axes for case in seen] == [sizes[1], sizes[0], sizes[2]]

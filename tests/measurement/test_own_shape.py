"""While helpers take a Solution's fuzz cases, its own worker verifies the shapes that are to come; the verdicts are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DEFINITION, KERNEL

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition, Workload
from tilegym_db.verification import session
from tilegym_db.verification.expected import ExpectedCache, WorkloadContents
from tilegym_db.verification.session import (
    ShapeResult,
    ShapesAhead,
    Verification,
    VerifiedWorkload,
)
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import SCREEN, CaseQueue, Processors, RunnerLimits, WorkerHandle

SEED = 20_261_127
ROWS = (16, 24, 40)
POLICY = replace(SCREEN, fuzz_cases=12, fuzz_rows=64)
WRONG_AT = "    if tuple(x.shape) == (24, 33):\n        out += 1\n"
DIES_AT = "    if tuple(x.shape) == (24, 33):\n        import os\n\n        os._exit(3)\n"
WAITS_AT = "    if tuple(x.shape) == (24, 33):\n        while True:\n            pass\n"


class Subject:
    """One Solution of ``row_scale`` for which so many workers may start, and its workloads of :data:`ROWS`."""

    def __init__(self, solution: SolutionFiles, folder: Path, workers: int, limits: RunnerLimits) -> None:
        self.definition = Definition.from_dict(DEFINITION)
        self.workloads = [self._workload(rows) for rows in ROWS]
        self.cache = ExpectedCache(self.definition, "cpu")
        self.contents = [WorkloadContents.draw(self.definition, one, SEED, self.cache) for one in self.workloads]
        handle = WorkerHandle(
            self.definition,
            solution,
            "cpu",
            folder,
            policy=POLICY,
            limits=replace(limits, fuzz_workers=workers),
        )
        self.verification = Verification(handle, processors=Processors(workers))

    def _workload(self, rows: int) -> Workload:
        inputs = {"factor": {"type": "scalar", "value": 0.5}}
        return Workload.from_dict(
            {"definition": "row_scale", "axes": {"M": rows, "N": 33}, "dtypes": {"T": "float32"}, "inputs": inputs}
        )

    def look_ahead(self, drawn: int = len(ROWS)) -> None:
        """What a batch does before its first workload; ``drawn``: the contents of so many are there already."""
        self.verification.ahead = ShapesAhead.of(future(one, done=n < drawn) for n, one in enumerate(self.contents))

    def verdicts(self) -> list[VerifiedWorkload | Failure]:
        """One of each workload, in their order."""
        found = []
        for contents in self.contents:
            found.append(self.verification.verify(contents, self.workloads, SEED, self.cache))
            failed = found[-1]
            if isinstance(failed, Failure):
                self.verification.handle.after_failure(failed)
        return found


def future(contents: WorkloadContents | Failure, *, done: bool = True) -> Future[WorkloadContents | Failure]:
    made: Future[WorkloadContents | Failure] = Future()
    if done:
        made.set_result(contents)
    return made


@pytest.fixture
def make(tmp_path: Path, write_solution: Callable[..., SolutionFiles]) -> Iterator[Callable[..., Subject]]:
    with ExitStack() as stack:

        def subject(source: str = KERNEL, workers: int = 3, limits: RunnerLimits | None = None) -> Subject:
            solution = write_solution(tmp_path / "solutions" / f"scaled_{workers}", "row_scale", source)
            made = Subject(solution, tmp_path / f"workers_{workers}", workers, limits or RunnerLimits())
            stack.callback(made.verification.handle.close)
            return made

        yield subject


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, WorkerHandle]]:
    """Rows and worker of every shape that is verified. Helpers wait at their first case until one of them was, or tried to be."""
    checked: list[tuple[int, WorkerHandle]] = []
    begun = threading.Event()
    check, check_pair = session.check_own_shape, Verification._check_pair

    def checking(handle: WorkerHandle, contents: WorkloadContents) -> ShapeResult | Failure:
        checked.append((contents.workload.axes["M"], handle))
        try:
            return check(handle, contents)
        finally:
            if len(checked) == len(ROWS) or contents.workload.axes["M"] == 24:
                begun.set()

    def checked_pair(of: Verification, handle: WorkerHandle, queue: CaseQueue, number: int, pair: Any) -> None:
        if handle is not of.handle:
            begun.wait(60)
        check_pair(of, handle, queue, number, pair)

    monkeypatch.setattr(session, "check_own_shape", checking)
    monkeypatch.setattr(session, "check_own_shape", checking)
    monkeypatch.setattr(Verification, "_check_pair", checked_pair)
    return checked


def test_worker_verifies_coming_shapes_while_helpers_fuzz(make, shapes):
    subject = make()
    subject.look_ahead()
    found = subject.verdicts()
    assert all(isinstance(outcome, VerifiedWorkload) for outcome in found)
    assert [rows for rows, _ in shapes] == list(ROWS)
    assert {id(handle) for _, handle in shapes} == {id(subject.verification.handle)}


def test_verdicts_equal_those_of_one_worker_without_lookahead(make):
    alone, ahead = make(workers=1), make(workers=3)
    ahead.look_ahead()
    for one, other in zip(alone.verdicts(), ahead.verdicts(), strict=True):
        assert isinstance(one, VerifiedWorkload)
        assert isinstance(other, VerifiedWorkload)
        assert (other.verdict, other.fuzz) == (one.verdict, one.fuzz)
        assert [*map(list, other.outputs)] == [*map(list, one.outputs)]


def test_where_no_helper_is_at_work_the_fuzz_cases_come_first(make, shapes, monkeypatch):
    subject = make(workers=1)
    subject.look_ahead()
    order: list[str] = []
    check = session._check_case

    def checked(*arguments: Any) -> Any:
        order.append(f"case {len(shapes)}")
        return check(*arguments)

    monkeypatch.setattr(session, "_check_case", checked)
    assert all(isinstance(outcome, VerifiedWorkload) for outcome in subject.verdicts())
    assert set(order) == {"case 0"}
    assert [rows for rows, _ in shapes] == list(ROWS)


def test_contents_that_are_not_drawn_yet_wait_for_their_turn(make, shapes):
    subject = make()
    subject.look_ahead(drawn=0)
    assert not subject.verification.ahead.check_next(subject.verification.handle)
    subject.look_ahead(drawn=2)
    handle = subject.verification.handle
    assert handle.load() is None
    assert [subject.verification.ahead.check_next(handle) for _ in range(3)] == [True, True, False]
    assert [rows for rows, _ in shapes] == [16, 24]


@pytest.mark.turn("tilegym_db/measurement/runner.py", "tilegym_db/verification/session.py")  # waits for a hanging call
@pytest.mark.parametrize(
    ("wrong", "status"), [(WRONG_AT, "INCORRECT_NUMERICAL"), (DIES_AT, "RUNTIME_ERROR"), (WAITS_AT, "TIMEOUT")]
)
def test_shape_that_fails_ahead_costs_no_other_shape_its_verdict(make, shapes, wrong, status):
    subject = make(KERNEL + wrong, limits=RunnerLimits(first_call_s=2.0))
    subject.look_ahead()
    first, second, third = subject.verdicts()
    assert isinstance(first, VerifiedWorkload)
    assert isinstance(second, Failure)
    assert second.status == status
    assert isinstance(third, VerifiedWorkload)
    tries = [rows for rows, _ in shapes].count(24)
    assert tries == {"TIMEOUT": 1, "RUNTIME_ERROR": 3, "INCORRECT_NUMERICAL": 2}[status]


def test_a_pass_of_a_worker_that_was_lost_since_is_not_taken(make):
    subject = make()
    subject.look_ahead()
    handle, ahead = subject.verification.handle, subject.verification.ahead
    assert handle.load() is None
    assert ahead.check_next(handle)
    assert ahead.check_next(handle)
    assert isinstance(ahead.take(handle, subject.contents[0]), ShapeResult)
    assert ahead.take(handle, subject.contents[0]) is None
    handle.close()
    assert handle.load() is None
    assert ahead.take(handle, subject.contents[1]) is None


def test_contents_that_could_not_be_drawn_are_passed_over(make, shapes):
    subject = make()
    failure = Failure("UNSUPPORTED", "no oracle")
    ahead = ShapesAhead.of([future(failure), None, future(subject.contents[1])])
    assert subject.verification.handle.load() is None
    assert [ahead.check_next(subject.verification.handle) for _ in range(3)] == [True, True, False]
    assert [rows for rows, _ in shapes] == [24]


def test_helpers_are_not_profiled(make):
    subject = make()
    helper = subject.verification.handle.another()
    try:
        assert subject.verification.handle.profiled
        assert not helper.profiled
    finally:
        helper.close()

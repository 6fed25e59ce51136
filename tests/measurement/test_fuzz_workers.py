"""Fuzz cases are shared by workers that start when processors become free, and the verdict is that of one worker alone."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import DEFINITION, KERNEL

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.measurement.local_executor import _expected_length
from tilegym_db.measurement.runner import MAX_WAITING, max_waiting_share
from tilegym_db.records import Definition, Workload
from tilegym_db.sandbox.worker import WorkerDied
from tilegym_db.verification import session
from tilegym_db.verification.expected import ExpectedCache, WorkloadContents
from tilegym_db.verification.residues import SIZES
from tilegym_db.verification.session import Verification, VerifiedWorkload
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import (
    MAX_CPU_SERIES_S,
    PROMOTION,
    SCREEN,
    CaseQueue,
    Processors,
    RunnerLimits,
    WorkerHandle,
    cpu_series_s,
)

SEED = 20_261_123
WORKLOAD = {
    "definition": "row_scale",
    "axes": {"M": 16, "N": 33},
    "dtypes": {"T": "float32"},
    "inputs": {"factor": {"type": "scalar", "value": 0.5}},
    "tags": ["cpu"],
}
POLICY = replace(SCREEN, fuzz_cases=12, fuzz_rows=64)
WRONG_AT_ODD_SIZES = KERNEL + "    out[:, x.shape[1] // 2 * 2 :] += 1\n"


def failure(reason: str, *, excused: bool = False) -> Failure:
    return Failure("INCORRECT_NUMERICAL", reason, excused=excused)


def queue_of(count: int) -> CaseQueue:
    return CaseQueue([(SimpleNamespace(case=number), None) for number in range(count)])  # type: ignore[misc]


def test_each_case_is_handed_out_once_and_in_order():
    queue = queue_of(5)
    one, other = iter(queue), iter(queue)
    assert [next(one)[0], next(other)[0], next(one)[0]] == [0, 1, 2]
    assert queue.left == 2
    assert [number for number, _ in other] == [3, 4]
    assert queue.left == 0
    assert list(one) == []


def test_first_failure_is_of_the_first_case_not_the_fastest():
    queue = queue_of(6)
    one, other = iter(queue), iter(queue)
    assert (next(one)[0], next(other)[0], next(one)[0]) == (0, 1, 2)
    queue.fail(failure("a helper that did not load"))
    queue.fail(failure("third"), 2)
    assert list(one) == []
    queue.fail(failure("second"), 1)
    assert [found.reason for found in queue.failures] == ["second", "third", "a helper that did not load"]


def test_excused_failure_stops_no_other_work():
    queue = queue_of(2)
    queue.fail(failure("stock code fails it as well", excused=True), 0)
    assert queue.left == 2


def test_coming_cases_are_waited_for_and_may_be_left_out():
    queue = CaseQueue((), coming=3)
    assert queue.left == 3
    queue.put(None)
    taken: list[int] = []
    taking = threading.Thread(target=lambda: taken.extend(number for number, _ in queue))
    taking.start()
    for number in range(2):
        queue.put((SimpleNamespace(case=number), None))  # type: ignore[arg-type]
    taking.join(30)
    assert taken == [0, 1]
    assert queue.left == 0
    stopped = CaseQueue((), coming=2)
    stopped.close()
    stopped.put(None)
    assert list(stopped) == []


def test_processors_go_to_runners_first_then_equally_to_helpers():
    processors = Processors(8, runners=8)
    assert not processors.take(1)
    for _ in range(5):
        processors.done()  # three are left: five processors for helpers, of which no runner gets more than two
    assert [processors.take(workers) for workers in (1, 2, 3)] == [True, True, False]
    assert [processors.take(workers) for workers in (1, 2, 1, 1)] == [True, True, True, False]
    processors.give_back()
    assert processors.take(1)


def test_kernels_have_fewer_workers_if_several_gpus_are_at_work():
    assert [session.max_fuzz_workers(gpus) for gpus in (1, 2, 4, 8)] == [12, 7, 4, 3]


def test_runners_without_helpers_share_a_processor():
    processors = Processors(13, runners=8, alone=4)  # twelve for the other four
    assert [processors.take(workers) for workers in (1, 2, 3)] == [True, True, False]
    for _ in range(4):
        processors.done(alone=True)
    assert processors.take(3)
    assert not processors.take(4)
    assert Processors(16, runners=20, alone=8).take(1)
    assert not Processors(16, runners=22, alone=8).take(1)


@pytest.fixture
def make(tmp_path: Path, write_solution: Callable[..., SolutionFiles]) -> Iterator[Any]:
    """A verification of a source by so many workers at most."""
    with ExitStack() as stack:

        def subject(source: str, workers: int) -> Verification:
            handle = WorkerHandle(
                Definition.from_dict(DEFINITION),
                write_solution(tmp_path / "solutions" / f"scaled_{workers}", "row_scale", source),
                "cpu",
                tmp_path / "workers",
                policy=POLICY,
                limits=RunnerLimits(fuzz_workers=workers, series_s=0.1),
            )
            stack.callback(handle.close)
            return Verification(handle, processors=Processors(workers))

        yield subject


def verified(subject: Verification) -> VerifiedWorkload | Failure:
    definition, workload = subject.handle.definition, Workload.from_dict(WORKLOAD)
    cache = ExpectedCache(definition, "cpu")
    contents = WorkloadContents.draw(definition, workload, SEED, cache)
    return subject.verify(contents, [workload], SEED, cache)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[WorkerHandle]:
    """Whose worker each case was checked in. Cases take no time on a CPU, so a worker waits for its helpers after the first."""
    handles: list[WorkerHandle] = []
    helped = threading.Event()
    check = session._check_case

    def checked(handle: WorkerHandle, *arguments: Any) -> Any:
        handles.append(handle)
        if handle is not handles[0]:
            helped.set()
        elif len(handles) > 1 and handle.limits.fuzz_workers > 1:
            helped.wait(60)
        return check(handle, *arguments)

    monkeypatch.setattr(session, "_check_case", checked)
    return handles


@pytest.mark.turn("tilegym_db/verification/session.py", "tilegym_db/verification/worker_handle.py")  # several workers
def test_helpers_share_the_cases_and_end_with_them(make: Any, used: list[WorkerHandle]):
    alone, shared = make(KERNEL, 1), make(KERNEL, 3)
    one = verified(alone)
    assert {id(handle) for handle in used} == {id(alone.handle)}
    used.clear()
    several = verified(shared)
    assert isinstance(one, VerifiedWorkload)
    assert isinstance(several, VerifiedWorkload)
    assert several.fuzz == one.fuzz
    assert len(used) == len(one.fuzz.passed) > 6
    assert len({id(handle) for handle in used}) > 1
    assert all(handle.worker is None for handle in used if handle is not shared.handle)
    assert [shared.processors.take(workers) for workers in (1, 1, 1)] == [True, True, False]  # all were given back


def test_small_case_is_checked_before_the_last_oracle_is_known(make: Any, monkeypatch: pytest.MonkeyPatch):
    checked, computed = threading.Event(), list[bool]()
    get, check = ExpectedCache.get, session._check_case

    def known(cache: ExpectedCache, case: Any) -> Any:
        computed.append(checked.wait(60) if len(computed) >= POLICY.fuzz_cases - 1 else checked.is_set())
        return get(cache, case)

    def check_case(*arguments: Any) -> Any:
        checked.set()
        return check(*arguments)

    subject = make(KERNEL, 1)
    definition, workload = subject.handle.definition, Workload.from_dict(WORKLOAD)
    cache = ExpectedCache(definition, "cpu")
    contents = WorkloadContents.draw(definition, workload, SEED, cache)
    monkeypatch.setattr(ExpectedCache, "get", known)
    monkeypatch.setattr(session, "_check_case", check_case)
    assert isinstance(subject.verify(contents, [workload], SEED, cache), VerifiedWorkload)
    assert computed[0] is False
    assert computed[-1] is True


@pytest.mark.turn("tilegym_db/verification/session.py", "tilegym_db/verification/worker_handle.py")  # several workers
def test_error_of_an_oracle_ends_the_cases_that_are_coming(make: Any, monkeypatch: pytest.MonkeyPatch):
    get, asked = ExpectedCache.get, list[Any]()

    def known(cache: ExpectedCache, case: Any) -> Any:
        asked.append(case)
        if len(asked) == 3:
            raise RecordError("the reference raises", code="reference_raises")
        return get(cache, case)

    subject = make(KERNEL, 2)
    definition, workload = subject.handle.definition, Workload.from_dict(WORKLOAD)
    cache = ExpectedCache(definition, "cpu")
    contents = WorkloadContents.draw(definition, workload, SEED, cache)
    monkeypatch.setattr(ExpectedCache, "get", known)
    outcome = subject.verify(contents, [workload], SEED, cache)
    assert isinstance(outcome, Failure)
    assert (outcome.status, len(asked)) == ("UNSUPPORTED", 3)


def test_several_workers_give_the_verdict_of_one(make: Any):
    one, several = (verified(make(WRONG_AT_ODD_SIZES, workers)) for workers in (1, 4))
    assert isinstance(one, Failure)
    assert one.gate is not None
    assert isinstance(several, Failure)
    assert (several.status, several.reason, several.case) == (one.status, one.reason, one.case)


def test_a_processor_that_becomes_free_takes_over_what_is_left(make: Any, monkeypatch: pytest.MonkeyPatch):
    subject = make(KERNEL, 2)
    subject.processors = Processors(2, runners=2)
    left: list[int] = []
    start, check = WorkerHandle.another, Verification._check_pair

    def another(handle: WorkerHandle) -> WorkerHandle:
        left.append(POLICY.fuzz_cases)
        return start(handle)

    def check_pair(of: Verification, handle: WorkerHandle, queue: CaseQueue, number: int, pair: Any) -> None:
        if number == 4:
            assert not left
            subject.processors.done()  # the other runner
        check(of, handle, queue, number, pair)

    monkeypatch.setattr(WorkerHandle, "another", another)
    monkeypatch.setattr(Verification, "_check_pair", check_pair)
    assert isinstance(verified(subject), VerifiedWorkload)
    assert len(left) == 1


def test_where_no_helper_can_be_started_one_worker_does_it_all(make: Any, monkeypatch: pytest.MonkeyPatch):
    def another(handle: WorkerHandle) -> WorkerHandle:
        raise WorkerDied("no more processes")

    monkeypatch.setattr(WorkerHandle, "another", another)
    subject = make(KERNEL, 3)
    assert isinstance(verified(subject), VerifiedWorkload)
    assert subject.processors.take(1)


def test_helper_that_does_not_load_fails_the_solution(make: Any, monkeypatch: pytest.MonkeyPatch):
    subject = make(KERNEL, 3)
    load = WorkerHandle.load

    def loaded(handle: WorkerHandle) -> Failure | None:
        return load(handle) if handle is subject.handle else Failure("RUNTIME_ERROR", "the source does not load")

    monkeypatch.setattr(WorkerHandle, "load", loaded)
    outcome = verified(subject)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "the source does not load"


def test_helper_that_cannot_be_set_up_leaves_its_cases_to_others(make: Any, monkeypatch: pytest.MonkeyPatch):
    subject = make(KERNEL, 3)
    another, helpers = WorkerHandle.another, []

    def late(handle: WorkerHandle) -> WorkerHandle:
        helpers.append(another(handle))
        helpers[-1].limits = replace(helpers[-1].limits, first_call_s=1e-4)
        return helpers[-1]

    monkeypatch.setattr(WorkerHandle, "another", late)
    outcome = verified(subject)
    assert helpers
    assert isinstance(outcome, VerifiedWorkload), outcome
    assert len(outcome.fuzz.passed) + len(outcome.fuzz.dropped) == POLICY.fuzz_cases
    assert subject.processors.take(1)


@pytest.mark.parametrize(
    ("language", "role", "asks"),
    [
        ("tilelang", "kernel", True),
        ("cutile", "kernel", True),
        ("triton", "kernel", True),
        ("python", "baseline", False),
    ],
)
def test_few_cases_that_compile_fast_need_no_helper_on_a_gpu(make: Any, language, role, asks):
    handle = replace(make(KERNEL, 3).handle, device="cuda:0", policy=PROMOTION)
    spec = handle.solution.record.spec.model_copy(update={"language": language, "role": role})
    handle.solution = replace(handle.solution, record=handle.solution.record.model_copy(update={"spec": spec}))
    assert Verification(handle).may_have_helpers is asks


def test_those_that_compile_for_long_are_verified_first():
    def runner(language: str, role: str, *, compiled: bool = False) -> Any:
        record = SimpleNamespace(spec=SimpleNamespace(language=language, role=role))
        return SimpleNamespace(solution=SimpleNamespace(record=record, uses_torch_compile=compiled))

    stock, compiled = runner("python", "baseline"), runner("python", "baseline", compiled=True)
    triton, cutile, tilelang = (runner(language, "kernel") for language in ("triton", "cutile", "tilelang"))
    ordered = sorted([stock, triton, compiled, cutile, tilelang], key=_expected_length)
    assert ordered == [tilelang, compiled, triton, cutile, stock]


SERVED = replace(POLICY, fuzz_cases=6, as_served=True, in_turn=True)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[WorkerHandle]:
    """The handles whose workers made sequences of calls."""
    handles: list[WorkerHandle] = []
    check = session.check_sequences

    def checked(handle: WorkerHandle, *arguments: Any) -> Any:
        handles.append(handle)
        return check(handle, *arguments)

    monkeypatch.setattr(session, "check_sequences", checked)
    return handles


@pytest.mark.turn("tilegym_db/verification/session.py", "tilegym_db/verification/worker_handle.py")  # several workers
def test_sequences_run_beside_fuzz_cases_with_the_same_outcome(make: Any, seen: list[WorkerHandle]):
    alone, shared = make(KERNEL, 1), make(KERNEL, 3)
    for subject in (alone, shared):
        subject.handle.policy = SERVED
    one, several = verified(alone), verified(shared)
    assert isinstance(one, VerifiedWorkload), one
    assert isinstance(several, VerifiedWorkload), several
    assert [text for text in several.fuzz.passed if not text.startswith("sequence")] == [
        text for text in one.fuzz.passed if not text.startswith("sequence")
    ]
    assert seen[0] is alone.handle
    assert seen[1] is not shared.handle
    assert seen[1].worker is None
    assert [shared.processors.take(workers) for workers in (1, 1, 1)] == [True, True, False]  # all were given back


@pytest.mark.turn("tilegym_db/verification/sequences.py")  # two promotions
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("series_s", "judged"), [("0", []), ("inf", ["M", "N"])])
def test_setting_bounds_the_seconds_of_successive_sizes(make: Any, monkeypatch, series_s: str, judged: list[str]):
    monkeypatch.setenv(MAX_CPU_SERIES_S, series_s)
    subject = make(KERNEL, 1)
    subject.handle.policy, subject.handle.limits = SERVED, RunnerLimits(series_s=cpu_series_s())
    outcome = verified(subject)
    assert isinstance(outcome, VerifiedWorkload), outcome
    found = [re.fullmatch(r"sequence: (\d+) .*successive sizes of (\w+) .*", text) for text in outcome.fuzz.passed]
    assert sorted(line[2] for line in found if line) == judged
    assert all(int(line[1]) > SIZES // 2 for line in found if line)


@pytest.mark.parametrize(("variable", "read"), [(MAX_CPU_SERIES_S, cpu_series_s), (MAX_WAITING, max_waiting_share)])
@pytest.mark.parametrize("text", ["fast", "nan", "1,5"])
def test_a_setting_that_is_no_number_is_named(variable: str, read: Callable[[], float], text: str, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=variable) as caught:
        read()
    assert caught.value.code == "setting_no_number"


@pytest.mark.parametrize(("text", "seconds"), [("", math.inf), (" 0.5 ", 0.5), ("0", 0.0)])
def test_a_setting_without_text_has_its_default(text: str, seconds: float, monkeypatch):
    monkeypatch.setenv(MAX_CPU_SERIES_S, text)
    assert cpu_series_s() == seconds


@pytest.mark.turn("tilegym_db/verification/sequences.py", "tilegym_db/measurement/runner.py")  # a promotion
def test_sequences_without_a_processor_follow_the_fuzz_cases(make: Any, seen: list[WorkerHandle]):
    subject = make(KERNEL, 3)
    subject.handle.policy, subject.processors = SERVED, Processors(1)
    assert isinstance(verified(subject), VerifiedWorkload)
    assert seen == [subject.handle]


def test_failure_of_a_sequence_beside_fuzz_cases_counts(make: Any, monkeypatch: pytest.MonkeyPatch):
    wrong = Failure("INCORRECT_NUMERICAL", "wrong in a long run")
    monkeypatch.setattr(session, "check_sequences", lambda *arguments: wrong)
    subject = make(KERNEL, 3)
    subject.handle.policy = SERVED
    assert verified(subject) is wrong


def test_failing_fuzz_case_comes_before_a_failing_sequence(make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "check_sequences", lambda *arguments: Failure("REJECTED", "it keeps memory"))
    subject = make(WRONG_AT_ODD_SIZES, 3)
    subject.handle.policy = SERVED
    outcome = verified(subject)
    assert isinstance(outcome, Failure)
    assert outcome.status == "INCORRECT_NUMERICAL"
    assert subject.processors.take(1)


@pytest.mark.turn("tilegym_db/verification/sequences.py", "tilegym_db/measurement/runner.py")  # a promotion
def test_lost_helper_of_sequences_leaves_them_to_the_worker(make: Any, seen: list[WorkerHandle], monkeypatch):
    lost = Failure("RUNTIME_ERROR", "the worker was lost")
    check = session.check_sequences
    subject = make(KERNEL, 3)
    subject.handle.policy = SERVED
    monkeypatch.setattr(
        session, "check_sequences", lambda handle, *rest: check(handle, *rest) if handle is subject.handle else lost
    )
    assert isinstance(verified(subject), VerifiedWorkload)
    assert seen == [subject.handle]


@pytest.mark.turn("tilegym_db/verification/session.py", "tilegym_db/verification/worker_handle.py")  # several workers
@pytest.mark.parametrize("workers", [1, 4])
def test_dtypes_of_a_solution_are_fuzzed_side_by_side(make: Any, monkeypatch: pytest.MonkeyPatch, workers: int):
    by: dict[str, set[int]] = {}
    check = Verification._check_set

    def check_set(of: Verification, workload: Workload, *arguments: Any) -> Any:
        by.setdefault(workload.dtypes["T"], set()).add(id(of.handle))
        return check(of, workload, *arguments)

    monkeypatch.setattr(Verification, "_check_set", check_set)
    subject = make(KERNEL, workers)
    subject.processors = Processors(8)
    workloads = [Workload.from_dict({**WORKLOAD, "dtypes": {"T": dtype}}) for dtype in ("float32", "bfloat16")]
    cache = ExpectedCache(subject.handle.definition, "cpu")
    with subject.expecting(workloads):
        for workload in workloads:
            contents = WorkloadContents.draw(subject.handle.definition, workload, SEED, cache)
            outcome = subject.verify(contents, [workload], SEED, cache)
            assert isinstance(outcome, VerifiedWorkload), outcome
    assert by["float32"] == {id(subject.handle)}
    assert (by["bfloat16"] == {id(subject.handle)}) is (workers == 1)
    assert all(subject.processors.take(1) for _ in range(7))

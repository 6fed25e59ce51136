"""Verification of one Solution in the harness: fuzz cases once per dtype binding, then a Workload's own shape."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Protocol

import torch

from tilegym_db.records import Workload
from tilegym_db.records.base import canonical_json
from tilegym_db.records.call import is_code_selecting
from tilegym_db.records.case import Case
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.hardware import CPU
from tilegym_db.sandbox.limits import available_processors
from tilegym_db.sandbox.shared_buffers import SharedBuffers, plan_slot
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess
from tilegym_db.verify.cases import fuzz_cases, sibling_of
from tilegym_db.verify.contents import ExpectedCache, WorkloadContents
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.verifier import CANNOT_VERIFY, Failure, Verdict, cannot_verify
from tilegym_db.verify.worker_handle import WorkerHandle

# ---- own shape ------------------------------------------------------------------------------------
# Verification at a Workload's own shape with every content set, in its turn or ahead of it while helpers are at fuzz
# cases.

IN_MODEL_CALL = 3
"""Which of the calls on a workload's first contents is made as a model makes it; screens make fewer."""


@dataclass(frozen=True)
class OwnShape:
    """A pass at one workload's shape: what was compared, and what was written for each content set that is timed."""

    verdict: Verdict
    outputs: list[Mapping[str, torch.Tensor]]


def check_own_shape(handle: WorkerHandle, contents: WorkloadContents) -> OwnShape | Failure:
    """Return every gate with every content set, in a worker that has the source loaded.

    Raises:
        Exception: one of :data:`CANNOT_VERIFY`.
    """
    verdict = Verdict(deterministic=handle.solution.record.spec.deterministic)
    outputs: list[Mapping[str, torch.Tensor]] = []
    case = contents.sets[0].case
    with SharedBuffers(plan_slot(handle.definition, case), 1, handle.device) as buffers:
        failure = handle.attach(buffers, case)
        for number, expected in enumerate(contents.verified):
            if failure is not None:
                break
            calls = handle.policy.calls if number == 0 else 2
            outcome = handle.verify_slot(buffers, expected, calls, in_model=IN_MODEL_CALL)
            if isinstance(outcome, Failure):
                failure = outcome
            else:
                verdict.add(outcome[0])
                outputs += [outcome[1]] if number < len(contents.sets) else []
        if failure is None and contents.other is not None:
            failure = handle.call_in_turn(buffers, contents.sets[0], contents.other, outputs[0])
        handle.detach()
    if failure is None and handle.policy.in_turn:
        failure = handle.check_state()
    return OwnShape(verdict, outputs) if failure is None else failure


@dataclass
class ShapesAhead:
    """The workloads that one Solution is verified at next, in their order: their contents, as far as these are drawn.

    A new shape mostly has to be compiled. So the worker of a Solution whose fuzz cases others take does that meanwhile.
    """

    waiting: deque[Future[WorkloadContents | Failure]] = field(default_factory=deque)
    _found: dict[str, tuple[WorkerProcess | None, OwnShape | Failure]] = field(default_factory=dict)

    @classmethod
    def of(cls, contents: Iterable[Future[WorkloadContents | Failure] | None]) -> ShapesAhead:
        """Of these workloads."""
        return cls(deque(future for future in contents if future is not None))

    def check_next(self, handle: WorkerHandle) -> bool:
        """Verify the next workload ahead of its turn; false if there is none, or it did not pass.

        What does not pass is verified again in its turn, where a lost worker gets its second chance, and no other is verified
        ahead after it; only a timeout stands, which would be waited for again.
        """
        if not self.waiting or not self.waiting[0].done():
            return False
        contents = self.waiting.popleft().result()
        if isinstance(contents, Failure):
            return True
        try:
            outcome = check_own_shape(handle, contents)
        except CANNOT_VERIFY as error:
            outcome = cannot_verify(error)
        if isinstance(outcome, OwnShape) or outcome.status == "TIMEOUT":
            self._found[contents.workload.uuid] = handle.worker, outcome
        if isinstance(outcome, OwnShape):
            return True
        self.waiting.clear()
        return False

    def take(self, handle: WorkerHandle, contents: WorkloadContents) -> OwnShape | Failure | None:
        """What came of a workload whose turn has come, once; None if it was not verified, or not by the worker of now."""
        self.waiting = deque(future for future in self.waiting if not _is_of(future, contents))
        worker, outcome = self._found.pop(contents.workload.uuid, (None, None))
        return None if isinstance(outcome, OwnShape) and worker is not handle.worker else outcome


def _is_of(future: Future[WorkloadContents | Failure], contents: WorkloadContents) -> bool:
    return future.done() and future.result() is contents


# ---- fuzz outcome ---------------------------------------------------------------------------------
# What came of the fuzz cases of one Solution: those it passed, those that proved nothing, or why it failed.


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
        fuzz.scalars += [case.call.scalars for case in cases]
    return fuzz


# ---- case queue -----------------------------------------------------------------------------------
# The fuzz cases of one Solution, from which each of its workers takes the next one when it is free.

Pair = tuple[Expected, Expected | None]
"""A fuzz case, and another call of its shape that is made after it."""


class CaseQueue:
    """Hands out cases in their order until one has failed for good; safe to use from several threads.

    All before that one have been handed out then, and are judged to their end. So the first failure in the order of the cases is
    the same one however many workers there are, and however fast.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        """None is handed out yet."""
        self._pairs, self._next = pairs, 0
        self._failures: list[tuple[int, Failure]] = []
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, Pair]]:
        """Yield the cases that nobody has taken, each with its number, as long as there are any."""
        while True:
            with self._lock:
                if self._next >= len(self._pairs):
                    return
                number = self._next
                self._next += 1
            yield number, self._pairs[number]

    @property
    def left(self) -> int:
        """How many nobody has taken."""
        with self._lock:
            return len(self._pairs) - self._next

    def close(self) -> None:
        """Hand out no more."""
        with self._lock:
            self._next = len(self._pairs)

    def fail(self, failure: Failure, number: int | None = None) -> None:
        """A case failed, or where no number is given, a worker that has not taken any."""
        with self._lock:
            self._failures.append((len(self._pairs) if number is None else number, failure))
        if not failure.excused:
            self.close()

    @property
    def failures(self) -> list[Failure]:
        """Those so far, in the order of their cases."""
        with self._lock:
            return [failure for _, failure in sorted(self._failures, key=itemgetter(0))]


# ---- processors -----------------------------------------------------------------------------------
# The processors of a machine, shared by the Solutions that are verified side by side and by their helpers.


class Processors:
    """Who may start one more process. Each runner has a processor until it is done; what is left over is for helpers.

    Safe to ask from several threads.
    """

    def __init__(self, total: int, runners: int = 1, alone: int = 0) -> None:
        """``runners`` are those that are, or wait to be, verified; ``alone`` are those of them that never ask for a helper."""
        self._total, self._runners, self._alone, self._helpers = total, runners, alone, 0
        self._lock = threading.Lock()

    def take(self, workers: int) -> bool:
        """Return a processor for one more worker of a runner that has so many; to be given back.

        Not where that were more than its share: those who ask later would find none.
        """
        with self._lock:
            share = -(-(self._total - self._alone) // max(self._runners - self._alone, 1))
            if self._runners + self._helpers >= self._total or workers >= share:
                return False
            self._helpers += 1
            return True

    def give_back(self) -> None:
        """A helper has ended."""
        with self._lock:
            self._helpers -= 1

    def done(self, *, alone: bool = False) -> None:
        """A runner has been verified, and leaves its processor to the others."""
        with self._lock:
            self._runners -= 1
            self._alone -= alone


MAY_PASS_NEXT = ("TIMEOUT", "RUNTIME_ERROR", "COMPILE_ERROR", "UNSUPPORTED")
"""The machine's trouble or the source's: fuzz cases that ended so are tried again with the next workload."""
MAX_FUZZ_WORKERS = 6
MORE_ON_SHARED_HOST = 4
"""A host makes one CUDA context after the other, 0.3 s each, whichever GPU it is for. So beside two workers of every kernel, so
many are shared out among the GPUs at work."""
CASES_A_WORKER = {"tilelang": 1, "cutile": 2}
"""Fuzz cases that take about as long as one more worker takes to start: on an H100 half a second, and two more to import
TileLang."""
OTHER_CASES_A_WORKER = 6


@dataclass(frozen=True)
class Verified(OwnShape):
    """A runner that passed one workload: its own shape, and the fuzz cases."""

    fuzz: FuzzOutcome


@dataclass
class Verification:
    """What is verified of one Solution, in the worker of its handle and in helpers that share its fuzz cases.

    ``witness`` says which cases the stock code fails as well; without one, none. ``processors`` says whether there is room for
    one more helper, beside those of everyone who is verified at the same time.
    """

    handle: WorkerHandle
    witness: StockWitness | None = None
    fuzz_outcomes: dict[str, FuzzOutcome | Failure] = field(default_factory=dict)
    processors: Processors = field(default_factory=lambda: Processors(available_processors()))
    ahead: ShapesAhead = field(default_factory=ShapesAhead)
    """What else this is verified at: while helpers take fuzz cases, the worker of the handle begins with it."""
    _helpers: list[WorkerHandle] = field(default_factory=list)

    def verify(
        self, contents: WorkloadContents, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> Verified | Failure:
        """Fuzz once per dtype binding, then verify the workload's own shape with every content set.

        A worker that is lost on the way may have been lost to something else than the Solution, so the Solution gets a
        second chance in a fresh one; not after a timeout, which would only be waited for again.
        """
        outcome = self._attempt(contents, anchors, seed, cache)
        handle = self.handle
        if (
            isinstance(outcome, Failure)
            and outcome.status == "RUNTIME_ERROR"
            and handle.broken is None
            and not handle.usable
            and not handle.aborted
        ):
            handle.close()
            again = self._attempt(contents, anchors, seed, cache)
            if isinstance(again, Failure) and again.status == outcome.status:
                return replace(again, reason=f"{again.reason} (twice, the second time in a fresh process)")
            return again
        return outcome

    def case_alone(self, expected: Expected) -> Verdict | Failure:
        """Return every gate on one case, and nothing else."""
        return self.handle.load() or _check_case(self.handle, expected, self.handle.policy.calls)

    def outputs_of(self, expected: Expected) -> Mapping[str, torch.Tensor] | Failure:
        """What one call on these contents leaves, whatever that is."""
        failure = self.handle.load()
        if failure is not None:
            return failure
        with SharedBuffers(plan_slot(self.handle.definition, expected.case), 1, self.handle.device) as buffers:
            try:
                return self.handle.attach(buffers, expected.case) or self.handle.one_call(buffers, expected)
            finally:
                self.handle.detach()

    def own_shape(self, contents: WorkloadContents) -> Verified | Failure:
        """Return every content set at the workload's own shape, and no fuzz: a reason to time it, not to trust it."""
        failure = self.handle.load()
        if failure is not None:
            return failure
        try:
            return self._check_shape(contents, FuzzOutcome())
        except CANNOT_VERIFY as error:
            return cannot_verify(error)

    def abort(self) -> None:
        """Kill every worker for good; see :meth:`WorkerHandle.abort`."""
        for handle in (self.handle, *self._helpers):
            handle.abort()

    def _attempt(
        self, contents: WorkloadContents, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> Verified | Failure:
        if self.handle.broken is not None:
            return self.handle.broken
        failure = self.handle.load()
        if failure is not None:
            return failure
        try:
            fuzz = self._fuzz(contents.workload, anchors, seed, cache)
            return fuzz if isinstance(fuzz, Failure) else self._check_shape(contents, fuzz)
        except CANNOT_VERIFY as error:
            return cannot_verify(error)

    # -- fuzz cases ---------------------------------------------------------------------------------------------------

    def _fuzz(
        self, workload: Workload, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> FuzzOutcome | Failure:
        definition, record, policy = self.handle.definition, self.handle.solution.record, self.handle.policy
        dtypes, scalars = definition.bind_dtypes(workload.dtypes), workload.scalars()
        # A continuous scalar such as eps selects no code: one set of fuzz cases serves all its values.
        selecting = {n: v for n, v in scalars.items() if is_code_selecting(definition, n)}
        key = canonical_json([dtypes, selecting, self.handle.config])
        if key not in self.fuzz_outcomes:
            cases = fuzz_cases(
                definition,
                record,
                [anchor.axes for anchor in anchors],
                dtypes,
                scalars,
                count=policy.fuzz_cases_of(record),
                seed=seed,
                max_rows=policy.fuzz_rows,
            )
            outcome = self._check_fuzz_cases(cases, cache, scalars)
            if isinstance(outcome, Failure) and outcome.status in MAY_PASS_NEXT:
                return outcome
            self.fuzz_outcomes[key] = outcome
        return self.fuzz_outcomes[key]

    def _check_fuzz_cases(
        self, cases: Sequence[Case], cache: ExpectedCache, scalars: Mapping[str, Scalar]
    ) -> FuzzOutcome | Failure:
        """Return every case, by the worker and as many helpers as the machine has room for, now or when others are
        done.
        """
        definition, in_turn = self.handle.definition, self.handle.policy.in_turn
        fuzz = FuzzOutcome()
        proving: list[Pair] = []
        for number, case in enumerate(cases):
            expected = cache.get(case)
            if expected is None:
                fuzz.dropped.append(str(case))
                continue
            proving.append((expected, cache.get(sibling_of(definition, case, number, scalars)) if in_turn else None))
        if not proving:
            reason = "no shape beside the measured one can be verified: its constraints, or the reference, exclude all"
            return Failure("UNSUPPORTED", reason, gate="envelope")
        queue, helping = CaseQueue(proving), list[Future[None]]()
        own = iter(queue)
        try:
            with ThreadPoolExecutor(max_workers=max(1, self.handle.limits.fuzz_workers)) as pool, closing(queue):
                while queue.left:
                    self._start_helpers(queue, pool, helping)
                    if _at_work(helping) and self._check_ahead(queue):
                        continue
                    taken = next(own, None)
                    if taken is not None:
                        self._check_pair(self.handle, queue, *taken)
            for help_given in helping:
                help_given.result()
        finally:
            self._helpers = []
        return conclude_fuzz(fuzz, proving, queue.failures)

    def _check_ahead(self, queue: CaseQueue) -> bool:
        """Verify another shape that is to come; false if there is none, and the next fuzz case is this worker's."""
        checked = self.ahead.check_next(self.handle)
        if not checked and not self.handle.usable:
            not_loaded = self.handle.load()
            if not_loaded is not None:
                queue.fail(not_loaded)
        return checked

    def _check_pair(self, handle: WorkerHandle, queue: CaseQueue, number: int, pair: Pair) -> None:
        outcome = _check_case(handle, pair[0], 2, pair[1])
        if isinstance(outcome, Failure):
            queue.fail(self._excused(outcome, *pair), number)

    def _excused(self, failure: Failure, expected: Expected, other: Expected | None) -> Failure:
        """Return the failure, marked where the comparison with the oracle refuses stock code at its case as well."""
        if failure.verdict is None:
            return failure
        if self.handle.solution.record.spec.provides == "stock":
            return replace(failure, excused=True)
        at = expected if other is None or failure.case == expected.case else other
        return replace(failure, excused=self.witness is not None and self.witness.fails(at))

    def _start_helpers(self, queue: CaseQueue, pool: ThreadPoolExecutor, helping: list[Future[None]]) -> None:
        """As many as there is work and room for at this moment; those that have ended count no more."""
        while True:
            workers = 1 + _at_work(helping)
            if workers >= self.handle.limits.fuzz_workers or queue.left < workers * self._cases_a_worker():
                return
            if not self.processors.take(workers):
                return
            try:
                helper = self.handle.another()
            except WorkerDied:  # as many as can be had
                self.processors.give_back()
                return
            self._helpers.append(helper)
            if self.handle.aborted:
                helper.abort()
            helping.append(pool.submit(self._help, helper, queue))

    def _help(self, helper: WorkerHandle, queue: CaseQueue) -> None:
        """Take cases in a worker of its own until there are none left."""
        try:
            with closing(helper):
                not_loaded = helper.load()
                if not_loaded is not None and not_loaded.status == "UNSUPPORTED":
                    return  # as many helpers as can be had
                if not_loaded is not None:
                    queue.fail(not_loaded)
                with closing(queue):
                    for number, pair in queue:
                        self._check_pair(helper, queue, number, pair)
        finally:
            self.processors.give_back()

    @property
    def may_have_helpers(self) -> bool:
        """Whether there are more fuzz cases than its own worker is done with before another has started."""
        cases = self.handle.policy.fuzz_cases_of(self.handle.solution.record)
        return self.handle.limits.fuzz_workers > 1 and cases >= self._cases_a_worker()

    def _cases_a_worker(self) -> int:
        if self.handle.device == CPU:
            return 1  # a worker starts in no time there
        return CASES_A_WORKER.get(self.handle.solution.record.spec.language, OTHER_CASES_A_WORKER)

    # -- the workload's own shape -------------------------------------------------------------------------------------

    def _check_shape(self, contents: WorkloadContents, fuzz: FuzzOutcome) -> Verified | Failure:
        found = self.ahead.take(self.handle, contents) or check_own_shape(self.handle, contents)
        if isinstance(found, Failure):
            return found
        found.verdict.cases += len(fuzz.passed)
        return Verified(found.verdict, found.outputs, fuzz)


def most_fuzz_workers(host_share: int) -> int:
    """Workers of one kernel where so many GPUs of a host are at work."""
    return MAX_FUZZ_WORKERS - MORE_ON_SHARED_HOST + MORE_ON_SHARED_HOST // host_share


def _at_work(helping: Sequence[Future[None]]) -> int:
    """Return how many helpers have not ended yet."""
    return sum(not help_given.done() for help_given in helping)


def _check_case(
    handle: WorkerHandle, expected: Expected, calls: int, other: Expected | None = None
) -> Verdict | Failure:
    """Return one case by every gate; with ``other``, a second call of its shape on other inputs, and then the first
    again.
    """
    verdict = Verdict(deterministic=handle.solution.record.spec.deterministic)
    with SharedBuffers(plan_slot(handle.definition, expected.case), 1, handle.device) as buffers:
        outcome = handle.attach(buffers, expected.case) or handle.verify_slot(buffers, expected, calls)
        if other is not None and not isinstance(outcome, Failure):
            outcome = handle.call_in_turn(buffers, expected, other, outcome[1]) or outcome
        handle.detach()
    if isinstance(outcome, Failure):
        return outcome
    verdict.add(outcome[0])
    return verdict


# ---- stock witness --------------------------------------------------------------------------------
# Cases that stock code in the same dtype fails against the oracle prove nothing about anybody else, and are dropped.
#
# PyTorch's own matrix product in bfloat16 gives NaN on a CPU for a row of -inf at some sizes: a Solution that does
# the same is not worse than what it replaces.

MOST_DROPPED = 0.25
"""Share of the cases that may be dropped so: a Solution that fails more is wrong, whatever stock code does."""


class CaseVerifier(Protocol):
    """What is asked of the verification of the stock code (:class:`tilegym_db.verify.session.Verification`)."""

    handle: WorkerHandle

    def case_alone(self, expected: Expected) -> Verdict | Failure:
        """Return every gate on one case, and nothing else."""
        ...

    def outputs_of(self, expected: Expected) -> Mapping[str, torch.Tensor] | Failure:
        """What one call on these contents leaves, whatever that is."""
        ...


@dataclass
class StockWitness:
    """Runs the Definition's stock code at a case that somebody failed; started when it is first asked.

    Args:
        make: verification of the stock code, in a worker of its own; None if the catalog has none.
    """

    make: Callable[[], CaseVerifier | None]
    _stock: CaseVerifier | None = None
    _asked: dict[str, bool] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fails(self, expected: Expected) -> bool:
        """Return True if the comparison with the oracle refuses the stock code's result too."""
        with self._lock:
            key = expected.case.key
            if key not in self._asked:
                self._asked[key] = self._run(expected)
            return self._asked[key]

    def close(self) -> None:
        """End the worker, if there is one."""
        with self._lock:
            if self._stock is not None:
                self._stock.handle.close()
                self._stock = None

    def outputs(self, expected: Expected) -> Mapping[str, torch.Tensor] | None:
        """What the stock code gives on these contents, or None if nobody can say: there is none, or no memory for it."""
        with self._lock:
            stock = self._started(expected)
            if stock is None:
                return None
            try:
                found = stock.outputs_of(expected)
            except torch.OutOfMemoryError:
                return None
            return None if isinstance(found, Failure) else found

    def _run(self, expected: Expected) -> bool:
        stock = self._started(expected)
        if stock is None:
            return False
        outcome = stock.case_alone(expected)
        return isinstance(outcome, Failure) and outcome.verdict is not None

    def _started(self, expected: Expected) -> CaseVerifier | None:
        """Return the verification of the stock code, where it takes such calls."""
        self._stock = self._stock or self.make()
        if self._stock is None or self._stock.handle.excludes(expected.case) is not None:
            return None
        return self._stock

"""Verification session of one Solution: fuzz cases once per dtype binding, then each Workload's own shape.

Its parts are the own shape, the outcome of fuzz cases, and the check of stock code.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from tilegym_db.errors import StoreError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import is_code_selecting
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.hardware import CPU
from tilegym_db.records.text import canonical_json
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.processes import available_processors
from tilegym_db.sandbox.shared_buffers import SlotPlan, plan_slot
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess
from tilegym_db.verification.cases import fuzz_cases, sibling_of
from tilegym_db.verification.comparison import is_undefined
from tilegym_db.verification.distributions import scalars_to_vary
from tilegym_db.verification.expected import (
    ExpectedCache,
    LargeOracleCase,
    OracleCase,
    WorkloadContents,
    give_back_memory,
    make_large_case,
    make_oracle_case,
    raising_out_of_memory,
    tied,
)
from tilegym_db.verification.inputs import nearly_same
from tilegym_db.verification.large import large_cases
from tilegym_db.verification.phases import FUZZ, LARGE, OWN_SHAPE, SEQUENCES
from tilegym_db.verification.residues import check_residues
from tilegym_db.verification.sequences import check_sequences
from tilegym_db.verification.verifier import (
    CANNOT_VERIFY,
    POISON_NAN,
    Failure,
    WorstErrors,
    cannot_verify,
    judge_large,
)
from tilegym_db.verification.worker_handle import CaseQueue, Pair, Processors, WorkerHandle

# ---- own shape ------------------------------------------------------------------------------------
# Verifies the workload's exact shape with every content set, early if helpers are busy with fuzz cases.


@dataclass(frozen=True)
class ShapeResult:
    """A pass at one workload's shape: the figures, and the outputs for each timed content set."""

    verdict: WorstErrors
    outputs: list[Mapping[str, torch.Tensor]]


def check_own_shape(
    handle: WorkerHandle, contents: WorkloadContents, in_turn_with: OracleCase | None = None
) -> ShapeResult | Failure:
    """Check every gate with every content set, in a worker that has the source loaded.

    Args:
        in_turn_with: contents of the call between two equal ones; by default those with other ranges and scalars.
    """
    verdict = WorstErrors(deterministic=handle.solution.record.spec.deterministic)
    outputs: list[Mapping[str, torch.Tensor]] = []
    case = contents.sets[0].case
    with contents.turn(), handle.phases(OWN_SHAPE, handle.solution.name), handle.memory_for(case) as buffers:
        failure = handle.attach(buffers, case)
        for number, expected in enumerate(contents.verified):
            if failure is not None:
                break
            calls = handle.policy.calls if number == 0 else 2
            outcome = handle.verify_slot(buffers, expected.with_tensors(), calls)
            if isinstance(outcome, Failure):
                failure = outcome
            else:
                verdict.add(outcome[0])
                outputs += [outcome[1]] if number < len(contents.sets) else []
        other = in_turn_with or contents.other
        if failure is None and other is not None:
            failure = handle.call_in_turn(buffers, contents.sets[0].with_tensors(), other.with_tensors(), outputs[0])
    if failure is None and handle.policy.in_turn:
        failure = handle.check_state()
    if failure is None and handle.solution.record.spec.batch_invariant:
        with contents.turn():
            same = handle.check_slices(contents.sets[0].with_inputs(), outputs[0])
        if isinstance(same, Failure):
            return same
        verdict.slices = same
    return ShapeResult(verdict, outputs) if failure is None else failure


@dataclass
class ShapesAhead:
    """The next workloads of one Solution, in order, with their contents as far as these are drawn.

    A new shape mostly needs compilation. The worker of a Solution does that while helpers run its fuzz cases.
    """

    waiting: deque[Future[WorkloadContents | Failure]] = field(default_factory=deque)
    _found: dict[str, tuple[WorkerProcess | None, ShapeResult | Failure]] = field(default_factory=dict)

    @classmethod
    def of(cls, contents: Iterable[Future[WorkloadContents | Failure] | None]) -> ShapesAhead:
        """Return the shapes of these workloads."""
        return cls(deque(future for future in contents if future is not None))

    def check_next(self, handle: WorkerHandle) -> bool:
        """Verify the next workload early; return False if there is none or it fails.

        A failing workload is verified again in its turn, where a lost worker gets a second chance, and no other is verified early
        after it. Only a timeout is final, because a repetition would wait again.
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
        if isinstance(outcome, Failure) and outcome.status == "UNSUPPORTED":
            give_back_memory(handle.device)
        if isinstance(outcome, ShapeResult) or outcome.status == "TIMEOUT":
            self._found[contents.workload.uuid] = handle.worker, outcome
        if isinstance(outcome, ShapeResult):
            return True
        self.waiting.clear()
        return False

    def take(self, handle: WorkerHandle, contents: WorkloadContents) -> ShapeResult | Failure | None:
        """Return and forget the early result of a workload; None if there is none, or if it is of another worker."""
        self.waiting = deque(future for future in self.waiting if not _is_of(future, contents))
        worker, outcome = self._found.pop(contents.workload.uuid, (None, None))
        return None if isinstance(outcome, ShapeResult) and worker is not handle.worker else outcome


def _is_of(future: Future[WorkloadContents | Failure], contents: WorkloadContents) -> bool:
    return future.done() and future.result() is contents


MAX_LARGE_BYTES_ON_CPU = 24 << 20
"""Maximum bytes of a large case's tensors there."""
COPIES_OF_LARGE = 6
"""Number of times that a large case must fit in the free memory of a GPU, for its inputs, buffers and checks."""


# ---- fuzz outcome ---------------------------------------------------------------------------------


@dataclass
class FuzzOutcome:
    """The fuzz cases that a Solution passed, and those that were dropped."""

    passed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    scalars: list[Mapping[str, Scalar]] = field(default_factory=list)
    """The scalars of each passed case."""
    large: list[Mapping[str, int]] = field(default_factory=list)
    """The axes of each large case that passed."""
    slices: int = 0
    """Slices that had the same bits alone as in their call."""

    def plus(self, other: FuzzOutcome | Failure) -> FuzzOutcome | Failure:
        """Return the cases of both; a failure stays one."""
        if isinstance(other, Failure):
            return other
        return FuzzOutcome(
            [*self.passed, *other.passed],
            [*self.dropped, *other.dropped],
            [*self.scalars, *other.scalars],
            [*self.large, *other.large],
            self.slices + other.slices,
        )


def _elements(definition: Definition, case: Case) -> int:
    names = (*definition.tensor_inputs, *definition.outputs)
    return sum(math.prod(definition.shape_of(name, dict(case.call.axes))) for name in names)


def conclude_fuzz(
    fuzz: FuzzOutcome, proving: Sequence[Pair], failures: Sequence[Failure], *, is_stock: bool = False
) -> FuzzOutcome | Failure:
    """Return the passed cases, or the first failure at a case that stock code passes.

    A call that stock code refuses, as the Definition promises nothing for it, does not count among the wrong ones.
    """
    excused = [failure for failure in failures if failure.excused]
    wrong = [failure for failure in excused if failure.verdict is not None]
    refuted = [failure for failure in failures if not failure.excused]
    share = MAX_DROPPED_SHARE_OF_STOCK if is_stock else MAX_DROPPED_SHARE
    if refuted or len(wrong) > max(1, share * len(proving)) or len(excused) >= max(len(proving), 2):
        return (refuted or excused)[0]
    lost = {str(failure.case) for failure in excused}
    fuzz.dropped += [f"{failure.case}: stock code fails it as well" for failure in excused]
    for first, other in proving:
        if str(first.case) in lost:
            continue  # so the call that follows it was not made
        cases = [one.case for one in (first, other) if one is not None and str(one.case) not in lost]
        fuzz.passed += [str(case) for case in cases]
        fuzz.scalars += [case.call.scalars for case in cases]
    return fuzz


MAY_PASS_NEXT = ("TIMEOUT", "RUNTIME_ERROR", "COMPILE_ERROR", "UNSUPPORTED")
"""Statuses that the machine may have caused: fuzz cases that ended so are tried again with the next workload."""
MAX_FUZZ_WORKERS = 12
MAX_SIDES = 3
"""Maximum number of further dtype bindings of a Solution whose fuzz cases run side by side."""
SHARED_HOST_WORKERS = 10
"""Additional workers per kernel, divided by the number of GPUs at work: a host creates one CUDA context after the other,
0.3 s each, whichever GPU it is for."""
CASES_PER_WORKER = {"tilelang": 1, "cutile": 2, "triton": 2}
"""Fuzz cases that take about as long as the start of another worker: half a second on an H100, and two seconds more to
import TileLang. Triton compiles a long kernel for three seconds per case."""
OTHER_CASES_PER_WORKER = 6


@dataclass(frozen=True)
class VerifiedWorkload(ShapeResult):
    """A pass of one workload: its own shape, and the fuzz cases."""

    fuzz: FuzzOutcome
    is_other_excused: bool = False
    """True if stock code fails the contents of the second call too, which then prove nothing."""


@dataclass(frozen=True)
class Drawing:
    """The contents of a workload, which another thread draws, or the reason why there are none."""

    workload: Workload
    contents: Future[WorkloadContents | Failure]


T = TypeVar("T")


@dataclass
class SideBySide:
    """Verifications of further dtype bindings of a Solution, and what they began, by the key of their fuzz cases."""

    workloads: tuple[Workload, ...]
    pool: ThreadPoolExecutor
    begun: dict[str, Future[FuzzOutcome | Failure]] = field(default_factory=dict)
    others: list[Verification] = field(default_factory=list)


@dataclass
class Verification:
    """Verification of one Solution, in the worker of its handle and in helpers that share its fuzz cases.

    ``baseline_check`` finds the cases that the stock code fails as well; without it, no case is excused. ``processors``
    limits the helpers of all verifications that run at the same time.
    """

    handle: WorkerHandle
    baseline_check: BaselineCheck | None = None
    fuzz_outcomes: dict[str, FuzzOutcome | Failure] = field(default_factory=dict)
    processors: Processors = field(default_factory=lambda: Processors(available_processors()))
    ahead: ShapesAhead = field(default_factory=ShapesAhead)
    """Other shapes that this Solution is verified at; the handle's worker begins with them while helpers run fuzz cases."""
    _helpers: list[WorkerHandle] = field(default_factory=list)
    _calling: list[WorkerHandle] = field(default_factory=list)
    """The helpers for large cases and for sequences."""
    _sides: SideBySide | None = None

    def refusal(self, workload: Workload) -> Failure | None:
        """Return the failure of the fuzz cases that serve this workload, if they were checked before."""
        found = self.fuzz_outcomes.get(self._key_of(workload))
        return found if isinstance(found, Failure) else None

    def verify(
        self, contents: WorkloadContents | Drawing, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> VerifiedWorkload | Failure:
        """Fuzz once per dtype binding, then verify the workload's own shape with every content set.

        Fuzz cases do not need the contents, so a failure there is known while these are still drawn.

        If the worker is lost, something else than the Solution may be the cause, so the Solution gets a second chance in a new
        worker. After a timeout it does not, because a repetition would wait again.
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

    def case_alone(self, expected: OracleCase) -> WorstErrors | Failure:
        """Check every gate on one case, and nothing else."""
        return self.handle.load() or _check_case(self.handle, expected, self.handle.policy.calls)

    def outputs_of(self, expected: OracleCase) -> Mapping[str, torch.Tensor] | Failure:
        """Return the outputs of one call on these contents without checking them."""
        failure = self.handle.load()
        if failure is not None:
            return failure
        with self.handle.memory_for(expected.case) as buffers:
            return self.handle.attach(buffers, expected.case) or self.handle.one_call(buffers, expected)

    def own_shape(self, contents: WorkloadContents) -> VerifiedWorkload | Failure:
        """Check every content set at the workload's own shape without fuzz cases: enough to time it, not to trust it."""
        failure = self.handle.load()
        if failure is not None:
            return failure
        try:
            with raising_out_of_memory():
                return self._check_shape(contents, FuzzOutcome())
        except CANNOT_VERIFY as error:
            failure = cannot_verify(error)
        give_back_memory(self.handle.device)
        return failure

    def abort(self) -> None:
        """Kill every worker for good; see :meth:`WorkerHandle.abort`."""
        for handle in (self.handle, *self._helpers, *self._calling):
            handle.abort()
        for other in self._sides.others if self._sides is not None else ():
            other.abort()

    @contextmanager
    def expecting(self, workloads: Iterable[Workload]) -> Iterator[None]:
        """Let fuzz cases for the dtype bindings of several workloads run side by side in the block, as processors allow."""
        with ThreadPoolExecutor(max_workers=MAX_SIDES) as pool:
            self._sides = SideBySide(tuple(workloads), pool)
            try:
                yield
            finally:
                for other in self._sides.others:
                    other.abort()  # its workloads were not reached
                self._sides = None

    def _attempt(
        self, contents: WorkloadContents | Drawing, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> VerifiedWorkload | Failure:
        if self.handle.broken is not None:
            return self.handle.broken
        failure = self.handle.load()
        if failure is not None:
            return failure
        try:
            with raising_out_of_memory():
                fuzz = self._fuzz(contents.workload, anchors, seed, cache)
                if isinstance(fuzz, Failure):
                    return fuzz
                drawn = contents.contents.result() if isinstance(contents, Drawing) else contents
                return drawn if isinstance(drawn, Failure) else self._check_shape(drawn, fuzz)
        except CANNOT_VERIFY as error:
            failure = cannot_verify(error)
        give_back_memory(self.handle.device)
        return failure

    # -- fuzz cases ---------------------------------------------------------------------------------------------------

    def _fuzz(
        self, workload: Workload, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> FuzzOutcome | Failure:
        key = self._key_of(workload)
        if key not in self.fuzz_outcomes:
            self._begin_others(key, anchors, seed, cache)
            begun = None if self._sides is None else self._sides.begun.pop(key, None)
            outcome = None if begun is None else self._wait_for(begun)
            if outcome is None or _may_pass_again(outcome):
                outcome = self.handle.load() or self._check_set(workload, anchors, seed, cache)
            if isinstance(outcome, Failure) and outcome.status in MAY_PASS_NEXT:
                return outcome
            self.fuzz_outcomes[key] = outcome
        return self.fuzz_outcomes[key]

    def _key_of(self, workload: Workload) -> str:
        """Return the key of all workloads that one set of fuzz cases serves."""
        definition = self.handle.definition
        # A continuous scalar such as eps does not select code, so one set of fuzz cases serves all its values.
        selecting = {n: v for n, v in workload.scalars().items() if is_code_selecting(definition, n)}
        return canonical_json([definition.bind_dtypes(workload.dtypes), selecting, self.handle.config])

    def _begin_others(self, key: str, anchors: Sequence[Workload], seed: int, cache: ExpectedCache) -> None:
        """Begin with the fuzz cases of further dtype bindings, each in a separate worker, if there are processors for them."""
        sides = self._sides
        if sides is None or self.handle.limits.fuzz_workers == 1:
            return
        known = {key, *self.fuzz_outcomes, *sides.begun}
        for workload in sides.workloads:
            other_key = self._key_of(workload)
            if other_key in known:
                continue
            helper = self._another(1 + len(sides.begun)) if len(sides.begun) < MAX_SIDES else None
            if helper is None:
                return
            known.add(other_key)
            other = replace(self, handle=helper, fuzz_outcomes={}, ahead=ShapesAhead(), _helpers=[], _calling=[])
            other._sides = None
            sides.others.append(other)
            sides.begun[other_key] = sides.pool.submit(other._check_set_only, workload, anchors, seed, cache)

    def _check_set_only(
        self, workload: Workload, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> FuzzOutcome | Failure:
        """Check one set of fuzz cases in the worker of this verification, and end the worker."""
        try:
            with closing(self.handle):
                return self.handle.load() or self._check_set(workload, anchors, seed, cache)
        finally:
            self.processors.give_back()

    def _wait_for(self, begun: Future[T]) -> T:
        """Return a result; until then, verify the next workloads' shapes."""
        while self.handle.usable and not begun.done() and self.ahead.check_next(self.handle):
            pass
        return begun.result()

    def _another(self, workers: int) -> WorkerHandle | None:
        """Take a processor and return a handle with a started worker; None if no processor is free or no process starts."""
        if not self.processors.take(workers):
            return None
        try:
            helper = self.handle.another()
        except WorkerDied:
            self.processors.give_back()
            return None
        if self.handle.aborted:
            helper.abort()
        return helper

    def _check_set(
        self, workload: Workload, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> FuzzOutcome | Failure:
        """Check the fuzz cases for one dtype binding; for a kernel, also large cases and sequences, at the same time if possible.

        The failure of a fuzz case counts first, whichever is found first.
        """
        handle, record = self.handle, self.handle.solution.record
        dtypes = handle.definition.bind_dtypes(workload.dtypes)
        scalars = scalars_to_vary(handle.definition, workload.scalars(), [anchor.scalars() for anchor in anchors])
        cases = fuzz_cases(
            handle.definition,
            record,
            [anchor.axes for anchor in anchors],
            dtypes,
            scalars,
            count=handle.policy.fuzz_cases_of(record),
            seed=seed,
            max_rows=handle.policy.fuzz_rows,
        )
        as_served = handle.policy.as_served and record.spec.role == "kernel"  # a baseline never serves a model
        # An interpreter is too slow for thousands of calls. Its fuzz cases have few rows, so only these sizes need several tiles.
        of_kernel: list[_CheckCalls] = [_check_sizes] if handle.interpret else [_check_large_cases, _check_sequences]
        calls = of_kernel if as_served else []
        given = cases, dtypes, scalars, seed, cache, self.baseline_check
        with ThreadPoolExecutor(max_workers=2) as pool:
            begun: dict[_CheckCalls, Future[FuzzOutcome | Failure]] = {}
            for number, check in enumerate(calls if handle.limits.fuzz_workers > 1 else ()):
                helper = self._another(1 + number)
                if helper is not None:
                    self._calling.append(helper)
                    begun[check] = pool.submit(self._check_calls_only, helper, check, *given)
            outcome: FuzzOutcome | Failure | None = None
            try:
                with handle.phases(FUZZ, handle.solution.name):
                    outcome = self._check_fuzz_cases(cases, cache, scalars)
                for check in calls:
                    if isinstance(outcome, FuzzOutcome):
                        outcome = outcome.plus(self._check_calls(check, begun.get(check), *given))
            finally:
                if not isinstance(outcome, FuzzOutcome):
                    for helper in self._calling:
                        helper.abort()  # else the pool would wait for it
        self._calling.clear()
        assert outcome is not None
        return outcome

    def _check_calls_only(self, helper: WorkerHandle, check: _CheckCalls, *arguments: Any) -> FuzzOutcome | Failure:
        """Check large cases or sequences in a separate worker, and end the worker."""
        try:
            with closing(helper), raising_out_of_memory():
                outcome = helper.load() or check(helper, *arguments)
                return outcome if isinstance(outcome, Failure) else helper.check_state() or outcome
        finally:
            self.processors.give_back()

    def _check_calls(
        self, check: _CheckCalls, begun: Future[FuzzOutcome | Failure] | None, *arguments: Any
    ) -> FuzzOutcome | Failure:
        """Return what a helper found. Without one, or if the Solution may not be the cause of its failure, check it here."""
        found = None if begun is None else self._wait_for(begun)
        if found is None or _may_pass_again(found):
            found = self.handle.load() or check(self.handle, *arguments)
        return found

    def _check_fuzz_cases(
        self, cases: Sequence[Case], cache: ExpectedCache, scalars: Mapping[str, Scalar]
    ) -> FuzzOutcome | Failure:
        """Check every case, by the worker and as many helpers as processors allow, now or when other runners finish."""
        fuzz, queue, helping = FuzzOutcome(), CaseQueue((), len(cases)), list[Future[None]]()
        own = iter(queue)
        try:
            with ThreadPoolExecutor(max_workers=1 + max(1, self.handle.limits.fuzz_workers)) as pool, closing(queue):
                proved = pool.submit(self._prove, queue, cases, cache, scalars, fuzz.dropped)
                while queue.left:
                    self._start_helpers(queue, pool, helping)
                    if _at_work(helping) and self._check_ahead(queue):
                        continue
                    taken = next(own, None)
                    if taken is not None:
                        self._check_pair(self.handle, queue, *taken)
            proving = proved.result()
            for ended in helping:
                ended.result()
        finally:
            self._helpers = []
        if not proving and not queue.failures:
            reason = "no shape beside the measured one can be verified: its constraints, or the reference, exclude all"
            return Failure("UNSUPPORTED", reason, gate="envelope")
        fuzz.slices = queue.slices
        is_stock = self.handle.solution.record.spec.provides == "stock"
        return conclude_fuzz(fuzz, proving, queue.failures, is_stock=is_stock)

    def _prove(
        self,
        queue: CaseQueue,
        cases: Sequence[Case],
        cache: ExpectedCache,
        scalars: Mapping[str, Scalar],
        dropped: list[str],
    ) -> list[Pair]:
        """Compute the oracles, the smallest first, so that the smallest failing case is reported early. Return them."""
        definition, in_turn = self.handle.definition, self.handle.policy.in_turn
        proven, first = list[Pair](), cases[0].seed % 1000 if cases else 0
        with closing_after_error(queue):
            for number, case in sorted(enumerate(cases), key=lambda one: _elements(definition, one[1])):
                if not queue.left:
                    break
                expected, pair = cache.get(case), None
                if expected is None:
                    dropped.append(str(case))
                else:
                    other = cache.get(sibling_of(definition, case, number, scalars, first)) if in_turn else None
                    pair = expected, other
                    proven.append(pair)
                queue.put(pair)
        return proven

    def _check_ahead(self, queue: CaseQueue) -> bool:
        """Verify another shape early; return False if there is none, and the worker takes a fuzz case instead."""
        checked = self.ahead.check_next(self.handle)
        if not checked and not self.handle.usable:
            not_loaded = self.handle.load()
            if not_loaded is not None:
                queue.fail(not_loaded)
        return checked

    def _check_pair(self, handle: WorkerHandle, queue: CaseQueue, number: int, pair: Pair) -> None:
        nearly = _nearly(handle, pair[0]) if pair[1] is not None else None
        outcome = _check_case(handle, pair[0], 2, pair[1], nearly)
        if isinstance(outcome, Failure):
            at = (nearly, None) if nearly is not None and outcome.case == nearly.case else pair
            queue.fail(self._excused(outcome, *at), number)
        else:
            queue.count_slices(outcome.slices)

    def _excused(self, failure: Failure, expected: OracleCase, other: OracleCase | None) -> Failure:
        """Return the failure, marked as excused if stock code fails the comparison with the oracle at its case too."""
        at = expected if other is None or failure.case == expected.case else other
        is_stock = self.handle.solution.record.spec.provides == "stock"
        if failure.verdict is None:
            # An exception is loud, and a model that calls this code has had it before.
            raised = failure.status == "RUNTIME_ERROR" and self.handle.usable
            return replace(failure, excused=is_stock and raised and is_undefined(self.handle.definition, at.inputs))
        if is_stock:
            return replace(failure, excused=True)
        return replace(failure, excused=self.baseline_check is not None and self.baseline_check.excuses(failure, at))

    def _start_helpers(self, queue: CaseQueue, pool: ThreadPoolExecutor, helping: list[Future[None]]) -> None:
        """Start as many helpers as there are cases and processors for; ended helpers do not count."""
        while True:
            workers = 1 + _at_work(helping)
            if workers >= self.handle.limits.fuzz_workers or queue.left < workers * self._cases_per_worker():
                return
            helper = self._another(workers)
            if helper is None:
                return  # run with the helpers that could start
            self._helpers.append(helper)
            helping.append(pool.submit(self._help, helper, queue))

    def _help(self, helper: WorkerHandle, queue: CaseQueue) -> None:
        """Take cases in a separate worker until none is left."""
        try:
            with closing(helper):
                not_loaded = helper.load()
                if not_loaded is not None and not_loaded.status == "UNSUPPORTED":
                    return  # run with the helpers that could start
                if not_loaded is not None:
                    queue.fail(not_loaded)
                with closing(queue):
                    for number, pair in queue:
                        self._check_pair(helper, queue, number, pair)
        finally:
            self.processors.give_back()

    @property
    def may_have_helpers(self) -> bool:
        """True if its worker would finish the fuzz cases later than another worker starts."""
        cases = self.handle.policy.fuzz_cases_of(self.handle.solution.record)
        return self.handle.limits.fuzz_workers > 1 and cases >= self._cases_per_worker()

    def _cases_per_worker(self) -> int:
        if self.handle.device == CPU:
            return 1  # a worker starts quickly there
        return CASES_PER_WORKER.get(self.handle.solution.record.spec.language, OTHER_CASES_PER_WORKER)

    # -- the workload's own shape -------------------------------------------------------------------------------------

    def _check_shape(self, contents: WorkloadContents, fuzz: FuzzOutcome) -> VerifiedWorkload | Failure:
        found = self.ahead.take(self.handle, contents) or check_own_shape(self.handle, contents)
        other, is_excused = contents.other, False
        if isinstance(found, Failure) and other is not None and found.case == other.case:
            found = self._excused(found, other.with_tensors(), None)
            is_excused = found.excused
            if is_excused:  # the call between two equal ones has the contents of a timed set then
                # The fuzz cases are those of other workloads too, which this case is none of.
                fuzz = replace(fuzz, dropped=[*fuzz.dropped, f"{found.case}: stock code fails it as well"])
                found = self.handle.load() or check_own_shape(self.handle, contents, contents.sets[-1])
        if isinstance(found, Failure):
            return found
        found.verdict.cases += len(fuzz.passed)
        return VerifiedWorkload(found.verdict, found.outputs, fuzz, is_excused)


def max_fuzz_workers(host_share: int) -> int:
    """Return the maximum number of workers per kernel if this many GPUs of a host are at work."""
    return MAX_FUZZ_WORKERS - SHARED_HOST_WORKERS + SHARED_HOST_WORKERS // host_share


@contextmanager
def closing_after_error(queue: CaseQueue) -> Iterator[None]:
    """Close the queue if the block raises, so that no worker waits for a case that will not come."""
    try:
        yield
    except BaseException:
        queue.close()
        raise


def _may_pass_again(outcome: FuzzOutcome | Failure) -> bool:
    """Return True for a failure of a helper that is not final before the worker of the Solution has tried the same."""
    return isinstance(outcome, Failure) and outcome.status in MAY_PASS_NEXT and outcome.status != "TIMEOUT"


def _at_work(helping: Sequence[Future[None]]) -> int:
    """Return the number of helpers that have not ended."""
    return sum(not help_given.done() for help_given in helping)


NEARLY_SHARE = 1 / 2
"""Share of a kernel's cases that are followed by a call on nearly the same contents."""


def _nearly(handle: WorkerHandle, expected: OracleCase) -> OracleCase | None:
    """Return nearly the contents of a case, for some cases of a kernel; None for others."""
    case = replace(expected.case, seed=random.Random(f"nearly {expected.case.seed}").getrandbits(62))
    if handle.solution.record.spec.role != "kernel" or case.seed % 1000 >= NEARLY_SHARE * 1000:
        return None
    inputs = nearly_same(handle.definition, expected.inputs, case.seed)
    if inputs is None:
        return None
    return make_oracle_case(handle.definition, case, handle.device, inputs=tied(case, inputs))


def _check_case(
    handle: WorkerHandle,
    expected: OracleCase,
    calls: int,
    other: OracleCase | None = None,
    nearly: OracleCase | None = None,
) -> WorstErrors | Failure:
    """Check one case by every gate; with ``other``, call that too, then the first case again, and then ``nearly``."""
    verdict = WorstErrors(deterministic=handle.solution.record.spec.deterministic)
    with handle.memory_for(expected.case) as buffers:
        outcome = handle.attach(buffers, expected.case) or handle.verify_slot(buffers, expected, calls)
        if other is not None and not isinstance(outcome, Failure):
            outcome = handle.call_in_turn(buffers, expected, other, outcome[1]) or outcome
            if nearly is not None and not isinstance(outcome, Failure):
                outcome = handle.call_nearly(buffers, nearly) or outcome
    if isinstance(outcome, Failure):
        return outcome
    same = handle.check_slices(expected, outcome[1])
    if isinstance(same, Failure):
        return same
    verdict.slices = same
    verdict.add(outcome[0])
    return verdict


_CheckCalls = Callable[
    [WorkerHandle, Sequence[Case], Mapping[str, str], Mapping[str, Scalar], int, ExpectedCache, "BaselineCheck | None"],
    "FuzzOutcome | Failure",
]


def _check_sequences(
    handle: WorkerHandle,
    cases: Sequence[Case],
    dtypes: Mapping[str, str],
    scalars: Mapping[str, Scalar],
    seed: int,
    cache: ExpectedCache,
    stock: BaselineCheck | None,
) -> FuzzOutcome | Failure:
    """Make sequences of calls, whose sizes are those of the fuzz cases but for one axis."""
    with handle.phases(SEQUENCES, handle.solution.name):
        judged = check_sequences(handle, cases, seed, cache)
    if isinstance(judged, Failure):
        return judged
    return FuzzOutcome(judged).plus(_check_sizes(handle, cases, dtypes, scalars, seed, cache, stock))


def _check_sizes(
    handle: WorkerHandle,
    cases: Sequence[Case],
    dtypes: Mapping[str, str],
    scalars: Mapping[str, Scalar],
    seed: int,
    cache: ExpectedCache,
    stock: BaselineCheck | None,
) -> FuzzOutcome | Failure:
    """Call with successive sizes of each axis."""
    with handle.phases(SEQUENCES, handle.solution.name):
        judged = check_residues(handle, cases, seed, cache, None if stock is None else stock.excuses)
    return judged if isinstance(judged, Failure) else FuzzOutcome(judged)


def _check_large_cases(
    handle: WorkerHandle,
    cases: Sequence[Case],
    dtypes: Mapping[str, str],
    scalars: Mapping[str, Scalar],
    seed: int,
    cache: ExpectedCache,
    stock: BaselineCheck | None,
) -> FuzzOutcome | Failure:
    """Call once at sizes too large for a whole oracle; compare some rows. Cases without memory are dropped."""
    fuzz, budget, excused = FuzzOutcome(), MAX_LARGE_BYTES_ON_CPU, 0
    definition, record = handle.definition, handle.solution.record
    if handle.device != CPU:
        budget = torch.cuda.mem_get_info(handle.device)[0] // (COPIES_OF_LARGE * handle.limits.device_share)
    for case in large_cases(
        definition, record, dtypes, scalars, seed=seed, budget_bytes=budget, on_gpu=handle.device != CPU
    ):
        if handle.aborted:  # the Solution has failed elsewhere, and an oracle may take long
            return Failure("RUNTIME_ERROR", "its worker was ended before all large cases were checked")
        try:
            room = _room_for(plan_slot(definition, case.case), handle.device)
            with room, raising_out_of_memory(), handle.phases(LARGE, handle.solution.name):
                large = make_large_case(definition, case, handle.device)
                outcome = _check_large_case(handle, large) if large is not None else None
            lacked_memory = False
        except (StoreError, torch.OutOfMemoryError):
            large, outcome, lacked_memory = None, None, True
        if lacked_memory:
            give_back_memory(handle.device)
        # An exception at such a size is loud, and a model runs stock code then. A wrong number or a lost process is not.
        raised = isinstance(outcome, Failure) and outcome.status == "RUNTIME_ERROR" and handle.usable
        if isinstance(outcome, Failure) and not raised and not outcome.no_memory:
            if outcome.verdict is None or large is None or stock is None:
                return outcome
            if excused >= MAX_EXCUSED_LARGE or not stock.excuses(outcome, large.compared):
                return outcome
            excused += 1
        passed = large is not None and isinstance(outcome, int)
        (fuzz.passed if passed else fuzz.dropped).append(str(case.case if large is None else large.given.case))
        if isinstance(outcome, int):
            fuzz.large.append(case.case.call.axes)
            fuzz.slices += outcome
    return fuzz


MAX_EXCUSED_LARGE = 2
"""Maximum number of large cases that stock code may fail too, such as rows of one column."""
ROOMY_BYTES = 1 << 30
"""Bytes of a call from which on it is checked while no other such call is: its copies may take all free memory of a GPU."""
_large_call = threading.Lock()


@contextmanager
def _room_for(plan: SlotPlan, device: str) -> Iterator[None]:
    """Check one call of many bytes at a time, and then free its copies, which PyTorch would keep from the workers."""
    if device == CPU or plan.size < ROOMY_BYTES:
        yield
        return
    with _large_call:
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def _check_large_case(handle: WorkerHandle, large: LargeOracleCase) -> int | Failure:
    """Call once at a large size; return the number of rows that were called alone, too, or the failure."""
    with handle.memory_for(large.given.case) as buffers:
        found = handle.attach(buffers, large.given.case) or handle.one_call(buffers, large.given, POISON_NAN)
        if not isinstance(found, Failure):
            found = judge_large(handle.definition, handle.solution.record, large, found) or found
    return found if isinstance(found, Failure) else handle.check_slices(large.given, found, single=True)


# ---- check of stock code --------------------------------------------------------------------------
# Drops fuzz cases that the stock implementation in the same dtype also fails.
#
# For example, PyTorch's matrix product in bfloat16 on a CPU gives NaN for a row of -inf at some sizes. A Solution that
# does the same is not worse than the code that it replaces.

MAX_DROPPED_SHARE = 0.25
"""Maximum share of the cases that may be dropped; a Solution that fails more is wrong, whatever stock code does."""
MAX_DROPPED_SHARE_OF_STOCK = 0.5
"""The same for stock code itself, which has four cases: two of them may have contents on which it is known to be inaccurate."""


MAX_OF_STOCK_ERROR, MAX_OF_STOCK_COUNT = 8.0, 4.0
"""Factors on the errors of stock code, and on the share of its elements that are wrong, that a Solution has at most where it is
excused. Both are rounding, in another order."""


def is_hardly_worse(failure: Failure, stock: Failure) -> bool:
    """Return True if the errors of a Solution at a case are about those of stock code there.

    A Solution that writes garbage where stock code is slightly off is wrong. NaN or infinity at wrong places is only excused if
    stock code has that too.
    """
    mine, theirs = failure.correctness, stock.correctness
    if mine is None or theirs is None or (mine.gate == "nan_inf_mask") > (theirs.gate == "nan_inf_mask"):
        return False
    errors = (
        (mine.rel_fro, theirs.rel_fro),
        (mine.worst_row_rel, theirs.worst_row_rel),
        (mine.max_abs, theirs.max_abs),
    )
    wrong, of_stock = (1 - (found.matched_ratio or 0.0) for found in (mine, theirs))
    # None is an infinite error, as of anything where the oracle is zero.
    return wrong <= MAX_OF_STOCK_COUNT * of_stock and all(
        theirs is None or (mine is not None and mine <= MAX_OF_STOCK_ERROR * theirs) for mine, theirs in errors
    )


class CaseVerifier(Protocol):
    """Protocol for the verification of the stock code (:class:`Verification`)."""

    handle: WorkerHandle

    def case_alone(self, expected: OracleCase) -> WorstErrors | Failure:
        """Check every gate on one case, and nothing else."""
        ...

    def outputs_of(self, expected: OracleCase) -> Mapping[str, torch.Tensor] | Failure:
        """Return the outputs of one call on these contents without checking them."""
        ...


@dataclass
class BaselineCheck:
    """Runner of the Definition's stock code at cases that a Solution failed; it starts on first use.

    Thread-safe.
    """

    make: Callable[[], CaseVerifier | None]
    _stock: CaseVerifier | None = None
    _asked: dict[str, Failure | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fails(self, expected: OracleCase) -> bool:
        """Return True if the comparison with the oracle rejects the stock code's result too."""
        return self._failure_at(expected) is not None

    def excuses(self, failure: Failure, expected: OracleCase) -> bool:
        """Return True if stock code fails a case too, and a Solution that failed it is hardly worse there."""
        stock = self._failure_at(expected)
        return stock is not None and is_hardly_worse(failure, stock)

    def _failure_at(self, expected: OracleCase) -> Failure | None:
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

    def outputs(self, expected: OracleCase) -> Mapping[str, torch.Tensor] | None:
        """Return the stock code's outputs on these contents; None if there is no stock code, or no memory for it."""
        with self._lock:
            stock = self._started(expected)
            if stock is None:
                return None
            try:
                found = stock.outputs_of(expected)
            except torch.OutOfMemoryError:
                found = None
            if found is None:
                give_back_memory(stock.handle.device)
            return None if isinstance(found, Failure) else found

    def _run(self, expected: OracleCase) -> Failure | None:
        stock = self._started(expected)
        if stock is None:
            return None
        outcome = stock.case_alone(expected)
        return outcome if isinstance(outcome, Failure) and outcome.verdict is not None else None

    def _started(self, expected: OracleCase) -> CaseVerifier | None:
        """Return the verification of the stock code, or None if the stock code does not support such calls."""
        self._stock = self._stock or self.make()
        if self._stock is None or self._stock.handle.excludes(expected.case) is not None:
            return None
        return self._stock

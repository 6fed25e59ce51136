"""Verification of one Solution in the harness: fuzz cases once per dtype binding, then a Workload's own shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch

from tilegym_db.bench.case_queue import CaseQueue, Pair
from tilegym_db.bench.contents import ExpectedCache, WorkloadContents
from tilegym_db.bench.fuzz_outcome import FuzzOutcome, conclude_fuzz
from tilegym_db.bench.own_shape import OwnShape, ShapesAhead, check_own_shape
from tilegym_db.bench.processors import Processors
from tilegym_db.bench.stock_witness import StockWitness
from tilegym_db.bench.worker_handle import WorkerHandle
from tilegym_db.confinement.bounds import available_processors
from tilegym_db.records import Workload
from tilegym_db.records.base import canonical_json
from tilegym_db.records.binding import is_code_selecting
from tilegym_db.records.case import Case
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.hardware import CPU
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.outcome import CANNOT_VERIFY, Failure, Verdict, cannot_verify
from tilegym_db.verify.shapes import fuzz_cases, sibling_of
from tilegym_db.verify.worker.losses import WorkerDied
from tilegym_db.verify.worker.shared_buffers import SharedBuffers, plan_slot

__all__ = ["Verification", "Verified", "most_fuzz_workers"]

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
        """Every gate on one case, and nothing else."""
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
        """Every content set at the workload's own shape, and no fuzz: a reason to time it, not to trust it."""
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
        """Every case, by the worker and as many helpers as the machine has room for, now or when others are done."""
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
        """Verify another shape that is to come; false where there is none, and the next fuzz case is this worker's."""
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
        """The failure, marked where the comparison with the oracle refuses stock code at its case as well."""
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
    """How many helpers have not ended yet."""
    return sum(not help_given.done() for help_given in helping)


def _check_case(
    handle: WorkerHandle, expected: Expected, calls: int, other: Expected | None = None
) -> Verdict | Failure:
    """One case by every gate; with ``other``, a second call of its shape on other inputs, and then the first again."""
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

"""One Solution taking part in a run: its worker process, its fuzz envelope, and verification of one workload."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tilegym_db.backends.inductor import head_start_folder
from tilegym_db.bench.contents import ExpectedCache, WorkloadContents
from tilegym_db.bench.rigor import SCREEN, Rigor
from tilegym_db.bench.stage import Stage
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.base import canonical_json
from tilegym_db.records.binding import is_code_selecting
from tilegym_db.records.hardware import CPU
from tilegym_db.records.solution import name_with_config
from tilegym_db.verify.gates import OutputVerdict
from tilegym_db.verify.inputs import Case
from tilegym_db.verify.ownership import KernelUse
from tilegym_db.verify.sandbox.arena import Arena, plan_slot
from tilegym_db.verify.sandbox.bounds import available_processors
from tilegym_db.verify.sandbox.process import Reply, WorkerDied, WorkerProcess, WorkerTimeout
from tilegym_db.verify.sandbox.processes import stolen_us
from tilegym_db.verify.shapes import fuzz_cases
from tilegym_db.verify.verifier import Expected, Failure, Verdict, judge, read_outputs, same_bytes, verify_slot
from tilegym_db.verify.wall_clock import Elapsed

__all__ = ["Limits", "Member", "Verified"]

MAX_DEATHS = 3
MAX_ENVELOPE_WORKERS = 6
CASES_A_WORKER = {"tilelang": 1, "cutile": 2}
"""Fuzz cases that take about as long to compile as one more worker takes to start, which is a second or two, and longer the
more of them start at once: the driver makes one CUDA context at a time."""
OTHER_CASES_A_WORKER = 6
_WORKERS = itertools.count(1)  # a folder of its own for each, in a scratch folder that several members share


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds and memory in bytes for one member."""

    first_call_s: float = 180.0
    call_s: float = 60.0
    arena_bytes: int = 6 << 30
    envelope_workers: int = 1
    """Worker processes that share the cases of one fuzz envelope, each of which may have to be compiled for."""


@dataclass
class Verified:
    """A member that passed one workload: what it wrote for each content set, and how it was verified."""

    outputs: list[Mapping[str, torch.Tensor]]
    verdict: Verdict
    envelope: Envelope


@dataclass
class Envelope:
    """The fuzz cases that a Solution passed, and those that proved nothing."""

    passed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass
class Member:
    """One Solution in the run of its Definition."""

    definition: Definition
    solution: SolutionFiles
    device: str
    sm: str
    folder: Path
    rigor: Rigor = SCREEN
    config: Config = field(default_factory=dict)
    interpret: bool = False
    limits: Limits = field(default_factory=Limits)
    worker: WorkerProcess | None = None
    envelopes: dict[str, Envelope | Failure] = field(default_factory=dict)
    broken: Failure | None = None
    deaths: int = 0
    spoilt: bool = False
    notes: tuple[str, ...] = ()
    """Soft findings of the static scan."""
    aborted: bool = False
    _helpers: list[WorkerProcess] = field(default_factory=list)
    _warm: bool = False
    _has_been_timed: bool = False

    @property
    def name(self) -> str:
        """The Solution's name, with the config where it has one: one Solution may play under several."""
        return name_with_config(self.solution.name, self.config)

    @property
    def sandbox_level(self) -> int:
        """How well the worker is confined; 0 while there is none, or where it ended before it could say."""
        try:
            return 0 if self.worker is None else self.worker.sandbox_level
        except (WorkerDied, WorkerTimeout):
            return 0

    def _new_worker(self) -> WorkerProcess:
        environment = {"TRITON_INTERPRET": "1"} if self.interpret else {}
        folder = self.folder / f"{self.solution.name}-{next(_WORKERS)}"
        compiles = self.device == CPU and self.solution.uses_torch_compile
        worker = WorkerProcess(
            self.device,
            folder,
            environment,
            readable=(self.solution.folder,),
            head_start=head_start_folder() if compiles else None,
        )
        if self.aborted:
            worker.kill()
        return worker

    def abort(self) -> None:
        """Kill every worker for good, so that whoever waits for an answer, in whatever thread, is told that it died."""
        self.aborted = True
        for worker in [self.worker, *self._helpers]:
            if worker is not None:
                worker.kill()

    def close(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def unsupported(self, workload: Workload) -> str | None:
        """Why the Solution's declared envelope excludes this workload, or None."""
        # On a CPU a tile language runs in its interpreter, whatever its targets are.
        target = self.sm if self.device != CPU else CPU if self.solution.record.spec.language == "python" else None
        return self.solution.record.unsupported(
            self.definition.bind_axes(workload.axes),
            self.definition.bind_dtypes(workload.dtypes),
            workload.layout_classes(self.definition),
            target=target,
        )

    # -- verification -------------------------------------------------------------------------------------------------

    def verify(
        self, contents: WorkloadContents, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> Verified | Failure:
        """Fuzz once per dtype binding, then verify the workload's own shape with every content set.

        A worker that is lost on the way may have been lost to something else than the Solution, so the Solution gets a
        second chance in a fresh one; not after a timeout, which would only be waited for again.
        """
        outcome = self._verify(contents, anchors, seed, cache)
        if (
            isinstance(outcome, Failure)
            and outcome.status == "RUNTIME_ERROR"
            and self.broken is None
            and not self.usable
            and not self.aborted
        ):
            self.close()
            again = self._verify(contents, anchors, seed, cache)
            if isinstance(again, Failure) and again.status == outcome.status:
                return replace(again, reason=f"{again.reason} (twice, the second time in a fresh process)")
            return again
        return outcome

    @property
    def usable(self) -> bool:
        """True while the worker lives and nothing has spoilt its CUDA context."""
        return self.worker is not None and self.worker.alive and not self.spoilt

    def _verify(
        self, contents: WorkloadContents, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> Verified | Failure:
        if self.broken is not None:
            return self.broken
        loaded = self.load()
        if loaded is not None:
            return loaded
        try:
            envelope = self._fuzz(contents.workload, anchors, seed, cache)
            if isinstance(envelope, Failure):
                return envelope
            return self._verify_shape(contents, envelope)
        except (RecordError, StoreError, torch.OutOfMemoryError) as error:
            return Failure("UNSUPPORTED", f"cannot be verified on this machine: {error}")

    def verify_alone(self, expected: Expected) -> Verdict | Failure:
        """Every gate on one case, and nothing else."""
        failure = self.load()
        if failure is not None:
            return failure
        assert self.worker is not None
        return self._verify_case(self.worker, expected, self.rigor.calls)

    def verify_own_shape(self, contents: WorkloadContents) -> Verified | Failure:
        """Every content set at the workload's own shape, and no fuzz: a reason to time it, not to trust it."""
        failure = self.load()
        if failure is not None:
            return failure
        try:
            return self._verify_shape(contents, Envelope())
        except (RecordError, StoreError, torch.OutOfMemoryError) as error:
            return Failure("UNSUPPORTED", f"cannot be verified on this machine: {error}")

    def after_failure(self, failure: Failure) -> bool:
        """End a worker that did not survive; true if so. The Solution is given up on after the third death."""
        if self.worker is None or self.usable:
            return False
        self.close()
        self.deaths += 1
        if self.deaths >= MAX_DEATHS:
            reason = f"its worker died {self.deaths} times; last: {failure.reason}"
            self.broken = replace(failure, reason=reason)
        return True

    def load(self) -> Failure | None:
        """A worker with the source loaded: the one there is, or a fresh one where it was lost. Nothing is called yet."""
        if self.worker is not None and not self.usable:
            self.close()
        if self.worker is None:
            try:
                self.worker = self._new_worker()
            except WorkerDied as error:
                return Failure("RUNTIME_ERROR", "no worker could be started", str(error))
            self._warm = False
        if self._warm:
            return None
        self.spoilt = False
        failure = self._load_into(self.worker)
        self._warm = failure is None
        self.broken = self.broken or failure
        return failure

    def _load_into(self, worker: WorkerProcess) -> Failure | None:
        """Everything before the Solution's first call. What its source does at import happens here."""
        timeout_s = self.limits.first_call_s
        failure = self._ask(worker, "prepare", timeout_s, profile=self.rigor.audited)
        if failure is not None:
            return failure
        try:
            reply = worker.request(
                "load",
                timeout_s=timeout_s,
                folder=str(self.solution.folder),
                digest=self.solution.digest,
                inputs=list(self.definition.inputs),
                outputs=list(self.definition.written_outputs),
                in_place=self.definition.in_place,
            )
        except WorkerTimeout as error:
            return Failure("TIMEOUT", "loading the source did not finish", str(error))
        except WorkerDied as error:
            return Failure("RUNTIME_ERROR", "the worker died while loading the source", str(error))
        if reply.ok:
            return None
        status = "COMPILE_ERROR" if reply.is_compile_error else "RUNTIME_ERROR"
        return Failure(status, "the source does not load", reply.error)  # type: ignore[arg-type]

    def _fuzz(
        self, workload: Workload, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> Envelope | Failure:
        dtypes = self.definition.bind_dtypes(workload.dtypes)
        # A continuous scalar such as eps selects no code: one envelope serves all its values.
        scalars = workload.scalars()
        selecting = {n: v for n, v in scalars.items() if is_code_selecting(self.definition, n)}
        key = canonical_json([dtypes, selecting, self.config])
        if key not in self.envelopes:
            sizes = [anchor.axes for anchor in anchors]
            count = self.rigor.fuzz_cases_of(self.solution.record)
            cases = fuzz_cases(
                self.definition,
                self.solution.record,
                sizes,
                dtypes,
                scalars,
                count=count,
                seed=seed,
                max_rows=self.rigor.fuzz_rows,
            )
            outcome = self._verify_envelope(cases, cache)
            if isinstance(outcome, Failure) and outcome.status in ("TIMEOUT", "RUNTIME_ERROR", "COMPILE_ERROR"):
                return outcome  # the machine's trouble or the source's: tried again for the next workload
            self.envelopes[key] = outcome
        return self.envelopes[key]

    def _verify_envelope(self, cases: Sequence[Case], cache: ExpectedCache) -> Envelope | Failure:
        """Every case, spread over the worker and as many helpers as the machine has room for."""
        assert self.worker is not None
        envelope = Envelope()
        proving: list[Expected] = []
        for case in cases:
            expected = cache.get(case)
            if expected is None:
                envelope.dropped.append(str(case))
            else:
                proving.append(expected)
        if not proving:
            reason = "no shape beside the measured one can be verified: its constraints, or the reference, exclude all"
            return Failure("UNSUPPORTED", reason, gate="envelope")
        count = min(self.limits.envelope_workers, len(proving) // self._cases_a_worker())
        with contextlib.suppress(WorkerDied):  # as many as can be had
            for _ in range(count - 1):
                self._helpers.append(self._new_worker())
        workers = [self.worker, *self._helpers]
        try:
            with ThreadPoolExecutor(max_workers=len(workers)) as pool:
                shares = [proving[number :: len(workers)] for number in range(len(workers))]
                failures = list(pool.map(self._verify_share, workers, shares))
        finally:
            for helper in self._helpers:
                helper.close()
            self._helpers = []
        failure = next((failure for failure in failures if failure is not None), None)
        envelope.passed = [str(expected.case) for expected in proving]
        return envelope if failure is None else failure

    def _cases_a_worker(self) -> int:
        if self.device == CPU:
            return 1  # a worker starts in no time there
        return CASES_A_WORKER.get(self.solution.record.spec.language, OTHER_CASES_A_WORKER)

    def _verify_share(self, worker: WorkerProcess, share: Sequence[Expected]) -> Failure | None:
        failure = None if worker is self.worker else self._load_into(worker)
        for expected in share:
            if failure is None:
                outcome = self._verify_case(worker, expected, calls=2)
                failure = outcome if isinstance(outcome, Failure) else None
        return failure

    def _verify_case(self, worker: WorkerProcess, expected: Expected, calls: int) -> Verdict | Failure:
        verdict = Verdict(deterministic=self.solution.record.spec.deterministic)
        with Arena(plan_slot(self.definition, expected.case), 1, self.device) as arena:
            outcome = self._attach(worker, arena, expected.case) or self._slot(worker, arena, expected, calls)
            self._detach(worker)
        if isinstance(outcome, Failure):
            return outcome
        verdict.add(outcome[0])
        return verdict

    def _verify_shape(self, contents: WorkloadContents, envelope: Envelope) -> Verified | Failure:
        assert self.worker is not None
        verdict = Verdict(deterministic=self.solution.record.spec.deterministic)
        outputs: list[Mapping[str, torch.Tensor]] = []
        case = contents.sets[0].case
        with Arena(plan_slot(self.definition, case), 1, self.device) as arena:
            failure = self._attach(self.worker, arena, case)
            for number, expected in enumerate(contents.sets):
                if failure is not None:
                    break
                calls = self.rigor.calls if number == 0 else 2
                outcome = self._slot(self.worker, arena, expected, calls=calls)
                if isinstance(outcome, Failure):
                    failure = outcome
                else:
                    verdict.add(outcome[0])
                    outputs.append(outcome[1])
            self._detach(self.worker)
        if failure is not None:
            return failure
        verdict.cases += len(envelope.passed)
        return Verified(outputs, verdict, envelope)

    def _slot(
        self, worker: WorkerProcess, arena: Arena, expected: Expected, calls: int
    ) -> tuple[dict[str, OutputVerdict], dict[str, torch.Tensor]] | Failure:
        timeout_s = self.limits.first_call_s  # any new shape may compile anew
        record = self.solution.record
        outcome = verify_slot(worker, arena, 0, self.definition, record, expected, calls=calls, timeout_s=timeout_s)
        if isinstance(outcome, Failure):
            self._note_spoilt(worker, outcome.log)
        return outcome

    def _note_spoilt(self, worker: WorkerProcess, text: str) -> None:
        """After an illegal access every later CUDA call of that process fails, whoever makes it."""
        if worker is self.worker and ("CUDA error" in text or "CUDA_ERROR" in text or "cudaError" in text):
            self.spoilt = True

    def _attach(self, worker: WorkerProcess, arena: Arena, case: Case) -> Failure | None:
        return self._ask(
            worker,
            "attach",
            self.limits.call_s,
            descriptors=(arena.descriptor,),
            arena=arena.to_message(),
            config=self.config,
            scalars=case.scalars,
        )

    def _detach(self, worker: WorkerProcess) -> None:
        if worker.alive:
            self._ask(worker, "detach", self.limits.call_s)

    def _ask(
        self, worker: WorkerProcess, op: str, timeout_s: float, descriptors: Sequence[int] = (), **content: object
    ) -> Failure | None:
        reply = self._reply(worker, op, timeout_s, descriptors, **content)
        return reply if isinstance(reply, Failure) else None

    def _reply(
        self, worker: WorkerProcess, op: str, timeout_s: float, descriptors: Sequence[int] = (), **content: object
    ) -> Reply | Failure:
        try:
            reply = worker.request(op, timeout_s=timeout_s, descriptors=descriptors, **content)
        except WorkerTimeout as error:
            return Failure("TIMEOUT", f"'{op}' did not finish", str(error))
        except WorkerDied as error:
            return Failure("RUNTIME_ERROR", f"the worker was lost during '{op}'", str(error))
        if reply.ok:
            return reply
        self._note_spoilt(worker, reply.error)
        return Failure("RUNTIME_ERROR", f"'{op}' failed in the worker: {reply.summary}", reply.error)

    # -- on the stage -------------------------------------------------------------------------------------------------

    def enter(self, stage: Stage) -> Failure | None:
        """Map the memory that all members are timed in; in a fresh worker where the one that was verified is lost."""
        if self.broken is not None and self.deaths >= MAX_DEATHS:
            return self.broken
        self._has_been_timed = False
        failure = self.load()
        if failure is not None:
            return failure
        assert self.worker is not None
        return self._attach(self.worker, stage.arena, stage.contents[0].case)

    def leave(self) -> None:
        """Let go of the stage."""
        if self.worker is not None:
            self._detach(self.worker)

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        """(device, host) microseconds of one call on each slot, in order, by the worker's clocks."""
        assert self.worker is not None
        # A fresh worker compiles now, as does one whose compiler keeps a few shapes only.
        timeout_s = self.limits.call_s if self._has_been_timed else self.limits.first_call_s
        reply = self._reply(self.worker, "time", timeout_s, slots=list(slots))
        if isinstance(reply, Failure):
            return replace(reply, reason=f"while it was timed: {reply.reason}")
        device, host = reply.content.get("device_us"), reply.content.get("host_us")
        if not _are_times(device, len(slots)) or not _are_times(host, len(slots)):
            return Failure("REJECTED", "the worker's timing reply is not a list of positive times", gate="timing reply")
        self._has_been_timed = True
        return device, host  # type: ignore[return-value]

    def check_timed_outputs(self, stage: Stage, verified: Verified, slots: Sequence[int]) -> Failure | None:
        """The timed calls must have left in their slots what the verified calls gave on the same contents."""
        record = self.solution.record
        for slot in slots:
            found = read_outputs(stage.arena, slot, self.definition)
            number = stage.content_of(slot)
            if record.spec.deterministic:
                wrong = [name for name, want in verified.outputs[number].items() if not same_bytes(found[name], want)]
            else:
                outcome = judge(self.definition, record, stage.contents[number], found)
                wrong = [outcome.output or ""] if isinstance(outcome, Failure) else []
            if wrong:
                reason = f"{wrong[0]}: the timed calls left another result than the verified ones"
                return Failure("REJECTED", reason, gate="timed output", case=stage.contents[number].case)
        return None

    def run_calls(self, slots: Sequence[int], busy_us: float) -> Elapsed | Failure:
        """What it took from asking for one call on each slot to the answer that all is done, by this process's clock."""
        assert self.worker is not None
        stolen_before, before = stolen_us(), self.worker.processor_use()
        start = time.perf_counter_ns()
        reply = self._reply(self.worker, "run", self.limits.call_s, slots=list(slots), busy_us=busy_us)
        wall_us = (time.perf_counter_ns() - start) / 1e3
        after, stolen_after = self.worker.processor_use(), stolen_us()
        if isinstance(reply, Failure):
            return reply
        stolen = (now - then for then, now in zip(stolen_before, stolen_after, strict=False))
        return Elapsed(wall_us, after[0] - before[0], after[1] - before[1], max(stolen, default=0.0))

    def profile(self, slots: Sequence[int]) -> list[KernelUse] | Failure:
        """What ran on the device because of one call on each slot."""
        assert self.worker is not None
        reply = self._reply(self.worker, "profile", self.limits.call_s, slots=list(slots))
        if isinstance(reply, Failure):
            return reply
        found = reply.content.get("activities")
        used = [KernelUse.from_message(item) for item in found] if isinstance(found, list) else [None]
        if any(use is None for use in used):
            return Failure("REJECTED", "the worker's profile is not a list of kernels", gate="ownership")
        return [use for use in used if use is not None]


def envelope_workers(members: int) -> int:
    """How many processes each of the members may use for its fuzz envelope on this machine."""
    return max(1, min(MAX_ENVELOPE_WORKERS, available_processors() // max(members, 1)))


def _are_times(value: object, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(item, float) and 0 < item < 1e12 for item in value)
    )

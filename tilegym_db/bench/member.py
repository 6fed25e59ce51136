"""One Solution taking part in a run: its worker process, its fuzz envelope, and verification of one workload."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.base import canonical_json
from tilegym_db.records.binding import is_code_selecting
from tilegym_db.records.hardware import CPU
from tilegym_db.verify.gates import OutputVerdict
from tilegym_db.verify.inputs import PLANTED, Case
from tilegym_db.verify.sandbox.arena import Arena, plan_slot
from tilegym_db.verify.sandbox.process import WorkerDied, WorkerProcess, WorkerTimeout
from tilegym_db.verify.shapes import fuzz_axes
from tilegym_db.verify.verifier import Expected, Failure, Verdict, expect, fill_slot, same_bytes, verify_slot

__all__ = ["ExpectedCache", "Limits", "Member", "Verified"]

FUZZ_CASES = 4
CONTENT_SETS = ("normal", "row_scale", "outliers", "small_integers")
FUZZ_CONTENTS = ("normal", "constant_rows", PLANTED, "outliers")
POINTER_SETS = 8
MAX_DEATHS = 3


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds and memory in bytes for one member."""

    first_call_s: float = 180.0
    call_s: float = 60.0
    arena_bytes: int = 6 << 30


class ExpectedCache:
    """Oracle results, computed once per case and shared by every member; safe to ask from several threads."""

    def __init__(self, definition: Definition, device: str) -> None:
        """For one Definition on one device."""
        self._definition = definition
        self._device = device
        self._lock = threading.Lock()
        self._known: dict[str, Expected | None] = {}

    def get(self, case: Case) -> Expected | None:
        """The case with its oracle, or None where the reference itself does not pass it."""
        key = f"{case} {case.seed} {canonical_json(case.layouts)} {canonical_json(case.scalars)}"
        with self._lock:
            if key not in self._known:
                self._known[key] = expect(self._definition, case, self._device)
            return self._known[key]

    def clear(self) -> None:
        """Forget everything; the tensors of large workloads must not pile up."""
        with self._lock:
            self._known.clear()


@dataclass
class Verified:
    """A member that passed one workload: its arena, filled and ready to be timed, and what each slot must give."""

    arena: Arena
    contents: list[Expected]
    outputs: list[Mapping[str, torch.Tensor]]
    verdict: Verdict
    envelope: list[str]
    rotation: int = 0

    def content_of(self, slot: int) -> int:
        """Which content set a slot holds."""
        return (slot + self.rotation) % len(self.contents)


@dataclass
class Member:
    """One Solution in the run of its Definition."""

    definition: Definition
    solution: SolutionFiles
    device: str
    sm: str
    folder: Path
    config: Config = field(default_factory=dict)
    interpret: bool = False
    limits: Limits = field(default_factory=Limits)
    worker: WorkerProcess | None = None
    envelopes: dict[str, list[str] | Failure] = field(default_factory=dict)
    broken: Failure | None = None
    deaths: int = 0
    _starts: int = 0
    _warm: bool = False

    @property
    def name(self) -> str:
        """The Solution's name."""
        return self.solution.name

    def start(self) -> None:
        """Begin to start the worker, in the background."""
        if self.worker is None:
            self._starts += 1
            environment = {"TRITON_INTERPRET": "1"} if self.interpret else {}
            self.worker = WorkerProcess(self.device, self.folder / f"{self.name}-{self._starts}", environment)
            self._warm = False

    def abort(self) -> None:
        """Kill the worker, so that whoever waits for its answer, in whatever thread, is told that it died."""
        if self.worker is not None:
            self.worker.kill()

    def close(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def unsupported(self, workload: Workload) -> str | None:
        """Why the Solution's declared envelope excludes this workload, or None."""
        target = CPU if self.device == "cpu" else self.sm
        return self.solution.record.unsupported(
            self.definition.bind_axes(workload.axes),
            self.definition.bind_dtypes(workload.dtypes),
            workload.layout_classes(self.definition),
            target=None if target == CPU else target,
        )

    def verify(
        self, workload: Workload, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> Verified | Failure:
        """Fuzz once per dtype binding, then verify the workload's own shape with every content set.

        Returns:
            Verified, whose arena the caller must close, or the failure. A worker that died is replaced at the next call.
            Where there is no oracle or no memory for the workload, that is a failure of this workload alone.
        """
        if self.broken is not None:
            return self.broken
        loaded = self._load()
        if loaded is not None:
            return loaded
        try:
            envelope = self._fuzz(workload, anchors, seed, cache)
            if isinstance(envelope, Failure):
                return envelope
            return self._verify_shape(workload, seed, cache, envelope)
        except (RecordError, StoreError, torch.OutOfMemoryError) as error:
            return Failure("UNSUPPORTED", f"cannot be verified on this machine: {error}")

    def after_failure(self, failure: Failure) -> None:
        """Replace a worker that did not survive; give up on the Solution after the third death."""
        if self.worker is not None and not self.worker.alive:
            self.close()
            self.deaths += 1
            if self.deaths >= MAX_DEATHS:
                reason = f"its worker died {self.deaths} times; last: {failure.reason}"
                self.broken = Failure(failure.status, reason, failure.log)

    def _load(self) -> Failure | None:
        if self.worker is not None and not self.worker.alive:
            self.close()
        self.start()
        assert self.worker is not None
        if self._warm:
            return None
        try:
            reply = self.worker.request(
                "load",
                timeout_s=self.limits.first_call_s,
                folder=str(self.solution.folder),
                digest=self.solution.digest,
                inputs=list(self.definition.inputs),
                outputs=list(self.definition.written_outputs),
                in_place=self.definition.in_place,
            )
        except WorkerTimeout as error:
            self.broken = Failure("TIMEOUT", "loading the source did not finish", str(error))
        except WorkerDied as error:
            self.broken = Failure("RUNTIME_ERROR", "the worker died while loading the source", str(error))
        else:
            if not reply.ok:
                status = "COMPILE_ERROR" if reply.is_compile_error else "RUNTIME_ERROR"
                self.broken = Failure(status, "the source does not load", reply.error)  # type: ignore[arg-type]
        self._warm = self.broken is None
        return self.broken

    def _fuzz(
        self, workload: Workload, anchors: Sequence[Workload], seed: int, cache: ExpectedCache
    ) -> list[str] | Failure:
        dtypes = self.definition.bind_dtypes(workload.dtypes)
        # A continuous scalar such as eps selects no code: one envelope serves all its values.
        selecting = {n: v for n, v in workload.scalars().items() if is_code_selecting(self.definition, n)}
        key = canonical_json([dtypes, selecting])
        if key not in self.envelopes:
            sizes = [anchor.axes for anchor in anchors]
            chosen = fuzz_axes(self.definition, self.solution.record, sizes, dtypes, FUZZ_CASES, seed)
            passed: list[str] = []
            for number, axes in enumerate(chosen):
                contents = FUZZ_CONTENTS[number % len(FUZZ_CONTENTS)]
                bound = self.definition.bind_axes(axes)
                # Odd cases lie one element off: a model may pass a view whose address is aligned to nothing.
                case = Case(bound, dtypes, workload.scalars(), {}, contents, seed + number, offset=number % 2)
                expected = cache.get(case)
                if expected is None:
                    continue
                outcome = self._verify_case(expected)
                if isinstance(outcome, Failure):
                    if outcome.status in ("TIMEOUT", "RUNTIME_ERROR", "COMPILE_ERROR"):
                        return outcome  # the machine's trouble or the source's: tried again for the next workload
                    self.envelopes[key] = outcome
                    return outcome
                passed.append(str(case))
            self.envelopes[key] = passed
        return self.envelopes[key]

    def _verify_case(self, expected: Expected) -> Failure | None:
        with Arena(plan_slot(self.definition, expected.case), 1, self.device, self.folder) as arena:
            failure = self._attach(arena, expected.case)
            if failure is None:
                outcome = self._slot(arena, 0, expected)
                failure = outcome if isinstance(outcome, Failure) else None
            self._detach()
        return failure

    def _verify_shape(
        self, workload: Workload, seed: int, cache: ExpectedCache, envelope: list[str]
    ) -> Verified | Failure:
        contents = []
        verdict = Verdict(deterministic=self.solution.record.spec.deterministic)
        for number, distribution in enumerate(CONTENT_SETS):
            case = Case.of_workload(self.definition, workload, distribution=distribution, seed=seed + 1000 + number)
            expected = cache.get(case)
            if expected is None:
                verdict.dropped.append(distribution)
            else:
                contents.append(expected)
        if not contents:
            return Failure(
                "UNSUPPORTED", "the reference itself passes no content set at this shape, so nothing can be proved"
            )
        plan = plan_slot(self.definition, contents[0].case)
        slots = max(len(contents), min(POINTER_SETS, self.limits.arena_bytes // plan.size))
        arena = Arena(plan, 1 if self.interpret else slots, self.device, self.folder)
        failure = self._attach(arena, contents[0].case)
        outputs: list[Mapping[str, torch.Tensor]] = []
        for number, expected in enumerate(contents):
            if failure is not None:
                break
            outcome = self._slot(arena, number % arena.slots, expected)
            if isinstance(outcome, Failure):
                failure = outcome
            else:
                verdict.add(outcome[0])
                outputs.append(outcome[1])
        if failure is not None:
            self._detach()
            arena.close()
            return failure
        verdict.cases += len(envelope)
        return Verified(arena, contents, outputs, verdict, envelope)

    def _slot(
        self, arena: Arena, slot: int, expected: Expected
    ) -> tuple[dict[str, OutputVerdict], dict[str, torch.Tensor]] | Failure:
        assert self.worker is not None
        timeout_s = self.limits.first_call_s  # any new shape may compile anew
        return verify_slot(
            self.worker, arena, slot, self.definition, self.solution.record, expected, timeout_s=timeout_s
        )

    def _attach(self, arena: Arena, case: Case) -> Failure | None:
        return self._ask("attach", arena=arena.to_message(), config=self.config, scalars=case.scalars)

    def _detach(self) -> None:
        if self.worker is not None and self.worker.alive:
            self._ask("detach")

    def _ask(self, op: str, **content: object) -> Failure | None:
        assert self.worker is not None
        try:
            reply = self.worker.request(op, timeout_s=self.limits.call_s, **content)
        except (WorkerDied, WorkerTimeout) as error:
            return Failure("RUNTIME_ERROR", f"the worker was lost during '{op}'", str(error))
        return None if reply.ok else Failure("RUNTIME_ERROR", f"'{op}' failed in the worker", reply.error)

    # -- timing -------------------------------------------------------------------------------------------------------

    def ready_to_time(self, verified: Verified) -> Failure | None:
        """Fresh inputs and poison in every slot, and a private copy of all of it in the worker.

        Every slot gets other contents than it had before, so that an output remembered by its address is a wrong one.
        """
        verified.rotation += 1
        for slot in range(verified.arena.slots):
            fill_slot(verified.arena, slot, self.definition, verified.contents[verified.content_of(slot)], None)
        verified.arena.settle()
        return self._ask("copy_in")

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        """(device, host) microseconds of one call on each slot, in order."""
        assert self.worker is not None
        try:
            reply = self.worker.request("time", timeout_s=self.limits.call_s, slots=list(slots))
        except WorkerTimeout as error:
            return Failure("TIMEOUT", "timing did not finish", str(error))
        except WorkerDied as error:
            return Failure("RUNTIME_ERROR", "the worker died while it was timed", str(error))
        if not reply.ok:
            return Failure("RUNTIME_ERROR", "raised while it was timed", reply.error)
        device, host = reply.content.get("device_us"), reply.content.get("host_us")
        if not _are_times(device, len(slots)) or not _are_times(host, len(slots)):
            return Failure("REJECTED", "the worker's timing reply is not a list of positive times")
        return device, host  # type: ignore[return-value]

    def check_timed_outputs(self, verified: Verified, slots: Sequence[int]) -> Failure | None:
        """A deterministic kernel must have left exactly its verified output in every slot it was timed on."""
        spec = self.solution.record.spec
        if not spec.destination_passing_style or not spec.deterministic:
            return None
        failure = self._ask("copy_out")
        if failure is not None:
            return failure
        replaced = {target: source for source, target in self.definition.in_place.items()}
        for slot in slots:
            for name, want in verified.outputs[verified.content_of(slot)].items():
                if not same_bytes(verified.arena.tensor(slot, replaced.get(name, name)), want):
                    return Failure("REJECTED", f"{name}: the timed calls left another result than the verified ones")
        return None

    def finish(self, verified: Verified) -> None:
        """Let go of the workload's memory."""
        self._detach()
        verified.arena.close()


def _are_times(value: object, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(item, float) and 0 < item < 1e12 for item in value)
    )

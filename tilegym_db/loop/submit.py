"""Takes a submission through its steps, each journaled the moment it is passed, so that a killed run goes on where it was.

The same source is judged once. Measurements are kept by the store as traces, and are never taken twice for one attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.backends.aot import compile_many
from tilegym_db.backends.compile_jobs import CompileJob
from tilegym_db.bench.benchmark import benchmark, promote
from tilegym_db.bench.machine import select_machine
from tilegym_db.bench.promotions import record_promotions
from tilegym_db.bench.run_setup import Observer
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import HardwareError, MissingPackageError
from tilegym_db.folder_locks import hold_lock
from tilegym_db.loop.handed_in import attempts_at
from tilegym_db.loop.received import AttemptRefusal, folder_digest, receive, scan_refusal
from tilegym_db.loop.submission_catalog import candidate_name, enter, leave, with_candidates
from tilegym_db.loop.submission_verdicts import compile_refusal, promotion_refusal, screen_refusal, unmeasured
from tilegym_db.paths import home as default_home
from tilegym_db.records import TILE_LANGUAGES, Definition, Trace
from tilegym_db.records.hardware import GPU_SLUGS, TARGETS, parse_gpu, same_gpu
from tilegym_db.records.loop import STEPS, Attempt, Step, Task, Verdict
from tilegym_db.store.connection import open_store
from tilegym_db.store.ingest import ingest_journals
from tilegym_db.store.input_files import loop_folder
from tilegym_db.store.loop_journals import append, loop_lock
from tilegym_db.store.loop_queries import traces_of_source
from tilegym_db.store.queries import read_traces

__all__ = ["Submission", "submit"]

LOCK_TIMEOUT_S = 1.0


@dataclass
class Submission:
    """One attempt in progress: the task, what was handed in, and the newest line of its journal."""

    task: Task
    definition: Definition
    home: Path
    attempt: Attempt
    observer: Observer = field(default_factory=Observer)
    _began: float = field(default_factory=time.monotonic)
    _device_s: float = 0.0

    def at(self, step: Step) -> bool:
        """Whether a step was passed before, by this run or one that was killed."""
        return STEPS.index(self.attempt.stage) >= STEPS.index(step)

    def passed(self, step: Step, verdict: Verdict = "pending", **changes: Any) -> Attempt:
        """Journal that a step was passed, or what ended the attempt after it."""
        now = time.monotonic()
        content = {
            **self.attempt.model_dump(exclude={"gate", "reason", "command"}),
            "stage": step,
            "verdict": verdict,
            "wall_s": round(self.attempt.wall_s + now - self._began, 3),
            "device_s": round(self.attempt.device_s + self._device_s, 3),
            "timestamp": datetime.now(UTC),
            **changes,
        }
        self._began, self._device_s = now, 0.0
        self.attempt = Attempt.model_validate(content)
        with loop_lock(self.home):
            append(self.attempt, self.home)
        return self.attempt

    def refuse(self, refusal: AttemptRefusal, traces: tuple[str, ...] = ()) -> Attempt:
        """End the attempt after the last step that it passed."""
        return self.passed(
            self.attempt.stage,
            "refused",
            gate=refusal.gate,
            reason=refusal.reason,
            command=refusal.command,
            trace_ids=tuple(dict.fromkeys((*self.attempt.trace_ids, *traces))),
        )

    def on_device(self, work: Callable[[], list[Trace]]) -> list[Trace]:
        """Run what holds the device, and count its seconds."""
        began = time.monotonic()
        try:
            return work()
        finally:
            self._device_s += time.monotonic() - began


def submit(
    task: Task,
    folder: Path,
    *,
    gpu: str | None = None,
    catalog: Catalog | None = None,
    home: Path | None = None,
    root: Path | None = None,
    observer: Observer | None = None,
) -> Attempt:
    """Judge what an author handed in, step by step.

    Args:
        task: what was asked for.
        folder: holds ``kernel.py`` and ``solution.json``; it is read, and nothing of it is run outside of a confined worker.
        gpu: where to measure; the task's by default. Another than the task's is refused.
        catalog: the records; the shipped ones and the user's overlay by default.
        home: folder of the store.
        root: of the catalog that takes what is promoted; by default that of ``add-solution``, where no experiment removes it.
        observer: callbacks for progress of the measurements.

    Returns:
        The attempt: ``promoted``; ``refused`` with the gate and the reason; ``no_gpu`` where this machine cannot take the last
        steps, which a later call on one that can goes on with.

    Raises:
        UsageError: ``folder`` is no folder.
        HardwareError: ``gpu`` is not the task's.
        StoreError: another process judges a submission to this task.
        MissingPackageError: a compiler is missing here.
    """
    catalog, home = catalog or Catalog.default(), home or default_home()
    if gpu is not None and gpu != "auto" and not same_gpu(parse_gpu(gpu), task.gpu):
        raise HardwareError(
            f"--gpu {gpu}: task {task.id} is for {task.gpu}. Make one for {gpu}: tilegym-db task create"
        )
    definition = catalog.definition(task.definition)
    lock = loop_folder(home) / f"{task.id}.lock"
    with hold_lock(lock, lock, LOCK_TIMEOUT_S, "The submission was not received."):
        received = receive(folder, task, definition)
        submission, is_known = _open(task, definition, folder, received, home)
        submission.observer = observer or Observer()
        if is_known and submission.attempt.verdict in ("refused", "promoted"):
            if submission.attempt.verdict == "promoted" and root is None and isinstance(received, SolutionFiles):
                # Whoever hands it in has it in the catalog, also where the loop promoted it and took it away again.
                leave(definition, enter(definition, received, catalog, home), catalog, home)
            return submission.attempt
        if isinstance(received, AttemptRefusal):
            return submission.refuse(received)
        return _judge(submission, received, catalog, root)


def _open(
    task: Task, definition: Definition, folder: Path, received: SolutionFiles | AttemptRefusal, home: Path
) -> tuple[Submission, bool]:
    """The attempt that this source has already, or a new one; and whether it was there."""
    if isinstance(received, AttemptRefusal):
        digest = folder_digest(folder)
        name = f"{task.definition}_{task.language}_{digest[:12]}"
    else:
        digest = received.digest
        name = candidate_name(received.record, digest)
    with loop_lock(home):
        own = attempts_at(task, home)
        known = next((one for one in own if one.solution_digest == digest), None)
        if known is not None:
            return Submission(task, definition, home, known), True
        attempt = Attempt(
            task=task.id, number=1 + len(own), solution=name, solution_digest=digest, stage="received", verdict="pending",
            timestamp=datetime.now(UTC),
        )  # fmt: skip
        append(attempt, home)
    return Submission(task, definition, home, attempt), False


def _judge(submission: Submission, received: SolutionFiles, catalog: Catalog, root: Path | None) -> Attempt:
    if not submission.at("scanned"):
        refusal = scan_refusal(received)
        if refusal is not None:
            return submission.refuse(refusal)
        submission.passed("scanned")
    candidate = enter(submission.definition, received, catalog, submission.home)
    if not submission.at("compiled"):
        refusal = _compile(submission, candidate, catalog)
        if refusal is not None:
            return submission.refuse(refusal)
        submission.passed("compiled")
    try:
        select_machine(submission.task.gpu)
    except HardwareError as error:
        return submission.passed(submission.attempt.stage, "no_gpu", reason=str(error))
    if not submission.at("screened"):
        ended = _screen(submission, candidate, catalog)
        if ended is not None:
            return ended
    return _promote(submission, candidate, catalog, root)


def _compile(submission: Submission, candidate: SolutionFiles, catalog: Catalog) -> AttemptRefusal | None:
    """Build it for the task's GPU, at the task's workloads. Python, and a CPU, have nothing to compile."""
    target = GPU_SLUGS.get(submission.task.gpu, "")
    if candidate.record.spec.language not in TILE_LANGUAGES or target not in TARGETS:
        return None
    wanted = {item.uuid for item in submission.task.workloads}
    workloads = [item for item in catalog.workloads_for(submission.definition.name) if item.uuid in wanted]
    jobs = [CompileJob(submission.definition, candidate, workload, target) for workload in workloads]
    results = compile_many(jobs)
    missing = next((result.log for result in results if result.status == "toolchain-missing"), None)
    if missing is not None:
        raise MissingPackageError(f"{candidate.record.spec.language} cannot be compiled here: {missing}")
    return compile_refusal(results)


def _screen(submission: Submission, candidate: SolutionFiles, catalog: Catalog) -> Attempt | None:
    """Verify and time it; what is not measured yet is. None where it goes on."""
    traces = submission.on_device(lambda: _measure(submission, candidate, catalog, ("screen", "interpreter")))
    ids = tuple(trace.trace_id for trace in traces)
    refusal = screen_refusal(submission.task, traces)
    if refusal is not None:
        return submission.refuse(refusal, ids)
    if unmeasured(submission.task, traces):
        return submission.refuse(
            AttemptRefusal("screen", "not every workload of the task could be measured here."), ids
        )
    if any(trace.tier == "interpreter" for trace in traces):
        reason = f"verified in the interpreter; {candidate.record.spec.language} kernels are timed on a GPU only."
        return submission.passed("compiled", "no_gpu", reason=reason, trace_ids=ids)
    submission.passed("screened", trace_ids=ids)
    return None


def _measure(submission: Submission, candidate: SolutionFiles, catalog: Catalog, tiers: tuple[str, ...]) -> list[Trace]:
    """The traces of a candidate on the task's workloads in some tiers: those that there are, and what was missing."""
    task, own = submission.task, with_candidates(catalog, submission.home)
    uuids = tuple(item.uuid for item in task.workloads)
    found = _stored(submission, candidate, own, tiers)
    if unmeasured(task, found):
        options: dict[str, Any] = {"gpu": task.gpu, "workload": uuids, "catalog": own, "store_home": submission.home}
        if "promotion" in tiers:
            # All baselines in the same rounds: whoever is left out might be the one to beat.
            baselines = tuple(
                one.name for one in own.solutions_for(task.definition) if one.record.spec.role == "baseline"
            )
            report = promote((candidate.name, *baselines), again=True, observer=submission.observer, **options)
        else:
            report = benchmark((candidate.name,), observer=submission.observer, **options)
        if report.interrupted:
            raise KeyboardInterrupt
        found = _stored(submission, candidate, own, tiers)
    return found


def _stored(submission: Submission, candidate: SolutionFiles, own: Catalog, tiers: tuple[str, ...]) -> list[Trace]:
    with open_store(submission.home, catalog=own) as store:
        ingest_journals(store)
        task = submission.task
        uuids = [item.uuid for item in task.workloads]
        ids = traces_of_source(store, candidate.digest, task.definition_digest, task.gpu, uuids, tiers)
        found = read_traces(store, ids)
        return [found[trace_id] for trace_id in ids]


def _promote(submission: Submission, candidate: SolutionFiles, catalog: Catalog, root: Path | None) -> Attempt:
    task = submission.task
    traces = submission.on_device(lambda: _measure(submission, candidate, catalog, ("promotion",)))
    with open_store(submission.home, catalog=with_candidates(catalog, submission.home)) as store:
        promotions, reasons = record_promotions(store, traces, submission.home, task.min_speedup)
    refusal = promotion_refusal(task, traces, reasons)
    ids = tuple(trace.trace_id for trace in traces)
    if refusal is not None:
        return submission.refuse(refusal, ids)
    leave(submission.definition, candidate, catalog, submission.home, root)
    return submission.passed(
        "promoted",
        "promoted",
        trace_ids=tuple(dict.fromkeys((*submission.attempt.trace_ids, *ids))),
        promotions=tuple(promotion.id for promotion in promotions),
    )

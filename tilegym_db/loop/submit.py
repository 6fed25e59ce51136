"""Takes a submission through its steps, each journaled the moment it is passed, so that a killed run goes on where it was.

The same source is judged once. Measurements are kept by the store as traces, and are never taken twice for one attempt.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.backends.aot import compile_many
from tilegym_db.backends.compile_jobs import CompileJob, CompileResult
from tilegym_db.bench.benchmark import benchmark, promote
from tilegym_db.bench.machine import select_machine
from tilegym_db.bench.promotions import BASELINES, record_promotions
from tilegym_db.bench.run_setup import Observer
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.catalog.record_files import RECORD_NAME
from tilegym_db.errors import HardwareError, MissingPackageError, RecordError, UsageError
from tilegym_db.files import hold_lock, read_bytes
from tilegym_db.loop.status import attempts_at
from tilegym_db.loop.submission_catalog import candidate_name, enter, leave, with_candidates
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import loop_folder
from tilegym_db.records import TILE_LANGUAGES, Definition, Trace, axes_key
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.records.hardware import GPU_SLUGS, TARGETS, parse_gpu, same_gpu
from tilegym_db.records.loop import STEPS, Attempt, Step, Task, Verdict
from tilegym_db.records.solution import signature_problem, why_not_timed
from tilegym_db.sandbox.scan import hard_findings, scan_sources
from tilegym_db.store.connection import ingest_journals, open_store
from tilegym_db.store.loop import append, loop_lock, traces_of_source
from tilegym_db.store.queries import read_traces

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
        """Return True if a step was passed before, by this run or one that was killed."""
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
            f"--gpu {gpu}: task {task.id} is for {task.gpu}. Make one for {gpu}: tilegym-db task create",
            code="gpu_of_task_differs",
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
    """Return the attempt that this source has already, or a new one; and whether it was there."""
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
        raise MissingPackageError(
            f"{candidate.record.spec.language} cannot be compiled here: {missing}", code="toolchain_missing"
        )
    return compile_refusal(results)


def _screen(submission: Submission, candidate: SolutionFiles, catalog: Catalog) -> Attempt | None:
    """Verify and time it; what is not measured yet is. None if it goes on."""
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
    """Return the traces of a candidate on the task's workloads in some tiers: those that there are, and what was
    missing.
    """
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


# ---- received -------------------------------------------------------------------------------------
# The first two steps of a submission: its folder is read as data, and its source is read before anything of it runs.

DELIVERABLE = ("kernel.py", RECORD_NAME)
"""What a submission consists of. Whatever else an author has written, a reference or a benchmark, has no place in a verdict."""

LISTED = 8


@dataclass(frozen=True)
class AttemptRefusal:
    """Why a submission goes no further: the gate that refused it, the reason, and what shows it again."""

    gate: str
    reason: str
    command: str = ""


def receive(folder: Path, task: Task, definition: Definition) -> SolutionFiles | AttemptRefusal:
    """Return the Solution that a folder holds, or why it is none that the task asks for. Nothing of it runs.

    Raises:
        UsageError: ``folder`` is no folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder. Give one with {' and '.join(DELIVERABLE)}.", code="folder_missing")
    others = _others(folder)
    if others:
        named = ", ".join(others[:LISTED]) + (f" and {len(others) - LISTED} more" if len(others) > LISTED else "")
        return AttemptRefusal(
            "received",
            f"the folder holds {named}. An author hands in {' and '.join(DELIVERABLE)} and nothing else: reference, inputs, "
            "comparison and timing are the database's.",
        )
    if definition.digest != task.definition_digest:
        return AttemptRefusal("received", f"{definition.name} changed since the task was made. Make a new task.")
    try:
        files = SolutionFiles.read(folder)
        record = files.record
        if set(files.sources) != {DELIVERABLE[0]}:
            return AttemptRefusal(
                "received", f"solution.json lists the sources {', '.join(files.sources)}, not kernel.py alone."
            )
        if (record.definition, record.spec.language) != (task.definition, task.language):
            found = f"{record.spec.language} for {record.definition}"
            return AttemptRefusal(
                "received", f"it is {found}, and the task asks for {task.language} for {task.definition}."
            )
        if record.spec.role != "kernel" or record.spec.provides is not None:
            return AttemptRefusal(
                "received", "a submission has the role 'kernel' and provides nothing: baselines are the database's."
            )
        if record.spec.omits:
            return AttemptRefusal(
                "received", f"{why_not_timed('it', record.spec.omits)}. The task asks for every output."
            )
        record.check_against(definition)
    except (RecordError, ValueError) as error:
        return AttemptRefusal("received", str(error).replace(f"{folder}{os.sep}", ""))
    problem = signature_problem(record, files.sources[record.spec.entry_path], definition)
    return files if problem is None else AttemptRefusal("received", f"entry_point {problem}.")


def _others(folder: Path) -> list[str]:
    """What is neither of the two files. Hidden files and compiled Python are what tools leave behind, and nobody reads them."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in (*DELIVERABLE, "__pycache__") and not entry.name.startswith(".")
    )


def scan_refusal(files: SolutionFiles) -> AttemptRefusal | None:
    """What the static scan refuses of the sources."""
    found = hard_findings(scan_sources(files.record, files.sources))
    if not found:
        return None
    return AttemptRefusal(f"scan: {found[0].rule}", "\n".join(str(finding) for finding in found[:LISTED]))


def folder_digest(folder: Path) -> str:
    """Identity of a folder that holds no valid Solution: the names of what it holds, and the bytes of the two files."""
    parts = [name.encode() for name in _others(folder)]
    for name in DELIVERABLE:
        try:
            parts.append(hashlib.sha256(read_bytes(folder / name, "file")).digest())
        except RecordError:
            parts.append(b"")
    return length_prefixed_digest(parts)


# ---- submission verdicts --------------------------------------------------------------------------
# What the traces of a submission say: refused, by which gate and why, or fit for the next step. Pure functions.


def compile_refusal(results: Sequence[CompileResult]) -> AttemptRefusal | None:
    """What a compiler refused of the submission itself; a target that it refuses altogether says nothing of that."""
    for result in results:
        if result.status in ("failed", "unsupported"):
            lines = [line.strip() for line in result.log.splitlines() if line.strip()]
            return AttemptRefusal("compile", f"{result.status}: {' '.join(lines[-3:])[:1500] or 'no reason was given'}")
    return None


def screen_refusal(task: Task, traces: Sequence[Trace]) -> AttemptRefusal | None:
    """Return the first workload that a screen did not pass, or on which it is clearly slower than the bar.

    Args:
        task: names the workloads and the bar.
        traces: of the submission, in the tier screen or interpreter; the newest of a workload counts.
    """
    newest = {trace.workload_uuid: trace for trace in sorted(traces, key=lambda trace: trace.timestamp)}
    for item in task.workloads:
        trace = newest.get(item.uuid)
        if trace is None:
            continue
        refusal = _failure(trace)
        if refusal is not None:
            return refusal
        slow = [
            item
            for item in (trace.performance.comparisons if trace.performance else ())
            if item.provides in BASELINES and item.ci_high < task.min_speedup
        ]
        if slow:
            worst = min(slow, key=lambda item: (item.ratio, item.other))
            return AttemptRefusal(
                "speed", _too_slow(trace, worst.other, worst.ratio, worst.ci_low, worst.ci_high, task)
            )
    return None


def promotion_refusal(task: Task, traces: Sequence[Trace], reasons: Mapping[str, str]) -> AttemptRefusal | None:
    """Return the first workload that was not promoted.

    Args:
        task: names the workloads.
        traces: of the submission, in the promotion tier; the newest of a workload counts.
        reasons: trace id -> why it earned no promotion.
    """
    newest = {trace.workload_uuid: trace for trace in sorted(traces, key=lambda trace: trace.timestamp)}
    for item in task.workloads:
        trace = newest.get(item.uuid)
        if trace is None:
            return AttemptRefusal("promotion", f"it was not measured at {axes_key(item.axes)}.")
        refusal = _failure(trace)
        if refusal is not None:
            return refusal
        if trace.trace_id in reasons:
            return AttemptRefusal(
                "speed", f"at {axes_key(trace.axes)}: {reasons[trace.trace_id]}{_unclear(trace, task)}"
            )
    return None


def unmeasured(task: Task, traces: Collection[Trace]) -> list[str]:
    """Return the workloads of a task, by uuid, that none of the traces is about."""
    seen = {trace.workload_uuid for trace in traces}
    return [item.uuid for item in task.workloads if item.uuid not in seen]


def _failure(trace: Trace) -> AttemptRefusal | None:
    if trace.status == "PASSED":
        return None
    gate = trace.failure.gate if trace.failure else trace.correctness.gate if trace.correctness else None
    reason = trace.reason or trace.log.strip().splitlines()[-1]
    command = trace.failure.command if trace.failure else ""
    return AttemptRefusal(
        gate or trace.status.lower(), f"{trace.status}, verifying {axes_key(trace.axes)}: {reason}", command
    )


def _too_slow(trace: Trace, other: str, ratio: float, low: float, high: float, task: Task) -> str:
    return (
        f"at {axes_key(trace.axes)}: {ratio:.3f}x over {other} (99% interval {low:.3f} to {high:.3f}), and "
        f"{task.min_speedup:.2f}x is asked for"
    )


def _unclear(trace: Trace, task: Task) -> str:
    """What is to be said where no baseline is clearly below the bar: nothing was found out about the kernel."""
    compared = [
        one for one in (trace.performance.comparisons if trace.performance else ()) if one.provides in BASELINES
    ]
    below = [one for one in compared if one.ci_low < task.min_speedup]
    if not below or any(one.ci_high < task.min_speedup for one in below):
        return ""
    return (
        ". The interval reaches the bar, so the kernel may be fast enough: this machine was too busy to tell, or the call is "
        "too short. The same source is not judged again; a changed one is"
    )

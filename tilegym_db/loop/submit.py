"""Take a submission through its steps: received, scanned, compiled, screened, verified.

Each passed step is journaled, so that a restarted run continues. A source is judged only once. The store keeps the
measurements as traces, and an attempt never repeats them.

Submissions that have not passed yet lie in the candidates' catalog, next to the journals and apart from the user's
catalog. Refused submissions stay there, so that their failing cases can be reproduced. A submission that passed moves
to a catalog. The loop marks those that it added itself, and only these can be withdrawn again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.backends.aot import CompileJob, CompileResult, compile_many
from tilegym_db.catalog import Catalog, SolutionFiles, writers
from tilegym_db.catalog.record_files import RECORD_NAME
from tilegym_db.errors import HardwareError, MissingPackageError, RecordError, UsageError
from tilegym_db.files import hold_lock, read_bytes, write_folder, writing
from tilegym_db.loop.tasks import attempts_at
from tilegym_db.measurement.awards import BASELINES, record_awards
from tilegym_db.measurement.benchmark import bench, verify
from tilegym_db.measurement.drafts import candidate_root, with_candidates
from tilegym_db.measurement.machine import select_machine
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import loop_folder
from tilegym_db.records import TILE_LANGUAGES, Definition, Solution, Trace, axes_key
from tilegym_db.records.hardware import GPU_SLUGS, TARGETS, gpu_base, parse_gpu, same_gpu
from tilegym_db.records.loop import STEPS, Attempt, Step, Task, Verdict
from tilegym_db.records.solution import signature_problem, why_not_timed
from tilegym_db.records.text import binding_key, length_prefixed_digest
from tilegym_db.records.verdicts import MACHINE_SLOW
from tilegym_db.sandbox.scan import hard_findings, scan_sources
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import traces_of_source
from tilegym_db.store.queries.measured import read_traces
from tilegym_db.store.side_files import append, loop_lock

LOCK_TIMEOUT_S = 1.0


@dataclass
class Submission:
    """An attempt in progress: the task and the attempt's newest journal entry."""

    task: Task
    definition: Definition
    home: Path
    attempt: Attempt
    observer: Observer = field(default_factory=Observer)
    _began: float = field(default_factory=time.monotonic)
    _device_s: float = 0.0

    def at(self, step: Step) -> bool:
        """Return True if this run or an earlier one passed a step."""
        return STEPS.index(self.attempt.stage) >= STEPS.index(step)

    def passed(self, step: Step, verdict: Verdict = "pending", **changes: Any) -> Attempt:
        """Journal that a step was passed or that the attempt ended after it."""
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
        """End the attempt as refused, after the last step that it passed."""
        return self.passed(
            self.attempt.stage,
            "refused",
            gate=refusal.gate,
            reason=refusal.reason,
            command=refusal.command,
            trace_ids=tuple(dict.fromkeys((*self.attempt.trace_ids, *traces))),
        )

    def on_device(self, work: Callable[[], list[Trace]]) -> list[Trace]:
        """Run work that holds the device, and add its seconds to the attempt."""
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
    home: Path | None = None,
    root: Path | None = None,
    observer: Observer | None = None,
) -> Attempt:
    """Judge a submission step by step.

    Args:
        gpu: the GPU to measure on; it must be the task's, which is the default.
        root: catalog root for a kernel that passes; by default that of ``add-solution``, from which no experiment removes it.

    Returns:
        The attempt. Its verdict is ``promoted``, ``refused`` with the gate and the reason, or ``no_gpu`` if this machine
        cannot do the last steps. A later call on another machine continues a ``no_gpu`` attempt. A verdict ``pending`` with a
        reason means that other programs disturbed the measurement; a later call repeats it.
    """
    catalog, home = Catalog.default(), home or default_home()
    if gpu is not None and gpu != "auto" and not same_gpu(parse_gpu(gpu), task.gpu):
        raise HardwareError(
            f"--gpu {gpu}: task {task.id} is for {task.gpu}. Make one for {gpu}: "
            f"tilegym-db task create {task.definition} --gpu {gpu}",
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
                # A person submitted it, so it belongs into the user's catalog, even if the loop added and withdrew it.
                leave(definition, enter(definition, received, catalog, home), catalog, home)
            return submission.attempt
        if isinstance(received, AttemptRefusal):
            return submission.refuse(received)
        return _judge(submission, received, catalog, root)


def _open(
    task: Task, definition: Definition, folder: Path, received: SolutionFiles | AttemptRefusal, home: Path
) -> tuple[Submission, bool]:
    """Return the attempt of this source or a new one, and True if it existed."""
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
    return _verify(submission, candidate, catalog, root)


def _compile(submission: Submission, candidate: SolutionFiles, catalog: Catalog) -> AttemptRefusal | None:
    """Compile for the task's GPU at the task's workloads. Python kernels and CPUs need no compilation."""
    target = GPU_SLUGS.get(gpu_base(submission.task.gpu), "")
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
    """Verify and time the candidate on workloads that have no trace yet; return None to continue."""
    traces = submission.on_device(lambda: _measure(submission, candidate, catalog, ("screen", "interpreter")))
    ids = tuple(trace.trace_id for trace in traces)
    refusal = screen_refusal(submission.task, traces)
    if refusal is not None:
        return submission.refuse(refusal, ids)
    disturbed = disturbed_at(submission.task, traces)
    if disturbed:
        return submission.passed("compiled", reason=next(iter(disturbed.values())).reason, trace_ids=ids)
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
    """Return the candidate's traces on the task's workloads in some tiers; measure what is missing."""
    task, own = submission.task, with_candidates(catalog, submission.home)
    uuids = tuple(item.uuid for item in task.workloads)
    found = _stored(submission, candidate, own, tiers)
    if unmeasured(task, found) or disturbed_at(task, found):
        options: dict[str, Any] = {
            "devices": task.gpu,
            "workload": uuids,
            "catalog": own,
            "store_home": submission.home,
        }
        if "promotion" in tiers:
            # All baselines run in the same rounds, because any of them may be the fastest.
            baselines = tuple(
                one.name for one in own.solutions_for(task.definition) if one.record.spec.role == "baseline"
            )
            report = verify((candidate.name, *baselines), force=True, observer=submission.observer, **options)
        else:
            report = bench((candidate.name,), observer=submission.observer, **options)
        if report.interrupted:
            raise KeyboardInterrupt
        found = _stored(submission, candidate, own, tiers)
    return found


def _stored(submission: Submission, candidate: SolutionFiles, own: Catalog, tiers: tuple[str, ...]) -> list[Trace]:
    with open_store(submission.home, catalog=own) as store:
        ingest(store)
        task = submission.task
        uuids = [item.uuid for item in task.workloads]
        ids = traces_of_source(store, candidate.digest, task.definition_digest, task.gpu, uuids, tiers)
        found = read_traces(store, ids)
        return [found[trace_id] for trace_id in ids]


def _verify(submission: Submission, candidate: SolutionFiles, catalog: Catalog, root: Path | None) -> Attempt:
    task = submission.task
    traces = submission.on_device(lambda: _measure(submission, candidate, catalog, ("promotion",)))
    with open_store(submission.home, catalog=with_candidates(catalog, submission.home)) as store:
        awards, reasons = record_awards(store, traces, submission.home, task.min_speedup)
    refusal = award_refusal(task, traces, reasons)
    ids = tuple(trace.trace_id for trace in traces)
    if refusal is not None:
        return submission.refuse(refusal, ids)
    disturbed = disturbed_at(task, traces)
    if disturbed:
        return submission.passed("screened", reason=next(iter(disturbed.values())).reason, trace_ids=ids)
    leave(submission.definition, candidate, catalog, submission.home, root)
    return submission.passed(
        "promoted",
        "promoted",
        trace_ids=tuple(dict.fromkeys((*submission.attempt.trace_ids, *ids))),
        promotions=tuple(award.id for award in awards),
    )


# ---- Receiving and scanning ---------------------------------------------------------------------------
# These two steps only read the submission. They run nothing of it.

DELIVERABLE = ("kernel.py", RECORD_NAME)
"""The files of a submission. Other files, such as the author's own reference or benchmark, are refused."""

MAX_LISTED = 8


@dataclass(frozen=True)
class AttemptRefusal:
    """A refusal of a submission: the gate, the reason, and a command that reproduces it."""

    gate: str
    reason: str
    command: str = ""


def receive(folder: Path, task: Task, definition: Definition) -> SolutionFiles | AttemptRefusal:
    """Return the Solution in a folder, or the refusal if it does not fit the task. Nothing of it runs."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder. Give a folder with {' and '.join(DELIVERABLE)}.", code="folder_missing"
        )
    others = other_files(folder)
    if others:
        named = ", ".join(others[:MAX_LISTED]) + (
            f" and {len(others) - MAX_LISTED} more" if len(others) > MAX_LISTED else ""
        )
        return AttemptRefusal(
            "received",
            f"the folder holds {named}. A submission has only {' and '.join(DELIVERABLE)}; the database provides "
            "reference, inputs, comparison and timing.",
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
                "received", "a submission has the role 'kernel' and no 'provides'; only the database has baselines."
            )
        if record.spec.omits:
            return AttemptRefusal(
                "received", f"{why_not_timed('it', record.spec.omits)}. The task asks for every output."
            )
        record.check_against(definition)
        excluded = _excluded(task, record, definition)
        if excluded:
            return AttemptRefusal("received", excluded)
    except (RecordError, ValueError) as error:
        return AttemptRefusal("received", str(error).replace(f"{folder}{os.sep}", ""))
    problem = signature_problem(record, files.sources[record.spec.entry_path], definition)
    return files if problem is None else AttemptRefusal("received", f"entry_point {problem}.")


def _excluded(task: Task, record: Solution, definition: Definition) -> str:
    """Return which workload of the task the record says that it does not support; empty if it supports all of them.

    No measurement is spent on such a submission, because an award takes every workload.
    """
    for item in task.workloads:
        reason = record.unsupported(definition.bind_axes(item.axes), item.dtypes, item.layouts)
        if reason is not None:
            place = ", ".join(filter(None, (axes_key(item.axes), binding_key(item.dtypes))))
            return (
                f"solution.json leaves out the workload {place} of the task: {reason}. Support every workload of section 2, or "
                "ask for a task with fewer of them."
            )
    return ""


def other_files(folder: Path) -> list[str]:
    """Return the names of files that do not belong to a submission.

    Hidden files and compiled Python are ignored, because tools create them and nothing reads them.
    """
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in (*DELIVERABLE, "__pycache__") and not entry.name.startswith(".")
    )


def scan_refusal(files: SolutionFiles) -> AttemptRefusal | None:
    """Return the refusal by the static scan, if any."""
    found = hard_findings(scan_sources(files.record, files.sources))
    if not found:
        return None
    return AttemptRefusal(f"scan: {found[0].rule}", "\n".join(str(finding) for finding in found[:MAX_LISTED]))


def folder_digest(folder: Path) -> str:
    """Return the digest of a folder without a valid Solution, from its file names and the bytes of the two files."""
    parts = [name.encode() for name in other_files(folder)]
    for name in DELIVERABLE:
        try:
            parts.append(hashlib.sha256(read_bytes(folder / name, "file")).digest())
        except RecordError:
            parts.append(b"")
    return length_prefixed_digest(parts)


# ---- Verdicts on traces -------------------------------------------------------------------------------
# Pure functions that decide whether a submission is refused.


def compile_refusal(results: Sequence[CompileResult]) -> AttemptRefusal | None:
    """Return the refusal by the compiler, if any."""
    for result in results:
        if result.status in ("failed", "unsupported"):
            lines = [line.strip() for line in result.log.splitlines() if line.strip()]
            return AttemptRefusal(
                "compile", f"{result.status}: {' '.join(lines[-3:])[:1500] or 'the compiler gave no reason'}"
            )
    return None


def screen_refusal(task: Task, traces: Sequence[Trace]) -> AttemptRefusal | None:
    """Return the refusal by a workload that failed the screen, else by one at which the kernel is clearly slower than the bar.

    Args:
        traces: the submission's traces in tier screen or interpreter. The newest per workload counts.
    """
    newest = {trace.workload_uuid: trace for trace in sorted(traces, key=lambda trace: trace.timestamp)}
    disturbed = disturbed_at(task, traces)
    failed = [
        trace
        for item in task.workloads
        if (trace := newest.get(item.uuid)) is not None and trace.status != "PASSED" and item.uuid not in disturbed
    ]
    if failed:  # wrong numbers say more to the author than a workload that could not be measured
        return _failure(min(failed, key=lambda trace: trace.status == "UNSUPPORTED"))
    for item in task.workloads:
        trace = newest.get(item.uuid)
        if trace is None:
            continue
        slow = [
            item
            for item in (trace.performance.comparisons if trace.performance else ())
            if item.provides in BASELINES and item.ci_high < task.min_speedup
        ]
        if slow:
            worst = min(slow, key=lambda item: (item.ratio, item.other))
            return AttemptRefusal(
                "speed",
                f"at {axes_key(trace.axes)}: {worst.ratio:.3f}x over {worst.other} (99% interval {worst.ci_low:.3f} to "
                f"{worst.ci_high:.3f}), and {task.min_speedup:.2f}x is required",
            )
    return None


def award_refusal(task: Task, traces: Sequence[Trace], reasons: Mapping[str, str]) -> AttemptRefusal | None:
    """Return the refusal by the first workload without an award.

    Args:
        traces: the submission's traces in the promotion tier. The newest per workload counts.
        reasons: for each trace id without an award, the reason.
    """
    newest = {trace.workload_uuid: trace for trace in sorted(traces, key=lambda trace: trace.timestamp)}
    disturbed = disturbed_at(task, traces)
    for item in task.workloads:
        trace = newest.get(item.uuid)
        if trace is None:
            return AttemptRefusal("promotion", f"it was not measured at {axes_key(item.axes)}.")
        if item.uuid in disturbed:
            continue
        refusal = _failure(trace)
        if refusal is not None:
            return refusal
        if trace.trace_id in reasons:
            return AttemptRefusal(
                "speed", f"at {axes_key(trace.axes)}: {reasons[trace.trace_id]}{_unclear(trace, task)}"
            )
    return None


def unmeasured(task: Task, traces: Collection[Trace]) -> list[str]:
    """Return the uuids of a task's workloads that have no trace."""
    seen = {trace.workload_uuid for trace in traces}
    return [item.uuid for item in task.workloads if item.uuid not in seen]


def disturbed_at(task: Task, traces: Collection[Trace]) -> dict[str, Trace]:
    """Return uuid -> newest trace of the workloads whose newest measurement other programs disturbed.

    Such a trace says nothing about the kernel, so that it neither refuses a submission nor counts as measured.
    """
    newest = {trace.workload_uuid: trace for trace in sorted(traces, key=lambda trace: trace.timestamp)}
    wanted = [newest[item.uuid] for item in task.workloads if item.uuid in newest]
    return {
        trace.workload_uuid: trace
        for trace in wanted
        if trace.status == "UNSUPPORTED" and trace.reason.startswith(MACHINE_SLOW)
    }


def _failure(trace: Trace) -> AttemptRefusal | None:
    if trace.status == "PASSED":
        return None
    gate = trace.failure.gate if trace.failure else trace.correctness.gate if trace.correctness else None
    reason = trace.reason or trace.log.strip().splitlines()[-1]
    command = trace.failure.command if trace.failure else ""
    return AttemptRefusal(
        gate or trace.status.lower(), f"{trace.status}, verifying {axes_key(trace.axes)}: {reason}", command
    )


def _unclear(trace: Trace, task: Task) -> str:
    """Return a remark if no baseline is clearly below the bar, so that the measurement decides nothing."""
    compared = [
        one for one in (trace.performance.comparisons if trace.performance else ()) if one.provides in BASELINES
    ]
    below = [one for one in compared if one.ci_low < task.min_speedup]
    if not below or any(one.ci_high < task.min_speedup for one in below):
        return ""
    return (
        ". The interval reaches the bar, so the kernel may be fast enough: this machine was too busy, or the call is "
        "too short, for a clear result. The same source is not judged again; a changed source is"
    )


# ---- The candidates' catalog -----------------------------------------------------------------------------


def candidate_name(record: Solution, digest: str) -> str:
    """Return the name of a submission. It depends on the source only, so equal sources share a name and others do not."""
    return f"{record.definition}_{record.spec.language}_{digest[:12]}"


def enter(definition: Definition, files: SolutionFiles, catalog: Catalog, home: Path) -> SolutionFiles:
    """Add a submission to the candidates under its candidate name, unless it is there or in the catalog."""
    name = candidate_name(files.record, files.digest)
    present = catalog.solution_paths.get(name)
    if present is not None:
        _forget(definition, name, home)  # left by a process that was killed while it moved the files
        return SolutionFiles.read(present)
    record = Solution.from_dict({**files.record.to_dict(), "name": name}, files.path)
    folder = _folder(definition, name, home)
    with writing(candidate_root(home)):
        if not folder.is_dir():
            content = {RECORD_NAME: (record.to_json(indent=2) + "\n").encode(), **files.sources}
            write_folder(folder, content)
    return SolutionFiles(record, folder / RECORD_NAME, dict(files.sources))


def leave(
    definition: Definition, candidate: SolutionFiles, catalog: Catalog, home: Path, root: Path | None = None
) -> Path:
    """Move a candidate into the user's catalog or, for the loop, into ``root``. Idempotent."""
    present, mark = catalog.solution_paths.get(candidate.name), _mark(candidate.name, home)
    if root is None:
        mark.unlink(missing_ok=True)
    elif present is None:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    if present is not None and SolutionFiles.read(present).digest == candidate.digest:
        target = present.parent
    else:
        target = writers.add_solution(catalog, candidate.record, candidate.sources, root or catalog.write_root)
    _forget(definition, candidate.name, home)
    return target


def withdraw(definition: Definition, name: str, root: Path, home: Path) -> None:
    """Move a Solution that the loop added from ``root`` back to the candidates.

    A Solution that ``task submit`` added stays.
    """
    mark = _mark(name, home)
    if not mark.is_file():
        return
    folder = root / "solutions" / definition.op_type / definition.name / name
    target = _folder(definition, name, home)
    with writing(root), writing(candidate_root(home)):
        if folder.is_dir() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
    mark.unlink(missing_ok=True)


def _mark(name: str, home: Path) -> Path:
    """Return the marker file that exists if only the loop added the Solution."""
    return loop_folder(home) / "added" / name


def _forget(definition: Definition, name: str, home: Path) -> None:
    with writing(candidate_root(home)):
        shutil.rmtree(_folder(definition, name, home), ignore_errors=True)


def _folder(definition: Definition, name: str, home: Path) -> Path:
    return candidate_root(home) / "solutions" / definition.op_type / definition.name / name

"""Create tasks and report their state: their workloads, the latencies to beat, patterns that may help, and the attempts."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tilegym_db.catalog import Catalog
from tilegym_db.driver import driver_gpu_names
from tilegym_db.errors import NotFoundError, UsageError
from tilegym_db.measurement.machine import select_machine
from tilegym_db.measurement.plan import fits_a_cpu
from tilegym_db.paths import home as default_home
from tilegym_db.records import LANGUAGES, TILE_LANGUAGES, Definition, Workload, axes_key
from tilegym_db.records.hardware import CPU, gpu_slug, one_gpu_meant, parse_gpu
from tilegym_db.records.loop import (
    MIN_SPEEDUP,
    Attempt,
    Experiment,
    MeasuredBy,
    Pattern,
    PatternReference,
    Task,
    TaskWorkload,
)
from tilegym_db.store.connection import open_store
from tilegym_db.store.database import Store
from tilegym_db.store.loop import append, journaled, latest, loop_lock, read_patterns, task_rows, verified_on
from tilegym_db.store.queries import read_peaks, traced_gpus

MAX_WORKLOADS = 16
MAX_PATTERNS = 8
MAX_BAR = 1000
"""Maximum bar that the record of a task accepts."""


def create_task(
    definition: str,
    *,
    language: str = "triton",
    gpu: str = "auto",
    workload: str | tuple[str, ...] | None = None,
    min_speedup: float = MIN_SPEEDUP,
    objective: Literal["latency", "coverage"] = "latency",
    model: str = "",
    home: Path | None = None,
) -> Task:
    """Create a task, or return the existing one with the same content.

    Args:
        definition: name of the operator.
        language: language of the kernel.
        gpu: a slug or family, ``cpu``, or ``auto`` for the GPU of this machine. A family means the one in this machine,
            else the one with measurements.
        workload: globs over uuid, tags and axes key. By default all except those for tests; on a CPU the small ones.
        min_speedup: bar over the best baseline, at least :data:`~tilegym_db.records.loop.MIN_SPEEDUP`.
        objective: the reason for the task.
        model: digest of the model's config, for the objective ``coverage``.
        home: folder of the store.

    Raises:
        NotFoundError: the Definition does not exist.
        UsageError: the language or GPU is unknown, no workload or too many match, or the bar is out of range.
    """
    catalog, home = Catalog.default(), home or default_home()
    _check_request(language, min_speedup)
    operator = catalog.definition(definition)
    with open_store(home, read_only=True, catalog=catalog) as store:
        content = _content(store, catalog, operator, _slug(gpu, store), workload)
    content |= {"language": language, "objective": objective, "model": model, "min_speedup": min_speedup}
    content["patterns"] = [
        PatternReference(id=item.id, digest=item.digest).model_dump()
        for item in patterns_for(catalog, operator, language)
    ]
    task = Task.from_dict({**content, "created": datetime.now(UTC)}, f"task for {operator.name}")
    return _kept(task, home)


def _content(
    store: Store, catalog: Catalog, operator: Definition, slug: str, workload: str | tuple[str, ...] | None
) -> dict[str, object]:
    """Return the fields of a task that follow from the records and the measurements on a GPU."""
    chosen = _workloads(catalog, operator, slug, workload)
    return {
        "definition": operator.name,
        "definition_version": operator.version,
        "definition_digest": operator.digest,
        "workloads": [item.model_dump() for item in _bars(store, operator, slug, chosen)],
        "gpu": slug,
        "limits": _limits(store, slug),
    }


def check_language(language: str) -> None:
    """Raise UsageError if a language is unknown.

    Raises:
        UsageError: the message lists the known languages.
    """
    if language not in LANGUAGES:
        raise UsageError(f"unknown language {language!r}; known: {', '.join(LANGUAGES)}.", code="language_unknown")


def _check_request(language: str, min_speedup: float) -> None:
    check_language(language)
    if min_speedup < MIN_SPEEDUP:
        raise UsageError(
            f"--min-speedup {min_speedup:g}: an award needs {MIN_SPEEDUP:.2f}, so the bar must not be lower.",
            code="bar_too_low",
        )
    if not min_speedup <= MAX_BAR:  # also true for NaN
        raise UsageError(
            f"--min-speedup {min_speedup:g}: a bar is a number from {MIN_SPEEDUP:.2f} to {MAX_BAR:g}.",
            code="bar_out_of_range",
        )


def _kept(task: Task, home: Path) -> Task:
    """Return the journaled task with this content; write it first if it is new."""
    with loop_lock(home):
        known = next((other for other in journaled(Task, home) if other.id == task.id), None)
        if known is None:
            append(task, home)
    return known or task


def unverifiable(language: str, gpu: str) -> str:
    """Return why no kernel for this language and GPU can be verified; empty if one can."""
    if gpu != CPU or language not in TILE_LANGUAGES:
        return ""
    return (
        f"{language} kernels are verified in an interpreter on a CPU and timed on a GPU only, so none gets an award here. "
        "Ask for --language python, or name a GPU with --gpu"
    )


def find_task(prefix: str) -> Task:
    """Return the task whose id begins with a prefix.

    Raises:
        NotFoundError: no task or several tasks match.
    """
    found = {task.id: task for task in journaled(Task) if task.id.startswith(prefix)} if prefix else {}
    if not found:
        raise NotFoundError(f"no task begins with '{prefix}'. Try: tilegym-db task status", code="task_unknown")
    if len(found) > 1:
        raise NotFoundError(f"several tasks begin with '{prefix}'. Try: tilegym-db task status", code="task_ambiguous")
    return next(iter(found.values()))


def patterns_for(catalog: Catalog, definition: Definition, language: str) -> list[Pattern]:
    """Return the patterns for a prompt, ordered: about the operator, about its family, about everything."""
    patterns, _ = read_patterns(catalog)
    fitting = [item for item in patterns if item.fits(definition.name, definition.op_type, language)]
    return sorted(fitting, key=lambda item: (_distance(item, definition), item.id))[:MAX_PATTERNS]


def _distance(pattern: Pattern, definition: Definition) -> int:
    for distance, name in enumerate((definition.name, definition.op_type)):
        if name in pattern.applies_to:
            return distance
    return 2


def _slug(gpu: str, store: Store) -> str:
    """Return the GPU of a task. A family means the one in this machine, else the measured one."""
    if gpu == "auto":
        return select_machine("auto").gpu
    return one_gpu_meant(parse_gpu(gpu, traced_gpus(store)), map(gpu_slug, driver_gpu_names()), traced_gpus(store))


def _workloads(
    catalog: Catalog, definition: Definition, gpu: str, asked: str | tuple[str, ...] | None
) -> list[Workload]:
    known = catalog.workloads_for(definition.name)
    if asked is None:
        chosen = [item for item in known if "tiny" not in item.tags] or known
        if gpu == CPU:
            chosen = [item for item in known if fits_a_cpu(definition, item)]
    else:
        chosen = [item for item in known if _matches(item, (asked,) if isinstance(asked, str) else asked)]
    if not chosen:
        raise UsageError(
            f"{_none_fits(definition, gpu, asked)} Try: tilegym-db list --workloads", code="workload_unmatched"
        )
    if len(chosen) > MAX_WORKLOADS and asked is None:
        return sorted(chosen, key=lambda item: _size(definition, item))[:: -(-len(chosen) // MAX_WORKLOADS)]
    if len(chosen) > MAX_WORKLOADS:
        raise UsageError(
            f"{len(chosen)} workloads match, and a task has at most {MAX_WORKLOADS}. Narrow --workload.",
            code="workloads_too_many",
        )
    return sorted(chosen, key=lambda item: _size(definition, item))


def _none_fits(definition: Definition, gpu: str, asked: str | tuple[str, ...] | None) -> str:
    if asked:
        globs = " or ".join([asked] if isinstance(asked, str) else asked)
        return f"no workload of {definition.name} fits --workload {globs}."
    if asked is None and gpu == CPU:
        return f"no workload of {definition.name} is small enough for a CPU. Name one with --workload."
    return f"no workload of {definition.name} is available."


def _matches(workload: Workload, patterns: Sequence[str]) -> bool:
    names = (workload.uuid, axes_key(workload.axes), *workload.tags)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _size(definition: Definition, workload: Workload) -> tuple[float, str]:
    """Return the bytes that a call moves, with the uuid as tie-breaker."""
    _, size = definition.cost_of(definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes))
    return size, workload.uuid


def _bars(store: Store, definition: Definition, gpu: str, workloads: Sequence[Workload]) -> list[TaskWorkload]:
    rows = verified_on(store, definition.name, gpu, [item.uuid for item in workloads])
    bars = []
    for workload in workloads:
        here = [row for row in rows if row["workload_uuid"] == workload.uuid]
        baselines = [row for row in here if row["role"] == "baseline"]
        bars.append(
            TaskWorkload(
                uuid=workload.uuid,
                axes=definition.bind_axes(workload.axes),
                dtypes=definition.bind_dtypes(workload.dtypes),
                layouts=dict(workload.layout_classes(definition)),
                current_best=_measured(here),
                baseline=_measured(baselines),
                sol_us=next((row["sol_us"] for row in here if row["sol_us"] is not None), None),
            )
        )
    return bars


def _measured(rows: Sequence[dict[str, Any]]) -> MeasuredBy | None:
    if not rows:
        return None
    return MeasuredBy(**{name: rows[0][name] for name in ("solution", "trace_id", "latency_us")})


def _limits(store: Store, gpu: str) -> dict[str, float]:
    peaks = None if gpu == CPU else read_peaks(store, gpu)
    if peaks is None:
        return {}
    limits = {
        "copy_bytes_per_s": peaks.copy_bytes_per_s.value,
        "l2_bytes": float(peaks.l2_bytes),
        "sm_count": float(peaks.sm_count),
        "launch_us": peaks.launch_us.value,
    }
    return limits | {f"{dtype}_flops_per_s": measured.value for dtype, measured in peaks.flops.items()}


# ---- State --------------------------------------------------------------------------------------------
# Tasks and attempts as table rows, and what became of earlier attempts.

SHOWN = ("id", "definition", "language", "gpu", "objective", "workloads", "attempts", "status")


def tasks_table() -> list[dict[str, Any]]:
    """Return one row per task, oldest first."""
    with open_store(read_only=True) as store:
        return [{name: row[name] for name in SHOWN} for row in task_rows(store)]


def attempts_of(task: Task) -> list[dict[str, Any]]:
    """Return one row per attempt at a task, with the steps passed and the reason for the refusal."""
    own = sorted(attempts_at(task, default_home()), key=lambda one: one.number)
    return [
        {
            "attempt": one.number,
            "solution": one.solution,
            "passed": one.stage,
            "verdict": one.verdict,
            "gate": one.gate,
            "reason": one.reason or ", ".join(one.promotions),
            "wall_s": one.wall_s,
            "device_s": one.device_s,
        }
        for one in own
    ]


def attempts_at(task: Task, home: Path) -> list[Attempt]:
    """Return the newest state of each attempt at a task, in the order received."""
    return [one for (owner, _), one in latest(journaled(Attempt, home)).items() if owner == task.id]


def last_attempt(task: Task, home: Path) -> Attempt | None:
    """Return the attempt with an award, else the newest."""
    return max(attempts_at(task, home), key=lambda one: (one.verdict == "promoted", one.number), default=None)


def verdicts(task: Task, home: Path) -> set[tuple[int, str]]:
    """Return (number, verdict) of the attempts with a final verdict."""
    return {(one.number, one.verdict) for one in attempts_at(task, home) if one.verdict != "pending"}


def discarded(gpu: str, home: Path) -> set[str]:
    """Return the digests of kernels that their newest experiment on a GPU discarded.

    Those that ``task submit`` added are still in the catalog, but the trial of another kernel must not publish them.
    """
    decided: dict[str, str] = {}
    for one in journaled(Experiment, home):
        if one.gpu == gpu:
            decided |= dict.fromkeys(one.changed.values(), one.decision)
    return {digest for digest, decision in decided.items() if decision == "discard"}

"""Create tasks and report their state: their workloads, the latencies to beat, patterns that may help, and the attempts.

The second part writes a task as one Markdown page for its author. The same task and history give the same bytes. The
page has no seed and no tolerance, so that authors cannot fit a kernel to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tilegym_db.catalog import Catalog
from tilegym_db.driver import driver_gpu_names
from tilegym_db.errors import ConflictError, NotFoundError, UsageError
from tilegym_db.measurement.machine import select_machine
from tilegym_db.measurement.plan import fits_a_cpu
from tilegym_db.paths import home as default_home
from tilegym_db.records import LANGUAGES, TILE_LANGUAGES, Definition, Workload, axes_key
from tilegym_db.records.hardware import CPU, GPU_SLUGS, gpu_base, gpu_slug, one_gpu_meant, parse_gpu
from tilegym_db.records.loop import Attempt, Experiment, MeasuredBy, Pattern, PatternReference, Task, TaskWorkload
from tilegym_db.records.solution import called_with
from tilegym_db.records.verdicts import MIN_SPEEDUP
from tilegym_db.sandbox.scan.tables import RULES
from tilegym_db.scaffold.solution_draft import DEPENDENCIES
from tilegym_db.store.connection import Store
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import task_rows, verified_on
from tilegym_db.store.queries.measured import read_peaks, traced_gpus
from tilegym_db.store.side_files import append, journaled, latest, loop_lock, read_patterns

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
        gpu: a slug or family, ``cpu``, or ``auto`` for the GPU of this machine. A family means the one in this machine,
            else the one with measurements.
        workload: globs over uuid, tags and axes key. By default all except those for tests; on a CPU the small ones.
        objective: the reason for the task.
        model: digest of the model's config, for the objective ``coverage``.
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
    """Raise :class:`UsageError` if a language is unknown."""
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


def unverifiable(language: str, gpu: str, instead: str) -> str:
    """Return why no kernel for this language and GPU can be verified, and what to do in its place; empty if one can."""
    if gpu != CPU or language not in TILE_LANGUAGES:
        return ""
    return (
        f"{language} kernels are verified in an interpreter on a CPU and timed on a GPU only, so none gets an award here. "
        f"Ask for --language python, or {instead}"
    )


def find_task(prefix: str) -> Task:
    """Return the only task whose id begins with a prefix."""
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
        chosen = [item for item in known if item.matches(asked)]
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


# ---- The page of a task ----------------------------------------------------------------------------------

_BOUND = re.compile(r"exceed rtol \S+ and \S+ of the row's rms")
"""The verifier's text for an exceeded tolerance. It is replaced, so that authors cannot fit a kernel to the bound."""
SHARED_MEMORY_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99}
"""Maximum shared memory per block, by target."""


def prompt_of(task: Task, home: Path | None = None) -> str:
    """Return the page of a task, from the records and the journaled attempts."""
    catalog = Catalog.default()
    definition = catalog.definition(task.definition)
    if definition.digest != task.definition_digest:
        raise ConflictError(
            f"{task.definition} changed since task {task.id} was made. Make a new one: tilegym-db task create {task.definition}",
            code="definition_changed",
        )
    patterns = {item.id: item for item in read_patterns(catalog)[0]}
    for reference in task.patterns:
        if reference.id not in patterns or patterns[reference.id].digest != reference.digest:
            raise ConflictError(
                f"the pattern {reference.id} changed since task {task.id} was made. "
                f"Make a new one: tilegym-db task create {task.definition}",
                code="pattern_changed",
            )
    return prompt_text(
        task, definition, attempts_at(task, home or default_home()), [patterns[item.id] for item in task.patterns]
    )


def prompt_text(task: Task, definition: Definition, attempts: Sequence[Attempt], patterns: Sequence[Pattern]) -> str:
    """Return the page, in ten sections. Pure."""
    sections = (
        ("Operator", _operator(definition)),
        ("Shapes", _shapes(task)),
        ("Hardware and limits", _hardware(task)),
        ("Objective and bars", _objective(task)),
        ("Entry point and constraints", _entry(task, definition)),
        ("What is scanned and forbidden", _scanned()),
        ("Deliverable", _deliverable(task, definition)),
        ("How it is judged", _judged(task)),
        ("What earlier attempts failed on", _earlier(attempts)),
        ("Patterns", _patterns(patterns)),
    )
    title = f"# Task {task.id}\n\nWrite a {task.language} kernel for `{definition.name}` on {task.gpu}.\n"
    return title + "".join(f"\n## {n}. {name}\n\n{text}\n" for n, (name, text) in enumerate(sections, start=1))


def _operator(definition: Definition) -> str:
    lines = [
        definition.description.strip(),
        "",
        f"`{definition.name}` {definition.version}, family `{definition.op_type}`. "
        f"Axes: {', '.join(f'`{name}`' for name in definition.axes)}."
        + (
            f" Constraints: {', '.join(f'`{text}`' for text in definition.constraints)}."
            if definition.constraints
            else ""
        ),
        "",
        *_tensors("in", {name: (spec.shape, spec.dtype) for name, spec in definition.inputs.items()}),
        *_tensors("out", {name: (spec.shape, spec.dtype) for name, spec in definition.outputs.items()}),
        "",
        "The reference defines the correct result. It runs in float64, and nothing that you write replaces it.",
        "",
        "```python",
        definition.reference.rstrip(),
        "```",
    ]
    return "\n".join(lines).strip()


def _tensors(direction: str, specs: Mapping[str, tuple[Sequence[object] | None, str]]) -> list[str]:
    spelled = {
        name: "a Python number" if shape is None else f"[{', '.join(map(str, shape))}]"
        for name, (shape, _) in specs.items()
    }
    return [f"- {direction} `{name}`: {spelled[name]}, {dtype}" for name, (_, dtype) in specs.items()]


def _shapes(task: Task) -> str:
    rows = ["| axes | dtypes | layouts |", "|---|---|---|"]
    for item in task.workloads:
        layouts = ", ".join(f"{name}={layout}" for name, layout in sorted(item.layouts.items())) or "contiguous"
        rows.append(f"| {axes_key(item.axes)} | {_dtypes(item)} | {layouts} |")
    rows += [
        "",
        "These are timed. Verification also calls the kernel at other shapes, layouts and contents that it declares to support.",
    ]
    return "\n".join(rows)


def _dtypes(item: TaskWorkload) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(item.dtypes.items())) or "fixed"


def _hardware(task: Task) -> str:
    if task.gpu == CPU:
        return "A CPU: python kernels are timed by the wall clock; kernels in tile languages are interpreted, and only verified."
    target = GPU_SLUGS.get(gpu_base(task.gpu), "")
    lines = [f"`{task.gpu}`, compiled for `{target}`."]
    if target in SHARED_MEMORY_KIB:
        lines.append(
            f"A block has at most {SHARED_MEMORY_KIB[target]} KiB of shared memory, 1024 threads and 64 Ki registers."
        )
    lines += ["", "| calibrated | |", "|---|---|"] if task.limits else ["It is not calibrated here."]
    lines += [f"| {name} | {value:.6g} |" for name, value in sorted(task.limits.items())]
    return "\n".join(lines)


def _objective(task: Task) -> str:
    why = (
        "be faster on these workloads"
        if task.objective == "latency"
        else "serve a part of a model that runs stock code"
    )
    rows = [
        f"Objective: {why}. The lower end of the 99% interval of the speedup over the best baseline of the same rounds must "
        f"reach {task.min_speedup:.2f}x on every workload, and the kernel must support all of them.",
        "",
        "| axes | dtypes | best baseline, us | current best, us | speed of light, us |",
        "|---|---|---|---|---|",
    ]
    for item in task.workloads:
        cells = [axes_key(item.axes), _dtypes(item)]
        for found in (item.baseline, item.current_best):
            cells.append("none" if found is None else f"{found.latency_us:.4g} ({found.solution})")
        cells.append("unknown" if item.sol_us is None else f"{item.sol_us:.4g}")
        rows.append(f"| {' | '.join(cells)} |")
    if any(item.baseline is None for item in task.workloads):
        rows += [
            "",
            f"none: nothing is verified there on {task.gpu} yet. A submission is still timed against every baseline; "
            f"`tilegym-db list --solutions` names them.",
        ]
    return "\n".join(rows)


def _entry(task: Task, definition: Definition) -> str:
    written = ", ".join(called_with(definition, destination_passing_style=True))
    lines = [
        f"`kernel.py` defines `run({written})`, which writes its outputs into the tensors given (destination passing).",
        "In-place: " + ", ".join(f"`{name}` becomes `{out}`" for name, out in definition.in_place.items()) + "."
        if definition.in_place
        else "",
        "`solution.json` declares the dtypes, constraints on sizes and layouts that it supports. What it declares is tested, and "
        "it never receives other calls. Keyword arguments of `run` may be declared as `tunables`.",
    ]
    if task.language == "python":
        lines.append("With `destination_passing_style: false` a python kernel returns its outputs.")
    return "\n".join(line for line in lines if line)


def _scanned() -> str:
    lines = ["The source is scanned before it runs. Refused:", ""]
    lines += [f"- `{rule.name}`: {rule.catches}" for rule in RULES.values() if rule.severity == "hard"]
    return "\n".join(lines)


def _deliverable(task: Task, definition: Definition) -> str:
    record = {
        "name": "mine",
        "definition": definition.name,
        "author": "you",
        "spec": {
            "language": task.language,
            "entry_point": "kernel.py::run",
            "dependencies": list(DEPENDENCIES[task.language]),
        },
        "sources": [{"path": "kernel.py"}],
    }
    example = json.dumps(record)
    return (
        "A folder with only `kernel.py` and `solution.json`. A folder that also has a reference, a test or a benchmark "
        f"of your own is refused.\n\n```json\n{example}\n```\n\n"
        f"Submit it: `tilegym-db task submit {task.id} FOLDER`"
    )


def _judged(task: Task) -> str:
    return "\n".join(
        (
            "1. received: two files, a valid record of this Definition and language, a `run` that takes its arguments.",
            "2. scanned: see section 6.",
            "3. compiled: ahead of time for the target, if the language has a compiler.",
            "4. screened: a confined process runs the kernel on unpredictable inputs and compares it with the "
            "reference in float64; then its timings are interleaved with those of the stock code. "
            "A kernel that is clearly slower than the bar is refused.",
            f"5. verified: fresh processes and seeds, all fuzz cases, audits, and all baselines in the same rounds; "
            f"{task.min_speedup:.2f}x at the lower end of the interval.",
            "",
            "A source is judged only once: submitting it again gives the same verdict.",
        )
    )


def _earlier(attempts: Sequence[Attempt]) -> str:
    refused = [one for one in attempts if one.verdict == "refused"]
    if not refused:
        return "No attempt was refused so far."
    lines = ["| attempt | passed | refused by | because |", "|---|---|---|---|"]
    for one in sorted(refused, key=lambda one: one.number):
        reason = _BOUND.sub("differ too much", " ".join(one.reason.split())).replace("|", "\\|")
        lines.append(f"| {one.number} | {one.stage} | {one.gate} | {reason} |")
    return "\n".join(lines)


def _patterns(patterns: Sequence[Pattern]) -> str:
    if not patterns:
        return "No pattern is recorded for this operator and language."
    texts = []
    for item in patterns:
        kind = "Avoid" if item.anti else "Measured" if item.evidence != ("unmeasured",) else "Unmeasured"
        texts.append(f"### {kind}: {item.title} (`{item.id}`)\n\n{item.text}")
    return "\n\n".join(texts)

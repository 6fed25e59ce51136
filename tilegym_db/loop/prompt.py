"""Write a task as one Markdown page for its author. The same task and history give the same bytes.

The page has no seed and no tolerance, so that authors cannot fit a kernel to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import ConflictError
from tilegym_db.loop.tasks import attempts_at
from tilegym_db.paths import home as default_home
from tilegym_db.records import Definition, axes_key
from tilegym_db.records.hardware import CPU, GPU_SLUGS, gpu_base
from tilegym_db.records.loop import Attempt, Pattern, Task, TaskWorkload
from tilegym_db.records.solution import called_with
from tilegym_db.sandbox.scan.tables import RULES
from tilegym_db.scaffold.solution_draft import DEPENDENCIES
from tilegym_db.store.loop import read_patterns

_BOUND = re.compile(r"exceed rtol \S+ and \S+ of the row's rms")
"""The verifier's text for an exceeded tolerance. It is replaced, so that authors cannot fit a kernel to the bound."""
SHARED_MEMORY_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99}
"""Maximum shared memory per block, by target."""


def prompt_of(task: Task, home: Path | None = None) -> str:
    """Return the page of a task, from the records and the journaled attempts.

    Raises:
        ConflictError: the Definition or a pattern changed since the task was made.
    """
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

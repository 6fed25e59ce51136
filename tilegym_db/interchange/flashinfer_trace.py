"""FlashInfer-Trace, the format of FlashInfer-Bench: folders of definitions, solutions, workloads and traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tilegym_db.interchange.checks import Rules, check_definition, check_solution, check_trace, split_lines, walk
from tilegym_db.interchange.collecting import Collection
from tilegym_db.store.imported import StoredRecord

DIALECT = "flashinfer-trace"
RULES = Rules(languages=frozenset({"python", "triton", "cpp", "cuda", "tilelang"}))
_FOLDERS = {"definitions": ".json", "solutions": ".json", "workloads": ".jsonl", "traces": ".jsonl"}


def is_this(root: Path) -> bool:
    """Return True if a folder looks like such a tree."""
    return root.is_dir() and any(
        next((root / folder).rglob(f"*{suffix}"), None) is not None for folder, suffix in _FOLDERS.items()
    )


def read(root: Path) -> Collection:
    """Read every record of the tree. Invalid ones are refused with their reasons."""
    found = Collection(DIALECT, RULES, root)
    paths, refused = walk(root)
    found.refused += refused
    found.read_declared()
    for path, file in paths:
        folder = PurePosixPath(path).parts[0]
        if _FOLDERS.get(folder) == file.suffix:
            _READERS[folder](found, path, file)
        elif folder not in _FOLDERS or not found.refuse_spelling(path, file, _FOLDERS[folder]):
            found.carry(path, file)
    _add_what_does_not_fit(found)
    return found


def _definition(found: Collection, path: str, file: Path) -> None:
    valid = found.read_valid(path, file, check_definition)
    if valid is not None:
        record, digest, span = valid
        want = (record["op_type"], f"{record['name']}.json")
        found.add("definition", record, digest, path, span, findings=_misplaced(path, want))


def _solution(found: Collection, path: str, file: Path) -> None:
    valid = found.read_valid(path, file, check_solution)
    if valid is not None:
        (record, unset), digest, span = defaults_filled(valid[0], found.rules), *valid[1:]
        parts = PurePosixPath(path).parts
        want = (record["author"], parts[2] if len(parts) > 2 else "", record["definition"], f"{record['name']}.json")
        found.add("solution", record, digest, path, span, unset=unset, findings=_misplaced(path, want))


def defaults_filled(record: Mapping[str, Any], rules: Rules) -> tuple[dict[str, Any], list[str]]:
    """Return a Solution with its dialect's defaults filled in, and the filled keys."""
    spec = dict(record["spec"])
    defaults: dict[str, Any] = {
        "destination_passing_style": rules.destination_passing_default,
        "binding": rules.binding_default,
        "dependencies": [],
    }
    unset = [key for key in defaults if spec.get(key) is None]
    spec |= {key: defaults[key] for key in unset}
    return {**record, "spec": spec}, [f"spec.{key}" for key in unset]


def _misplaced(path: str, want: tuple[str, ...]) -> list[str]:
    parts = PurePosixPath(path).parts[1:]
    return [] if parts == want else [f"its path is {path}, but its fields say {'/'.join(want)}"]


def _lines(found: Collection, path: str, file: Path) -> Iterator[tuple[dict[str, Any], str, int, tuple[int, int]]]:
    """Yield (record, digest, line number, span) of every valid trace line."""
    content = file.read_bytes()
    found.carry(path, file, "records")
    for line in split_lines(content):
        parsed = found.parse(path, line.content, line.number)
        if parsed is None:
            continue
        problems = check_trace(parsed[0], found.rules)
        if problems:
            found.refuse(path, problems, line.number)
            continue
        yield *parsed, line.number, (line.offset, len(line.content))


def _workloads(found: Collection, path: str, file: Path) -> None:
    for record, digest, number, span in _lines(found, path, file):
        if record.get("solution") is not None:
            found.refuse(path, [("solution", "a trace with a solution belongs in traces/")], number)
            continue
        problems, findings = found.tensor_problems(record["workload"])
        if problems:
            found.refuse(path, problems, number)
            continue
        workload = {**record["workload"], "definition": record["definition"]}
        found.add("workload", workload, digest, path, span, number, findings=findings)


def _traces(found: Collection, path: str, file: Path) -> None:
    for record, digest, number, span in _lines(found, path, file):
        if record.get("solution") is None:
            found.refuse(path, [("solution", "a workload without a solution belongs in workloads/")], number)
        else:
            found.add("trace", record, digest, path, span, number)


_READERS = {"definitions": _definition, "solutions": _solution, "workloads": _workloads, "traces": _traces}


def _add_what_does_not_fit(found: Collection) -> None:
    definitions = {item.name: item.record for item in found.records if item.kind == "definition"}
    solutions = {item.name for item in found.records if item.kind == "solution"}
    kept = []
    for item in found.records:
        definition = definitions.get(item.definition)
        problems = found.misfits(definition, item.record) if definition and item.kind == "workload" else []
        if problems:
            found.refuse(item.path, problems, item.line)
        else:
            kept.append(_with_findings(found, item, definition, solutions))
    found.records = kept


def _with_findings(
    found: Collection, item: StoredRecord, definition: Mapping[str, Any] | None, solutions: set[str]
) -> StoredRecord:
    findings = list(item.findings)
    if definition is None:
        findings.append(f"definition '{item.definition}' is not in the data set")
    elif item.kind == "workload":
        findings += found.fit_findings(definition, item.record)
    if item.kind == "trace" and item.record["solution"] not in solutions:
        findings.append(f"solution '{item.record['solution']}' is not in the data set")
    return dataclasses.replace(item, findings=tuple(findings))

"""SOL-ExecBench: a folder per problem with ``definition.json``, ``workload.jsonl`` and ``solution*.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tilegym_db.interchange.checks import (
    FIB_DTYPES,
    STATUSES,
    Problem,
    Rules,
    check_definition,
    check_solution,
    check_trace,
    check_workload,
    number,
    split_lines,
    walk,
)
from tilegym_db.interchange.collecting import Collection
from tilegym_db.interchange.flashinfer_trace import defaults_filled
from tilegym_db.store.imported import Kind

DIALECT = "sol-execbench"
RULES = Rules(
    languages=frozenset(
        [
            "pytorch",
            "python",
            "triton",
            "cute_dsl",
            "cutile",
            "cudnn_frontend",
            "cutlass",
            "cudnn",
            "cublas",
            "cuda_cpp",
            "cuda",
            "tlx",
        ]
    ),
    dtypes=FIB_DTYPES | {"float8_e8m0fnu", "uint8", "uint16", "uint32", "float64", "float4_e2m1fn_x2"},
    axis_kinds=frozenset({"const", "var", "expr"}),
    op_type_required=False,
    input_kinds=frozenset({"random", "safetensors", "scalar", "custom"}),
    statuses=(*STATUSES, "REWARD_HACK", "INVALID_REFERENCE"),
    languages_key="languages",
)
TOLERANCE: dict[str, Any] = {
    "max_atol": 0.01, "max_rtol": 0.01, "required_matched_ratio": 0.99, "max_error_cap": None,
    "allow_negative_inf": False,
}  # fmt: skip
"""Tolerance of a Workload that states none."""


def tolerance_problems(record: Mapping[str, Any], where: str = "") -> Iterator[Problem]:
    """Yield the problems of a Workload's tolerance, which is optional."""
    given = record.get("tolerance")
    if given is None:
        return
    if not isinstance(given, dict):
        yield f"{where}tolerance", f"must be an object, not {given!r:.40}"
        return
    for key in given.keys() & TOLERANCE.keys():
        value, figure, at = given[key], number(given[key]), f"{where}tolerance.{key}"
        if key == "allow_negative_inf":
            if not isinstance(value, bool):
                yield at, f"must be true or false, not {value!r:.40}"
        elif value is None and TOLERANCE[key] is None:
            continue
        elif figure is None or figure < 0 or (key == "required_matched_ratio" and figure > 1):
            limit = "from 0 to 1" if key == "required_matched_ratio" else ">= 0"
            yield at, f"must be a number {limit}, not {value!r:.40}"


def is_this(root: Path) -> bool:
    """Return True if a folder below the root has a problem."""
    return root.is_dir() and any(
        next(file.parent.glob("workload*.jsonl"), None) is not None for file in root.rglob("definition.json")
    )


def read(root: Path) -> Collection:
    """Read every problem. Invalid records are refused with their reasons, and so are names taken by other content."""
    found = Collection(DIALECT, RULES, root)
    paths, refused = walk(root)
    found.refused += refused
    problems = {file.parent: str(PurePosixPath(path).parent) for path, file in paths if file.name == "definition.json"}
    definitions = {
        folder: _definition(found, str(PurePosixPath(at) / "definition.json"), folder)
        for folder, at in problems.items()
    }
    for path, file in paths:
        if file.name == "definition.json":
            continue
        if file.suffix == ".json" and file.name.startswith("solution"):
            _solution(found, path, file)
        elif file.suffix == ".jsonl" and file.parent in problems:
            _lines(found, path, file, definitions[file.parent])
        elif not problems.keys().isdisjoint(file.parents) and not (
            found.refuse_spelling(path, file, ".json") or found.refuse_spelling(path, file, ".jsonl")
        ):
            found.carry(path, file)
    _note_missing_definitions(found)
    return found


def _definition(found: Collection, path: str, folder: Path) -> dict[str, Any] | None:
    file = folder / "definition.json"
    content = file.read_bytes()
    parsed = found.parse(path, content)
    if parsed is None:
        return None
    record, digest = parsed
    problems = check_definition(record, RULES)
    entry = record.get("custom_inputs_entrypoint")
    if entry is not None and not isinstance(entry, str):
        problems.append(("custom_inputs_entrypoint", "must be the name of a function"))
    if _is_twin(found, "definition", path, *parsed, problems):  # it often appears once per language
        found.carry(path, file)
        return record
    if problems:
        found.refuse(path, problems)
        return None
    findings = [] if entry is None else [f"its inputs come from the function {entry} of its reference"]
    found.carry(path, file, "records")
    found.add("definition", record, digest, path, (0, len(content)), findings=findings)
    return record


def _solution(found: Collection, path: str, file: Path) -> None:
    content = file.read_bytes()
    parsed = found.parse(path, content)
    if parsed is None:
        return
    record, digest = parsed
    problems = check_solution(record, RULES)
    if _is_twin(found, "solution", path, *parsed, problems):
        found.carry(path, file)
        return
    if problems:
        found.refuse(path, problems)
        return
    filled, unset = defaults_filled(record, RULES)
    spec = dict(filled["spec"])
    spec.setdefault("language", (spec.get("languages") or [None])[0])
    found.carry(path, file, "records")
    found.add("solution", {**filled, "spec": spec}, digest, path, (0, len(content)), unset=unset)


def _is_twin(
    found: Collection, kind: Kind, path: str, record: Mapping[str, Any], digest: str, problems: list[Problem]
) -> bool:
    """Return True if another file has the same valid record; note other content under its name as a problem."""
    twin = None if problems else found.first_of(kind, record["name"], digest, path)
    if twin is not None and twin[1] != digest:
        problems.append(("name", f"'{record['name']}' is also in {twin[0]} with other content"))
    return twin is not None and twin[1] == digest


def _lines(found: Collection, path: str, file: Path, definition: dict[str, Any] | None) -> None:
    content = file.read_bytes()
    found.carry(path, file, "records")
    for line in split_lines(content):
        parsed = found.parse(path, line.content, line.number)
        if parsed is None:
            continue
        record, digest = parsed
        is_trace = "workload" in record
        problems = check_trace(record, RULES) if is_trace else check_workload(record, RULES)
        workload, where = (record["workload"], "workload.") if is_trace else (record, "")
        problems += tolerance_problems(workload, where) if isinstance(workload, dict) else []
        if definition is None:
            problems.append(("", "its definition.json was refused"))
        kinds = {} if problems or is_trace else {name: spec["type"] for name, spec in record["inputs"].items()}
        if "custom" in kinds.values() and set(kinds.values()) - {"custom", "scalar"}:
            problems.append(("inputs", "either all tensors are custom, or no tensor is"))
        if problems or definition is None:
            found.refuse(path, problems, line.number)
            continue
        span = (line.offset, len(line.content))
        if is_trace:
            found.add("trace", record, digest, path, span, line.number)
            continue
        base = PurePosixPath(path).parent.as_posix()
        base = "" if base == "." else base
        refusals, findings = found.tensor_problems(record, base)
        refusals += found.misfits(definition, record, base)
        if refusals:
            found.refuse(path, refusals, line.number)
            continue
        unset = [] if "tolerance" in record else ["tolerance"]
        filled = {
            **record,
            "definition": definition["name"],
            "tolerance": {**TOLERANCE, **(record.get("tolerance") or {})},
        }
        findings += found.fit_findings(definition, record)
        found.add("workload", filled, digest, path, span, line.number, unset, findings)


def _note_missing_definitions(found: Collection) -> None:
    names = {item.name for item in found.records if item.kind == "definition"}
    found.records = [
        item if item.definition in names
        else dataclasses.replace(item, findings=(*item.findings, f"definition '{item.definition}' is not in the data set"))
        for item in found.records
    ]  # fmt: skip

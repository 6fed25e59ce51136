"""An imported Definition as a draft of the user's own: what ``add-definition`` and ``add-solution`` take into the catalog.

Nothing is executed here. A reference that was added runs in the harness's own process, as every other of the catalog does:
whoever adds it has read it, and has written the self-test that every Definition is admitted with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilegym_db.errors import NotFoundError, RecordError, UsageError, did_you_mean
from tilegym_db.integrations.interchange.adapt import Adapted, adapted_definition, adapted_solution, why_not_by_element
from tilegym_db.records import Definition, Workload
from tilegym_db.scaffold.definition_draft import (
    ERRORS_FILE,
    INDEPENDENT_FILE,
    RECORD_FILE,
    REFERENCE_FILE,
    WORKLOADS_FILE,
)
from tilegym_db.store.imported import DataSet, StoredRecord

__all__ = ["STILL_TO_WRITE", "Draft", "draft_of", "imported_tag", "origin_tag"]

STILL_TO_WRITE = (INDEPENDENT_FILE, ERRORS_FILE)
"""Files of a draft that its user writes: another formulation, and mistakes that the comparison must catch."""

WIDE_INTEGERS = {"int16": -1024, "int32": -1024, "int64": -1024, "uint32": 0}
"""Integers of more than a byte -> the least value that FlashInfer-Bench draws of them; the bound above is 1024."""


def origin_tag(found: DataSet) -> str:
    """What says of a Definition which data set it comes from."""
    return f"origin:{found.origin}"


def imported_tag(item: StoredRecord) -> str:
    """What says of a Workload which one of the data set it is."""
    return f"imported:{item.name}"


@dataclass
class Draft:
    """The files of a draft, the Solutions in it, and what of the data set is not in it and why."""

    files: dict[str, bytes] = field(default_factory=dict)
    solutions: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def draft_of(found: DataSet, name: str) -> Draft:
    """The draft of one Definition of a data set.

    Raises:
        NotFoundError: the data set has no such Definition.
        UsageError: it cannot be one here; says why.
    """
    items = {item.name: item for item in found.of_kind("definition")}
    if name not in items:
        hint = did_you_mean(name, items)
        raise NotFoundError(
            f"{found.origin} has no definition '{name}'.{hint} Try: tilegym-db list --origin {found.origin}"
        )
    adapted = adapted_definition(found, items[name])
    if isinstance(adapted, str):
        raise UsageError(f"{name}: {adapted}.")
    reason = why_not_by_element(found.dialect, items[name])
    if reason is not None:
        raise UsageError(f"{name}: {reason}. A definition of the catalog is judged element by element.")
    if adapted.tensor_constraints:
        raise UsageError(
            f"{name}: its constraint {adapted.tensor_constraints[0]!r} is about contents, which fuzzing would not hold. "
            f"Try: tilegym-db compare-foreign {found.origin} {name} --run"
        )
    draft, definition = Draft(), _record(found, adapted)
    content = definition.to_dict()
    draft.files[REFERENCE_FILE] = content.pop("reference").encode()
    draft.files[RECORD_FILE] = (json.dumps(content, indent=2) + "\n").encode()
    _add_workloads(draft, found, name, definition)
    for item in found.of_kind("solution"):
        if item.definition == name:
            _add_solution(draft, found, item, adapted)
    return draft


def _record(found: DataSet, adapted: Adapted) -> Definition:
    """The adapted Definition with a tag for where it comes from, and inputs drawn as its own project draws them."""
    content = adapted.definition.to_dict()
    generators: dict[str, Any] = {}
    for name in adapted.definition.tensor_inputs:
        dtype = adapted.definition.inputs[name].dtype
        if dtype in WIDE_INTEGERS:
            generators[name] = {"kind": "integers", "low": WIDE_INTEGERS[dtype], "high": 1024}
    tags = ["status:draft", origin_tag(found)]
    return Definition.from_dict({**content, "tags": tags, "input_generators": generators}, adapted.definition.name)


def _add_workloads(draft: Draft, found: DataSet, name: str, definition: Definition) -> None:
    workloads: dict[str, Workload] = {}
    for item in found.of_kind("workload"):
        if item.definition != name:
            continue
        try:
            workload = _workload(item, definition)
            workload.check_against(definition)
            workloads.setdefault(workload.uuid, workload)
        except RecordError as error:
            draft.left_out.append((f"workload {item.name}", str(error)))
    ordered = sorted(workloads.values(), key=lambda workload: math.prod(workload.axes.values()))
    lines = [
        Workload.from_dict(
            {**workload.to_dict(), "tags": [*workload.tags, *(["tiny"] if not number else [])]}
        ).to_json()
        for number, workload in enumerate(ordered)  # the self-test runs on the smallest
    ]
    draft.files[WORKLOADS_FILE] = "".join(f"{line}\n" for line in lines).encode()


def _workload(item: StoredRecord, definition: Definition) -> Workload:
    given: Mapping[str, Any] = item.record["inputs"]
    inputs = {}
    for name, spec in definition.inputs.items():
        kind = given.get(name, {"type": "random"})
        if kind["type"] not in ("random", "scalar"):
            raise RecordError(
                f"inputs.{name}: comes from {kind['type']}; compare-foreign runs it, bench draws its inputs."
            )
        if spec.is_scalar and kind["type"] == "random":
            raise RecordError(f"inputs.{name}: is a number, and the workload gives none.")
        if kind["type"] == "scalar":
            inputs[name] = {"type": "scalar", "value": kind["value"]}
    axes = {name: size for name, size in item.record["axes"].items() if name in definition.axes}
    content = {"definition": definition.name, "axes": axes, "inputs": inputs, "tags": [imported_tag(item)]}
    return Workload.from_dict(content, f"workload {item.name}")


def _add_solution(draft: Draft, found: DataSet, item: StoredRecord, adapted: Adapted) -> None:
    solution = adapted_solution(found, item, adapted)
    if isinstance(solution, str):
        draft.left_out.append((f"solution {item.name}", solution))
        return
    folder = f"solutions/{solution.record.name}"
    draft.files[f"{folder}/solution.json"] = (solution.record.to_json(indent=2) + "\n").encode()
    draft.files |= {f"{folder}/{path}": content for path, content in solution.sources.items()}
    draft.solutions.append(folder)

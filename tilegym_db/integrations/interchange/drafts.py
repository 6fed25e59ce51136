"""An imported Definition as a draft of the user's own: what ``add-definition`` and ``add-solution`` take into the catalog.

Nothing is executed here. A reference that was added runs in the harness's own process, as every other of the catalog does:
whoever adds it has read it, and has written the self-test that every Definition is admitted with.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.blob_files import FOLDER, SUFFIX
from tilegym_db.errors import NotFoundError, RecordError, StoreError, UsageError, did_you_mean
from tilegym_db.integrations.interchange.adapt import Adapted, adapted_definition, adapted_solution, why_not_by_element
from tilegym_db.integrations.interchange.foreign_blobs import base_of, blob_of
from tilegym_db.integrations.interchange.foreign_outputs import is_drawn
from tilegym_db.integrations.interchange.foreign_samplers import (
    KnownSampler,
    draws_itself,
    known_sampler,
    sampler_record,
)
from tilegym_db.records import Definition, Workload
from tilegym_db.records.content_constraints import constraint_problem
from tilegym_db.scaffold.definition_draft import (
    ERRORS_FILE,
    INDEPENDENT_FILE,
    RECORD_FILE,
    REFERENCE_FILE,
    WORKLOADS_FILE,
)
from tilegym_db.store.imported import DataSet, StoredRecord, object_path

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
    copies: dict[str, Path] = field(default_factory=dict)
    """Path in the draft -> the file of the data set that is copied there."""
    solutions: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    judged: str = ""
    """How it is judged, where that is not element by element."""
    undrawn: list[str] = field(default_factory=list)
    """Constraints on contents that drawn ones do not hold until the Definition says how to draw them."""


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
    drawn = reason is not None and is_drawn(items[name])
    sampler = known_sampler(adapted.definition, Catalog.default()) if drawn else None
    if reason is not None and not isinstance(sampler, KnownSampler):
        more = (
            f", and {sampler}" if sampler is not None else ". A definition of the catalog is judged element by element"
        )
        raise UsageError(f"{name}: {reason}{more}.")
    for text in adapted.tensor_constraints:
        problem = constraint_problem(text, {*adapted.definition.axes, *adapted.definition.inputs})
        if problem is not None:
            raise UsageError(
                f"{name}: its constraint {problem}, so nobody could hold contents against it. "
                f"Try: tilegym-db compare-foreign {found.origin} {name} --run"
            )
    draft, definition = Draft(), _record(found, adapted)
    own_numbers = None
    if isinstance(sampler, KnownSampler):
        definition = Definition.from_dict(sampler_record(definition.to_dict(), sampler), name)
        draft.judged = f"judged as a distribution, by the law of {sampler.ours.name}; its own reference is not used"
        own_numbers = draws_itself(sampler)
    draft.undrawn = [text for text in definition.content_constraints if not _is_drawn(definition, text)]
    content = definition.to_dict()
    draft.files[REFERENCE_FILE] = content.pop("reference").encode()
    draft.files[RECORD_FILE] = (json.dumps(content, indent=2) + "\n").encode()
    _add_workloads(draft, found, name, definition)
    for item in found.of_kind("solution"):
        if item.definition == name and own_numbers is not None:
            draft.left_out.append((f"solution {item.name}", own_numbers))
        elif item.definition == name:
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
    for text in adapted.tensor_constraints:
        ends = _ends(adapted.definition, text)
        if ends is not None:
            generators[ends[0]] = {"kind": "offsets", "low": 0, "high": ends[1], "leading": True}
    more = {
        "tags": ["status:draft", origin_tag(found)],
        "input_generators": generators,
        "content_constraints": adapted.tensor_constraints,
    }
    return Definition.from_dict({**content, **more}, adapted.definition.name)


_LAST = re.compile(r"(?P<offsets>[A-Za-z_]\w*)\[-1\](?:\.item\(\))?")


def _ends(definition: Definition, text: str) -> tuple[str, str] | None:
    """(offsets, axis) of a constraint which says that offsets end at the size of an axis: ``total == indptr[-1].item()``."""
    sides = [side.strip() for side in text.split("==")]
    if len(sides) != 2:
        return None
    for axis, end in (sides, sides[::-1]):
        found = _LAST.fullmatch(end)
        spec = definition.inputs.get(found["offsets"]) if found else None
        if found and spec is not None and axis in definition.axes and spec.dtype in WIDE_INTEGERS:
            return found["offsets"], axis
    return None


def _is_drawn(definition: Definition, text: str) -> bool:
    ends = _ends(definition, text)
    generator = definition.input_generators.get(ends[0]) if ends else None
    return ends is not None and generator is not None and generator.high == ends[1]


def _add_workloads(draft: Draft, found: DataSet, name: str, definition: Definition) -> None:
    workloads: dict[str, Workload] = {}
    for item in found.of_kind("workload"):
        if item.definition != name:
            continue
        try:
            workload = _workload(found, item, definition)
            workload.check_against(definition)
            workloads.setdefault(workload.uuid, workload)
            for spec in workload.files().values():
                draft.copies[spec.path] = object_path(found.home, str(spec.sha256))
        except (RecordError, StoreError) as error:
            draft.left_out.append((f"workload {item.name}", str(error)))
    ordered = sorted(workloads.values(), key=lambda workload: math.prod(workload.axes.values()))
    lines = [
        Workload.from_dict(
            {**workload.to_dict(), "tags": [*workload.tags, *(["tiny"] if not number else [])]}
        ).to_json()
        for number, workload in enumerate(ordered)  # the self-test runs on the smallest
    ]
    draft.files[WORKLOADS_FILE] = "".join(f"{line}\n" for line in lines).encode()


def _workload(found: DataSet, item: StoredRecord, definition: Definition) -> Workload:
    given: Mapping[str, Any] = item.record["inputs"]
    inputs: dict[str, dict[str, Any]] = {}
    for name, spec in definition.inputs.items():
        kind = given.get(name, {"type": "random"})
        if kind["type"] == "custom":
            raise RecordError(
                f"inputs.{name}: comes from a function of the reference, which is never called for inputs."
            )
        if kind["type"] == "safetensors":
            blob = blob_of(found, name, kind["path"], base_of(found, item))
            found.content(blob.path)  # raises where the bytes are not those that were imported any more
            path = f"{FOLDER}/{blob.sha256}{SUFFIX}"
            inputs[name] = {
                "type": "safetensors", "path": path, "tensor_key": kind["tensor_key"], "sha256": blob.sha256,
            }  # fmt: skip
        if spec.is_scalar and kind["type"] != "scalar":
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

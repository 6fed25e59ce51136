"""Turn an imported Definition into a draft for ``add-definition`` and ``add-solution``.

Nothing is executed here. After it is added, the reference runs in the main process like any other of the catalog. The user
must therefore read it first and write the self-test that every Definition needs.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.reader import FOLDER, SUFFIX
from tilegym_db.errors import NotFoundError, RecordError, StoreError, UsageError, did_you_mean
from tilegym_db.interchange import sol_execbench
from tilegym_db.interchange.adapt import Adapted, adapted_definition, adapted_solution, is_drawn, why_not_by_element
from tilegym_db.records import Definition, Workload
from tilegym_db.records.expressions import constraint_problem
from tilegym_db.scaffold.definition_draft import (
    ERRORS_FILE,
    INDEPENDENT_FILE,
    RECORD_FILE,
    REFERENCE_FILE,
    WORKLOADS_FILE,
)
from tilegym_db.store.imported import DataSet, StoredFile, StoredRecord, object_path

STILL_TO_WRITE = (INDEPENDENT_FILE, ERRORS_FILE)
"""Files of a draft that the user must write: another formulation, and errors that the comparison must detect."""

WIDE_INTEGERS = {"int16": -1024, "int32": -1024, "int64": -1024, "uint32": 0}
"""Minimum value that FlashInfer-Bench draws for integers of more than a byte. The upper bound is 1024."""


def origin_tag(found: DataSet) -> str:
    """Return the tag of a Definition that names its data set."""
    return f"origin:{found.origin}"


def imported_tag(item: StoredRecord) -> str:
    """Return the tag of a Workload that names the imported Workload."""
    return f"imported:{item.name}"


@dataclass
class Draft:
    """The files of a draft, its Solutions, and what was left out with the reasons."""

    files: dict[str, bytes] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    """Files of the data set to copy, by path in the draft."""
    solutions: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    judged: str = ""
    """The way it is judged, if not element by element."""
    undrawn: list[str] = field(default_factory=list)
    """Constraints on contents that drawn inputs violate until the Definition says how to draw them."""


def draft_of(found: DataSet, name: str) -> Draft:
    """Return the draft of one Definition of a data set.

    Raises:
        NotFoundError: the data set has no such Definition.
        UsageError: it cannot be adapted; the message has the reason.
    """
    items = {item.name: item for item in found.of_kind("definition")}
    if name not in items:
        hint = did_you_mean(name, items)
        raise NotFoundError(
            f"{found.origin} has no definition '{name}'.{hint} Try: tilegym-db list --origin {found.origin}",
            code="definition_unknown",
        )
    adapted = adapted_definition(found, items[name])
    if isinstance(adapted, str):
        raise UsageError(f"{name}: {adapted}.", code="definition_not_adaptable")
    reason = why_not_by_element(found.dialect, items[name])
    drawn = reason is not None and is_drawn(items[name])
    sampler = known_sampler(adapted.definition, Catalog.default()) if drawn else None
    if reason is not None and not isinstance(sampler, KnownSampler):
        more = (
            f", and {sampler}" if sampler is not None else ". A definition of the catalog is judged element by element"
        )
        raise UsageError(f"{name}: {reason}{more}.", code="judged_otherwise")
    for text in adapted.tensor_constraints:
        problem = constraint_problem(text, {*adapted.definition.axes, *adapted.definition.inputs})
        if problem is not None:
            raise UsageError(
                f"{name}: its constraint {problem}, so drawn inputs cannot be checked against it. "
                f"Try: tilegym-db data compare {found.origin} {name} --run",
                code="constraint_unchecked",
            )
    draft, definition = Draft(), _record(found, adapted)
    own_numbers = None
    if isinstance(sampler, KnownSampler):
        definition = Definition.from_dict(sampler_record(definition.to_dict(), sampler), name)
        draft.judged = (
            f"judged as a distribution, with the distribution of {sampler.ours.name}; its own reference is not used"
        )
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
    """Return the adapted Definition with a tag for its origin and with inputs drawn as its own project draws them."""
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
    """Return (offsets, axis) of a constraint that offsets end at an axis size, such as ``total == indptr[-1].item()``."""
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
        for number, workload in enumerate(ordered)  # the self-test runs on the smallest one
    ]
    draft.files[WORKLOADS_FILE] = "".join(f"{line}\n" for line in lines).encode()


def _workload(found: DataSet, item: StoredRecord, definition: Definition) -> Workload:
    given: Mapping[str, Any] = item.record["inputs"]
    inputs: dict[str, dict[str, Any]] = {}
    for name, spec in definition.inputs.items():
        kind = given.get(name, {"type": "random"})
        if kind["type"] == "custom":
            raise RecordError(
                f"inputs.{name}: comes from a function of the reference, and an import does not call that function.",
                code="input_by_function",
            )
        if kind["type"] == "safetensors":
            blob = blob_of(found, name, kind["path"], base_of(found, item))
            found.content(blob.path)  # raises if the bytes changed since the import
            path = f"{FOLDER}/{blob.sha256}{SUFFIX}"
            inputs[name] = {
                "type": "safetensors", "path": path, "tensor_key": kind["tensor_key"], "sha256": blob.sha256,
            }  # fmt: skip
        if spec.is_scalar and kind["type"] != "scalar":
            raise RecordError(f"inputs.{name}: is a number, and the workload gives none.", code="scalar_missing")
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


# ---- Foreign samplers ---------------------------------------------------------------------------------
# Recognise foreign samplers by their inputs and outputs, and turn them into Definitions judged as distributions.

PROBABILITIES, UNIFORM = "probs", "uniform"


@dataclass(frozen=True)
class KnownSampler:
    """A foreign sampler: our sampler with the same distribution, and the names of its row and vocabulary axes."""

    ours: Definition
    rows: str
    columns: str
    output: str
    takes_uniform: bool


def known_sampler(definition: Definition, catalog: Catalog) -> KnownSampler | str:
    """Return the known sampler that an adapted Definition matches, or why it matches none.

    Args:
        definition: an adapted Definition with the foreign inputs and outputs.
        catalog: the catalog with our samplers.
    """
    given = tuple(name for name in definition.inputs if name not in (PROBABILITIES, UNIFORM))
    laws = _samplers(catalog)
    ours = laws.get(given)
    takes_uniform = UNIFORM in definition.inputs
    if ours is None or tuple(definition.inputs) != (PROBABILITIES, *given, *([UNIFORM] * takes_uniform)):
        known = "; ".join(", ".join((PROBABILITIES, *names)) for names in laws)
        return (
            f"its inputs ({', '.join(definition.inputs)}) do not match any sampler with a known distribution ({known})"
        )
    if len(definition.outputs) != 1:
        return f"it has {len(definition.outputs)} outputs, and a sampler has one"
    shape = definition.inputs[PROBABILITIES].shape or ()
    if len(shape) != 2 or not all(isinstance(entry, str) and entry in definition.axes for entry in shape):
        return f"{PROBABILITIES} has the shape {list(shape)}, not rows by vocabulary"
    rows, columns = map(str, shape)
    ((output, drawn),) = definition.outputs.items()
    if drawn.shape != (rows,) or drawn.dtype not in ("int32", "int64"):
        return f"{output} is {drawn.dtype} {list(drawn.shape or ())}, not an index for each of {rows}"
    for key in (PROBABILITIES, *given, *([UNIFORM] * takes_uniform)):
        found, wanted = definition.inputs[key], ours.inputs[key]
        stated = found.shape or ()
        if (found.dtype, len(stated), stated[:1]) != (wanted.dtype, len(wanted.shape or ()), (rows,)):
            return (
                f"{key} is {found.dtype} {list(stated)}, but the known distribution needs {wanted.dtype}, one per row"
            )
    return KnownSampler(ours, rows, columns, output, takes_uniform)


def _samplers(catalog: Catalog) -> dict[tuple[str, ...], Definition]:
    """Map the inputs between probabilities and random numbers to our sampler with exactly these inputs."""
    found = {}
    for definition in catalog.definitions.values():
        first, *given, last = definition.inputs if len(definition.inputs) > 1 else ("", "")
        if definition.sampled and (first, last) == (PROBABILITIES, UNIFORM):
            found[tuple(given)] = definition
    return found


def sampler_record(content: dict[str, Any], sampler: KnownSampler) -> dict[str, Any]:
    """Return a Definition that is judged by our sampler's distribution and takes one random number per row.
    Args:
        content: content of the adapted Definition. Its reference is replaced, because it draws by itself.
        sampler: the matching sampler.
    """
    ours = sampler.ours.to_dict()
    (law,) = sampler.ours.sampled.values()
    source = ours["joint_inputs"]["source"]
    for axis, name in (("B", sampler.rows), ("V", sampler.columns)):
        source = source.replace(f'axes["{axis}"]', f'axes["{name}"]')
    arguments = ", ".join((*(name for name in content["inputs"] if name != UNIFORM), UNIFORM))
    narrower = (
        ""
        if content["outputs"][sampler.output]["dtype"] == "int64"
        else f"\n\n_in_64_bits = run\n\n\ndef run({arguments}):\n    return _in_64_bits({arguments}).to(torch.int32)\n"
    )
    first = content["reference"].partition("\n")[0]
    return {
        **content,
        "inputs": content["inputs"] | {UNIFORM: {"shape": [sampler.rows], "dtype": "float32"}},
        "reference": f"{first}\n{ours['reference'].rstrip()}\n{narrower}",
        "sampled": {sampler.output: {"law": law.law, "uniforms": UNIFORM}},
        "joint_inputs": {**ours["joint_inputs"], "source": source},
        "input_generators": {UNIFORM: {"kind": "uniform"}},
        "independent_axes": [sampler.rows],
        "special_values": [],
    }


def draws_itself(sampler: KnownSampler) -> str | None:
    """Return why the data set's own Solutions cannot be called here; None if they can."""
    if sampler.takes_uniform:
        return None
    return (
        "it draws its own random numbers, but a sampler here takes one per row, so that calls are repeatable: "
        f"add the argument '{UNIFORM}' after the inputs"
    )


# ---- Tensor files of Workloads ------------------------------------------------------------------------


def base_of(found: DataSet, item: StoredRecord) -> str:
    """Return the folder that tensor paths in a Workload or Trace are relative to."""
    return PurePosixPath(item.path).parent.as_posix() if found.dialect == sol_execbench.DIALECT else ""


def blob_of(found: DataSet, name: str, given: str, base: str = "") -> StoredFile:
    """Return the file of an input.

    Args:
        found: the data set.
        name: name of the input, for messages.
        given: the path that the Workload states.
        base: the folder that the path is relative to.

    Raises:
        RecordError: the file is missing, a Git LFS pointer, or changed.
    """
    file = found.files_by_path.get(os.path.normpath(os.path.join(base, given)))
    if file is None or file.role == "pointer":
        what = "is not in the data set" if file is None else "is a Git LFS pointer without its content"
        raise RecordError(
            f"inputs.{name}: {given} {what}; fetch it and import the data set again.", code="blob_missing"
        )
    if file.role == "changed":
        raise RecordError(f"inputs.{name}: {given} was changed after the export, and is not used.", code="blob_changed")
    return file

"""Adapt foreign Definitions and Solutions so that our harness can call them, or return why it cannot. Executes nothing.

The second part turns an imported Definition into a draft for ``add-definition`` and ``add-solution``. After it is added, the
reference runs in the main process like any other of the catalog. The user must therefore read it first and write the
self-test that every Definition needs.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.reader import FOLDER, SUFFIX
from tilegym_db.errors import NotFoundError, RecordError, StoreError, UsageError, did_you_mean
from tilegym_db.interchange import fi_trace_dumps, sol_execbench, tilegym_inventory
from tilegym_db.interchange.checks import derived_axis
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.dtypes import RECORD_DTYPES
from tilegym_db.records.expressions import constraint_problem, names_in
from tilegym_db.records.solution import called_with, find_function, narrowed
from tilegym_db.scaffold.definition_draft import (
    ERRORS_FILE,
    INDEPENDENT_FILE,
    RECORD_FILE,
    REFERENCE_FILE,
    WORKLOADS_FILE,
)
from tilegym_db.store.imported import DataSet, StoredFile, StoredRecord, object_path

LANGUAGES = {"python": "python", "pytorch": "python", "triton": "triton", "tilelang": "tilelang", "cutile": "cutile",
             "cuda-tile": "cutile"}  # fmt: skip
ENTRY = "tilegym_entry.py"
REFERENCE = "reference.py"
ORIGINAL_TEXT = "original"
"""Key of a record whose reference only wraps another call: the source of that call, for the comparison of a draft."""
CALLED_BY_NAME = frozenset({fi_trace_dumps.DIALECT, tilegym_inventory.DIALECT})
"""Dialects whose functions are called with keyword arguments. The order of their inputs is not the order of parameters."""


@dataclass(frozen=True)
class Adapted:
    """A foreign Definition as ours. ``tensor_constraints`` are the constraints on contents rather than sizes."""

    definition: Definition
    tensor_constraints: tuple[str, ...]
    entry: str
    """Name of the function in the reference that computes the outputs."""


@dataclass(frozen=True)
class AdaptedSolution:
    """A foreign Solution as ours, with the bytes of its sources and of the added entry point."""

    record: Solution
    sources: Mapping[str, bytes]
    added_entry: bool


def native_name(text: str) -> str:
    """Return a valid name for our records: the same one if possible, else a slug with a digest."""
    if re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,127}", text):
        return text
    slug = re.sub(r"[^a-z0-9_.-]+", "-", text.lower()).strip("-._")[:100] or "x"
    return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def adapted_definition(found: DataSet, item: StoredRecord) -> Adapted | str:
    """Return the Definition for our harness, or why it cannot be adapted."""
    record = item.record
    reason = _why_not(record)
    if reason is not None:
        return reason
    entry = reference_entry(record["reference"])
    reason = _lacking(found, record["reference"], entry, record["inputs"])
    if reason is not None:
        return f"its reference {reason}"
    in_place = {name: f"{name}_out" for name in record["outputs"] if name in record["inputs"]}
    expressions = {name: axis["expression"] for name, axis in record["axes"].items() if axis.get("type") == "expr"}
    sizes, on_tensors = _constraints(record, expressions)
    outputs = [in_place.get(name, name) for name in record["outputs"]]
    value = {
        "name": native_name(item.name),
        "version": "1.0.0",
        "op_type": native_name(record.get("op_type") or "foreign"),
        "axes": {name: _axis(axis) for name, axis in record["axes"].items() if name not in expressions},
        "inputs": {name: _tensor(spec, record["axes"], expressions) for name, spec in record["inputs"].items()},
        "outputs": {
            in_place.get(name, name): _tensor(spec, record["axes"], expressions)
            for name, spec in record["outputs"].items()
        },
        "optional_outputs": optional_outputs(item, outputs, in_place),
        "in_place": in_place,
        "constraints": sizes,
        "reference": _reference(found, item, entry),
    }
    try:
        return Adapted(Definition.from_dict(value, f"{found.origin}/{item.path}"), tuple(on_tensors), entry)
    except RecordError as error:
        return f"cannot be a definition here: {str(error).rstrip('.')}"


def _why_not(record: Mapping[str, Any]) -> str | None:
    if not record.get("reference"):
        return "it has no reference"
    if not record["inputs"]:
        return "it has no inputs"
    for name, axis in record["axes"].items():
        if axis.get("type") == "const" and "value" not in axis:
            return f"the const axis '{name}' has no value"
    for group in ("inputs", "outputs"):
        for name, spec in record[group].items():
            if spec["dtype"] not in RECORD_DTYPES:
                return f"{group}.{name} has dtype {spec['dtype']}, which is unknown here"
            if group == "outputs" and spec["shape"] is None:
                return f"outputs.{name} is a Python scalar, and outputs are tensors here"
            if spec["dtype"] == "float4_e2m1":
                return f"{group}.{name} is float4_e2m1: its packing is not stated"
    return None


def why_not_by_element(dialect: str, definition: StoredRecord) -> str | None:
    """Return why a correct output may differ from the reference in every element; None if it may not."""
    if dialect == sol_execbench.DIALECT:
        return None  # there, every Workload states a tolerance
    if is_drawn(definition):
        return "samples are judged as a distribution there, which is not supported here yet"
    if definition.name.startswith("dsa_topk_indexer"):
        return "indices are judged by their scores there, which is not supported here yet"
    return None


def reference_entry(text: str) -> str:
    """Return the name of a reference's main function: ``run``, else the last one defined."""
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return "run" if "run" in names else names[-1]


def _axis(axis: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "const", "value": axis["value"]} if "value" in axis else {"type": "var"}


def _tensor(spec: Mapping[str, Any], axes: Collection[str], expressions: Mapping[str, str]) -> dict[str, Any]:
    shape = spec["shape"]
    entries: list[str | int] | None = None
    if shape is not None:
        named = [axis if axis in axes else derived_axis(axis, axes) or axis for axis in shape]
        entries = [int(axis) if axis.isdigit() else _expanded(axis, expressions) for axis in named]
    return {"shape": entries, "dtype": spec["dtype"]}


def _expanded(text: str, expressions: Mapping[str, str]) -> str:
    """Return an axis, or the expression of an ``expr`` axis with nested ``expr`` axes replaced."""
    for _ in range(len(expressions) + 1):
        replaced = re.sub(r"[A-Za-z_]\w*", lambda m: f"({expressions[m[0]]})" if m[0] in expressions else m[0], text)
        if replaced == text:
            break
        text = replaced
    return text.strip()


def _constraints(record: Mapping[str, Any], expressions: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the constraints on sizes and those on contents.

    Shapes are drawn by the former, and drawn inputs are checked against the latter.
    """
    sizes: list[str] = []
    on_tensors: list[str] = []
    axes = set(record["axes"]) - set(expressions)
    for text in record.get("constraints") or ():
        try:
            sized = _expanded(_as_comparisons(_by_axes(text, record["inputs"])), expressions)
            if _SAME.fullmatch(sized):
                continue  # always true
            names, dtypes = names_in(sized)
            (sizes if names <= axes and not dtypes else on_tensors).append(sized)
        except RecordError:
            on_tensors.append(text)
    return sizes, on_tensors


def _as_comparisons(text: str) -> str:
    """Replace membership in a list of values (``head_dim in (64, 128)``) by comparisons, which our constraints have."""

    class Members(ast.NodeTransformer):
        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            values = node.comparators[0]
            if len(node.ops) != 1 or not isinstance(node.ops[0], ast.In | ast.NotIn):
                return node
            if not isinstance(values, ast.Tuple | ast.List | ast.Set) or not values.elts:
                return node
            inside = isinstance(node.ops[0], ast.In)
            each: list[ast.expr] = [
                ast.Compare(node.left, [ast.Eq() if inside else ast.NotEq()], [value]) for value in values.elts
            ]
            return each[0] if len(each) == 1 else ast.BoolOp(ast.Or() if inside else ast.And(), each)

    if not re.search(r"\bin\b", text):
        return text
    return ast.unparse(Members().visit(ast.parse(text.strip(), mode="eval")))


_SAME = re.compile(r"\s*\(?(\w+)\)?\s*==\s*\(?\1\)?\s*")
"""A trivial constraint such as ``M == M``, left after sizes of tensors are replaced by their axes."""


def _by_axes(text: str, inputs: Mapping[str, Any]) -> str:
    """Replace sizes of inputs in a constraint (``indptr.shape[0]``, ``len(indptr)``) by their axes."""

    def axis(found: re.Match[str]) -> str:
        shape = (inputs.get(found["name"]) or {}).get("shape") or ()
        place = int(found["place"] or 0)
        return f"({shape[place]})" if place < len(shape) else found[0]

    text = re.sub(r"\b(?P<name>[A-Za-z_]\w*)\.(?:shape\[|size\()(?P<place>\d+)[\])]", axis, text)
    return re.sub(r"\blen\((?P<name>[A-Za-z_]\w*)(?P<place>)\)", axis, text)


def _reference(found: DataSet, item: StoredRecord, entry: str) -> str:
    """Return the reference followed by a ``run`` with our signature."""
    names = ", ".join(item.record["inputs"])
    by_name = found.dialect in CALLED_BY_NAME
    call = ", ".join(f"{name}={name}" for name in item.record["inputs"]) if by_name else names
    text = item.record["reference"].rstrip()
    if ORIGINAL_TEXT in item.record:  # it was written with our signature
        return f"# Source: {found.origin} {item.path}\n{text}\n"
    return (
        f"# Source: {found.origin} {item.path}\n{text}\n\n\n_imported = {entry}\n\n\n"
        f"def run({names}):\n    return _imported({call})\n"
    )


def _lacking(found: DataSet, source: str | bytes, function: str, names: Iterable[str]) -> str | None:
    """Return why a dialect that passes arguments by name cannot call a function; None if it can, and for other dialects."""
    node = find_function(source, function) if found.dialect in CALLED_BY_NAME else None
    if node is None or node.args.kwarg is not None:
        return None
    parameters = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    lacking = [name for name in names if name not in parameters]
    return f"is called by name and has no parameter {', '.join(lacking)}" if lacking else None


def adapted_solution(
    found: DataSet, item: StoredRecord, adapted: Adapted, omits: Sequence[str] | None = None
) -> AdaptedSolution | str:
    """Return the Solution for our harness, or why it cannot run.

    Args:
        omits: optional outputs that it does not write; None derives them from its parameters.
    """
    spec = item.record["spec"]
    language = LANGUAGES.get(str(spec["language"]))
    if language == "python" and "cuda-tile" in spec["dependencies"]:
        language = "cutile"  # FlashInfer-Trace has no such language, so our export declares it this way
    if language is None:
        return f"{spec['language']} is stored, shown and exported, but not run: this harness does not build C++ or CUDA sources"
    path, function = str(spec["entry_point"]).split("::")
    if not path.endswith(".py") or not function.isidentifier():
        return f"its entry point {spec['entry_point']} is not a function of a Python file"
    sources = {source["path"]: source["content"].encode() for source in item.record["sources"]}
    writes = bool(spec["destination_passing_style"])
    if omits is None:
        omits = without_argument(adapted.definition, sources[path], function) if writes else ()
    definition = narrowed(adapted.definition, omits)
    by_name = found.dialect in CALLED_BY_NAME
    names = [*definition.inputs, *(definition.written_outputs if writes else ())]
    reason = _lacking(found, sources[path], function, names)
    if reason is not None:
        return f"{function} of {path} {reason}"
    added = definition.in_place != {} or (not writes and language != "python") or by_name
    if added:
        sources[ENTRY] = _entry(definition, path, function, writes, by_name).encode()
        path, function, writes = ENTRY, "run", True
    value = {
        "name": native_name(item.name),
        "definition": adapted.definition.name,
        "author": item.record["author"],
        "spec": {
            "language": language,
            "entry_point": f"{path}::{function}",
            "destination_passing_style": writes,
            "dependencies": [text for text in spec["dependencies"] if _is_installed(text)],
            "omits": list(omits),
        },
        "sources": [{"path": name} for name in sources],
    }
    if spec.get("provides") == "stock":
        value["spec"] |= {"role": "baseline", "provides": "stock"}
    try:
        return AdaptedSolution(Solution.from_dict(value, f"{found.origin}/{item.path}"), sources, added)
    except RecordError as error:
        return f"cannot be a solution here: {error}"


def _entry(definition: Definition, path: str, function: str, writes: bool, by_name: bool) -> str:
    """Return the source of an entry point that writes its outputs and calls one that returns them or overwrites inputs."""
    module = path.removesuffix(".py").replace("/", ".")
    inputs = list(definition.inputs)
    arguments = [*inputs, *(definition.written_outputs if writes else ())]
    given = ", ".join(f"{name}={name}" if by_name else name for name in arguments)
    lines = [
        f"from .{module} import {function} as _entry\n\n",
        f"def run({', '.join([*inputs, *definition.written_outputs])}):",
    ]
    if writes:
        return "\n".join([*lines, f"    _entry({given})\n"])
    targets = [{v: k for k, v in definition.in_place.items()}.get(name, name) for name in definition.outputs]
    return "\n".join([
        *lines,
        f"    returned = _entry({given})",
        "    values = returned if isinstance(returned, tuple | list) else (returned,)",
        f"    for target, value in zip(({', '.join(targets)},), values, strict=True):",
        "        if value is not target and value is not None:",
        "            target.copy_(value)\n",
    ])  # fmt: skip


def _is_installed(text: str) -> bool:
    """Return True if a dependency is installed. Others are left out, and the source then fails when it imports them."""
    try:
        version(Requirement(text).name)
    except (InvalidRequirement, PackageNotFoundError):
        return False
    return True


# ---- Outputs of foreign records -----------------------------------------------------------------------
# Derive from the records and sources alone if outputs are drawn at random or optional.

SPARSE_ATTENTION = "dsa_sparse_attention"
"""Name prefix of FlashInfer-Bench's Definitions whose second output, the log-sum-exp, is optional."""


def is_drawn(definition: StoredRecord) -> bool:
    """Return True if a Definition draws its outputs: it belongs to the samplers and returns indices."""
    if definition.record.get("op_type") != "sampling":
        return False
    return any(spec["dtype"].startswith("int") for spec in definition.record["outputs"].values())


def optional_outputs(item: StoredRecord, outputs: list[str], in_place: Mapping[str, str]) -> list[str]:
    """Return the trailing outputs that the record marks as optional or that its project's evaluator allows to be missing."""
    specs = dict(zip(outputs, item.record["outputs"].values(), strict=True))
    marked = [name for name in outputs if specs[name].get("optional") is True]
    if not marked and item.name.startswith(SPARSE_ATTENTION) and len(outputs) == 2:
        marked = outputs[1:]
    last = outputs[-len(marked) :] if marked else []
    return marked if marked == last and len(marked) < len(outputs) and not set(marked) & set(in_place.values()) else []


def without_argument(definition: Definition, source: bytes, function: str) -> tuple[str, ...]:
    """Return the optional outputs for which a destination-passing function has no parameter."""
    found = find_function(source, function)
    if found is None or found.args.vararg is not None or not definition.optional_outputs:
        return ()
    given = len(called_with(definition, destination_passing_style=True))
    lacking = given - len(found.args.posonlyargs) - len(found.args.args)
    return definition.optional_outputs[-lacking:] if 0 < lacking <= len(definition.optional_outputs) else ()


# ---- Drafts ----------------------------------------------------------------------------------------------

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
    records = {native_name(item.name): item.record for item in found.of_kind("definition")}
    generators |= records[adapted.definition.name].get("input_generators") or {}
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
    """Return the known sampler that an adapted Definition matches, or why it matches none."""
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
    """Return our samplers by their inputs, without the probabilities at the start and the random numbers at the end."""
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
    """Return the file of an input, whose path ``given`` is relative to the folder ``base``.

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

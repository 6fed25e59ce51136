"""Compare a draft with the imported original before it is written. Both run in a confined worker, on drawn inputs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tilegym_db.backends.torch_dtypes import storage_dtype
from tilegym_db.catalog.record_files import write_solution
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.interchange.adapt import (
    CALLED_BY_NAME,
    Adapted,
    Draft,
    adapted_definition,
    adapted_solution,
    draft_of,
    reference_entry,
)
from tilegym_db.judging.same_call import DIFFERENT, DRAFT_FAILED, ORIGINAL_FAILED, SAME, Called, code_of
from tilegym_db.judging.sandboxed import Confined
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Definition, Solution, TensorSpec, Workload
from tilegym_db.records.call import Call
from tilegym_db.records.case import Case
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import narrowed
from tilegym_db.scaffold.definition_draft import RECORD_FILE, REFERENCE_FILE, WORKLOADS_FILE, example_scalar
from tilegym_db.store.imported import DataSet, StoredRecord
from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.verifier import Failure

SIZES = (3, 2, 4, 8, 16, 64, 1)
"""Sizes to try for a var axis."""
MAX_TRIED = 20_000
MAX_CALLS = 4
MAX_ELEMENTS = 1 << 24
"""Maximum number of elements of a tensor in the comparison."""
SEED = 20_261_128
ORIGINAL, COMPARE = "tilegym_original.py", "tilegym_compare.py"

_WRONG = {
    DIFFERENT: "it computes other outputs than the original",
    DRAFT_FAILED: "it raises, but the original does not",
}


def compared_draft(found: DataSet, name: str) -> Draft:
    """Return the draft of a Definition after a comparison of each Python function with its original.

    A Solution that computes something else is left out. What could not be compared is listed with its reason.

    Raises:
        NotFoundError: the data set has no such Definition.
        UsageError: it cannot be adapted, or the draft's reference computes something else.
    """
    draft = draft_of(found, name)
    (item,) = (one for one in found.of_kind("definition") if one.name == name)
    adapted = adapted_definition(found, item)
    if isinstance(adapted, str) or draft.judged:
        return draft
    drawn = Definition.from_dict(
        {**json.loads(draft.files[RECORD_FILE]), "reference": draft.files[REFERENCE_FILE].decode()}, name
    )
    code = _reference_code(found, item, drawn, draft)
    if code in _WRONG:
        raise UsageError(
            f"{name}: the draft was not written, because {_WRONG[code]}. Its convention is not the one of {found.dialect}: "
            f"look at the names and the order of its inputs in {item.path}.",
            code="draft_differs",
        )
    if code != SAME:
        draft.left_out.append(("comparison of the reference", NOT_COMPARED))
    for one in found.of_kind("solution"):
        if one.definition == name:
            _compare_solution(found, one, adapted, drawn, draft)
    return draft


NOT_COMPARED = "the original does not run here on drawn inputs, so compare the draft with it yourself"


def _reference_code(found: DataSet, item: StoredRecord, definition: Definition, draft: Draft) -> int:
    text = item.record["reference"]
    sources = {ORIGINAL: text.encode(), REFERENCE_FILE: definition.reference.encode()}
    entry = (ORIGINAL, reference_entry(text), False)
    return _code(definition, draft, sources, entry, (REFERENCE_FILE, "run", False), found.dialect)


def _compare_solution(found: DataSet, item: StoredRecord, adapted: Adapted, drawn: Definition, draft: Draft) -> None:
    """Leave a Solution out of the draft if it computes something else than the original."""
    solution = adapted_solution(found, item, adapted)
    if isinstance(solution, str) or not solution.added_entry:
        return  # it is called exactly as its project calls it
    folder = f"solutions/{solution.record.name}"
    if folder not in draft.solutions:
        return
    spec, given = solution.record.spec, item.record["spec"]
    if spec.language != "python":
        draft.left_out.append((f"comparison of {item.name}", f"{spec.language} kernels are compared by 'verify' only"))
        return
    path, function = str(given["entry_point"]).split("::")
    entry = (path, function, bool(given["destination_passing_style"]))
    ours = (spec.entry_path, spec.entry_function, spec.destination_passing_style)
    definition = narrowed(drawn, spec.omits)
    code = _code(definition, draft, solution.sources, entry, ours, found.dialect)
    if code in _WRONG:
        draft.solutions.remove(folder)
        draft.files = {file: content for file, content in draft.files.items() if not file.startswith(f"{folder}/")}
        draft.left_out.append((f"solution {item.name}", _WRONG[code]))
    elif code != SAME:
        draft.left_out.append((f"comparison of {item.name}", NOT_COMPARED))


Entry = tuple[str, str, bool]
"""Path, function, and true if outputs are arguments."""


def _code(
    definition: Definition,
    draft: Draft,
    sources: Mapping[str, bytes],
    original: Entry,
    drafted: Entry,
    dialect: str,
) -> int:
    """Return the first result of a call for which the original runs, else ``ORIGINAL_FAILED``."""
    for axes, scalars in itertools.islice(_calls(definition, draft), MAX_CALLS):
        case = Case(Call(definition.name, axes, scalars=scalars), seed=SEED)
        outputs = {
            name: (definition.shape_of(name, axes), str(storage_dtype(spec.dtype)).removeprefix("torch."))
            for name, spec in definition.outputs.items()
        }
        lines = [
            f"from {code_of.__module__} import {Called.__name__}, {code_of.__name__}\n",
            f"from .{_module(original[0])} import {original[1]} as _original",
            f"from .{_module(drafted[0])} import {drafted[1]} as _draft\n\n",
            f"def run({', '.join(definition.inputs)}):",
            f"    inputs = {{{', '.join(f'{name!r}: {name}' for name in definition.inputs)}}}",
            f"    original = {Called.__name__}(_original, by_name={dialect in CALLED_BY_NAME}, writes={original[2]})",
            f"    draft = {Called.__name__}(_draft, by_name=False, writes={drafted[2]})",
            f"    return {code_of.__name__}(original, draft, inputs, {outputs!r}, {dict(definition.in_place)!r})\n",
        ]
        code = _run(definition, {**sources, COMPARE: "\n".join(lines).encode()}, case)
        if code != ORIGINAL_FAILED:
            return code
    return ORIGINAL_FAILED


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def _calls(definition: Definition, draft: Draft) -> Iterator[tuple[dict[str, int], dict[str, Scalar]]]:
    """Yield axes and scalars to call with: small sizes that the constraints allow, then those of the Workloads."""
    workloads = [Workload.from_json(line) for line in draft.files[WORKLOADS_FILE].splitlines()]
    examples: dict[str, Scalar] = {
        name: example_scalar(name, spec.dtype) for name, spec in definition.inputs.items() if spec.is_scalar
    }
    scalars = examples | (workloads[0].scalars() if workloads else {})
    tried = itertools.islice(itertools.product(SIZES, repeat=len(definition.var_axes)), MAX_TRIED)
    valid = (dict(zip(definition.var_axes, sizes, strict=True)) for sizes in tried)
    chosen = itertools.islice(filter(None, (_bound(definition, axes) for axes in valid)), 2)
    for axes in chosen:
        yield axes, scalars
    for workload in workloads:
        bound = _bound(definition, workload.axes)
        if bound is not None:
            yield bound, examples | workload.scalars()


def _bound(definition: Definition, axes: Mapping[str, int]) -> dict[str, int] | None:
    try:
        bound = definition.bind_axes(axes)
        shapes = [definition.shape_of(name, bound) for name in (*definition.tensor_inputs, *definition.outputs)]
    except RecordError:
        return None
    sizes = [_elements(shape) for shape in shapes]
    return bound if all(0 < size <= MAX_ELEMENTS for size in sizes) else None


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _run(definition: Definition, sources: Mapping[str, bytes], case: Case) -> int:
    value: dict[str, Any] = {
        "name": "comparison",
        "definition": definition.name,
        "author": "comparison",
        "spec": {"language": "python", "entry_point": f"{COMPARE}::run", "destination_passing_style": False},
        "sources": [{"path": path} for path in sources],
    }
    code = {"code": TensorSpec(shape=(), dtype="int32")}
    called = definition.model_copy(update={"outputs": code, "in_place": {}, "optional_outputs": ()})
    with scratch_folder() as scratch:
        try:
            inputs = draw_inputs(definition, case, "cpu")
            files = write_solution(Path(scratch, "source"), Solution.from_dict(value, "comparison"), sources)
        except RecordError:
            return ORIGINAL_FAILED
        with Confined(files, called, "cpu", Path(scratch, "worker"), interpret=False) as worker:
            if worker.load() is not None:
                return ORIGINAL_FAILED
            found = worker.call(OracleCase(case, inputs, {}, {}))
    return ORIGINAL_FAILED if isinstance(found, Failure) else int(found["code"])

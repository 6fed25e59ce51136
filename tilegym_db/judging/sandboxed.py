"""Run foreign references and Solutions in confined workers.

Our own references run in the main process because we reviewed them. Foreign references always run confined.

The second part compares a draft with the imported original before it is written. Both run in a confined worker, on drawn inputs.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tilegym_db.backends.toolchains import INTERPRETERS
from tilegym_db.catalog import SolutionFiles
from tilegym_db.catalog.record_files import write_solution
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.interchange.adapt import (
    CALLED_BY_NAME,
    ORIGINAL_TEXT,
    REFERENCE,
    Adapted,
    AdaptedSolution,
    Draft,
    adapted_definition,
    adapted_solution,
    draft_of,
    reference_entry,
)
from tilegym_db.judging.same_call import DIFFERENT, DRAFT_FAILED, ORIGINAL_FAILED, SAME, Called, code_of
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Definition, Solution, TensorSpec, Workload
from tilegym_db.records.call import Call
from tilegym_db.records.dtypes import FLOAT_DTYPES, Scalar
from tilegym_db.records.solution import narrowed
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.protocol import Reply, load_request
from tilegym_db.sandbox.shared_buffers import SharedBuffers, plan_slot, storage_dtype
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess, WorkerTimeout
from tilegym_db.scaffold.definition_draft import RECORD_FILE, REFERENCE_FILE, WORKLOADS_FILE, example_scalar
from tilegym_db.store.imported import DataSet, StoredRecord
from tilegym_db.verification.comparison import check_reference, reference_errors
from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import Lifted
from tilegym_db.verification.verifier import Failure, fill_slot, not_set_up, read_outputs, verify_slot

FIRST_CALL_S = 180.0
TIMED_CALLS = 7
ORACLE = "oracle.py"
_LIFTED = ("float32", "float16", "bfloat16")

Values = Mapping[str, torch.Tensor | Scalar]
Outputs = dict[str, torch.Tensor]


class Confined:
    """A context manager that runs one source in one worker."""

    def __init__(
        self, files: SolutionFiles, definition: Definition, device: str, folder: Path, *, interpret: bool
    ) -> None:
        """Start the worker. Call :meth:`load` to import the source."""
        self.files, self.definition, self.device = files, definition, device
        self.interpret = interpret
        environment = INTERPRETERS[files.record.spec.language].environment if interpret else {}
        self.worker = WorkerProcess(device, folder, environment, readable=files.folders)

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    @property
    def sandbox_level(self) -> int:
        """The isolation level of the worker."""
        return self.worker.sandbox_level

    def load(self) -> Failure | None:
        """Import the source in the worker; return the failure, if any."""
        reply = self._ask("prepare", profile=False)
        if isinstance(reply, Failure):
            return not_set_up(reply)
        reply = self._ask("load", **load_request(self.definition, self.files, interpret=self.interpret))
        return reply if isinstance(reply, Failure) else None

    def call(self, expected: OracleCase) -> Outputs | Failure:
        """Call the source once on the inputs of a case and return its outputs without checking them."""
        with SharedBuffers(plan_slot(self.definition, expected.case), 1, self.device) as buffers:
            reply = self._attach(buffers, expected.case)
            if isinstance(reply, Reply):
                fill_slot(buffers, 0, self.definition, expected, None)
                buffers.settle()
                reply = self._ask("call", slot=0)
            if isinstance(reply, Failure):
                return reply
            if reply.mismatch is not None:
                kind, what = reply.mismatch
                return Failure(
                    "INCORRECT_DTYPE" if kind == "dtype" else "INCORRECT_SHAPE", what, gate="shape", case=expected.case
                )
            outputs = read_outputs(buffers, 0, self.definition)
            self._ask("detach")
            return outputs

    def verify(self, expected: OracleCase, *, timed: bool) -> tuple[float | None, Failure | None]:
        """Apply every gate to one case, including poison, guard bands and repeats.

        Returns:
            The median time in microseconds if ``timed``, and the failure if a gate fails.
        """
        with SharedBuffers(plan_slot(self.definition, expected.case), 1, self.device) as buffers:
            reply = self._attach(buffers, expected.case)
            if isinstance(reply, Failure):
                return None, reply
            outcome = verify_slot(
                self.worker, buffers, 0, self.definition, self.files.record, expected, timeout_s=FIRST_CALL_S
            )
            if isinstance(outcome, Failure):
                return None, outcome
            latency = self._time() if timed else None
            self._ask("detach")
            return latency, None

    def _time(self) -> float | None:
        replies = [self._ask("time", slots=[0]) for _ in range(TIMED_CALLS)]
        times = [float(reply.content["device_us"][0]) for reply in replies if isinstance(reply, Reply)]
        return statistics.median(times) if len(times) == TIMED_CALLS else None

    def _attach(self, buffers: SharedBuffers, case: Case) -> Reply | Failure:
        return self._ask(
            "attach",
            descriptors=(buffers.descriptor,),
            buffers=buffers.to_message(),
            config={},
            scalars=[dict(case.call.scalars)],
        )

    def _ask(self, op: str, descriptors: tuple[int, ...] = (), **content: Any) -> Reply | Failure:
        try:
            reply = self.worker.request(op, timeout_s=FIRST_CALL_S, descriptors=descriptors, **content)
        except WorkerTimeout as error:
            return Failure("TIMEOUT", f"'{op}' did not finish within {FIRST_CALL_S:g} s", str(error))
        except WorkerDied as error:
            return Failure("RUNTIME_ERROR", f"during '{op}': {str(error).partition(chr(10))[0]}", str(error))
        if reply.ok:
            return reply
        return Failure(reply.failed_as, f"'{op}' raised: {reply.summary}", reply.error)


def prepare_solution(adapted: AdaptedSolution, folder: Path) -> SolutionFiles:
    """Write an adapted Solution into a folder that a worker can read."""
    return write_solution(folder, adapted.record, adapted.sources)


def prepare_oracle(definition: Definition, folder: Path, *, lifted: bool) -> tuple[SolutionFiles, Definition]:
    """Return a reference as a source that a worker can call, and the Definition of that call.

    If ``lifted``, every floating-point input, cast and output is float64, so that nothing is rounded.
    """
    sources = {REFERENCE: definition.reference.encode()}
    if lifted:
        sources[ORACLE] = _lifting(definition).encode()
    entry = ORACLE if lifted else REFERENCE
    value = {
        "name": definition.name,
        "definition": definition.name,
        "author": "reference",
        "spec": {"language": "python", "entry_point": f"{entry}::run", "destination_passing_style": False},
        "sources": [{"path": path} for path in sources],
    }
    record = Solution.from_dict(value, f"the reference of {definition.name}")
    # The function returns every output, so the Definition of the call has no in-place outputs.
    outputs = {
        name: spec.model_copy(update={"dtype": "float64"}) if lifted and spec.dtype in FLOAT_DTYPES else spec
        for name, spec in definition.outputs.items()
    }
    return write_solution(folder, record, sources), definition.model_copy(update={"outputs": outputs, "in_place": {}})


def _lifting(definition: Definition) -> str:
    names = ", ".join(definition.inputs)
    return (
        "import torch\n\n"
        f"from {Lifted.__module__} import {Lifted.__name__}\n\n"
        "from .reference import run as _run\n\n"
        f"_FLOATS = ({', '.join(f'torch.{name}' for name in _LIFTED)})\n\n\n"
        f"def run({names}):\n"
        f"    given = [{names}]\n"
        "    lifted = [v.double() if isinstance(v, torch.Tensor) and v.dtype in _FLOATS else v for v in given]\n"
        f"    with {Lifted.__name__}():\n"
        "        returned = _run(*lifted)\n"
        "    values = returned if isinstance(returned, tuple | list) else (returned,)\n"
        "    return tuple(v.double() if v.is_floating_point() else v for v in values)\n"
    )


def outputs_of(
    definition: Definition, case: Case, inputs: Values, device: str, folder: Path, *, lifted: bool
) -> Outputs | Failure:
    """Compute the outputs of a reference from these inputs, in a separate worker."""
    files, called = prepare_oracle(definition, folder, lifted=lifted)
    with Confined(files, called, device, folder.with_name(f"{folder.name}-worker"), interpret=False) as worker:
        failure = worker.load()
        return failure if failure is not None else worker.call(OracleCase(case, inputs, {}, {}))


def expected_by_reference(
    definition: Definition, case: Case, inputs: Values, device: str, folder: Path
) -> tuple[OracleCase, Outputs, str] | Failure:
    """Return the oracle's outputs, the outputs of the reference as written, and the name of the oracle.

    The oracle is ``fp64``, the reference in float64. It is ``as_written`` if the reference fails in float64, or if its
    outputs as written do not pass our gates against the float64 ones.
    """
    written = outputs_of(definition, case, inputs, device, folder / "as-written", lifted=False)
    if isinstance(written, Failure):
        return written
    truth = outputs_of(definition, case, inputs, device, folder / "lifted", lifted=True)
    if not isinstance(truth, Failure):
        e_base, _ = reference_errors(definition, case.call.dtypes, written, truth)
        verdicts = check_reference(definition, case.call.dtypes, inputs, truth, written, e_base)
        if all(verdict.passed for verdict in verdicts.values()):
            return OracleCase(case, inputs, truth, e_base), written, "fp64"
    return OracleCase(case, inputs, written, dict.fromkeys(written, EXACTLY)), written, "as_written"


# ---- Comparison of a draft with its original -------------------------------------------------------------

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
    text = item.record.get(ORIGINAL_TEXT) or item.record["reference"]
    sources = {ORIGINAL: text.encode(), REFERENCE_FILE: definition.reference.encode()}
    entry = (ORIGINAL, ORIGINAL_TEXT if ORIGINAL_TEXT in item.record else reference_entry(text), False)
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
    """Return the result of the first call that the original can run; ``ORIGINAL_FAILED`` if it runs none."""
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

"""Verify Solutions of imported data sets with our sandbox, inputs and gates, and report the data set's own tolerance too.

Parts: comparison of our verdicts with those of the data set; inputs for foreign Workloads; foreign tolerance rules;
the stored judgements.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tilegym_db.backends.toolchains import interpreted_here, toolchain_status
from tilegym_db.catalog import SolutionFiles
from tilegym_db.catalog.reader import Catalog
from tilegym_db.catalog.record_files import RECORD_NAME
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import write_atomically
from tilegym_db.interchange import sol_execbench
from tilegym_db.interchange.adapt import (
    WIDE_INTEGERS,
    Adapted,
    AdaptedSolution,
    adapted_definition,
    adapted_solution,
    base_of,
    blob_of,
    imported_tag,
    native_name,
    origin_tag,
    why_not_by_element,
)
from tilegym_db.judging.sandboxed import Confined, expected_by_reference, prepare_solution
from tilegym_db.measurement.machine import Machine
from tilegym_db.paths import scratch_folder
from tilegym_db.published.input_files import imported_folder
from tilegym_db.records import Definition, Trace
from tilegym_db.records.call import Call
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.expressions import Unknown, holds
from tilegym_db.records.hardware import CPU
from tilegym_db.records.solution import narrowed
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.processes import free_memory
from tilegym_db.sandbox.scan import hard_findings, scan_sources
from tilegym_db.sandbox.shared_buffers import storage_dtype
from tilegym_db.store.imported import DataSet, StoredRecord, import_lock
from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.verifier import Failure

MAY_LACK_OUTPUTS = ("INCORRECT_SHAPE", "RUNTIME_ERROR")
"""Statuses of a call that may have returned fewer outputs than the Definition has.

Such a call fails by itself or in the entry point that the adapter added.
"""


@dataclass(frozen=True)
class _Task:
    found: DataSet
    definition: StoredRecord
    adapted: Adapted
    workload: Mapping[str, Any]
    base: str
    machine: Machine


def judge_data_set(
    found: DataSet,
    machine: Machine,
    *,
    names: Sequence[str] = (),
    limit: int | None = None,
    observer: Callable[[Judgement], None] = lambda judgement: None,
) -> list[Judgement]:
    """Run each Solution of a data set on the Workloads of its Definition.

    Args:
        limit: maximum number of Workloads per Definition, taken in order.
    """
    judgements: list[Judgement] = []
    workloads = workloads_of(found)
    for definition in found.of_kind("definition"):
        solutions = [
            item
            for item in found.of_kind("solution")
            if item.definition == definition.name and (not names or {item.name, item.definition} & set(names))
        ]
        if not solutions:
            continue
        chosen = workloads.get(definition.name, [])[:limit]
        # Our gates compare element by element. If that cannot decide about a Definition, its Solutions are not run.
        adapted = why_not_by_element(found.dialect, definition) or adapted_definition(found, definition)
        for workload, base in chosen:
            batch: Iterable[Judgement]
            if isinstance(adapted, str):
                batch = (_not_run(item, workload, machine, adapted) for item in solutions)
            else:
                batch = _judge_workload(_Task(found, definition, adapted, workload, base, machine), solutions)
            for judgement in batch:
                observer(judgement)
                judgements.append(judgement)
    return judgements


def workloads_of(found: DataSet) -> dict[str, list[tuple[Mapping[str, Any], str]]]:
    """Return the Workloads of each Definition, each with the folder that its tensor paths are relative to.

    Workloads that appear only in traces come last.
    """
    workloads: dict[str, dict[str, tuple[Mapping[str, Any], str]]] = {}
    for item in (*found.of_kind("workload"), *found.of_kind("trace")):
        record = item.record["workload"] if item.kind == "trace" else item.record
        workloads.setdefault(item.definition, {}).setdefault(item.name, (record, base_of(found, item)))
    return {name: list(items.values()) for name, items in workloads.items()}


def _not_run(item: StoredRecord, workload: Mapping[str, Any], machine: Machine, reason: str) -> Judgement:
    return Judgement(item.definition, item.name, workload["uuid"], machine.gpu, NOT_RUN, reason)


def _judge_workload(task: _Task, solutions: Sequence[StoredRecord]) -> Iterable[Judgement]:
    """Yield the judgement of every Solution, all on the same inputs."""
    seed = secrets.randbits(62)
    definition = task.adapted.definition
    with scratch_folder() as scratch:
        folder = Path(scratch)
        try:
            axes = _own_axes(task)
            _check_memory(definition, axes, task.machine.device)
            inputs = draw_contents(task.found, definition, task.workload, seed, task.machine.device, task.base)
            unchecked = _check_constraints(task, inputs)
            scalars = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
            case = Case(Call(definition.name, definition.bind_axes(axes), scalars=scalars), seed=seed)
        except (RecordError, StoreError) as error:
            yield from (_not_run(item, task.workload, task.machine, str(error)) for item in solutions)
            return
        given = expected_by_reference(definition, case, inputs, task.machine.device, folder / "reference")
        if isinstance(given, Failure):
            reason = f"the reference does not run: {given.reason}"
            yield from (_not_run(item, task.workload, task.machine, reason) for item in solutions)
            return
        for number, item in enumerate(solutions):
            yield _judge_solution(task, item, given, folder / str(number), unchecked)


def _check_memory(definition: Definition, axes: Mapping[str, int], device: str) -> None:
    """Refuse contents larger than the memory: on a CPU, the kernel would end this process instead of the allocation."""
    needed, bound = 0, definition.bind_axes(axes)
    # A tensor lies here, in memory shared with the worker, and in the copy that shows what a call wrote.
    for name in definition.tensor_inputs:
        needed += 3 * _elements(definition, name, bound) * storage_dtype(definition.inputs[name].dtype).itemsize
    for name, spec in definition.outputs.items():  # the truth is in float64
        needed += _elements(definition, name, bound) * (3 * storage_dtype(spec.dtype).itemsize + 8)
    available = free_memory() if device == CPU else torch.cuda.mem_get_info(device)[1]
    if needed > available:
        raise StoreError(
            f"its contents take at least {needed / 1e9:.1f} GB of memory, and there are {available / 1e9:.1f} GB.",
            code="memory_short",
        )


def _elements(definition: Definition, name: str, axes: Mapping[str, int]) -> int:
    return math.prod(definition.shape_of(name, axes))


def _check_constraints(task: _Task, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the constraints that could not be evaluated; raise if the inputs break one."""
    unchecked = []
    for text in task.adapted.tensor_constraints:
        try:
            if not holds(text, {**task.adapted.definition.bind_axes(_own_axes(task)), **inputs}):
                raise RecordError(f"the contents break the constraint {text}.", code="content_constraint_broken")
        except Unknown:
            unchecked.append(text)
    return tuple(unchecked)


def _own_axes(task: _Task) -> dict[str, int]:
    return {name: size for name, size in task.workload["axes"].items() if name in task.adapted.definition.axes}


def _judge_solution(
    task: _Task,
    item: StoredRecord,
    given: tuple[OracleCase, Mapping[str, Any], str],
    folder: Path,
    unchecked: tuple[str, ...],
) -> Judgement:
    machine, definition = task.machine, task.adapted.definition
    adapted = adapted_solution(task.found, item, task.adapted)
    if isinstance(adapted, str):
        return _not_run(item, task.workload, machine, adapted)
    language = adapted.record.spec.language
    status = toolchain_status(language)
    interpret = interpreted_here(language, on_gpu=machine.is_gpu)
    if not status.available:
        return _not_run(
            item, task.workload, machine, f"{language} cannot be used here: {status.detail}. Fix: {status.fix}"
        )
    own = {
        path: content
        for path, content in adapted.sources.items()
        if path in {s["path"] for s in item.record["sources"]}
    }
    refused = hard_findings(scan_sources(adapted.record, own))
    if refused:
        first = refused[0]
        return Judgement(
            **_common(task, item, adapted, given), status="REJECTED", unchecked=unchecked, gate=first.rule,
            reason=f"{first.path}:{first.line}: {first.message}",
        )  # fmt: skip
    judgement = _judge_adapted(task, item, adapted, given, folder, interpret=interpret)
    for omits in _fewer(item, definition) if judgement.status in MAY_LACK_OUTPUTS else ():
        fewer = adapted_solution(task.found, item, task.adapted, omits)
        assert not isinstance(fewer, str)
        folder = folder.with_name(f"{folder.name}-{len(omits)}-fewer")
        again = _judge_adapted(task, item, fewer, given, folder, interpret=interpret)
        if again.status not in MAY_LACK_OUTPUTS:
            judgement = again
            break
    return replace(judgement, unchecked=unchecked)


def _fewer(item: StoredRecord, definition: Definition) -> list[tuple[str, ...]]:
    """Return the sets of optional outputs that a Solution may omit: the last one, the last two, and so on.

    Only a Solution that returns its outputs may omit some.
    """
    if item.record["spec"]["destination_passing_style"]:
        return []  # its parameters name its outputs
    optional = definition.optional_outputs
    return [optional[-count:] for count in range(1, len(optional) + 1)]


def _common(
    task: _Task, item: StoredRecord, adapted: AdaptedSolution, given: tuple[OracleCase, Mapping[str, Any], str]
) -> dict[str, Any]:
    return {
        "definition": item.definition, "solution": item.name, "workload": task.workload["uuid"],
        "gpu": task.machine.gpu, "oracle": given[2], "seed": str(given[0].case.seed), "adapted": adapted.added_entry,
        "omits": adapted.record.spec.omits,
    }  # fmt: skip


def _judge_adapted(
    task: _Task,
    item: StoredRecord,
    adapted: AdaptedSolution,
    given: tuple[OracleCase, Mapping[str, Any], str],
    folder: Path,
    *,
    interpret: bool,
) -> Judgement:
    """Run one Solution in the sandbox and return the judgement.

    A Solution that omits outputs is not timed, because no other Solution computes the same outputs.
    """
    expected, written, _ = given
    omits = adapted.record.spec.omits
    definition, common = narrowed(task.adapted.definition, omits), _common(task, item, adapted, given)
    files = _prepared(adapted, item, folder / "source")
    if isinstance(files, str):
        return _not_run(item, task.workload, task.machine, files)
    with Confined(files, definition, task.machine.device, folder / "worker", interpret=interpret) as worker:
        failure = worker.load()
        if failure is not None:
            return Judgement(**common, status=failure.status, reason=failure.reason)
        common["sandbox_level"] = worker.sandbox_level
        outputs = worker.call(expected)
        if isinstance(outputs, Failure):
            return Judgement(**common, status=outputs.status, reason=outputs.reason, gate=outputs.gate)
        common |= _by_rule(task, outputs, {name: written[name] for name in outputs})
        latency, failure = worker.verify(expected, timed=not interpret and not omits)
    if failure is not None:
        return Judgement(**common, status=failure.status, reason=failure.reason, gate=failure.gate)
    reason = f"without {', '.join(omits)}, which is optional" if omits else ""
    return Judgement(**common, status="PASSED", latency_us=latency, reason=reason)


def _prepared(adapted: AdaptedSolution, item: StoredRecord, folder: Path) -> SolutionFiles | str:
    """Return a Solution that a worker can load, or the reason it cannot be prepared.

    A reason is returned rather than raised, so that one bad Solution does not stop the others.
    """
    try:
        return prepare_solution(adapted, folder)
    except RecordError as error:
        # The error names the worker's copy. The user needs the path in the data set.
        return f"{item.path}: {str(error).removeprefix(f'{folder / RECORD_NAME}: ')}"
    except OSError as error:
        return f"{item.path}: its sources cannot be written side by side: {error.strerror or error}"


def _by_rule(task: _Task, outputs: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Check outputs against the data set's own reference with the data set's own tolerance."""
    rule = rule_for(task.found.dialect, task.definition, task.workload)
    if not isinstance(rule, ForeignRule):
        return {"rule_reason": rule}
    problem = rule.problem(outputs, written)
    return {"rule": rule.name, "rule_passed": problem is None, "rule_reason": problem or ""}


# ---- Comparison with foreign verdicts ----------------------------------------------------------------
# Foreign measurements are shown beside ours and never ranked with them.

PairKey = tuple[str, str, str]
"""Names of a Definition, a Solution and a Workload in the data set."""


@dataclass(frozen=True)
class ComparedPair:
    """The verdicts of the data set and of this machine on one Solution and Workload."""

    definition: str
    solution: str
    workload: str
    foreign_status: str | None
    """Status of the newest trace in the data set; None without a trace."""
    foreign_hardware: str | None
    foreign_latency_us: float | None
    ours: Judgement | None
    verified_status: str | None = None
    """Status of the newest trace of the Solution that was added to the catalog from a draft.

    The trace is a verified pass or a failure. None without such a trace.
    """
    verified_gpu: str | None = None
    verified_latency_us: float | None = None

    @property
    def agreement(self) -> str:
        """``agree``, ``we fail it``, ``they fail it``, or the reason that there is no comparison.

        A trace takes precedence over a judgement.
        """
        status = self.verified_status or (None if self.ours is None else self.ours.status)
        if status is None:
            return "not judged here"
        if status == NOT_RUN:
            return "not run here"
        if self.foreign_status is None:
            return "no foreign verdict"
        they, we = self.foreign_status == "PASSED", status == "PASSED"
        return "agree" if they == we else "we fail it" if they else "they fail it"


def verified_pairs(found: DataSet, catalog: Catalog, traces: Iterable[Trace]) -> dict[PairKey, Trace]:
    """Return the newest trace of each pair of a data set whose Definition was added to the catalog from a draft."""
    names: dict[tuple[str, str, str], PairKey] = {}
    for item in found.of_kind("definition"):
        record = catalog.definitions.get(native_name(item.name))
        if record is None or origin_tag(found) not in record.tags:
            continue
        uuids = {tag: workload.uuid for workload in catalog.workloads_for(record.name) for tag in workload.tags}
        solutions = [solution.name for solution in found.of_kind("solution") if solution.definition == item.name]
        for workload in found.of_kind("workload"):
            uuid = uuids.get(imported_tag(workload))
            if uuid is None or workload.definition != item.name:
                continue
            for solution in solutions:
                names[record.name, native_name(solution), uuid] = (item.name, solution, workload.name)
    keyed = ((names.get((trace.definition, trace.solution, trace.workload_uuid)), trace) for trace in traces)
    return {key: trace for key, trace in keyed if key is not None}


def compared(
    found: DataSet, judgements: Sequence[Judgement], verified: Mapping[PairKey, Trace] | None = None
) -> list[ComparedPair]:
    """Return every pair with a verdict from either side, in the order of the data set."""
    verified = verified or {}
    foreign: dict[PairKey, Mapping[str, Any]] = {}
    for item in found.of_kind("trace"):
        foreign[item.definition, item.record["solution"], item.name] = item.record[
            "evaluation"
        ]  # the lines are in time order, so the newest one stays
    ours = {(item.definition, item.solution, item.workload): item for item in judgements}
    pairs = []
    for key in dict.fromkeys([*foreign, *ours, *verified]):
        trace = verified.get(key)
        evaluation = foreign.get(key)
        performance = (evaluation or {}).get("performance") or {}
        latency = performance.get("latency_ms") or None
        pairs.append(
            ComparedPair(
                *key,
                foreign_status=evaluation["status"] if evaluation else None,
                foreign_hardware=evaluation["environment"]["hardware"] if evaluation else None,
                foreign_latency_us=latency * 1e3 if latency else None,
                ours=ours.get(key),
                verified_status=trace.status if trace else None,
                verified_gpu=trace.gpu if trace else None,
                verified_latency_us=trace.performance.latency_us if trace and trace.performance else None,
            )
        )
    return pairs


def summary(pairs: Sequence[ComparedPair]) -> dict[str, int]:
    """Count the pairs by agreement."""
    return dict(Counter(pair.agreement for pair in pairs).most_common())


# ---- Inputs of foreign Workloads ---------------------------------------------------------------------
# Inputs are drawn as the foreign project draws them, or read from its tensor files.


def draw_contents(
    found: DataSet, definition: Definition, workload: Mapping[str, Any], seed: int, device: str, base: str = ""
) -> dict[str, torch.Tensor | Scalar]:
    """Return the inputs of a Workload by name, in the Definition's order: contiguous tensors or numbers.

    Args:
        seed: seed of the random inputs, because the data set stores none. Equal seeds give equal inputs on one kind of
            device.
    """
    axes = definition.bind_axes({name: size for name, size in workload["axes"].items() if name in definition.axes})
    values: dict[str, torch.Tensor | Scalar] = {}
    for name, spec in definition.inputs.items():
        given = workload["inputs"].get(name, {"type": "random"})
        shape, dtype = definition.shape_of(name, axes), storage_dtype(spec.dtype)
        if given["type"] == "custom":
            raise RecordError(
                f"inputs.{name}: comes from a function of the reference, and an import does not call that function.",
                code="input_by_function",
            )
        if given["type"] == "scalar":
            values[name] = given["value"]
        elif spec.is_scalar:
            raise RecordError(
                f"inputs.{name}: is a Python scalar, but the workload gives no value.", code="scalar_missing"
            )
        elif given["type"] == "safetensors":
            values[name] = _read(found, name, given, shape, dtype, base).to(device)
        else:
            try:
                drawn = _random(spec.dtype, dtype, shape, _seed(seed, name), device)
            except RuntimeError as error:  # torch raises it if it cannot allocate this size
                first = str(error).partition("\n")[0]
                raise RecordError(
                    f"inputs.{name}: {list(shape)} {spec.dtype} cannot be drawn: {first}", code="inputs_not_drawable"
                ) from None
            is_probability = name == "probs" and definition.op_type == "sampling"
            values[name] = torch.softmax(drawn.float(), -1).to(dtype) if is_probability else drawn
    return values


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _random(name: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    if name == "bool":
        return torch.randint(0, 2, shape, generator=generator, device=device).to(torch.bool)
    if name in WIDE_INTEGERS:
        return torch.randint(WIDE_INTEGERS[name], 1024, shape, generator=generator, device=device).to(dtype)
    if not dtype.is_floating_point:
        low, high = (-128, 128) if dtype.is_signed else (0, 256)
        return torch.randint(low, high, shape, generator=generator, device=device).to(dtype)
    drawn = torch.randn(shape, generator=generator, device=device)
    return drawn.clamp(-2, 2).to(dtype) if name.startswith("float8") else drawn.to(dtype)


def _read(
    found: DataSet, name: str, given: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype, base: str
) -> torch.Tensor:
    path = blob_of(found, name, given["path"], base).path
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ImportError:
        raise RecordError(
            f"inputs.{name}: reading {path} needs safetensors: pip install safetensors.", code="package_missing"
        ) from None
    try:
        tensor: torch.Tensor = load(found.content(path))[given["tensor_key"]]
    except (SafetensorError, KeyError) as error:
        raise RecordError(f"inputs.{name}: {path} cannot be read: {error}.", code="blob_unreadable") from None
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise RecordError(
            f"inputs.{name}: {path} holds {list(tensor.shape)} {tensor.dtype}, but the definition says {list(shape)} {dtype}.",
            code="tensor_differs",
        )
    return tensor.contiguous()


# ---- Foreign tolerance rules -------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignRule:
    """A tolerance rule of another project.

    With ``both``, an element is wrong if it exceeds the absolute and the relative bound. Otherwise it is wrong if its error
    exceeds ``atol + rtol * |reference|``. ``share`` is the minimum share of correct elements, and ``cap`` the maximum error
    of any element.
    """

    name: str
    atol: float
    rtol: float
    share: float = 1.0
    both: bool = True
    cap: float | None = None
    negative_infinity: bool = False

    def problem(self, outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> str | None:
        """Return why outputs are wrong by this rule; None if they are correct."""
        for name, wanted in reference.items():
            reason = self._problem(outputs[name], wanted)
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def _problem(self, found: torch.Tensor, wanted: torch.Tensor) -> str | None:
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return f"has shape {list(found.shape)} and dtype {found.dtype}"
        a, b = found.double(), wanted.double()
        if self.negative_infinity:
            same = (a == -torch.inf) & (b == -torch.inf)
            a, b = a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)
        if bool(a.isinf().any()):
            return "has infinities"
        if bool(a.isnan().any()):
            return "has NaNs"
        if a.numel() == 0:
            return None
        error = (a - b).abs()
        if self.both:
            wrong = (error > self.atol) & (error / (b.abs() + 1e-8) > self.rtol)
        else:
            wrong = error > self.atol + self.rtol * b.abs()
        right = 1.0 - float(wrong.double().mean())
        if right < self.share:
            worst = float(error.max())
            return (
                f"{right:.4%} of elements are correct, and {self.share:.0%} must be; the maximum error is {worst:.3g}"
            )
        if self.cap is not None and float(error.max()) > self.cap:
            return f"the maximum error is {float(error.max()):.3g}, and {self.cap:g} is allowed"
        return None


def rule_for(dialect: str, definition: StoredRecord, workload: Mapping[str, Any]) -> ForeignRule | str:
    """Return the tolerance rule of a data set for a Definition, or the reason that it is unknown."""
    if dialect == sol_execbench.DIALECT:
        given = {**sol_execbench.TOLERANCE, **(workload.get("tolerance") or {})}
        return ForeignRule(
            "sol-execbench", given["max_atol"], given["max_rtol"], given["required_matched_ratio"], both=False,
            cap=given["max_error_cap"], negative_infinity=bool(given["allow_negative_inf"]),
        )  # fmt: skip
    reason = why_not_by_element(dialect, definition)
    if reason is not None:
        return reason
    if "moe_fp8_block_scale" in definition.name:
        return ForeignRule("flashinfer-bench low-bit", 1e-2, 1e-2, share=0.95)
    return ForeignRule("flashinfer-bench default", 1e-2, 1e-2)


# ---- Stored judgements -------------------------------------------------------------------------------
# Judgements are stored next to their data set. Only the newest per Solution, Workload and GPU is kept.

NOT_RUN = "NOT_RUN"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """Our verdict on one foreign Solution and Workload.

    ``status`` is a trace status, or ``NOT_RUN`` with a reason.
    """

    definition: str
    solution: str
    workload: str
    gpu: str
    status: str
    reason: str = ""
    gate: str | None = None
    oracle: str = ""
    rule: str = ""
    """Name of the data set's tolerance rule."""
    rule_passed: bool | None = None
    rule_reason: str = ""
    latency_us: float | None = None
    """Median of a few calls in one process, in microseconds. It is an estimate and ranks nothing."""
    sandbox_level: int = 0
    seed: str = ""
    adapted: bool = False
    """True if the adapter added an entry point. The time then includes that entry point and its copies."""
    unchecked: tuple[str, ...] = ()
    """Constraints that could not be evaluated on the inputs."""
    omits: tuple[str, ...] = ()
    """Optional outputs that the Solution omits. The others are verified, and no time is measured."""


def _path(found: DataSet) -> Path:
    return imported_folder(found.home) / found.dialect / found.name / "judgements.jsonl"


def keep_judgements(found: DataSet, judgements: Sequence[Judgement]) -> None:
    """Store judgements next to the data set; only the newest per Solution, Workload and GPU is kept."""
    with import_lock(found.home):
        known = {_key(item): item for item in (*kept_judgements(found), *judgements)}
        lines = [json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in known.values()]
        write_atomically(_path(found), "".join(lines).encode())


def kept_judgements(found: DataSet) -> list[Judgement]:
    """Read the stored judgements; skip unreadable lines with a warning."""
    path = _path(found)
    judgements = []
    # Do not use splitlines: it also splits at U+2028 and U+0085, which a reason may contain.
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            fields = json.loads(line)
            several = {name: tuple(fields[name]) for name in ("unchecked", "omits") if name in fields}
            judgements.append(Judgement(**{**fields, **several}))
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("%s:%d: left out: %s", path, number, error)
    return judgements


def _key(item: Judgement) -> tuple[str, str, str, str]:
    return item.definition, item.solution, item.workload, item.gpu

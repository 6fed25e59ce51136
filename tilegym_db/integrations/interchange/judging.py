"""Our verdict on foreign Solutions: their contents, our sandbox and gates, and their tolerance as a named rule beside them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tilegym_db.backends.toolchains import toolchain_status
from tilegym_db.bench.machine import Machine
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.integrations.interchange.adapt import (
    Adapted,
    AdaptedSolution,
    adapted_definition,
    adapted_solution,
    why_not_by_element,
)
from tilegym_db.integrations.interchange.foreign_blobs import base_of
from tilegym_db.integrations.interchange.foreign_inputs import draw_contents
from tilegym_db.integrations.interchange.foreign_rules import ForeignRule, rule_for
from tilegym_db.integrations.interchange.judgements import NOT_RUN, Judgement
from tilegym_db.integrations.interchange.sandboxed import Confined, expected_by_reference, prepare_solution
from tilegym_db.records import Definition
from tilegym_db.records.case import Case
from tilegym_db.records.content_constraints import Unknown, holds
from tilegym_db.records.omitted import narrowed
from tilegym_db.scratch import scratch_folder
from tilegym_db.store.imported import DataSet, StoredRecord
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.scan import hard_findings, scan_sources
from tilegym_db.verify.verifier import Failure
from tilegym_db.verify.worker.interpreters import interpreted_here

__all__ = ["judge_data_set"]

RECORD_FILE = "solution.json"
MAY_LACK_OUTPUTS = ("INCORRECT_SHAPE", "RUNTIME_ERROR")
"""How a call ends that returned fewer outputs than were asked for: by itself, or in the entry point that was added."""


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
    """Run the Solutions of a data set, each on the Workloads of its Definition.

    Args:
        found: an imported data set; nothing in it is changed.
        machine: the device.
        names: Definitions or Solutions; none means all.
        limit: at most so many Workloads per Definition, the first ones.
        observer: told of each judgement as it is made.
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
        # Our gates compare by element too: where that judges nothing, no Solution is run for a verdict.
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
    """Definition -> its Workloads with the folder that their tensors' paths start at; then those that only traces have."""
    workloads: dict[str, dict[str, tuple[Mapping[str, Any], str]]] = {}
    for item in (*found.of_kind("workload"), *found.of_kind("trace")):
        record = item.record["workload"] if item.kind == "trace" else item.record
        workloads.setdefault(item.definition, {}).setdefault(item.name, (record, base_of(found, item)))
    return {name: list(items.values()) for name, items in workloads.items()}


def _not_run(item: StoredRecord, workload: Mapping[str, Any], machine: Machine, reason: str) -> Judgement:
    return Judgement(item.definition, item.name, workload["uuid"], machine.gpu, NOT_RUN, reason)


def _judge_workload(task: _Task, solutions: Sequence[StoredRecord]) -> Iterable[Judgement]:
    """Every Solution on the same contents."""
    seed = secrets.randbits(62)
    definition = task.adapted.definition
    with scratch_folder() as scratch:
        folder = Path(scratch)
        try:
            inputs = draw_contents(task.found, definition, task.workload, seed, task.machine.device, task.base)
            unchecked = _check_constraints(task, inputs)
            scalars = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
            axes = {name: size for name, size in task.workload["axes"].items() if name in definition.axes}
            case = Case(definition.bind_axes(axes), {}, scalars, seed=seed)
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


def _check_constraints(task: _Task, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """The constraints that could not be evaluated; :class:`RecordError` where the contents break one that could."""
    unchecked = []
    for text in task.adapted.tensor_constraints:
        try:
            if not holds(text, {**task.adapted.definition.bind_axes(_own_axes(task)), **inputs}):
                raise RecordError(f"the contents break the constraint {text}.")
        except Unknown:
            unchecked.append(text)
    return tuple(unchecked)


def _own_axes(task: _Task) -> dict[str, int]:
    return {name: size for name, size in task.workload["axes"].items() if name in task.adapted.definition.axes}


def _judge_solution(
    task: _Task,
    item: StoredRecord,
    given: tuple[Expected, Mapping[str, Any], str],
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
    """What a Solution may have left out that returns its outputs: the last optional one, the last two, and so on."""
    if item.record["spec"]["destination_passing_style"]:
        return []  # its parameters have said so
    optional = definition.optional_outputs
    return [optional[-count:] for count in range(1, len(optional) + 1)]


def _common(
    task: _Task, item: StoredRecord, adapted: AdaptedSolution, given: tuple[Expected, Mapping[str, Any], str]
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
    given: tuple[Expected, Mapping[str, Any], str],
    folder: Path,
    *,
    interpret: bool,
) -> Judgement:
    """One Solution in the sandbox, by what it gives; one that omits an output has no time, since nothing is like it."""
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
    """A Solution that a worker can load, or why there is none: one bad Solution of a data set stops none of the others."""
    try:
        return prepare_solution(adapted, folder)
    except RecordError as error:
        # It names the copy that was made for the worker; whoever mends it looks for the file of the data set.
        return f"{item.path}: {str(error).removeprefix(f'{folder / RECORD_FILE}: ')}"
    except OSError as error:
        return f"{item.path}: its sources cannot be written side by side: {error.strerror or error}"


def _by_rule(task: _Task, outputs: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """What the other project's tolerance says of outputs, against its own reference as it is written."""
    rule = rule_for(task.found.dialect, task.definition, task.workload)
    if not isinstance(rule, ForeignRule):
        return {"rule_reason": rule}
    problem = rule.problem(outputs, written)
    return {"rule": rule.name, "rule_passed": problem is None, "rule_reason": problem or ""}

"""Records of this catalog as a FlashInfer-Trace dataset, so that both harnesses are given the same work.

flashinfer-bench knows no dtype variables, so that every dtype binding becomes a separate Definition. What its format
cannot say is refused with the reason, and then neither side measures it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition, Workload
from tilegym_db.records.dtypes import RECORD_DTYPES

LANGUAGES = ("python", "triton", "tilelang")
"""Those that both sides have."""
ENTRY_WITHOUT_OPTIONS = "without_options.py"
DTYPES = RECORD_DTYPES - {"uint8", "uint32", "float8_e8m0fnu"}
"""Those that they have a name for."""
NEEDED_GENERATORS = frozenset({"integers", "uniform"})
"""Of these inputs N(0, 1) is no stand-in; of angles and scales it is, since no kernel's time depends on them."""


@dataclass(frozen=True)
class Subset:
    """The Solutions and Workloads of one Definition that both sides can measure."""

    definition: Definition
    solutions: Sequence[SolutionFiles]
    workloads: Sequence[Workload]
    refused: Mapping[str, str] = field(default_factory=dict)
    """What was left out (a Definition's, Solution's or Workload's name) and why."""


def cannot_say(definition: Definition) -> str | None:
    """Return why a Definition has no counterpart in their format, or None."""
    if definition.in_place:
        return "it writes over an input, and their calls have no restored inputs"
    tensors = {**definition.inputs, **definition.outputs}
    for name, spec in tensors.items():
        for entry in spec.shape or ():
            if entry not in definition.axes:
                return f"the shape of '{name}' is an expression ({entry}), and theirs are names of axes"
        for dtype in definition.dtypes.get(spec.dtype, (spec.dtype,)):
            if dtype not in DTYPES:
                return f"'{name}' may be {dtype}, which they have no name for"
    for name, generator in definition.input_generators.items():
        if generator.kind in NEEDED_GENERATORS:
            return f"'{name}' must be drawn as {generator.kind}, and their random inputs are N(0, 1)"
    return None


def subset(
    definition: Definition, solutions: Sequence[SolutionFiles], workloads: Sequence[Workload], most: int | None = None
) -> Subset:
    """Return the measurable part of a Definition, with at most ``most`` Workloads, evenly spread over the list."""
    reason = cannot_say(definition)
    if reason is not None:
        return Subset(definition, (), (), {definition.name: reason})
    refused = {}
    for workload in workloads:
        if workload.layout_classes(definition):
            refused[workload.uuid] = "its tensors are strided, and their inputs are contiguous"
    kept = [workload for workload in workloads if workload.uuid not in refused]
    if most is not None and len(kept) > most:
        kept = [kept[number * len(kept) // most] for number in range(most)]
    for solution in solutions:
        if solution.record.spec.language not in LANGUAGES:
            refused[solution.name] = f"they have no {solution.record.spec.language}"
    chosen = [solution for solution in solutions if solution.name not in refused]
    return Subset(definition, chosen, kept, refused)


def their_name(name: str, dtypes: Mapping[str, str]) -> str:
    """Return the exported name of a dtype binding, such as ``rms_norm_bfloat16``."""
    return "_".join([name, *(dtypes[variable] for variable in sorted(dtypes))])


def their_definition(definition: Definition, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Return a Definition under one dtype binding, as they write it."""

    def tensors(names: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: {
                "shape": None if spec.shape is None else list(spec.shape),
                "dtype": dtypes.get(spec.dtype, spec.dtype),
            }
            for name, spec in names.items()
        }

    return {
        "name": their_name(definition.name, dtypes),
        "op_type": definition.op_type,
        "axes": {
            name: {"type": "const", "value": axis.value} if axis.type == "const" else {"type": "var"}
            for name, axis in definition.axes.items()
        },
        "inputs": tensors(definition.inputs),
        "outputs": tensors(definition.outputs),
        "constraints": [text for text in definition.constraints if _is_python(text)],
        "reference": definition.reference,
    }


def their_solution(solution: SolutionFiles, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Return a Solution for one dtype binding, its sources inline."""
    spec = solution.record.spec
    entry_point, sources = _without_options(solution)
    return {
        "name": their_name(solution.name, dtypes),
        "definition": their_name(solution.record.definition, dtypes),
        "author": solution.record.author,
        "spec": {
            "language": spec.language,
            "target_hardware": ["cuda"],
            "entry_point": entry_point,
            "destination_passing_style": spec.destination_passing_style,
        },
        "sources": [{"path": path, "content": source} for path, source in sources.items()],
    }


def _without_options(solution: SolutionFiles) -> tuple[str, dict[str, str]]:
    """Return (entry point, sources) without tunables, which FlashInfer-Bench counts as inputs and refuses."""
    sources = {path: source.decode() for path, source in solution.sources.items()}
    path, _, symbol = solution.record.spec.entry_point.partition("::")
    functions = [node for node in ast.parse(sources[path]).body if isinstance(node, ast.FunctionDef)]
    arguments = next(function.args for function in functions if function.name == symbol)
    if not arguments.kwonlyargs:
        return solution.record.spec.entry_point, sources
    names = ", ".join(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    module = ".".join(Path(path).with_suffix("").parts)
    entry = f"from .{module} import {symbol} as kernel\n\n\ndef {symbol}({names}):\n    return kernel({names})\n"
    return f"{ENTRY_WITHOUT_OPTIONS}::{symbol}", sources | {ENTRY_WITHOUT_OPTIONS: entry}


def their_workload(definition: Definition, workload: Workload) -> dict[str, Any]:
    """Return a Workload as the trace without a solution that it is there."""
    scalars = workload.scalars()
    inputs: dict[str, Any] = {
        name: {"type": "scalar", "value": scalars[name]} if spec.is_scalar else {"type": "random"}
        for name, spec in definition.inputs.items()
    }
    axes = {name: workload.axes[name] for name in definition.var_axes}
    return {
        "definition": their_name(definition.name, workload.dtypes),
        "workload": {"uuid": workload.uuid, "axes": axes, "inputs": inputs},
    }


def write_theirs(root: Path, subsets: Sequence[Subset]) -> int:
    """Write the dataset under ``root``, in their layout; return how many (solution, workload) pairs it holds."""
    pairs = 0
    for item in subsets:
        definition = item.definition
        bindings = {their_name("", workload.dtypes): workload.dtypes for workload in item.workloads}
        for dtypes in bindings.values():
            name = their_name(definition.name, dtypes)
            chosen = [solution for solution in item.solutions if accepts(solution, definition, dtypes)]
            workloads = [workload for workload in item.workloads if workload.dtypes == dtypes]
            pairs += len(chosen) * len(workloads)
            folder = Path(definition.op_type)
            _write(root / "definitions" / folder / f"{name}.json", json.dumps(their_definition(definition, dtypes)))
            lines = [json.dumps(their_workload(definition, workload)) + "\n" for workload in workloads]
            _write(root / "workloads" / folder / f"{name}.jsonl", "".join(lines))
            for solution in chosen:
                record = their_solution(solution, dtypes)
                place = Path(solution.record.author.replace("/", "_")) / folder / name
                _write(root / "solutions" / place / f"{record['name']}.json", json.dumps(record))
    return pairs


def write_ours(root: Path, subsets: Sequence[Subset]) -> None:
    """Write the same records as a catalog of ours under ``root``: byte for byte the sources that they are given."""
    for item in subsets:
        definition = item.definition
        folder = Path(definition.op_type)
        _write(root / "definitions" / folder / f"{definition.name}.json", definition.to_json())
        lines = [workload.to_json() + "\n" for workload in item.workloads]
        _write(root / "workloads" / folder / f"{definition.name}.jsonl", "".join(lines))
        for solution in item.solutions:
            place = root / "solutions" / folder / definition.name / solution.name
            _write(place / "solution.json", solution.record.to_json())
            for path, source in solution.sources.items():
                _write(place / path, source.decode())


def accepts(solution: SolutionFiles, definition: Definition, dtypes: Mapping[str, str]) -> bool:
    """Return True if the Solution is declared for these dtypes."""
    declared = solution.record.spec.dtypes
    return all(dtype in declared.get(variable, (dtype,)) for variable, dtype in dtypes.items())


def _is_python(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

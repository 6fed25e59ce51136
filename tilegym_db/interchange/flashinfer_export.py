"""Export the catalog and its verified traces as a FlashInfer-Trace data set.

What FlashInfer-Trace cannot express is left out with a reason or stored in ``tilegym_db/``, which FlashInfer-Bench does not
read. ``export.json`` has the origin of each record and what was left out. ``blobs.json`` has the sha256 and seed of each drawn
blob. ``evidence/<gpu>/<definition>.jsonl`` has the full trace behind each exported one, by the digest of its line. Parts: the
exported files; Definitions specialised by dtypes and constants; drawn inputs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.catalog.reader import find_blob
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.interchange.adapt import WIDE_INTEGERS
from tilegym_db.interchange.checks import FIB_DTYPES
from tilegym_db.interchange.collecting import SIDE_FILE
from tilegym_db.records import Config, Definition, Trace, Workload
from tilegym_db.records.call import forward_of
from tilegym_db.records.dtypes import STORED_BYTES
from tilegym_db.records.expressions import evaluate_int, names_in
from tilegym_db.records.solution import config_id, find_function, spell_config
from tilegym_db.records.workload import RandomInput, SafetensorsInput, ScalarInput

if TYPE_CHECKING:
    import torch


BASELINE = "baseline"
"""The author that FlashInfer-Bench compares others with. Here it marks the stock code of models."""
ADAPTER = "flashinfer_entry.py"
# FlashInfer-Trace has no status for rejected sources. An error is neither a pass nor a wrong result.
_STATUS = {"REJECTED": "RUNTIME_ERROR"}
_LANGUAGE = {"cutile": "python"}
EXTRA_DEPENDENCIES = {"cutile": ["cuda-tile"]}


def build_export(
    catalog: Catalog,
    traces: Sequence[Trace],
    op_type: str | None = None,
    blobs: BlobFolder | None = None,
    names: Collection[str] = (),
) -> Export:
    """Build a data set. Reads the catalog and writes nothing but blobs.

    Args:
        traces: verified traces and failures (:func:`tilegym_db.store.sharing.shareable_traces`).
        blobs: folder and limits for inputs that FlashInfer-Bench must not draw. Without it, Workloads that need such inputs are
            left out.
    """
    export = Export()
    by_definition: dict[str, list[Trace]] = {}
    for trace in traces:
        by_definition.setdefault(trace.definition, []).append(trace)
    exporters = [
        _Exporter(export, catalog, source, blobs)
        for source in catalog.definitions.values()
        if op_type in (None, source.op_type) and (not names or source.name in names)
    ]
    if blobs is not None:
        blobs.choose(blob for exporter in exporters for blob in exporter.wanted())
    for exporter in exporters:
        exporter.run(by_definition.get(exporter.source.name, []))
    export.seal()
    return export


class _Exporter:
    """The exporter of one Definition."""

    def __init__(self, export: Export, catalog: Catalog, source: Definition, blobs: BlobFolder | None) -> None:
        self.export, self.catalog, self.source, self.blobs = export, catalog, source, blobs
        self.solutions = {item.name: item for item in catalog.solutions_for(source.name)}
        self.workloads = catalog.workloads_for(source.name)
        self.items = specialised(source, self.workloads)
        self.said: dict[str, tuple[Specialised, dict[str, Any]]] = {}
        """The specialised Definition and the written form of each exported Workload, by uuid."""
        self.written: set[str] = set()

    def wanted(self) -> Iterator[Blob]:
        """Yield the blobs that the Workloads need, regardless of the size limits."""
        for item in self.items:
            for workload in self._workloads_of(item) if why_not(item) is None else ():
                blob = self._blob(item, workload)
                if isinstance(blob, Blob) and self._unsayable(workload) is None:
                    yield blob

    def _workloads_of(self, item: Specialised) -> list[Workload]:
        return [workload for workload in self.workloads if item.covers(workload.axes, workload.dtypes)]

    def run(self, traces: Sequence[Trace]) -> None:
        if not self.workloads:
            self.export.leave_out(
                f"definition {self.source.name}", "it has no workload to take dtypes and constants from"
            )
        for item in self.items:
            reason = why_not(item)
            if reason is None:
                self._definition(item)
            else:
                self.export.leave_out(f"definition {item.name}", reason)
        for trace in traces:
            self._trace(trace)

    def _definition(self, item: Specialised) -> None:
        export, op_type = self.export, self.source.op_type
        export.write_json(f"definitions/{op_type}/{item.name}.json", item.record())
        export.counts["definition"] += 1
        export.definitions[item.name] = {
            "definition": self.source.name,
            "version": self.source.version,
            "digest": self.source.digest,
            "dtypes": dict(item.dtypes),
            "constants": dict(item.constants),
        }
        mine = self._workloads_of(item)
        lines = []
        for workload in mine:
            written = self._workload(item, workload)
            if isinstance(written, str):
                export.leave_out(f"workload {workload.uuid} of {item.name}", written)
            else:
                self.said[workload.uuid] = (item, written)
                lines.append({"definition": item.name, "workload": written, "solution": None, "evaluation": None})
        export.write_lines(f"workloads/{op_type}/{item.name}.jsonl", lines)
        export.counts["workload"] += len(lines)
        for solution in self.solutions.values():
            omits = ", ".join(solution.record.spec.omits)
            if omits:
                export.leave_out(
                    f"solution {solution.name} for {item.name}",
                    f"it omits {omits}, which FlashInfer-Trace cannot express",
                )
            elif any(solution.record.unsupported(self.source.bind_axes(w.axes), item.dtypes) is None for w in mine):
                self._solution(item, solution, {})
            else:
                export.leave_out(f"solution {solution.name} for {item.name}", "it serves none of its workloads")

    def _solution(self, item: Specialised, solution: SolutionFiles, config: Config) -> str:
        """Write a Solution unless it is written already; return its exported name."""
        record = solution.record
        name = f"{record.name}_{item.suffix}"
        if config:
            name += f"_{hashlib.sha256(config_id(config).encode()).hexdigest()[:8]}"
        if name in self.written:
            return name
        self.written.add(name)
        spec = record.spec
        sources = [
            {"path": path, "content": content.decode() or "\n"} for path, content in sorted(solution.sources.items())
        ]
        entry = spec.entry_point
        if config or self.source.in_place or _has_options(solution):
            sources.append({"path": ADAPTER, "content": _adapter(self.source, solution, config)})
            entry = f"{ADAPTER}::run"
        author = BASELINE if record.name == self._baseline() else record.author
        value = {
            "name": name,
            "definition": item.name,
            "author": author,
            "spec": {
                "language": _LANGUAGE.get(spec.language, spec.language),
                "target_hardware": [*spec.target_hardware],
                "entry_point": entry,
                "dependencies": [*spec.dependencies, *EXTRA_DEPENDENCIES.get(spec.language, ())],
                "destination_passing_style": spec.destination_passing_style,
            },
            "sources": sources,
            "description": record.description or f"{record.name} of tilegym-db.",
        }
        self.export.write_json(f"solutions/{author}/{self.source.op_type}/{item.name}/{name}.json", value)
        self.export.counts["solution"] += 1
        self.export.solutions[name] = {
            "solution": record.name,
            "digest": solution.digest,
            "author": record.author,
            "language": spec.language,
            "role": spec.role,
            "provides": spec.provides,
            "config": dict(config),
            "constraints": [*spec.constraints],
            "adapted": entry != spec.entry_point,
        }
        return name

    def _baseline(self) -> str | None:
        """Return the Solution that is exported with the author ``baseline``."""
        stock = stock_of(self.solutions.values())
        return None if stock is None else stock.name

    def _trace(self, trace: Trace) -> None:
        what = f"trace {trace.trace_id}"
        solution, said = self.solutions.get(trace.solution), self.said.get(trace.workload_uuid)
        if said is None or solution is None:
            self.export.leave_out(what, "its workload or its solution is not in the export")
        elif trace.status == "UNSUPPORTED":
            self.export.leave_out(what, "FlashInfer-Trace has no status for UNSUPPORTED")
        else:
            item, workload = said
            name = self._solution(item, solution, trace.config)
            author = BASELINE if trace.solution == self._baseline() else solution.record.author
            line = {
                "definition": item.name,
                "workload": workload,
                "solution": name,
                "evaluation": _evaluation(trace, is_baseline=author == BASELINE),
            }
            path = f"traces/{author}/{self.source.op_type}/{item.name}.jsonl"
            (written,) = self.export.write_lines(path, [line])
            evidence = {"line_sha256": hashlib.sha256(written).hexdigest(), "trace": trace.to_dict()}
            self.export.write_lines(f"tilegym_db/evidence/{trace.gpu}/{self.source.name}.jsonl", [evidence])
            self.export.counts["trace"] += 1

    # -- Workloads ----------------------------------------------------------------------------------------------------

    def _unsayable(self, workload: Workload) -> str | None:
        """Return why FlashInfer-Trace cannot express a Workload, apart from its contents; None if it can."""
        strided = workload.layout_classes(self.source)
        if strided:
            return f"'{min(strided)}' is not contiguous, and FlashInfer-Trace has no layouts"
        for name, given in workload.inputs.items():
            if isinstance(given, ScalarInput) and not isinstance(given.value, bool | int | float):
                return f"the scalar '{name}' is {given.value!r}, and FlashInfer-Trace has numbers only"
            if isinstance(given, SafetensorsInput):
                try:
                    find_blob(self.catalog.roots, name, given)
                except RecordError as error:
                    return str(error)
        return None

    def _blob_folder(self, item: Specialised) -> str:
        return f"blob/workloads/{self.source.op_type}/{item.name}"

    def _blob(self, item: Specialised, workload: Workload) -> Blob | str | None:
        """Return the blob that a Workload needs, or why that cannot be determined."""
        try:
            return blob_of(self.source, workload, dict(item.dtypes), self._blob_folder(item), item.name)
        except RecordError as error:
            return str(error)

    def _workload(self, item: Specialised, workload: Workload) -> dict[str, Any] | str:
        """Return the exported form of a Workload, or why it cannot be exported."""
        reason = self._unsayable(workload)
        if reason is not None:
            return reason
        blob = self._blob(item, workload)
        held: dict[str, Any] = {}
        if isinstance(blob, Blob):
            reason = self._draw(blob)
            held = {name: {"type": "safetensors", "path": blob.path, "tensor_key": name} for name in blob.names}
        elif blob is not None:
            reason = blob
        if reason is not None:
            return reason
        inputs: dict[str, Any] = {}
        for name in self.source.inputs:
            given = workload.inputs.get(name)
            match given:
                case ScalarInput():
                    inputs[name] = {"type": "scalar", "value": given.value}
                case SafetensorsInput():
                    path = f"{self._blob_folder(item)}/{given.path}"
                    self.export.blobs[path], _ = find_blob(self.catalog.roots, name, given)
                    inputs[name] = {"type": "safetensors", "path": path, "tensor_key": given.tensor_key}
                case _:
                    inputs[name] = held.get(name, {"type": "random"})
            if name not in held:
                self._note_drawing(name, given)
        return {"axes": item.var_axes(workload.axes), "inputs": inputs, "uuid": workload.uuid}

    def _draw(self, blob: Blob) -> str | None:
        """Draw a blob into the export, or return why it is left out."""
        if self.blobs is None:
            return blob.reason
        if blob.path in self.blobs.refused:
            return self.blobs.refused[blob.path]
        try:
            self.export.drawn[blob.path], self.export.told_blobs[blob.path] = self.blobs.write(blob, self.catalog.roots)
        except RecordError as error:
            return str(error)
        return None

    def _note_drawing(self, name: str, given: object) -> None:
        generator = self.source.input_generators.get(name)
        if isinstance(given, RandomInput) and (given.scale != 1.0 or given.seed is not None):
            self.export.notes[f"{self.source.name}.{name}"] = (
                f"drawn with scale {given.scale} here, and at random there"
            )
        elif generator is not None and not isinstance(given, SafetensorsInput):
            self.export.notes[f"{self.source.name}.{name}"] = (
                f"drawn by the generator {generator.kind} here, and at random there"
            )


def _has_options(solution: SolutionFiles) -> bool:
    """Return True if the entry point has optional parameters, which FlashInfer-Bench refuses because it counts parameters."""
    spec = solution.record.spec
    function = find_function(solution.sources[spec.entry_path], spec.entry_function)
    return function is None or bool(function.args.kwonlyargs or function.args.defaults)


def _adapter(source: Definition, solution: SolutionFiles, config: Config) -> str:
    """Return an entry point that sets a config, hides tunables, or turns outputs written over inputs into separate ones."""
    spec = solution.record.spec
    module = spec.entry_path.removesuffix(".py").replace("/", ".")
    keywords = "".join(f", {name}={value!r}" for name, value in config.items())
    inputs = ", ".join(source.inputs)
    lines = [
        f'"""{solution.name} of tilegym-db as FlashInfer-Bench calls it, with {spell_config(config)}."""\n',
        f"from .{module} import {spec.entry_function} as _entry\n\n",
    ]
    if spec.destination_passing_style:
        lines.append(f"def run({inputs}, {', '.join(source.outputs)}):")
        lines += [f"    {target}.copy_({name})" for name, target in source.in_place.items()]
        given = [source.in_place.get(name, name) for name in source.inputs]
        lines.append(f"    _entry({', '.join([*given, *source.written_outputs])}{keywords})\n")
        return "\n".join(lines)
    lines.append(f"def run({inputs}):")
    lines += [f"    {name} = {name}.clone()" for name in source.in_place]
    if not source.in_place:
        return "\n".join([*lines, f"    return _entry({inputs}{keywords})\n"])
    return "\n".join([*lines, f"    returned = _entry({inputs}{keywords})", returned_outputs(source)])


def _evaluation(trace: Trace, *, is_baseline: bool) -> dict[str, Any]:
    status = _STATUS.get(trace.status, trace.status)
    reason = f"{trace.status} by tilegym-db: {trace.reason}" if trace.status != "PASSED" else ""
    performance = trace.performance
    correctness = trace.correctness
    evaluation: dict[str, Any] = {
        "status": status,
        "environment": {
            "hardware": trace.gpu_name or trace.gpu,
            "libs": {**trace.libs, "driver": trace.driver, "cuda": trace.cuda},
        },
        "timestamp": trace.timestamp.isoformat(),
        "log": "\n".join(part for part in (reason, trace.log) if part),
        "correctness": None,
        "performance": None,
    }
    if correctness is not None and status in ("PASSED", "INCORRECT_NUMERICAL"):
        figures = correctness.model_dump(mode="json", exclude={"max_abs"}, exclude_none=True)
        evaluation["correctness"] = {
            "max_relative_error": "NaN" if correctness.worst_row_rel is None else correctness.worst_row_rel,
            "max_absolute_error": "NaN" if correctness.max_abs is None else correctness.max_abs,
            "extra": figures,
        }
    if performance is not None and status == "PASSED":
        stock = [item.ratio for item in performance.comparisons if item.provides == "stock"]
        ratio = min(stock) if stock else 1.0 if is_baseline else 0.0
        latency = performance.latency_us / 1e3
        evaluation["performance"] = {
            "latency_ms": latency,
            "reference_latency_ms": latency * ratio,
            "speedup_factor": ratio,
        }
    return evaluation


# ---- Exported files -----------------------------------------------------------------------------------


@dataclass
class Export:
    """The files of a data set by path, and the (item, reason) pairs of what was left out."""

    files: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, Path] = field(default_factory=dict)
    """Files to copy, by path in the export."""
    drawn: dict[str, Path] = field(default_factory=dict)
    """Drawn files to copy, by path in the export."""
    told_blobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Side-file entries of drawn blobs, by path in the export."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    definitions: dict[str, dict[str, Any]] = field(default_factory=dict)
    solutions: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("definition", "solution", "workload", "trace", "blob"), 0)
    )

    def leave_out(self, what: str, reason: str) -> None:
        """Record why something is left out."""
        self.left_out.append((what, reason))

    def write_json(self, path: str, value: Any) -> None:
        """Add a record as a JSON file."""
        self.files[path] = (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def write_lines(self, path: str, values: Iterable[Any]) -> list[bytes]:
        """Append records as lines to a file and return the lines."""
        spell = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        lines = [spell(value).encode() for value in values]
        if lines:
            self.files[path] = self.files.get(path, b"") + b"".join(line + b"\n" for line in lines)
        return lines

    def seal(self) -> None:
        """Add the files that describe the export: counts, origins, and what was left out."""
        self.counts["blob"] = len(self.blobs) + len(self.drawn)
        if self.told_blobs:
            about = "drawn by tilegym-db on the CPU, each from its seed; an import refuses a blob whose sha256 differs"
            self.write_json(SIDE_FILE, {"about": about, "blobs": self.told_blobs})
        self.write_json(
            "tilegym_db/export.json",
            {
                "counts": self.counts,
                "reference_latency_ms": "the time of the model's own code (stock), in the same rounds; 0 where there was none",
                "max_relative_error": "the norm of a row's error over that row's norm, the worst row; NaN where it was not taken",
                "definitions": self.definitions,
                "solutions": self.solutions,
                "notes": self.notes,
                "left_out": [{"what": what, "reason": reason} for what, reason in self.left_out],
            },
        )


# ---- Specialised Definitions --------------------------------------------------------------------------
# Export one Definition per dtype binding and per tuple of constants, because FlashInfer-Bench has neither dtype
# variables nor expressions in shapes.
#
# FlashInfer-Bench reads the variable axes of a call from the shapes of its input tensors. An axis therefore stays
# variable only if it is an entry of an input's shape, no output needs an expression of it that no input has, and it
# is not a constant of models. Constants are the last dimension of a tensor, and axes that never change within a model
# whose other axes do.


@dataclass(frozen=True)
class Specialised:
    """A Definition with bound dtypes and constants."""

    source: Definition
    name: str
    dtypes: Mapping[str, str]
    constants: Mapping[str, int]

    @property
    def suffix(self) -> str:
        """The part of the name that distinguishes it from others of the same Definition."""
        return self.name.removeprefix(f"{self.source.name}_")

    def covers(self, axes: Mapping[str, int], dtypes: Mapping[str, str]) -> bool:
        """Return True if a call of the Definition has these dtypes and constants."""
        bound = self.source.bind_axes(axes)
        same = all(bound[name] == size for name, size in self.constants.items())
        return same and self.source.bind_dtypes(dtypes) == dict(self.dtypes)

    def axis_of(self, entry: str | int) -> tuple[str, dict[str, Any]]:
        """Return the name and declaration of the axis for an entry of a shape."""
        if isinstance(entry, int):
            return f"n{entry}", {"type": "const", "value": entry, "description": f"The number {entry}."}
        text = entry.strip()
        axes, _ = names_in(text)
        if text in self.source.axes:
            description = self.source.axes[text].description or f"Axis {text} of {self.source.name}."
            if text in self.constants:
                return text, {"type": "const", "value": self.constants[text], "description": description}
            return text, {"type": "var", "description": description}
        name = (
            "n" + re.sub(r"\W+", "_", text).strip("_") if text[:1].isdigit() else re.sub(r"\W+", "_", text).strip("_")
        )
        if axes <= set(self.constants):
            return name, {"type": "const", "value": evaluate_int(text, self.constants), "description": f"{text}."}
        return name, {"type": "var", "description": f"{text}."}

    def derived(self) -> dict[str, str]:
        """Return the variable axes that stand for expressions of other axes, with the expressions."""
        found = {}
        for entry in _entries(self.source, (*self.source.inputs, *self.source.outputs)):
            name, axis = self.axis_of(entry)
            if axis["type"] == "var" and name not in self.source.axes:
                found[name] = str(entry).strip()
        return found

    def var_axes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Return the axis sizes that a Workload of it states."""
        bound = self.source.bind_axes(axes)
        given = {name: size for name, size in bound.items() if name not in self.constants}
        return given | {name: evaluate_int(text, bound) for name, text in self.derived().items()}

    def record(self) -> dict[str, Any]:
        """Return the record in FlashInfer-Bench's format."""
        source = self.source
        axes = {name: self.axis_of(name)[1] for name in source.axes}
        for entry in _entries(source, (*source.inputs, *source.outputs)):
            name, axis = self.axis_of(entry)
            axes.setdefault(name, axis)
        derived = [f"{name} == {text}" for name, text in self.derived().items()]
        record: dict[str, Any] = {
            "name": self.name,
            "op_type": source.op_type,
            "axes": axes,
            "inputs": {name: self._tensor(name) for name in source.inputs},
            "outputs": {name: self._tensor(name) for name in source.outputs},
            "reference": _returning_all(source),
            "tags": [*source.tags],
            "description": source.description or f"{source.name} of tilegym-db.",
        }
        constraints = [*source.constraints, *source.content_constraints, *derived]
        return record | ({"constraints": constraints} if constraints else {})

    def _tensor(self, name: str) -> dict[str, Any]:
        spec = self.source.inputs.get(name) or self.source.outputs[name]
        shape = None if spec.shape is None else [self.axis_of(entry)[0] for entry in spec.shape]
        dtype = self.source.dtype_of(name, self.dtypes)
        said = {"shape": shape, "dtype": dtype, "description": spec.description or f"{name} of {self.source.name}."}
        return said | ({"optional": True} if name in self.source.optional_outputs else {})


def _returning_all(source: Definition) -> str:
    """Return the reference, wrapped to return every output if the operator overwrites inputs."""
    if not source.in_place:
        return source.reference
    arguments = ", ".join(source.inputs)
    copies = "".join(f"    {name} = {name}.clone()\n" for name in source.in_place)
    return (
        f"{source.reference.rstrip()}\n\n\n_as_written = run\n\n\n"
        f"def run({arguments}):\n    # Every output, and the inputs as they were.\n{copies}"
        f"    returned = _as_written({arguments})\n{returned_outputs(source)}"
    )


def returned_outputs(source: Definition) -> str:
    """Return the source lines that return every output in order, from ``returned`` and the overwritten inputs."""
    values = "returned if isinstance(returned, tuple | list) else (returned,)"
    overwritten = {target: name for name, target in source.in_place.items()}
    settled = "".join(f"    outputs.setdefault({target!r}, {name})\n" for target, name in overwritten.items())
    return (
        f"    values = {values}\n"
        f"    names = {tuple(source.outputs)!r} if len(values) == {len(source.outputs)} else {source.written_outputs!r}\n"
        f"    outputs = dict(zip(names, values, strict=True))\n{settled}"
        f"    return tuple(outputs[name] for name in {tuple(source.outputs)!r})\n"
    )


def _entries(source: Definition, tensors: Iterable[str]) -> list[str | int]:
    specs = [source.inputs.get(name) or source.outputs[name] for name in tensors]
    return list(dict.fromkeys(entry for spec in specs for entry in spec.shape or ()))


def constant_axes(source: Definition, workloads: Sequence[Workload]) -> tuple[str, ...]:
    """Return the axes that become constants, in the Definition's order."""
    told = {str(entry).strip() for entry in _entries(source, source.inputs)}
    needed = {str(entry).strip() for entry in _entries(source, source.outputs)} - told
    hidden = {axis for entry in needed for axis in names_in(entry)[0]}
    specs = [*source.inputs.values(), *source.outputs.values()]
    last = {axis for spec in specs if spec.shape and len(spec.shape) > 1 for axis in names_in(str(spec.shape[-1]))[0]}
    changing = _changing_within_a_model(workloads)
    fixed = set(source.axes) - changing if changing else set()
    return tuple(
        name
        for name, axis in source.axes.items()
        if axis.type == "const" or name not in told or name in hidden | last | fixed
    )


def _changing_within_a_model(workloads: Sequence[Workload]) -> set[str]:
    sizes: dict[tuple[str, str], set[int]] = {}
    for workload in workloads:
        for tag in workload.tags:
            if tag.startswith("model:"):
                for name, size in workload.axes.items():
                    sizes.setdefault((tag, name), set()).add(size)
    return {name for (_, name), found in sizes.items() if len(found) > 1}


def specialised(source: Definition, workloads: Sequence[Workload]) -> list[Specialised]:
    """Return one specialised Definition per dtype binding and tuple of constants in the Workloads, by name."""
    constants = constant_axes(source, workloads)
    found: dict[str, Specialised] = {}
    for workload in workloads:
        axes, dtypes = source.bind_axes(workload.axes), source.bind_dtypes(workload.dtypes)
        sizes = {name: axes[name] for name in constants}
        parts = [*dict.fromkeys(dtypes.values()), *(f"{name.lower()}{size}" for name, size in sizes.items())]
        name = "_".join([source.name, *parts])
        found.setdefault(name, Specialised(source, name, dtypes, sizes))
    return [found[name] for name in sorted(found)]


def why_not(item: Specialised) -> str | None:
    """Return why FlashInfer-Trace cannot express this Definition; None if it can."""
    for name in (*item.source.inputs, *item.source.outputs):
        dtype = item.source.dtype_of(name, item.dtypes)
        if dtype not in FIB_DTYPES:
            return f"'{name}' has dtype {dtype}, which FlashInfer-Trace does not have"
    return None


# ---- Drawn inputs ----------------------------------------------------------------------------------------

MIB = 1 << 20
MAX_TOTAL_MIB = 64.0
"""Default maximum size of all blobs of an export, in MiB. It is less than the size of the sources."""
MAX_BLOB_MIB = 8.0
"""Default maximum size of one blob, in MiB."""

_HEADER_BYTES = 256
"""Maximum header bytes per tensor in a file."""
_DOMAINS = frozenset({"distinct_ids", "offsets", "integers", "powers_of_two", "probabilities", "log_decay"})
"""Generators whose values cannot be replaced by values around zero, in any dtype."""


@dataclass(frozen=True)
class Blob:
    """The inputs of one Workload that a file has to hold."""

    path: str
    """Path in the data set."""
    definition: Definition
    workload: Workload
    names: tuple[str, ...]
    nbytes: int
    """Size of the file in bytes, or slightly more."""
    reason: str
    """The reason that FlashInfer-Bench cannot draw them."""


@dataclass
class BlobFolder:
    """A folder that blobs are drawn into, smallest first, up to a total size."""

    folder: Path
    total_bytes: int = int(MAX_TOTAL_MIB * MIB)
    largest_bytes: int = int(MAX_BLOB_MIB * MIB)
    refused: dict[str, str] = field(default_factory=dict)
    """The reason for each blob path that is left out."""

    def choose(self, wanted: Iterable[Blob]) -> None:
        """Decide which blobs to include. Nothing is drawn yet."""
        left = self.total_bytes
        for blob in sorted(wanted, key=lambda blob: (blob.nbytes, blob.path)):
            if blob.nbytes > self.largest_bytes:
                self.refused[blob.path] = (
                    f"the inputs that cannot be drawn at random have more than {self.largest_bytes / MIB:g} MiB "
                    "(--largest-blob)"
                )
            elif blob.nbytes > left:
                self.refused[blob.path] = (
                    "the inputs that cannot be drawn at random do not fit into the "
                    f"{self.total_bytes / MIB:g} MiB of all blobs, smallest first (--blobs)"
                )
            else:
                left -= blob.nbytes

    def write(self, blob: Blob, roots: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
        """Draw a blob and write it; return the file and its entry in the side file."""
        from safetensors.torch import save

        content = save({name: tensor.clone() for name, tensor in drawn_together(blob, roots).items()})
        digest = hashlib.sha256(content).hexdigest()
        target = self.folder / f"{hashlib.sha256(blob.path.encode()).hexdigest()}.safetensors"
        try:
            target.write_bytes(content)
        except OSError as error:
            raise StoreError(
                f"cannot keep {blob.path} of {len(content)} bytes: {error.strerror or error}. Nothing was exported.",
                code="write_failed",
            ) from None
        return target, {
            "sha256": digest,
            "bytes": len(content),
            "workload": blob.workload.uuid,
            "seed": blob_seed(blob.workload),
            "inputs": [*blob.names],
        }


def why_drawn(definition: Definition, dtypes: Mapping[str, str]) -> dict[str, str]:
    """Return the inputs that FlashInfer-Bench must not draw, each with the reason."""
    reasons: dict[str, str] = {}
    for name in definition.saved:
        reasons[name] = f"'{name}' is an output of {definition.backward_of}, and FlashInfer-Bench would draw it"
    for name in definition.tensor_inputs:
        generator = definition.input_generators.get(name)
        if definition.dtype_of(name, dtypes) in WIDE_INTEGERS:
            reason = f"'{name}' holds indices or counts, and FlashInfer-Bench would draw integers from -1024 to 1023"
            reasons.setdefault(name, reason)
        elif generator is not None and generator.kind in _DOMAINS:
            reasons.setdefault(name, f"'{name}' is drawn as {generator.kind}, and FlashInfer-Bench has no such inputs")
    together = [*(definition.joint_inputs.inputs if definition.joint_inputs is not None else ())]
    if definition.saved:
        together += [name for name in forward_of(definition).inputs if name in definition.tensor_inputs]
    for name in together:
        reasons.setdefault(name, f"'{name}' belongs together with other inputs, and FlashInfer-Bench draws each alone")
    for name in (item.uniforms for item in definition.sampled.values()):
        reasons.setdefault(name, f"'{name}' holds numbers from 0 to 1, and FlashInfer-Bench draws around zero")
    return reasons


def blob_of(definition: Definition, workload: Workload, dtypes: dict[str, str], folder: str, name: str) -> Blob | None:
    """Return the blob that a Workload needs; None if FlashInfer-Bench may draw its inputs or files have them already."""
    reasons = {
        key: reason
        for key, reason in why_drawn(definition, dtypes).items()
        if not isinstance(workload.inputs.get(key), SafetensorsInput)
    }
    if not reasons:
        return None
    axes = definition.bind_axes(workload.axes)
    nbytes = sum(
        math.prod(definition.shape_of(key, axes)) * STORED_BYTES[definition.dtype_of(key, dtypes)] + _HEADER_BYTES
        for key in reasons
    )
    names = tuple(key for key in definition.inputs if key in reasons)
    path = f"{folder}/{name}_{workload.uuid}.safetensors"
    return Blob(path, definition, workload, names, nbytes, next(iter(reasons.values())))


def blob_seed(workload: Workload) -> int:
    """Return the seed of a Workload's blob."""
    return int.from_bytes(hashlib.sha256(f"blob of {workload.uuid}".encode()).digest()[:8], "little") >> 1


def drawn_together(blob: Blob, roots: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Draw the tensors of a blob on the CPU, equal to those of a draw of all inputs from the same seed.

    Args:
        roots: catalog roots, for input files that the tensors depend on.
    """
    from tilegym_db.records.workload import Case
    from tilegym_db.verification.inputs import BlobReader, draw_inputs

    source, workload = blob.definition, blob.workload
    case = Case.of_workload(source, workload, distribution="normal", seed=blob_seed(workload))
    # Draw only the needed inputs: weights may have gigabytes, and each input has its own seed.
    needed = {*blob.names, *(name for name, spec in source.inputs.items() if spec.is_scalar)}
    needed |= set(case.files) & set(why_drawn(source, case.call.dtypes))
    part = source.model_copy(update={"inputs": {name: spec for name, spec in source.inputs.items() if name in needed}})
    try:
        drawn = draw_inputs(part, case, "cpu", blobs=BlobReader(roots))
    except (RuntimeError, MemoryError) as error:  # torch raises it if it cannot allocate this size
        raise RecordError(
            f"{source.name}: its inputs cannot be drawn: {str(error).partition(chr(10))[0]}", code="inputs_not_drawable"
        ) from None
    return {name: drawn[name].contiguous() for name in blob.names}  # type: ignore[union-attr]

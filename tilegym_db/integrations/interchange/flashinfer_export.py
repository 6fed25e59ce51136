"""Exports the catalog and its verified traces as a FlashInfer-Trace data set.

What FlashInfer-Trace has no word for is left out with its reason, or told in ``tilegym_db/`` beside the five folders, which
FlashInfer-Bench does not read: ``export.json`` (where everything came from, and what was left out), ``blobs.json`` (the sha256
and seed of each blob that was drawn) and ``evidence/<gpu>/<definition>.jsonl`` (the whole trace behind each exported one, by
the digest of its line).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.integrations.interchange.export_blobs import Blob, BlobFolder
from tilegym_db.integrations.interchange.export_files import Export
from tilegym_db.integrations.interchange.export_workloads import WorkloadWriter
from tilegym_db.integrations.interchange.specialise import Specialised, returned_outputs, specialised, why_not
from tilegym_db.records import Config, Definition, Trace, Workload
from tilegym_db.records.signature import find_function
from tilegym_db.records.solution import config_id, spell_config

__all__ = ["BASELINE", "Export", "build_export"]

BASELINE = "baseline"
"""The author that FlashInfer-Bench takes for what others are compared with: here the code that models run today."""
ADAPTER = "flashinfer_entry.py"
# What cheated has no status there; it must not be taken for a pass, and not for an honest wrong result either.
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
    """Put a data set together. Reads the catalog; writes nothing but blobs.

    Args:
        catalog: its Definitions, Solutions and Workloads.
        traces: what stands verified, and failures (:func:`tilegym_db.store.exchange.told_traces`).
        op_type: only this family.
        blobs: where inputs go that FlashInfer-Bench must not draw at random, and how much of them. Without, their Workloads are
            left out.
        names: only these Definitions; none means all.

    Raises:
        StoreError: a blob cannot be kept.
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
    """One Definition of ours on its way out."""

    def __init__(self, export: Export, catalog: Catalog, source: Definition, blobs: BlobFolder | None) -> None:
        self.export, self.source = export, source
        self.to_write = WorkloadWriter(export, catalog, source, blobs)
        self.solutions = {item.name: item for item in catalog.solutions_for(source.name)}
        self.workloads = catalog.workloads_for(source.name)
        self.items = specialised(source, self.workloads)
        self.said: dict[str, tuple[Specialised, dict[str, Any]]] = {}
        """Workload uuid -> the Definition it went to, and how it is written."""
        self.written: set[str] = set()

    def wanted(self) -> Iterator[Blob]:
        """The blobs that its Workloads need, whether there will be room for them or not."""
        for item in self.items:
            if why_not(item) is None:
                yield from self.to_write.wanted(item, self._workloads_of(item))

    def _workloads_of(self, item: Specialised) -> list[Workload]:
        return [workload for workload in self.workloads if item.covers(workload.axes, workload.dtypes)]

    def run(self, traces: Sequence[Trace]) -> None:
        if not self.workloads:
            self.export.leave_out(
                f"definition {self.source.name}", "it has no workload, so no dtypes and constants to bind"
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
            written = self.to_write.written(item, workload)
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
                    f"solution {solution.name} for {item.name}", f"it omits {omits}, which cannot be said there"
                )
            elif any(solution.record.unsupported(self.source.bind_axes(w.axes), item.dtypes) is None for w in mine):
                self._solution(item, solution, {})
            else:
                export.leave_out(f"solution {solution.name} for {item.name}", "it serves none of its workloads")

    def _solution(self, item: Specialised, solution: SolutionFiles, config: Config) -> str:
        """Write one, where it is not there yet; its name there."""
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
        """The one Solution of a Definition whose author is told as ``baseline``."""
        stock = stock_of(self.solutions.values())
        return None if stock is None else stock.name

    def _trace(self, trace: Trace) -> None:
        what = f"trace {trace.trace_id}"
        solution, said = self.solutions.get(trace.solution), self.said.get(trace.workload_uuid)
        if said is None or solution is None:
            self.export.leave_out(what, "its workload or its solution is not in the export")
        elif trace.status == "UNSUPPORTED":
            self.export.leave_out(what, "a solution's own limit has no status there")
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


def _has_options(solution: SolutionFiles) -> bool:
    """Whether the entry point can be given more than inputs and outputs: FlashInfer-Bench counts parameters, and refuses it."""
    spec = solution.record.spec
    function = find_function(solution.sources[spec.entry_path], spec.entry_function)
    return function is None or bool(function.args.kwonlyargs or function.args.defaults)


def _adapter(source: Definition, solution: SolutionFiles, config: Config) -> str:
    """An entry point for what FlashInfer-Bench cannot say: tunables, a chosen config, and outputs written over inputs."""
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

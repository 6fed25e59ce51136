"""flashinfer-bench's own runner over our export: its status and time for our kernels, beside those of our published traces.

Needs ``flashinfer-bench`` and a GPU; ``--dry-run`` needs no GPU and prints what would be run. Statuses that differ are counted
by kind. Times of the two come from different runs and clocks, so their ratio is an indication.

Indices and inputs that belong together lie in blobs of the export; a definition whose integers are drawn at random is left out.
With ``--apply``, its ``apply`` then picks kernels of the export for the same calls, and what they return is compared with the
reference.

    python -m benchmarks.against_flashinfer_bench.runner --gpu h200 --definitions 10 --workloads 2 --apply
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.interchange.flashinfer_export import BlobFolder, build_export
from tilegym_db.interchange.importing import folder_beside, write_tree
from tilegym_db.published.input_files import shipped_traces
from tilegym_db.records.hardware import gpu_slug, same_gpu
from tilegym_db.store.journal import read_journal

LANGUAGES = ("python", "triton")
"""The languages of our export that its builders run without a separate compiler."""

PairKey = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """One Solution on one Workload: our published line, and what their runner found."""

    key: PairKey
    ours: str
    our_ms: float | None
    theirs: str
    their_ms: float | None
    why: str = ""
    """The end of their log, where they do not pass it."""

    @property
    def agreement(self) -> str:
        """Word for the side that fails the pair, or for agreement."""
        both = (self.ours == "PASSED", self.theirs == "PASSED")
        return {(True, True): "agree", (False, False): "agree", (True, False): "they fail it"}.get(both, "we fail it")

    def __str__(self) -> str:
        return (
            f"{self.agreement:<12} ours {self.ours} {self.our_ms or 0:.4f} ms, "
            f"theirs {self.theirs} {self.their_ms or 0:.4f} ms  "
            f"{self.key[1]} on {self.key[0]} {self.key[2][:8]}{f': {self.why}' if self.why else ''}"
        )


def exported(folder: Path, gpu: str, names: Sequence[str] = ()) -> Any:
    """Export some operators, or all, with the published traces of a GPU, and return what their loader reads."""
    from flashinfer_bench.data import TraceSet

    catalog = Catalog.default()
    traces = [trace for path in shipped_traces(catalog) for trace in read_journal(path).traces]
    passed = [t for t in traces if t.status == "PASSED" and same_gpu(gpu, t.gpu)]
    with folder_beside(folder) as scratch:
        export = build_export(catalog, passed, blobs=BlobFolder(scratch), names=names)
        write_tree(folder, export.files, export.blobs | export.drawn)
    return TraceSet.from_path(str(folder))


def narrowed(trace_set: Any, names: Sequence[str], definitions: int, workloads: int) -> dict[PairKey, Any]:
    """Leave in the set what is to be run, and return our published lines for that.

    Args:
        trace_set: of the whole export; its groups are changed.
        names: operators; none means all.
        definitions: of how many Definitions, of different operators as far as there are.
        workloads: of each at most so many.
    """
    operators = sorted(Catalog.default().definitions, key=len, reverse=True)
    by_operator: dict[str, list[str]] = {}
    for name in sorted(trace_set.traces):
        operator = next(operator for operator in operators if name.startswith(operator))
        if (not names and draws_no_index(trace_set, name)) or operator in names:
            by_operator.setdefault(operator, []).append(name)
    for group in by_operator.values():
        group.sort(key=lambda name: (-len(trace_set.traces[name]), name))
    ranked = sorted((rank, name) for group in by_operator.values() for rank, name in enumerate(group))
    chosen = [name for _, name in ranked[:definitions]]
    ours: dict[PairKey, Any] = {}
    for name in chosen:
        uuids = list(dict.fromkeys(line.workload.uuid for line in trace_set.traces[name]))[:workloads]
        trace_set.workloads[name] = [line for line in trace_set.workloads[name] if line.workload.uuid in uuids]
        solutions = [item for item in trace_set.solutions[name] if item.spec.language.value in LANGUAGES]
        measured = {line.solution for line in trace_set.traces[name]}
        trace_set.solutions[name] = [item for item in solutions if item.name in measured]
        ours |= {
            (name, line.solution, line.workload.uuid): line.evaluation
            for line in trace_set.traces[name]
            if line.workload.uuid in uuids and line.solution in {item.name for item in trace_set.solutions[name]}
        }
    for group in (trace_set.definitions, trace_set.solutions, trace_set.workloads):
        for name in set(group) - set(chosen):
            del group[name]
    return ours


def draws_no_index(trace_set: Any, name: str) -> bool:
    """Return whether no workload of a Definition leaves an integer tensor to be drawn at random."""
    inputs = trace_set.definitions[name].inputs
    integers = {key for key, spec in inputs.items() if spec.shape is not None and spec.dtype.value.startswith("int")}
    workloads = [line.workload for line in trace_set.workloads[name]]
    return not any(workload.inputs[key].type == "random" for workload in workloads for key in integers)


def benchmarked(trace_set: Any, config: Any, limit_s: float) -> Iterator[Any]:
    """Yield what their runner finds, Definition by Definition, until the time is up."""
    from flashinfer_bench.bench import Benchmark

    started = time.monotonic()
    benchmark = Benchmark(trace_set, config)
    try:
        for name in trace_set.definitions:
            if time.monotonic() - started > limit_s:
                print(f"not run, no time was left: {name}")
                continue
            config.definitions = [name]
            yield benchmark.run_all(dump_traces=False)
    finally:
        benchmark.close()


def applied(trace_set: Any, device: str) -> Iterator[tuple[bool, str]]:
    """Call their ``apply`` at one workload of each Definition: whether a kernel of ours ran and is right, and what happened."""
    import torch
    from flashinfer_bench.apply import ApplyConfig, apply
    from flashinfer_bench.apply.runtime import ApplyRuntime
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.compile import BuilderRegistry

    registry = BuilderRegistry.get_instance()
    built: list[str] = []
    build = registry.build

    def noted(definition: Any, solution: Any) -> Any:
        built.append(solution.name)
        return build(definition, solution)

    # Its default allows a relative error of 1e-5, which no bfloat16 kernel's published trace has; near zero it has no bound.
    with ApplyRuntime(trace_set, ApplyConfig(max_atol=math.inf, max_rtol=math.inf, aot_ratio=0.0)):
        for name, definition in trace_set.definitions.items():
            built.clear()
            try:
                workload = trace_set.workloads[name][0].workload
                blobs = load_safetensors(definition, workload, trace_set.root)
                inputs = gen_inputs(definition, workload, device, blobs)
                expected = registry.build_reference(definition).call_value_returning(*_copied(inputs))
                registry.build = noted  # only to see which it picks
                got = apply(name, args=tuple(_copied(inputs)), fallback=_no_fallback)
                pairs = list(zip(_listed(got), _listed(expected), strict=True))
                close = all(torch.allclose(a.double(), b.double(), rtol=2e-2, atol=2e-2) for a, b in pairs)
                worst = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
                yield (
                    close,
                    f"apply ran {built[-1]}: {'close' if close else 'NOT close'}, max abs difference {worst:.3g}",
                )
            except Exception as error:
                message = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
                yield False, f"apply of {name} ({', '.join(built) or 'nothing picked'}): {message}"
            finally:
                registry.__dict__.pop("build", None)


def first_gpu(visible: str | None) -> str:
    """Return the visible GPU that is to be used: the first.

    Their persistent runner starts a worker for each GPU but ties no thread to a worker, so that with two GPUs a quick thread
    sends its health check into the pipe of the other's running Solution: each gets the other's answer, and a right Solution
    is a RUNTIME_ERROR. It also leaves another GPU the current one, where a Triton kernel cannot reach the tensors of the first.
    """
    return "0" if visible is None else visible.split(",")[0]


def _no_fallback(*arguments: Any) -> Any:
    raise LookupError("it found no kernel for this call")


def _copied(inputs: Sequence[Any]) -> list[Any]:
    import torch

    return [item.clone() if isinstance(item, torch.Tensor) else item for item in inputs]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def rows(ours: dict[PairKey, Any], found: Any) -> Iterator[Row]:
    """Return their lines beside ours."""
    for name, lines in found.traces.items():
        for line in lines:
            key = (name, line.solution, line.workload.uuid)
            if key not in ours:
                continue
            mine, theirs = ours[key], line.evaluation
            yield Row(key, mine.status.value, _latency(mine), theirs.status.value, _latency(theirs), _why(theirs))


def _why(evaluation: Any) -> str:
    """Return the end of its log, or else how far off it was, if it did not pass."""
    if evaluation.status.value == "PASSED":
        return ""
    log = " ".join((evaluation.log or "").split())[-300:]
    if log or evaluation.correctness is None:
        return log
    return f"max abs {evaluation.correctness.max_absolute_error:.3g}"


def _latency(evaluation: Any) -> float | None:
    return evaluation.performance.latency_ms if evaluation.performance else None


def report(found: Sequence[Row]) -> str:
    """Return a line for each pair, the count of each agreement, and the median ratio of the two times."""
    lines = [str(row) for row in found]
    ratios = [row.their_ms / row.our_ms for row in found if row.their_ms and row.our_ms]
    lines.append(", ".join(f"{what}: {count}" for what, count in Counter(row.agreement for row in found).items()))
    if ratios:
        lines.append(f"their time over ours, median of {len(ratios)}: {statistics.median(ratios):.2f}")
    return "\n".join(lines)


def main() -> int:
    """Export, run, compare; 1 where a status differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operators; none means all that have published traces")
    parser.add_argument("--gpu", default="h200", help="whose published traces stand beside theirs")
    parser.add_argument("--definitions", type=int, default=10)
    parser.add_argument("--workloads", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=3600, help="no definition begins later than this")
    parser.add_argument("--apply", action="store_true", help="also have its apply pick and run kernels")
    parser.add_argument("--no-runner", action="store_true", help="only --apply, which a CPU can do too")
    parser.add_argument("--device", default="cuda:0", help="of --apply")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))
    with tempfile.TemporaryDirectory() as folder:
        trace_set = exported(Path(folder) / "export", options.gpu, options.names)
        ours = narrowed(trace_set, options.names, options.definitions, options.workloads)
        operators = len(trace_set.definitions)
        print(f"{len(ours)} pairs of {operators} definitions: {', '.join(sorted(trace_set.definitions))}", flush=True)
        if options.dry_run:
            return 0
        found = [] if options.no_runner else measured(trace_set, ours, options)
        picked = list(applied(trace_set, options.device)) if options.apply else []
    for _, what in picked:
        print(what)
    if found:
        print(report(found))
    if picked:
        print(
            f"apply: {sum(good for good, _ in picked)} of {len(picked)} calls ran a kernel of the export and are right"
        )
    return int(any(row.agreement != "agree" for row in found) or not all(good for good, _ in picked))


def measured(trace_set: Any, ours: dict[PairKey, Any], options: argparse.Namespace) -> list[Row]:
    """Run their benchmark and print each line as it comes."""
    import torch
    from flashinfer_bench.bench import BenchmarkConfig

    here = gpu_slug(torch.cuda.get_device_name())
    if not same_gpu(options.gpu, here):
        print(f"note: this machine has {here}; the published times are of {options.gpu}")
    found: list[Row] = []
    for part in benchmarked(trace_set, BenchmarkConfig(), options.limit_s):
        found += (new := list(rows(ours, part)))
        print("\n".join(f"  {row}" for row in new), flush=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())

"""flashinfer-bench's own runner over our export: its status and time for our kernels, beside those of our published traces.

Needs ``flashinfer-bench`` and a GPU; ``--dry-run`` needs no GPU and prints what would be run. Statuses that differ are counted
by kind. Times of the two come from different runs and clocks, so their ratio is an indication.

    python -m benchmarks.against_flashinfer_bench.runner --gpu h200 --definitions 10 --workloads 2
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.integrations.interchange.flashinfer_export import build_export
from tilegym_db.integrations.interchange.writing import write_tree
from tilegym_db.records.hardware import gpu_slug, same_gpu
from tilegym_db.store.input_files import shipped_traces
from tilegym_db.store.journal import read_journal

LANGUAGES = ("python", "triton")
"""Of our export, what its builders run without a compiler of their own."""

PairKey = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """One Solution on one Workload: our published line, and what their runner found."""

    key: PairKey
    ours: str
    our_ms: float | None
    theirs: str
    their_ms: float | None

    @property
    def agreement(self) -> str:
        """Whether both pass it, or who does not."""
        both = (self.ours == "PASSED", self.theirs == "PASSED")
        return {(True, True): "agree", (False, False): "agree", (True, False): "they fail it"}.get(both, "we fail it")


def exported(folder: Path, gpu: str) -> Any:
    """Our export with the published traces of a GPU, as their loader reads it."""
    from flashinfer_bench.data import TraceSet

    catalog = Catalog.default()
    traces = [trace for path in shipped_traces(catalog) for trace in read_journal(path).traces]
    export = build_export(catalog, [t for t in traces if t.status == "PASSED" and same_gpu(gpu, t.gpu)])
    write_tree(folder, export.files, export.blobs)
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
        if not names or operator in names:
            by_operator.setdefault(operator, []).append(name)
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


def rows(ours: dict[PairKey, Any], found: Any) -> Iterator[Row]:
    """Their lines beside ours."""
    for name, lines in found.traces.items():
        for line in lines:
            key = (name, line.solution, line.workload.uuid)
            if key not in ours:
                continue
            mine, theirs = ours[key], line.evaluation
            yield Row(key, mine.status.value, _latency(mine), theirs.status.value, _latency(theirs))


def _latency(evaluation: Any) -> float | None:
    return evaluation.performance.latency_ms if evaluation.performance else None


def report(found: Sequence[Row]) -> str:
    """A line for each pair, the count of each agreement, and the median ratio of the two times."""
    lines = [
        f"{row.agreement:<12} ours {row.ours} {row.our_ms or 0:.4f} ms, theirs {row.theirs} {row.their_ms or 0:.4f} ms  "
        f"{row.key[1]} on {row.key[0]} {row.key[2][:8]}"
        for row in found
    ]
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
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace_set = exported(Path(folder) / "export", options.gpu)
        ours = narrowed(trace_set, options.names, options.definitions, options.workloads)
        operators = len(trace_set.definitions)
        print(f"{len(ours)} pairs of {operators} definitions: {', '.join(sorted(trace_set.definitions))}", flush=True)
        if options.dry_run:
            return 0
        import torch
        from flashinfer_bench.bench import Benchmark, BenchmarkConfig

        here = gpu_slug(torch.cuda.get_device_name())
        if not same_gpu(options.gpu, here):
            print(f"note: this machine has {here}; the published times are of {options.gpu}")
        benchmark = Benchmark(trace_set, BenchmarkConfig())
        try:
            found = list(rows(ours, benchmark.run_all(dump_traces=False)))
        finally:
            benchmark.close()
    print(report(found))
    return int(any(row.agreement != "agree" for row in found))


if __name__ == "__main__":
    raise SystemExit(main())

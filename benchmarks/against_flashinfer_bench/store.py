"""Our store and resolver against flashinfer-bench's ``TraceSet`` and apply table, on the same traces.

The traces are those of ``benchmarks/store_scale.py``: 20 operators with five Solutions each, on two GPUs. Theirs are the same
points, verdicts and latencies in their format, which holds less of each (no confidence interval, no comparisons, no digests).
Each side is a separate process. Times are medians, in milliseconds if nothing else is said; in brackets the processor time
of all threads, which says more on a machine that is not idle. Memory is the peak resident size.

A look-up of ours is given sizes, dtypes and scalars, checks them, and finds a decision with its evidence; one of theirs
(``get_best_trace``) is given the name and the sizes, and filters the traces. Ours needs an index, whose making has a line of its
own. Their ``apply`` has one as well, which maps sizes to the name of a Solution: that line sets one index beside the other.

    python -m benchmarks.against_flashinfer_bench.store [--traces 1000 10000 100000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.against_flashinfer_bench.dataset import their_definition, their_name, their_solution, their_workload
from benchmarks.store_scale import DEFINITIONS, GPUS, LANGUAGES, trace_lines, write_catalog
from tilegym_db.catalog import Catalog
from tilegym_db.records import Workload
from tilegym_db.records.call import Call

MODULE = "benchmarks.against_flashinfer_bench.store"
GPU = GPUS[0]
ATTEMPTS = 10
"""How often each point was measured; the number of shapes follows from it."""
LOOKUPS = 1000
"""Point look-ups in one sample, over all operators and shapes; of theirs, as many of them as LOOKUPS_S seconds allow."""
LOOKUPS_S = 2.0

QUESTIONS = {
    "load": "files to something that can be asked",
    "load_and_table": "files to the table of the best kernels",
    "table_again": "the same table in a later process",
    "entries": "shapes in that table",
    "index": "the index of all its shapes",
    "point": "the best kernel of one shape, microseconds",
    "point_indexed": "the same, indexed on both sides",
    "point_long": "the same, every entry gone through",
    "size_mb": "the files, MB",
    "start_mb": "memory before loading, MB",
    "peak_mb": "peak memory, MB",
}


def theirs_of(line: str) -> dict[str, Any]:
    """Return one of our trace lines in their format."""
    ours = json.loads(line)
    evaluation: dict[str, Any] = {
        "status": ours["status"],
        "environment": {"hardware": ours["gpu_name"], "libs": ours["libs"]},
        "timestamp": ours["timestamp"],
        "correctness": {"max_relative_error": 0.001, "max_absolute_error": 0.001},
    }
    if "performance" in ours:
        latency_ms = ours["performance"]["latency_us"] / 1e3
        speedup = ours["performance"]["comparisons"][0]["ratio"]
        evaluation["performance"] = {
            "latency_ms": latency_ms,
            "reference_latency_ms": latency_ms * speedup,
            "speedup_factor": speedup,
        }
    workload = {
        "uuid": ours["workload_uuid"],
        "axes": ours["axes"],
        "inputs": {"x": {"type": "random"}, "eps": {"type": "scalar", "value": ours["scalars"]["eps"]}},
    }
    return {
        "definition": their_name(ours["definition"], ours["dtypes"]),
        "workload": workload,
        "solution": their_name(ours["solution"], ours["dtypes"]),
        "evaluation": evaluation,
    }


def write_both(folder: Path, count: int) -> None:
    """Write the same catalog and traces for both sides, under ``ours`` and ``theirs``."""
    workloads = max(1, count // (len(GPUS) * DEFINITIONS * len(LANGUAGES) * ATTEMPTS))
    catalog = write_catalog(folder / "ours", workloads)
    lines = list(trace_lines(catalog, count))
    (folder / "ours" / "traces.jsonl").write_text("".join(line + "\n" for line in lines))
    root = folder / "theirs"
    files: dict[Path, list[dict[str, Any]]] = defaultdict(list)
    for name, definition in catalog.definitions.items():
        items: list[Workload] = catalog.workloads_for(name)
        dtypes = items[0].dtypes
        place = Path(definition.op_type) / f"{their_name(name, dtypes)}"
        files[root / "definitions" / f"{place}.json"] = [their_definition(definition, dtypes)]
        files[root / "workloads" / f"{place}.jsonl"] = [their_workload(definition, item) for item in items]
        for solution in catalog.solutions_for(name):
            record = their_solution(solution, dtypes)
            # They know no cuTile; nothing is built here, so that the language's name is all that it is.
            if record["spec"]["language"] == "cutile":
                record["spec"]["language"] = "python"
            files[root / "solutions" / "made_up" / place / f"{record['name']}.json"] = [record]
    for line in lines:
        trace = theirs_of(line)
        op_type = json.loads(line)["op_type"]
        files[root / "traces" / op_type / f"{trace['definition']}.jsonl"].append(trace)
    for path, records in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


class Took(NamedTuple):
    """Seconds of one call: by the clock, and of the processor in all threads."""

    wall: float
    cpu: float

    def plus(self, other: Took) -> Took:
        """Return the figures of both calls, one after the other."""
        return Took(self.wall + other.wall, self.cpu + other.cpu)


def timed(action: Callable[[], Any]) -> tuple[Took, Any]:
    """Return what a call took, and what it returned. Garbage of the call before is collected first."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = action()
    return Took(time.perf_counter() - wall, time.process_time() - cpu), result


def summary(samples: Sequence[Took], unit: float = 1e3) -> tuple[float, float]:
    """Return medians of wall and processor time, in milliseconds or another ``unit`` of a second."""
    return statistics.median(took.wall for took in samples) * unit, statistics.median(
        took.cpu for took in samples
    ) * unit


def peak_mb() -> float:
    """Return the most memory that this process ever held, in MB.

    ``getrusage`` would also count the memory of the process that started this one.
    """
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def measure_ours(folder: Path, repeats: int) -> dict[str, Any]:
    """Journal to DuckDB, DuckDB to the resolver's table, the table from its file, its index, and decisions by both."""
    from tilegym_db.published.table import read_folder
    from tilegym_db.resolver.decide import decide
    from tilegym_db.resolver.resolve import PointIndex, make_request
    from tilegym_db.store.filling import ingest
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.publish import publish

    catalog = Catalog((folder,))
    definitions = catalog.definitions
    solutions = {name: {item.name: item for item in catalog.solutions_for(name)} for name in definitions}
    journal, snapshot = folder / "traces.jsonl", folder / "snapshot" / "traces" / GPU
    start_mb = peak_mb()

    def load(home: Path) -> None:
        with open_store(home, catalog=catalog) as store:
            ingest(store, [journal], trust=True)

    def load_and_publish(home: Path) -> None:
        with open_store(home, catalog=catalog) as store:
            ingest(store, [journal], trust=True)
            publish(store, GPU, folder / "snapshot")
        list(read_folder(snapshot, trust=True))

    loads, tables = [], []
    for number in range(repeats):
        loads.append(timed(lambda number=number: load(folder / f"home{number}"))[0])
        tables.append(timed(lambda number=number: load_and_publish(folder / f"other{number}"))[0])
    again = [timed(lambda: list(read_folder(snapshot, trust=True)))[0] for _ in range(repeats)]
    table = read_folder(snapshot, trust=True)
    calls = [
        (definitions[name], item.axes, item.dtypes, item.scalars())
        for name in definitions
        for item in catalog.workloads_for(name)
    ]
    list(table)

    def build() -> dict[str, PointIndex]:
        return {
            name: PointIndex(definitions[name], table, solutions[name], sm="sm_90", unavailable={})
            for name in definitions
        }

    indexed = [timed(build)[0] for _ in range(repeats)]
    indexes = build()

    def look_up() -> int:
        found = 0
        for number in range(LOOKUPS):
            definition, axes, dtypes, scalars = calls[number % len(calls)]
            decision = indexes[definition.name].find(Call(definition.name, axes, dtypes, scalars=scalars))
            found += decision is not None and decision.evidence.axes == axes  # stock is an answer too
        return found

    def decide_each() -> int:
        found = 0
        for number in range(LOOKUPS):
            definition, axes, dtypes, scalars = calls[number % len(calls)]
            request = make_request(
                definition, Call(definition.name, axes, dtypes, scalars=scalars), gpu=GPU, sm="sm_90"
            )
            found += decide(request, table, solutions[definition.name]).evidence.axes == axes
        return found

    asked = [timed(look_up) for _ in range(repeats)]
    decided = [timed(decide_each) for _ in range(repeats)]
    if decided[0][1] != asked[0][1]:
        raise SystemExit(f"the index answered {asked[0][1]} of {LOOKUPS} look-ups, the long way {decided[0][1]}")
    return {
        "load": summary(loads),
        "load_and_table": summary(tables),
        "table_again": summary(again),
        "index": summary(indexed),
        "point": summary([took for took, _ in asked], 1e6 / LOOKUPS),
        "point_indexed": summary([took for took, _ in asked], 1e6 / LOOKUPS),
        "point_long": summary([took for took, _ in decided], 1e6 / LOOKUPS),
        "points_answered": asked[0][1] / LOOKUPS,
        "entries": table.size,
        "size_mb": journal.stat().st_size / 1e6,
        "start_mb": start_mb,
        "peak_mb": peak_mb(),
    }


def measure_theirs(folder: Path, repeats: int) -> dict[str, Any]:
    """Time files to a ``TraceSet``, the ``TraceSet`` to an apply table (nothing built), and ``get_best_trace`` over it."""
    from flashinfer_bench.apply import ApplyConfig, ApplyConfigRegistry
    from flashinfer_bench.apply.key import ApplyKeyFactory
    from flashinfer_bench.apply.table import ApplyTable
    from flashinfer_bench.data import TraceSet
    from flashinfer_bench.env import get_fib_cache_path

    config = ApplyConfigRegistry(default=ApplyConfig(aot_ratio=0.0, max_rtol=1e-2))
    start_mb = peak_mb()

    def load() -> Any:
        return TraceSet.from_path(str(folder))

    loads, tables, again = [], [], []
    trace_set = table = None
    for _ in range(repeats):
        trace_set = table = None  # or two of them would count towards the peak
        loaded, trace_set = timed(load)
        loads.append(loaded)
        shutil.rmtree(get_fib_cache_path() / "apply_table", ignore_errors=True)
        built, table = timed(lambda trace_set=trace_set: ApplyTable.load_or_build(trace_set, config))
        tables.append(loaded.plus(built))
        cached, _ = timed(lambda trace_set=trace_set: ApplyTable.load_or_build(trace_set, config))
        again.append(loaded.plus(cached))
    points = [(name, trace.workload.axes) for name, workloads in trace_set.workloads.items() for trace in workloads]

    def look_up() -> tuple[int, int]:
        start, number, found = time.perf_counter(), 0, 0
        while number < LOOKUPS and time.perf_counter() - start < LOOKUPS_S:
            name, axes = points[(number * 37) % len(points)]
            found += trace_set.get_best_trace(name, axes) is not None
            number += 1
        return number, found

    builders = {name: ApplyKeyFactory.specialize(definition) for name, definition in trace_set.definitions.items()}
    workloads = [(name, trace.workload) for name, traces in trace_set.workloads.items() for trace in traces]

    def look_up_in_table() -> None:
        for number in range(LOOKUPS):
            name, workload = workloads[number % len(workloads)]
            table.match_solution(name, builders[name].build_from_workload(workload))

    indexed = [timed(look_up_in_table)[0] for _ in range(repeats)]
    asked = [timed(look_up) for _ in range(repeats)]
    each = [Took(took.wall / number, took.cpu / number) for took, (number, _) in asked]
    return {
        "load": summary(loads),
        "load_and_table": summary(tables),
        "table_again": summary(again),
        "point": summary(each, 1e6),
        "point_indexed": summary(indexed, 1e6 / LOOKUPS),
        "points_answered": asked[0][1][1] / asked[0][1][0],
        "entries": sum(map(len, table.index.values())),
        "size_mb": sum(path.stat().st_size for path in (folder / "traces").rglob("*.jsonl")) / 1e6,
        "start_mb": start_mb,
        "peak_mb": peak_mb(),
    }


def spelled(value: float | Sequence[float]) -> str:
    """Return a number, or wall time with processor time in brackets."""
    return f"{value:.1f}" if isinstance(value, int | float) else f"{value[0]:.1f} ({value[1]:.1f})"


def side(which: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure one side in a separate process."""
    answer = folder / f"{which}.json"
    command = [sys.executable, "-m", MODULE, "--side", which, "--folder", str(folder / which)]
    command += ["--answer", str(answer), "--repeats", str(repeats)]
    environment = {**os.environ, "FIB_CACHE_PATH": str(folder / "cache")}
    subprocess.run(command, env=environment, check=True)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def main() -> int:
    """Compare, or be one of the sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    for private in ("--side", "--folder", "--answer"):
        parser.add_argument(private, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        measure = measure_ours if options.side == "ours" else measure_theirs
        Path(options.answer).write_text(json.dumps(measure(Path(options.folder), options.repeats)))
        return 0
    if importlib.util.find_spec("flashinfer_bench") is None:
        print(
            "flashinfer-bench is not installed: pip install --no-deps flashinfer-bench docstring-parser",
            file=sys.stderr,
        )
        return 2
    print(f"{'traces':>8} {'what':<44}{'tilegym-db':>20}{'flashinfer-bench':>20}")
    for count in options.traces:
        with tempfile.TemporaryDirectory(prefix="against-flashinfer-bench-") as name:
            write_both(Path(name), count)
            ours, theirs = (side(which, Path(name), options.repeats) for which in ("ours", "theirs"))
        for key, what in QUESTIONS.items():
            cells = (spelled(answers[key]) if key in answers else "-" for answers in (ours, theirs))
            print(f"{count:>8} {what:<44}{''.join(f'{cell:>20}' for cell in cells)}", flush=True)
        if min(ours["points_answered"], theirs["points_answered"]) < 1:
            print(f"answered: {ours['points_answered']:.0%} of ours, {theirs['points_answered']:.0%} of theirs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

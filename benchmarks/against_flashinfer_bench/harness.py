"""Our harness against flashinfer-bench's: (solution, workload) pairs a minute, over the same sources and sizes.

Each side is a separate process, with empty caches and an empty store, and is timed by the process that starts it. Ours
runs first, at its screen tier: as many rounds as the times need. flashinfer-bench follows with as many timed samples a pair
as ours took on average, and once more with its own default. What one pair costs on each side:

* ours: the static scan, a confined worker for each Solution, verification over content sets and fuzzed shapes against fp64,
  and timing interleaved with stock code;
* theirs: one worker for all, three comparisons with the reference, and timing one after the other, the reference included.

Their runners refuse a machine without a GPU; then ours is printed alone.

    python -m benchmarks.against_flashinfer_bench.harness --gpu auto rms_norm softmax swiglu --workloads 4
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.against_flashinfer_bench.dataset import Subset, subset, write_ours, write_theirs
from tilegym_db.catalog import Catalog

MODULE = "benchmarks.against_flashinfer_bench.harness"
TRIALS = 3
"""How many inputs flashinfer-bench draws for a pair; each is timed ``iterations`` times."""
DEFAULT_ITERATIONS = 50


@dataclass
class SideReport:
    """Result of one side. ``ready_s`` and ``done_s`` are by the same clock as ``time.time()``."""

    ready_s: float = 0.0
    done_s: float = 0.0
    timed: int = 0
    samples: int = 0
    """Timed calls of the Solutions, all pairs together; those of references and of warm-ups are not among them."""
    statuses: dict[str, int] | None = None
    device: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    side: str
    report: SideReport
    total_s: float
    startup_s: float

    @property
    def pairs(self) -> int:
        """Number of pairs that have a verdict of any kind."""
        return sum((self.report.statuses or {}).values())

    def __str__(self) -> str:
        report, work_s = self.report, self.total_s - self.startup_s
        each = report.samples / report.timed if report.timed else 0.0
        spelled = ", ".join(f"{count} {status}" for status, count in sorted((report.statuses or {}).items()))
        return (
            f"{self.side:<38}{self.pairs:6}{report.timed:7}{each:9.0f}{self.startup_s:10.1f}{work_s:8.1f}"
            f"{60 * self.pairs / work_s:10.1f}{60 * self.pairs / self.total_s:12.1f}  {spelled}"
        )


def choose(names: list[str], languages: list[str], workload: str | None, most: int) -> list[Subset]:
    """Return the work of both sides: of each Definition, its Solutions in these languages and a spread of its Workloads."""
    catalog = Catalog.default()
    chosen = []
    for name in names or list(catalog.definitions):
        solutions = [item for item in catalog.solutions_for(name) if item.record.spec.language in languages]
        workloads = [item for item in catalog.workloads_for(name) if workload is None or workload in item.tags]
        found = subset(catalog.definition(name), solutions, workloads, most)
        if found.solutions and found.workloads:
            chosen.append(found)
        else:
            why = found.refused.get(
                name, f"no Solution or no Workload that both can run ({len(found.refused)} left out)"
            )
            print(f"left out: {name}: {why}", file=sys.stderr)
    return chosen


def run_ours(folder: Path, gpu: str, quick: bool) -> SideReport:
    """Run the screen tier over the catalog in ``folder/ours``, into a separate store."""
    from tilegym_db.measurement.benchmark import bench
    from tilegym_db.measurement.run_setup import Observer

    report = SideReport()

    def starting(what: str) -> None:
        if not report.ready_s and not what.startswith("calibrating"):
            report.ready_s = time.time()

    done = bench(
        devices=gpu,
        quick=quick,
        catalog=Catalog((folder / "ours",)),
        store_home=folder / "home",
        observer=Observer(starting=starting),
    )
    report.done_s = time.time()
    report.device = done.machine.gpu_name
    report.statuses = dict(done.counts)
    samples = [trace.performance.samples for trace in done.traces if trace.performance is not None]
    report.timed, report.samples = len(samples), sum(samples)
    return report


def run_theirs(folder: Path, iterations: int) -> SideReport:
    """Run flashinfer-bench on the dataset in ``folder/theirs``, with ``iterations`` timed calls per trial."""
    from flashinfer_bench.bench import Benchmark, BenchmarkConfig
    from flashinfer_bench.data import TraceSet

    report = SideReport()
    config = BenchmarkConfig(iterations=iterations, num_trials=TRIALS, log_dir=str(folder / "logs"))
    (folder / "logs").mkdir(exist_ok=True)
    try:
        harness = Benchmark(TraceSet.from_path(str(folder / "theirs")), config)
    except RuntimeError as error:  # so it says that there is no GPU
        report.refused = str(error)
        return report
    report.ready_s = time.time()
    try:
        found = harness.run_all(dump_traces=True)
        report.done_s = time.time()
    finally:
        harness.close()
    evaluations = [trace.evaluation for traces in found.traces.values() for trace in traces]
    report.statuses = dict(Counter(evaluation.status.value for evaluation in evaluations))
    report.timed = sum(evaluation.performance is not None for evaluation in evaluations)
    report.samples = report.timed * TRIALS * iterations
    report.device = evaluations[0].environment.hardware if evaluations else ""
    return report


def side(label: str, folder: Path, caches: Path, arguments: list[str]) -> Line:
    """Run one side in a separate process; its caches start empty."""
    caches.mkdir()
    answer = caches / "report.json"
    environment = {
        **os.environ,
        "FIB_CACHE_PATH": str(caches / "flashinfer"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    command = [sys.executable, "-m", MODULE, "--folder", str(folder), "--answer", str(answer), *arguments]
    begun, clock = time.time(), time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    total_s = time.perf_counter() - clock
    report = SideReport(**json.loads(answer.read_text()))
    return Line(label, report, total_s, max(0.0, report.ready_s - begun))


def compare(options: argparse.Namespace) -> int:
    """Run every side and print the table."""
    chosen = choose(options.names, options.language or ["python", "triton"], options.tag, options.workloads)
    if not chosen:
        print("nothing that both sides could run is selected", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="against-flashinfer-bench-") as name:
        folder = Path(name)
        write_ours(folder / "ours", chosen)
        offered = write_theirs(folder / "theirs", chosen)
        print(f"{len(chosen)} definitions, {offered} pairs of a solution and a workload offered", file=sys.stderr)
        quick = ["--quick"] if options.quick else []
        ours = side(
            "tilegym-db, screen tier", folder, folder / "caches-ours", ["--side", "ours", "--gpu", options.gpu, *quick]
        )
        lines = [ours]
        print(f"on {ours.report.device}")
        print(
            f"{'':38}{'pairs':>6}{'timed':>7}{'samples':>9}{'start s':>10}{'work s':>8}{'pairs/min':>10}{'with start':>12}"
        )
        print(ours, flush=True)
        mean = ours.report.samples / ours.report.timed if ours.report.timed else 0
        matched = max(1, round(mean / TRIALS))
        for label, iterations in (("as many samples", matched), ("its default", DEFAULT_ITERATIONS)):
            if importlib.util.find_spec("flashinfer_bench") is None:
                print("flashinfer-bench is not installed: pip install --no-deps flashinfer-bench docstring-parser")
                break
            arguments = ["--side", "theirs", "--iterations", str(iterations)]
            line = side(f"flashinfer-bench, {label}", folder, folder / f"caches-{iterations}-{len(lines)}", arguments)
            if line.report.refused:
                print(f"flashinfer-bench refuses this machine: {line.report.refused}")
                break
            lines.append(line)
            print(line, flush=True)
    if options.out:
        content = [
            {"side": line.side, "total_s": line.total_s, "startup_s": line.startup_s, **asdict(line.report)}
            for line in lines
        ]
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def main() -> int:
    """Compare, or be one of the sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="definitions; all that both can say by default")
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--language", action="append", choices=("python", "triton", "tilelang"))
    parser.add_argument("--tag", help="only workloads with this tag, such as stage:decode")
    parser.add_argument("--workloads", type=int, default=4, help="at most so many of each definition")
    parser.add_argument("--quick", action="store_true", help="ours takes few samples")
    parser.add_argument("--out", type=Path, help="also write the numbers there, as JSON")
    for private in ("--side", "--folder", "--answer", "--iterations"):
        parser.add_argument(private, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        return compare(options)
    folder = Path(options.folder)
    report: Any = (
        run_ours(folder, options.gpu, options.quick)
        if options.side == "ours"
        else run_theirs(folder, int(options.iterations))
    )
    Path(options.answer).write_text(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

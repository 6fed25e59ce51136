"""Several GPUs of a host against one of them: the same plan with cold caches, and again with a supervisor killed.

Prints a table of three runs (one device, all of them, all of them with ``kill -9`` of one supervisor), then where the time of
each supervisor went, and writes ``many_gpus.json`` with every verdict and time. Exit status 1 where a verdict differs, or a pair
is missing or there twice.

    python benchmarks/many_gpus.py --gpus all --output /tmp/figures
    python benchmarks/many_gpus.py --slots 2 --warm --workload cpu --limit 2 rms_norm   # the machinery, without a GPU

A plan of few pairs says nothing of the rate: each supervisor starts, calibrates, starts workers and compiles once whatever it is
given, and that takes as long on one device as on several. ``--limit 24 --language ''`` gives minutes of work on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilegym_db.bench.bench_report import BenchReport
from tilegym_db.bench.benchmark import benchmark, promote
from tilegym_db.bench.gpus.devices import MeasuringDevice, cpu_slots, devices_of, share_processors
from tilegym_db.bench.phases import AT_WORK, IDLE, PREPARE, PROCESSORS, SIDE_BY_SIDE, START, TIME, VERIFY, WAIT
from tilegym_db.bench.run_setup import Observer
from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.records import Trace

NAMES = (
    "rms_norm",
    "softmax",
    "swiglu",
    "silu_and_mul",
    "rope_neox",
    "fused_add_rms_norm",
    "gelu_tanh_and_mul",
    "gemm",
)


class Watch:
    """When each device began, and, where asked to, the kill of one supervisor after a share of the pairs."""

    def __init__(self, kill_after: float | None) -> None:
        self.begun = time.perf_counter()
        self.planned_s = 0.0
        self.first_work_s: dict[str, float] = {}
        self.killed: list[int] = []
        self._kill_after, self._pairs, self._seen = kill_after, 0, 0

    def observer(self) -> Observer:
        """Callbacks for the run."""
        return Observer(planned=self._planned, at_work=self._at_work, traced=self._traced)

    def _planned(self, plan: Any, machine: Any) -> None:
        self._pairs = plan.pair_count
        self.planned_s = round(time.perf_counter() - self.begun, 2)

    def _at_work(self, device: str, what: str) -> None:
        self.first_work_s.setdefault(device, round(time.perf_counter() - self.begun, 2))

    def _traced(self, trace: Trace) -> None:
        self._seen += 1
        if self._kill_after is not None and not self.killed and self._seen >= self._kill_after * self._pairs:
            self.killed.append(supervisors()[0])
            os.kill(self.killed[0], signal.SIGKILL)


def supervisors() -> list[int]:
    """Process ids of the supervisors that this process started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"bench.gpus.supervisor" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found)


def limited_catalog(root: Path, names: Sequence[str], pattern_tag: str | None, limit: int) -> Catalog:
    """The shipped records, with so many workloads of each Definition at most, spread over its list."""
    for folder in ("definitions", "solutions"):
        shutil.copytree(shipped_root() / folder, root / folder)
    shipped = Catalog((shipped_root(),))
    for name in names:
        definition = shipped.definition(name)
        found = [w for w in shipped.workloads_for(name) if pattern_tag is None or pattern_tag in w.tags]
        chosen = [found[round(i * (len(found) - 1) / max(limit - 1, 1))] for i in range(min(limit, len(found)))]
        path = root / "workloads" / definition.op_type / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(workload.to_json() + "\n" for workload in {w.uuid: w for w in chosen}.values()))
    return Catalog((root,))


def measure(
    options: argparse.Namespace, catalog: Catalog, devices: list[MeasuringDevice], kill_after: float | None
) -> dict[str, Any]:
    """One run in a store of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        if not options.warm:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        watch = Watch(kill_after)
        run = promote if options.tier == "promotion" else benchmark
        report = run(
            tuple(options.names), gpu=devices[0].gpu, language=options.language, gpus=devices, catalog=catalog,
            store_home=Path(folder), observer=watch.observer(),
        )  # fmt: skip
        return record(report, devices, watch)


def record(report: BenchReport, devices: list[MeasuringDevice], watch: Watch) -> dict[str, Any]:
    """What is kept of one run."""
    seconds = time.perf_counter() - watch.begun
    pairs = Counter(key(trace) for trace in report.traces)
    return {
        "devices": [device.label for device in devices],
        "gpu": report.machine.gpu_name,
        "host": report.machine.host,
        "seconds": round(seconds, 2),
        "pairs": len(report.traces),
        "pairs_a_minute": round(60 * len(report.traces) / seconds, 1),
        "planned_s": watch.planned_s,
        "first_work_s": watch.first_work_s,
        "phases": {label: {name: round(s, 2) for name, s in found.items()} for label, found in report.seconds.items()},
        "processors": [len(block) for block in share_processors(sorted(os.sched_getaffinity(0)), len(devices))],
        "traces_of_each": dict(report.devices),
        "counts": dict(report.counts),
        "twice": [name for name, times in pairs.items() if times > 1],
        "verdicts": {key(trace): trace.status for trace in report.traces},
        "reasons": {key(trace): trace.reason for trace in report.traces if trace.reason},
        "latency_us": {key(t): t.performance.latency_us for t in report.traces if t.performance is not None},
        "gpu_uuids": dict(Counter(trace.gpu_uuid for trace in report.traces)),
        "killed": watch.killed,
        "notes": report.notes,
        "unfinished": report.unfinished,
    }


def key(trace: Trace) -> str:
    """Solution, config and workload of a trace."""
    return f"{trace.solution} {json.dumps(trace.config, sort_keys=True)} {trace.workload_uuid}"


def judge(runs: dict[str, dict[str, Any]]) -> list[str]:
    """What differs from the run on one device, and what is missing or there twice."""
    problems = []
    one = runs["one"]["verdicts"]
    for name, run in runs.items():
        problems += [f"{name}: twice: {pair}" for pair in run["twice"]]
        problems += [f"{name}: not finished: {reason}" for reason in run["unfinished"]]
        problems += [f"{name}: missing: {pair}" for pair in sorted(set(one) - set(run["verdicts"]))]
        problems += [
            f"{name}: {pair}: {status}, and {one.get(pair)} on one device"
            for pair, status in run["verdicts"].items()
            if status != one.get(pair)
        ]
    return problems


def main() -> int:
    """Returns 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(NAMES), help="Definitions")
    parser.add_argument("--gpus", default="all")
    parser.add_argument("--slots", type=int, help="so many slots of the CPU in place of GPUs")
    parser.add_argument("--tier", choices=("screen", "promotion"), default="screen")
    parser.add_argument("--language", default="triton", help="besides stock code; '' for all")
    parser.add_argument("--workload", help="only workloads with this tag")
    parser.add_argument("--limit", type=int, default=3, help="workloads of each Definition")
    parser.add_argument("--warm", action="store_true", help="begin with this user's caches, not with empty ones")
    parser.add_argument("--skip", default="", help="runs to leave out: kill")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for many_gpus.json")
    options = parser.parse_args()
    options.language = (options.language if options.slots is None else "python") or None
    devices = cpu_slots(options.slots) if options.slots else devices_of(options.gpus, "auto")
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        catalog = limited_catalog(Path(folder), options.names, options.workload, options.limit)
        for name, chosen, kill_after in plan(devices, options.skip):
            runs[name] = measure(options, catalog, chosen, kill_after)
            save(options, runs)  # what is there, should a later run be cut off
            print(f"{name}: {runs[name]['pairs']} pairs in {runs[name]['seconds']} s", file=sys.stderr, flush=True)
    print_table(runs, judge(runs))
    print_phases(runs)
    return 1 if judge(runs) else 0


def plan(devices: list[MeasuringDevice], skip: str) -> list[tuple[str, list[MeasuringDevice], float | None]]:
    """Name, devices, and the share of pairs after which a supervisor is killed, of each run."""
    runs: list[tuple[str, list[MeasuringDevice], float | None]] = [
        ("one", devices[:1], None),
        (str(len(devices)), devices, None),
    ]
    return runs if "kill" in skip else [*runs, (f"{len(devices)}, one killed", devices, 0.3)]


def save(options: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> None:
    """Write ``many_gpus.json``."""
    options.output.mkdir(parents=True, exist_ok=True)
    content = {
        "tier": options.tier,
        "names": options.names,
        "limit": options.limit,
        "runs": runs,
        "problems": judge(runs),
    }
    (options.output / "many_gpus.json").write_text(json.dumps(content, indent=1))


def print_table(runs: dict[str, dict[str, Any]], problems: list[str]) -> None:
    """One row a run, then what is wrong."""
    base = runs["one"]["pairs_a_minute"]
    print(
        f"{'devices':<14} {'pairs':>6} {'seconds':>8} {'pairs/min':>10} {'of one':>7}  first work, traces of each, verdicts"
    )
    for name, run in runs.items():
        ratio = run["pairs_a_minute"] / base if base else 0.0
        rest = f"{run['first_work_s']} {run['traces_of_each']} {run['counts']}"
        print(f"{name:<14} {run['pairs']:>6} {run['seconds']:>8} {run['pairs_a_minute']:>10} {ratio:>6.2f}x  {rest}")
        for note in run["notes"]:
            print(f"  {note}")
    print("\n".join(problems) or "same verdicts, nothing lost, nothing twice")


def print_phases(runs: dict[str, dict[str, Any]]) -> None:
    """Where the time of each supervisor went; ``busy`` is the share of its processors that it used while at work."""
    columns = (START, IDLE, AT_WORK, PREPARE, VERIFY, WAIT, TIME, *SIDE_BY_SIDE)
    print("\nseconds of each supervisor; those after 'time' are sums over the threads of 'verify'")
    print("  ".join((f"{'':<24}", *columns, "processors", "busy")))
    for name, run in runs.items():
        print(f"{name}: planned after {run['planned_s']} s")
        for (label, seconds), processors in zip(run["phases"].items(), run["processors"], strict=True):
            at_work = seconds.get(AT_WORK, 0.0)
            busy = seconds.get(PROCESSORS, 0.0) / (at_work * processors) if at_work else 0.0
            figures = [f"{seconds.get(column, 0.0):>{len(column)}.1f}" for column in columns]
            print("  ".join((f"  {label:<22}", *figures, f"{processors:>10}", f"{busy:>4.0%}")))


if __name__ == "__main__":
    sys.exit(main())

"""Several GPUs of a host against one of them: the same plan with cold caches, and again with a supervisor killed.

Prints a table of three runs (one device, all of them, all of them with ``kill -9`` of one supervisor), then where the time of
each supervisor went, and writes ``many_gpus.json`` with every verdict and time. Exit status 1 where a verdict differs, or a pair
is missing or there twice. One device alone has all processors of the host; the run ``share`` gives it as many as it has beside
the others. Ctrl-C ends with the runs that are done.

    python benchmarks/many_gpus.py --gpus all --output /tmp/figures
    python benchmarks/many_gpus.py --gpus all --several --limit 16 --calibrated --runs one,all,kill
    python benchmarks/many_gpus.py --gpus all --only uuids.txt --tier promotion --language '' --homes /tmp/homes rms_norm
    python benchmarks/many_gpus.py --several --limit 16 --dry-run   # without a GPU: how the plan would be divided for --gpus 4
    python benchmarks/many_gpus.py --slots 2 --warm --workload cpu --limit 2 rms_norm   # the machinery, without a GPU

A plan of few pairs says nothing of the rate: each supervisor starts, calibrates, starts workers and compiles once whatever it is
given, and that takes as long on one device as on several. ``--limit 24 --language ''`` gives minutes of work on a GPU. A plan of
eight operators makes one piece for each of four devices; one of 24 and more (``--several``) is divided into pieces of three
sizes, so that all devices end at about the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.benchmark import bench, verify
from tilegym_db.measurement.devices.messages import divide
from tilegym_db.measurement.machine import (
    MeasuringDevice,
    cpu_machine,
    cpu_slots,
    devices_of,
    devices_of_options,
    share_processors,
)
from tilegym_db.measurement.plan import BenchReport, Options, make_plan
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.paths import shipped_root
from tilegym_db.records import Trace
from tilegym_db.verification.phases import AT_WORK, IDLE, PREPARE, PROCESSORS, SIDE_BY_SIDE, START, TIME, VERIFY, WAIT

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
SEVERAL = (
    *(
        "aux_fi",
        "cast_back",
        "expand_to_fused",
        "fused_add_rms_norm",
        "gelu_tanh_and_mul",
        "greedy_argmax",
        "group_count",
    ),
    *(
        "mask_indices_by_tp",
        "moe_offsets",
        "normalize_weight",
        "per_row_cast",
        "per_token_cast",
        "qk_rms_norm",
        "reduce_fused",
    ),
    *("rms_norm_backward", "rms_norm_backward_x", "rms_norm_fp32", "rope_neox", "rope_neox_backward", "rope_partial"),
    *("shared_expert_add", "shared_expert_gate", "silu_and_mul", "softmax", "swiglu_backward", "topk_gate"),
    *("topk_softmax", "topk_then_softmax"),
)
"""Many workloads each, and nothing under torch.compile, which alone decides how long a batch is verified."""
RUNS = ("one", "share", "all", "kill")
KILLED_AFTER = 0.3
"""Share of the pairs."""


@dataclass(frozen=True)
class Run:
    """One of :data:`RUNS`; after a share of its pairs, ``kill_after``, a supervisor is killed."""

    name: str
    devices: list[MeasuringDevice]
    processors: tuple[int, ...]
    kill_after: float | None = None


class Watch:
    """When each device began, and, where asked to, the kill of one supervisor after a share of the pairs."""

    def __init__(self, kill_after: float | None) -> None:
        self.begun = time.perf_counter()
        self.planned_s = 0.0
        self.first_work_s: dict[str, float] = {}
        self.killed: list[int] = []
        self._kill_after, self._pairs, self._seen = kill_after, 0, 0

    def observer(self) -> Observer:
        """Return callbacks for the run."""
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
            if parent == os.getpid() and b"measurement.devices.supervisor" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found)


def limited_catalog(
    root: Path, names: Sequence[str], pattern_tag: str | None, limit: int, only: frozenset[str] | None = None
) -> Catalog:
    """Return the shipped records, with at most so many workloads of each Definition, spread over its list, or ``only`` these.

    ``names`` are of Definitions or of Solutions.
    """
    for folder in ("definitions", "solutions"):
        shutil.copytree(shipped_root() / folder, root / folder)
    shipped = Catalog((shipped_root(),))
    for name in sorted({shipped.solutions[n].record.definition if n in shipped.solutions else n for n in names}):
        definition = shipped.definition(name)
        found = [w for w in shipped.workloads_for(name) if pattern_tag is None or pattern_tag in w.tags]
        if only is not None:
            found = [w for w in found if w.uuid in only]
        count = min(limit, len(found))
        chosen = [found[round(i * (len(found) - 1) / max(count - 1, 1))] for i in range(count)]
        path = root / "workloads" / definition.op_type / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(workload.to_json() + "\n" for workload in {w.uuid: w for w in chosen}.values()))
    return Catalog((root,))


def measure(options: argparse.Namespace, catalog: Catalog, peaks: Path | None, run: Run) -> dict[str, Any]:
    """Make one run in a separate store, with empty caches; the store stays if ``--homes`` asks for it."""
    devices = run.devices
    with tempfile.TemporaryDirectory() as scratch, on_processors(run.processors):
        if not options.warm:
            os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        home = (
            options.homes / run.name.replace(", ", "-").replace(" ", "-") if options.homes else Path(scratch) / "home"
        )
        home.mkdir(parents=True, exist_ok=True)
        if peaks is not None:
            shutil.copytree(peaks, home, dirs_exist_ok=True)
        watch = Watch(run.kill_after)
        tier = verify if options.tier == "promotion" else bench
        report = tier(
            tuple(options.names), devices=devices, language=options.language, catalog=catalog,
            store_home=home, observer=watch.observer(),
        )  # fmt: skip
        return record(report, run, watch)


@contextlib.contextmanager
def on_processors(processors: Sequence[int]) -> Iterator[None]:
    """Give these processors to everything that is started inside the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def calibrated(folder: Path) -> Path:
    """Return a home folder with the peaks of this host's GPUs, which are of one kind."""
    command = [sys.executable, "-m", "tilegym_db", "doctor", "calibrate"]
    subprocess.run(command, env={**os.environ, "TILEGYM_DB_HOME": str(folder)}, check=True, stdout=sys.stderr)
    return folder


def record(report: BenchReport, run: Run, watch: Watch) -> dict[str, Any]:
    """Return what is kept of one run. ``working_pairs_a_minute`` counts from when the first device began with its work."""
    seconds, devices = time.perf_counter() - watch.begun, run.devices
    working = seconds - min(watch.first_work_s.values(), default=0.0)
    pairs = Counter(key(trace) for trace in report.traces)
    return {
        "devices": [device.label for device in devices],
        "gpu": report.machine.gpu_name,
        "host": report.machine.host,
        "seconds": round(seconds, 2),
        "pairs": len(report.traces),
        "pairs_a_minute": round(60 * len(report.traces) / seconds, 1),
        "working_pairs_a_minute": round(60 * len(report.traces) / working, 1),
        "planned_s": watch.planned_s,
        "first_work_s": watch.first_work_s,
        "phases": {label: {name: round(s, 2) for name, s in found.items()} for label, found in report.seconds.items()},
        "processors": [len(block) for block in share_processors(run.processors, len(devices))],
        "traces_of_each": dict(report.devices),
        "counts": dict(report.counts),
        "twice": [name for name, times in pairs.items() if times > 1],
        "verdicts": {key(trace): trace.status for trace in report.traces},
        "reasons": {key(trace): trace.reason for trace in report.traces if trace.reason},
        "latency_us": {key(t): t.performance.latency_us for t in report.traces if t.performance is not None},
        "gpu_uuids": dict(Counter(trace.gpu_uuid for trace in report.traces)),
        "killed": watch.killed,
        "notes": report.notes,
        "unfinished": [*report.unfinished, *(["it was interrupted"] if report.interrupted else [])],
    }


def key(trace: Trace) -> str:
    """Return the Solution, config and workload of a trace."""
    return f"{trace.solution} {json.dumps(trace.config, sort_keys=True)} {trace.workload_uuid}"


def judge(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Return what differs from the first run, which is on one device, and what is missing or there twice."""
    problems = []
    one = next(iter(runs.values()))["verdicts"]
    for name, run in runs.items():
        problems += [f"{name}: twice: {pair}" for pair in run["twice"]]
        problems += [f"{name}: not finished: {reason}" for reason in run["unfinished"]]
        problems += [f"{name}: missing: {pair}" for pair in sorted(set(one) - set(run["verdicts"]))]
        problems += [
            f"{name}: {pair}: {status}, and {one.get(pair)} in the first run"
            for pair, status in run["verdicts"].items()
            if status != one.get(pair)
        ]
    return problems


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="Definitions; some by default")
    parser.add_argument("--several", action="store_true", help=f"{len(SEVERAL)} Definitions in place of {len(NAMES)}")
    parser.add_argument("--gpus", default="all")
    parser.add_argument("--slots", type=int, help="so many slots of the CPU in place of GPUs")
    parser.add_argument("--tier", choices=("screen", "promotion"), default="screen")
    parser.add_argument("--language", default="triton", help="in addition to stock code; '' for all")
    parser.add_argument("--workload", help="only workloads with this tag")
    parser.add_argument("--limit", type=int, default=3, help="workloads of each Definition")
    parser.add_argument("--only", type=Path, help="a file of workload UUIDs, one a line; no others, and no --limit")
    parser.add_argument("--homes", type=Path, help="a folder for the store of each run, which is kept there")
    parser.add_argument("--warm", action="store_true", help="begin with this user's caches, not with empty ones")
    parser.add_argument("--calibrated", action="store_true", help="calibrate before the first run, not in each")
    parser.add_argument("--runs", default="one,all,kill", help=f"with commas, of {', '.join(RUNS)}")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for many_gpus.json")
    parser.add_argument("--dry-run", action="store_true", help="say how the plan would be divided on an H200 host")
    options = parser.parse_args(arguments)
    options.names = options.names or list(SEVERAL if options.several else NAMES)
    options.language = (options.language if options.slots is None else "python") or None
    options.runs = options.runs.split(",")
    unknown = sorted(set(options.runs) - set(RUNS))
    if unknown:
        parser.error(f"--runs: unknown: {', '.join(unknown)}. Known: {', '.join(RUNS)}")
    if options.homes and any(options.homes.glob("*/runs/*.jsonl")):
        parser.error(
            f"--homes: {options.homes} has what an earlier run measured, which no run repeats. Name another folder"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 1 if something is wrong."""
    options = parsed(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts programs of its background without it
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        only = frozenset(options.only.read_text().split()) if options.only else None
        options.limit = options.limit if only is None else len(only)
        catalog = limited_catalog(Path(folder) / "catalog", options.names, options.workload, options.limit, only)
        if options.dry_run:
            return print_division(options, catalog)
        devices = cpu_slots(options.slots) if options.slots else devices_of(devices_of_options("auto", options.gpus))
        peaks = calibrated(Path(folder) / "home") if options.calibrated and not options.slots else None
        with contextlib.suppress(KeyboardInterrupt):
            for run in plan(devices, options.runs):
                found = runs[run.name] = measure(options, catalog, peaks, run)
                save(options, runs)  # what is there, should a later run be cut off
                print(f"{run.name}: {found['pairs']} pairs in {found['seconds']} s", file=sys.stderr, flush=True)
                if "it was interrupted" in found["unfinished"]:
                    break
    if not runs:
        print("no run came to its end", file=sys.stderr)
        return 1
    print_table(runs, judge(runs))
    print_phases(runs)
    return 1 if judge(runs) else 0


def plan(devices: list[MeasuringDevice], asked: Sequence[str]) -> list[Run]:
    """Return the runs that are asked for, those on one device first."""
    processors, count = tuple(sorted(os.sched_getaffinity(0))), str(len(devices))
    runs = {
        "one": Run("one", devices[:1], processors),
        "share": Run("one, its share", devices[:1], share_processors(processors, len(devices))[0]),
        "all": Run(count, devices, processors),
        "kill": Run(f"{count}, one killed", devices, processors, KILLED_AFTER),
    }
    return [run for name, run in runs.items() if name in asked]


def print_division(options: argparse.Namespace, catalog: Catalog) -> int:
    """Print pairs of the plan, and the pieces that it makes for so many devices as ``--gpus`` says."""
    machine = replace(cpu_machine(), gpu="h200", sm="sm_90", device="cuda:0")
    asked = Options(tuple(options.names), options.language, None, False, False, options.tier)
    made = make_plan(catalog, machine, asked, set())
    words = options.gpus.split(",")
    count = len(words) if len(words) > 1 else int(words[0]) if words[0].isdecimal() else 4
    print(f"{len(made.definitions)} operators, {made.pair_count} pairs; pieces for {count} devices:")
    for item in divide(made.definitions, count):
        print(f"  {len(item.plans)} operators, {replace(made, definitions=list(item.plans)).pair_count} pairs")
    return 0


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
    """Print one row per run, then what is wrong."""
    base = next(iter(runs.values()))
    print(
        f"{'devices':<14} {'pairs':>6} {'seconds':>8} {'pairs/min':>10} {'of one':>7} {'at work':>8} {'of one':>7}  "
        "first work, traces of each, verdicts"
    )
    for name, run in runs.items():
        figures = [f"{run['pairs']:>6} {run['seconds']:>8}"]
        for rate, width in (("pairs_a_minute", 10), ("working_pairs_a_minute", 8)):
            figures.append(f"{run[rate]:>{width}} {run[rate] / base[rate] if base[rate] else 0.0:>6.2f}x")
        rest = f"{run['first_work_s']} {run['traces_of_each']} {run['counts']}"
        print(f"{name:<14} {' '.join(figures)}  {rest}")
        for note in run["notes"]:
            print(f"  {note}")
    print("\n".join(problems) or "same verdicts, nothing lost, nothing twice")


def print_phases(runs: dict[str, dict[str, Any]]) -> None:
    """Print the time of each supervisor by phase; ``busy`` is the share of its processors that it used while at work."""
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

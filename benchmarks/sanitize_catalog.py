"""compute-sanitizer over every shipped kernel, many at a time, and over two planted mistakes that it has to find.

``tilegym-db sanitize`` goes through the catalog in one process for each tool and language, which takes an hour. Most of it is
compiling, on one core; so this starts as many processes as there are cores, each over a few Solutions. What is checked is the
same. Nothing is stored: a finding is for ``tilegym-db sanitize NAME`` to confirm, which records it.

    python -m benchmarks.sanitize_catalog --limit-s 190
    python -m benchmarks.sanitize_catalog --tools memcheck,racecheck --languages triton,tilelang,cutile --cases 4
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.instruments.chosen import Chosen, choose_solutions, with_cases
from tilegym_db.bench.instruments.process import ENVIRONMENT
from tilegym_db.bench.instruments.programs import find_program
from tilegym_db.bench.instruments.sanitize import NO_CASE, TOOLS, Run, Sanitized
from tilegym_db.bench.run_setup import RunSetup
from tilegym_db.paths import shipped_root

PLANTED = {"out_of_bounds": ("memcheck", "Invalid __global__ write"), "shared_race": ("racecheck", "Race")}
"""Folder under ``tests/bench/planted`` -> the tool that has to find its mistake, and how the finding begins."""
BATCH = 6
"""Solutions of one process: few, so that the cores end at the same time; several, since each process starts CUDA."""
PORTS = 64
"""For each process at a time: the tool talks to its process over one, and by itself tries ten from the same one on."""
CONNECT_S = 120
"""A process imports PyTorch before it calls CUDA: beside many others that takes longer than the 10 s that the tool waits."""
NO_TIME = "not run: no time was left"


@dataclass(frozen=True)
class Batch:
    """What one process is given."""

    tool: str
    solutions: Sequence[Chosen]


@dataclass
class Sweep:
    """Batches on their way through a pool of processes, until a deadline."""

    program: Path
    device: str
    jobs: int
    deadline: float
    """By ``time.monotonic()``."""
    say: Callable[[str], None] = print
    results: list[Sanitized] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slots: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for slot in range(self.jobs):
            self._slots.put(slot)

    def run(self, batches: Sequence[Batch]) -> list[Sanitized]:
        """Every Solution's result for every tool, in the order in which they came."""
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(self._batch, batches))
        return self.results

    def _batch(self, batch: Batch) -> None:
        with tempfile.TemporaryDirectory(prefix="sanitize-") as folder:
            run = Run(batch.tool, self.device, self._output_of, self.program)
            if time.monotonic() < self.deadline:
                run.over(batch.solutions, Path(folder))
        done = {result.chosen.files.name for result in run.results}
        left = [Sanitized(item, batch.tool, problem=NO_TIME) for item in batch.solutions if item.files.name not in done]
        with self._lock:
            self.results += [*run.results, *left]
            for result in run.results:
                self.say(line_of(result))

    def _output_of(self, command: list[str], folder: Path) -> str:
        """What a command prints; one that is still running at the deadline is ended, and proves nothing."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return f"========= {NO_TIME}\n"
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        slot = self._slots.get()
        try:
            return self._ended(with_port(command, slot), folder, environment, left)
        finally:
            self._slots.put(slot)

    def _ended(self, command: list[str], folder: Path, environment: dict[str, str], left: float) -> str:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            said += f"\n========= {NO_TIME}\n".encode()
        return said.decode(errors="replace")


def with_port(command: Sequence[str], slot: int) -> list[str]:
    """The command with ports of its own, so that many run side by side."""
    first = 49152 + PORTS * slot
    ours = ("--port", str(first), "--max-connections", str(PORTS), "--launch-timeout", str(CONNECT_S))
    return [command[0], *ours, *command[1:]]


def line_of(result: Sanitized) -> str:
    """One line: clean, or what was found first, or why nothing is known."""
    name, tool = result.chosen.files.name, result.tool
    if result.errors:
        first = result.errors[0]
        what = f"FOUND {len(result.errors)}: {first} at {result.chosen.cases[first.case]}"
    elif result.problem:
        what = result.problem if NO_TIME in result.problem else f"PROBLEM {result.problem}"
    else:
        warnings = f", {len(result.findings)} warnings" if result.findings else ""
        what = f"clean, {len(result.chosen.cases)} cases{warnings}"
    return f"{tool:<9} {name:<45} {what}"[:400].replace("\n", " ")


def batches_of(chosen: Sequence[Chosen], tools: Sequence[str], languages: Sequence[str], size: int) -> list[Batch]:
    """Tool by tool and language by language, in the order asked for: what a deadline cuts off is the end of it."""
    made = []
    for tool in tools:
        for language in languages:
            group = [item for item in chosen if item.files.record.spec.language == language]
            count = -(-len(group) // size)
            made += [Batch(tool, group[number::count]) for number in range(count)]
    return made


def planted(setup: RunSetup, cases: int) -> dict[str, Chosen]:
    """The planted mistakes, by folder."""
    found = {}
    for name in PLANTED:
        folder = shipped_root() / "tests" / "bench" / "planted" / name
        (item,) = choose_solutions(setup.catalog, [str(folder)], setup.machine)
        found[name] = with_cases(item, setup.catalog.workloads_for(item.definition.name), cases, seed=1)
    return found


def missed(results: Sequence[Sanitized], mistakes: dict[str, Chosen]) -> list[str]:
    """The planted mistakes that their tools did not find, in words."""
    names = []
    for name, (tool, begins) in PLANTED.items():
        of_it = [
            result
            for result in results
            if result.chosen.files.name == mistakes[name].files.name and result.tool == tool
        ]
        found = any(finding.what.startswith(begins) for result in of_it for finding in result.errors)
        if not found:
            names.append(f"{tool} did not find the planted mistake '{name}'")
    return names


def summary(results: Sequence[Sanitized], seconds: float) -> str:
    """How many Solutions each tool found clean, and how many calls that were."""
    lines = []
    for tool in dict.fromkeys(result.tool for result in results):
        of_tool = [result for result in results if result.tool == tool]
        kinds = Counter(_kind(result) for result in of_tool)
        calls = sum(len(result.chosen.cases) for result in of_tool if result.is_clean)
        spelled = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        lines.append(f"{tool}: {spelled}; {calls} calls without an error")
    return "\n".join([*lines, f"{seconds:.0f} s"])


def _kind(result: Sanitized) -> str:
    if result.errors:
        return "with findings"
    if result.problem:
        return "not run to the end" if NO_TIME in result.problem else "without a verdict"
    return "clean"


def main() -> int:
    """Sweep and print; 1 where a shipped kernel is not clean or not known to be, or a planted mistake was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="solutions or definitions; every kernel by default")
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--tools", default="memcheck", help=f"with commas, of {', '.join(TOOLS)}")
    parser.add_argument("--languages", default="triton", help="with commas, in this order")
    parser.add_argument("--cases", type=int, default=4, help="fuzz cases of each solution, over its dtypes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=3600, help="nothing runs longer than this")
    options = parser.parse_args()
    started = time.monotonic()
    setup = RunSetup.of(options.gpu, None, None)
    tools, languages = options.tools.split(","), options.languages.split(",")
    seed = time.time_ns() & ((1 << 62) - 1)
    chosen = [
        with_cases(item, setup.catalog.workloads_for(item.definition.name), options.cases, seed)
        for item in choose_solutions(setup.catalog, options.names, setup.machine)
        if item.files.record.spec.language in languages
    ]
    nothing = [Sanitized(item, tool, problem=NO_CASE) for item in chosen if not item.cases for tool in tools]
    chosen = [item for item in chosen if item.cases]
    mistakes = planted(setup, 2)
    first = [Batch(tool, [mistakes[name]]) for name, (tool, _) in PLANTED.items()]
    batches = first + batches_of(chosen, tools, languages, BATCH)
    print(f"{len(chosen)} kernels, {len(batches)} processes, {options.jobs} at a time, seed {seed}", flush=True)
    with timing_lock(setup.machine.device):
        program = find_program("compute-sanitizer")
        sweep = Sweep(
            program,
            setup.machine.device,
            options.jobs,
            started + options.limit_s,
            lambda line: print(f"{time.monotonic() - started:5.0f} s {line}", flush=True),
        )
        results = sweep.run(batches)
    names = {item.files.name for item in mistakes.values()}
    shipped = [*nothing, *(result for result in results if result.chosen.files.name not in names)]
    for result in shipped:
        if not result.is_clean:
            print(f"not clean: {line_of(result)}")
            for finding in result.errors[:3]:
                print(f"    {finding} ({finding.times}x); {'; '.join(finding.details[:4])}"[:600])
    not_found = missed(results, mistakes)
    print("\n".join(not_found) or "both planted mistakes were found")
    print(summary(shipped, time.monotonic() - started))
    return int(bool(not_found) or not all(result.is_clean for result in shipped))


if __name__ == "__main__":
    raise SystemExit(main())

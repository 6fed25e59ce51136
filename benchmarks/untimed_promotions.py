"""How often a promotion refuses what is honest, without clocks: many kernels of a GPU at a time, each judged by all gates.

    python benchmarks/untimed_promotions.py --device cuda:0 --processes 16 --series 0.2 --deadline 225 --out honest.jsonl
    python benchmarks/untimed_promotions.py --device cuda:0 --processes 16 --series 0.2 --deadline 225 --skip honest.jsonl \
        --out more.jsonl
    python benchmarks/untimed_promotions.py --device cpu rms_norm softmax --total 4 --out honest.jsonl
    python benchmarks/untimed_promotions.py --merge honest.jsonl more.jsonl

``false_rejects.py`` has whole promotions, with their times, which a GPU takes one after the other. Here a kernel goes through the
static scan and every case, situation and sequence of a promotion, with fresh secret seeds, at one workload. Kernels come in
turns: one of each Definition, then one in another language, then the next workload. In each turn, those come first that compile
quickly. On a CPU these are Solutions in PyTorch. ``--skip`` leaves out what such files have. What is not judged by the deadline
is ended and not counted. Exits with 1 if anything honest was refused.

Nearly all of a verdict is compilation, by one processor: 28 to 39 specialisations for the cases, and up to 130 more where a
kernel is compiled for each size of an axis. So there should be as many ``--processes`` as processors, and nothing else beside
them. ``--series`` is the number of seconds for each series of sizes; all of them have five times as many. Each line has the
seconds by phase, and with one job the processor seconds of the harness and its workers. The large cases of each process take its
part of the free memory.

Each line also has a digest of the code that judges. So verdicts of several days may be kept in one file: ``--merge`` counts those
of each digest for themselves, by Definition, and ``--skip`` leaves out only what today's code has judged.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parent))  # the other scripts, however this file is loaded

from false_rejects import by_size
from in_processes import by_gates, gates_digest, one_thread_each, run_parts, without

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.measurement.plan import fits_a_cpu
from tilegym_db.paths import scratch_folder
from tilegym_db.records import TILE_LANGUAGES, Workload
from tilegym_db.records.hardware import CPU
from tilegym_db.sandbox import scan
from tilegym_db.verification.expected import ExpectedCache, WorkloadContents
from tilegym_db.verification.phases import INSIDE, processor_seconds
from tilegym_db.verification.session import BaselineCheck, Verification
from tilegym_db.verification.verifier import CANNOT_VERIFY, Failure, cannot_verify
from tilegym_db.verification.worker_handle import PROMOTION, RunnerLimits, WorkerHandle

UNTIMED_PROMOTION = replace(PROMOTION, audited=False)
COMPILATION = {"triton": 0.2, "cutile": 0.33, "tilelang": 0.33}
"""Seconds in which a processor compiles ``rms_norm`` for one shape; a longer source takes longer in each of them."""


@dataclass(frozen=True)
class Work:
    """One Solution at one workload."""

    solution: str
    workload: Workload

    @property
    def key(self) -> tuple[str, str]:
        """Name of it in a file of verdicts."""
        return self.solution, self.workload.uuid


def in_turns(catalog: Catalog, names: Sequence[str], device: str) -> Iterator[Work]:
    """Yield a Solution of each Definition, then another of each, then all of them at the next workload.

    What compiles quickly comes first in each turn.
    """
    languages = ("python",) if device == CPU else TILE_LANGUAGES
    found: list[list[Work]] = []
    for place, name in enumerate(names or sorted(catalog.definitions)):
        definition = catalog.definition(name)
        solutions = [
            one.name
            for one in catalog.solutions_for(name)
            if may_run(one, device) and one.record.spec.language in languages
        ]
        fitting = [one for one in catalog.workloads_for(name) if device != CPU or fits_a_cpu(definition, one)]
        works = [Work(solution, workload) for workload in by_size(definition, fitting) for solution in solutions]
        # Shifted by the place in the list, so that one turn has kernels of every language.
        shift = place % max(len(solutions), 1)
        found.append([*works[shift:], *works[:shift]])
    for turn in range(max(map(len, found), default=0)):
        now = [works[turn] for works in found if turn < len(works)]
        yield from sorted(now, key=lambda work: compilation(catalog.solution(work.solution)))


def compilation(solution: SolutionFiles) -> float:
    """Return about how long one shape of a Solution is compiled, for comparison with others."""
    spec = solution.record.spec
    return COMPILATION.get(spec.language, 0.0) * len(solution.sources[spec.entry_path])


def may_run(solution: SolutionFiles, device: str) -> bool:
    """Return True for a kernel, and on a CPU for code in PyTorch that needs no other library."""
    spec = solution.record.spec
    if device == CPU:
        return spec.provides != "compile" and all(one.startswith("torch") for one in spec.dependencies)
    return spec.role == "kernel" and not spec.omits


@dataclass
class Running:
    """State that the works of one process share."""

    catalog: Catalog
    device: str
    folder: Path
    out: TextIO | None
    limits: RunnerLimits = field(default_factory=RunnerLimits)
    over: bool = False
    handles: list[WorkerHandle] = field(default_factory=list)
    lines: list[dict[str, object]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """End every worker, so that all that is being judged fails."""
        with self.lock:
            self.over = True
            for handle in self.handles:
                handle.abort()

    def handle_of(self, solution: SolutionFiles, number: str) -> WorkerHandle:
        """Return a handle that ends with this run."""
        definition = self.catalog.definition(solution.record.definition)
        handle = WorkerHandle(
            definition,
            solution,
            self.device,
            self.folder / number,
            UNTIMED_PROMOTION,
            profiled=False,
            limits=self.limits,
        )
        with self.lock:
            self.handles.append(handle)
            if self.over:
                handle.abort()
        return handle

    def judge(self, number: int, work: Work) -> None:
        """Judge one work and write its line, unless the time ended before."""
        if self.over:
            return
        began, seed, phases = time.monotonic(), secrets.randbits(62), dict[str, float]()
        of_harness, of_all = time.process_time(), processor_seconds()
        found = self._verdict(number, work, seed, phases)
        of_harness, of_all = time.process_time() - of_harness, processor_seconds() - of_all
        if self.over:
            return
        solution = self.catalog.solution(work.solution)
        line: dict[str, object] = {
            "definition": solution.record.definition,
            "solution": work.solution,
            "digest": solution.digest,
            "gates": gates_digest(),
            "language": solution.record.spec.language,
            "workload": work.workload.uuid,
            "axes": work.workload.axes,
            "dtypes": work.workload.dtypes,
            "status": "PASSED" if found is None else found.status,
            "reason": "" if found is None else found.reason,
            "seed": seed,
            "seconds": round(time.monotonic() - began, 1),
            "phases": phases,
            "processor": {"harness": round(of_harness, 2), "workers": round(of_all - of_harness, 2)},
        }
        with self.lock:
            self.lines.append(line)
            if self.out is not None:
                self.out.write(json.dumps(line) + "\n")
                self.out.flush()

    def _verdict(self, number: int, work: Work, seed: int, phases: dict[str, float]) -> Failure | None:
        solution = self.catalog.solution(work.solution)
        name = solution.record.definition
        hard = scan.hard_findings(scan.scan_sources(solution.record, solution.sources))
        if hard:
            return Failure("REJECTED", str(hard[0]))
        handle = self.handle_of(solution, f"{number}")
        stock = next((one for one in self.catalog.solutions_for(name) if one.record.spec.provides == "stock"), None)
        baseline = BaselineCheck(
            lambda: None if stock is None else Verification(self.handle_of(stock, f"{number}-stock"))
        )
        try:
            cache = ExpectedCache(handle.definition, self.device)
            contents = WorkloadContents.draw(handle.definition, work.workload, seed, cache, in_turn=True)
            anchors = tuple(self.catalog.workloads_for(name))
            found = Verification(handle, baseline).verify(contents, anchors, seed, cache)
        except CANNOT_VERIFY as error:
            found = cannot_verify(error)
        finally:
            baseline.close()
            handle.close()
        phases |= {part.phase: round(part.seconds, 2) for part in handle.phases.take_spent()}
        return found if isinstance(found, Failure) else None


def run(options: argparse.Namespace) -> list[dict[str, object]]:
    """Judge this process's part until the deadline, and return the lines."""
    one_thread_each()
    catalog = Catalog.default()
    lines = [line for line in lines_of(options.skip) if line.get("gates") == gates_digest()]
    skipped = {(str(line["solution"]), str(line["workload"])) for line in lines}
    works = [work for work in in_turns(catalog, options.names, options.device) if work.key not in skipped]
    number, count = options.part
    mine = list(islice(works[number::count], options.total and -(-options.total // count)))
    out = options.out.open("w", encoding="utf-8") if options.out else None
    with scratch_folder() as folder, ThreadPoolExecutor(options.jobs) as pool:
        limits = RunnerLimits(series_s=options.series, device_share=count * options.jobs)
        running = Running(catalog, options.device, folder, out, limits)
        timer = threading.Timer(min(options.deadline, threading.TIMEOUT_MAX), running.end)
        timer.daemon = True
        timer.start()
        for task in [pool.submit(running.judge, place, work) for place, work in enumerate(mine)]:
            task.result()
        timer.cancel()
    return running.lines


def lines_of(paths: Sequence[Path]) -> list[dict[str, object]]:
    """Return the verdicts of files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def part_of(text: str) -> tuple[int, int]:
    """Parse ``0/4``."""
    number, _, count = text.partition("/")
    return int(number), int(count)


def show(lines: Sequence[dict[str, object]]) -> int:
    """Print the counts and each refusal, for each digest of the gates; return the exit status."""
    return max([_show(gates, found) for gates, found in by_gates(lines).items()], default=1)


def _show(gates: str, lines: Sequence[Mapping[str, object]]) -> int:
    statuses = Counter(str(line["status"]) for line in lines)
    refused = [line for line in lines if line["status"] not in ("PASSED", "UNSUPPORTED")]
    for line in refused:
        print(f"{line['solution']} {line['axes']} {line['dtypes']} {line['seed']}: {line['status']}: {line['reason']}")
    judged = len(lines) - statuses["UNSUPPORTED"]
    seconds = sorted(float(str(line["seconds"])) for line in lines) or [0.0]
    definitions = Counter(str(line["definition"]) for line in lines if line["status"] != "UNSUPPORTED")
    print(f"code {gates}: {', '.join(f'{name} {count}' for name, count in sorted(definitions.items()))}")
    print(
        f"{judged} verdicts on {len({line['solution'] for line in lines})} honest solutions of {len(definitions)} definitions: "
        f"{len(refused)} false rejects, {statuses['UNSUPPORTED']} unsupported; {seconds[len(seconds) // 2]} s each (median)"
    )
    print("; ".join(f"{phase} {share:.0%}" for phase, share in shares(lines).items()))
    return 1 if refused or not judged else 0


def shares(lines: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Return the share of each phase in all seconds, the largest first; phases that are parts of others come last."""
    whole, sums = sum(float(str(line["seconds"])) for line in lines), Counter[str]()
    for line in lines:
        found = line.get("phases")
        sums.update(found if isinstance(found, dict) else {})
    return {phase: sums[phase] / whole for phase in sorted(sums, key=lambda one: (one in INSIDE, -sums[one]))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="definitions; all by default")
    parser.add_argument("--device", default=CPU, help="cpu or cuda:<n>")
    parser.add_argument("--jobs", type=int, default=1, help="kernels at a time in one process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", type=part_of, default=(0, 1), help="only this part of the work, as 0/4")
    parser.add_argument("--series", type=float, default=math.inf, help="seconds for each series of sizes")
    parser.add_argument("--total", type=int, help="kernels to judge; as many as there is time for by default")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which the run ends")
    parser.add_argument("--out", type=Path, help="verdicts as JSON lines, written as they come")
    parser.add_argument("--skip", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing: what such files have")
    options = parser.parse_args(arguments)
    if options.merge:
        return show(lines_of(options.merge))
    if options.processes == 1:
        return show(run(options))
    if options.out is None:
        parser.error("--processes needs --out, which all of them write to")
    given = without(sys.argv[1:] if arguments is None else arguments, "--processes", "--out")
    run_parts(__file__, given, options.processes, options.out, options.deadline)
    return show(lines_of([options.out]))


if __name__ == "__main__":
    raise SystemExit(main())

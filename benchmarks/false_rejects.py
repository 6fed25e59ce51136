"""How often the promotion tier refuses what is honest: every Solution of the catalog, verified again and again.

    python benchmarks/false_rejects.py --repeats 100 --gpu cpu
    python -m benchmarks.false_rejects --turns --gpus 2,3 --seconds 300 --out verdicts.jsonl

Every repeat has fresh processes and fresh secret seeds. The traces go to a separate store that is thrown away, so that a
false reject revokes nothing. A Solution that declares a shape, dtype or device unsupported is counted apart: nothing was judged.

``--turns`` is for a GPU, where all of it would take hours: a repeat takes one kernel of each Definition, in another language
each time, with stock code beside it, at the smallest of its workloads that is worth a call, then at the next. ``--seconds`` ends
the run wherever it is; what was judged by then counts, and ``--out`` has it as it comes. Exits with 1 if anything honest was
refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO

from tilegym_db.catalog import Catalog
from tilegym_db.measurement import plan
from tilegym_db.measurement.benchmark import verify
from tilegym_db.measurement.machine import devices_of_options
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.records import TILE_LANGUAGES, Definition, Trace, Workload

WORTH_A_CALL = 1 << 20
"""Bytes that a workload moves: of smaller ones there is hardly a time to judge."""


@dataclass
class Tally:
    """Verdicts so far: how many of each status, by Solution, and the traces of what was refused."""

    out: TextIO | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    by_solution: dict[str, Counter[str]] = field(default_factory=dict)
    refused: list[Trace] = field(default_factory=list)
    definitions: set[str] = field(default_factory=set)

    def add(self, trace: Trace) -> None:
        """Count one verdict."""
        self.statuses[trace.status] += 1
        self.by_solution.setdefault(trace.solution, Counter())[trace.status] += 1
        self.definitions.add(trace.definition)
        if trace.status not in ("PASSED", "UNSUPPORTED"):
            self.refused.append(trace)
        if self.out is not None:
            names = ("definition", "solution", "axes", "dtypes", "status", "reason", "gpu_uuid")
            self.out.write(json.dumps({name: getattr(trace, name) for name in names}) + "\n")
            self.out.flush()

    @property
    def judged(self) -> int:
        """Verdicts on something that was run."""
        return self.statuses.total() - self.statuses["UNSUPPORTED"]


@dataclass(frozen=True)
class Repeat:
    """Work of one repeat: names, and the workloads that it is limited to."""

    names: tuple[str, ...]
    workloads: str | tuple[str, ...] | None


def in_turns(catalog: Catalog, names: Sequence[str]) -> Iterator[Repeat]:
    """Yield one kernel of each Definition at one workload without end; every kernel has its turn before its next workload."""
    kernels = {
        name: sorted(
            (
                files.name
                for files in catalog.solutions_for(name)
                if files.record.spec.role == "kernel" and files.record.spec.language in TILE_LANGUAGES
            ),
            key=lambda solution: TILE_LANGUAGES.index(catalog.solution(solution).record.spec.language),
        )
        for name in names or sorted(catalog.definitions)
    }
    kernels = {name: found for name, found in kernels.items() if found}
    workloads = {name: by_size(catalog.definition(name), catalog.workloads_for(name)) for name in kernels}
    number = 0
    while kernels:
        # Shifted by the place in the list, so that one repeat has kernels of every language.
        chosen = {
            name: (found[(number + place) % len(found)], workloads[name][number // len(found) % len(workloads[name])])
            for place, (name, found) in enumerate(kernels.items())
        }
        yield Repeat(
            tuple(solution for solution, _ in chosen.values()),
            tuple(dict.fromkeys(workload.uuid for _, workload in chosen.values())),
        )
        number += 1


def by_size(definition: Definition, workloads: Sequence[Workload]) -> list[Workload]:
    """Sort workloads from the smallest that is worth a call on; those that are not come last."""

    def key(workload: Workload) -> tuple[bool, float]:
        axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
        moved = definition.cost_of(axes, dtypes)[1]
        return moved < WORTH_A_CALL, moved

    return sorted(workloads, key=key)


def interrupt_after(seconds: float) -> threading.Event:
    """Send Ctrl-C to this process after some seconds, and set the returned event. Finished work is kept."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts programs of its background without it
    due = threading.Event()

    def interrupt() -> None:
        due.set()
        os.kill(os.getpid(), signal.SIGINT)

    if seconds < math.inf:
        timer = threading.Timer(seconds, interrupt)
        timer.daemon = True
        timer.start()
    return due


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="definitions or solutions; all by default")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--gpus", help="several GPUs of this host: all, a number, or indices as 0,2")
    parser.add_argument(
        "--turns", action="store_true", help="one kernel of each definition in a repeat, at one workload"
    )
    parser.add_argument("--workload", default=None)
    parser.add_argument("--all-workloads", action="store_true", help="every workload instead of a few of each kind")
    parser.add_argument("--workloads", type=int, help="of each definition, when not all; a few by default")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds by which the last repeat should end")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end the run after these, in whatever repeat it is"
    )
    parser.add_argument("--out", type=Path, help="verdicts as JSON lines, written as they come")
    parser.add_argument("--dry-run", action="store_true", help="with --turns: say what the repeats would verify")
    options = parser.parse_args(arguments)
    if options.dry_run and not options.turns:
        parser.error("--dry-run goes with --turns")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Repeat, print the table and every false reject."""
    options = parsed(arguments)
    if options.turns:
        repeats = in_turns(Catalog.default(), options.names)
    else:
        repeats = iter([Repeat(tuple(options.names), options.workload)] * options.repeats)
    if options.dry_run:
        for repeat in islice(repeats, options.repeats):
            print(len(repeat.names), "kernels:", *repeat.names)
        return 0
    due = interrupt_after(options.seconds)
    out = options.out.open("w", encoding="utf-8") if options.out else None
    tally = Tally(out)
    try:
        with workloads_each(options.workloads):
            repeat_all(options, islice(repeats, options.repeats), tally)
    except (KeyboardInterrupt, RuntimeError) as error:  # between two runs; DuckDB raises the other one for it
        if isinstance(error, RuntimeError) and not due.is_set():
            raise
        print("ended", file=sys.stderr)
    show(tally)
    return 1 if tally.refused or not tally.judged else 0


@contextlib.contextmanager
def workloads_each(count: int | None) -> Iterator[None]:
    """Take so many workloads of each kind in a quick run, and as many as before afterwards."""
    before = plan.QUICK_WORKLOADS
    plan.QUICK_WORKLOADS = count or before
    try:
        yield
    finally:
        plan.QUICK_WORKLOADS = before


def repeat_all(options: argparse.Namespace, repeats: Iterator[Repeat], tally: Tally) -> None:
    """Make one run after the other, until there is no time for one more."""
    start, longest = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as shared:
        for number, repeat in enumerate(repeats, 1):
            before, began = len(tally.refused), time.monotonic()
            if began - start + longest > options.deadline:
                print(f"no time for repeat {number}: the longest took {longest:.0f} s", file=sys.stderr)
                return
            with tempfile.TemporaryDirectory() as folder:
                report = verify(
                    repeat.names,
                    devices=devices_of_options(options.gpu, options.gpus),
                    workload=repeat.workloads,
                    quick=not options.all_workloads,
                    force=True,  # also what was published
                    # In turns a kernel comes at another workload each time, and one store is calibrated once.
                    store_home=Path(shared if options.turns else folder),
                    observer=Observer(traced=tally.add),
                )
            print(f"{number}/{options.repeats}: {dict(report.counts)}", file=sys.stderr)
            for trace in tally.refused[before:]:
                print(f"  {trace.solution} {trace.axes}: {trace.status}: {trace.reason}", file=sys.stderr)
            if report.interrupted:
                return
            longest = max(longest, time.monotonic() - began)


def show(tally: Tally) -> None:
    """Print one line per Solution, and the total."""
    width = max((len(name) for name in tally.by_solution), default=0)
    for name, statuses in sorted(tally.by_solution.items()):
        print(f"{name:{width}}  {', '.join(f'{count} {status}' for status, count in statuses.most_common())}")
    counts = [counts.total() - counts["UNSUPPORTED"] for counts in tally.by_solution.values()]
    judged = [count for count in counts if count]
    each = f", {min(judged)} to {max(judged)} of each (median {statistics.median(judged):g})" if judged else ""
    print(
        f"{tally.judged} promotion-tier verdicts on {len(judged)} honest solutions of "
        f"{len(tally.definitions)} definitions{each}: {len(tally.refused)} false rejects"
    )


if __name__ == "__main__":
    raise SystemExit(main())

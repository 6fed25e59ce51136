"""How often the promotion tier refuses what is honest: every Solution of the catalog, promoted again and again.

Run it with ``python benchmarks/false_rejects.py --repeats 100 --gpu cpu`` (or on a GPU, with fewer repeats). Every repeat has
fresh processes and fresh secret seeds. The traces go to a store of their own that is thrown away, so that a false reject
revokes nothing. A Solution that declares a shape, dtype or device unsupported is counted apart: nothing was judged.
Exits with 1 if anything honest was refused.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tilegym_db.bench import plan
from tilegym_db.bench.benchmark import promote
from tilegym_db.bench.run_setup import Observer
from tilegym_db.records import Trace


@dataclass
class Tally:
    """Verdicts so far: how many of each status, by Solution, and the traces of what was refused."""

    statuses: Counter[str] = field(default_factory=Counter)
    by_solution: dict[str, Counter[str]] = field(default_factory=dict)
    refused: list[Trace] = field(default_factory=list)

    def add(self, trace: Trace) -> None:
        """Count one verdict."""
        self.statuses[trace.status] += 1
        self.by_solution.setdefault(trace.solution, Counter())[trace.status] += 1
        if trace.status not in ("PASSED", "UNSUPPORTED"):
            self.refused.append(trace)

    @property
    def judged(self) -> int:
        """Verdicts on something that was run."""
        return self.statuses.total() - self.statuses["UNSUPPORTED"]


def main() -> int:
    """Repeat, print the table and every false reject."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="definitions or solutions; all by default")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--workload", default=None)
    parser.add_argument("--all-workloads", action="store_true", help="every workload instead of a few of each kind")
    parser.add_argument("--workloads", type=int, help="of each definition, when not all; a few by default")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds by which the last repeat should end")
    options = parser.parse_args()
    if options.workloads:
        plan.QUICK_WORKLOADS = options.workloads
    tally, start, longest = Tally(), time.monotonic(), 0.0
    for number in range(1, options.repeats + 1):
        before, began = len(tally.refused), time.monotonic()
        if began - start + longest > options.deadline:
            print(f"no time for repeat {number}: the longest took {longest:.0f} s", file=sys.stderr)
            break
        with tempfile.TemporaryDirectory() as folder:
            report = promote(
                tuple(options.names),
                gpu=options.gpu,
                workload=options.workload,
                quick=not options.all_workloads,
                again=True,  # also what was published
                store_home=Path(folder),
                observer=Observer(traced=tally.add),
            )
        print(f"{number}/{options.repeats}: {dict(report.counts)}", file=sys.stderr)
        for trace in tally.refused[before:]:
            print(f"  {trace.solution} {trace.axes}: {trace.status}: {trace.reason}", file=sys.stderr)
        if report.interrupted:
            break
        longest = max(longest, time.monotonic() - began)
    show(tally)
    return 1 if tally.refused or not tally.judged else 0


def show(tally: Tally) -> None:
    """One line a Solution, and the total."""
    width = max((len(name) for name in tally.by_solution), default=0)
    for name, statuses in sorted(tally.by_solution.items()):
        print(f"{name:{width}}  {', '.join(f'{count} {status}' for status, count in statuses.most_common())}")
    print(f"{tally.judged} promotion-tier verdicts on honest solutions, {len(tally.refused)} false rejects")


if __name__ == "__main__":
    raise SystemExit(main())

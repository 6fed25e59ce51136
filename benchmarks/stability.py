"""Does the same solution win again? A sample of (operator, workload) pairs, measured from nothing several times.

Pairs are drawn operator by operator, so that one with many workloads does not outweigh the others. Every run has fresh
processes, fresh secret seeds, and knows of no earlier winner. Two runs agree on a pair where the same solution was the
fastest, or where in both of them the two winners were a tie: their ratio within the same rounds, with its 99% interval,
is not beyond the 2% that the resolver asks for, or the 0.3 us by which processes differ. Each solution is verified at the
pair's own shape and over one fuzzed case: the question here is which one is the fastest.

    python benchmarks/stability.py --gpu auto --pairs 40 --runs 5
    python benchmarks/stability.py --gpu cpu --pairs 4 --runs 3 --quick

With ``--keep FILE`` every finished run is kept there, and a later call with the same pairs goes on from it: so many runs fit
into several shorter commands.

Exits with 1 where fewer than ``--expect`` of the pairs agree over all runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.local_executor import LocalExecutor
from tilegym_db.measurement.machine import Machine, Missing, select_machine
from tilegym_db.measurement.plan import DefinitionPlan, Options, make_plan
from tilegym_db.measurement.run_setup import RunContext
from tilegym_db.measurement.timing import TimedCandidate, TimingBudget, median, paired_ratio, verdict_of
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Workload, axes_key
from tilegym_db.records.trace import PROCESS_NOISE_US
from tilegym_db.verification.worker_handle import SCREEN

POLICY = replace(SCREEN, fuzz_cases=1, baseline_fuzz_cases=1)
NOISE = 0.02
"""What the resolver asks of a kernel beyond a tie with stock code."""

Rounds = Mapping[str, Sequence[float]]
"""Solution -> its block medians in microseconds, one a round, all of the same rounds."""

Agreement = Literal["identical", "tied", "different"]


@dataclass(frozen=True)
class Pair:
    """One operator at one size."""

    definition: str
    workload: Workload

    def __str__(self) -> str:
        sizes = ",".join([axes_key(self.workload.axes), *self.workload.dtypes.values()])
        return f"{self.definition} {sizes}"


def winner_of(rounds: Rounds) -> str:
    """Return the solution with the lowest median."""
    return min(sorted(rounds), key=lambda name: median(rounds[name]))


def agreement(runs: Sequence[Rounds], noise: float = NOISE) -> Agreement:
    """Return what the winners of several runs of one pair have in common; each run has a solution at least."""
    winners = sorted({winner_of(run) for run in runs})
    if len(winners) == 1:
        return "identical"
    for one, other in itertools.combinations(winners, 2):
        for run in runs:
            if one not in run or other not in run:
                return "different"
            absolute = PROCESS_NOISE_US / min(median(run[one]), median(run[other]))
            if verdict_of(paired_ratio(run[one], run[other]), max(noise, absolute)) != "tie":
                return "different"
    return "tied"


def stratified(groups: Mapping[str, Sequence[Workload]], count: int, generator: random.Random) -> list[Pair]:
    """Return ``count`` pairs, or all if there are fewer: one of each group in turn, drawn at random in the group."""
    shuffled = {name: generator.sample(list(items), len(items)) for name, items in sorted(groups.items())}
    turns = itertools.zip_longest(*([Pair(name, item) for item in items] for name, items in shuffled.items()))
    return [pair for turn in turns for pair in turn if pair is not None][:count]


def contested(plans: Sequence[DefinitionPlan]) -> dict[str, DefinitionPlan]:
    """Return only the operators with at least two solutions to choose from: kernels, or, without them, baselines."""
    found = {}
    for plan in plans:
        kernels = [solution for solution in plan.timed if solution.record.spec.role == "kernel"]
        choice = kernels if len(kernels) > 1 else plan.timed
        if len(choice) > 1:
            found[plan.definition.name] = replace(plan, timed=choice, interpreted=[])
    return found


def play(
    plans: Mapping[str, DefinitionPlan], pairs: Sequence[Pair], machine: Machine, budget: TimingBudget
) -> dict[str, Rounds]:
    """Make one run from nothing: workload uuid -> rounds of every solution that passed."""
    rounds: dict[str, Rounds] = {}

    def keep(workload: Workload, candidates: Sequence[TimedCandidate]) -> None:
        passed = {candidate.runner.name: candidate.rounds for candidate in candidates if candidate.failure is None}
        if passed:
            rounds[workload.uuid] = passed

    with scratch_folder() as folder:
        context = RunContext("stability", machine, secrets.randbits(62))
        executor = LocalExecutor(context, folder, budget, POLICY, lambda trace: None, after_timing=keep)
        drawn = {name: [pair.workload for pair in pairs if pair.definition == name] for name in plans}
        executor.run([replace(plan, workloads=drawn[name]) for name, plan in plans.items() if drawn[name]])
    return rounds


def read_runs(path: Path | None, pairs: Sequence[Pair]) -> list[Mapping[str, Rounds]]:
    """Return the finished runs that are kept in a file; none if there is no file.

    Raises:
        ValueError: they are of other pairs.
    """
    if path is None or not path.is_file():
        return []
    content = json.loads(path.read_text())
    if content["pairs"] != [pair.workload.uuid for pair in pairs]:
        raise ValueError(f"{path} keeps runs of other pairs: name another file, or the options that it was made with")
    found: list[Mapping[str, Rounds]] = content["runs"]
    return found


def write_runs(path: Path, pairs: Sequence[Pair], runs: Sequence[Mapping[str, Rounds]]) -> None:
    """Keep finished runs for a later call; a call that is cut short leaves the file of before."""
    text = json.dumps({"pairs": [pair.workload.uuid for pair in pairs], "runs": runs})
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    unfinished.replace(path)


def report(pairs: Sequence[Pair], runs: Sequence[Mapping[str, Rounds]]) -> float:
    """Print what became of each pair; returns the share that agrees, of those that every run could time."""
    counted: dict[Agreement, int] = {"identical": 0, "tied": 0, "different": 0}
    for pair in pairs:
        found = [run[pair.workload.uuid] for run in runs if pair.workload.uuid in run]
        if len(found) < len(runs):
            print(f"{'not timed':<10} {pair}: {len(runs) - len(found)} of {len(runs)} runs had no solution that passed")
            continue
        verdict = agreement(found)
        counted[verdict] += 1
        print(f"{verdict:<10} {pair}: {', '.join(winner_of(run) for run in found)}")
    total = sum(counted.values())
    if not total:
        return 0.0
    share = (counted["identical"] + counted["tied"]) / total
    spelled = ", ".join(f"{count} {verdict}" for verdict, count in counted.items())
    print(f"{total} pairs in {len(runs)} runs: {spelled}; {share:.1%} agree")
    return share


def main() -> int:
    """Draw the pairs, play the runs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="definitions; all by default")
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the drawing of pairs")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep finished runs there, and go on from them")
    parser.add_argument("--expect", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args()
    machine, catalog = select_machine(options.gpu), Catalog.default()
    # The tier keeps kernels out that this device could only interpret.
    asked = Options(tuple(options.names), force=True, tier="promotion")
    plans = contested(make_plan(catalog, machine, asked, (), Missing.here({})).definitions)
    groups = {name: plan.workloads for name, plan in plans.items()}
    pairs = stratified(groups, options.pairs, random.Random(options.seed))
    if not pairs:
        print("no operator has two solutions that can be timed here", file=sys.stderr)
        return 2
    print(f"{len(pairs)} pairs of {len({pair.definition for pair in pairs})} operators on {machine.gpu_name}")
    budget = TimingBudget.quick() if options.quick else TimingBudget()
    try:
        runs = read_runs(options.keep, pairs)[: options.runs]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    while len(runs) < options.runs:
        begun = time.monotonic()
        runs.append(play(plans, pairs, machine, budget))
        print(f"run {len(runs)} of {options.runs}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        if options.keep is not None:
            write_runs(options.keep, pairs, runs)
    return 0 if report(pairs, runs) >= options.expect else 1


if __name__ == "__main__":
    raise SystemExit(main())

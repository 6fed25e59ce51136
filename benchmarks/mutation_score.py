"""Which share of the mutants of honest kernels the verifier catches, per Definition: the table of docs/trust.md.

    PYTHONPATH=tests python benchmarks/mutation_score.py                    # every Definition, on a CPU
    PYTHONPATH=tests python benchmarks/mutation_score.py rms_norm --most 40
    PYTHONPATH=tests python benchmarks/mutation_score.py --most 12 --references --seconds 300
    PYTHONPATH=tests python benchmarks/mutation_score.py --device cuda:0 --kernels --total 300 --jobs 14 --deadline 210

Sources are the reference and each Solution in Triton, which runs in the interpreter on a CPU; ``--most`` mutants of each, drawn
over all kinds. A mutant that no call gets to is not counted, nor is one that ``equivalent_mutants.toml`` explains.
``--seconds`` gives up a source that takes longer, and says so; what was judged until then counts. ``--deadline`` ends the whole
run: sources come in a random order then, and what is still being judged is ended and not counted.
"""

from __future__ import annotations

import argparse
import math
import random
import threading
import time
import tomllib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from exploits.mutant_judge import REFERENCE, Judge, Target, targets_of
from exploits.mutants import KINDS, REWRITES, Mutant, mutants_of

from tilegym_db.catalog import Catalog
from tilegym_db.scratch import scratch_folder

SEED = 20_261_122
EXPLAINED = Path(__file__).with_name("equivalent_mutants.toml")
_BY_ERROR = ("RUNTIME_ERROR", "COMPILE_ERROR", "TIMEOUT")


def chosen(mutants: Iterable[Mutant], most: int, seed: int) -> list[Mutant]:
    """At most so many: kind by kind in turn, in an order that differs from source to source, and of a kind at random."""
    drawn = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_kind[mutant.kind].append(mutant)
    kinds = list(by_kind.values())
    for found in (kinds, *kinds):
        drawn.shuffle(found)
    picked: list[Mutant] = []
    while len(picked) < most and any(kinds):
        picked += [found.pop() for found in kinds if found][: most - len(picked)]
    return picked


def reason_why_equivalent(target: Target, mutant: Mutant) -> str | None:
    """What the list says about a survivor."""
    for entry in tomllib.loads(EXPLAINED.read_text())["equivalent"]:
        names = (f"{target.definition.name}/{target.name}", mutant.kind, mutant.place)
        patterns = (entry["solution"], entry.get("kind", "*"), entry["line"].replace("[", "[[]"))
        if all(fnmatchcase(name, pattern) for name, pattern in zip(names, patterns, strict=True)):
            return str(entry["reason"])
    return None


class Deadline:
    """When a whole run ends. Verdicts that are not there by then are none: their workers are ended."""

    def __init__(self, seconds: float) -> None:
        """Counts from now."""
        self.passed = False
        self._judges: list[Judge] = []
        self._lock = threading.Lock()
        if seconds < math.inf:
            timer = threading.Timer(seconds, self._end)
            timer.daemon = True
            timer.start()

    def watch(self, judge: Judge) -> None:
        """End this judge's worker too when the time comes."""
        with self._lock:
            self._judges.append(judge)
            if self.passed:
                judge.abort()

    def _end(self) -> None:
        with self._lock:
            self.passed = True
            for judge in self._judges:
                judge.abort()


class Score:
    """What became of the mutants of each Definition."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.kinds: dict[str, Counter[str]] = defaultdict(Counter)
        self.survivors: list[str] = []
        self._lock = threading.Lock()

    def add(self, target: Target, mutant: Mutant, outcome: str, note: str = "") -> None:
        """Count one, and name it where it survived."""
        with self._lock:
            for counted in (self.counts[f"{target.definition.name} | {target.language}"], self.kinds[mutant.kind]):
                counted[outcome] += 1
            if outcome in ("survived", "equivalent"):
                text = f"{outcome}: {target.definition.name}/{target.name}: {mutant.kind}: {mutant.place}"
                self.survivors.append(f"{text}{f' ({note})' if note else ''}")
                print(self.survivors[-1], flush=True)

    def table(self, counts: dict[str, Counter[str]], head: str) -> str:
        """One row per source, or per kind."""
        rows = [f"| {head} | mutants | not reached | equivalent | caught | of these by an error | share |"]
        rows.append("|---" * (rows[0].count("|") - 1) + "|")
        for name, found in [
            *sorted(counts.items()),
            ("all |" if "|" in head else "all", sum(counts.values(), Counter())),
        ]:
            caught = found["gate"] + found["error"]
            share = caught / max(caught + found["survived"], 1)
            cells = [name, found.total(), found["not reached"], found["equivalent"], caught, found["error"]]
            rows.append(f"| {' | '.join(map(str, cells))} | {share:.1%} |")
        return "\n".join(rows)


def score_target(
    catalog: Catalog,
    target: Target,
    device: str,
    most: int,
    kinds: Sequence[str],
    score: Score,
    folder: Path,
    seconds: float,
    deadline: Deadline,
) -> None:
    """Every chosen mutant of one source to a verdict, as far as the seconds go."""
    if deadline.passed:
        return
    anchors = tuple(catalog.workloads_for(target.definition.name))
    judge = Judge(target, anchors, device, folder, SEED)
    deadline.watch(judge)
    start = time.monotonic()
    try:
        unfit = judge.honest()
        if deadline.passed:
            print(f"{target.definition.name}/{target.name}: not begun by the deadline", flush=True)
            return
        if unfit is not None:
            print(
                f"{target.definition.name}/{target.name} itself is refused: {unfit.reason} {unfit.log[-500:]}",
                flush=True,
            )
            return
        made = (mutant for mutant in mutants_of(target.source, target.entry) if mutant.kind in kinds)
        mutants = chosen(made, most, zlib.crc32(target.source.encode()) ^ SEED)
        for number, mutant in enumerate(mutants):
            if time.monotonic() - start > seconds:
                print(f"{target.definition.name}/{target.name}: given up after {number} of {len(mutants)}", flush=True)
                break
            failure = judge.verdict(mutant)
            if deadline.passed:
                print(f"{target.definition.name}/{target.name}: {number} of {len(mutants)} by the deadline", flush=True)
                break
            if failure is not None:
                score.add(target, mutant, "error" if failure.status in _BY_ERROR else "gate")
            elif (reason := reason_why_equivalent(target, mutant)) is not None:
                score.add(target, mutant, "equivalent", reason)
            else:
                reached = judge.is_reached(mutant)
                score.add(target, mutant, "survived" if reached or deadline.passed else "not reached")
    finally:
        judge.close()
    took = time.monotonic() - start
    print(f"{target.definition.name}/{target.name}: {len(mutants)} mutants, {took:.0f} s", flush=True)


def sources(catalog: Catalog, names: Sequence[str], *, references: bool, kernels: bool) -> list[Target]:
    """What is mutated: references, kernels in Triton, or both, of these Definitions or of all."""
    return [
        target
        for name in (names or sorted(catalog.definitions))
        for target in targets_of(catalog, catalog.definition(name))
        if (references if target.name == REFERENCE else kernels)
    ]


def run(
    catalog: Catalog,
    names: Sequence[str],
    device: str,
    most: int,
    jobs: int,
    kinds: Sequence[str] = KINDS,
    *,
    references: bool = True,
    kernels: bool = True,
    seconds: float = math.inf,
    deadline: float = math.inf,
) -> Score:
    """The score of these Definitions, or of all; of sources in a random order where there is a deadline."""
    score, end = Score(), Deadline(deadline)
    targets = sources(catalog, names, references=references, kernels=kernels)
    if deadline < math.inf:
        random.Random(SEED).shuffle(targets)
    with scratch_folder() as scratch, ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [
            pool.submit(score_target, catalog, target, device, most, kinds, score, scratch / str(number), seconds, end)
            for number, target in enumerate(targets)
        ]
        for task in running:
            task.result()
    return score


def main() -> None:
    """Print the table per Definition, the one per kind, and every mutant that was not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:<n>")
    parser.add_argument("--most", type=int, default=16, help="mutants of one source")
    parser.add_argument("--total", type=int, help="mutants of all sources together, in place of --most")
    parser.add_argument("--places", action="store_true", help="only mistakes at one place of a source")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--references", action="store_true", help="references alone, no kernels")
    which.add_argument("--kernels", action="store_true", help="kernels alone, no references")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when to give up one source")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which the whole run ends")
    parser.add_argument("--jobs", type=int, default=1, help="sources at a time")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    catalog = Catalog.default()
    which_ones = {"references": not options.kernels, "kernels": not options.references}
    count = len(sources(catalog, options.names, **which_ones))
    most = options.most if options.total is None else -(-options.total // max(count, 1))
    kinds = tuple(REWRITES) if options.places else KINDS
    limits = {"seconds": options.seconds, "deadline": options.deadline}
    score = run(catalog, options.names, options.device, most, options.jobs, kinds, **which_ones, **limits)
    print(f"\n{score.table(score.counts, 'definition | source')}\n\n{score.table(score.kinds, 'kind')}\n")
    print("\n".join(sorted(score.survivors)))


if __name__ == "__main__":
    main()

"""Measure the share of mutants of honest kernels that the verifier catches, per Definition.

    python benchmarks/mutation_score.py                    # every Definition, on a CPU
    python benchmarks/mutation_score.py rms_norm --most 40
    python benchmarks/mutation_score.py --most 12 --references --seconds 300
    python benchmarks/mutation_score.py --device cuda:0 --kernels --total 300 --jobs 14 --deadline 210
    python benchmarks/mutation_score.py --device cuda:0 --kernels --most 5 --processes 5 --jobs 3 --deadline 225 --out m.jsonl
    CUDA_VISIBLE_DEVICES=3 python benchmarks/mutation_score.py --device cuda:0 --kernels --most 6 --jobs 24 \
        --deadline 300 --part 1/2 --out part-1.jsonl     # beside one with 0/2 on another GPU
    python benchmarks/mutation_score.py --merge part-0.jsonl part-1.jsonl
    python benchmarks/mutation_score.py --held-out 2 --references --most 24 --seed 5

Sources are the reference and each Solution in Triton, which runs in the interpreter on a CPU; ``--most`` mutants of each, drawn
over all kinds. A mutant that no call gets to is not counted, nor is one that ``equivalent_mutants.toml`` explains.
``--seconds`` gives up a source that takes longer, and says so; what was judged until then counts. ``--deadline`` ends the whole
run: sources come in a random order then, and what is still being judged is ended and not counted. ``--part`` takes one of
several equal parts of the sources, for a process on each GPU; ``--processes`` makes that many here, each with ``--jobs`` of its
own, since threads that draw and compare in Python wait for each other. ``--out`` has every verdict as it comes, ``--merge``
adds such files up, and ``--skip`` leaves out the sources that they name. ``--held-out`` makes the mutants of
``exploits/held_out.py``, which the generators were not written for: each goes through the cases and sequences of one promotion,
and counts if it passes.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sys
import threading
import time
import tomllib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parent))  # the other scripts, however this file is loaded
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from exploits.held_out import CONTROL, held_out_mutants
from exploits.mutant_judge import REFERENCE, WHOLE, Judge, Target, UnfitSourceError, targets_of
from exploits.mutants import KINDS, REWRITES, Mutant, mutants_of
from in_processes import by_gates, gates_digest, one_thread_each, run_parts, without

from tilegym_db.catalog import Catalog
from tilegym_db.paths import scratch_folder

SEED = 20_261_122
EXPLAINED = Path(__file__).with_name("equivalent_mutants.toml")
_BY_ERROR = ("RUNTIME_ERROR", "COMPILE_ERROR", "TIMEOUT")


def chosen(mutants: Iterable[Mutant], most: int, seed: int) -> list[Mutant]:
    """Return at most so many: kind by kind in turn, in an order that differs by source, and of a kind at random."""
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
    """Return what the list says about a survivor."""
    for entry in tomllib.loads(EXPLAINED.read_text())["equivalent"]:
        names = (f"{target.definition.name}/{target.name}", mutant.kind, mutant.place)
        patterns = (entry["solution"], entry.get("kind", "*"), entry["line"].replace("[", "[[]"))
        if all(fnmatchcase(name, pattern) for name, pattern in zip(names, patterns, strict=True)):
            return str(entry["reason"])
    return None


class Deadline:
    """When a whole run ends. Verdicts that are not there by then are none: their workers are ended."""

    def __init__(self, seconds: float) -> None:
        """Count from now."""
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
    """Fate of the mutants of each Definition."""

    def __init__(self, out: TextIO | None = None) -> None:
        """Start without mutants; ``out`` gets a line for each one."""
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.kinds: dict[str, Counter[str]] = defaultdict(Counter)
        self.survivors: list[str] = []
        self._out = out
        self._lock = threading.Lock()

    def add(self, target: Target, mutant: Mutant, outcome: str, note: str = "") -> None:
        """Count one, and name it where it survived."""
        source = {"definition": target.definition.name, "solution": target.name, "language": target.language}
        line = source | {"kind": mutant.kind, "place": mutant.place, "outcome": outcome, "note": note}
        line["gates"] = gates_digest()
        with self._lock:
            if self._out is not None:
                self._out.write(json.dumps(line) + "\n")
                self._out.flush()
            survivor = self.count(line)
            if survivor:
                print(survivor, flush=True)

    def count(self, line: Mapping[str, str]) -> str:
        """Take in a line; what it says of a mutant that passed, or nothing. Not safe to use from several threads."""
        outcome, note = line["outcome"], line["note"]
        for counted in (self.counts[f"{line['definition']} | {line['language']}"], self.kinds[line["kind"]]):
            counted[outcome] += 1
        if outcome not in ("survived", "equivalent"):
            return ""
        text = f"{outcome}: {line['definition']}/{line['solution']}: {line['kind']}: {line['place']}"
        self.survivors.append(f"{text}{f' ({note})' if note else ''}")
        return self.survivors[-1]

    def table(self, counts: dict[str, Counter[str]], head: str) -> str:
        """Return one row per source, or per kind."""
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
    *,
    held_out: int = 0,
    seed: int = SEED,
) -> None:
    """Bring every chosen mutant of one source to a verdict, as far as the seconds go."""
    if deadline.passed:
        return
    anchors = tuple(catalog.workloads_for(target.definition.name))
    judge = Judge(target, anchors, device, folder, seed)
    deadline.watch(judge)
    start = time.monotonic()
    try:
        unfit = judge.honest()
        if deadline.passed:
            print(f"{target.definition.name}/{target.name}: not begun by the deadline", flush=True)
            return
        if unfit is not None:
            raise UnfitSourceError(unfit)
        of_source = zlib.crc32(target.source.encode()) ^ seed
        if held_out:
            specials = target.definition.special_values
            endless = held_out_mutants(target.source, target.entry, target.plain_inputs, specials, of_source, held_out)
            mutants = list(islice(endless, most)) if target.plain_inputs else []
        else:
            made = (mutant for mutant in mutants_of(target.source, target.entry) if mutant.kind in kinds)
            mutants = chosen(made, most, of_source)
        for number, mutant in enumerate(mutants):
            if time.monotonic() - start > seconds:
                print(f"{target.definition.name}/{target.name}: given up after {number} of {len(mutants)}", flush=True)
                break
            failure = judge.judge(mutant.source, WHOLE) if held_out else judge.verdict(mutant)
            if deadline.passed:
                print(f"{target.definition.name}/{target.name}: {number} of {len(mutants)} by the deadline", flush=True)
                break
            if failure is not None and mutant.kind == CONTROL:
                raise UnfitSourceError(failure)
            if failure is not None:
                score.add(target, mutant, "error" if failure.status in _BY_ERROR else "gate")
            elif held_out:
                score.add(target, mutant, "equivalent" if mutant.kind == CONTROL else "survived")
            elif (reason := reason_why_equivalent(target, mutant)) is not None:
                score.add(target, mutant, "equivalent", reason)
            else:
                reached = judge.is_reached(mutant)
                if deadline.passed:
                    break  # its worker was ended, which tells nothing
                score.add(target, mutant, "survived" if reached else "not reached")
    except UnfitSourceError as error:
        if not deadline.passed:
            log = error.failure.log[-500:]
            print(f"{target.definition.name}/{target.name} itself is refused: {error} {log}", flush=True)
        return
    finally:
        judge.close()
    took = time.monotonic() - start
    print(f"{target.definition.name}/{target.name}: {len(mutants)} mutants, {took:.0f} s", flush=True)


def sources(catalog: Catalog, names: Sequence[str], *, references: bool, kernels: bool) -> list[Target]:
    """Return what is mutated: references, kernels in Triton, or both, of these Definitions or of all."""
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
    part: tuple[int, int] = (0, 1),
    skipped: frozenset[tuple[str, str]] = frozenset(),
    out: TextIO | None = None,
    held_out: int = 0,
    seed: int = SEED,
) -> Score:
    """Return the score of these Definitions, or of all; with a deadline, sources come in a random order.

    ``part`` is the number of a part, from 0 on, and of how many; ``skipped`` has sources by Definition and name.
    """
    score, end = Score(out), Deadline(deadline)
    found = sources(catalog, names, references=references, kernels=kernels)
    targets = [target for target in found if (target.definition.name, target.name) not in skipped]
    if deadline < math.inf:
        random.Random(seed).shuffle(targets)
    targets = targets[part[0] :: part[1]]
    with scratch_folder() as scratch, ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [
            pool.submit(
                functools.partial(score_target, held_out=held_out, seed=seed),
                *(catalog, target, device, most, kinds, score, scratch / str(number), seconds, end),
            )
            for number, target in enumerate(targets)
        ]
        for task in running:
            task.result()
    return score


def judged_in(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Return the verdicts of files that ``--out`` wrote."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def part_of(text: str) -> tuple[int, int]:
    """Parse a part of the whole, such as ``0/2`` for the first half."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text}: the number of a part, from 0 on, and of how many, as 0/2")
    return int(number), int(count)


def main() -> None:
    """Print the table per Definition, the one per kind, and every mutant that was not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:<n>")
    parser.add_argument("--most", type=int, default=16, help="mutants of one source")
    parser.add_argument("--total", type=int, help="mutants of all sources together, in place of --most")
    parser.add_argument("--places", action="store_true", help="only mistakes at one place of a source")
    parser.add_argument(
        "--held-out",
        type=int,
        default=0,
        choices=(1, 2),
        help="mutants that the generators were not written for: which set",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of all draws: mutants, cases and sequences")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--references", action="store_true", help="references alone, no kernels")
    which.add_argument("--kernels", action="store_true", help="kernels alone, no references")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when to give up one source")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which the whole run ends")
    parser.add_argument("--jobs", type=int, default=1, help="sources at a time")
    parser.add_argument("--processes", type=int, default=1, help="processes, each with so many sources at a time")
    parser.add_argument("--part", type=part_of, default=(0, 1), help="only this part of the sources, as 0/2")
    parser.add_argument("--out", type=Path, help="verdicts as JSON lines, written as they come")
    parser.add_argument(
        "--skip", type=Path, nargs="+", default=[], metavar="FILE", help="leave out the sources that such files have"
    )
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing: the tables of such files")
    options = parser.parse_args()
    merged = options.merge
    if options.processes > 1:
        if options.out is None or options.part != (0, 1):
            parser.error("--processes needs --out, which all of them write to, and has no --part")
        arguments = without(sys.argv[1:], "--processes", "--out")
        run_parts(__file__, arguments, options.processes, options.out, options.deadline)
        merged = [options.out]
    if not merged:
        show(run_as(options))
    for gates, lines in by_gates(judged_in(merged or ())).items():
        score = Score()
        for line in lines:
            score.count(line)
        print(f"\ncode {gates}")
        show(score)


def show(score: Score) -> None:
    """Print the tables, and what passed."""
    print(f"\n{score.table(score.counts, 'definition | source')}\n\n{score.table(score.kinds, 'kind')}\n")
    print("\n".join(sorted(score.survivors)))


def run_as(options: argparse.Namespace) -> Score:
    """Return the score that the options ask for."""
    one_thread_each()
    catalog = Catalog.default()
    which_ones = {"references": not options.kernels, "kernels": not options.references}
    count = len(sources(catalog, options.names, **which_ones))
    most = options.most if options.total is None else -(-options.total // max(count, 1))
    kinds = tuple(REWRITES) if options.places else KINDS
    out = options.out.open("w", encoding="utf-8") if options.out else None
    skipped = frozenset((line["definition"], line["solution"]) for line in judged_in(options.skip))
    limits = {
        "seconds": options.seconds,
        "deadline": options.deadline,
        "part": options.part,
        "skipped": skipped,
        "out": out,
        "held_out": options.held_out,
        "seed": options.seed,
    }
    return run(catalog, options.names, options.device, most, options.jobs, kinds, **which_ones, **limits)


if __name__ == "__main__":
    main()

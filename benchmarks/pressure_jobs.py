"""What ``benchmarks/pressure.py`` runs, Solutions at cases that are drawn for them, and the record of what came of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.records.hardware import CPU
from tilegym_db.records.solution import TILE_LANGUAGES
from tilegym_db.records.workload import Case
from tilegym_db.resolver.resolve import unavailable_languages
from tilegym_db.verification.cases import MAX_ROWS, fuzz_cases

CASES_AT_A_TIME = 8
"""Drawn together, so that between them they meet most pairs of circumstances."""
CPU_ROWS = 40
"""Of the largest tensor on a CPU, where an interpreted program takes a hundredth of a second."""
TINY = "tiny"
COLD_SHARE = 0.25
SUMMED = ("calls", "compared", "bytes", "mismatches", "errors")


def rows_on(sm: str) -> int:
    """Return the rows of the largest tensor on a device, ``sm_XX`` or ``cpu``."""
    return CPU_ROWS if sm == CPU else MAX_ROWS


@dataclass
class Candidate:
    """A Solution with the cases that were drawn for it."""

    definition: Definition
    files: SolutionFiles
    cases: list[Case] = field(default_factory=list)
    waiting: list[Case] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """(operator, Solution)."""
        return self.definition.name, self.files.name

    def next_case(self, catalog: Catalog, most: int, rows: int, draw: random.Random) -> tuple[Case, bool] | None:
        """Return one of ``most`` cases and whether it is new, or None if the Solution accepts none."""
        if not self.waiting and len(self.cases) < most:
            self.waiting = self._drawn(catalog, rows, draw)
        if self.waiting:
            self.cases.append(self.waiting.pop(0))
            return self.cases[-1], True
        if not self.cases:
            return None
        return dataclasses.replace(draw.choice(self.cases), seed=draw.getrandbits(62)), False

    def _drawn(self, catalog: Catalog, rows: int, draw: random.Random) -> list[Case]:
        stated = catalog.workloads_for(self.definition.name)
        workloads = [one for one in stated if TINY in one.tags] if rows == CPU_ROWS else stated
        if not workloads:
            return []
        chosen = draw.choice(workloads)
        return fuzz_cases(
            self.definition,
            self.files.record,
            [one.axes for one in workloads],
            self.definition.bind_dtypes(chosen.dtypes),
            chosen.scalars(),
            count=CASES_AT_A_TIME,
            seed=draw.getrandbits(62),
            max_rows=rows,
        )


def candidates(catalog: Catalog, sm: str, names: Sequence[str], languages: Sequence[str]) -> list[Candidate]:
    """Return every Solution to be run on a device, ``sm_XX`` or ``cpu``, of the operators that have kernels.

    On a GPU these are the kernels that run there; on a CPU, stock code, kernels in Python, and what the interpreter can run.
    """
    found = []
    for name in names or catalog.definitions:
        definition, solutions = catalog.definition(name), catalog.solutions_for(name)
        if not any(files.record.spec.role == "kernel" for files in solutions):
            continue
        missing = unavailable_languages(solutions)
        for files in solutions:
            language = files.record.spec.language
            if language in missing or (languages and language not in languages):
                continue
            if runs_here(files, sm):
                found.append(Candidate(definition, files))
    return found


def runs_here(files: SolutionFiles, sm: str) -> bool:
    """Return whether a Solution is one to run on a device."""
    spec = files.record.spec
    if sm == CPU:
        in_python = spec.language == "python" and not files.uses_torch_compile and spec.runs_on(CPU)
        return spec.language == "triton" or (in_python and (spec.role == "kernel" or spec.provides == "stock"))
    return spec.role == "kernel" and spec.language in TILE_LANGUAGES and spec.runs_on(sm)


@dataclass(frozen=True)
class Job:
    """One Solution at one case, as it is sent to the worker."""

    definition: str
    solution: str
    digest: str
    case: Case
    cold: bool = False

    def to_message(self) -> dict[str, Any]:
        """Return the message as JSON."""
        return {**dataclasses.asdict(self), "case": case_to_json(self.case)}

    @classmethod
    def of_log(cls, line: Mapping[str, Any]) -> Job:
        """Read a job from a line of a log."""
        return cls(
            line["definition"],
            line["solution"],
            line["digest"],
            Case(**{**line["case"], "call": Call(**line["case"]["call"])}),
            line["cold"],
        )


def case_to_json(case: Case) -> dict[str, Any]:
    """Return a case that was drawn as JSON: its contents come from no file and have no scale."""
    kept = dataclasses.asdict(case)
    return {name: value for name, value in kept.items() if name not in ("files", "scales")}


def in_turns(found: Sequence[Candidate], draw: random.Random) -> Iterator[Candidate]:
    """Yield one Solution of each operator, in random order; then of each its next one, and so on without end."""
    operators: dict[str, list[Candidate]] = {}
    for candidate in draw.sample(found, len(found)):
        operators.setdefault(candidate.definition.name, []).append(candidate)
    for lap in itertools.count() if found else ():
        for name in draw.sample(sorted(operators), len(operators)):
            yield operators[name][lap % len(operators[name])]


class Turns:
    """Shared order of the workers' next Solutions. None repeats what another has had before all had their turn."""

    def __init__(self, catalog: Catalog, found: Sequence[Candidate], sm: str, shapes: int, seed: int) -> None:
        """Draw ``shapes`` different shapes for each Solution."""
        self._catalog, self._rows, self._shapes = catalog, rows_on(sm), shapes
        self._draw = random.Random(seed)
        self._order, self._lock = in_turns(found, self._draw), threading.Lock()

    def next_jobs(self, count: int) -> tuple[list[Job], int]:
        """Return jobs of so many Solutions, fewer if some accept no size that is drawn, and the seed of their round."""
        with self._lock:
            made = [self._job(candidate) for candidate in itertools.islice(self._order, count)]
            return [job for job in made if job is not None], self._draw.getrandbits(62)

    def _job(self, candidate: Candidate) -> Job | None:
        found = candidate.next_case(self._catalog, self._shapes, self._rows, self._draw)
        if found is None:
            return None
        case, is_new = found
        return Job(*candidate.key, candidate.files.digest, case, is_new and self._draw.random() < COLD_SHARE)


@dataclass(frozen=True)
class Load:
    """Load of one run: how much runs at once."""

    threads: int
    streams: int
    repeats: int
    timeout_s: float


class Record:
    """Figures of all devices, the log, and what is printed at once. Safe to use from several threads."""

    def __init__(self, log: TextIO | None) -> None:
        """Start without results."""
        self.counts: dict[tuple[str, str], Counter[str]] = {}
        self._shapes: dict[tuple[str, str], set[str]] = {}
        self._log, self._lock = log, threading.Lock()

    def add(self, device: str, job: Job, answer: Mapping[str, Any], seed: int, load: Load) -> None:
        """Count what came of a job, write it to the log, and print what is wrong with all that repeats it."""
        line = {"device": device, **job.to_message(), "round": seed, **dataclasses.asdict(load), **answer}
        with self._lock:
            self.count(line)
            if self._log is not None:
                self._log.write(json.dumps(line) + "\n")
                self._log.flush()
            if answer.get("mismatches") or answer.get("errors"):
                print(f"{job.definition} {job.solution} on {device}: {'; '.join(answer['told'])}")
                print(f"  repeat it: --again FILE with the line {json.dumps(line)}", flush=True)

    def count(self, line: Mapping[str, Any]) -> None:
        """Take in a line of a log. Not safe to use from several threads."""
        key, case = (line["definition"], line["solution"]), line["case"]
        counts = self.counts.setdefault(key, Counter())
        counts.update({"jobs": 1} | {name: line.get(name, 0) for name in SUMMED})
        counts.update({name: int(bool(line.get(name))) for name in ("excused", "dropped")})
        if line.get("calls"):
            shape = [case["call"]["axes"], case["call"]["layouts"], case["offset"]]
            self._shapes.setdefault(key, set()).add(json.dumps(shape))

    def summary(self, expected: Collection[tuple[str, str]]) -> str:
        """Return what of the ``expected`` had calls beside others, and how many of each thing there were."""
        called = {key for key, counts in self.counts.items() if counts["calls"]}
        known = {*expected, *self.counts}
        figures = ", ".join(f"{self.total(name):,} {name}" for name in ("jobs", *SUMMED, "excused", "dropped"))
        operators = f"{len({name for name, _ in called})} of {len({name for name, _ in known})} operators"
        return f"{operators} and {len(called)} of {len(known)} Solutions were called beside others; {figures}"

    def total(self, name: str) -> int:
        """Return the sum over all Solutions."""
        return sum(counts[name] for counts in self.counts.values())

    def table(self, expected: Iterable[tuple[str, str]]) -> str:
        """Return a row for each Solution, those that never ran included."""
        head = ("operator", "solution", "calls", "shapes", "mismatches", "errors", "excused", "dropped")
        rows = [head]
        for key in sorted({*self.counts, *expected}):
            counts = self.counts.get(key, Counter())
            figures = (counts[name] for name in ("mismatches", "errors", "excused", "dropped"))
            rows.append((*key, *map(str, (counts["calls"], len(self._shapes.get(key, ())), *figures))))
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if at < 2 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )

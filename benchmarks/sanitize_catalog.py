"""compute-sanitizer over every shipped kernel, many at a time, and over two planted mistakes that it has to find.

``tilegym-db debug sanitize`` goes through the catalog in one process for each tool and language, which takes an hour. Most of
it is compiling, on one core; so this starts as many processes as there are cores, each over a few Solutions, at the smallest of
their fuzz shapes. Every kernel runs without a tool first, then under the first of the tools, and so on until the deadline.
Nothing is stored: a finding is for ``tilegym-db debug sanitize NAME`` to confirm, which records it.

    python -m benchmarks.sanitize_catalog --limit-s 240 --out results.jsonl
    python -m benchmarks.sanitize_catalog --order unchecked --limit-s 180 --out results.jsonl
    CUDA_VISIBLE_DEVICES=2,3 python -m benchmarks.sanitize_catalog --gpus 2 --jobs 40 --batch 3 --limit-s 240
    python -m benchmarks.sanitize_catalog --tools memcheck,racecheck --languages triton --cases 4 silu_and_mul
    python -m benchmarks.sanitize_catalog --dry-run     # without a GPU: what would run
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from benchmarks.sanitize_order import RECORD, Checks, chain_of, clean_before, read_lines, unchecked_first
from benchmarks.sanitize_pool import PLAIN, STALL_S, Batch, Outcome, Sweep
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.measurement.instruments.requests import Chosen, choose_solutions, find_program, with_cases
from tilegym_db.measurement.instruments.sanitize import NO_CASE, TOOLS, Sanitized
from tilegym_db.measurement.machine import cpu_machine, timing_lock
from tilegym_db.measurement.run_setup import RunSetup
from tilegym_db.paths import home, shipped_root
from tilegym_db.records import TILE_LANGUAGES, Workload
from tilegym_db.records.workload import Case

PLANTED = {"out_of_bounds": ("memcheck", "Invalid __global__ write"), "shared_race": ("racecheck", "Race")}
"""Folder under ``tests/measurement/planted`` -> the tool that has to find its mistake, and how the finding begins."""
BATCH = 5
"""Solutions of one process: few, so that the cores end at the same time; several, since each process starts CUDA."""
DRAWN = 7
"""Fuzz cases that the smallest are taken from: below the number from which one has an axis of no elements."""
WORTH_A_CALL = 512
"""Elements of the largest tensor: smaller cases may end before the kernel's loop begins."""


def smallest(chosen: Chosen, workloads: Sequence[Workload], count: int, seed: int) -> Chosen:
    """Return the Solution with the smallest of its fuzz cases that have work, of several dtypes if it has them."""
    drawn = with_cases(chosen, workloads, DRAWN, seed)
    left = sorted(zip(drawn.cases, drawn.workloads, strict=True), key=lambda pair: _size_key(chosen, pair[0]))
    kept: list[tuple[Case, Workload]] = []
    while left and len(kept) < count:
        seen = [pair[0].call.dtypes for pair in kept]
        new = next((pair for pair in left if pair[0].call.dtypes not in seen), left[0])
        left.remove(new)
        kept.append(new)
    return replace(drawn, cases=[case for case, _ in kept], workloads=[workload for _, workload in kept])


def _size_key(chosen: Chosen, case: Case) -> tuple[bool, int]:
    definition = chosen.definition
    names = (*definition.inputs, *definition.outputs)
    largest = max(math.prod(definition.shape_of(name, case.call.axes)) for name in names)
    return (largest < WORTH_A_CALL, largest if largest >= WORTH_A_CALL else -largest)


def batches_of(
    chosen: Sequence[Chosen], languages: Sequence[str], size: int, tools: Sequence[str], before: Checks = frozenset()
) -> list[Batch]:
    """Return batches of one language each, in turn by language, so that a deadline cuts off as much of one as of another.

    Tools that found all of a batch clean before come last in it.
    """
    groups: dict[tuple[str, ...], list[Chosen]] = {}
    for language in languages:
        for item in chosen:
            if item.files.record.spec.language == language:
                groups.setdefault((language, *chain_of(item, tools, before)), []).append(item)
    rows: list[list[Batch]] = []
    for (_, *chain), group in groups.items():
        count = -(-len(group) // size)
        rows.append([Batch(PLAIN, group[number::count], tuple(chain)) for number in range(count)])
    longest = max(map(len, rows), default=0)
    return [row[number] for number in range(longest) for row in rows if number < len(row)]


def planted(setup: RunSetup, cases: int) -> dict[str, Chosen]:
    """Return the planted mistakes, by folder. The scan would refuse one that turns a check off, and is not asked."""
    found = {}
    for name in PLANTED:
        files = SolutionFiles.read(shipped_root() / "tests" / "measurement" / "planted" / name)
        item = Chosen(files, setup.catalog.definition(files.record.definition), in_catalog=False)
        found[name] = with_cases(item, setup.catalog.workloads_for(item.definition.name), cases, seed=1)
    return found


def missed(results: Sequence[Sanitized], mistakes: dict[str, Chosen]) -> list[str]:
    """Return the planted mistakes that their tools did not find, in words."""
    names = []
    for name, (tool, begins) in PLANTED.items():
        of_it = [
            result
            for result in results
            if result.chosen.files.name == mistakes[name].files.name and result.tool == tool
        ]
        if not any(finding.what.startswith(begins) for result in of_it for finding in result.errors):
            why = "; ".join(result.problem for result in of_it if result.problem)
            names.append(f"{tool} did not find the planted mistake '{name}'{f': {why}' if why else ''}")
    return names


def kind_of(result: Sanitized) -> str:
    """Return the kind in one word, as the table and the lines have it."""
    if result.errors:
        return "found"
    if result.problem:
        return "not run" if result.problem.startswith(("not run", NO_CASE)) else "no verdict"
    return "clean"


def record_of(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON line of one outcome."""
    result = outcome.result
    chosen = result.chosen
    record: dict[str, Any] = {
        "kernel": chosen.files.name,
        "definition": chosen.definition.name,
        "language": chosen.files.record.spec.language,
        "digest": chosen.files.digest,
        "tool": result.tool,
        "result": kind_of(result),
        "shapes": [str(case) for case in chosen.cases],
        "findings": [asdict(finding) for finding in result.findings],
        "seconds": None if outcome.seconds is None else round(outcome.seconds, 2),
    }
    if result.problem:
        record |= {"why": result.problem, "said": outcome.said}
    return record


def line_of(result: Sanitized) -> str:
    """Return one line: clean, or what was found first, or why nothing is known."""
    name, tool = result.chosen.files.name, result.tool
    if result.errors:
        first = result.errors[0]
        what = f"FOUND {len(result.errors)}: {first} at {result.chosen.cases[first.case]}"
    elif result.problem:
        what = result.problem if kind_of(result) == "not run" else f"NO VERDICT {result.problem}"
    else:
        warnings = f", {len(result.findings)} warnings" if result.findings else ""
        what = f"clean, {len(result.chosen.cases)} cases{warnings}"
    return f"{tool:<9} {name:<45} {what}"[:400].replace("\n", " ")


def summary(results: Sequence[Sanitized], seconds: float) -> str:
    """Return a table: of each tool and language how many were clean, and how many calls that were."""
    kinds = ("clean", "found", "no verdict", "not run")
    lines = [f"{'tool':<10} {'language':<9}" + "".join(f"{kind:>11}" for kind in kinds) + f"{'clean calls':>13}"]
    groups: dict[tuple[str, str], list[Sanitized]] = {}
    for result in results:
        groups.setdefault((result.tool, result.chosen.files.record.spec.language), []).append(result)
    for (tool, language), group in groups.items():
        counts = Counter(kind_of(result) for result in group)
        calls = sum(len(result.chosen.cases) for result in group if kind_of(result) == "clean")
        lines.append(f"{tool:<10} {language:<9}" + "".join(f"{counts[kind]:>11}" for kind in kinds) + f"{calls:>13}")
    return "\n".join([*lines, f"{seconds:.0f} s"])


def versions(program: Path) -> dict[str, str]:
    """Return what the first line of the results says about the machine."""
    asked = {
        "compute-sanitizer": [str(program), "--version"],
        "nvcc": ["nvcc", "--version"],
        "gpu": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
    }
    told = {"cores": str(os.cpu_count()), "python": sys.version.split()[0]}
    for name, command in asked.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            told[name] = f"not known: {error}"
            continue
        lines = (done.stdout or done.stderr).strip().splitlines()
        told[name] = " | ".join(line for line in lines if "Copyright" not in line)[:300]
    return told


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="solutions or definitions; every kernel by default")
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"with commas, in this order, of {', '.join(TOOLS)}")
    parser.add_argument("--languages", default="tilelang,cutile,triton", help="with commas, in this order")
    parser.add_argument("--cases", type=int, default=2, help="fuzz cases of each solution, over its dtypes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs to spread the processes over, of those that are visible"
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="solutions of one process")
    parser.add_argument("--limit-s", type=float, default=3600, help="nothing runs longer than this, from the start on")
    parser.add_argument(
        "--stall-s", type=float, default=STALL_S, help="a process that prints nothing for this long is ended"
    )
    parser.add_argument("--out", type=Path, help="results as JSON lines, written as they come")
    parser.add_argument(
        "--order", choices=("tools", "unchecked"), default="tools",
        help=f"tool by tool; or first what {RECORD.name} does not have: see sanitize_order",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=time.time_ns() & ((1 << 62) - 1))
    parser.add_argument("--dry-run", action="store_true", help="say what would run on an H200, and run nothing")
    options = parser.parse_args()
    for given, known in ((options.tools, tuple(TOOLS)), (options.languages, TILE_LANGUAGES)):
        unknown = [word for word in given.split(",") if word not in known]
        if unknown:
            parser.error(f"unknown: {', '.join(unknown)}. Known: {', '.join(known)}")
    return options


def main() -> int:
    """Sweep and print; 1 where a shipped kernel is not clean or not known to be, or a planted mistake was not found."""
    started, options = time.monotonic(), parsed_options()
    setup = _setup_of(options)
    tools, languages = options.tools.split(","), options.languages.split(",")
    chosen = [
        smallest(item, setup.catalog.workloads_for(item.definition.name), options.cases, options.seed)
        for item in choose_solutions(setup.catalog, options.names, setup.machine)
        if item.files.record.spec.language in languages
    ]
    mistakes = planted(setup, 2)
    controls = [Batch(tool, [item], is_control=True) for item in mistakes.values() for tool in tools]
    ready = [item for item in chosen if item.cases]
    before = clean_before(read_lines(RECORD)) if options.order == "unchecked" else frozenset()
    batches = [*controls, *batches_of(ready, languages, options.batch, tools, before)]
    print(f"{len(ready)} kernels, {len(batches)} batches, {options.jobs} at a time, seed {options.seed}", flush=True)
    if options.dry_run:
        for batch in batches:
            print(batch.tool, *(f"{item.files.name} [{'; '.join(map(str, item.cases))}]" for item in batch.solutions))
        return 0
    nothing = [Outcome(Sanitized(item, tool, problem=NO_CASE)) for item in chosen if not item.cases for tool in tools]
    outcomes = [*nothing, *_swept(setup, batches, tools, options, started, before)]
    results = [outcome.result for outcome in outcomes]
    names = {item.files.name for item in mistakes.values()}
    shipped = [result for result in results if result.chosen.files.name not in names]
    not_found = [line for line in missed(results, mistakes) if line.split()[0] in tools]
    looked_for = sum(tool in tools for tool, _ in PLANTED.values())
    _print_end(shipped, not_found, looked_for, time.monotonic() - started)
    return int(bool(not_found) or not all(result.is_clean for result in shipped))


def _setup_of(options: argparse.Namespace) -> RunSetup:
    if options.dry_run:
        pretended = replace(cpu_machine(), gpu="h200", sm="sm_90", device="cuda:0")
        return RunSetup(pretended, Catalog.default(), home())
    return RunSetup.of(options.gpu, None, None)


def _swept(
    setup: RunSetup, batches: Sequence[Batch], tools: Sequence[str], options: argparse.Namespace, started: float,
    before: Checks,
) -> list[Outcome]:  # fmt: skip
    program = find_program("compute-sanitizer")
    with tempfile.TemporaryDirectory(prefix="sanitize-caches-") as caches, _lines(options.out) as out:
        out.write(json.dumps({"machine": versions(program), "tools": list(tools), "seed": options.seed}) + "\n")

        def say(outcome: Outcome) -> None:
            out.write(json.dumps(record_of(outcome)) + "\n")
            out.flush()
            if outcome.result.tool != PLAIN and kind_of(outcome.result) != "not run":
                print(f"{time.monotonic() - started:5.0f} s {line_of(outcome.result)}", flush=True)

        sweep = Sweep(
            program, setup.machine.device, options.jobs, started + options.limit_s, Path(caches), say,
            stall_s=options.stall_s, gpus=options.gpus, order=(PLAIN, *tools),
            rank=unchecked_first(tools, before) if options.order == "unchecked" else None,
        )  # fmt: skip
        with timing_lock(setup.machine.device):
            return sweep.run(batches)


def _lines(path: Path | None) -> TextIO:
    return open(os.devnull, "w") if path is None else path.open("w")


def _print_end(shipped: Sequence[Sanitized], not_found: Sequence[str], controls: int, seconds: float) -> None:
    for result in shipped:
        if kind_of(result) in ("found", "no verdict"):
            print(f"not clean: {line_of(result)}")
            for finding in result.errors[:3]:
                print(f"    {finding} ({finding.times}x); {'; '.join(finding.details[:4])}"[:600])
    print("\n".join(not_found) or f"all {controls} planted mistakes were found")
    print(summary(shipped, seconds))


if __name__ == "__main__":
    raise SystemExit(main())

"""Which kernels compute-sanitizer found clean before, by ``sanitized.jsonl`` beside this file, and what a sweep runs first.

A line is a kernel with the digest of what ran, so that a kernel that was changed since is a kernel that was never checked.

    python -m benchmarks.sanitize_order                       # how many kernels each tool has yet to see
    python -m benchmarks.sanitize_order --names memcheck      # and which
    python -m benchmarks.sanitize_order --add results.jsonl   # of ``sanitize_catalog --out``: what was clean goes into the record
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.sanitize_pool import PLAIN, Batch
from tilegym_db.catalog import Catalog
from tilegym_db.measurement.instruments.requests import Chosen, choose_solutions
from tilegym_db.measurement.instruments.sanitize import TOOLS
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.records import TILE_LANGUAGES

RECORD = Path(__file__).with_name("sanitized.jsonl")
FIRST_LANGUAGE = "triton"
"""Whose kernels the other tools see before those of other languages: TMA and mbarriers make racecheck report more than races."""

Checks = Set[tuple[str, str]]
"""(digest of a Solution, tool)."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file; an empty list if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def clean_before(record: Iterable[dict[str, Any]]) -> Checks:
    """Return what was found clean, by today's and by earlier digests."""
    return frozenset((line["digest"], tool) for line in record for tool in line["tools"])


def chain_of(item: Chosen, tools: Sequence[str], before: Checks) -> tuple[str, ...]:
    """Return the tools in the order in which a kernel comes under them: those that have seen it come last."""
    return tuple(sorted(tools, key=lambda tool: (item.files.digest, tool) in before))


def unchecked_first(tools: Sequence[str], before: Checks) -> Callable[[Batch], tuple[int, ...]]:
    """Return the rank of a batch: the first tool for new kernels, then the others for Triton, then all else that is new.

    A run without a tool is as urgent as the tool that follows it, and waits for those that need no such run any more: then each
    result is there as early as it can be, and a deadline leaves few kernels that were compiled and not checked.
    """

    def rank(batch: Batch) -> tuple[int, ...]:
        tool = batch.then[0] if batch.tool == PLAIN else batch.tool
        known = all((item.files.digest, tool) in before for item in batch.solutions)
        language = batch.solutions[0].files.record.spec.language
        turn = 0 if tool == tools[0] else 1 + (language != FIRST_LANGUAGE)
        return (known, turn, tools.index(tool), batch.tool == PLAIN)

    return rank


def merged(record: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]], day: str) -> list[dict[str, Any]]:
    """Return the record with what a sweep found clean; a kernel with a finding loses what the tool had said before.

    Args:
        record: lines of the record.
        results: lines of a sweep; the first is its machine.
        day: of the sweep, as ``2026-11-25``.
    """
    machine, *lines = results
    gpu = machine["machine"]["gpu"].split(",")[0]
    version = machine["machine"]["compute-sanitizer"].partition("Version ")[2].split(" ")[0]
    found = {line["digest"]: {**line, "tools": dict(line["tools"])} for line in record}
    for line in lines:
        if line["tool"] not in TOOLS or line["result"] not in ("clean", "found"):
            continue
        empty = {"kernel": line["kernel"], "language": line["language"], "digest": line["digest"], "tools": {}}
        tools = found.setdefault(line["digest"], empty)["tools"]
        tools.pop(line["tool"], None)
        if line["result"] == "clean":
            tools[line["tool"]] = f"{day}, {gpu}, {version}, {len(line['shapes'])} cases"
    kept = [line for line in found.values() if line["tools"]]
    return sorted(kept, key=lambda line: (line["kernel"], line["digest"]))


def shipped_kernels() -> list[Chosen]:
    """Return every kernel that a Hopper GPU can run."""
    return choose_solutions(Catalog.default(), (), replace(cpu_machine(), gpu="h200", sm="sm_90", device="cuda:0"))


def never_checked(kernels: Sequence[Chosen], before: Checks, tool: str) -> list[str]:
    """Return names of the kernels that a tool has never found clean, as they are today."""
    return [item.files.name for item in kernels if (item.files.digest, tool) not in before]


def main() -> int:
    """Print what was never checked; with ``--add``, take results into the record first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, action="append", default=[], metavar="RESULTS")
    parser.add_argument("--day", help="of these results; the day on which their file was written by default")
    parser.add_argument("--names", choices=tuple(TOOLS), help="print the kernels that this tool never found clean")
    options = parser.parse_args()
    record = read_lines(RECORD)
    kernels = shipped_kernels()
    shipped = {item.files.digest for item in kernels}
    for path in options.add:
        day = options.day or time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
        record = [line for line in merged(record, read_lines(path), day) if line["digest"] in shipped]
        RECORD.write_text("".join(json.dumps(line) + "\n" for line in record))
    before = clean_before(record)
    if options.names:
        print("\n".join(never_checked(kernels, before, options.names)))
        return 0
    languages = {item.files.name: item.files.record.spec.language for item in kernels}
    for tool in TOOLS:
        never = never_checked(kernels, before, tool)
        counts = Counter(languages[name] for name in never)
        spelled = ", ".join(f"{counts[language]} {language}" for language in TILE_LANGUAGES)
        print(f"{tool:<10} never found clean: {len(never)} of {len(kernels)} ({spelled})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

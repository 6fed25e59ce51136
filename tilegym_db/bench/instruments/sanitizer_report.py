"""Reads what compute-sanitizer prints: which kernel did what, on which line, and during which call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tilegym_db.bench.instruments.requests import mark_of

__all__ = ["SanitizerFinding", "SanitizerReport", "parse_report"]

PREFIX = "========="
_KINDS = re.compile(
    r"(?:Error: |Warning: )?(?:Invalid |Misaligned |Uninitialized |Unused |Barrier error|Race reported|Potential \w+ hazard|"
    r"Stack overflow|Out-of-range|Illegal |Missing |Deadlock|Malloc/Free|User stack|Double free|Access )"
)
_AT = re.compile(r"\bat (?P<kernel>.+?)\+0x[0-9a-fA-F]+(?: in (?P<place>\S+:\d+))?")
_AT_OLD = re.compile(r"\bat 0x[0-9a-fA-F]+ in (?:(?P<place>[^\s:]+:\d+):)?(?P<kernel>.+)")
_HAZARDS = re.compile(r"\[(\d+) hazards?\]")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK|\w+) SUMMARY: (\d+) (?:errors?|hazards?)")


@dataclass(frozen=True)
class SanitizerFinding:
    """One thing that a tool found; the same at the same line of the same kernel is one finding, however often."""

    what: str
    kernel: str = ""
    place: str = ""
    """``file:line`` of the source, where the compiler kept lines."""
    details: tuple[str, ...] = ()
    times: int = 1
    solution: str = ""
    case: int = 0
    """Number of the call during which it was first found."""
    is_warning: bool = False

    def __str__(self) -> str:
        where = f" in {self.kernel}" if self.kernel else ""
        return f"{self.what}{where}{f' at {self.place}' if self.place else ''}"


@dataclass
class SanitizerReport:
    """What one run of a tool says.

    ``done`` are the Solutions whose calls all returned, ``stopped`` the one whose call raised and how, ``reached`` the last
    one begun.
    ``is_complete`` is false where the tool did not come to its own end, and ``remarks`` then has what it said.
    """

    findings: list[SanitizerFinding] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    stopped: tuple[str, str] | None = None
    reached: str = ""
    is_complete: bool = False
    remarks: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Solution -> how long its calls took, compiling and drawing inputs included, where they all returned."""


def parse_report(text: str) -> SanitizerReport:
    """Read the output of the tool and of the program that it ran, interleaved as they came."""
    report, case = SanitizerReport(), 0
    found: dict[tuple[str, str, str, str], SanitizerFinding] = {}
    for head, details in _blocks(text):
        mark = mark_of(head)
        if mark is not None:
            case = mark.get("number", case)
            _take_mark(report, mark)
        elif _KINDS.match(head):
            finding = replace(_finding(head, details), solution=report.reached, case=case)
            key = (finding.solution, finding.what, finding.kernel, finding.place)
            known = found.get(key)
            found[key] = finding if known is None else replace(known, times=known.times + finding.times)
        elif _SUMMARY.match(head):
            report.is_complete = True
        elif head and head != "COMPUTE-SANITIZER":
            report.remarks.append(head)
    report.findings = list(found.values())
    return report


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """The tool's messages, each with the indented lines that belong to it, and the program's own marks, in order."""
    head: str | None = None
    details: list[str] = []
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            if mark_of(line) is None:
                continue  # what the kernel or a compiler printed
            if head is not None:
                yield head, details
            yield line, []
            head, details = None, []
            continue
        body = line.removeprefix(PREFIX)
        if body.startswith("   "):
            details.append(body.strip())
            continue
        if head is not None:
            yield head, details
        head, details = body.strip(), []
    if head is not None:
        yield head, details


def _take_mark(report: SanitizerReport, mark: object) -> None:
    assert isinstance(mark, dict)
    report.reached = mark["solution"]
    if mark["at"] == "done":
        report.done.append(mark["solution"])
        if "seconds" in mark:
            report.seconds[mark["solution"]] = mark["seconds"]
    elif mark["at"] == "error":
        report.stopped = (mark["solution"], mark["what"])


def _finding(head: str, details: list[str]) -> SanitizerFinding:
    """A finding from its message: the first line that names a kernel says where."""
    kept = [line for line in details if not line.startswith(("Host Frame", "Saved host backtrace", "in /"))]
    kernel = place = ""
    for line in (head, *kept):
        match = _AT.search(line) or _AT_OLD.search(line)
        if match is not None:
            kernel, place = match["kernel"].strip(), match["place"] or ""
            break
    hazards = [int(number) for line in kept for number in _HAZARDS.findall(line)]
    what = _AT_OLD.sub("", _AT.sub("", head)).removeprefix("Error: ").removeprefix("Warning: ").strip(" .")
    return SanitizerFinding(
        what, kernel, place, tuple(kept[:8]), sum(hazards) or 1, is_warning=head.startswith("Warning: ")
    )

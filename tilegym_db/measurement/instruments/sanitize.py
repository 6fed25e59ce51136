"""compute-sanitizer on Solutions at fuzz shapes: a finding is a failed verdict, with the kernel and the line."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilegym_db.errors import HardwareError, UsageError
from tilegym_db.measurement.instruments.requests import (
    Chosen,
    choose_solutions,
    find_program,
    mark_of,
    output_of,
    with_cases,
    write_request,
)
from tilegym_db.measurement.machine import timing_lock
from tilegym_db.measurement.run_setup import RunSetup
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Trace
from tilegym_db.store.journal import Journal
from tilegym_db.verification.verifier import Failure

PADDING_BYTES = 1 << 16
"""Bytes after every allocation, so that writes far beyond a tensor do not hit another one."""
COMMON = (
    "--target-processes", "application-only", "--print-limit", "1000", "--show-backtrace", "device",
    "--destroy-on-device-error", "kernel",
)  # fmt: skip
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--padding", str(PADDING_BYTES), "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
"""Tool of compute-sanitizer -> its options. They find accesses out of bounds, races in shared memory, reads of
uninitialised memory, and wrong use of barriers.
"""
NO_CASE = "no fuzz case fits its declared limits, so nothing was run"


@dataclass(frozen=True)
class Sanitized:
    """Findings of one tool in one Solution; ``problem`` is the reason if there is no result."""

    chosen: Chosen
    tool: str
    findings: tuple[SanitizerFinding, ...] = ()
    problem: str = ""

    @property
    def is_clean(self) -> bool:
        """True if every case ran without an error. Warnings do not count."""
        return not self.problem and not self.errors

    @property
    def errors(self) -> tuple[SanitizerFinding, ...]:
        """The findings that are not warnings."""
        return tuple(finding for finding in self.findings if not finding.is_warning)


@dataclass
class Run:
    """One tool on Solutions of one language. If a Solution ends its process, another process runs the rest."""

    tool: str
    device: str
    execute: Callable[[list[str], Path], str]
    program: Path
    results: list[Sanitized] = field(default_factory=list)

    def over(self, waiting: Sequence[Chosen], folder: Path) -> list[Sanitized]:
        """Return the result of every Solution, in order."""
        left = list(waiting)
        while left:
            request = folder / f"{self.tool}-{len(left)}.json"
            write_request(request, self.device, [item.calls for item in left])
            text = self.execute(sanitizer_command(self.program, self.tool, request), folder)
            results, left = verdicts_of(self.tool, left, parse_report(text))
            self.results += results
        return self.results


def sanitize(
    names: Sequence[str] = (),
    *,
    tools: Sequence[str] = tuple(TOOLS),
    language: str | None = None,
    gpu: str = "auto",
    cases: int = 12,
    starting: Callable[[str], None] = lambda what: None,
) -> list[Sanitized]:
    """Run compute-sanitizer's tools on Solutions; findings in Solutions of the catalog become failed traces.

    Args:
        cases: number of fuzz cases per Solution, over its dtypes.
        starting: called with a description of the next step.
    """
    _check_tools(tools)
    program = find_program("compute-sanitizer")
    setup = RunSetup.of(gpu, None, None)
    if not setup.machine.is_gpu:
        raise HardwareError(
            "sanitize watches kernels on an NVIDIA GPU, and this machine has none. Run it on a machine with one.",
            code="gpu_absent",
        )
    records, seed = setup.catalog, secrets.randbits(62)
    chosen = [
        with_cases(item, records.workloads_for(item.definition.name), cases, seed)
        for item in choose_solutions(records, names, setup.machine, language)
    ]
    results = [Sanitized(item, "", problem=NO_CASE) for item in chosen if not item.cases]
    chosen = [item for item in chosen if item.cases]
    with scratch_folder() as folder, timing_lock(setup.machine.device):
        for tool in tools:
            for tile_language in dict.fromkeys(item.files.record.spec.language for item in chosen):
                group = [item for item in chosen if item.files.record.spec.language == tile_language]
                starting(f"{tool}: {len(group)} solutions in {tile_language}")
                results += Run(tool, setup.machine.device, output_of, program).over(group, folder)
    record_failures(results, setup)
    return results


def _check_tools(tools: Sequence[str]) -> None:
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown:
        raise UsageError(
            f"compute-sanitizer has no tool '{unknown[0]}'. Known: {', '.join(TOOLS)}.", code="tool_unknown"
        )
    if not tools:
        raise UsageError(f"no tool to run. Name at least one. Known: {', '.join(TOOLS)}.", code="tool_missing")


def sanitizer_command(program: Path, tool: str, request: Path) -> list[str]:
    """Return the command line of one run."""
    calls = [sys.executable, "-m", "tilegym_db.measurement.instruments.calls", str(request)]
    return [str(program), "--tool", tool, *COMMON, *TOOLS[tool], *calls]


def verdicts_of(tool: str, waiting: Sequence[Chosen], report: SanitizerReport) -> tuple[list[Sanitized], list[Chosen]]:
    """Return the results of the Solutions that a run reached, and the Solutions for the next run.

    A Solution whose calls raised, or at which the tool ended, gets a result with its findings so far. So each run gets
    further.
    """
    results: list[Sanitized] = []
    for item in waiting:
        name = item.files.name
        findings = tuple(finding for finding in report.findings if finding.solution == name)
        if name in report.done and report.is_complete:
            results.append(Sanitized(item, tool, findings))
            continue
        if name in report.done:
            results.append(Sanitized(item, tool, findings, _why_ended(report)))
            continue
        stopped = report.stopped is not None and report.stopped[0] == name
        problem = report.stopped[1] if stopped and report.stopped is not None else _why_ended(report)
        results.append(Sanitized(item, tool, findings, "" if findings and stopped else problem))
        break
    return results, list(waiting[len(results) :])


def _why_ended(report: SanitizerReport) -> str:
    said = "; ".join(report.remarks[:4]) or "it printed nothing"
    return f"compute-sanitizer did not finish: {said}"


def record_failures(results: Sequence[Sanitized], setup: RunSetup) -> list[Trace]:
    """Write a failed trace for each Solution of the catalog with an error. It revokes earlier passes on this GPU."""
    found = [result for result in results if result.errors and result.chosen.in_catalog]
    if not found:
        return []
    context = setup.context(command="debug sanitize")
    traces = []
    with Journal(context.run_id, setup.home) as journal:
        for result in found:
            first = result.errors[0]
            failure = Failure(
                "RUNTIME_ERROR",
                f"{result.tool}: {'; '.join(str(finding) for finding in result.errors[:4])}",
                "\n".join((str(first), *first.details)),
                gate=f"sanitize {result.tool}",
                case=result.chosen.cases[first.case],
            )
            chosen = result.chosen
            workload = chosen.workloads[first.case]
            trace = context.failed(chosen.definition, chosen.files, workload, "screen", failure, {}, 0)
            journal.append(trace)
            traces.append(trace)
    setup.ingest()
    return traces


# ---- sanitizer report -----------------------------------------------------------------------------
# Reader of compute-sanitizer's output: the error, its kernel and line, and the call in which it occurred.

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
    """One finding of a tool. Repeats at the same line of the same kernel count as one."""

    what: str
    kernel: str = ""
    place: str = ""
    """``file:line`` of the source, if the compiler kept lines."""
    details: tuple[str, ...] = ()
    times: int = 1
    solution: str = ""
    case: int = 0
    """Number of the call in which it was first found."""
    is_warning: bool = False

    def __str__(self) -> str:
        where = f" in {self.kernel}" if self.kernel else ""
        return f"{self.what}{where}{f' at {self.place}' if self.place else ''}"


@dataclass
class SanitizerReport:
    """The report of one run of a tool.

    ``done`` are the Solutions whose calls all returned. ``stopped`` is the Solution whose call raised, and the error.
    ``reached`` is the last Solution begun. ``is_complete`` is false if the tool did not finish; ``remarks`` then has its
    output.
    """

    findings: list[SanitizerFinding] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    stopped: tuple[str, str] | None = None
    reached: str = ""
    is_complete: bool = False
    remarks: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Solution -> seconds of its calls, including compilation and drawing of inputs, if all of them returned."""


def parse_report(text: str) -> SanitizerReport:
    """Read the output of the tool and of the program that it ran, interleaved."""
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
    """Yield the tool's messages, each with its indented lines, and the program's marked lines, in order."""
    head: str | None = None
    details: list[str] = []
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            if mark_of(line) is None:
                continue  # output of the kernel or a compiler
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
    """Return the finding of a message; its place is the first line that names a kernel."""
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

"""``tilegym-db compile``: compile solutions ahead of time, for GPUs that need not be in this machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.output import note, print_json, print_table
from tilegym_db.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilegym_db.backends.aot import CompileJob, CompileResult
    from tilegym_db.catalog import Catalog, SolutionFiles
    from tilegym_db.records import Definition, Workload

    Outcome = tuple[CompileJob, CompileResult]


def command(
    names: Annotated[list[str] | None, typer.Argument(help="Definitions or solutions; none means all.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="sm_80, sm_89, sm_90, sm_100, sm_120, or all; repeatable.")
    ] = None,
    language: Annotated[str | None, typer.Option("--language", "-l", help="Only solutions in this language.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="Glob over tags, axes and uuid; default: one size in each choice of dtypes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Compile every matching solution for a target (default sm_90). Needs the compilers, but no GPU.

    Exit status 1 if a compilation fails, if a compiler is missing, or if nothing could be compiled.
    """
    from tilegym_db.catalog import Catalog

    outcomes = compile_catalog(Catalog.default(), names or (), parse_targets(target), language, workload)
    if as_json:
        print_json([outcome_record(*outcome) for outcome in outcomes])
    else:
        print_outcomes(outcomes)
    if failure_count(outcomes) or not any(result.status == "compiled" for _, result in outcomes):
        raise typer.Exit(1)


def compile_catalog(
    catalog: Catalog,
    names: Sequence[str],
    targets: Sequence[str],
    language: str | None = None,
    workload: str | None = None,
) -> list[Outcome]:
    """Compile the jobs of :func:`select_jobs` with a progress bar; sort the outcomes by definition, solution and target."""
    from tilegym_db.backends.aot import compile_many

    jobs = select_jobs(catalog, names, targets, language, workload)
    refused = scan_refusals(jobs)
    built = [job for job in jobs if job.solution.name not in refused]
    with progress(len(built)) as advance:
        results = compile_many(built, lambda job, _: advance(job.solution.name))
    outcomes = list(zip(built, results, strict=True))
    outcomes += [(job, refused[job.solution.name]) for job in jobs if job.solution.name in refused]
    return sorted(
        outcomes, key=lambda outcome: (outcome[0].definition.name, outcome[0].solution.name, outcome[0].target)
    )


def scan_refusals(jobs: Sequence[CompileJob]) -> dict[str, CompileResult]:
    """Return the solutions that the static scan refuses, with reasons. They are not built, because a build runs their code."""
    from tilegym_db.backends.aot import CompileResult
    from tilegym_db.sandbox.scan import hard_findings, scan_sources

    refused = {}
    for solution in {job.solution.name: job.solution for job in jobs}.values():
        found = hard_findings(scan_sources(solution.record, solution.sources))
        if found:
            log = "\n".join(f"refused by the static scan: {finding}" for finding in found)
            refused[solution.name] = CompileResult("failed", log=log)
    return refused


def parse_targets(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the targets of ``--target`` without repeats, in the order given."""
    from tilegym_db.records.hardware import TARGETS, normalise_target

    if texts and "all" in texts:
        return TARGETS
    return tuple(dict.fromkeys(normalise_target(text) for text in texts or ("sm_90",)))


def select_jobs(
    catalog: Catalog, names: Sequence[str], targets: Sequence[str], language: str | None, workload: str | None
) -> list[CompileJob]:
    """Return what to compile: every tile solution, in every dtype and for every target that it declares."""
    from tilegym_db.backends.aot import CompileJob
    from tilegym_db.records import TILE_LANGUAGES
    from tilegym_db.records.solution import normalise_language

    wanted = None if language is None else normalise_language(language)
    jobs, excluded = [], ""
    for solution in named_solutions(catalog, names):
        spoken = solution.record.spec.language
        if spoken not in TILE_LANGUAGES or (wanted is not None and spoken != wanted):
            continue
        definition = catalog.definition(solution.record.definition)
        for target in targets:
            if target not in solution.record.spec.target_hardware:
                excluded = f" {solution.name} is not declared for {target}."
                continue
            chosen = choose_workloads(definition, solution, catalog.workloads_for(definition.name), workload)
            if not chosen:
                excluded = f" {solution.name} has no workload that it declares to support."
            jobs += [CompileJob(definition, solution, item, target) for item in chosen]
    if not jobs:
        raise UsageError(
            f"nothing to compile: no tile solution matches.{excluded} Try: tilegym-db list --solutions",
            code="nothing_selected",
        )
    return jobs


def named_solutions(catalog: Catalog, names: Sequence[str]) -> list[SolutionFiles]:
    """Return the Solutions of some Definitions or Solutions, sorted by name; all of them without names."""
    catalog.refuse_unknown(names)
    chosen: dict[str, SolutionFiles] = {}
    for name in names or tuple(catalog.definitions):
        if name in catalog.definitions:
            chosen.update((item.name, item) for item in catalog.solutions_for(name))
        else:
            chosen[name] = catalog.solution(name)
    return [item for _, item in sorted(chosen.items())]


def choose_workloads(
    definition: Definition, solution: SolutionFiles, workloads: Sequence[Workload], pattern: str | None
) -> list[Workload]:
    """Return the Workloads to compile for: those that match a glob, else one per choice of dtypes that the Solution declares.

    That is the first real Workload in these dtypes. If no Workload has them, it is the first one with its dtypes replaced,
    because everything that a Solution declares must compile.
    """
    # 'tiny' workloads exist for tests, so they are used only if a dtype has no other.
    ordered = sorted(workloads, key=lambda item: "tiny" in item.tags)
    if pattern is not None:
        matching = {item.uuid: item for item in ordered if item.matches(pattern)}
        return [item for item in matching.values() if solution.record.unsupported_at(definition, item) is None]
    chosen: list[Workload] = []
    for choice in itertools.product(*definition.dtypes.values()):
        dtypes = dict(zip(definition.dtypes, choice, strict=True))
        measured = (item for item in ordered if definition.bind_dtypes(item.dtypes) == dtypes)
        candidates = itertools.chain(measured, (_in_dtypes(item, dtypes) for item in ordered))
        chosen += itertools.islice(
            (item for item in candidates if solution.record.unsupported_at(definition, item) is None), 1
        )
    return chosen


def _in_dtypes(workload: Workload, dtypes: dict[str, str]) -> Workload:
    """Return a Workload of the same call in other dtypes."""
    content = workload.model_dump(mode="json", exclude={"uuid"})
    return type(workload).model_validate({**content, "dtypes": dtypes})


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr if it is a terminal; yield the function to call after each job."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("compiling", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


PRINTED = "-- printed --"
COLUMNS = ("solution", "language", "target", "compiled", "seconds", "KiB", "note")


def summarise(outcomes: Sequence[Outcome]) -> list[tuple[Any, ...]]:
    """Return one row per solution and target: sizes compiled, seconds, size, and the first problem."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for job, result in outcomes:
        groups.setdefault((job.solution.name, job.target), []).append((job, result))
    rows = []
    for (name, target), jobs in groups.items():
        results = [result for _, result in jobs]
        compiled = sum(result.status == "compiled" for result in results)
        size = sum(artifact.bytes for result in results for artifact in result.artifacts)
        wrong = next((item for item in jobs if item[1].status != "compiled"), None)
        language = jobs[0][0].solution.record.spec.language
        seconds = round(sum(result.seconds for result in results), 1)
        rows.append((name, language, target, f"{compiled}/{len(results)}", seconds, size // 1024, _reason(wrong)))
    return rows


def _reason(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    job, result = outcome
    # The worker's message comes first, then what was printed. The cause is the last line of the message.
    said = result.log.partition(PRINTED)[0].strip() or result.log.replace(PRINTED, "").strip()
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = lines[-1] if result.status == "failed" and lines else " ".join(lines)
    dtypes = ",".join(job.workload.dtypes.values())
    return f"{result.status} ({dtypes}): {text[:300]}"


def outcome_record(job: CompileJob, result: CompileResult) -> dict[str, Any]:
    """Return one compilation as JSON."""
    return {
        "definition": job.definition.name,
        "solution": job.solution.name,
        "solution_digest": job.solution.digest,
        "language": job.solution.record.spec.language,
        "target": job.target,
        "workload_uuid": job.workload.uuid,
        "axes": job.workload.axes,
        "dtypes": job.workload.dtypes,
        "status": result.status,
        "seconds": result.seconds,
        "kernels": [{"kernel": item.kernel, "bytes": item.bytes} for item in result.artifacts],
        "log": result.log,
    }


def failure_count(outcomes: Sequence[Outcome]) -> int:
    """Return how many compilations failed or lack their compiler.

    A target that a compiler does not support at all is reported but not counted.
    """
    return sum(result.status in ("failed", "toolchain-missing") for _, result in outcomes)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print the summary table and, after a failure, where to find the compilers' output."""
    print_table(COLUMNS, summarise(outcomes), prose=("note",), least=("KiB", "seconds"))
    if failure_count(outcomes):
        note(f"{failure_count(outcomes)} of {len(outcomes)} failed; --json has the compilers' own output")

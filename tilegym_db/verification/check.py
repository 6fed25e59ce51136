"""Checks the records of a catalog, and Definitions that are not in it yet. A finding is one line of text.

The checks run references in child processes and scan sources for the sandbox, so they are in the room of admission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.catalog import Catalog, SolutionFiles, writers
from tilegym_db.catalog.record_files import RECORD_NAME
from tilegym_db.errors import RecordError, TilegymDBError, UsageError, check_kind
from tilegym_db.files import read_bytes
from tilegym_db.published.input_files import pattern_files
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import backward_problem, in_training_problem
from tilegym_db.records.definition_rules import copied_formulation
from tilegym_db.records.loop import UNMEASURED, Pattern
from tilegym_db.sandbox.scan import hard_findings, scan_sources, soft_findings
from tilegym_db.scaffold.definition_draft import RECORD_FILE, WORKLOADS_FILE, open_places, read_definition_file
from tilegym_db.scaffold.solution_draft import unfinished
from tilegym_db.store.connection import Store
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import cited_cases, cited_searches, cited_traces
from tilegym_db.store.side_files import read_patterns

Remark = Callable[[str], None]


def check(
    *names: str | Path, catalog: Catalog | None = None, static: bool = False, on_note: Remark | None = None
) -> list[str]:
    """Check records, the lock, references, self-tests and sources, and return the findings; an empty list if all is well.

    Args:
        names: Definitions or Solutions by name, or drafts of Definitions by path (a folder or a ``.json`` file). Without names,
            the whole catalog and its pattern pages are checked.
        catalog: the records; the shipped ones and the user's overlay by default.
        static: run no reference of the catalog, and so no self-test.
        on_note: called with each remark of the static scan that is no finding.

    Raises:
        NotFoundError: a name is neither a Definition nor a Solution.
        StoreError: the evidence of the patterns cannot be read.
    """
    for name in names:
        check_kind(name, (str, Path), "check takes names of records and paths of drafts")
    catalog = catalog or Catalog.default(warns=False)
    drafts, added = divided(names, catalog)
    findings = [finding for path in drafts for finding in draft_findings(path, catalog)]
    if added or not drafts:
        findings += catalog_findings(catalog, added, on_note, runs=not static)
    return findings


def divided(names: Sequence[str | Path], catalog: Catalog) -> tuple[list[Path], tuple[str, ...]]:
    """Return the drafts, which are given as paths, and the names of records in the catalog.

    A name without a slash is that of a record; if there is none, it may be that of a draft's folder.
    """
    records = {*catalog.definition_paths, *catalog.solution_paths}
    is_draft = [_is_path(name) or (name not in records and _is_draft(name)) for name in names]
    drafts = [Path(name) for name, is_one in zip(names, is_draft, strict=True) if is_one]
    return drafts, tuple(str(name) for name, is_one in zip(names, is_draft, strict=True) if not is_one)


def _is_path(name: str | Path) -> bool:
    return isinstance(name, Path) or "/" in name or name.endswith(".json")


def _is_draft(name: str | Path) -> bool:
    return (Path(name) / RECORD_FILE).is_file()  # as `new definition` makes it


# ---- Records of the catalog -----------------------------------------------------------------------------


def catalog_findings(
    catalog: Catalog, names: Sequence[str] = (), on_note: Remark | None = None, *, runs: bool = True
) -> list[str]:
    """Return the findings about records of the catalog. Without ``runs``, the self-tests are left out."""
    for name in names:
        if name not in catalog.solution_paths and name not in catalog.definition_paths:
            if (Path(name) / RECORD_NAME).is_file():
                raise UsageError(
                    f"{name} is a draft of a solution, and check takes drafts of definitions. Try: tilegym-db dev {name}",
                    code="draft_of_solution",
                )
            catalog.definition(name)  # raises for an unknown name before any slow step
    findings = [
        *writers.lock_findings(catalog),
        *dict.fromkeys(broken.reason for broken in catalog.broken(tuple(names))),
    ]
    broken = {name for paths in (catalog.definition_paths, catalog.solution_paths) for name in paths} - {
        *catalog.definitions,
        *catalog.solutions,
    }
    for name in names or tuple(catalog.definitions):
        if name in broken:
            continue  # reported above
        if name in catalog.solutions and name not in catalog.definitions:
            files = catalog.solutions[name]
            findings += _solution_findings(files, catalog.definition(files.record.definition), on_note)
        else:
            findings += _definition_findings(catalog, catalog.definition(name), on_note, runs=runs)
    return findings + ([] if names else _pattern_findings(catalog))


def _solution_findings(files: SolutionFiles, definition: Definition, on_note: Remark | None) -> list[str]:
    """Return what the scan finds in a Solution, and the places that its author has not filled in."""
    places = unfinished(files.record, files.sources, definition)
    return [*scan_findings(files, on_note), *(f"{files.name}: {place}" for place in places)]


def _definition_findings(catalog: Catalog, definition: Definition, on_note: Remark | None, *, runs: bool) -> list[str]:
    """Return the findings about a Definition, its Solutions and its Workloads. With ``runs``, its self-test counts."""
    from tilegym_db.verification.admission import run_self_test
    from tilegym_db.verification.inputs import blob_problems
    from tilegym_db.verification.self_test import tiny_workloads

    name = definition.name
    workloads, solutions = catalog.workloads_for(name), catalog.solutions_for(name)
    findings = open_places(catalog.definition_paths[name]) + copied_findings(definition)
    if not definition.is_open and not any(item.record.spec.provides == "stock" for item in solutions):
        findings.append(
            f"{name}: no solution provides its stock code, so nothing can be compared or fallen back on. "
            f"Try: tilegym-db new solution {name} --stock"
        )
    findings += backward_findings(catalog, definition) + training_findings(catalog, definition)
    for solution in solutions:
        findings += _solution_findings(solution, definition, on_note)
    findings += blob_problems(definition, workloads, catalog.roots)
    if runs:
        findings += run_self_test(definition, tiny_workloads(definition, workloads))
    return findings


def backward_findings(catalog: Catalog, definition: Definition) -> list[str]:
    """Return why a Definition is not a backward of the one it names; empty if it is."""
    if definition.backward_of is None:
        return []
    try:
        problem = backward_problem(catalog.definition(definition.backward_of), definition)
    except TilegymDBError as error:
        return [f"{definition.name}: backward_of: {error}"]
    if not problem:
        return []
    return [
        f"{definition.name}: backward_of: {definition.name} cannot be the backward of {definition.backward_of}: {problem}."
    ]


def training_findings(catalog: Catalog, definition: Definition) -> list[str]:
    """Return why the Definition of ``serving.in_training`` cannot take the place of this one; empty without a problem."""
    name = None if definition.serving is None else definition.serving.in_training
    if name is None:
        return []
    try:
        problem = in_training_problem(definition, catalog.definition(name))
    except TilegymDBError as error:
        return [f"{definition.name}: serving.in_training: {error}"]
    return [f"{definition.name}: serving.in_training: {name} cannot take its place: {problem}."] if problem else []


def copied_findings(definition: Definition) -> list[str]:
    """Return the finding about a formulation that is the reference itself."""
    copied = copied_formulation(definition.reference, definition.self_test)
    return [] if copied is None else [f"{definition.name}: {copied}"]


def scan_findings(solution: SolutionFiles, on_note: Remark | None = None) -> list[str]:
    """Return what the static scan refuses in one Solution. Its other remarks go to ``on_note``."""
    found = scan_sources(solution.record, solution.sources)
    if on_note is not None:
        for finding in soft_findings(found):
            on_note(f"{solution.name}: {finding}")
    return [f"{solution.name}: {finding}" for finding in hard_findings(found)]


# ---- Pattern pages --------------------------------------------------------------------------------------
# Checks the pattern pages against the traces, searches and package versions that they cite.


def _pattern_findings(catalog: Catalog) -> list[str]:
    if not pattern_files(catalog):
        return []
    with open_store(read_only=True, catalog=catalog) as store:
        return pattern_findings(catalog, store)


def pattern_findings(catalog: Catalog, store: Store) -> list[str]:
    """Return problems of the pattern pages: invalid pages, lost evidence, and package versions other than the pinned ones."""
    patterns, found = read_patterns(catalog)
    known = {*catalog.definitions, *(item.op_type for item in catalog.definitions.values()), "*"}
    cited = sorted(
        {text.removeprefix("trace:") for item in patterns for text in item.evidence if text.startswith("trace:")}
    )
    here = Cited(
        {row["trace_id"]: row for row in cited_traces(store, [name for name in cited if "/" not in name])},
        cited_cases(store, [name for name in cited if "/" in name]),
        cited_searches(store),
    )
    pinned = _pinned(catalog.roots)
    for pattern in patterns:
        found += [
            f"{pattern.id}: applies_to names '{name}', which is nothing here."
            for name in pattern.applies_to
            if name not in known
        ]
        for text in pattern.evidence:
            reason = _why_gone(text, here)
            if reason:
                found.append(f"{pattern.id}: its evidence {text} {reason}. Measure it again, or write 'unmeasured'.")
        found += _version_findings(pattern, pinned)
    return found


@dataclass(frozen=True)
class Cited:
    """The cited evidence that exists here: traces by id, cases with their verification state, and searches."""

    traces: Mapping[str, Mapping[str, object]]
    cases: Mapping[str, bool]
    searches: set[str]


def _why_gone(text: str, here: Cited) -> str:
    """Return why a citation is no longer valid; empty if it is valid.

    A cited case, ``trace:GPU/SOLUTION/AXES``, stays valid after a new measurement. A cited trace id does not.
    """
    kind, _, name = text.partition(":")
    if text == UNMEASURED:
        return ""
    if kind == "search":
        return "" if name in here.searches else "is no search that is recorded with today's sources"
    if "/" in name:
        known = here.cases.get(name)
        if known is None:
            return "is no GPU/SOLUTION/AXES that was verified (AXES as `best` prints them: M=1,N=4096)"
        return "" if known else "was taken back by a failure, or its source changed"
    row = here.traces[name]
    if not row["is_here"]:
        return "is no trace that is here"
    if row["status"] != "PASSED":
        return f"has the status {row['status']}"
    return "was taken back by a failure" if row["is_revoked"] else ""


def _version_findings(pattern: Pattern, pinned: Mapping[str, str]) -> list[str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    found = []
    for package, text in pattern.versions.items():
        try:
            fits = package not in pinned or SpecifierSet(text).contains(pinned[package], prereleases=True)
        except InvalidSpecifier:
            found.append(f"{pattern.id}: versions.{package} {text!r} must read as a requirement does, such as '>=3.6'.")
            continue
        if not fits:
            found.append(
                f"{pattern.id}: it was measured with {package}{text}, and {pinned[package]} is pinned. Measure it again."
            )
    return found


def _pinned(roots: Sequence[Path]) -> dict[str, str]:
    """Read the pinned version of each package from ``constraints.txt``; empty if no root contains that file."""
    lines = [
        line for root in roots if (root / "constraints.txt").is_file() for line in (root / "constraints.txt").open()
    ]
    pairs = (line.strip().partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower(): version for name, _, version in pairs}


# ---- Drafts ---------------------------------------------------------------------------------------------


def draft_findings(path: Path, catalog: Catalog) -> list[str]:
    """Return the reasons why a Definition outside the catalog would not be admitted.

    Its Workloads come from the draft's folder, else from the catalog.
    """
    from tilegym_db.verification.admission import run_reference_once, run_self_test
    from tilegym_db.verification.inputs import blob_problems
    from tilegym_db.verification.self_test import tiny_workloads

    findings = open_places(path)
    try:
        record = catalog.with_forward(read_definition_file(path), path)
    except RecordError as error:
        return findings + [f"{path}: {problem}" for problem in error.problems or (str(error),)]
    findings += copied_findings(record) + training_findings(catalog, record)
    workloads, refused = _draft_workloads(path / WORKLOADS_FILE, record) if path.is_dir() else ([], [])
    findings += refused + blob_problems(record, workloads, (path,))
    if not path.is_dir() and record.name in catalog.definitions:
        workloads = catalog.workloads_for(record.name)
    if not workloads:
        try:
            run_reference_once(record, path)
        except RecordError as error:
            findings.append(str(error))
    return findings + run_self_test(record, tiny_workloads(record, workloads))


def _draft_workloads(file: Path, record: Definition) -> tuple[list[Workload], list[str]]:
    """Return the valid Workloads of a draft, and the problems of the others."""
    found: list[Workload] = []
    refused: list[str] = []
    if not file.exists():
        return found, [f"{file}: missing; it has sizes, at least one of them tagged 'tiny'"]
    for number, line in enumerate(read_bytes(file, "workload file").splitlines(), start=1):
        where = f"{file}:{number}"
        try:
            if line.strip():
                workload = Workload.from_json(line, where)
                workload.check_against(record)
                found.append(workload)
        except RecordError as error:
            refused.append(str(error) if str(error).startswith(where) else f"{where}: {error}")
    return found, refused

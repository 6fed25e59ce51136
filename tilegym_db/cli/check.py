"""``tilegym-db check``: validate records, the lock, references, self-tests and sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.kit.output import note, print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tilegym_db.catalog import Catalog, SolutionFiles
    from tilegym_db.records import Definition, Workload


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Definitions, solutions, or drafts of definitions (a folder or a .json file); none means all."
        ),
    ] = None,
    update_lock: Annotated[bool, typer.Option(help="Add new versions to definitions.lock.json first.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print what the static scan only notes.")
    ] = False,
    architecture: Annotated[
        bool,
        typer.Option(
            "--architecture", help="Only what the catalog lacks as a whole: kernels, traces, names, evidence."
        ),
    ] = False,
    static: Annotated[
        bool, typer.Option("--static", help="Only what is found without running a reference: records, lock, sources.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check records, the lock, references, self-tests and sources, and list every problem.

    Exit status 1 if anything is found.
    """
    from tilegym_db.catalog import Catalog

    catalog = Catalog.default(warns=False)
    if update_lock:
        catalog = with_new_locks(catalog)
    drafts = [Path(name) for name in names or () if looks_like_a_draft(name)]
    added = tuple(name for name in names or () if not looks_like_a_draft(name))
    findings = [finding for path in drafts for finding in check_draft(path, catalog)]
    if architecture:
        from tilegym_db.loop.architecture import architecture_findings

        findings += architecture_findings(catalog, added)
    elif added or not drafts:
        findings += check_catalog(catalog, added, scan_note if verbose else None, runs=not static)
    if as_json:
        print_line(json.dumps(findings))
    else:
        print_findings(findings, counted(catalog, names or (), added))
        if names and not findings:
            note_next(drafts, added)
    if added and (others := len(catalog.broken()) - len(catalog.broken(added))):
        note(f"{others} other records are broken. To list them: tilegym-db check")
    if findings:
        raise typer.Exit(1)


def with_new_locks(catalog: Catalog) -> Catalog:
    """Lock new versions, print each of them, and return the catalog read again."""
    for locked in catalog.update_lock(catalog.write_root):
        note(f"locked {locked}")
    return type(catalog).default(warns=False)


def note_next(drafts: Sequence[Path], added: Sequence[str]) -> None:
    """Print the next commands after a check without findings."""
    after = [f"tilegym-db add-definition {path}" for path in drafts]
    note(f"Next: {'; '.join([*after, *(f'tilegym-db bench {name}' for name in added)])}")


def counted(catalog: Catalog, names: Sequence[str], added: Sequence[str]) -> str:
    """Return the number and kind of the checked records."""
    kind = "records" if catalog.solution_paths.keys() & {*added} else "definitions"
    return f"{len(names or catalog.definitions)} {kind}"


def print_findings(findings: Sequence[str], checked: str) -> None:
    """Print one line per finding, then their number."""
    for finding in findings:
        print_line(finding)
    note(f"checked {checked}: {len(findings)} findings")


def scan_note(text: str) -> None:
    """Print a note that is not a finding."""
    note(f"note: {text}")


def check_catalog(
    catalog: Catalog, names: tuple[str, ...], on_note: Callable[[str], None] | None = None, *, runs: bool = True
) -> list[str]:
    """Return every finding as one line. Notes of the static scan go to ``on_note``. Without ``runs``, skip the self-tests."""
    for name in names:
        if name not in catalog.solution_paths and name not in catalog.definition_paths:
            catalog.definition(name)  # raises for an unknown name before any slow step
    from tilegym_db.verification.admission import run_self_test
    from tilegym_db.verification.inputs import blob_problems
    from tilegym_db.verification.self_test import tiny_workloads

    findings = [*catalog.lock_findings(), *dict.fromkeys(broken.reason for broken in catalog.broken(names))]
    broken = {name for paths in (catalog.definition_paths, catalog.solution_paths) for name in paths} - {
        *catalog.definitions,
        *catalog.solutions,
    }
    for name in names or tuple(catalog.definitions):
        if name in broken:
            continue  # reported above
        if name in catalog.solutions and name not in catalog.definitions:
            findings += scan_findings(catalog.solutions[name], on_note)
            continue
        definition = catalog.definition(name)
        workloads, solutions = catalog.workloads_for(name), catalog.solutions_for(name)
        if not definition.is_open and not any(item.record.spec.provides == "stock" for item in solutions):
            findings.append(
                f"{name}: no solution provides its stock code, so nothing can be compared or fallen back on. "
                f"Try: tilegym-db new solution {name} --stock"
            )
        findings += backward_findings(catalog, definition)
        for solution in solutions:
            findings += scan_findings(solution, on_note)
        findings += blob_problems(definition, workloads, catalog.roots)
        if runs:
            findings += run_self_test(definition, tiny_workloads(definition, workloads))
    return findings + ([] if names else check_patterns(catalog))


def check_patterns(catalog: Catalog) -> list[str]:
    """Return problems of the patterns: lost or withdrawn evidence, and versions other than the pinned ones."""
    from tilegym_db.loop.architecture import pattern_findings
    from tilegym_db.published.input_files import pattern_files
    from tilegym_db.store.connection import open_store

    if not pattern_files(catalog):
        return []
    with open_store(read_only=True, catalog=catalog) as store:
        return pattern_findings(catalog, store)


def looks_like_a_draft(name: str) -> bool:
    """Return True if an argument is a path rather than a name."""
    return "/" in name or name.endswith(".json")


def check_draft(path: Path, catalog: Catalog) -> list[str]:
    """Return the reasons why a definition outside the catalog would not be admitted.

    Its workloads come from the draft's folder, else from the catalog.
    """
    from tilegym_db.errors import RecordError
    from tilegym_db.scaffold import read_definition_file
    from tilegym_db.scaffold.definition_draft import WORKLOADS_FILE, open_places
    from tilegym_db.verification.admission import run_reference_once, run_self_test
    from tilegym_db.verification.inputs import blob_problems
    from tilegym_db.verification.self_test import tiny_workloads

    findings = open_places(path)
    try:
        record = catalog.with_forward(read_definition_file(path), path)
    except RecordError as error:
        return findings + [f"{path}: {problem}" for problem in error.problems or (str(error),)]
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
    """Return the valid workloads of a draft, and the problems of the others."""
    from tilegym_db.errors import RecordError
    from tilegym_db.files import read_bytes
    from tilegym_db.records import Workload

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


def backward_findings(catalog: Catalog, definition: Definition) -> list[str]:
    """Return why a Definition is not a backward of the one it names; empty if it is."""
    from tilegym_db.errors import TilegymDBError
    from tilegym_db.records.backward import backward_problem

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


def scan_findings(solution: SolutionFiles, on_note: Callable[[str], None] | None) -> list[str]:
    """Return what the static scan refuses in one Solution."""
    from tilegym_db.sandbox.scan import hard_findings, scan_sources, soft_findings

    found = scan_sources(solution.record, solution.sources)
    if on_note is not None:
        for finding in soft_findings(found):
            on_note(f"{solution.name}: {finding}")
    return [f"{solution.name}: {finding}" for finding in hard_findings(found)]

"""``tilegym-db check``: is every record valid, locked, and its Definition's verifier able to tell right from wrong?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.output import note

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilegym_db.catalog import Catalog, SolutionFiles
    from tilegym_db.records import Definition


def command(
    names: Annotated[list[str] | None, typer.Argument(help="Definitions to check; none means all.")] = None,
    update_lock: Annotated[bool, typer.Option(help="Add new versions to definitions.lock.json first.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print what the static scan only notes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check records, the lock, references, self-tests and sources. Exit status 1 if anything is found."""
    from tilegym_db.catalog import Catalog

    catalog = Catalog.default()
    if update_lock:
        for added in catalog.update_lock(catalog.write_root):
            typer.echo(f"locked {added}", err=True)
        catalog = Catalog.default()
    findings = check_catalog(catalog, tuple(names or ()), scan_note if verbose else None)
    if as_json:
        typer.echo(json.dumps(findings))
    else:
        for finding in findings:
            typer.echo(finding)
        count = len(names or catalog.definitions)
        typer.echo(f"checked {count} definitions: {len(findings)} findings", err=True)
    if findings:
        raise typer.Exit(1)


def scan_note(text: str) -> None:
    """Print what is worth knowing, but no finding."""
    note(f"note: {text}")


def check_catalog(catalog: Catalog, names: tuple[str, ...], on_note: Callable[[str], None] | None = None) -> list[str]:
    """Every finding as one line; what the static scan only notes goes to ``on_note``."""
    from tilegym_db.errors import TilegymDBError
    from tilegym_db.verify.self_test import self_test, tiny_workloads

    findings = catalog.lock_findings()
    for name in names or tuple(catalog.definitions):
        definition = catalog.definition(name)
        try:
            workloads = catalog.workloads_for(name)
            solutions = catalog.solutions_for(name)
        except TilegymDBError as error:
            findings.append(str(error))
            continue
        if not definition.is_open and not any(item.record.spec.provides == "stock" for item in solutions):
            findings.append(
                f"{name}: no solution provides its stock code, so nothing can be compared or fallen back on"
            )
        findings += backward_findings(catalog, definition)
        for solution in solutions:
            findings += scan_findings(solution, on_note)
        findings += [str(finding) for finding in self_test(definition, tiny_workloads(definition, workloads))]
    return findings


def backward_findings(catalog: Catalog, definition: Definition) -> list[str]:
    """Why a Definition is no backward of the one that it names."""
    from tilegym_db.errors import TilegymDBError

    if definition.backward_of is None:
        return []
    try:
        catalog.definition(definition.backward_of)
        catalog.backwards_of(definition.backward_of)
    except TilegymDBError as error:
        return [f"{definition.name}: backward_of: {error}"]
    return []


def scan_findings(solution: SolutionFiles, on_note: Callable[[str], None] | None) -> list[str]:
    """What the static scan refuses in one Solution."""
    from tilegym_db.verify.scan import hard_findings, scan_sources, soft_findings

    found = scan_sources(solution.record, solution.sources)
    if on_note is not None:
        for finding in soft_findings(found):
            on_note(f"{solution.name}: {finding}")
    return [f"{solution.name}: {finding}" for finding in hard_findings(found)]

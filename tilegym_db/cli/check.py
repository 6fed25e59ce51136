"""``tilegym-db check``: is every record valid, locked, and its Definition's verifier able to tell right from wrong?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog


def command(
    names: Annotated[list[str] | None, typer.Argument(help="Definitions to check; none means all.")] = None,
    update_lock: Annotated[bool, typer.Option(help="Add new versions to definitions.lock.json first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check records, the lock, references and self-tests. Exit status 1 if anything is found."""
    from tilegym_db.catalog import Catalog

    catalog = Catalog.default()
    if update_lock:
        for added in catalog.update_lock(catalog.write_root):
            typer.echo(f"locked {added}", err=True)
        catalog = Catalog.default()
    findings = check_catalog(catalog, tuple(names or ()))
    if as_json:
        typer.echo(json.dumps(findings))
    else:
        for finding in findings:
            typer.echo(finding)
        count = len(names or catalog.definitions)
        typer.echo(f"checked {count} definitions: {len(findings)} findings", err=True)
    if findings:
        raise typer.Exit(1)


def check_catalog(catalog: Catalog, names: tuple[str, ...]) -> list[str]:
    """Every finding as one line."""
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
        findings += [str(finding) for finding in self_test(definition, tiny_workloads(definition, workloads))]
    return findings

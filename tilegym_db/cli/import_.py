"""``tilegym-db import``: bring in a data set of another project, without running any of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.options import path_given
from tilegym_db.cli.output import note, print_json, print_line, print_table

if TYPE_CHECKING:
    from tilegym_db.integrations.interchange.importing import ImportReport

SHOWN = 20
SHOWN_FINDINGS = 5


def command(
    path: Annotated[
        Path,
        typer.Argument(
            help="Root of the data set, or one fi_trace file; with --remove, an origin.",
            metavar="PATH",
            parser=path_given,
        ),
    ],
    name: Annotated[str | None, typer.Option(help="What to call it; by default its folder's name.")] = None,
    dialect: Annotated[
        str | None,
        typer.Option(help="flashinfer-trace, fi-trace, sol-execbench or tilegym; told from the files otherwise."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of what that origin held before.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Import nothing where anything is refused.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and report; change nothing.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the imported data set of that origin.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Import a FlashInfer-Trace data set, fi_trace dumps of flashinfer, SOL-ExecBench problems or a TileGym inventory.

    What comes in lives under its origin beside the catalog: shown, never ranked, published or resolved from. Nothing of it
    is executed. Exit status 1 where something was refused.
    """
    from tilegym_db.integrations.interchange.importing import import_data_set

    if remove:
        _remove(str(path))
        return
    report = import_data_set(path, name=name, dialect=dialect, replace=replace, strict=strict, dry_run=dry_run)
    if as_json:
        print_json(_as_json(report, dry_run))
    else:
        _print(report, dry_run)
    if report.data_set.refused:
        raise typer.Exit(1)


def _remove(origin: str) -> None:
    from tilegym_db.paths import home
    from tilegym_db.store.imported import forget_data_set, import_lock

    with import_lock(home()):
        removed, count = forget_data_set(home(), origin)
    note(f"removed {removed}, and {count} files that nothing else held.")


def _as_json(report: ImportReport, dry_run: bool) -> dict[str, object]:
    from tilegym_db.store.imported import counted

    found = report.data_set
    return {
        "origin": found.origin,
        "dialect": found.dialect,
        "imported": counted(found.records),
        "files": len(found.files),
        "changed": report.changed,
        "dry_run": dry_run,
        "refused": [{"file": item.path, "key": item.key, "reason": item.reason} for item in found.refused],
        "findings": [
            {"kind": item.kind, "name": item.name, "file": item.path, "line": item.line, "finding": finding}
            for item in found.records
            for finding in item.findings
        ],
    }


def _print(report: ImportReport, dry_run: bool) -> None:
    from tilegym_db.store.imported import counted

    found = report.data_set
    with_findings = [item for item in found.records if item.findings]
    counts, lacking = counted(found.records), counted(with_findings)
    print_line(f"{found.origin}: dialect {found.dialect}, {len(found.files)} files")
    print_table(("kind", "imported", "with findings"), [(kind, counts[kind], lacking.get(kind)) for kind in counts])
    if found.refused:
        print_line(f"refused, for {len(found.refused)} reasons:")
        for refusal in found.refused[:SHOWN]:
            print_line(f"  {refusal}")
        if len(found.refused) > SHOWN:
            note(f"  and {len(found.refused) - SHOWN} more: --json lists them all")
    for item in with_findings[:SHOWN_FINDINGS]:
        where = item.path if item.line is None else f"{item.path}:{item.line}"
        note(f"finding: {where}: {'; '.join(item.findings)}")
    if len(with_findings) > SHOWN_FINDINGS:
        note(f"and findings of {len(with_findings) - SHOWN_FINDINGS} more records: --json lists them all")
    if dry_run:
        note("nothing was changed (--dry-run).")
    elif report.changed:
        note(f"Next: tilegym-db list --origin {found.origin}")
    else:
        note("exactly this was imported before; nothing changed.")

"""``tilegym-db ingest``: journals of traces into the database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilegym_db.cli.options import regular_files
from tilegym_db.cli.output import note, print_json


def command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Trace files (.jsonl); none means every journal of the store.",
            exists=True,
            dir_okay=False,
            callback=regular_files,
        ),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the database anew from its journals.")] = False,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Let traces count that this installation did not measure (origin 'foreign')."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bring journals into the database. A trace that is there already is left alone, so it can be run at any time.

    Exit status 1 if a line is no trace; the others are ingested all the same.
    """
    from tilegym_db.errors import UsageError
    from tilegym_db.store import ingest
    from tilegym_db.store.connection import open_store

    if rebuild and files:
        raise UsageError("--rebuild reads every journal of the store; give no files with it.", code="options_clash")
    if rebuild and trust:
        raise UsageError(
            "--rebuild keeps what was trusted before; run: tilegym-db ingest --trust [FILES]", code="options_clash"
        )
    if rebuild:
        report = ingest.rebuild()
    else:
        with open_store() as store:
            report = ingest.ingest(store, files, trust=trust)
    rejected = [str(line) for line in report.rejected]
    if as_json:
        print_json({"files": report.files, "added": report.added, "known": report.known, "rejected": rejected})
    else:
        typer.echo(f"{report.added} traces added, {report.known} known already, from {report.files} files")
    for line in (*rejected, *report.notes):
        note(line)
    if rejected:
        raise typer.Exit(1)

"""``tilegym-db sync``: traces of a data set that a team shares into the database, and its resolver tables."""

from __future__ import annotations

from typing import Annotated

import typer

from tilegym_db.cli.output import note, print_json


def command(
    uri: Annotated[str, typer.Argument(help="A folder, or an address such as s3://bucket/folder.", metavar="URI")],
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Let the traces count, and the tables serve, that this installation did not write."
        ),
    ] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="Bring the resolver tables alone, for a machine that only serves.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bring every trace of a shared data set into the database, and its resolver tables into the user's folder.

    What is there already is left alone. Traces that other installations measured are foreign: shown, and used for nothing
    without --trust. So are their tables: with --trust, patch(), resolve() and 'explain' use each beside what is published here; a
    newer one of the same writer takes its place with the next 'sync --trust'. Credentials come from the environment, as for any
    S3 tool. Exit status 1 if a file of the data set is not valid; the others are read all the same.
    """
    from tilegym_db.paths import home
    from tilegym_db.store.data_set import SharedDataSet
    from tilegym_db.store.sharing import brought_in
    from tilegym_db.store.table_exchange import fetch_tables

    data_set = SharedDataSet(uri)
    report, rejected = brought_in(data_set, trust=trust) if not tables else (None, [])
    found = fetch_tables(home(), data_set.place, trust=trust)
    rejected += found.problems
    counts = {} if report is None else {"files": report.files, "added": report.added, "known": report.known}
    if as_json:
        facts = {"tables": found.tables, "new_tables": found.new, "waiting_tables": found.waiting}
        print_json({**counts, **facts, "rejected": rejected})
    elif report is not None:
        typer.echo(f"{report.added} traces added, {report.known} known already, from {report.files} files")
    if not as_json and (found.tables or report is None):
        typer.echo(f"{found.tables} resolver tables, {found.new} of them new here")
    for line in (*rejected, *(report.notes if report is not None else ()), *found.notes(uri)):
        note(line)
    if rejected:
        raise typer.Exit(1)

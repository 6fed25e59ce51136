"""``tilegym-db sync``: traces of a data set that a team shares into the database."""

from __future__ import annotations

from typing import Annotated

import typer

from tilegym_db.cli.output import note, print_json


def command(
    uri: Annotated[str, typer.Argument(help="A folder, or an address such as s3://bucket/folder.", metavar="URI")],
    trust: Annotated[
        bool, typer.Option("--trust", help="Let the traces count that this installation did not measure.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bring every trace of a shared data set into the database. What is there already is left alone.

    Traces that other installations measured are foreign: shown, and used for nothing without --trust. After
    'sync --trust', 'publish --trust' makes this machine's resolver table of them. Credentials come from the environment, as
    for any S3 tool. Exit status 1 if a file of the data set is not valid; the others are read all the same.
    """
    from tilegym_db.store.connection import open_store
    from tilegym_db.store.data_set import SharedDataSet
    from tilegym_db.store.sharing import sync_traces

    data_set = SharedDataSet(uri)
    with open_store() as store:
        report, problems = sync_traces(store, data_set, trust=trust)
    rejected = [*problems, *map(str, report.rejected)]
    if as_json:
        print_json({"files": report.files, "added": report.added, "known": report.known, "rejected": rejected})
    else:
        typer.echo(f"{report.added} traces added, {report.known} known already, from {report.files} files")
    for line in (*rejected, *report.notes):
        note(line)
    if rejected:
        raise typer.Exit(1)

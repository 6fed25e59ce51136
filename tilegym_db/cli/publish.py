"""``tilegym-db publish``, ``ingest`` and ``sync``: publish traces for the resolver, and add traces to the database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.options import Trust, complete_gpu, regular_files
from tilegym_db.cli.kit.output import note, print_json, print_line

if TYPE_CHECKING:
    from tilegym_db.store.publish import PublishReport


def publish_command(
    gpu: Annotated[
        str,
        typer.Option(
            help="The GPU whose traces to publish: h200, ..., or auto for the one here.", autocompletion=complete_gpu
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust: Trust = False,
    to: Annotated[
        str | None,
        typer.Option(
            help="Add the traces of this machine to a data set in a folder or object store (s3://bucket/folder)."
        ),
    ] = None,
) -> None:
    """Write the traces and the resolver table of one GPU: into the checkout, or into the user's folder.

    In a checkout, runs of whole models (model-bench) are published too, as evidence for models.
    From then on resolve() and patch() on that GPU use the published kernels. Only traces that the promotion tier verified in a
    confined process are published, and traces that a later failure revoked are removed. If workers cannot be confined, promoted
    kernels that the package ships are published, but only into the user's folder.

    With --to nothing is written here. The data set gets every missing trace of that GPU from this installation, and a resolver
    table of the promoted kernels. Others fetch both with 'tilegym-db sync'. Credentials come from the environment.
    """
    from tilegym_db.cli.best import chosen_gpu
    from tilegym_db.cli.kit.reader import open_reader
    from tilegym_db.store.publish import publish_all

    slug = chosen_gpu(gpu)
    assert slug is not None
    if to is not None:
        _share(to, slug, as_json=as_json)
        return
    with open_reader(trust=trust) as store:
        reports = publish_all(store, slug)
    if as_json:
        print_json([_record(report) for report in reports])
    for report in reports:
        _print(report, paths=not as_json)


def _share(uri: str, gpu: str, *, as_json: bool) -> None:
    from tilegym_db.cli.kit.reader import open_reader
    from tilegym_db.store.sharing import SharedDataSet, share_traces
    from tilegym_db.store.table_exchange import share_tables

    data_set = SharedDataSet(uri)
    with open_reader() as store:
        report = share_traces(store, data_set, gpu)
        files = share_tables(store, data_set.place, gpu)
    if as_json:
        print_json({**vars(report), "tables": files})
    for name in () if as_json else report.written:
        print_line(name)
    if report.traces:
        note(f"{report.traces - report.known} traces added, {report.known} were there already")
    else:
        note(
            f"nothing to add: there are no traces of {gpu} from this machine. Try, on that GPU: tilegym-db bench --promote"
        )
    if files:
        note(f"added a resolver table of the kernels promoted here, in {len(files)} files")
    for problem in report.problems:
        note(f"not read: {problem}")
    if report.problems:
        raise typer.Exit(1)


def _record(report: PublishReport) -> dict[str, Any]:
    names = ("traces", "entries", "left_out", "revocations", "model_runs", "unconfined")
    facts = {name: getattr(report, name) for name in names}
    paths = {name: [str(path) for path in getattr(report, name)] for name in ("written", "leftover")}
    return {"gpu": report.folder.name, "folder": str(report.folder), **facts, **paths}


def _print(report: PublishReport, *, paths: bool) -> None:
    for path in report.written if paths else ():
        print_line(str(path))
    note(f"{report.traces} traces of {report.entries} shapes in {report.folder}; {len(report.written)} files changed")
    if report.model_runs:
        note(f"{report.model_runs} runs of models are published too")
    if report.unconfined:
        note(
            f"{report.unconfined} of the traces are of shipped sources in workers that were not confined: "
            "only you can use them, on this machine"
        )
    for reason, count in report.left_out.items():
        note(f"left out {count}: {reason}")
    if report.revocations:
        note(f"{report.revocations} failures are published too, so that other stores revoke those passes")
    for path in report.leftover:
        note(f"nothing verified is left in {path}; delete it if this is intended")


# ---- Ingest ---------------------------------------------------------------------------------------------


def ingest_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Trace files (.jsonl); none means every journal of the store.",
            exists=True,
            dir_okay=False,
            callback=regular_files,
        ),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Rebuild the database from its journals.")] = False,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Trust traces that this installation did not measure (origin 'foreign')."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Add journals to the database. Known traces are skipped, so you can run it at any time.

    Exit status 1 if a line is not a valid trace; the others are still ingested.
    """
    from tilegym_db.errors import UsageError
    from tilegym_db.store import connection
    from tilegym_db.store.connection import open_store

    if rebuild and files:
        raise UsageError("--rebuild reads every journal of the store; give no files with it.", code="options_clash")
    if rebuild and trust:
        raise UsageError(
            "--rebuild keeps what was trusted before; run: tilegym-db ingest --trust [FILES]", code="options_clash"
        )
    if rebuild:
        report = connection.rebuild()
    else:
        with open_store() as store:
            report = connection.ingest(store, files, trust=trust)
    rejected = [str(line) for line in report.rejected]
    if as_json:
        print_json({"files": report.files, "added": report.added, "known": report.known, "rejected": rejected})
    else:
        typer.echo(f"{report.added} traces added, {report.known} known already, from {report.files} files")
    for line in (*rejected, *report.notes):
        note(line)
    if rejected:
        raise typer.Exit(1)


# ---- Sync -----------------------------------------------------------------------------------------------


def sync_command(
    uri: Annotated[str, typer.Argument(help="A folder, or an address such as s3://bucket/folder.", metavar="URI")],
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Trust traces and tables that this installation did not write."),
    ] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="Fetch only the resolver tables, for a machine that only serves.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Add every trace of a shared data set to the database, and its resolver tables to the user's folder.

    Known traces are skipped. Traces of other installations are foreign: they are shown, but used only with --trust. The same
    holds for their tables. With --trust, patch(), resolve() and 'explain' use each table in addition to what is published here.
    The next 'sync --trust' replaces a table by a newer one of the same writer. Credentials come from the environment, as for any
    S3 tool. Exit status 1 if a file of the data set is invalid; the others are still read.
    """
    from tilegym_db.paths import home
    from tilegym_db.store.sharing import SharedDataSet, brought_in
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

"""``tilegym-db publish``: publish the traces of one GPU for the resolver, here or in a shared data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.formats import AsJson, open_reader
from tilegym_db.cli.kit.options import Trust, complete_gpu
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
    as_json: AsJson = False,
    trust: Trust = False,
    to: Annotated[
        str | None,
        typer.Option(
            help="Add the traces of this machine to a data set in a folder or object store (s3://bucket/folder)."
        ),
    ] = None,
) -> None:
    """Write the traces and the resolver table of one GPU: into the checkout, or into the user's folder.

    In a checkout, runs of whole models (model bench) are published too, as evidence for models.
    From then on resolve() and patch() on that GPU use the published kernels. Only traces that the promotion tier verified in a
    confined process are published, and traces that a failure revoked are removed. If workers cannot be confined, verified
    kernels that the package ships are published, but only into the user's folder.

    With --to nothing is written here. The data set gets every missing trace of that GPU from this installation, and a resolver
    table of the verified kernels. Others fetch both with 'tilegym-db data sync'. Credentials come from the environment.
    """
    from tilegym_db.cli.best import chosen_gpu
    from tilegym_db.store.publish import publish_all

    slug = chosen_gpu(gpu)
    assert slug is not None
    if to is not None:
        _share(to, slug, as_json=as_json)
        return
    with open_reader(trust=trust, waits=True) as store:
        reports = publish_all(store, slug)
    if as_json:
        print_json([_record(report) for report in reports])
    for report in reports:
        _print(report, paths=not as_json)


def _share(uri: str, gpu: str, *, as_json: bool) -> None:
    from tilegym_db.store.publish import share_tables
    from tilegym_db.store.sharing import SharedDataSet, share_traces

    data_set = SharedDataSet(uri)
    with open_reader(waits=True) as store:
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
            f"nothing to add: there are no traces of {gpu} from this machine. Try, on that GPU: tilegym-db bench --verify"
        )
    if files:
        note(f"added a resolver table of the kernels verified here, in {len(files)} files")
    for problem in report.problems:
        note(f"not read: {problem}")
    if report.problems:
        raise typer.Exit(1)


def _record(report: PublishReport) -> dict[str, Any]:
    names = ("traces", "entries", "left_out", "revocations", "model_runs", "unconfined")
    facts = {name: getattr(report, name) for name in names}
    paths = {name: [str(path) for path in getattr(report, name)] for name in ("written", "leftover")}
    refused = {"disagreements": [one._asdict() for one in report.disagreements]}
    return {"gpu": report.folder.name, "folder": str(report.folder), **facts, **refused, **paths}


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
    for refusal in report.disagreements:
        note(f"not published, {refusal.code}: {refusal.reason}")
    if report.revocations:
        note(f"{report.revocations} failures or overrulings are published too, so that other stores judge the same")
    for path in report.leftover:
        note(f"nothing verified is left in {path}; delete it if this is intended")

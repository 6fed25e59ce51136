"""``tilegym-db publish``: the best promoted traces of a GPU, as the files that the resolver reads."""

from __future__ import annotations

from typing import Annotated

import typer

from tilegym_db.cli.output import note


def command(
    gpu: Annotated[str, typer.Option(help="The GPU whose traces to publish: h200, ..., or auto for the one here.")],
) -> None:
    """Write the traces and the resolver table of one GPU: into the checkout, or into the user's folder.

    From then on resolve() and patch() on that GPU use what was published; nothing else changes what they do. Only what the
    promotion tier verified in a confined process is published; what a later failure took back is taken out.
    """
    from tilegym_db.cli.best import chosen_gpu
    from tilegym_db.cli.reader import open_reader
    from tilegym_db.store.publish import publish

    slug = chosen_gpu(gpu)
    assert slug is not None
    with open_reader() as store:
        report = publish(store, slug)
    for path in report.written:
        typer.echo(str(path))
    note(f"{report.traces} traces of {report.entries} shapes in {report.folder}; {len(report.written)} files changed")
    for reason, count in report.left_out.items():
        note(f"left out {count}: {reason}")
    if report.revocations:
        note(f"{report.revocations} failures go along, so that other stores take those passes back too")
    for path in report.leftover:
        note(f"nothing verified is left in {path}; delete it if that is meant")

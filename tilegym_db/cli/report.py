"""``tilegym-db report``: write one offline page of the whole database, or the changes of a week in Markdown."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Annotated

import typer

from tilegym_db.cli.commands import command_group
from tilegym_db.cli.kit.formats import file_name, open_reader
from tilegym_db.cli.kit.options import Trust, path_given
from tilegym_db.cli.kit.output import note, print_line

app = command_group("Write one page of the whole database, for a browser without a network.", runs_alone=True)

Since = Annotated[
    datetime | None,
    typer.Option(help="Changes since this day (UTC).", formats=["%Y-%m-%d"], metavar="YYYY-MM-DD"),
]


@app.callback()
def command(
    context: typer.Context,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="The page to write.", metavar="FILE", parser=path_given, callback=file_name
        ),
    ] = Path("report.html"),
    since: Since = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Write a page of the differences between two runs instead.", metavar="RUN RUN"),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write one page of the whole database, for a browser without a network.

    The page has the fastest kernels, rooflines, latencies by size, coverage, open tasks, changes, and the source, evidence and
    reproduction command of every kernel. `report weekly` prints a short form.
    """
    if context.invoked_subcommand is not None:
        return
    if compare is not None:
        write_comparison(output, compare, trust=trust)
        return
    from tilegym_db import __version__
    from tilegym_db.catalog import Catalog
    from tilegym_db.files import write_atomically
    from tilegym_db.report.page import page, read_report

    with open_reader(trust=trust) as store:
        data = read_report(store, Catalog.default(), since)
    content = page(data, version=__version__).encode()
    write_atomically(output, content)
    print_line(str(output))
    note(f"{len(data.evidence)} verified cases of {len(data.solutions)} solutions; {len(content) / 1e6:.2f} MB")


def write_comparison(output: Path, runs: tuple[str, str], *, trust: bool) -> None:
    """Write the page of two runs, and print the number of differences of each kind."""
    from tilegym_db import __version__
    from tilegym_db.files import write_atomically
    from tilegym_db.report.weekly import CHANGES, diff_page, read_diff

    with open_reader(trust=trust) as store:
        diff = read_diff(store, *runs)
    write_atomically(output, diff_page(diff, version=__version__).encode())
    print_line(str(output))
    counts = {change: len(diff.of(change)) for change in CHANGES}
    note("; ".join(f"{change}: {count}" for change, count in counts.items() if count) or "the runs have nothing")


@app.command("weekly")
def weekly_command(
    since: Since = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Every row of every table, and the leader of each operator.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Print the changes, the state of each GPU and what is open as Markdown; by default of the last seven days."""

    from tilegym_db.report.weekly import weekly

    start = since or datetime.combine(datetime.now(UTC).date() - timedelta(days=7), time())
    see_all = f"tilegym-db report weekly --since {start.date()} --all{' --trust' if trust else ''}"
    with open_reader(trust=trust) as store:
        text = weekly(store, start, whole=whole, see_all=see_all)
    print_line(text.rstrip())

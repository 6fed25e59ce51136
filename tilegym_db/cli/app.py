"""The Typer app ``tilegym-db``: the table of commands, and how an error leaves the process.

Every module of a command is light to import: torch, compilers and the database load inside the command that needs them.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from tilegym_db.cli import (
    add_definition,
    add_solution,
    add_workload,
    bench,
    best,
    calibrate,
    check,
    compile,
    demo,
    doctor,
    explain,
    ingest,
    leaderboard,
    list,
    model_bench,
    promote,
    publish,
    regress,
    reproduce,
    show,
    sql,
    tune,
    verify_model,
    version,
)
from tilegym_db.errors import TilegymDBError

__all__ = ["app", "main"]

# Panel of the help -> command -> function, in the order in which the help shows them.
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Look": {
        "list": list.command,
        "show": show.command,
        "best": best.command,
        "leaderboard": leaderboard.command,
        "explain": explain.command,
        "sql": sql.command,
    },
    "Author": {
        "add-definition": add_definition.command,
        "add-solution": add_solution.command,
        "add-workload": add_workload.command,
        "check": check.command,
        "compile": compile.command,
    },
    "Measure": {
        "bench": bench.command,
        "tune": tune.command,
        "promote": promote.command,
        "reproduce": reproduce.command,
        "regress": regress.command,
        "publish": publish.command,
        "ingest": ingest.command,
    },
    "Models": {
        "verify-model": verify_model.command,
        "model-bench": model_bench.command,
    },
    "This machine": {
        "demo": demo.command,
        "doctor": doctor.command,
        "calibrate": calibrate.command,
        "version": version.command,
    },
}

app = typer.Typer(
    name="tilegym-db",
    help="A database of transformer operators and of the verified, measured tile kernels that implement them.",
    epilog="Exit status: 0 ok, 1 something was found, 2 wrong usage, 3 no verified solution, 4 a measurement that is void.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _panel, _commands in COMMANDS.items():
    for _name, _function in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_function)


def main() -> None:
    """Run the command line. An error of this package is one paragraph on stderr and its own exit status."""
    try:
        app()
    except TilegymDBError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()

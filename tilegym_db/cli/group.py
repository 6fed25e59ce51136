"""The Typer group behind ``tilegym-db``: loads a command's module when it is asked for, and prints help in panels."""

from __future__ import annotations

import functools
import importlib
import keyword
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilegym_db.cli.commands import COMMANDS

__all__ = ["every_command", "load_command", "root_command"]

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
EPILOG = (
    "Exit status: 0 ok, 1 something was found or failed, 2 wrong usage or a missing package, 3 no verified solution, "
    "4 a measurement that is void, 130 interrupted."
)


@functools.cache
def load_command(name: str) -> Any:
    """The command of that name, from its own module."""
    stem = name.replace("-", "_")
    module = importlib.import_module(f"tilegym_db.cli.{stem}_" if keyword.iskeyword(stem) else f"tilegym_db.cli.{stem}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=SETTINGS)
        app.command(name)(module.command)
    command: Any = typer.main.get_command(app)
    command.name = name
    return command


def every_command() -> dict[str, Any]:
    """Every command that does something, by what is typed: ``list``, ``task create``, ..."""
    found = {}
    for name in (name for panel in COMMANDS.values() for name in panel):
        command = load_command(name)
        inner = getattr(command, "commands", {})
        if not inner or command.invoke_without_command:
            found[name] = command
        found |= {f"{name} {verb}": inner[verb] for verb in inner}
    return found


class CommandTable(TyperGroup):
    """A group whose commands are those of :data:`COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Every name, in the order of the help."""
        return [name for panel in COMMANDS.values() for name in panel]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, loaded now; None where there is none of that name."""
        return load_command(cmd_name) if cmd_name in self.list_commands(ctx) else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As Typer's, with the nearest names for one that is unknown."""
        from tilegym_db.errors import UsageError, did_you_mean

        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            raise UsageError(
                f"no command '{args[0]}'.{did_you_mean(args[0], known)} Try: tilegym-db --help", code="command_unknown"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One section per panel, from the table alone: no command is loaded to print it."""
        width = max(map(len, self.list_commands(ctx)))
        for panel, commands in COMMANDS.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in commands.items()])


def _version(asked: bool) -> None:
    if asked:
        import tilegym_db

        typer.echo(f"tilegym-db {tilegym_db.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A database of transformer operators and of the verified, measured tile kernels that implement them."""


@functools.cache
def root_command() -> Any:
    """``tilegym-db`` as Typer runs it."""
    app = typer.Typer(
        name="tilegym-db",
        cls=CommandTable,
        epilog=EPILOG,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=SETTINGS,
    )
    app.callback()(_options)
    return typer.main.get_command(app)

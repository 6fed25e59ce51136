"""Groups of commands: ``tilegym-db data import``, ``tilegym-db doctor calibrate``, ..."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from tilegym_db.errors import UsageError, did_you_mean

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class CommandGroup(TyperGroup):
    """A group that suggests names for an unknown one, and whose help has the first paragraph of each command in full."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command like Typer, but suggest the nearest names for an unknown one.

        Raises:
            UsageError: there is no such command, or an option of the group stands before the command and would be lost.
        """
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            raise UsageError(
                f"no command '{args[0]}'.{did_you_mean(args[0], known)} Try: {ctx.command_path} --help",
                code="command_unknown",
            )
        given = [item.opts[-1] for item in self.params if _is_given(ctx, item.name)]
        if args and given:
            raise UsageError(
                f"'{args[0]}' does not get {given[0]}, which stands before it. Try: {ctx.command_path} {args[0]} --help",
                code="option_misplaced",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of the commands, in the order of the source."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(command)) for name, command in self.commands.items()])


def _is_given(ctx: Any, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _summary(command: Any) -> str:
    return " ".join((command.help or "").partition("\n\n")[0].split())


def command_group(summary: str, *, runs_alone: bool = False) -> typer.Typer:
    """Return a group of commands. With ``runs_alone`` its callback is a command too, as ``doctor`` is."""
    return typer.Typer(
        cls=CommandGroup,
        no_args_is_help=not runs_alone,
        invoke_without_command=runs_alone,
        rich_markup_mode=None,
        add_completion=False,
        context_settings=SETTINGS,
        help=summary,
    )

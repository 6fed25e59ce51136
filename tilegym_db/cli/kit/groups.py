"""Groups of commands: ``tilegym-db data import``, ``tilegym-db doctor calibrate``, ..."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class CommandGroup(TyperGroup):
    """A group whose help has the first paragraph of each command in full. Typer cuts it after a few words."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of the commands, in the order of the source."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(command)) for name, command in self.commands.items()])


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

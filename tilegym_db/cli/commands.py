"""The table of commands with their help panels, and the Typer groups that load and list them."""

from __future__ import annotations

import functools
import importlib
import shlex
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilegym_db.errors import UsageError, did_you_mean

COMMANDS: dict[str, dict[str, str]] = {
    "Look": {
        "list": "List definitions, or their solutions (--solutions) or workloads (--workloads).",
        "show": "Show a definition, a solution or one trace in full.",
        "best": "Print the fastest verified solution per operator, shape and GPU; --rank compares all.",
        "compare": "Compare two solutions of one operator at every size at which both are verified.",
        "explain": "Show which solution the resolver picks for a call, and why it rejects the others.",
        "report": "Write one page of everything in the database, for a browser without a network.",
        "sql": "Run one read-only SQL statement over the database.",
    },
    "Author": {
        "new": "Write a draft of a definition, a solution or workloads, with the next command.",
        "dev": "Scan, compile, check and time a kernel at one shape, in seconds; nothing is stored.",
        "add-definition": "Validate a definition, run its reference once on small inputs, and copy it into the catalog.",
        "add-solution": "Validate a solution and copy it into the catalog in one step.",
        "add-workload": "Validate workloads and append them to the catalog; all of them or none.",
        "remove": "Remove one of your solutions or definitions; shipped records and all traces stay.",
        "check": "Check records, the lock, references, self-tests and sources.",
        "compile": "Compile every matching solution for a target, without a GPU.",
    },
    "Measure": {
        "bench": "Build, verify and time solutions; every result becomes a trace in the database.",
        "verify": "Run the final verification of what passed a screen; only verified kernels are served.",
        "publish": "Write the traces and the resolver table of one GPU.",
        "tune": "Find the fastest config of each solution per workload.",
        "regress": "Time every solution that changed since a revision, old and new interleaved.",
        "debug": "Sanitize or profile a solution, or reproduce one case: sanitize, profile, reproduce.",
    },
    "Models": {
        "fit": "Measure the kernels for a model here, publish them for you, prove them and time the model.",
        "model": "Time a patched model, compare its kernels with stock code, or plan measurements: bench, verify, plan.",
    },
    "Agents": {
        "task": "Create a task, print it for its author, submit a kernel, see the verdict; or do it for a model.",
        "mcp": "Offer the loop's commands to agents as tools of the Model Context Protocol, over stdio.",
    },
    "Data": {
        "data": "Exchange data sets and traces: import, export, compare, ingest, sync.",
    },
    "This machine": {
        "demo": "Show the main features of tilegym-db on this machine in a few minutes.",
        "doctor": "Report what works here and how to fix what does not; also calibrate, versions.",
    },
}
"""Commands with one-line summaries, by panel of the help, in the order of the help."""

MODULES = {
    **dict.fromkeys(("add-definition", "add-solution", "add-workload", "remove"), "add"),
    **dict.fromkeys(("bench", "verify", "tune", "regress"), "bench"),
    **dict.fromkeys(("best", "compare"), "best"),
    **dict.fromkeys(("task", "mcp"), "task"),
    **dict.fromkeys(("fit", "model"), "models"),
}
"""Module of ``cli`` with the function ``<command>_command``, by command.

A command that is not listed is ``command`` or the Typer app ``app`` in the module of that name.
"""

OLD_NAMES = {
    "auto-kernelize": "task auto",
    "calibrate": "doctor calibrate",
    "compare-foreign": "data compare",
    "export": "data export",
    "import": "data import",
    "ingest": "data ingest",
    "leaderboard": "best --rank",
    "model-bench": "model bench",
    "profile": "debug profile",
    "promote": "verify",
    "recommend": "task recommend",
    "reproduce": "debug reproduce",
    "sanitize": "debug sanitize",
    "sync": "data sync",
    "verify-model": "model verify",
    "version": "doctor versions",
}
"""Earlier name of a command -> the words that replace it."""


# ---- Typer group --------------------------------------------------------------------------------------

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


MEANT = {"list": "status", "ls": "list"}
"""Word of another tool -> the command for it, in a group that has no command of that word."""


class CommandGroup(TyperGroup):
    """A group that suggests names for an unknown one, and whose help has the first paragraph of each command in full."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command like Typer, but suggest the nearest names for an unknown one.

        Raises:
            UsageError: there is no such command, or an option of the group stands before the command and would be lost.
        """
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            meant = MEANT.get(args[0], "")
            hint = f" Did you mean '{meant}'?" if meant in known else did_you_mean(args[0], known)
            raise UsageError(
                f"no command '{args[0]}'.{hint} Try: {ctx.command_path} {meant if meant in known else '--help'}",
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


EPILOG = (
    "Exit status: 0 ok, 1 a finding or a failure, 2 wrong usage or a missing package, 3 no verified solution, "
    "4 an invalid measurement, 130 interrupted."
)


@functools.cache
def load_command(name: str) -> Any:
    """Import the module of a command and return the command."""
    stem = name.replace("-", "_")
    module = importlib.import_module(f"tilegym_db.cli.{MODULES.get(name, stem)}")
    function = getattr(module, f"{stem}_command", None)
    app = getattr(module, "app", None) if function is None else None
    if app is None:
        app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=SETTINGS)
        app.command(name)(function or module.command)
    command: Any = typer.main.get_command(app)
    command.name = name
    for one in (command, *getattr(command, "commands", {}).values()):
        _coerce_late(one)
    return command


def _coerce_late(command: Any) -> None:
    """Let the parameters of a command load Pydantic only for values that it can change; Typer loads it for each.

    It is a tenth of a second, which is a quarter of a command that reads the database. A Typer without this attribute stays as
    it is.
    """

    def changed(parameter: Any) -> Any:
        if getattr(parameter, "_runtime_param", parameter) is None:
            parameter._runtime_param = _Late(parameter.type_descriptor)
        return parameter

    help_option = command.get_help_option
    command.get_help_option = lambda ctx: changed(help_option(ctx))
    for parameter in command.params:
        changed(parameter)


class _Late:
    """The coercion of one parameter."""

    def __init__(self, descriptor: Any) -> None:
        self.descriptor = descriptor

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value as Typer would: what is not given, and texts that are asked for, need no Pydantic."""
        info, kind = self.descriptor.parameter_info, self.descriptor.annotation
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if getattr(info, "parser", None) is None and getattr(info, "click_type", None) is None:
            if kind is str and type(value) is str:
                return value
            if kind == list[str] and type(value) in (tuple, list) and all(type(item) is str for item in value):
                return list(value)
        from typer._coercion import build_runtime_param

        return build_runtime_param(self.descriptor).coerce(value, param=param, ctx=ctx)


def every_command() -> dict[str, Any]:
    """Return every command that does something, by its full name: ``list``, ``task create``, ..."""
    found = {}
    for name in (name for panel in COMMANDS.values() for name in panel):
        command = load_command(name)
        inner = getattr(command, "commands", {})
        if not inner or command.invoke_without_command:
            found[name] = command
        found |= {f"{name} {verb}": inner[verb] for verb in inner}
    return found


class CommandTable(CommandGroup):
    """The group of :data:`COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return every name, in the order of the help."""
        return [name for panel in COMMANDS.values() for name in panel]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load and return a command; None if it does not exist."""
        return load_command(cmd_name) if cmd_name in self.list_commands(ctx) else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as a group does, but answer an old name with the new one."""
        if args and args[0] in OLD_NAMES:
            new = OLD_NAMES[args[0]]
            command = " ".join(["tilegym-db", new, *map(shlex.quote, args[1:])])
            raise UsageError(f"'{args[0]}' is now '{new}'. Try: {command}", code="command_renamed")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per panel from the table, without loading the commands."""
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
    """Query and extend a database of transformer operators and their verified, measured tile kernels."""


@functools.cache
def root_command() -> Any:
    """Return ``tilegym-db`` as a Typer command."""
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
    command = typer.main.get_command(app)
    _coerce_late(command)
    return command

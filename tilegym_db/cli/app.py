"""The command line ``tilegym-db``, and the one place where an error leaves the process.

This module imports next to nothing: Typer loads inside :func:`main`, and a command's module when that command is asked for.
So help is quick, and an interrupt is quiet from the first moment on.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilegym_db.cli.commands import COMMANDS

__all__ = ["COMMANDS", "app", "main"]


def app(arguments: Sequence[str] | None = None) -> int:
    """Run one command without the boundary of :func:`main`; returns its exit status."""
    from tilegym_db.cli.group import root_command

    status = root_command().main(args=arguments, prog_name="tilegym-db", standalone_mode=False)
    return status if isinstance(status, int) else 0


def main() -> None:
    """Run the command line and leave: every known error is one paragraph on stderr and its own exit status."""
    try:
        from tilegym_db.cli.boundary import run

        status = run(app)
    except KeyboardInterrupt:
        status = 130
    raise SystemExit(status)


if __name__ == "__main__":
    main()

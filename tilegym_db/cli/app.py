"""The command line ``tilegym-db``, and the one place where an error leaves the process.

This module imports next to nothing: Typer loads inside :func:`main`, and a command's module when that command is asked for.
So help is quick, and an interrupt is quiet from the first moment on.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ALLOCATIONS_A_COLLECTION = 50_000
MUST_BE_COLLECTED = frozenset(("duckdb", "torch"))
"""Packages that complain when the process ends, or leave devices as they are, where their objects were not collected."""


def app(arguments: Sequence[str] | None = None) -> int:
    """Run one command without the boundary of :func:`main`; returns its exit status."""
    from tilegym_db.cli.commands import root_command

    status = root_command().main(args=arguments, prog_name="tilegym-db", standalone_mode=False)
    return status if isinstance(status, int) else 0


def main() -> None:
    """Run the command line and leave: every known error is one paragraph on stderr and its own exit status."""
    _start_quickly()
    try:
        with _leaving_on_interrupt():
            from tilegym_db.cli.boundary import run
            from tilegym_db.cli.commands import root_command

            root_command()
        status = run(app)
    except KeyboardInterrupt:
        status = 130
    except Exception as error:  # of what even the help needs; a command's own are told where it ran
        status = _told(error)
    if MUST_BE_COLLECTED.isdisjoint(sys.modules):
        gc.freeze()  # else the interpreter looks for cycles among all records that were read, a tenth of what 'list' takes
    raise SystemExit(status)


def _told(error: Exception) -> int:
    from tilegym_db.errors import broken_package, missing_package

    name = error.name if isinstance(error, ModuleNotFoundError) else None
    missing = missing_package(name or "") or broken_package(error)
    if missing is None:
        raise error
    print(f"error: {missing}", file=sys.stderr)
    return missing.exit_code


def _start_quickly() -> None:
    """Spare the start what no command needs.

    Python's collector looks for cycles every few hundred allocations, and a command makes hundreds of thousands that it keeps.
    Pydantic looks through the metadata of every installed package for plugins, of which this package has none.
    """
    gc.set_threshold(ALLOCATIONS_A_COLLECTION, *gc.get_threshold()[1:])
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")


@contextmanager
def _leaving_on_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once and in silence, for as long as it has only imported modules.

    An exception would not do: Python wraps what interrupts the making of a class, and drops what interrupts a callback of its
    import system. A caller that ignores interrupts, or handles them, stays as it is.
    """
    import signal

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()

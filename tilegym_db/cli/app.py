"""The entry point of the command line ``tilegym-db``, and the place where errors become exit statuses.

This module imports very little. Typer loads in :func:`main`, and the module of a command when it runs. Help is therefore
quick, and an interrupt is quiet from the start.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ALLOCATIONS_A_COLLECTION = 50_000
MUST_BE_COLLECTED = frozenset(("duckdb", "torch"))
"""Packages whose objects must be collected at exit. Otherwise they print errors or leave devices in a bad state."""


def app(arguments: Sequence[str] | None = None) -> int:
    """Run one command without the error handling of :func:`main`, and return its exit status."""
    from tilegym_db.cli.commands import root_command

    status = root_command().main(args=arguments, prog_name="tilegym-db", standalone_mode=False)
    return status if isinstance(status, int) else 0


def main() -> None:
    """Run the command line and exit. A known error prints one paragraph on stderr and sets the exit status."""
    _start_quickly()
    try:
        with _leaving_on_interrupt():
            from tilegym_db.cli.boundary import run
            from tilegym_db.cli.commands import root_command

            root_command()
        status = run(app)
    except KeyboardInterrupt:
        status = 130
    except Exception as error:  # an import of the help failed; `run` reports errors of commands
        status = _told(error)
    _keep_status(status)
    if MUST_BE_COLLECTED.isdisjoint(sys.modules):
        gc.freeze()  # skips the final search for cycles, which takes a tenth of the time of 'list'
    raise SystemExit(status)


def _keep_status(status: int) -> None:
    """Exit with ``status`` at once on Ctrl-C from now on. While the interpreter ends, an exception would print a traceback."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))


def _told(error: Exception) -> int:
    from tilegym_db.errors import broken_package, missing_package

    name = error.name if isinstance(error, ModuleNotFoundError) else None
    missing = missing_package(name or "") or broken_package(error)
    if missing is None:
        raise error
    print(f"error: {missing}", file=sys.stderr)
    return missing.exit_code


def _start_quickly() -> None:
    """Reduce the start-up time of every command.

    Python's collector searches for cycles every few hundred allocations, but a command keeps hundreds of thousands of objects.
    Pydantic searches the metadata of every installed package for plugins, but this package has none.
    """
    gc.set_threshold(ALLOCATIONS_A_COLLECTION, *gc.get_threshold()[1:])
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")


@contextmanager
def _leaving_on_interrupt() -> Iterator[None]:
    """Exit at once and silently on Ctrl-C while modules are imported.

    An exception is not enough: Python wraps it during the creation of a class and drops it in a callback of the import system.
    If the caller ignores or handles interrupts, nothing changes.
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

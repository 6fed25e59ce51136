"""The entry point of the command line ``tilegym-db``, and the place where errors become exit statuses.

This module imports very little. Typer loads in :func:`main`, and the module of a command when it runs. Help is therefore
quick, and an interrupt is quiet from the start.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

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
            from tilegym_db.cli.commands import root_command

            root_command()
        status = run(app)
    except KeyboardInterrupt:
        status = 130
    except Exception as error:  # an import of the help failed; `run` reports errors of commands
        status = _told_missing(error)
    _keep_status(status)
    if MUST_BE_COLLECTED.isdisjoint(sys.modules):
        gc.freeze()  # skips the final search for cycles, which takes a tenth of the time of 'list'
    raise SystemExit(status)


def _keep_status(status: int) -> None:
    """Exit with ``status`` at once on Ctrl-C from now on. While the interpreter ends, an exception would print a traceback."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))


def _told_missing(error: Exception) -> int:
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


# ---- errors and interrupts -----------------------------------------------------------------------
# Run a command, print every known error as one paragraph on stderr, and return the exit status.
#
# An unknown error is a bug of this package and keeps its traceback.


INTERRUPTED = 130
FAILED = 1
QUERY_THREAD = "tilegym-db-query"
STANDARD_STREAMS = (0, 1, 2)
MAX_WORD = 4096
"""Maximum length of a word in a message, equal to that of a path."""


def run(command: Callable[[], int]) -> int:
    """Run ``command`` and return the exit status; print known errors.

    If the reader of the output closes early (``| head``), the status is 0 and nothing is printed.
    """
    _open_closed_streams()
    _make_output_total()
    with _remembering_interrupts() as interrupts:
        return _run(command, interrupts)


def _run(command: Callable[[], int], interrupts: list[int]) -> int:
    try:
        status = command()
        if status == INTERRUPTED:
            return _interrupted()
        _flush()
        return status
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        _discard_output()
        return 0
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        _discard_output()  # Typer would exit with status 1
        return 0
    except OSError as error:
        _discard_output()
        return _told_broken(error) or _say(_spelled_os_error(error), FAILED)
    except MemoryError:
        return _say("out of memory. Ask for less: fewer rows, smaller sizes.", FAILED)
    except RecursionError:
        return _say("an input is nested too deeply to be read.", FAILED)
    except Exception as error:
        if interrupts:
            return _interrupted()
        told = _told(error)
        if told is None:
            raise
        return told


def _interrupted() -> int:
    _discard_output()
    # Python remembers an interrupt that leaves text run by exec, as in a dataclass, and would then exit by the signal. Running
    # another text clears that state.
    exec("")
    if any(thread.name == QUERY_THREAD for thread in threading.enumerate()):
        os._exit(INTERRUPTED)  # a query that does not stop would block or abort the interpreter
    return INTERRUPTED


@contextmanager
def _remembering_interrupts() -> Iterator[list[int]]:
    """Yield a list that grows with every Ctrl-C, which still raises :class:`KeyboardInterrupt`.

    During the creation of a class, Python 3.11 and Pydantic replace that exception with another one. If the caller ignores or
    handles interrupts, nothing changes.
    """
    import signal

    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _told(error: Exception) -> int | None:
    """Print a known error and return its exit status; return None for an unknown one."""
    import typer
    from typer.exceptions import TyperException

    from tilegym_db.cli.kit.output import printable_lines
    from tilegym_db.errors import TilegymDBError, is_out_of_memory, missing_package

    sys.last_value = error  # Python does the same at exit, for debuggers
    if isinstance(error, TilegymDBError):
        return _say(str(error), error.exit_code)
    if isinstance(error, TyperException):
        error.message = _readable(printable_lines(str(error.message)))
        error.show()  # type: ignore[attr-defined]  # every subclass that Typer raises has it
        return error.exit_code
    if isinstance(error, typer.Abort):
        return INTERRUPTED
    if is_out_of_memory(error):
        return _say(f"out of memory: {str(error).splitlines()[0][:300]} Ask for smaller sizes.", FAILED)
    if isinstance(error, ModuleNotFoundError):
        missing = missing_package(error.name or "")
        if missing is not None:
            return _say(str(missing), missing.exit_code)
    return _told_broken(error)


def _told_broken(error: Exception) -> int | None:
    """Explain, as :func:`_told` does, a failed import of an installed package, mostly of a shared library."""
    from tilegym_db.errors import broken_package

    broken = broken_package(error)
    return None if broken is None else _say(str(broken), broken.exit_code)


def _say(text: str, status: int) -> int:
    with suppress(OSError, ValueError):  # the reader is gone; the exit status still reports the error
        _flush()
    from tilegym_db.cli.kit.output import printable_lines

    with suppress(OSError, ValueError):
        print(f"error: {_readable(printable_lines(text))}", file=sys.stderr, flush=True)
    if any(thread.name == QUERY_THREAD for thread in threading.enumerate()):
        os._exit(status)  # as after an interrupt
    return status


def _readable(text: str) -> str:
    """Shorten words that would fill the screen, such as a repeated argument, in their middle."""
    return re.sub(rf"\S{{{MAX_WORD + 1},}}", lambda word: f"{word[0][:200]}...{word[0][-60:]}", text)


def _spelled_os_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO):
        return f"cannot write the output: {reason}."
    return f"{error.filename}: {reason}." if error.filename is not None else f"{reason}."


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_output() -> None:
    """Discard buffered output, so that the interpreter does not fail on it at exit."""
    with suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)


def _open_closed_streams() -> None:
    """Open the null device for descriptors that the caller closed (``>&-``).

    Otherwise the next opened file, such as the database, would get that number. Standard output is opened for reading, so
    that writing to it fails.
    """
    for number in STANDARD_STREAMS:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR if number == 2 else os.O_RDONLY)  # the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - as the interpreter would
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as the interpreter would
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as the interpreter would


def _make_output_total() -> None:
    """Escape characters that the terminal's encoding lacks, so that every string can be printed."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()

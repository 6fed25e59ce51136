"""Run a command, print every known error as one paragraph on stderr, and return the exit status.

An unknown error is a bug of this package and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

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

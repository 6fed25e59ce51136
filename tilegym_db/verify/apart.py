"""Runs a function in a process of its own with a time limit: what a reference does there ends nothing but that process.

A server process imports PyTorch once and forks one child per call. A child is ended with everything that it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from tilegym_db.errors import RecordError, SolutionError

__all__ = ["START_TIMEOUT_S", "run_apart"]

START_TIMEOUT_S = 180.0
"""Imports of a cold file system on a busy machine; no code of a record runs before they are done."""
MAX_ANSWER_BYTES = 1 << 24
MAX_PRINTED_BYTES = 1 << 16
"""Of what a call prints, so much is passed on: one that prints without end fills nobody's terminal or disk."""
_PR_SET_PDEATHSIG = 1


def run_apart(function: Callable[..., Any], arguments: tuple[Any, ...], what: str, limit_s: float) -> Any:
    """What ``function(*arguments)`` returns, which is plain JSON, from a child process.

    Args:
        function: at the top level of a module.
        arguments: what can be pickled.
        what: names the code that runs there, for the message: ``rms_norm: the reference``.
        limit_s: seconds, counted from when the child is ready.

    Raises:
        RecordError: the function raised one, it did not finish in time, or the process ended without an answer.
        SolutionError: no process could be started.
    """
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(target=_answer, args=(sender, function, arguments, what), daemon=True)
    try:
        process.start()
        sender.close()
        _receive(receiver, process, START_TIMEOUT_S, what)
        kind, value = _receive(receiver, process, limit_s, what)
    except OSError as error:
        raise SolutionError(
            f"{what}: cannot start a process for it: {error.strerror or error}.", code="process_not_started"
        ) from None
    finally:
        _end(process)
        receiver.close()
    if kind == "returned":
        return value
    raise RecordError(value["message"], code=value["code"])


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tilegym_db.verify.admission"])
    return context


def _receive(receiver: Connection, process: BaseProcess, limit_s: float, what: str) -> tuple[str, Any]:
    begun = time.monotonic()
    if not receiver.poll(limit_s):
        raise RecordError(f"{what} did not finish within {limit_s:g} s and was ended.", code="time_limit_exceeded")
    try:
        kind, value = json.loads(receiver.recv_bytes(MAX_ANSWER_BYTES))
    except (EOFError, ConnectionError):
        process.join(5)
        code = process.exitcode
        how = f"with exit status {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
        seconds = time.monotonic() - begun
        raise RecordError(
            f"{what} ended its process {how} after {seconds:.1f} s instead of returning.", code="process_ended"
        ) from None
    except ValueError:
        raise RecordError(f"{what} wrote to the channel that its result goes through.", code="channel_broken") from None
    return str(kind), value


def _end(process: BaseProcess) -> None:
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its own group: whatever it started goes along
    with contextlib.suppress(OSError):
        process.kill()
    process.join(10)


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], what: str) -> None:
    """The child: its own group, no outliving its server, and the beginning of what it prints goes to stderr."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _send(sender, "ready", None)
    with _printing_little():
        try:
            answer = "returned", function(*arguments)
        except RecordError as error:
            answer = "refused", _fault(error)
        except BaseException as error:  # the boundary of the process: SystemExit is an answer too
            raised = RecordError(f"{what} raises {type(error).__name__}: {error}", code="call_raises")
            answer = "refused", _fault(raised)
    _send(sender, *answer)


def _fault(error: RecordError) -> dict[str, str]:
    return {"message": str(error), "code": error.code}


@contextlib.contextmanager
def _printing_little() -> Iterator[None]:
    """What is printed goes through a pipe to stderr, until it is too much."""
    stderr = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    passing_on = threading.Thread(target=_pass_on, args=(reader, stderr), daemon=True)
    passing_on.start()
    yield
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)  # nobody writes to the pipe any more, which ends the thread
    passing_on.join(1)


def _pass_on(reader: int, stderr: int) -> None:
    left = MAX_PRINTED_BYTES
    while chunk := os.read(reader, MAX_PRINTED_BYTES):
        with contextlib.suppress(OSError):  # a full disk or a closed terminal: the call goes on
            os.write(stderr, chunk[:left])
        if left and len(chunk) >= left:
            with contextlib.suppress(OSError):
                os.write(stderr, b"\n(what it prints further is left out)\n")
        left = max(left - len(chunk), 0)


def _send(sender: Connection, kind: str, value: Any) -> None:
    sender.send_bytes(json.dumps([kind, value]).encode())

"""The harness's end of a supervisor: it asks the fork server for one, sends orders, and reads the report."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tilegym_db.paths import scratch_folder
from tilegym_db.sandbox.fork_server import MAX_PACKET

START_TIMEOUT_S = 180.0
LAST_WORDS_BYTES = 4000


class ForkServerLost(Exception):
    """The process that forks supervisors ended or does not answer."""


class SupervisorProcess:
    """One supervisor, which is no child of this process. ``pid`` is its process id, ``fork_server`` that of its parent."""

    def __init__(self, pid: int, fork_server: int, handle: int, orders: int, report: int) -> None:
        """Take over the descriptors: of the process, the writing end of its input, the reading end of its output."""
        self.pid = pid
        self.fork_server = fork_server
        self._handle, self._orders, self._report = handle, orders, report
        self._printed = b""

    def tell(self, line: bytes) -> None:
        """Write to its standard input; do nothing if the supervisor has ended."""
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._orders, line) :]

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return True if the process has ended; wait up to ``timeout_s`` seconds for it."""
        if self._handle < 0:
            return True
        return bool(select.select([self._handle], [], [], timeout_s)[0])

    def finish(self, timeout_s: float) -> bytes | None:
        """Order the supervisor to end the worker; return its whole output, or None after ``timeout_s``."""
        self.tell(b"end\n")
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select([self._report], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self._report, 1 << 16)
            if not piece:
                return self._printed if self.has_ended(max(0.0, deadline - time.monotonic())) else None
            self._printed += piece

    def kill(self) -> bytes:
        """Kill a supervisor that does not finish; return what it printed."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        return self._printed

    def close(self) -> None:
        """Close the descriptors; safe to call twice."""
        for descriptor in (self._handle, self._orders, self._report):
            if descriptor >= 0:
                os.close(descriptor)
        self._handle = self._orders = self._report = -1


class _ForkServer:
    """One fork server process, of one environment."""

    def __init__(self, environment: Mapping[str, str], compile_cache: Path | None) -> None:
        self._lock = threading.Lock()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the fork server
        self._folders = contextlib.ExitStack()
        started_with = (
            [compile_cache, self._folders.enter_context(scratch_folder())] if compile_cache is not None else []
        )
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tilegym_db.sandbox.fork_server", *map(str, started_with)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",
                env=dict(environment),
                start_new_session=True,
            )

    def fork(self, environment: Mapping[str, str], folder: Path, channel: int) -> SupervisorProcess:
        """Return a new supervisor. The call waits until the fork server has its imports.

        Raises:
            ForkServerLost: it ended, or did not answer in time.
        """
        packet = json.dumps({"environment": environment, "folder": str(folder)}).encode()
        if len(packet) > MAX_PACKET:
            raise ForkServerLost(
                f"an environment of {len(packet)} bytes is more than the {MAX_PACKET} that can be passed on"
            )
        theirs_in, orders = os.pipe()
        report, theirs_out = os.pipe()
        forked = False
        try:
            with self._lock:
                self._socket.settimeout(START_TIMEOUT_S)
                socket.send_fds(self._socket, [packet], [theirs_in, theirs_out, channel])
                answer, handles, _, _ = socket.recv_fds(self._socket, 64, 1)
            if not answer:
                raise ForkServerLost(f"it ended with status {self._process.wait()}")
            forked = True
        except (OSError, ForkServerLost) as error:
            raise ForkServerLost(f"the process that starts workers is lost: {error}{self._last_words()}") from None
        finally:
            for descriptor in (theirs_in, theirs_out, *(() if forked else (orders, report))):
                os.close(descriptor)
            if not forked:
                self.close()  # also where the user interrupted: the answer still to come must not be taken for another
        os.set_inheritable(handles[0], False)
        return SupervisorProcess(int(answer), self._process.pid, handles[0], orders, report)

    def _last_words(self) -> str:
        said = os.pread(self._said.fileno(), LAST_WORDS_BYTES, 0).decode(errors="replace").strip()
        return f", saying:\n{said}" if said else ""

    @property
    def is_closed(self) -> bool:
        """True if the server does not fork any more."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """End it; supervisors that stem from it end as well. Safe to call twice."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._folders.close()


_fork_servers: dict[tuple[int, frozenset[tuple[str, str]], Path | None], _ForkServer] = {}
"""By the process that started them, the environment that their supervisors have in common, and their compile cache."""
_lock = threading.Lock()


@atexit.register
def _close_fork_servers() -> None:
    """End the servers before Python exits, which would warn about their sockets and processes."""
    for (process, *_), fork_server in _fork_servers.items():
        if process == os.getpid():  # a fork of this process ends as well, and they are not its own
            fork_server.close()


def start_fork_server(common: Mapping[str, str]) -> None:
    """Begin to start the fork server of supervisors with this environment in common, so that the first need not wait."""
    _fork_server(common)


def _fork_server(common: Mapping[str, str], compile_cache: Path | None = None) -> _ForkServer:
    key = os.getpid(), frozenset(common.items()), compile_cache
    with _lock:
        if key not in _fork_servers or _fork_servers[key].is_closed:
            _fork_servers[key] = _ForkServer(common, compile_cache)
        return _fork_servers[key]


def start_supervisor(
    environment: Mapping[str, str],
    common: Mapping[str, str],
    folder: Path,
    channel: int,
    compile_cache: Path | None = None,
) -> SupervisorProcess:
    """Fork a supervisor, from a fork server that is started with the first one.

    Args:
        environment: of the supervisor and its worker, whole.
        common: the part of it that libraries read when they are imported; a fork server serves those that have it in common.
        folder: where the supervisor runs.
        channel: descriptor of the worker's socket, which the supervisor finds as :data:`SUPERVISOR_CHANNEL`.
        compile_cache: for workers that use torch.compile, the folder of :mod:`tilegym_db.backends.compile_cache`.

    Raises:
        ForkServerLost: the fork server ended, or does not answer, twice.
    """
    for begin, last in ((compile_cache, False), (None, True)):  # a compile cache is worth some time, not a worker
        try:
            return _fork_server(common, begin).fork(environment, folder, channel)
        except ForkServerLost:
            if last:
                raise
    raise AssertionError("the second attempt either returns or raises")

"""The supervisor's end of a keeper: have the nursery fork one, tell it to end, read its report."""

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

from tilegym_db.scratch import scratch_folder
from tilegym_db.verify.sandbox.nursery import KEEPER_CHANNEL, MAX_PACKET

__all__ = ["KEEPER_CHANNEL", "KeeperProcess", "NurseryLost", "start_keeper", "start_nursery"]

START_TIMEOUT_S = 180.0
LAST_WORDS_BYTES = 4000


class NurseryLost(Exception):
    """The process that forks keepers ended or does not answer."""


class KeeperProcess:
    """One keeper, which is no child of this process. ``pid`` is its process id, ``nursery`` that of its parent."""

    def __init__(self, pid: int, nursery: int, handle: int, orders: int, report: int) -> None:
        """Take over the descriptors: of the process, the writing end of its input, the reading end of its output."""
        self.pid = pid
        self.nursery = nursery
        self._handle, self._orders, self._report = handle, orders, report
        self._printed = b""

    def tell(self, line: bytes) -> None:
        """Write to its standard input; a keeper that is gone is not told."""
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._orders, line) :]

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it has, waiting for it so many seconds."""
        if self._handle < 0:
            return True
        return bool(select.select([self._handle], [], [], timeout_s)[0])

    def finish(self, timeout_s: float) -> bytes | None:
        """Tell it to end the worker; everything that it printed, or None where it is not done within ``timeout_s``."""
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
        """SIGKILL, for a keeper that does not finish; what it had printed."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        return self._printed

    def close(self) -> None:
        """Close the descriptors; safe to call twice."""
        for descriptor in (self._handle, self._orders, self._report):
            if descriptor >= 0:
                os.close(descriptor)
        self._handle = self._orders = self._report = -1


class _Nursery:
    """One nursery process, of one environment."""

    def __init__(self, environment: Mapping[str, str], head_start: Path | None) -> None:
        self._lock = threading.Lock()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the nursery
        self._folders = contextlib.ExitStack()
        started_with = [head_start, self._folders.enter_context(scratch_folder())] if head_start is not None else []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tilegym_db.verify.sandbox.nursery", *map(str, started_with)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",
                env=dict(environment),
                start_new_session=True,
            )

    def fork(self, environment: Mapping[str, str], folder: Path, channel: int) -> KeeperProcess:
        """A new keeper. The call waits until the nursery has its imports.

        Raises:
            NurseryLost: it ended, or did not answer in time.
        """
        packet = json.dumps({"environment": environment, "folder": str(folder)}).encode()
        if len(packet) > MAX_PACKET:
            raise NurseryLost(
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
                raise NurseryLost(f"it ended with status {self._process.wait()}")
            forked = True
        except (OSError, NurseryLost) as error:
            raise NurseryLost(f"the process that starts workers is lost: {error}{self._last_words()}") from None
        finally:
            for descriptor in (theirs_in, theirs_out, *(() if forked else (orders, report))):
                os.close(descriptor)
            if not forked:
                self.close()  # also where the user interrupted: the answer still to come must not be taken for another
        os.set_inheritable(handles[0], False)
        return KeeperProcess(int(answer), self._process.pid, handles[0], orders, report)

    def _last_words(self) -> str:
        said = os.pread(self._said.fileno(), LAST_WORDS_BYTES, 0).decode(errors="replace").strip()
        return f", saying:\n{said}" if said else ""

    @property
    def is_closed(self) -> bool:
        """Whether it forks no more."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """End it; keepers that stem from it end as well. Safe to call twice."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._folders.close()


_nurseries: dict[tuple[int, frozenset[tuple[str, str]], Path | None], _Nursery] = {}
"""By the process that started them, the environment that their keepers have in common, and their head start."""
_lock = threading.Lock()


@atexit.register
def _close_nurseries() -> None:
    """They would end by themselves; this leaves no socket and no child behind that Python could complain of."""
    for (process, *_), nursery in _nurseries.items():
        if process == os.getpid():  # a fork of this process ends as well, and they are not its own
            nursery.close()


def start_nursery(common: Mapping[str, str]) -> None:
    """Begin to start the nursery that keepers with this environment in common come from, so that the first need not wait."""
    _nursery(common)


def _nursery(common: Mapping[str, str], head_start: Path | None = None) -> _Nursery:
    key = os.getpid(), frozenset(common.items()), head_start
    with _lock:
        if key not in _nurseries or _nurseries[key].is_closed:
            _nurseries[key] = _Nursery(common, head_start)
        return _nurseries[key]


def start_keeper(
    environment: Mapping[str, str],
    common: Mapping[str, str],
    folder: Path,
    channel: int,
    head_start: Path | None = None,
) -> KeeperProcess:
    """Fork a keeper, from a nursery that is started with the first one.

    Args:
        environment: of the keeper and its worker, whole.
        common: the part of it that libraries read when they are imported; a nursery serves those that have it in common.
        folder: where the keeper runs.
        channel: descriptor of the worker's socket, which the keeper finds as :data:`KEEPER_CHANNEL`.
        head_start: for workers that use torch.compile, the folder of :mod:`tilegym_db.backends.inductor`.

    Raises:
        NurseryLost: the nursery ended, or does not answer, twice.
    """
    for begin, last in ((head_start, False), (None, True)):  # a head start is worth some time, not a worker
        try:
            return _nursery(common, begin).fork(environment, folder, channel)
        except NurseryLost:
            if last:
                raise
    raise AssertionError("the second attempt either returns or raises")

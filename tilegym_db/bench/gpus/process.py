"""The other end of a supervisor: start the process, send it an order, receive its messages, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from tilegym_db.bench.gpus.devices import MeasuringDevice
from tilegym_db.bench.gpus.messages import Order
from tilegym_db.bench.gpus.work import WorkItem
from tilegym_db.confinement.bounds import HOST_SHARE

__all__ = ["DeviceProcess", "DeviceSupervisor", "SupervisorLost"]

TAIL_BYTES = 2000


class SupervisorLost(Exception):
    """The supervisor of a device is gone; the message says how."""


class DeviceSupervisor(Protocol):
    """What a pool asks of the other end of a supervisor, wherever that runs; :class:`DeviceProcess` says what each is."""

    device: MeasuringDevice
    item: WorkItem | None
    done: set[str]
    last_message_at: float
    connection: Connection

    @property
    def is_ready(self) -> bool:
        """Whether it takes an order now."""

    def send(self, order: Order) -> None:
        """Give it its next order."""

    def receive(self) -> Any:
        """Its next message; called where ``connection`` has one."""

    def leave(self) -> None:
        """Let it end; does not wait for that."""

    def end(self, timeout_s: float = 2.0) -> str:
        """Wait for its end, or bring it about."""


class DeviceProcess:
    """The supervisor of one device. Starts at once, so that it is ready when there is a plan."""

    def __init__(self, device: MeasuringDevice, gpu: str, processors: Sequence[int], share: int) -> None:
        """Start it for a GPU slug, on these processors, as one of ``share`` supervisors on this host."""
        self.device = device
        self.item: WorkItem | None = None
        self.done: set[str] = set()
        """Workloads of the item that are concluded."""
        self.last_message_at = time.monotonic()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        ours, theirs = socket.socketpair()
        package_root = str(Path(__file__).resolve().parents[3])
        python_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tilegym_db.bench.gpus.supervisor", ",".join(map(str, processors)), gpu],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env={**os.environ, "PYTHONPATH": python_path, HOST_SHARE: str(share), **device.environment},
                start_new_session=True,  # Ctrl-C is for us, who let what is finished be kept
            )
            self.connection = Connection(os.dup(ours.fileno()))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """From the start: an order waits in its socket until it has its device."""
        return True

    def leave(self) -> None:
        """Let it end, which it does when its socket is closed."""
        self.connection.close()

    def send(self, order: Order) -> None:
        """Give it its next order.

        Raises:
            SupervisorLost: it is gone.
        """
        self.item, self.done = order.item, set()
        self.last_message_at = time.monotonic()
        try:
            self.connection.send(order)
        except OSError:
            raise SupervisorLost(self.end()) from None

    def receive(self) -> Any:
        """Its next message.

        Raises:
            SupervisorLost: it is gone.
        """
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise SupervisorLost(self.end()) from None
        self.last_message_at = time.monotonic()
        return message

    def end(self, timeout_s: float = 2.0) -> str:
        """Wait for its end, or bring it about; returns how it ended. Safe to call twice."""
        with contextlib.suppress(OSError):
            self.connection.close()
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"its supervisor ended ({how}){self._last_line()}"

    def _last_line(self) -> str:
        if self._said.closed:
            return ""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - TAIL_BYTES))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        self._said.close()
        return f": {lines[-1]}" if lines else ""

"""Distribution of work to the supervisors of several devices. If one dies, another does its work.

Measurements are kept only after their workload is concluded. So the work in flight of a dead supervisor is repeated as a
whole, and each trace exists once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tilegym_db.errors import HardwareError
from tilegym_db.measurement.devices.messages import (
    Done,
    Failed,
    JobMessage,
    Order,
    Peaks,
    ProgressMessage,
    Ready,
    Session,
    TraceMessage,
    WorkItem,
    WorkloadDone,
    WorkQueue,
    divide,
)
from tilegym_db.measurement.machine import MeasuringDevice, Site
from tilegym_db.measurement.plan import DefinitionPlan
from tilegym_db.records import Trace
from tilegym_db.sandbox.processes import HOST_SHARE
from tilegym_db.verification.phases import AT_WORK, IDLE, START, Spent, added, merged

MAX_RESTARTS = 2
"""Maximum number of restarts of a dead supervisor per device."""
SILENCE_S = 1800.0
"""A supervisor without messages for this long hangs, for example because its GPU fell off the bus. The value is longer than
any one workload.
"""
STOP_TIMEOUT_S = 15.0

JOINED = "has joined, and starts"

Arrivals = Callable[[], tuple[list[MeasuringDevice], list[str]]]
"""Function that returns new devices since the last call, and remarks on unusable ones."""


def no_arrivals() -> tuple[list[MeasuringDevice], list[str]]:
    """Return no new devices: the GPUs of a host do not change."""
    return [], []


@dataclass
class Callbacks:
    """Callbacks of a pool. ``traced`` gets the traces of concluded workloads; with ``immediate``, each trace as it arrives."""

    traced: Callable[[Trace], None]
    starting: Callable[[str, str], None] = lambda device, what: None
    concluded: Callable[[WorkloadDone], None] = lambda message: None
    peaks: Callable[[Peaks], None] = lambda message: None
    job_message: Callable[[Any], None] = lambda content: None
    extra: Callable[[WorkItem], Any] = lambda item: None
    immediate: bool = False


@dataclass
class PoolReport:
    """Number of traces per device, work that was lost and repeated, and work that was given up, with reasons.

    ``seconds`` is the time of each device by the phases of :mod:`tilegym_db.verification.phases`.
    """

    traces: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    spent: dict[str, tuple[Spent, ...]] = field(default_factory=dict)
    """The time of each device for single Solutions and Definitions."""
    notes: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    interrupted: bool = False


class DevicePool:
    """Supervisors of some devices, which run during the ``with`` block."""

    def __init__(
        self,
        devices: Sequence[MeasuringDevice],
        start: Callable[[MeasuringDevice], DeviceSupervisor],
        arrivals: Arrivals = no_arrivals,
        min_pieces: int = 0,
    ) -> None:
        """Create the pool; entering the ``with`` block starts it.

        Args:
            devices: all of one kind.
            start: starts the supervisor of a device, at the beginning and after a loss.
            arrivals: polled for further devices.
            min_pieces: minimum number of work items of a plan, for devices that may come later.
        """
        self.devices = list(devices)
        self.processes: dict[str, DeviceSupervisor] = {}
        self.site: Site | None = None  # set if the devices are on other hosts: their description for planning
        self._start_on = start
        self._arrivals = arrivals
        self._min_pieces = min_pieces
        self._restarts: Counter[str] = Counter()
        self._held: dict[str, dict[str, list[Trace]]] = {}
        self._gone: list[str] = []

    def __enter__(self) -> Self:
        for device in self.devices:
            self._start(device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, device: MeasuringDevice) -> None:
        self.processes[device.label] = self._start_on(device)
        self._held[device.label] = {}

    def stop(self) -> None:
        """End every supervisor and its workers; work in flight is lost."""
        for process in self.processes.values():
            process.leave()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self.processes.values():
            process.end(max(0.1, deadline - time.monotonic()))
        self.processes.clear()

    def divided(self, plans: Sequence[DefinitionPlan]) -> list[WorkItem]:
        """Return plans as work items for these devices."""
        return divide(plans, max(len(self.devices), self._min_pieces))

    def run(self, session: Session, items: Sequence[WorkItem], callbacks: Callbacks) -> PoolReport:
        """Run all items. This also returns after Ctrl-C, or if some work could not be done.

        Raises:
            HardwareError: no device could do any work; the message has the reason for each.
        """
        report, work = PoolReport(), WorkQueue.of(items)
        report.seconds = {device.label: {} for device in self.devices}
        began = time.monotonic()
        try:
            self._run(session, work, callbacks, report)
        except KeyboardInterrupt:
            report.interrupted = True
            self.stop()
        for seconds in report.seconds.values():
            seconds[IDLE] = max(0.0, time.monotonic() - began - seconds.get(AT_WORK, 0.0))
        report.notes[:0] = self._gone
        for item in work.given_up:
            report.unfinished.append(f"{item.label} was given up: {'; '.join(item.losses)}")
        if work.waiting and not report.interrupted:
            if not report.traces:
                raise HardwareError(f"no device is left to measure on. {' '.join(self._gone)}", code="devices_lost")
            left = ", ".join(item.label for item in work.waiting)
            report.unfinished.append(f"{left}: no device is left to measure on")
        return report

    def _run(self, session: Session, work: WorkQueue, callbacks: Callbacks, report: PoolReport) -> None:
        while work.waiting or any(process.item for process in self.processes.values()):
            for process in list(self.processes.values()):
                item = work.take() if process.is_ready and not process.item else None
                if item is not None:
                    try:
                        process.send(Order(session, item, callbacks.extra(item)))
                    except SupervisorLost as lost:
                        self._lose(process, str(lost), work, callbacks, report)
            self._welcome(callbacks, report)
            if not self.processes:
                return
            connections = {process.connection: process for process in self.processes.values()}
            for connection in wait(list(connections), timeout=1.0):
                process = connections[connection]  # type: ignore[index]
                try:
                    self._handle(process, process.receive(), work, callbacks, report)
                except SupervisorLost as lost:
                    self._lose(process, str(lost), work, callbacks, report)
            self._end_silent(work, callbacks, report)

    def _welcome(self, callbacks: Callbacks, report: PoolReport) -> None:
        devices, remarks = self._arrivals()
        self._gone += remarks
        for device in devices:
            self.devices.append(device)
            report.seconds[device.label] = {}
            self._start(device)
            callbacks.starting(device.label, JOINED)

    def _handle(
        self, process: DeviceSupervisor, message: Any, work: WorkQueue, callbacks: Callbacks, report: PoolReport
    ) -> None:
        label = process.device.label
        match message:
            case ProgressMessage(what):
                callbacks.starting(label, what)
            case TraceMessage(trace) if callbacks.immediate:
                self._keep([trace], label, callbacks, report)
            case TraceMessage(trace):
                self._held[label].setdefault(trace.workload_uuid, []).append(trace)
            case WorkloadDone(uuid):
                callbacks.concluded(message)
                if not callbacks.immediate:
                    process.done.add(uuid)
                self._keep(self._held[label].pop(uuid, []), label, callbacks, report)
            case Peaks():
                callbacks.peaks(message)
            case JobMessage(content):
                callbacks.job_message(content)
            case Ready(seconds):
                report.seconds[label] = added(report.seconds[label], {START: seconds})
            case Done(seconds, spent):
                report.spent[label] = merged([*report.spent.get(label, ()), *spent])
                report.seconds[label] = added(report.seconds[label], seconds)
                process.item = None
                callbacks.starting(label, "idle")
            case Failed(reason, is_device):
                process.end()
                self._lose(process, reason, work, callbacks, report, for_good=is_device)

    @staticmethod
    def _keep(traces: Sequence[Trace], label: str, callbacks: Callbacks, report: PoolReport) -> None:
        for trace in traces:
            callbacks.traced(trace)
            report.traces[label] += 1

    def _lose(
        self,
        process: DeviceSupervisor,
        reason: str,
        work: WorkQueue,
        callbacks: Callbacks,
        report: PoolReport,
        *,
        for_good: bool = False,
    ) -> None:
        """Return the work of a lost supervisor to the queue, and start another supervisor or give the device up.

        The loss is reported at once, not only at the end.
        """
        device = process.device
        callbacks.starting(device.label, f"lost: {reason}")
        self.processes.pop(device.label, None)
        self._held.pop(device.label, None)
        if process.item is not None:
            work.lose(process.item, process.done, f"{device.label}: {reason}")
        if for_good or self._restarts[device.label] >= MAX_RESTARTS:
            self._gone.append(f"{device.label} is not used anymore: {reason}")
            return
        self._restarts[device.label] += 1
        taken_over = "" if process.item is None else f"; its work in flight is repeated ({process.item.label})"
        report.notes.append(f"{device.label}: {reason}{taken_over}")
        self._start(device)

    def _end_silent(self, work: WorkQueue, callbacks: Callbacks, report: PoolReport) -> None:
        for process in list(self.processes.values()):
            if process.item is not None and time.monotonic() - process.last_message_at > SILENCE_S:
                process.end(0.1)
                reason = f"its supervisor sent no message for {SILENCE_S:.0f} s"
                self._lose(process, reason, work, callbacks, report, for_good=True)


# ---- process --------------------------------------------------------------------------------------
# Connection to a supervisor: start the process, send orders, receive messages, end it.

TAIL_BYTES = 2000


class SupervisorLost(Exception):
    """The supervisor of a device is gone; the message says how."""


class DeviceSupervisor(Protocol):
    """Interface of a supervisor for a pool, on any host; see :class:`DeviceProcess`."""

    device: MeasuringDevice
    item: WorkItem | None
    done: set[str]
    last_message_at: float
    connection: Connection

    @property
    def is_ready(self) -> bool:
        """True if it takes an order now."""

    def send(self, order: Order) -> None:
        """Send the next order to the supervisor."""

    def receive(self) -> Any:
        """Return the next message of the supervisor; called if ``connection`` has one."""

    def leave(self) -> None:
        """Let the supervisor end, without waiting."""

    def end(self, timeout_s: float = 2.0) -> str:
        """Wait for the end of the supervisor, or kill it."""


class DeviceProcess:
    """Supervisor process of one device. It starts at once, so that it is ready when the plan is."""

    def __init__(self, device: MeasuringDevice, gpu: str, processors: Sequence[int], share: int) -> None:
        """Start a supervisor for a GPU slug, on these processors, as one of ``share`` supervisors on this host."""
        self.device = device
        self.item: WorkItem | None = None
        self.done: set[str] = set()
        """Workloads of the item that are concluded."""
        self.last_message_at = time.monotonic()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        ours, theirs = socket.socketpair()
        package_root = str(Path(__file__).resolve().parents[3])
        python_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        with ours, theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "tilegym_db.measurement.devices.supervisor",
                    ",".join(map(str, processors)),
                    gpu,
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env={**os.environ, "PYTHONPATH": python_path, HOST_SHARE: str(share), **device.environment},
                start_new_session=True,  # Ctrl-C only reaches this process, which keeps finished work
            )
            self.connection = Connection(os.dup(ours.fileno()))

    @property
    def pid(self) -> int:
        """The process id of the supervisor."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """True from the start: an order waits in the socket until the supervisor has its device."""
        return True

    def leave(self) -> None:
        """Close the socket of the supervisor, so that it ends."""
        self.connection.close()

    def send(self, order: Order) -> None:
        """Send the next order to the supervisor; raise :class:`SupervisorLost` if it is gone."""
        self.item, self.done = order.item, set()
        self.last_message_at = time.monotonic()
        try:
            self.connection.send(order)
        except OSError:
            raise SupervisorLost(self.end()) from None

    def receive(self) -> Any:
        """Return the next message of the supervisor; raise :class:`SupervisorLost` if it is gone."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise SupervisorLost(self.end()) from None
        self.last_message_at = time.monotonic()
        return message

    def end(self, timeout_s: float = 2.0) -> str:
        """Wait for the end of the supervisor, or kill it; return how it ended. Safe to call twice."""
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
        if self._stderr.closed:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - TAIL_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        self._stderr.close()
        return f": {lines[-1]}" if lines else ""

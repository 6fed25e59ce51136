"""Gives out work to the supervisors of several devices, and goes on where one dies: its work is done by another.

Nothing measured is kept before its workload is concluded, so that what was in flight when a supervisor died is measured again
as a whole, and a trace exists once.
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

from tilegym_db.bench.devices.devices import MeasuringDevice
from tilegym_db.bench.devices.messages import (
    Concluded,
    Done,
    Failed,
    Order,
    Peaks,
    Ready,
    Session,
    Starting,
    Told,
    Traced,
    WorkItem,
    WorkQueue,
    divide,
)
from tilegym_db.bench.machine import Site
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.errors import HardwareError
from tilegym_db.records import Trace
from tilegym_db.sandbox.limits import HOST_SHARE
from tilegym_db.verify.phases import AT_WORK, IDLE, START, added

MAX_RESTARTS = 2
"""So many times a supervisor that died is started again on its device."""
SILENCE_S = 1800.0
"""A supervisor that tells nothing for so long hangs, as it may where its GPU fell off the bus. Longer than any one workload."""
STOP_TIMEOUT_S = 15.0

JOINED = "has joined, and starts"

Arrivals = Callable[[], tuple[list[MeasuringDevice], list[str]]]
"""Devices that have come since it was last asked, and remarks about those that cannot be used."""


def no_arrivals() -> tuple[list[MeasuringDevice], list[str]]:
    """Return those of a host: it has the GPUs that it has."""
    return [], []


@dataclass
class Callbacks:
    """Whom the pool tells what. ``traced`` gets traces of concluded workloads, with ``immediate`` each as it comes."""

    traced: Callable[[Trace], None]
    starting: Callable[[str, str], None] = lambda device, what: None
    concluded: Callable[[Concluded], None] = lambda message: None
    peaks: Callable[[Peaks], None] = lambda message: None
    told: Callable[[Any], None] = lambda content: None
    extra: Callable[[WorkItem], Any] = lambda item: None
    immediate: bool = False


@dataclass
class PoolReport:
    """How many traces each device measured, what was lost and taken over, and what was given up, with reasons.

    ``seconds`` says where the time of each device went, as :mod:`tilegym_db.verify.phases` names it.
    """

    traces: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    interrupted: bool = False


class DevicePool:
    """The supervisors of some devices, from entering the ``with`` block to its end."""

    def __init__(
        self,
        devices: Sequence[MeasuringDevice],
        start: Callable[[MeasuringDevice], DeviceSupervisor],
        arrivals: Arrivals = no_arrivals,
        site: Site | None = None,
        least_pieces: int = 0,
    ) -> None:
        """Not started yet.

        Args:
            devices: all of one kind.
            start: starts the supervisor of one of them, at the beginning and where one was lost.
            arrivals: asked again and again for further devices.
            site: what planning has to know of the devices, where they are not of this host.
            least_pieces: of a plan, for devices that may come later.
        """
        self.devices = list(devices)
        self.processes: dict[str, DeviceSupervisor] = {}
        self.site = site
        self._start_on = start
        self._arrivals = arrivals
        self._least_pieces = least_pieces
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
        """End every supervisor and the workers below it; what is in flight is lost."""
        for process in self.processes.values():
            process.leave()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self.processes.values():
            process.end(max(0.1, deadline - time.monotonic()))
        self.processes.clear()

    def divided(self, plans: Sequence[DefinitionPlan]) -> list[WorkItem]:
        """Plans as pieces for these devices."""
        return divide(plans, max(len(self.devices), self._least_pieces))

    def run(self, session: Session, items: Sequence[WorkItem], callbacks: Callbacks) -> PoolReport:
        """Have everything done. Returns also where Ctrl-C ended it, or where something could not be done.

        Raises:
            HardwareError: not one device could do anything; the message has the reason of each.
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
            case Starting(what):
                callbacks.starting(label, what)
            case Traced(trace) if callbacks.immediate:
                self._keep([trace], label, callbacks, report)
            case Traced(trace):
                self._held[label].setdefault(trace.workload_uuid, []).append(trace)
            case Concluded(uuid):
                callbacks.concluded(message)
                if not callbacks.immediate:
                    process.done.add(uuid)
                self._keep(self._held[label].pop(uuid, []), label, callbacks, report)
            case Peaks():
                callbacks.peaks(message)
            case Told(content):
                callbacks.told(content)
            case Ready(seconds):
                report.seconds[label] = added(report.seconds[label], {START: seconds})
            case Done(seconds):
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
        """Its work goes back, and its device gets another supervisor, or is used no more. Told at once, not only at the end."""
        device = process.device
        callbacks.starting(device.label, f"lost: {reason}")
        self.processes.pop(device.label, None)
        self._held.pop(device.label, None)
        if process.item is not None:
            work.lose(process.item, process.done, f"{device.label}: {reason}")
        if for_good or self._restarts[device.label] >= MAX_RESTARTS:
            self._gone.append(f"{device.label} is used no more: {reason}")
            return
        self._restarts[device.label] += 1
        taken_over = "" if process.item is None else f"; what it had in flight is done again ({process.item.label})"
        report.notes.append(f"{device.label}: {reason}{taken_over}")
        self._start(device)

    def _end_silent(self, work: WorkQueue, callbacks: Callbacks, report: PoolReport) -> None:
        for process in list(self.processes.values()):
            if process.item is not None and time.monotonic() - process.last_message_at > SILENCE_S:
                process.end(0.1)
                reason = f"its supervisor told nothing for {SILENCE_S:.0f} s"
                self._lose(process, reason, work, callbacks, report, for_good=True)


# ---- process --------------------------------------------------------------------------------------
# The other end of a supervisor: start the process, send it an order, receive its messages, end it.

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
        """Return its next message; called where ``connection`` has one."""

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
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "tilegym_db.bench.devices.supervisor",
                    ",".join(map(str, processors)),
                    gpu,
                ],
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
        """Return its next message.

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

"""Supervisor process of one device: the harness of its device. ``python -m`` starts it, with a socket as standard input.

It draws inputs, runs oracle and clock, and has its own fork server and workers. It uses the same executor as a run without
``--gpus``. Its arguments are its processors and the slug of the GPU that it must find. It ends when the socket is closed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tilegym_db.measurement.awards import require_sandbox
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
    WorkloadDone,
)
from tilegym_db.measurement.local_executor import Capacity, LocalExecutor
from tilegym_db.measurement.machine import FIRST_GPU, Machine, leaving_processors, require_healthy, select_machine
from tilegym_db.measurement.run_setup import RunContext, peaks_or_reason
from tilegym_db.measurement.runner import Runner
from tilegym_db.measurement.timing import TimedCandidate
from tilegym_db.measurement.tune.tune import TuneTask, search
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Workload
from tilegym_db.records.hardware import CPU
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.sandbox.processes import available_memory
from tilegym_db.sandbox.worker import WorkerDied, WorkerTimeout, best_level, prepare_workers
from tilegym_db.verification.phases import AT_WORK, PREPARE, PROCESSORS, Phases, processor_seconds

GRACE_S = 20.0
"""Seconds that interrupted code has to end. It may be in a library call that catches the exception."""


def main() -> None:
    """Carry out orders until there are no more."""
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell job ignores SIGINT
    os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
    connection = _take_socket()
    orders = queue.Queue[Any]()
    threading.Thread(target=listen, args=(connection, orders), daemon=True).start()
    try:
        with _sending_failures(connection):
            _serve(connection, orders, began)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the planning process has ended, or ends this one


def _take_socket() -> Connection:
    """Return the socket at a descriptor that compilers started later do not inherit."""
    connection = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return connection


def listen(connection: Connection, orders: queue.Queue[Any]) -> None:
    """Pass orders on; after the last one, end the main thread.

    Use a signal only if it is at work, not waiting for an order.

    On hosts with H200s, a signal did not wake a waiting process, which was then killed after 15 s.
    """
    try:
        while True:
            orders.put(connection.recv())
    except (EOFError, OSError):
        is_at_work = orders.unfinished_tasks > 0
    orders.put(None)
    if is_at_work:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_S)
    os._exit(1)  # free the device, since no more orders come; the workers end with this process


def _serve(connection: Connection, orders: queue.Queue[Any], began: float) -> None:
    gpu = sys.argv[2]
    device = CPU if gpu == CPU else FIRST_GPU
    prepare_workers(device)
    jobs = DeviceJobs.open(gpu, connection.send)
    threading.Thread(target=_find_sandbox, args=(device,), daemon=True).start()
    connection.send(Ready(time.monotonic() - began, jobs.machine))
    while (order := orders.get()) is not None:
        jobs.carry_out(order)
        orders.task_done()


def _find_sandbox(device: str) -> None:
    """Determine the sandbox level of workers early, while there is no order yet: this starts a worker or two."""
    with contextlib.suppress(WorkerDied, WorkerTimeout):  # the next use of a worker reports it
        best_level(device)


@contextlib.contextmanager
def _sending_failures(connection: Connection) -> Iterator[None]:
    """Send every failure that ends this process, with its reason. This is the process boundary."""
    from tilegym_db.errors import HardwareError

    try:
        yield
    except HardwareError as error:
        _send_failure(connection, str(error), is_device=True)
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()
        _send_failure(connection, f"{type(error).__name__}: {error}", is_device=False)


def _send_failure(connection: Connection, reason: str, *, is_device: bool) -> None:
    connection.send(Failed(reason, is_device))


# ---- jobs -----------------------------------------------------------------------------------------
# Execution of an order: one function per job, over the executor that a run without ``--gpus`` uses.


@dataclass
class DeviceJobs:
    """Jobs on one device. Results are passed to ``send``."""

    machine: Machine
    send: Callable[[Any], None]
    peaks: GpuPeaks | None = None
    phases: Phases = field(default_factory=Phases)
    _confined: bool = False
    _rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @classmethod
    def open(cls, gpu: str, send: Callable[[Any], None]) -> DeviceJobs:
        """Return the jobs of the only device that this process sees."""
        machine = select_machine(gpu)
        prepare_workers(machine.device)
        require_healthy(machine)
        return cls(machine, send)

    def carry_out(self, order: Order) -> None:
        """Carry out an order; pass on all results, and finally a Done message."""
        session, processors_before = order.session, processor_seconds()
        with self.phases(AT_WORK):
            with self.phases(PREPARE):
                if session.confined and not self._confined:
                    require_sandbox(self.machine)
                    self._confined = True
                self._find_peaks(session)
            with scratch_folder() as folder, leaving_processors(self.machine):
                JOBS[session.job](self, order, folder)
        self.phases.add(PROCESSORS, processor_seconds() - processors_before)
        self.send(Done(self.phases.take(), self.phases.take_spent()))

    def _find_peaks(self, session: Session) -> None:
        if self.peaks is None:
            self.peaks = session.peaks
        if self.peaks is None and session.calibrate and self.machine.is_gpu:
            self.send(ProgressMessage("calibrating"))
            self.peaks, notes = peaks_or_reason(self.machine, None, session.home)
            self.send(Peaks(self.peaks, tuple(notes)))

    def measure(self, order: Order, folder: Path) -> None:
        """Run the plans of an order; the traces of a workload are complete when it is concluded."""
        executor = self._executor(order, folder)
        executor.after_timing = self._keep_rounds if order.session.keeps_rounds else executor.after_timing
        executor.concluded = self._conclude
        executor.run(order.item.plans)

    def tune(self, order: Order, folder: Path) -> None:
        """Run the searches of an order; ``extra`` is its :class:`TuneTask`."""
        task: TuneTask = order.extra
        executor = self._executor(order, folder)
        executor.context.attempts.update(task.attempts)
        search(task, executor, lambda content: self.send(JobMessage(content)))

    def _executor(self, order: Order, folder: Path) -> LocalExecutor:
        session = order.session
        context = RunContext(session.run_id, self.machine, session.seed, command=session.command, phases=self.phases)
        return LocalExecutor(
            context,
            folder,
            session.budget,
            session.policy,
            emit=lambda trace: self.send(TraceMessage(trace)),
            starting=lambda what: self.send(ProgressMessage(what)),
            peaks=self.peaks if session.calibrate else None,
            capacity=Capacity.of(self.machine, available_memory()),
        )

    def _keep_rounds(self, workload: Workload, candidates: Sequence[TimedCandidate[Runner]]) -> None:
        self._rounds[workload.uuid] = {
            candidate.runner.name: candidate.rounds for candidate in candidates if candidate.failure is None
        }

    def _conclude(self, workload: Workload) -> None:
        self.send(WorkloadDone(workload.uuid, self._rounds.pop(workload.uuid, {})))


JOBS: dict[str, Callable[[DeviceJobs, Order, Path], None]] = {"measure": DeviceJobs.measure, "tune": DeviceJobs.tune}


if __name__ == "__main__":
    main()

"""The supervisor of one device, a process of its own: ``python -m`` starts it, with a socket as standard input.

It is the harness of its device: it draws inputs, keeps oracle and clock, and has its own fork server and workers, through the
executor that a run without ``--gpus`` uses. Its arguments are the processors that it may use and the slug of the GPU that it must
find. It ends when the socket does. What imports PyTorch is imported in functions, after the fork server was started.
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

from tilegym_db.bench.calibrate import peaks_or_reason
from tilegym_db.bench.devices.messages import Concluded, Done, Order, Peaks, Session, Starting, Told, Traced
from tilegym_db.bench.local_executor import Capacity, LocalExecutor
from tilegym_db.bench.machine import Machine, leaving_processors, require_healthy, select_machine
from tilegym_db.bench.promotions import require_sandbox
from tilegym_db.bench.run_setup import RunContext
from tilegym_db.bench.runner import Runner
from tilegym_db.bench.timing import TimedCandidate
from tilegym_db.bench.tune.tuner import TuneTask, search
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Workload
from tilegym_db.records.hardware import CPU
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.sandbox.limits import available_memory
from tilegym_db.sandbox.worker import prepare_workers
from tilegym_db.verify.phases import AT_WORK, PREPARE, PROCESSORS, Phases, processor_seconds

GRACE_S = 20.0
"""Code that is interrupted has so long to end. It may be in the middle of a call of a library that catches what is raised."""


def main() -> None:
    """Carry out orders until there are no more."""
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs us in its background ignores it
    os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
    connection = _take_socket()
    orders = queue.Queue[Any]()
    threading.Thread(target=listen, args=(connection, orders), daemon=True).start()
    try:
        with _telling_failures(connection):
            _serve(connection, orders, began)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # whoever gave the orders has ended, or wants us to


def _take_socket() -> Connection:
    """Return the socket at a descriptor that no compiler which is started later inherits."""
    connection = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return connection


def listen(connection: Connection, orders: queue.Queue[Any]) -> None:
    """Pass orders on; at the end of all, end the main thread, by a signal only where it does not wait for an order.

    On hosts of H200s a waiting one was not woken by a signal to its process, and was killed after 15 s.
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
    os._exit(1)  # its device must not stay taken by a process that nobody gives orders; its workers end with it


def _serve(connection: Connection, orders: queue.Queue[Any], began: float) -> None:
    from tilegym_db.sandbox.worker import prepare_workers

    gpu = sys.argv[2]
    device = CPU if gpu == CPU else "cuda:0"
    prepare_workers(device)  # the fork server imports PyTorch while this process does
    from tilegym_db.bench.devices.messages import Ready

    jobs = DeviceJobs.open(gpu, connection.send)
    threading.Thread(target=_find_sandbox, args=(device,), daemon=True).start()
    connection.send(Ready(time.monotonic() - began, jobs.machine))
    while (order := orders.get()) is not None:
        jobs.carry_out(order)
        orders.task_done()


def _find_sandbox(device: str) -> None:
    """Find out how workers can be confined, which takes the start of a worker or two, while there is no order yet."""
    from tilegym_db.sandbox.worker import WorkerDied, WorkerTimeout, best_level

    with contextlib.suppress(WorkerDied, WorkerTimeout):  # whoever needs a worker meets it again, and says so
        best_level(device)


@contextlib.contextmanager
def _telling_failures(connection: Connection) -> Iterator[None]:
    """The boundary of this process: whatever ends it is told, with the reason."""
    from tilegym_db.errors import HardwareError

    try:
        yield
    except HardwareError as error:
        _tell_failure(connection, str(error), is_device=True)
    except BrokenPipeError:
        raise
    except Exception as error:
        traceback.print_exc()
        _tell_failure(connection, f"{type(error).__name__}: {error}", is_device=False)


def _tell_failure(connection: Connection, reason: str, *, is_device: bool) -> None:
    from tilegym_db.bench.devices.messages import Failed

    connection.send(Failed(reason, is_device))


# ---- jobs -----------------------------------------------------------------------------------------
# What a supervisor does with an order: one function a job, each over the executor that runs without ``--gpus`` use.


@dataclass
class DeviceJobs:
    """One device, and whom to tell what comes of the orders for it."""

    machine: Machine
    tell: Callable[[Any], None]
    peaks: GpuPeaks | None = None
    phases: Phases = field(default_factory=Phases)
    _confined: bool = False
    _rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @classmethod
    def open(cls, gpu: str, tell: Callable[[Any], None]) -> DeviceJobs:
        """Return the only device that this process sees.

        Raises:
            HardwareError: it is not of the kind that the plan is for, or does not work.
        """
        machine = select_machine(gpu)
        prepare_workers(machine.device)
        require_healthy(machine)
        return cls(machine, tell)

    def carry_out(self, order: Order) -> None:
        """Everything that comes of it is told, and at last that it is done.

        Raises:
            HardwareError: the device stopped working, or this host cannot confine workers.
        """
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
        self.tell(Done(self.phases.take()))

    def _find_peaks(self, session: Session) -> None:
        if self.peaks is None:
            self.peaks = session.peaks
        if self.peaks is None and session.calibrate and self.machine.is_gpu:
            self.tell(Starting("calibrating"))
            self.peaks, notes = peaks_or_reason(self.machine, None, session.home)
            self.tell(Peaks(self.peaks, tuple(notes)))

    def measure(self, order: Order, folder: Path) -> None:
        """The plans of an order, a workload's traces together when it is concluded."""
        executor = self._executor(order, folder)
        executor.after_timing = self._keep_rounds if order.session.keeps_rounds else executor.after_timing
        executor.concluded = self._conclude
        executor.run(order.item.plans)

    def tune(self, order: Order, folder: Path) -> None:
        """The searches of an order; ``extra`` is its :class:`TuneTask`."""
        task: TuneTask = order.extra
        executor = self._executor(order, folder)
        executor.context.attempts.update(task.attempts)
        search(task, executor, lambda content: self.tell(Told(content)))

    def _executor(self, order: Order, folder: Path) -> LocalExecutor:
        session = order.session
        context = RunContext(session.run_id, self.machine, session.seed, command=session.command, phases=self.phases)
        return LocalExecutor(
            context,
            folder,
            session.budget,
            session.policy,
            emit=lambda trace: self.tell(Traced(trace)),
            starting=lambda what: self.tell(Starting(what)),
            peaks=self.peaks if session.calibrate else None,
            capacity=Capacity.of(self.machine, available_memory()),
        )

    def _keep_rounds(self, workload: Workload, candidates: Sequence[TimedCandidate[Runner]]) -> None:
        self._rounds[workload.uuid] = {
            candidate.runner.name: candidate.rounds for candidate in candidates if candidate.failure is None
        }

    def _conclude(self, workload: Workload) -> None:
        self.tell(Concluded(workload.uuid, self._rounds.pop(workload.uuid, {})))


JOBS: dict[str, Callable[[DeviceJobs, Order, Path], None]] = {"measure": DeviceJobs.measure, "tune": DeviceJobs.tune}


if __name__ == "__main__":
    main()

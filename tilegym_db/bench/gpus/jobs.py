"""What a supervisor does with an order: one function a job, each over the executor that runs without ``--gpus`` use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.bench.calibrate import peaks_or_reason
from tilegym_db.bench.confined import require_sandbox
from tilegym_db.bench.executor.batches import Capacity
from tilegym_db.bench.executor.local import LocalExecutor
from tilegym_db.bench.gpus.messages import Concluded, Done, Order, Peaks, Session, Starting, Told, Traced
from tilegym_db.bench.interleaved import TimedCandidate
from tilegym_db.bench.machine import Machine, leaving_processors, require_healthy, select_machine
from tilegym_db.bench.phases import AT_WORK, PREPARE, PROCESSORS, Phases, processor_seconds
from tilegym_db.bench.runner import Runner
from tilegym_db.bench.tracing import RunContext
from tilegym_db.bench.tune.task import TuneTask, search
from tilegym_db.confinement.bounds import available_memory
from tilegym_db.records import Workload
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.scratch import scratch_folder
from tilegym_db.verify.worker.process import prepare_workers

__all__ = ["DeviceJobs"]


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
        """The only device that this process sees.

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

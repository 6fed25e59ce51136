"""The progress of a run on stderr: a bar at a terminal, plain lines in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tilegym_db.records.solution import spell_config

if TYPE_CHECKING:
    from tilegym_db.measurement.machine import Machine
    from tilegym_db.measurement.plan import Plan
    from tilegym_db.measurement.run_setup import Observer
    from tilegym_db.measurement.tune.tune import TuneObserver, TuneResult
    from tilegym_db.records import Trace
    from tilegym_db.store.side_files import TuningStep


class Progress:
    """A context manager that shows the progress of a run; it prints plain lines if stderr is not a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        """Create the bar. With ``quiet`` nothing is shown."""
        self._console = Console(stderr=True, quiet=quiet)
        self._console.soft_wrap = not self._console.is_terminal  # a line of a file is searched whole
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("planning", total=None, done="")
        self._devices: dict[str, TaskID] = {}

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()  # of a bar that was not started, it would print an empty line

    def observer(self) -> Observer:
        """Return callbacks for :func:`tilegym_db.measurement.benchmark.bench`."""
        from tilegym_db.measurement.run_setup import Observer

        return Observer(planned=self._planned, starting=self._starting, traced=self._traced, at_work=self._at_work)

    def _planned(self, plan: Plan, machine: Machine) -> None:
        self._begin(plan.pair_count)
        if not plan.pair_count:
            return
        self._console.print(
            f"{plan.pair_count} (solution, workload) pairs on {machine.gpu_name} ({machine.gpu})", highlight=False
        )

    def _starting(self, what: str) -> None:
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(what, highlight=False)

    def _at_work(self, device: str, what: str) -> None:
        """Show the work of one of several devices in a separate line below the bar of the run."""
        if device not in self._devices:
            self._devices[device] = self._bar.add_task(device, total=None, done="")
        self._bar.update(self._devices[device], description=f"{device}: {what}")
        if not self._console.is_terminal and what != "idle":
            self._console.print(f"{device}: {what}", highlight=False)

    def _begin(self, total: int) -> None:
        """Start at zero: a run may have several plans, one after the other."""
        self._bar.update(self._task, total=total, completed=0)
        self._advance(0)

    def _advance(self, by: int = 1) -> None:
        self._bar.advance(self._task, by)
        task = next(task for task in self._bar.tasks if task.id == self._task)
        self._bar.update(self._task, done=f"{task.completed:.0f}/{task.total:.0f}" if task.total else "")

    def _traced(self, trace: Trace) -> None:
        self._advance()
        if trace.status not in ("PASSED", "UNSUPPORTED"):
            self._bar.console.print(f"{trace.solution} {trace.status}: {trace.reason}", highlight=False, markup=False)

    def round_done(self, done: int, total: int) -> None:
        """Show how many timing rounds of a model are done."""
        self._bar.update(
            self._task, description="timing the model", completed=done, total=total, done=f"{done}/{total}"
        )

    def tune_observer(self) -> TuneObserver:
        """Return callbacks for :func:`tilegym_db.measurement.tune.tune.tune`."""
        from tilegym_db.measurement.tune.tune import TuneObserver

        return TuneObserver(
            planned=self._tuning_planned,
            starting=self._starting,
            stepped=self._stepped,
            finished=self._tuned,
            at_work=self._at_work,
        )

    def _tuning_planned(self, pairs: int, machine: Machine) -> None:
        self._begin(pairs)
        self._console.print(
            f"{pairs} (solution, workload) pairs to tune on {machine.gpu_name} ({machine.gpu})", highlight=False
        )

    def _stepped(self, step: TuningStep) -> None:
        if step.outcome == "failed":
            config = spell_config(step.config)
            self._bar.console.print(f"{step.solution}[{config}] {step.reason}", highlight=False, markup=False)

    def _tuned(self, result: TuneResult) -> None:
        self._advance()

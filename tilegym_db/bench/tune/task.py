"""One piece of a search: what is to be tuned, what is known of it, and the search itself on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilegym_db.bench.executor.local import LocalExecutor
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.tune.known import Known
from tilegym_db.bench.tune.search import SearchBudget
from tilegym_db.bench.tune.tuner import Tuned, Tuner
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Trace, Workload
from tilegym_db.store.tuning import TuningStep

__all__ = ["TuneTask", "search"]


@dataclass(frozen=True)
class TuneTask:
    """What to tune, Definition by Definition, and within which budgets.

    ``attempts`` are those of the run so far, as in RunContext: a trace of a piece that is done again is another trace.
    """

    pieces: tuple[tuple[DefinitionPlan, Sequence[tuple[Workload, SolutionFiles]]], ...]
    known: Known
    budget: SearchBudget
    budget_s: float
    attempts: Mapping[tuple[str, str, str], int] = field(default_factory=dict)


def search(task: TuneTask, executor: LocalExecutor, tell: Callable[[TuningStep | Tuned], None]) -> None:
    """Tune all of it; every step and every result is told the moment it exists, traces go where the executor's go."""
    traces: list[Trace] = []
    emit = executor.emit

    def keep(trace: Trace) -> None:
        traces.append(trace)
        emit(trace)

    def remember(step: TuningStep) -> None:
        task.known.steps.setdefault(step.pair, []).append(step)
        tell(step)

    executor.emit = keep
    for plan, pairs in task.pieces:
        tuner = Tuner(plan, executor, task.known, traces, remember, task.budget, task.budget_s)
        tuner.run(pairs, tell)

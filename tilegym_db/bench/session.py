"""One bench run from plan to database: resumable, journaled trace by trace, safe to interrupt."""

from __future__ import annotations

import secrets
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tilegym_db.backends.toolchains import TOOLCHAINS, toolchain_status
from tilegym_db.bench.executor.local import LocalExecutor
from tilegym_db.bench.machine import Machine, select_machine
from tilegym_db.bench.plan import Options, Plan, make_plan
from tilegym_db.bench.tournament import Effort
from tilegym_db.bench.tracing import RunContext
from tilegym_db.catalog import Catalog
from tilegym_db.paths import home
from tilegym_db.records import Trace
from tilegym_db.store.connection import open_store
from tilegym_db.store.ingest import ingest_journals
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries import done_keys

__all__ = ["BenchReport", "Observer", "benchmark", "run_plan"]


@dataclass
class Observer:
    """What a caller may watch: the plan before it starts, each step, each trace."""

    planned: Callable[[Plan, Machine], None] = lambda plan, machine: None
    starting: Callable[[str], None] = lambda what: None
    traced: Callable[[Trace], None] = lambda trace: None


@dataclass
class BenchReport:
    """What a run did. ``interrupted`` is true after Ctrl-C; what was measured before it is kept."""

    run_id: str
    machine: Machine
    plan: Plan
    traces: list[Trace] = field(default_factory=list)
    interrupted: bool = False

    @property
    def counts(self) -> Counter[str]:
        """How many traces ended with each status."""
        return Counter(trace.status for trace in self.traces)


def benchmark(
    names: tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | None = None,
    quick: bool = False,
    again: bool = False,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Verify and time Solutions, and store a Trace for each (solution, workload) pair.

    Args:
        names: Definitions or Solutions; empty means all.
        gpu: ``auto``, ``cpu``, or the slug or family of the GPU in this machine.
        language: only Solutions in this language (stock code always comes along, to compare with).
        workload: glob over uuid, tags and axes key, such as ``stage:decode`` or ``M=1,*``.
        quick: few workloads and few samples.
        again: measure pairs anew that have a trace already.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home: folder of the store; ``$TILEGYM_DB_HOME`` or the user data folder by default.
        observer: callbacks for progress.

    Raises:
        HardwareError: the GPU asked for is not the one in this machine.
        NotFoundError: a name that is neither a Definition nor a Solution.
        StoreError: the store cannot be used.
    """
    watching = observer or Observer()
    where = store_home or home()
    records = catalog or Catalog.default()
    machine = select_machine(gpu)
    options = Options(tuple(names), language, workload, quick, again)
    with open_store(where, catalog=records) as store:
        ingest_journals(store)
        done = done_keys(store, machine.gpu)
    plan = make_plan(records, machine, options, done, unusable_languages())
    watching.planned(plan, machine)
    report = run_plan(plan, machine, where, Effort.quick() if quick else Effort(), watching)
    with open_store(where, catalog=records) as store:
        ingest_journals(store)
    return report


def unusable_languages() -> dict[str, str]:
    """Language -> why its Solutions cannot run here and what to install. A trace would blame them for it."""
    statuses = {language: toolchain_status(language) for language in TOOLCHAINS}
    return {
        language: f"{language} cannot be used here: {status.detail}. Fix: {status.fix}"
        for language, status in statuses.items()
        if not status.available
    }


def run_plan(plan: Plan, machine: Machine, store_home: Path, effort: Effort, observer: Observer) -> BenchReport:
    """Run a plan and journal its traces; the caller ingests them. No database is open while workers run."""
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{machine.gpu}-{secrets.token_hex(3)}"
    context = RunContext(run_id, machine, secrets.randbits(62))
    report = BenchReport(run_id, machine, plan)
    with Journal(run_id, store_home) as journal, tempfile.TemporaryDirectory(prefix="tilegym-db-") as scratch:

        def emit(trace: Trace) -> None:
            journal.append(trace)
            report.traces.append(trace)
            observer.traced(trace)

        executor = LocalExecutor(context, Path(scratch), effort, emit, observer.starting)
        try:
            for item in plan.definitions:
                executor.run(item)
        except KeyboardInterrupt:
            report.interrupted = True
    return report

"""What ``benchmark``, ``promote``, ``tune`` and ``regress`` share: machine, records and store, and who watches."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tilegym_db.backends.toolchains import TOOLCHAINS, lacking_dependency, toolchain_status
from tilegym_db.bench.gpus.pool import DevicePool
from tilegym_db.bench.gpus.site import Missing, Site
from tilegym_db.bench.interleaved import TimingBudget
from tilegym_db.bench.machine import Machine, select_machine
from tilegym_db.bench.plan import DoneKey, LikelyFastest, Options, PairKey, Plan
from tilegym_db.bench.planning import make_plan
from tilegym_db.bench.tracing import RunContext
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import RecordError
from tilegym_db.paths import home
from tilegym_db.records import Config, Trace
from tilegym_db.records.trace import new_run_id
from tilegym_db.store.connection import open_store
from tilegym_db.store.database import Store
from tilegym_db.store.ingest import ingest_journals
from tilegym_db.verify.admission import require_returning_reference

__all__ = ["Observer", "RunSetup", "lacking_dependencies", "timing_budget", "unmet_dependencies", "unusable_languages"]


@dataclass
class Observer:
    """What a caller may watch: the plan before it starts, each step, each trace."""

    planned: Callable[[Plan, Machine], None] = lambda plan, machine: None
    starting: Callable[[str], None] = lambda what: None
    traced: Callable[[Trace], None] = lambda trace: None
    at_work: Callable[[str, str], None] = lambda device, what: None
    """Where several devices measure: which one, and what it does now."""


@dataclass(frozen=True)
class RunSetup:
    """Where runs take place, what of, and where their traces go. ``home`` is the folder of the store.

    ``site`` is where the machine is, unless it is this one.
    """

    machine: Machine
    catalog: Catalog
    home: Path
    site: Site | None = None

    @classmethod
    def of(cls, gpu: str, catalog: Catalog | None, store_home: Path | None) -> RunSetup:
        """From the arguments of a public function.

        Raises:
            HardwareError: the GPU asked for is not the one in this machine.
        """
        return cls(select_machine(gpu), catalog or Catalog.default(), store_home or home())

    @classmethod
    def on(cls, pool: DevicePool | None, gpu: str, catalog: Catalog | None, store_home: Path | None) -> RunSetup:
        """As :meth:`of`; where there is a pool, with the first of its devices as machine, since all are of one kind."""
        if pool is None:
            return cls.of(gpu, catalog, store_home)
        first = pool.devices[0]
        machine = select_machine(first.gpu, first.index) if pool.site is None else pool.site.machine
        return cls(machine, catalog or Catalog.default(), store_home or home(), pool.site)

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """The store, with everything in it that was journaled. No worker may run while it is open.

        Raises:
            StoreError: it cannot be used.
        """
        with open_store(self.home, catalog=self.catalog) as store:
            ingest_journals(store)
            yield store

    def ingest(self) -> None:
        """Take what was journaled into the store."""
        with self.store():
            pass

    def plan(
        self,
        options: Options,
        done: Collection[DoneKey] = (),
        excluded: Mapping[DoneKey, str] | None = None,
        tuned: Mapping[PairKey, Config] | None = None,
        likely_fastest: LikelyFastest | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> Plan:
        """What the options ask for, with the languages and packages that are there; arguments and errors are those of
        :func:`~tilegym_db.bench.planning.make_plan`. ``refused`` is name of a Solution -> why it may not run there.

        Raises:
            RecordError: the reference of a Definition that was asked for by name does not return; where all were asked for,
                that Definition is left out.
        """
        lacks = self._missing()
        unmet = {**lacks.solutions, **(refused or {})}
        plan = make_plan(
            self.catalog, self.machine, options, done, lacks.languages, excluded, tuned, likely_fastest, unmet
        )
        return self._without_failing_references(plan, named=bool(options.names))

    def _missing(self) -> Missing:
        solutions = self.catalog.solutions.values()
        if self.site is not None:
            return self.site.missing(solutions)
        return Missing(unusable_languages(), unmet_dependencies(solutions))

    def _without_failing_references(self, plan: Plan, *, named: bool) -> Plan:
        """The plan without Definitions whose reference would end or hold up this process, which computes with it from here on."""
        kept = []
        for item in plan.definitions:
            try:
                require_returning_reference(self.catalog, item.definition)
                kept.append(item)
            except RecordError as error:
                if named:
                    raise
                plan.refused.append(str(error))
        return replace(plan, definitions=kept)

    def context(self, run_id: str = "", command: str | None = None) -> RunContext:
        """A run with a secret seed of its own; by default with an id of its own too."""
        return RunContext(run_id or new_run_id(self.machine.gpu), self.machine, secrets.randbits(62), command=command)


def timing_budget(options: Options) -> TimingBudget:
    """How long a verdict is timed: little for a quick run."""
    return TimingBudget.quick() if options.quick else TimingBudget()


def unusable_languages() -> dict[str, str]:
    """Language -> why its Solutions cannot run here and what to install. A trace would blame them for it."""
    statuses = {language: toolchain_status(language) for language in TOOLCHAINS}
    return {
        language: f"{language} cannot be used here: {status.detail}. Fix: {status.fix}"
        for language, status in statuses.items()
        if not status.available
    }


def unmet_dependencies(solutions: Iterable[SolutionFiles]) -> dict[str, str]:
    """Name of a Solution -> the package that it declares and that is missing or too old here, and how to get it."""
    return lacking_dependencies({files.name: files.record.spec.dependencies for files in solutions})


def lacking_dependencies(needed: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """As :func:`unmet_dependencies`, for what Solutions declare, by name."""
    lacking = {name: lacking_dependency(dependencies) for name, dependencies in needed.items()}
    return {name: f"needs {text}" for name, text in lacking.items() if text is not None}

"""The two commands of the harness for Python: ``benchmark`` screens Solutions or a function, ``promote`` verifies for good."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tilegym_db.bench.bench_report import BenchReport
from tilegym_db.bench.function_solution import ONLY_SCREENED, catalog_with_function
from tilegym_db.bench.gpus.devices import MeasuringDevice
from tilegym_db.bench.plan import Options, names_of
from tilegym_db.bench.run_setup import Observer
from tilegym_db.bench.tier_run import run_tiers
from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError

__all__ = ["benchmark", "promote"]


def benchmark(
    names: str | tuple[str, ...] | Callable[..., Any] = (),
    *,
    definition: str | None = None,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    quick: bool = False,
    again: bool = False,
    promote: bool = False,
    allow_unsandboxed: bool = False,
    gpus: str | Sequence[MeasuringDevice] | None = None,
    executor: str | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Screen Solutions: verify and time them, and store a Trace for each (solution, workload) pair.

    Args:
        names: Definitions or Solutions; empty means all. Or a function, which is screened and never served: see
            :func:`~tilegym_db.bench.of_function.benchmark_function`.
        definition: the operator that a function implements; for a function only.
        gpu: ``auto``, ``cpu``, or the slug or family of the GPU in this machine.
        language: only Solutions in this language; stock code and verified Solutions that may be the fastest come along.
        workload: glob over uuid, tags and axes key, such as ``stage:decode`` or ``M=1,*``; or several, of which one has to match.
        quick, again: few workloads and few samples; measure pairs anew that have a trace already.
        promote: afterwards run the promotion tier on what passed, as :func:`promote` does; its traces are in the report.
        allow_unsandboxed: promote anything on a machine that cannot confine a worker; the traces say so and are never published.
            Without it, what the package ships is promoted there, for the user of that machine, and nothing else.
        gpus: measure on several GPUs of this host, all of one kind, each with a process of its own: ``all``, a number
            (``2``), or indices (``0,2``). By default one GPU, in this process.
        executor: ``ray`` or ``ray:HOST:PORT`` for the devices of a Ray cluster in place of those of this host; ``gpus`` is
            then how many of them at most. ``gpu="cpu"`` takes the processors of its nodes.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home, observer: folder of the store, ``$TILEGYM_DB_HOME`` or the user data folder by default; callbacks.

    Raises:
        HardwareError: the GPU asked for is not the one in this machine; or it cannot confine a worker; or no cluster answers.
        MissingPackageError: the executor needs a package that is not installed.
        NotFoundError: a name that is neither a Definition nor a Solution.
        StoreError: the store cannot be used.
        UsageError: a function without ``definition``, or ``definition`` without a function.
    """
    with _candidates(names, definition, catalog, promote=promote) as (candidates, records):
        options = Options(candidates, language, workload, quick, again)
        places = (gpu, gpus, records, store_home)
        return run_tiers(
            options, *places, observer, confined=not allow_unsandboxed, then_promote=promote, executor=executor
        )


def promote(
    names: str | tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    quick: bool = False,
    again: bool = False,
    allow_unsandboxed: bool = False,
    gpus: str | Sequence[MeasuringDevice] | None = None,
    executor: str | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Verify Solutions for good: fresh processes, fresh secrets, all fuzz cases and every audit.

    Only what passes here is verified: ``best``, the resolver and patched models use nothing else. Pairs whose newest screen
    failed are left out. Whatever is verified already and within a little of the fastest is promoted again beside what is
    new, so that who is the fastest comes of the same rounds. Arguments and errors are those of :func:`benchmark`.
    """
    options = Options(names_of(names), language, workload, quick, again, "promotion")
    places = (gpu, gpus, catalog, store_home)
    return run_tiers(options, *places, observer, confined=not allow_unsandboxed, executor=executor)


@contextlib.contextmanager
def _candidates(
    names: str | tuple[str, ...] | Callable[..., Any],
    definition: str | None,
    catalog: Catalog | None,
    *,
    promote: bool,
) -> Iterator[tuple[tuple[str, ...], Catalog | None]]:
    """The names to screen, and the catalog that has them; a function has a name for as long as it is measured."""
    if not callable(names):
        if definition is not None:
            raise UsageError(
                "definition= goes with a function; an operator is named first: benchmark('...').",
                code="definition_without_function",
            )
        yield names_of(names), catalog
        return
    if definition is None:
        raise UsageError(
            "a function implements an operator: benchmark(function, definition='...').", code="definition_missing"
        )
    if promote:
        raise UsageError(ONLY_SCREENED, code="function_not_promoted")
    with catalog_with_function(names, definition, catalog) as (name, records):
        yield (name,), records

"""Measures a function of a notebook or a script: as a Solution of its own for this one run, in the screen tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilegym_db.bench.bench_report import BenchReport
from tilegym_db.bench.benchmark import benchmark
from tilegym_db.bench.function_solution import ONLY_SCREENED, catalog_with_function
from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError

__all__ = ["benchmark_function"]


def benchmark_function(
    function: Callable[..., Any],
    definition: str,
    *,
    dtypes: Mapping[str, Sequence[str]] | None = None,
    layouts: Mapping[str, str] | None = None,
    catalog: Catalog | None = None,
    **options: Any,
) -> BenchReport:
    """Verify and time a function against a Definition, beside stock code, without adding it to any catalog.

    The function is written with what it uses into a file of its own, which runs in a worker as every Solution does. Its
    traces are of the screen tier: they say what was measured, and never make it served. To keep it, save the file and run
    ``tilegym-db add-solution``.

    Args:
        function: called as the Definition's reference is, with or without its outputs as last arguments.
        definition: the name of the operator.
        dtypes: dtype variable -> what the function supports; by default all that the Definition has.
        layouts: tensor -> the layout that the function needs, where that is not ``contiguous``.
        catalog: the records; the shipped ones and the user's by default.
        options: as for :func:`~tilegym_db.bench.benchmark.benchmark`, but not ``promote``.

    Raises:
        UsageError: the function's source is not known, it uses what cannot be written into a file, or its parameters are not
            those of the Definition.
        NotFoundError: no such Definition.
        RecordError: ``dtypes`` or ``layouts`` are none of the Definition's.
    """
    if "promote" in options:
        raise UsageError(ONLY_SCREENED, code="function_not_promoted")
    with catalog_with_function(function, definition, catalog, dtypes, layouts) as (name, records):
        return benchmark((name,), catalog=records, **options)

"""Measures a function of a notebook or a script: as a Solution of its own for this one run, in the screen tier."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilegym_db.bench.benchmark import BenchReport, benchmark
from tilegym_db.catalog import Catalog
from tilegym_db.catalog.writers import add_solution
from tilegym_db.errors import UsageError
from tilegym_db.records import Definition, Solution
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.records.signature import signature_problem
from tilegym_db.scaffold.function_source import function_source, language_of
from tilegym_db.scratch import scratch_folder

__all__ = ["benchmark_function"]

FILE = "kernel.py"


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
        raise UsageError(
            "a function is only screened: what is promoted needs a name. Try: tilegym-db add-solution FILE"
        )
    catalog = catalog or Catalog.default()
    record = catalog.definition(definition)
    source = function_source(function).encode()
    solution = _solution_of(function, source, record, dtypes or record.dtypes, layouts or {})
    with scratch_folder() as root:
        catalog = catalog.reread(root)
        add_solution(catalog, solution, {FILE: source}, root)
        return benchmark((solution.name,), catalog=catalog.reread(root), **options)


def _solution_of(
    function: Callable[..., Any],
    source: bytes,
    definition: Definition,
    dtypes: Mapping[str, Sequence[str]],
    layouts: Mapping[str, str],
) -> Solution:
    """The record of a function, named after its source; :class:`UsageError` where its parameters do not fit."""
    language = language_of(source.decode())
    writes = next(iter(definition.outputs)) in inspect.signature(function).parameters
    spec = {
        "language": language,
        "destination_passing_style": writes or language != "python",
        "entry_point": f"{FILE}::{function.__name__}",
        "dtypes": {key: list(values) for key, values in dtypes.items()},
        "layouts": dict(layouts),
    }
    name = f"{definition.name}_function_{length_prefixed_digest([source])[:12]}"
    solution = Solution.from_dict(
        {"name": name, "definition": definition.name, "author": "a function", "spec": spec, "sources": [{"path": FILE}]}
    )
    problem = signature_problem(solution, source, definition)
    if problem is not None:
        raise UsageError(f"'{function.__name__}': {problem}.")
    return solution

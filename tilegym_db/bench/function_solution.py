"""A function of a notebook or a script as a Solution of its own, for as long as it is measured."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.writers import add_solution
from tilegym_db.errors import UsageError
from tilegym_db.records import Definition, Solution
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.records.signature import signature_problem
from tilegym_db.scaffold.function_source import function_source, language_of
from tilegym_db.scratch import scratch_folder

__all__ = ["ONLY_SCREENED", "catalog_with_function"]

FILE = "kernel.py"
ONLY_SCREENED = "a function is only screened: what is promoted needs a name. Try: tilegym-db add-solution FILE"


@contextlib.contextmanager
def catalog_with_function(
    function: Callable[..., Any],
    definition: str,
    catalog: Catalog | None = None,
    dtypes: Mapping[str, Sequence[str]] | None = None,
    layouts: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Catalog]]:
    """The name that a function has as a Solution, and a catalog with it in it; arguments and errors are those of
    :func:`~tilegym_db.bench.of_function.benchmark_function`.
    """
    catalog = catalog or Catalog.default()
    record = catalog.definition(definition)
    source = function_source(function).encode()
    solution = _solution_of(function, source, record, dtypes or record.dtypes, layouts or {})
    with scratch_folder() as root:
        catalog = catalog.reread(root)
        add_solution(catalog, solution, {FILE: source}, root)
        yield solution.name, catalog.reread(root)


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
        raise UsageError(f"'{function.__name__}': {problem}.", code="signature_differs")
    return solution

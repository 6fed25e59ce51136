"""What Python callers may get wrong is told in a sentence that names the argument, not by whatever fails on it first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_db.bench.plan import names_of
from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.loop.fit import fit
from tilegym_db.resolver.resolve import resolve
from tilegym_db.scaffold.function_source import function_source
from tilegym_db.store.connection import open_store

WRONG: dict[str, tuple[Callable[[Catalog], object], str]] = {
    "definition": (lambda catalog: catalog.definition(5), "by its name, a text, not int"),  # type: ignore[arg-type]
    "solution": (lambda catalog: catalog.solution(["x"]), "by its name, a text, not list"),  # type: ignore[arg-type]
    "workloads_for": (lambda catalog: catalog.workloads_for(None), "not NoneType"),  # type: ignore[arg-type]
    "add_definition": (lambda catalog: catalog.add_definition({}), "takes a Definition, not dict"),  # type: ignore[arg-type]
    "add_solution": (lambda catalog: catalog.add_solution("x", {}), "takes a Solution, not str"),  # type: ignore[arg-type]
    "add_workloads": (lambda catalog: catalog.add_workloads(5), "takes several Workloads, not int"),  # type: ignore[arg-type]
    "a workload": (lambda catalog: catalog.add_workloads(["x"]), "takes Workloads, not str"),  # type: ignore[list-item]
    "axes": (lambda catalog: asked(catalog, axes=5), "axes is a mapping of names to values, not int"),
    "an axis": (lambda catalog: asked(catalog, axes={5: 4}), "has no axis '5'"),
    "dtypes": (lambda catalog: asked(catalog, dtypes="float32"), "dtypes is a mapping of names to values, not str"),
    "gpu": (lambda catalog: asked(catalog, gpu=5), "gpu is the name of a GPU, a text, not int"),
    "names": (lambda catalog: names_of(5), "a text, or several, not int"),  # type: ignore[arg-type]
    "function": (lambda catalog: function_source("x"), "a function of Python is needed.* not str"),  # type: ignore[arg-type]
}


def asked(catalog: Catalog, **changes: Any) -> object:
    call = {"axes": {"M": 4, "N": 8}, "dtypes": {"T": "float32"}, "gpu": "h200", **changes}
    return resolve("row_scale", catalog=catalog, **call)


@pytest.fixture
def catalog(row_scale: object) -> Catalog:
    return Catalog.default()


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_another_type_is_named(case: str, catalog: Catalog) -> None:
    call, message = WRONG[case]
    with pytest.raises(UsageError, match=message):
        call(catalog)


@pytest.mark.parametrize("statement", [None, 5, b"SELECT 1", ["SELECT 1"]])
def test_a_statement_is_a_text(statement: Any, tmp_path: Path, catalog: Catalog) -> None:
    with (
        open_store(tmp_path, catalog=catalog) as store,
        pytest.raises(UsageError, match=f"a statement is a text, not {type(statement).__name__}"),
    ):
        store.sql(statement)


@pytest.mark.parametrize(
    ("inputs", "rounds", "message"),
    [
        ("x", 1, "token ids, a torch.Tensor, not str"),
        (torch.zeros(1, 4), 1, "not \\[1, 4\\] of float32 and 1"),
        (torch.zeros(1, 0, dtype=torch.int64), 1, "not \\[1, 0\\] of int64 and 1"),
        (torch.zeros(1, 4, dtype=torch.int64), 0, "at least 1 round, not .* and 0"),
    ],
)
def test_fit_measures_nothing_for_inputs_that_are_no_token_ids(inputs: Any, rounds: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit(torch.nn.Linear(2, 2), inputs, rounds=rounds)

"""Mistakes of Python callers get a sentence that names the argument, before any later code fails on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.catalog import Catalog, writers
from tilegym_db.errors import QueryError, UsageError
from tilegym_db.loop.fit import fit
from tilegym_db.measurement.plan import names_of
from tilegym_db.resolver.resolve import resolve
from tilegym_db.scaffold.solution_draft import function_source
from tilegym_db.store.opening import open_store

WRONG: dict[str, tuple[Callable[[Catalog], object], str, str]] = {
    "definition": (lambda catalog: catalog.definition(5), "argument_type", "not int"),  # type: ignore[arg-type]
    "solution": (lambda catalog: catalog.solution(["x"]), "argument_type", "not list"),  # type: ignore[arg-type]
    "workloads_for": (lambda catalog: catalog.workloads_for(None), "argument_type", "not NoneType"),  # type: ignore[arg-type]
    "add_definition": (lambda catalog: writers.add_definition(catalog, {}), "argument_type", "not dict"),  # type: ignore[arg-type]
    "add_solution": (lambda catalog: writers.add_solution(catalog, "x", {}), "argument_type", "not str"),  # type: ignore[arg-type]
    "add_workloads": (lambda catalog: writers.add_workloads(catalog, 5), "argument_type", "not int"),  # type: ignore[arg-type]
    "a workload": (lambda catalog: writers.add_workloads(catalog, ["x"]), "argument_type", "not str"),  # type: ignore[list-item]
    "axes": (lambda catalog: asked(catalog, axes=5), "argument_type", "axes"),
    "dtypes": (lambda catalog: asked(catalog, dtypes="float32"), "argument_type", "dtypes"),
    "gpu": (lambda catalog: asked(catalog, gpu=5), "argument_type", "gpu"),
    "names": (lambda catalog: names_of(5), "argument_type", "not int"),  # type: ignore[arg-type]
    "function": (lambda catalog: function_source("x"), "function_expected", "not str"),  # type: ignore[arg-type]
}


def asked(catalog: Catalog, **changes: Any) -> object:
    call = {"axes": {"M": 4, "N": 8}, "dtypes": {"T": "float32"}, "gpu": "h200", **changes}
    return resolve("row_scale", catalog=catalog, **call)


@pytest.fixture
def catalog(row_scale: object) -> Catalog:
    return Catalog.default()


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_another_type_is_named(case: str, catalog: Catalog) -> None:
    call, code, name = WRONG[case]
    with raises(UsageError, code, name):
        call(catalog)


def test_an_axis_that_is_no_name_is_named(catalog: Catalog) -> None:
    with pytest.raises(UsageError) as refused:
        asked(catalog, axes={5: 4})
    assert "'5'" in str(refused.value)


@pytest.mark.parametrize("statement", [None, 5, b"SELECT 1", ["SELECT 1"]])
def test_a_statement_is_a_text(statement: Any, tmp_path: Path, catalog: Catalog) -> None:
    with (
        open_store(tmp_path, catalog=catalog) as store,
        pytest.raises(QueryError) as refused,
    ):
        store.sql(statement)
    assert f"not {type(statement).__name__}" in str(refused.value)


@pytest.mark.parametrize(
    ("inputs", "rounds", "name"),
    [
        ("x", 1, "not str"),
        (torch.zeros(1, 4), 1, "float32 [1, 4]"),
        (torch.zeros(1, 0, dtype=torch.int64), 1, "int64 [1, 0]"),
        (torch.zeros(1, 4, dtype=torch.int64), 0, "and 0"),
    ],
)
def test_fit_measures_nothing_for_inputs_that_are_no_token_ids(inputs: Any, rounds: int, name: str) -> None:
    with pytest.raises(UsageError) as refused:
        fit(torch.nn.Linear(2, 2), inputs, rounds=rounds)
    assert name in str(refused.value)

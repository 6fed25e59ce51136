"""A function of a notebook or a script, written into a separate file and measured as any other Solution."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from raising import raises

import tilegym_db
from tilegym_db.errors import UsageError
from tilegym_db.scaffold.solution_draft import function_source, language_of

SCALE = 2.0
TABLE = [1.0]


def doubled(x: Any) -> Any:
    return x * SCALE


def scaled(x: Any, weight: Any, factor: Any) -> Any:
    return (doubled(x.float()) * weight.float() * (factor / math.sqrt(4.0))).to(x.dtype)


def without_the_factor(x: Any, weight: Any, factor: Any, out: Any) -> None:
    out.copy_((x.float() * weight.float()).to(x.dtype))


def of_a_list(x: Any) -> Any:
    return x * TABLE[0]


def test_what_a_function_uses_comes_along():
    source = function_source(scaled)
    assert source.index("import math") < source.index("SCALE = 2.0") < source.index("def doubled")
    scope: dict[str, Any] = {}
    exec(compile(source.replace(": Any", "").replace("-> Any", ""), "file", "exec"), scope)
    assert language_of(source) == "python"


@pytest.mark.parametrize("package", ["triton", "tilelang", "cuda.tile"])
def test_language_is_recognised_by_its_import(package: str):
    assert language_of(f"import {package} as one\n") == {"cuda.tile": "cutile"}.get(package, package)


def test_a_language_is_known_by_from_imports():
    assert language_of("from cuda import tile as ct\n") == "cutile"
    assert language_of("from triton import language as tl\n") == "triton"
    assert language_of("from cuda import bindings\n") == "python"


def test_what_cannot_be_written_out_is_named():
    local = 1.0

    def closing(x: Any) -> Any:
        return x * local

    with pytest.raises(UsageError, match="'closing' uses local"):
        function_source(closing)
    with pytest.raises(UsageError, match="'TABLE'"):
        function_source(of_a_list)
    with pytest.raises(UsageError, match="'def'"):
        function_source(lambda x: x)
    with pytest.raises(UsageError, match="'def'"):
        function_source(len)


@pytest.mark.slow
def test_right_function_passes_the_screen_and_a_wrong_one_fails(row_scale: Path, home: Path):
    report = tilegym_db.bench(scaled, definition="row_scale", devices="cpu", quick=True)
    verdicts = {(trace.tier, trace.solution.startswith("row_scale_function_")): trace.status for trace in report.traces}
    assert verdicts == {("screen", True): "PASSED", ("screen", False): "PASSED"}
    shown = report._repr_html_()
    assert "(cpu), screen, run" in shown
    assert "row_scale_function_" in shown
    wrong = tilegym_db.bench(without_the_factor, definition="row_scale", devices="cpu", quick=True)
    assert {trace.status for trace in wrong.traces if "function" in trace.solution} == {"INCORRECT_NUMERICAL"}
    # No catalog has it, so nothing can serve it.
    assert tilegym_db.Catalog.default().solution_paths.keys() == {"row_scale_stock"}


def test_function_is_not_verified_but_must_take_all_arguments(row_scale: Path):
    with raises(UsageError, "signature_differs", "doubled(x)"):
        tilegym_db.bench(doubled, definition="row_scale")
    with raises(UsageError, "function_not_verified", "tilegym-db add-solution"):
        tilegym_db.bench(scaled, definition="row_scale", verify=True)
    with raises(UsageError, "definition_missing", "definition="):
        tilegym_db.bench(scaled)
    with raises(UsageError, "definition_without_function", "definition="):
        tilegym_db.bench("row_scale_stock", definition="row_scale")
    with raises(UsageError, "definition_without_function", "dtypes="):
        tilegym_db.bench("row_scale_stock", dtypes={"T": ["float32"]})

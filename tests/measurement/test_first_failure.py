"""A new Solution is verified before what it is compared with, and a wrong one ends there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.benchmark import run_plan
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.measurement.plan import Options, current_best_alone, make_plan
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.records.solution import config_id
from tilegym_db.verification.worker_handle import SCREEN

RIGHT = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
WRONG = "def run(x, weight, factor, out):\n    out.copy_(x * weight + factor)\n"


def run(catalog: Catalog, home: Path) -> tuple[dict[str, str], list[str]]:
    """Return solution -> status of every trace, and the steps that were reported. Stock code was measured before."""
    definition, steps = catalog.definition("row_scale"), list[str]()
    stock = catalog.solution("row_scale_stock")
    done = {(stock.digest, definition.digest, load.uuid, config_id({})) for load in catalog.workloads_for("row_scale")}
    plan = make_plan(catalog, cpu_machine(), Options(("row_scale_new",)), done)
    report = run_plan(plan, cpu_machine(), home, TimingBudget.quick(), SCREEN, Observer(starting=steps.append), None)
    return {trace.solution: trace.status for trace in report.traces}, steps


def test_wrong_solution_ends_before_stock_code_is_tried(make_catalog: Callable[..., Catalog], tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path, {"row_scale_new": WRONG})
    statuses, steps = run(catalog, tmp_path / "home")
    assert statuses == {"row_scale_new": "INCORRECT_NUMERICAL"}
    assert "verifying row_scale_new; 1 to compare with wait for it" in steps
    assert not [step for step in steps if "is compared with" in step]


def test_right_solution_is_timed_beside_stock_code(make_catalog: Callable[..., Catalog], tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path, {"row_scale_new": RIGHT})
    statuses, steps = run(catalog, tmp_path / "home")
    assert statuses == {"row_scale_new": "PASSED", "row_scale_stock": "PASSED"}
    assert "verifying what row_scale_new is compared with: row_scale_stock" in steps


@pytest.mark.parametrize(
    ("names", "whole", "kept"),
    [
        (("row_scale_new",), (), 1),
        (("row_scale",), (), 3),
        (("row_scale_new", "row_scale"), (), 3),
        ((), (), 3),
        (("row_scale_new",), ("digest",), 3),
    ],
)
def test_named_solutions_are_compared_with_the_current_best(
    names: tuple[str, ...], whole: tuple[str, ...], kept: int, make_catalog: Callable[..., Catalog], tmp_path: Path
) -> None:
    catalog = make_catalog(tmp_path, {"row_scale_new": RIGHT})
    found = {("digest", "uuid"): [("a", {}), ("b", {}), ("c", {})]}
    assert len(current_best_alone(found, whole, names, catalog)["digest", "uuid"]) == kept

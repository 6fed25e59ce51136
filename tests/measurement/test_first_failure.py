"""A new Solution is verified before what it is compared with, and a wrong one ends there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.measurement import runner
from tilegym_db.measurement.benchmark import run_plan
from tilegym_db.measurement.local_executor import Capacity, LocalExecutor
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.measurement.plan import Options, current_best_alone, make_plan
from tilegym_db.measurement.run_setup import Observer, RunContext
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.records import Definition, Trace, Workload
from tilegym_db.records.solution import config_id
from tilegym_db.verification.expected import WorkloadContents
from tilegym_db.verification.session import Verification
from tilegym_db.verification.worker_handle import SCREEN

RIGHT = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
WRONG = "def run(x, weight, factor, out):\n    out.copy_(x * weight + factor)\n"


SIZES = tuple({"axes": {"M": rows, "N": 8}} for rows in (3, 5, 7, 11, 13, 17))


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


def test_no_contents_are_drawn_for_what_is_known_to_fail(
    make_catalog: Callable[..., Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, drawn, traces = make_catalog(tmp_path, {"row_scale_new": WRONG}, SIZES), list[int](), list[Trace]()
    draw, ended = WorkloadContents.draw, threading.Event()

    def draw_late(definition: Definition, workload: Workload, *rest: Any, **more: Any) -> WorkloadContents:
        drawn.append(workload.axes["M"])
        ended.wait(60)  # as a large workload's contents take long
        return draw(definition, workload, *rest, **more)

    class NoticesFailure(Verification):
        def verify(self, *arguments: Any) -> Any:
            found = super().verify(*arguments)
            ended.set()
            return found

    monkeypatch.setattr(WorkloadContents, "draw", draw_late)
    monkeypatch.setattr(runner, "Verification", NoticesFailure)
    # Stock code has no traces here, and is not asked for.
    plan = make_plan(catalog, cpu_machine(), Options(("row_scale_new",)), ())
    context = RunContext("run", cpu_machine(), 7)
    capacity = Capacity(runners=4, contents_bytes=1 << 30, workloads=3)
    LocalExecutor(context, tmp_path, TimingBudget.quick(), SCREEN, traces.append, capacity=capacity).run(
        plan.definitions
    )
    assert [(trace.solution, trace.status) for trace in traces] == [("row_scale_new", "INCORRECT_NUMERICAL")] * 6
    assert len({trace.reason for trace in traces}) == 1
    assert len(drawn) <= 2  # the first one, and one more if it begins before the others are cancelled


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

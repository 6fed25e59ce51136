"""The checks of a driver on a trace from another host before it counts as one measured here."""

from __future__ import annotations

import json

import pytest

from tilegym_db.measurement.devices.messages import Order, Session, divide
from tilegym_db.measurement.devices.places import trace_problem
from tilegym_db.measurement.machine import Machine
from tilegym_db.measurement.plan import Options, make_plan
from tilegym_db.measurement.run_setup import RunContext
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.records import Trace
from tilegym_db.records.trace import new_trace_id
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import PROMOTION

MACHINE = Machine("cpu", "cpu", "a processor", libs={"torch": "2.15.0"}, host="node1")
SIZES = ({"axes": {"M": 3, "N": 8}}, {"axes": {"M": 4, "N": 8}})


@pytest.fixture
def order(tmp_path, make_catalog) -> Order:
    catalog = make_catalog(tmp_path / "catalog", {}, SIZES)
    plan = make_plan(catalog, MACHINE, Options(tier="promotion"), ())
    session = Session("measure", "run", "cpu", 7, tmp_path, TimingBudget(), PROMOTION, confined=True)
    [one, *_] = divide(plan.definitions, 2)
    return Order(session, one)


@pytest.fixture
def trace(order) -> Trace:
    """The one that the order's only pair comes to on its device."""
    [plan], [uuid] = order.item.plans, order.item.uuids
    workload = next(workload for workload in plan.workloads if workload.uuid == uuid)
    context, failure = RunContext("run", MACHINE, 7), Failure("RUNTIME_ERROR", "it raised")
    return context.failed(plan.definition, plan.timed[0], workload, "promotion", failure, {}, 3)


def changed(trace: Trace, **changes: object) -> Trace:
    """With an id that fits, unless that is what is changed."""
    content = json.loads(trace.to_json()) | changes
    if "trace_id" not in changes:
        keys = ("run_id", "tier", "attempt", "solution_digest", "config", "workload_uuid")
        filled = {"attempt": 0, "config": {}} | content
        content["trace_id"] = new_trace_id(*(filled[key] for key in keys))
    return Trace.from_dict(content)


def test_a_trace_that_was_asked_for_is_not_doubted(order, trace):
    assert trace_problem(trace, order, MACHINE) is None
    assert trace_problem(changed(trace, attempt=1), order, MACHINE) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "another"}, "of run another, not run"),
        ({"tier": "screen"}, "of the tier screen"),
        ({"gpu": "h200"}, "its gpu is 'h200'"),
        ({"host": "node2"}, "its host is 'node2', but the device of the order has 'node1'"),
        ({"libs": {"torch": "2.14.0"}}, "its libs is"),
        ({"solution": "row_scale_new"}, "the order has no row_scale_new"),
        ({"solution_digest": "0" * 64}, "the order has no row_scale_stock"),
        ({"definition_digest": "0" * 64}, "the order has no row_scale_stock"),
        ({"workload_uuid": "7a1e1f6e-5a0c-5d0b-9a53-5b8f7f0f6c11"}, "the order has no row_scale_stock on workload"),
        ({"axes": {"M": 4096, "N": 4096}}, "not those of its workload"),
        ({"config": {"ROWS": 2}}, "with config {'ROWS': 2}"),
        ({"trace_id": "7a1e1f6e-5a0c-5d0b-9a53-5b8f7f0f6c11"}, "is not that of its content"),
    ],
)
def test_trace_that_was_not_ordered_is_named_with_its_mistake(order, trace, changes, reason):
    assert reason in str(trace_problem(changed(trace, **changes), order, MACHINE))


def test_workload_of_another_device_is_not_part_of_this_order(order, trace):
    [plan] = order.item.plans
    other = next(workload for workload in plan.workloads if workload.uuid not in order.item.uuids)
    assert "the order has no" in str(
        trace_problem(changed(trace, workload_uuid=other.uuid, axes=other.axes), order, MACHINE)
    )


def test_pass_of_an_unconfined_worker_is_not_a_promotion(order, trace):
    measured = {"latency_us": 5.0, "ci_low_us": 4.0, "ci_high_us": 6.0, "samples": 9, "timer": "wall"}
    passed = {"status": "PASSED", "reason": "", "failure": None, "correctness": {}, "performance": measured}
    assert trace_problem(changed(trace, **passed), order, MACHINE) is None
    assert "confined at level 1" in str(trace_problem(changed(trace, **passed, sandbox_level=1), order, MACHINE))

"""What a driver can check of a trace that was measured on another host, before it signs it as its own. Pure."""

from __future__ import annotations

from typing import Any

from tilegym_db.bench.gpus.messages import Order
from tilegym_db.bench.machine import Machine
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.tier_policy import MIN_SANDBOX_LEVEL
from tilegym_db.records import Trace, Workload
from tilegym_db.records.trace import UNTIMED_TIERS, new_trace_id

__all__ = ["doubt"]

MACHINE_FIELDS = ("gpu", "gpu_name", "sm", "driver", "cuda", "libs", "gpu_uuid", "host")


def doubt(trace: Trace, order: Order, machine: Machine) -> str | None:
    """Why a trace is none of those that an order asked for, on the device that the order went to; None where it is.

    Whether its figures can be true is asked whenever a trace is read (docs/trust.md), and not here.
    """
    session = order.session
    if trace.run_id != session.run_id:
        return f"it is of run {trace.run_id}, not {session.run_id}"
    if trace.tier not in (session.policy.tier, *UNTIMED_TIERS):
        return f"it is of the tier {trace.tier}, and {session.policy.tier} was asked for"
    for name in MACHINE_FIELDS:
        stated, known = getattr(trace, name), getattr(machine, name)
        if stated != known:
            return f"its {name} is {stated!r}, and the device that was asked has {known!r}"
    if session.confined and trace.status == "PASSED" and trace.sandbox_level < MIN_SANDBOX_LEVEL:
        return f"its worker was confined at level {trace.sandbox_level}, and a promotion asks for {MIN_SANDBOX_LEVEL}"
    planned = _planned(trace, order)
    if planned is None:
        return f"nobody asked for {trace.solution} on workload {trace.workload_uuid}"
    plan, workload = planned
    if trace.axes != plan.definition.bind_axes(workload.axes):
        return f"its axes are {trace.axes}, which are not those of its workload"
    if session.job == "measure" and not _takes_part(plan, workload, trace):
        return f"nobody asked for {trace.solution} with config {trace.config} on workload {trace.workload_uuid}"
    key: tuple[Any, ...] = (trace.solution_digest, trace.config, trace.workload_uuid)
    if trace.trace_id != new_trace_id(trace.run_id, trace.tier, trace.attempt, *key):
        return f"its id {trace.trace_id} is not that of its content"
    return None


def _planned(trace: Trace, order: Order) -> tuple[DefinitionPlan, Workload] | None:
    wanted = set(order.item.uuids)
    for plan in order.item.plans:
        if (plan.definition.name, plan.definition.digest) != (trace.definition, trace.definition_digest):
            continue
        solutions = {
            solution.digest for solution in (*plan.timed, *plan.interpreted) if solution.name == trace.solution
        }
        workload = next((one for one in plan.workloads if one.uuid == trace.workload_uuid), None)
        if trace.solution_digest in solutions and workload is not None and workload.uuid in wanted:
            return plan, workload
    return None


def _takes_part(plan: DefinitionPlan, workload: Workload, trace: Trace) -> bool:
    solutions = (*plan.timed, *plan.interpreted)
    return any(
        solution.digest == trace.solution_digest and plan.takes_part(solution, workload, dict(trace.config))
        for solution in solutions
        if solution.name == trace.solution
    )

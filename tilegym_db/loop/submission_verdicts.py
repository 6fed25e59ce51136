"""What the traces of a submission say: refused, by which gate and why, or fit for the next step. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tilegym_db.backends.compile_jobs import CompileResult
from tilegym_db.bench.promotions import BASELINES
from tilegym_db.loop.received import AttemptRefusal
from tilegym_db.records import Trace, axes_key
from tilegym_db.records.loop import Task

__all__ = ["compile_refusal", "promotion_refusal", "screen_refusal", "unmeasured"]


def compile_refusal(results: Sequence[CompileResult]) -> AttemptRefusal | None:
    """What a compiler refused of the submission itself; a target that it refuses altogether says nothing of that."""
    for result in results:
        if result.status in ("failed", "unsupported"):
            lines = [line.strip() for line in result.log.splitlines() if line.strip()]
            return AttemptRefusal("compile", f"{result.status}: {' '.join(lines[-3:])[:1500] or 'no reason was given'}")
    return None


def screen_refusal(task: Task, traces: Sequence[Trace]) -> AttemptRefusal | None:
    """The first workload that a screen did not pass, or on which it is clearly slower than the bar.

    Args:
        task: names the workloads and the bar.
        traces: of the submission, in the tier screen or interpreter; the newest of a workload counts.
    """
    newest = {trace.workload_uuid: trace for trace in sorted(traces, key=lambda trace: trace.timestamp)}
    for item in task.workloads:
        trace = newest.get(item.uuid)
        if trace is None:
            continue
        refusal = _failure(trace)
        if refusal is not None:
            return refusal
        slow = [
            item
            for item in (trace.performance.comparisons if trace.performance else ())
            if item.provides in BASELINES and item.ci_high < task.min_speedup
        ]
        if slow:
            worst = min(slow, key=lambda item: (item.ratio, item.other))
            return AttemptRefusal(
                "speed", _too_slow(trace, worst.other, worst.ratio, worst.ci_low, worst.ci_high, task)
            )
    return None


def promotion_refusal(task: Task, traces: Sequence[Trace], reasons: Mapping[str, str]) -> AttemptRefusal | None:
    """The first workload that was not promoted.

    Args:
        task: names the workloads.
        traces: of the submission, in the promotion tier; the newest of a workload counts.
        reasons: trace id -> why it earned no promotion.
    """
    newest = {trace.workload_uuid: trace for trace in sorted(traces, key=lambda trace: trace.timestamp)}
    for item in task.workloads:
        trace = newest.get(item.uuid)
        if trace is None:
            return AttemptRefusal("promotion", f"it was not measured at {axes_key(item.axes)}.")
        refusal = _failure(trace)
        if refusal is not None:
            return refusal
        if trace.trace_id in reasons:
            return AttemptRefusal(
                "speed", f"at {axes_key(trace.axes)}: {reasons[trace.trace_id]}{_unclear(trace, task)}"
            )
    return None


def unmeasured(task: Task, traces: Collection[Trace]) -> list[str]:
    """The workloads of a task, by uuid, that none of the traces is about."""
    seen = {trace.workload_uuid for trace in traces}
    return [item.uuid for item in task.workloads if item.uuid not in seen]


def _failure(trace: Trace) -> AttemptRefusal | None:
    if trace.status == "PASSED":
        return None
    gate = trace.failure.gate if trace.failure else trace.correctness.gate if trace.correctness else None
    reason = trace.reason or trace.log.strip().splitlines()[-1]
    command = trace.failure.command if trace.failure else ""
    return AttemptRefusal(
        gate or trace.status.lower(), f"{trace.status}, verifying {axes_key(trace.axes)}: {reason}", command
    )


def _too_slow(trace: Trace, other: str, ratio: float, low: float, high: float, task: Task) -> str:
    return (
        f"at {axes_key(trace.axes)}: {ratio:.3f}x over {other} (99% interval {low:.3f} to {high:.3f}), and "
        f"{task.min_speedup:.2f}x is asked for"
    )


def _unclear(trace: Trace, task: Task) -> str:
    """What is to be said where no baseline is clearly below the bar: nothing was found out about the kernel."""
    compared = [
        one for one in (trace.performance.comparisons if trace.performance else ()) if one.provides in BASELINES
    ]
    below = [one for one in compared if one.ci_low < task.min_speedup]
    if not below or any(one.ci_high < task.min_speedup for one in below):
        return ""
    return (
        ". The interval reaches the bar, so the kernel may be fast enough: this machine was too busy to tell, or the call is "
        "too short. The same source is not judged again; a changed one is"
    )

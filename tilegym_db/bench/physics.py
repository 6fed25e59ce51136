"""Holds a measured time against what the GPU can do: its share of the speed of light, or why it cannot be true. Pure."""

from __future__ import annotations

from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.roofline import below_floor, sol_ratio, speed_of_light
from tilegym_db.records.trace import Performance
from tilegym_db.verify.verifier import Failure

__all__ = ["GATE", "judge_time"]

GATE = "physics floor"


def judge_time(
    performance: Performance, definition: Definition, solution: Solution, workload: Workload, peaks: GpuPeaks
) -> Performance | Failure:
    """The performance with ``sol_us`` and ``sol_ratio``, or a rejection where nothing could be that fast.

    A Definition without a cost has no speed of light, and its times stay as they are.

    Args:
        performance: as the interleaved timing measured it.
        definition: states the work that every implementation must do.
        solution: whose time it is.
        workload: sizes and dtypes.
        peaks: of the GPU that it was measured on.
    """
    light = speed_of_light(
        definition,
        definition.bind_axes(workload.axes),
        definition.bind_dtypes(workload.dtypes),
        peaks,
        math_mode=solution.spec.math,
    )
    if light is None:
        return performance
    impossible = below_floor(performance.latency_us, light, peaks, cold_l2=performance.cold_l2, timer=performance.timer)
    if impossible is not None:
        return Failure("REJECTED", impossible, gate=GATE)
    ratio = sol_ratio(light, performance.latency_us)
    return performance.model_copy(update={"sol_us": round(light.us, 4), "sol_ratio": round(ratio, 4)})

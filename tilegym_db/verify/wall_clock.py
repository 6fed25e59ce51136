"""Bounds a claimed latency by the supervisor's own clock. Pure: times in, an estimate and a reason out.

A worker reports device times, and a worker may lie. What it cannot change is how long the supervisor waits between asking for
calls and having their outputs, on contents that the Solution has never seen. Two estimates of one call's time come from that:

* the slope between a short and a long run, which everything constant (asking, waking up, the null kernel) drops out of;
* the long run alone, less what the same request with no call costs.

A Solution that dawdles in the short run makes the slope small, but not the second; neither can be made small by more waiting.

Other programs on the machine make both large. So on a CPU a claim is refuted only if the processor time of the worker and of
everything it started, which the kernel counts and waiting does not add to, refutes it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Elapsed", "WallRun", "judge_latency"]

GPU_FACTOR, GPU_FLOOR_US = 1.35, 4.0
"""Calls one after another, with a warm L2, may cost this much more than one alone: launch gaps between kernels."""

GPU_CONSTANT_US = 600.0
"""What a run of honest launches was seen to cost beyond the null request, whatever the number of calls, on an H200."""

CPU_FACTOR, CPU_FLOOR_US = 2.0, 60.0
"""A processor shared with others is noisier, and there are no launches to be hidden."""


class Elapsed(NamedTuple):
    """What one run took, in microseconds: by the supervisor's clock, and of processor time, all processes together."""

    wall_us: float
    processor_us: float


@dataclass(frozen=True)
class WallRun:
    """Two runs by the supervisor's clock, in microseconds: ``calls`` calls, then three times as many.

    ``null_us`` is the same request with no call, ``noise_us`` how far such requests lie apart, ``copies_us`` what the
    worker may spend on each call beside it, copying what it returned. ``processor_us`` is the processor time of one call of
    the long run on a CPU, shared out evenly over the processors that may have worked at once.
    """

    calls: int
    short_us: float
    long_us: float
    null_us: float
    noise_us: float
    copies_us: float = 0.0
    processor_us: float | None = None

    @property
    def slope_us(self) -> float:
        """One call, from the difference of the runs."""
        return (self.long_us - self.short_us) / (2 * self.calls)

    @property
    def absolute_us(self) -> float:
        """One call, from the long run less the null request."""
        return (self.long_us - self.null_us) / (3 * self.calls)


def judge_latency(latency_us: float, run: WallRun, *, on_gpu: bool) -> str | None:
    """Why the claimed latency cannot be true, or None where the supervisor's clock allows it."""
    factor, floor_us = (GPU_FACTOR, GPU_FLOOR_US) if on_gpu else (CPU_FACTOR, CPU_FLOOR_US)
    credible = factor * latency_us + floor_us + run.copies_us
    if run.processor_us is not None and run.processor_us <= credible:
        return None
    constant_us = max(run.noise_us, GPU_CONSTANT_US) if on_gpu else run.noise_us
    for estimate, slack, how in (
        (run.slope_us, run.noise_us / (2 * run.calls), "the slope between a short and a long run"),
        (run.absolute_us, constant_us / (3 * run.calls), "a run less the cost of asking"),
    ):
        if estimate > credible + slack:
            return (
                f"the timed calls took {latency_us:.4g} us by the worker's clock, but {estimate:.4g} us by the supervisor's "
                f"({how}, on contents it had not seen before)"
            )
    return None

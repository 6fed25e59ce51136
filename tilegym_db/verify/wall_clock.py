"""Bounds a claimed latency by the harness's own clock. Pure: times in, an estimate and a reason out.

A worker reports device times, and a worker may lie. What it cannot change is how long the harness waits between asking for
calls and having their outputs, on contents that the Solution has never seen. Two estimates of one call's time come from that:

* the slope between a short and a long run, which everything constant (asking, waking up, the null kernel) drops out of;
* the long run alone, less what the same request with no call costs.

A Solution that dawdles in the short run makes the slope small, but not the second; neither can be made small by more waiting.

Other programs on the machine make both large. So on a CPU a claim is refuted only if it is refuted by what the run would have
taken alone, too: the processor time of the worker and of all that it started, or the wait less the time for which something
that was ready to run did not get a processor. The kernel counts both. Sleeping adds to the second, spinning to the first.

In a virtual machine, what has a processor may still wait while the host runs something else on it. The kernel knows what the
machine lost that way, but not who waited. So it excuses nobody: where it may be why a claim looks false, nothing can be said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = ["Elapsed", "WallRun", "alone_us", "host_may_be_why", "judge_latency"]

GPU_FACTOR, GPU_FLOOR_US = 1.35, 4.0
"""Calls one after another, with a warm L2, may cost this much more than one alone: launch gaps between kernels."""

GPU_CONSTANT_US = 600.0
"""What a run of honest launches was seen to cost beyond the null request, whatever the number of calls, on an H200."""

CPU_FACTOR, CPU_FLOOR_US = 2.0, 60.0
"""A processor shared with others is noisier, and there are no launches to be hidden."""


class Elapsed(NamedTuple):
    """What one run took, in microseconds.

    ``wall_us`` by the harness's clock, ``processor_us`` of processor time, all processes together, and ``queued_us`` for
    which their threads, and the harness's, were ready to run and got no processor. ``stolen_us`` is how long the host of a
    virtual machine ran something else on that of its processors which lost most.
    """

    wall_us: float
    processor_us: float
    queued_us: float
    stolen_us: float = 0.0

    @property
    def unstolen(self) -> Elapsed:
        """The same run with what the host took counted as time in a queue."""
        return self._replace(queued_us=self.queued_us + self.stolen_us)


@dataclass(frozen=True)
class WallRun:
    """Two runs by the harness's clock, in microseconds: ``calls`` calls, then three times as many.

    ``null_us`` is the same request with no call, ``noise_us`` how far such requests lie apart, ``copies_us`` what the
    worker may spend on each call beside it, copying what it returned. On a CPU, ``alone_us`` is the least that one call of
    the long run can have taken had the machine been idle, and ``unstolen_us`` the same had its host been idle, too.
    """

    calls: int
    short_us: float
    long_us: float
    null_us: float
    noise_us: float
    copies_us: float = 0.0
    alone_us: float | None = None
    unstolen_us: float | None = None

    @property
    def slope_us(self) -> float:
        """One call, from the difference of the runs."""
        return (self.long_us - self.short_us) / (2 * self.calls)

    @property
    def absolute_us(self) -> float:
        """One call, from the long run less the null request."""
        return (self.long_us - self.null_us) / (3 * self.calls)


def alone_us(run: Elapsed, null_us: float, calls: int, processors: int) -> float:
    """The least that one call of a run on a CPU can have taken if nothing else had kept its threads waiting.

    Args:
        run: all calls together.
        null_us: the same request with no call.
        calls: how many.
        processors: how many may have worked on one call at once.
    """
    return max(run.processor_us / processors, run.wall_us - run.queued_us - null_us) / calls


def host_may_be_why(latency_us: float, run: WallRun) -> bool:
    """True where a run on a CPU refutes a claim only if the host of this virtual machine did not slow it down."""
    return judge_latency(latency_us, replace(run, alone_us=run.unstolen_us), on_gpu=False) is None


def judge_latency(latency_us: float, run: WallRun, *, on_gpu: bool) -> str | None:
    """Why the claimed latency cannot be true, or None where the harness's clock allows it."""
    factor, floor_us = (GPU_FACTOR, GPU_FLOOR_US) if on_gpu else (CPU_FACTOR, CPU_FLOOR_US)
    credible = factor * latency_us + floor_us + run.copies_us
    if run.alone_us is not None and run.alone_us <= credible:
        return None
    constant_us = max(run.noise_us, GPU_CONSTANT_US) if on_gpu else run.noise_us
    for estimate, slack, how in (
        (run.slope_us, run.noise_us / (2 * run.calls), "the slope between a short and a long run"),
        (run.absolute_us, constant_us / (3 * run.calls), "a run less the cost of asking"),
    ):
        if estimate > credible + slack:
            return (
                f"the timed calls took {latency_us:.4g} us by the worker's clock, but {estimate:.4g} us by the harness's "
                f"({how}, on contents it had not seen before)"
            )
    return None

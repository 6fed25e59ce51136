"""Whether the two clocks of a promotion agree: CUDA events, which decide, and CUPTI, which listens. Pure.

Events enclose the launch as well, so that a call of one kernel takes them as much longer as an empty kernel takes at all: 3 to
4 us, by the host (``docs/decisions/timing.md``, 0022). Nothing is compared where a call launches several kernels, since
events count the gaps between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilegym_db.records import Trace
from tilegym_db.records.peaks import GpuPeaks

__all__ = ["TwoClocks", "cross_check"]

AGREE_US, AGREE_SHARE = 2.0, 0.05
"""They agree within the larger of both: CUPTI sees two calls of each Solution, at the clocks of that moment."""
ENOUGH = 10
"""Fewer calls say nothing of a clock."""
SUSPECT_SHARE = 0.2
"""Where a larger share disagrees, a clock is wrong; single calls that do are of kernels whose time varies."""


@dataclass(frozen=True)
class TwoClocks:
    """How many calls of one kernel were timed by both clocks, and on how many of them both agree."""

    compared: int
    agree: int
    launch_us: float

    @property
    def problem(self) -> str | None:
        """Why the times of the run are not to be trusted, or None."""
        if self.compared < ENOUGH or self.compared - self.agree <= SUSPECT_SHARE * self.compared:
            return None
        return (
            f"CUDA events and CUPTI agree on {self.agree} of {self.compared} calls of one kernel only (within {AGREE_US:g} us or "
            f"{AGREE_SHARE:.0%}, less the {self.launch_us:.3g} us that an empty kernel takes): what these times say is "
            "uncertain. Repeat the run on a quiet machine, after tilegym-db calibrate"
        )


def cross_check(traces: Iterable[Trace], peaks: GpuPeaks) -> TwoClocks:
    """Hold the events' time of every promoted call of one kernel against CUPTI's.

    Args:
        traces: of one run.
        peaks: of the device that they were measured on; its launch must have been timed by the same clock.
    """
    compared = agree = 0
    for trace in traces:
        measured, audit = trace.performance, trace.audit
        if trace.status != "PASSED" or measured is None or audit is None or measured.timer != peaks.timer:
            continue
        if audit.profiled_us is None or len(audit.kernels) != 1:
            continue
        compared += 1
        difference_us = measured.latency_us - peaks.launch_us.value - audit.profiled_us
        agree += abs(difference_us) <= max(AGREE_US, AGREE_SHARE * measured.latency_us)
    return TwoClocks(compared, agree, peaks.launch_us.value)

"""Whether a new version of a Solution is slower than the old one, from rounds in which both were timed. Pure.

A control, one and the same source entered twice, is timed in the same rounds. Its two times should agree: how much they
scatter is what a difference must exceed, and where they differ by more than a little, nothing of the session counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tilegym_db.bench.machine import Machine
from tilegym_db.bench.statistics import Interval, median, paired_ratio, verdict_of
from tilegym_db.records.hardware import CPU

__all__ = [
    "FINDINGS",
    "Bars",
    "Change",
    "Control",
    "RegressionReport",
    "RegressionRow",
    "RowVerdict",
    "bars_for",
    "compare_control",
    "compare_versions",
    "voiding",
]

ChangeVerdict = Literal["regression", "improvement", "same"]
RowVerdict = Literal[ChangeVerdict, "broken", "unchanged", "not comparable"]
FINDINGS: tuple[RowVerdict, ...] = ("regression", "broken")
"""What is a reason to stop."""


@dataclass(frozen=True)
class Bars:
    """What counts. Shares have no unit.

    ``threshold``: a smaller change is none. ``control_mads``: nor is one within so many median absolute deviations of the
    control's ratios. ``floor_us``: nor is one of fewer microseconds. ``control_shift``: a control that differs from itself
    by more voids the session.
    """

    threshold: float = 0.03
    control_mads: float = 3.0
    floor_us: float = 0.5
    control_shift: float = 0.02


# Processes on one CPU differ by some percent for good: where their memory lies, which core they are on.
_BARS = {CPU: Bars(threshold=0.1, control_shift=0.1)}


def bars_for(gpu: str) -> Bars:
    """The bars for a device, by its slug."""
    return _BARS.get(gpu, Bars())


@dataclass(frozen=True)
class Control:
    """How one source compares with itself: its ratio (1 in a perfect world), the scatter of it, and microseconds apart."""

    ratio: Interval
    mad: float
    apart_us: float

    @property
    def shift(self) -> float:
        """By how much one of the two was slower; no unit."""
        return max(self.ratio.median, 1 / self.ratio.median) - 1


@dataclass(frozen=True)
class Change:
    """What became of a Solution. ``change`` is the share by which it takes longer now (below 0: less)."""

    verdict: ChangeVerdict
    old_us: float
    new_us: float
    change: float
    threshold: float
    reason: str


@dataclass(frozen=True)
class RegressionRow:
    """One Solution on one Workload, or on none where its versions were not timed.

    ``broken``: the old version passes here and the new one does not. ``commit``: where the old one is from.
    """

    solution: str
    verdict: RowVerdict
    reason: str
    definition: str = ""
    workload: str = ""
    commit: str = ""
    change: Change | None = None


@dataclass
class RegressionReport:
    """What ``against`` and today's versions came to. Where ``void`` says why, no time in it can be believed."""

    against: str
    machine: Machine
    rows: list[RegressionRow] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was lost on the way, where several devices measured."""

    @property
    def findings(self) -> list[RegressionRow]:
        """The rows that are a reason to stop: what fails now, and, where times can be believed, what takes longer."""
        counted = ("broken",) if self.void else FINDINGS
        return [row for row in self.rows if row.verdict in counted]


def compare_control(one: Sequence[float], other: Sequence[float]) -> Control:
    """A control from the block medians, in microseconds, of its two candidates in the same rounds."""
    logs = [math.log(b / a) for a, b in zip(one, other, strict=True)]
    middle = median(logs)
    mad = median([abs(value - middle) for value in logs])
    return Control(paired_ratio(one, other), mad, abs(median(one) - median(other)))


def voiding(control: Control, bars: Bars) -> str | None:
    """Why a control says that this session cannot be believed, or None."""
    if control.shift <= bars.control_shift or control.apart_us <= bars.floor_us:
        return None
    return (
        f"took {control.shift:.1%} longer the one time than the other ({control.apart_us:.3g} us), "
        f"where at most {bars.control_shift:.0%} is allowed"
    )


def compare_versions(old: Sequence[float], new: Sequence[float], control: Control, bars: Bars) -> Change:
    """Decide on one Solution and one Workload.

    Args:
        old: block medians of the old version, one a round, microseconds.
        new: of the new version, in the same rounds.
        control: of the same rounds.
        bars: what counts.
    """
    ratio = paired_ratio(new, old)
    old_us, new_us = median(old), median(new)
    change = 1 / ratio.median - 1
    size = max(ratio.median, 1 / ratio.median) - 1
    threshold = max(bars.threshold, bars.control_mads * control.mad)
    proved = verdict_of(ratio)
    verdict: ChangeVerdict = "same"
    if size <= threshold:
        reason = f"{size:.1%} is not above {threshold:.1%}, the noise of this session"
    elif abs(new_us - old_us) <= bars.floor_us:
        reason = f"{abs(new_us - old_us):.2g} us is not above {bars.floor_us} us"
    elif proved == "tie":
        reason = "the rounds do not agree on which is faster"
    else:
        verdict = "regression" if proved == "slower" else "improvement"
        reason = f"{size:.1%} is above {threshold:.1%}, and the rounds agree"
    return Change(verdict, old_us, new_us, change, threshold, reason)

"""Medians with exact confidence intervals, and ratios from interleaved rounds. Pure Python, no distribution assumed.

The interval of a median comes from order statistics: with n samples, the k-th smallest and k-th largest enclose the median
with probability 1 - 2 P(Binomial(n, 1/2) < k). Unlike a bootstrap it needs no random numbers and is exact for any
distribution (``docs/decisions/timing.md``, 0002).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

__all__ = ["Interval", "Verdict", "median", "median_interval", "paired_ratio", "verdict_of"]

Verdict = Literal["faster", "slower", "tie"]

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Interval:
    """A median with the bounds of its confidence interval, in the samples' own unit."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval relative to the median; no unit."""
        return (self.high - self.low) / (2 * self.median) if self.median else math.inf


def median(samples: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@lru_cache(maxsize=4096)
def _rank(count: int) -> int:
    """How many samples may be left out on each side at :data:`CONFIDENCE`; 0 keeps the extremes."""
    total = 0.0
    for k in range(count // 2 + 1):
        total += math.comb(count, k) * 0.5**count if count < 1000 else 0.0
        if count >= 1000:
            break
        if 2 * total > 1 - CONFIDENCE:
            return max(k - 1, 0)
    # The normal approximation of the binomial; exact enough from a thousand samples on.
    return max(int(count / 2 - 2.5758 * math.sqrt(count) / 2) - 1, 0)


def median_interval(samples: Sequence[float]) -> Interval:
    """The median with its 99% interval; with fewer than eight samples the interval is their whole range.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("a median needs at least one sample")
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return Interval(median(ordered), ordered[rank], ordered[-1 - rank])


def paired_ratio(this: Sequence[float], other: Sequence[float]) -> Interval:
    """``other / this`` over interleaved rounds (above 1: ``this`` is faster), with its 99% interval.

    Args:
        this: one time per round.
        other: the other's time in the same rounds; pairing cancels drift that both see.
    """
    logs = median_interval([math.log(b / a) for a, b in zip(this, other, strict=True)])
    return Interval(math.exp(logs.median), math.exp(logs.low), math.exp(logs.high))


def verdict_of(ratio: Interval, noise: float = 0.0) -> Verdict:
    """What a ratio of times proves: ``faster`` or ``slower`` where the whole interval is beyond the noise, else a ``tie``.

    Args:
        ratio: ``other / this`` with its interval, as :func:`paired_ratio` gives it; above 1, this is faster.
        noise: relative differences up to this count for nothing, however sure they are: what pairing does not cancel
            (0.02 where a kernel replaces stock code, more in a session whose control kernels moved).

    A tie is no draw of lots: whoever held the place before keeps it. The verdict of the reversed ratio is the reverse.
    """
    if noise < 0:
        raise ValueError(f"noise is a relative difference >= 0, not {noise}")
    if ratio.low > 1 + noise:
        return "faster"
    return "slower" if ratio.high < 1 / (1 + noise) else "tie"

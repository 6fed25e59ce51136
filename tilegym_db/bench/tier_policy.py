"""How much a tier asks of a Solution before it says PASSED."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilegym_db.records import Solution
from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL, Tier
from tilegym_db.verify.shapes import MAX_ROWS

__all__ = ["INTERPRETER", "MIN_SANDBOX_LEVEL", "PROMOTION", "SCREEN", "UNTIMED", "TierPolicy"]

MIN_SANDBOX_LEVEL = PUBLISHED_SANDBOX_LEVEL
"""Below this, a Solution could have reached what judges it; a promotion needs at least this level."""


@dataclass(frozen=True)
class TierPolicy:
    """The checks of one tier.

    ``fuzz_cases``: shapes, layouts and contents beyond the workload's own. ``baseline_fuzz_cases``: the same for what is never
    resolved to, so that its fuzz cases serve nobody; a few show that it is honest, and compiled stock code is compiled anew for
    each. ``fuzz_rows``: of the largest tensor of such a case. ``calls``: on the same inputs, whose bytes must agree. ``audited``:
    ownership of the device time, and the harness's own clock over contents never seen before. ``in_turn``: each fuzz case is
    followed by another call of its shape, with other ranges and scalars, and then by the first again. ``draws``: how many of each
    case are judged together, of operators that draw at random.
    """

    tier: Tier
    fuzz_cases: int
    baseline_fuzz_cases: int
    calls: int
    audited: bool
    fuzz_rows: int = MAX_ROWS
    in_turn: bool = False
    draws: int = 1024

    def fuzz_cases_of(self, solution: Solution) -> int:
        """How many cases a Solution is fuzzed with."""
        return self.fuzz_cases if solution.spec.role == "kernel" else self.baseline_fuzz_cases


# An interpreted program takes a hundredth of a second, and one is started for every few rows: enough of them for two tiles.
INTERPRETER = TierPolicy(
    "interpreter", fuzz_cases=4, baseline_fuzz_cases=4, calls=2, audited=False, fuzz_rows=160, draws=64
)
SCREEN = TierPolicy("screen", fuzz_cases=4, baseline_fuzz_cases=2, calls=2, audited=False)
UNTIMED = replace(SCREEN, tier="untimed")
"""What omits an output is verified as in a screen, and not timed: no other Solution's time is comparable with its own."""

PROMOTION = TierPolicy(
    "promotion", fuzz_cases=24, baseline_fuzz_cases=4, calls=5, audited=True, in_turn=True, draws=16384
)

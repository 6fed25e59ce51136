"""The words and bars of verdicts, which the SQL of the store shares with the records. Loads no record class."""

from __future__ import annotations

from typing import Literal

Status = Literal[
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_DTYPE",
    "INCORRECT_NUMERICAL",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
    "UNSUPPORTED",
    "REJECTED",
    "OVERRULED",
]
STATUSES: tuple[str, ...] = Status.__args__  # type: ignore[attr-defined]
Tier = Literal["interpreter", "untimed", "screen", "promotion"]
UNTIMED_TIERS: tuple[Tier, ...] = ("interpreter", "untimed")
"""Tiers without a time: the interpreter, Solutions that omit an output, and what a person overruled."""

VERIFIED_TIERS: tuple[str, ...] = ("promotion",)
"""Tiers whose passes count as verified. Never ``interpreter``: it runs no GPU code."""

MACHINE_SLOW = "the machine became slower while this was measured"
"""Begin of the reason of an UNSUPPORTED trace that says nothing about its source: the same command may measure it later."""

REPEATABLE_GATES = ("wall clock", "physics floor", "scan")
"""Gates of REJECTED traces that do not say that a number was wrong. A busy machine, false peaks or a rule of the scan may be
the cause, so a later pass counts again."""

PUBLISHED_SANDBOX_LEVEL = 2
"""Minimum sandbox level of a pass that may leave its machine: a less confined worker could have changed its verifier."""

MIN_SPEEDUP = 1.10
"""Minimum speedup for an award: lower end of the interval over the best baseline of the same rounds."""


def is_wrong(status: str, gate: str | None) -> bool:
    """Return True if a verdict says that a number was wrong, or that the source cheated: no pass outweighs it."""
    return status.startswith("INCORRECT_") or (status == "REJECTED" and gate not in REPEATABLE_GATES)

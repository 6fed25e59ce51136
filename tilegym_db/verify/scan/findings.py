"""What the static scan says: how bad it is, which rule says so, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Rule", "Severity"]


class Severity(StrEnum):
    """``hard`` refuses the Solution; ``soft`` is noted with its traces and forces the promotion tier."""

    HARD = "hard"
    SOFT = "soft"


@dataclass(frozen=True)
class Rule:
    """One rule. ``instead`` completes every finding: what its author can do about it."""

    name: str
    severity: Severity
    catches: str
    why: str
    instead: str


@dataclass(frozen=True)
class Finding:
    """One place in a source that a rule names. ``line`` counts from 1, ``column`` from 0; 0 and 0 mean the whole file."""

    path: str
    line: int
    column: int
    rule: str
    severity: Severity
    message: str

    def __str__(self) -> str:
        """One line, as compilers write it."""
        return f"{self.path}:{self.line}: {self.severity}: {self.rule}: {self.message}"

"""What a call site did: counts per key, and the kernels that had to be put in quarantine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilegym_db.records import axes_key

__all__ = ["DispatchReport", "KernelFailure", "KeyReport"]


@dataclass(frozen=True)
class KernelFailure:
    """A kernel that could not be loaded, or raised, for one key; stock code serves that key since."""

    definition: str
    solution: str
    axes: Mapping[str, int]
    traceback: str

    @property
    def summary(self) -> str:
        """One line: which kernel, where, and the exception's own last line."""
        last = self.traceback.strip().splitlines()[-1]
        return (
            f"{self.solution} failed for {self.definition} at {axes_key(dict(self.axes))} and is in quarantine: {last}"
        )


@dataclass(frozen=True)
class KeyReport:
    """One kind of call (shapes, dtypes, strides, device) that was seen, and what serves it; no solution means stock.

    Where calls grow, one report stands for a span of sizes; its axes are those of the call that was decided.
    """

    axes: Mapping[str, int]
    solution: str | None
    reason: str
    calls: int
    kernel_calls: int


@dataclass(frozen=True)
class DispatchReport:
    """The counts of one call site. ``hits`` were served from the cache; ``kernel_calls`` ran a verified kernel."""

    definition: str
    calls: int
    hits: int
    misses: int
    capture_misses: int
    """Calls first seen while a CUDA graph was being captured; they ran stock code and were not remembered."""
    kernel_calls: int
    keys: tuple[KeyReport, ...]
    failures: tuple[KernelFailure, ...]

    @property
    def stock_calls(self) -> int:
        """Calls that were left to the stock code."""
        return self.calls - self.kernel_calls

"""The bars that measurements are held against."""

from __future__ import annotations

__all__ = ["MIN_SPEEDUP"]

MIN_SPEEDUP = 1.10
"""Over the best baseline of the same rounds, at the lower end of the interval: what earns a promotion id."""

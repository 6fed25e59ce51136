"""The names of the views that users query, read from ``views.sql``, ``imported.sql`` and ``loop.sql``: typed once, there."""

from __future__ import annotations

import functools
import re
from importlib.resources import files

__all__ = ["INTERNAL_VIEWS", "public_views"]

INTERNAL_VIEWS = frozenset({"marked_traces", "standing", "newest_passes", "newest_steps", "best_per_solution"})
"""Steps on the way to the others; they can be queried, and may change."""

_NAME = re.compile(r"^CREATE OR REPLACE VIEW (\w+)", re.MULTILINE)


@functools.cache
def public_views() -> tuple[str, ...]:
    """Every view that a query may be about, in the order in which they are made."""
    text = "".join(
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("views.sql", "imported.sql", "loop.sql")
    )
    return tuple(name for name in _NAME.findall(text) if name not in INTERNAL_VIEWS)

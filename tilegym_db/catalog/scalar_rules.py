"""What a scalar's name says of its value.

The record of an operator bounds its axes alone: a negative eps or count fits its dtype, and the results of it are NaN, or none.
"""

from __future__ import annotations

import re

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Workload

__all__ = ["check_scalar_values"]

# Pattern over the name of a scalar -> why it is not negative.
NOT_NEGATIVE: tuple[tuple[str, str], ...] = (
    (r"(^|_)eps(ilon)?$", "it keeps a divisor or a root above zero"),
    (r"^(num|block)_|^(top_k|group|groups|kept_groups|block|alignment|streams|repeat|shifts)$", "it counts something"),
)


def check_scalar_values(definition: Definition, workload: Workload) -> None:
    """Raise :class:`RecordError` for a scalar whose value its name excludes; names it, and says why."""
    for name, value in workload.scalars().items():
        why = next((reason for pattern, reason in NOT_NEGATIVE if re.search(pattern, name)), None)
        if why is not None and isinstance(value, int | float) and value < 0:
            raise RecordError(f"inputs.{name}: {value!r} is negative, and '{name}' of {definition.name} is not: {why}.")

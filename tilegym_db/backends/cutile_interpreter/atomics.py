"""Atomic updates of memory, one element after another. Their order among blocks is the grid's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilegym_db.backends.cutile_interpreter.memory import ArrayMemory
from tilegym_db.backends.cutile_interpreter.tiles import spread
from tilegym_db.errors import SolutionError

__all__ = ["compare_and_exchange", "update"]

Shape = tuple[int, ...]

_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "ADD_INT": lambda old, new: old + new,
    "ADD_FLOAT": lambda old, new: old + new,
    "MAX_SIGNED_INT": max,
    "MAX_UNSIGNED_INT": max,
    "MIN_SIGNED_INT": min,
    "MIN_UNSIGNED_INT": min,
    "BITWISE_AND": lambda old, new: old & new,
    "BITWISE_OR": lambda old, new: old | new,
    "BITWISE_XOR": lambda old, new: old ^ new,
    "EXCHANGE": lambda old, new: new,
}


def _each(memory: ArrayMemory, offset: Any, mask: Any, shape: Shape, host: Any, step: Callable[[int, Any], Any]) -> Any:
    """Apply a step, which gives the new value, to every element that counts; the old values."""
    index = spread(offset.view(np.int64), shape)
    counts = np.broadcast_to(True if mask is None else mask, shape)
    before = np.zeros(shape, host)
    flat, old = index.reshape(-1), before.reshape(-1)
    for at in np.flatnonzero(counts):
        place = int(flat[at])
        if not 0 <= place < memory.data.size:
            raise SolutionError(f"An index lies outside of the memory of {memory.name}.", code="index_outside")
        value = memory.data[place]
        old[at] = value if memory.decode is None else memory.decode(value)
        new = step(int(at), old[at])
        memory.data[place] = new if memory.encode is None else memory.encode(new)
    return before[()] if not shape else before


def update(
    memory: ArrayMemory,
    offset: Any,
    value: Any,
    mask: Any,
    shape: Shape,
    mode: str,
    rounding: Callable[[Any], Any] | None,
) -> Any:
    """Read, change and write every element; the values before."""
    values = spread(value, shape).reshape(-1)
    change = _STEPS[mode]

    def step(at: int, old: Any) -> Any:
        new = change(old, values[at])
        return new if rounding is None else rounding(new)

    return _each(memory, offset, mask, shape, values.dtype, step)


def compare_and_exchange(memory: ArrayMemory, offset: Any, expected: Any, desired: Any, mask: Any, shape: Shape) -> Any:
    """Write the desired value where the expected one stands; the values before."""
    wanted, given = spread(expected, shape).reshape(-1), spread(desired, shape).reshape(-1)
    return _each(memory, offset, mask, shape, given.dtype, lambda at, old: given[at] if old == wanted[at] else old)

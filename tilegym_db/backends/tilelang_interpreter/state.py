"""Where a chunk of thread blocks stands: which blocks and threads, which of them are active, and what is bound.

All blocks of a chunk and all their threads run in lockstep, one statement after the other. A value is an array whose last
two axes are blocks and threads; an axis along which it does not vary has length 1, and a value of everybody is a scalar. A
loop whose iterations are independent runs at once: it adds an axis in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.faults import KernelFault
from tilegym_db.backends.tilelang_interpreter.numbers import Array

__all__ = ["State", "any_active", "uniform_over_threads"]


@dataclass
class State:
    """What the statements of a kernel share while they run for one chunk of blocks."""

    blocks: int
    threads: int
    values: list[Any]
    """Of each variable, by its slot."""
    memories: list[Any]
    """Of each buffer, by its slot."""
    mask: Any = None
    """Which lanes run the current statement; None for all of them."""
    depth: int = 0
    """Axes of loops that run at once."""
    collapsed: bool = False
    """Inside of a loop of tile operations, which the threads of a block share out: what depends on a thread has no value."""
    notes: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def where(self, mask: Any) -> Iterator[None]:
        """Run what follows for fewer lanes."""
        before, self.mask = self.mask, mask
        try:
            yield
        finally:
            self.mask = before

    def narrowed(self, condition: Array) -> Any:
        """The lanes that are active and for which the condition holds."""
        return condition if self.mask is None else self.mask & condition

    def block_mask(self, what: str) -> Any:
        """The mask by block; what all threads of a block do together, they must all reach."""
        return (
            None
            if self.mask is None
            else uniform_over_threads(self.mask, None, f"{what} is reached by some threads of a block")
        )


def any_active(mask: Any) -> bool:
    """Whether a mask leaves anybody."""
    return bool(np.any(mask))


def uniform_over_threads(value: Array, mask: Any, complaint: str) -> Array:
    """A value with a thread axis of length 1, which it must have for all threads alike."""
    if np.ndim(value) == 0 or value.shape[-1] == 1:
        return value
    if mask is None or np.ndim(mask) == 0:
        first = value[..., :1]
    else:
        lanes = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, value.shape))
        at = np.argmax(lanes, axis=-1)[..., None]
        first = np.take_along_axis(np.broadcast_to(value, lanes.shape), at, axis=-1)
    differs = (value != first) & ((value == value) | (first == first))
    if mask is not None:
        differs = differs & mask
    if differs.any():
        raise KernelFault(complaint, code="threads_differ")
    return first

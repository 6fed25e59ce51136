"""Calls that a CUDA graph will repeat: the threads that make them now, and the keys of their answers.

Such a call costs the host once. So its answer may differ from that of the same call in eager code, and both are remembered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import get_ident
from typing import Any, NamedTuple

threads: dict[int, int] = {}
"""Thread -> depth of :func:`replayed` in it. A call site first looks if it is empty, which costs an eager call least."""


class Replayed(NamedTuple):
    """The key of an answer for replays; ``key`` is that of the same call in eager code."""

    key: Any


@contextlib.contextmanager
def replayed() -> Iterator[None]:
    """Make all call sites answer for replays, in this thread inside a ``with`` block."""
    here = get_ident()
    threads[here] = threads.get(here, 0) + 1
    try:
        yield
    finally:
        threads[here] -= 1
        if not threads[here]:
            del threads[here]


def is_replayed() -> bool:
    """Return True if this thread makes calls that will be replayed."""
    return bool(threads) and get_ident() in threads


def key_here(key: Any) -> Any:
    """Return the key of an answer in this thread, from that in eager code."""
    return Replayed(key) if get_ident() in threads else key

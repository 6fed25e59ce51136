"""Verdicts of a machine that tests share with whatever its host runs."""

from __future__ import annotations

from collections.abc import Callable

from tilegym_db.records import Trace

MACHINE_SLOW = "the machine became slower"
TRIES = 4


def is_conclusive(trace: Trace) -> bool:
    """False where the machine was too slow to tell a false claim from a true one, which says so and proves nothing."""
    return not (trace.status == "UNSUPPORTED" and MACHINE_SLOW in trace.reason)


def conclusive(promote: Callable[[], Trace]) -> Trace:
    """The verdict, asked for again as one that is not conclusive advises; the last one where all are like that."""
    trace = promote()
    for _ in range(TRIES - 1):
        if is_conclusive(trace):
            break
        trace = promote()
    return trace

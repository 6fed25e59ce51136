"""Verdicts of a machine that tests share with whatever its host runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tilegym_db.records import Trace

T = TypeVar("T")
MACHINE_SLOW = "the machine became slower"
TRIES = 4


def is_conclusive(trace: Trace) -> bool:
    """Return False if the machine was too slow to judge a claim. Such a verdict says so and proves nothing."""
    return not (trace.status == "UNSUPPORTED" and MACHINE_SLOW in trace.reason)


def conclusive(verify: Callable[[], T], trace_of: Callable[[T], Trace] = lambda outcome: outcome) -> T:
    """Return what ``verify`` gives, repeated as an inconclusive verdict advises; the last one if all are inconclusive."""
    for _ in range(TRIES):
        outcome = verify()
        if is_conclusive(trace_of(outcome)):
            break
    return outcome

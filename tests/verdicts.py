"""Verdicts of a machine that tests share with whatever its host runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tilegym_db.records import Trace

T = TypeVar("T")
MACHINE_SLOW = "the machine became slower"
TRIES = 4


def is_conclusive(trace: Trace) -> bool:
    """False where the machine was too slow to tell a false claim from a true one, which says so and proves nothing."""
    return not (trace.status == "UNSUPPORTED" and MACHINE_SLOW in trace.reason)


def conclusive(verify: Callable[[], T], trace_of: Callable[[T], Trace] = lambda outcome: outcome) -> T:
    """What ``verify`` gives, asked for again as a verdict that is not conclusive advises; the last where all are like that."""
    for _ in range(TRIES):
        outcome = verify()
        if is_conclusive(trace_of(outcome)):
            break
    return outcome

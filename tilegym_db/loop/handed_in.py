"""The attempts at a task that the journal holds, whichever command they were handed in by, and what experiments discarded."""

from __future__ import annotations

from pathlib import Path

from tilegym_db.records.loop import Attempt, Experiment, Task
from tilegym_db.store.loop_journals import journaled, latest

__all__ = ["attempts_at", "discarded", "last_attempt", "verdicts"]


def attempts_at(task: Task, home: Path) -> list[Attempt]:
    """Each as far as it came, in the order in which they were received."""
    return [one for (owner, _), one in latest(journaled(Attempt, home)).items() if owner == task.id]


def last_attempt(task: Task, home: Path) -> Attempt | None:
    """The one that was promoted, else the newest."""
    return max(attempts_at(task, home), key=lambda one: (one.verdict == "promoted", one.number), default=None)


def verdicts(task: Task, home: Path) -> set[tuple[int, str]]:
    """(number, verdict) of the attempts that are judged to the end."""
    return {(one.number, one.verdict) for one in attempts_at(task, home) if one.verdict != "pending"}


def discarded(gpu: str, home: Path) -> set[str]:
    """Digests of the kernels that the newest experiment with them on a GPU discarded. Those that ``task submit`` added are in
    the catalog still; a trial of another kernel is not about them."""
    decided: dict[str, str] = {}
    for one in journaled(Experiment, home):
        if one.gpu == gpu:
            decided |= dict.fromkeys(one.changed.values(), one.decision)
    return {digest for digest, decision in decided.items() if decision == "discard"}

"""The attempts at a task that the journal holds, whichever command they were handed in by."""

from __future__ import annotations

from pathlib import Path

from tilegym_db.records.loop import Attempt, Task
from tilegym_db.store.loop_journals import journaled, latest

__all__ = ["attempts_at", "last_attempt", "verdicts"]


def attempts_at(task: Task, home: Path) -> list[Attempt]:
    """Each as far as it came, in the order in which they were received."""
    return [one for (owner, _), one in latest(journaled(Attempt, home)).items() if owner == task.id]


def last_attempt(task: Task, home: Path) -> Attempt | None:
    """The one that was promoted, else the newest."""
    return max(attempts_at(task, home), key=lambda one: (one.verdict == "promoted", one.number), default=None)


def verdicts(task: Task, home: Path) -> set[tuple[int, str]]:
    """(number, verdict) of the attempts that are judged to the end."""
    return {(one.number, one.verdict) for one in attempts_at(task, home) if one.verdict != "pending"}

"""Report the state of tasks and attempts as table rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilegym_db.paths import home as default_home
from tilegym_db.records.loop import Attempt, Experiment, Task
from tilegym_db.store.connection import open_store
from tilegym_db.store.loop import journaled, latest, task_rows

SHOWN = ("id", "definition", "language", "gpu", "objective", "workloads", "attempts", "status")


def tasks_table(home: Path | None = None) -> list[dict[str, Any]]:
    """Return one row per task, oldest first."""
    with open_store(home, read_only=True) as store:
        return [{name: row[name] for name in SHOWN} for row in task_rows(store)]


def attempts_of(task: Task, home: Path | None = None) -> list[dict[str, Any]]:
    """Return one row per attempt at a task, with the steps passed and the reason for the refusal."""
    own = sorted(attempts_at(task, home or default_home()), key=lambda one: one.number)
    return [
        {
            "attempt": one.number,
            "solution": one.solution,
            "passed": one.stage,
            "verdict": one.verdict,
            "gate": one.gate,
            "reason": one.reason or ", ".join(one.promotions),
            "wall_s": one.wall_s,
            "device_s": one.device_s,
        }
        for one in own
    ]


# ---- Attempts -------------------------------------------------------------------------------------------


def attempts_at(task: Task, home: Path) -> list[Attempt]:
    """Return the newest state of each attempt at a task, in the order received."""
    return [one for (owner, _), one in latest(journaled(Attempt, home)).items() if owner == task.id]


def last_attempt(task: Task, home: Path) -> Attempt | None:
    """Return the attempt with an award, else the newest."""
    return max(attempts_at(task, home), key=lambda one: (one.verdict == "promoted", one.number), default=None)


def verdicts(task: Task, home: Path) -> set[tuple[int, str]]:
    """Return (number, verdict) of the attempts with a final verdict."""
    return {(one.number, one.verdict) for one in attempts_at(task, home) if one.verdict != "pending"}


def discarded(gpu: str, home: Path) -> set[str]:
    """Return the digests of kernels that their newest experiment on a GPU discarded.

    Those that ``task submit`` added are still in the catalog, but the trial of another kernel must not publish them.
    """
    decided: dict[str, str] = {}
    for one in journaled(Experiment, home):
        if one.gpu == gpu:
            decided |= dict.fromkeys(one.changed.values(), one.decision)
    return {digest for digest, decision in decided.items() if decision == "discard"}

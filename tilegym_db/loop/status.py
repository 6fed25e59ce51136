"""What became of tasks, as rows for people and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilegym_db.loop.handed_in import attempts_at
from tilegym_db.paths import home as default_home
from tilegym_db.records.loop import Task
from tilegym_db.store.connection import open_store
from tilegym_db.store.loop_queries import task_rows

__all__ = ["attempts_of", "tasks_table"]

SHOWN = ("id", "definition", "language", "gpu", "objective", "workloads", "attempts", "status")


def tasks_table(home: Path | None = None) -> list[dict[str, Any]]:
    """One row per task, in the order in which they were made."""
    with open_store(home, read_only=True) as store:
        return [{name: row[name] for name in SHOWN} for row in task_rows(store)]


def attempts_of(task: Task, home: Path | None = None) -> list[dict[str, Any]]:
    """One row per attempt at a task, with how far it came and why no further."""
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

"""What an experiment of the loop ended with, and its record."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from tilegym_db.loop.model_state import ModelState
from tilegym_db.records.loop import Attempt, Coverage, Experiment, Task, identified
from tilegym_db.records.model_run import ModelRun

__all__ = ["Outcome", "unpromoted"]


@dataclass(frozen=True)
class Outcome:
    """What an experiment ended with."""

    decision: str
    reason: str
    after: Coverage | None = None
    run: ModelRun | None = None
    changed: dict[str, str] = field(default_factory=dict)

    def experiment(self, state: ModelState, task: Task, before: Coverage, base: str, seconds: float) -> Experiment:
        """The record of it, for the journal."""
        now = datetime.now(UTC)
        run = self.run
        content = {
            "id": identified({"task": task.id, "base": base, "at": now.isoformat()}),
            "model": state.tag,
            "config_digest": state.digest,
            "gpu": state.machine.gpu,
            "base": base,
            "definition": task.definition,
            "task": task.id,
            "changed": self.changed,
            "before": before.model_dump(),
            "after": None if self.after is None else self.after.model_dump(),
            "runs": () if run is None else (run.run_id,),
            "total_speedup": None if run is None else run.total_speedup.median,
            "total_ci_low": None if run is None else run.total_speedup.ci_low,
            "decision": self.decision,
            "reason": self.reason[:4000],
            "seconds": round(seconds, 3),
            "timestamp": now,
        }
        return Experiment.model_validate(content)


def unpromoted(attempt: Attempt | None, problem: str) -> Outcome:
    """The outcome where no kernel was promoted: the last attempt, if any, and what the author's last problem was."""
    if problem == "timeout":
        return Outcome("timeout", "the budget ran out before the author was done")
    if attempt is None:
        return Outcome("crash", problem or "the author handed nothing in")
    gate = f"{attempt.gate}: " if attempt.gate else ""
    return Outcome("discard", f"attempt {attempt.number} of {attempt.task} was not promoted: {gate}{attempt.reason}")

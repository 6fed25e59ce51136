"""One Workload on its way from contents to traces, and the runners of one Definition that take part in it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from tilegym_db.bench.contents import ExpectedCache, WorkloadContents
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.runner import Runner
from tilegym_db.bench.verification import Verified
from tilegym_db.records import Workload
from tilegym_db.verify.verifier import Failure

__all__ = ["SolutionGroup", "WorkloadRun"]


@dataclass
class WorkloadRun:
    """One workload on its way through a batch: who takes part, what they are fed with, and how each was verified."""

    plan: DefinitionPlan
    workload: Workload
    runners: list[Runner]
    cache: ExpectedCache
    contents: Future[WorkloadContents | Failure] | None = None
    outcomes: dict[str, tuple[Verified | Failure, int]] = field(default_factory=dict)
    """Runner name -> its outcome, and the level at which its worker was confined."""

    @property
    def lacked_memory(self) -> bool:
        """True where the GPU had no memory left for one of them while others were verified beside it."""
        return any(isinstance(outcome, Failure) and outcome.no_memory for outcome, _ in self.outcomes.values())

    def __str__(self) -> str:
        return f"{self.plan.definition.name} {' '.join(f'{k}={v}' for k, v in self.workload.axes.items())}"


@dataclass
class SolutionGroup:
    """Everyone who is measured for one Definition, and the oracle's answers that they share."""

    plan: DefinitionPlan
    cache: ExpectedCache
    runners: list[Runner] = field(default_factory=list)

    def workload_run(self, workload: Workload) -> WorkloadRun:
        """Those of them that are planned for a workload."""
        takes_part = self.plan.takes_part
        runners = [runner for runner in self.runners if takes_part(runner.solution, workload, runner.config)]
        return WorkloadRun(self.plan, workload, runners, self.cache)

    def rest(self) -> None:
        """After a batch. Every workload may have a config of its own: the workers of those must not pile up."""
        self.cache.clear()
        for runner in self.runners:
            if runner.config:
                runner.handle.close()

    def close_workers(self) -> None:
        """End every worker, so that the device has all of its memory; the next that is needed starts again."""
        self.cache.clear()
        for runner in self.runners:
            runner.handle.close()

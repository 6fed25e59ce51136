"""Runs one Definition's plan on this machine: verify members side by side, time them one at a time, emit traces."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.member import ExpectedCache, Limits, Member, Verified
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.tournament import Effort, Entrant, run_tournament
from tilegym_db.bench.tracing import RunContext, envelope_of
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Trace, Workload
from tilegym_db.records.trace import Performance, Tier
from tilegym_db.verify.verifier import Failure

__all__ = ["LocalExecutor"]

Emit = Callable[[Trace], None]
Starting = Callable[[str], None]

CPU_ARENA_BYTES = 256 << 20


@dataclass
class LocalExecutor:
    """One device of this machine.

    Args:
        context: run id, machine and secret seed.
        folder: scratch folder of the run; workers get folders of their own below it.
        effort: how long to time.
        emit: called with every trace the moment it exists.
        starting: called with a short description of what is about to happen.
    """

    context: RunContext
    folder: Path
    effort: Effort
    emit: Emit
    starting: Starting = field(default=lambda what: None)

    def run(self, plan: DefinitionPlan) -> None:
        """Everything one Definition's plan asks for. Workers end with it, whatever happens."""
        machine = self.context.machine
        cache = ExpectedCache(plan.definition, machine.device)
        with ExitStack() as stack:
            members: dict[str, Member] = {}
            for solution in (*plan.timed, *plan.interpreted):
                if any(plan.takes_part(solution, workload) for workload in plan.workloads):
                    member = self._member(plan, solution)
                    stack.callback(member.close)
                    member.start()
                    members[solution.name] = member
            for workload in plan.workloads:
                taking_part = [member for member in members.values() if plan.takes_part(member.solution, workload)]
                if taking_part:
                    self._run_workload(plan, workload, taking_part, cache)
                cache.clear()

    def _member(self, plan: DefinitionPlan, solution: SolutionFiles) -> Member:
        machine = self.context.machine
        arena_bytes = min(4 << 30, machine.memory_bytes // 32) if machine.is_gpu else CPU_ARENA_BYTES
        return Member(
            plan.definition,
            solution,
            machine.device,
            machine.sm,
            self.folder,
            interpret=solution in plan.interpreted,
            limits=Limits(arena_bytes=arena_bytes),
        )

    def _run_workload(
        self, plan: DefinitionPlan, workload: Workload, members: list[Member], cache: ExpectedCache
    ) -> None:
        self.starting(f"{plan.definition.name} {' '.join(f'{k}={v}' for k, v in workload.axes.items())}")
        entrants: list[Entrant] = []
        try:
            for member, outcome in self._verify(members, workload, plan.workloads, cache):
                if isinstance(outcome, Failure):
                    self._emit_failure(plan, member, workload, outcome)
                else:
                    entrants.append(Entrant(member, outcome))
            self._finish(plan, workload, entrants)
        finally:
            for entrant in entrants:
                entrant.member.finish(entrant.verified)

    def _verify(
        self, members: Iterable[Member], workload: Workload, anchors: list[Workload], cache: ExpectedCache
    ) -> list[tuple[Member, Verified | Failure]]:
        supported: list[Member] = []
        outcomes: list[tuple[Member, Verified | Failure]] = []
        for member in members:
            reason = member.unsupported(workload)
            if reason is None:
                supported.append(member)
            else:
                outcomes.append((member, Failure("UNSUPPORTED", reason)))
        # Members wait for compilers, each in its own worker, while the GPU work of verification interleaves; more of them at
        # once than there are cores would only run into each other's deadlines.
        with ThreadPoolExecutor(max_workers=max(1, min(len(supported), os.cpu_count() or 1))) as pool:
            seed = self.context.seed
            verified = pool.map(lambda member: member.verify(workload, anchors, seed, cache), supported)
            try:
                outcomes += list(zip(supported, verified, strict=True))
            except KeyboardInterrupt:
                for member in supported:
                    member.abort()  # or the pool would wait for a call that hangs
                raise
        return outcomes

    def _finish(self, plan: DefinitionPlan, workload: Workload, entrants: list[Entrant]) -> None:
        timed = [entrant for entrant in entrants if not entrant.member.interpret]
        for entrant in entrants:
            if entrant.member.interpret:
                self._emit_pass(plan, entrant, workload, "interpreter", None)
        if not timed:
            return
        order = random.Random(self.context.seed).randrange(1 << 62)
        with timing_lock(self.context.machine.device):
            results = run_tournament(timed, self.effort, order)
        for entrant in timed:
            result = results[entrant.member.name]
            if isinstance(result, Failure):
                self._emit_failure(plan, entrant.member, workload, result)
            else:
                self._emit_pass(plan, entrant, workload, "screen", result)

    def _emit_failure(self, plan: DefinitionPlan, member: Member, workload: Workload, failure: Failure) -> None:
        member.after_failure(failure)
        tier: Tier = "interpreter" if member.interpret else "screen"
        self.emit(self.context.failed(plan.definition, member.solution, workload, tier, failure, member.config))

    def _emit_pass(
        self, plan: DefinitionPlan, entrant: Entrant, workload: Workload, tier: Tier, performance: Performance | None
    ) -> None:
        verified = entrant.verified
        cases = [*verified.envelope, *(str(expected.case) for expected in verified.contents)]
        self.emit(
            self.context.passed(
                plan.definition,
                entrant.member.solution,
                workload,
                tier,
                verified.verdict.correctness("as_written" if plan.definition.oracle == "as_written" else "fp64"),
                performance,
                envelope_of(cases, self.context.seed),
                entrant.member.config,
            )
        )

"""Runs one Definition's plan on this machine: verify members side by side, time them one at a time, emit traces."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilegym_db.backends.inductor import uses_torch_compile
from tilegym_db.bench.audit import PROFILED_CALLS, Referee, audit_clock, audit_ownership
from tilegym_db.bench.clocks import ClockWatch
from tilegym_db.bench.contents import ExpectedCache, WorkloadContents
from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.machine import require_healthy
from tilegym_db.bench.member import Limits, Member, Verified, envelope_workers
from tilegym_db.bench.physics import judge_time
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.rigor import INTERPRETER, Rigor
from tilegym_db.bench.stage import Stage
from tilegym_db.bench.tournament import Effort, Entrant, run_tournament
from tilegym_db.bench.tracing import RunContext, envelope_of
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records import Config, Definition, Trace, Workload
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.trace import Audit, Performance
from tilegym_db.verify import scan
from tilegym_db.verify.ownership import Ownership
from tilegym_db.verify.verifier import Failure

__all__ = ["LocalExecutor"]

Emit = Callable[[Trace], None]
Starting = Callable[[str], None]
Played = Callable[[Workload, Sequence[Entrant[Member]]], None]

CPU_ARENA_BYTES = 256 << 20
CLOCK_INTERVAL_S = 0.02
"""Shorter than a round, so that each is seen while the device works: one that idles does not say that it is hot."""
CANNOT_VERIFY = (RecordError, StoreError, torch.OutOfMemoryError)
"""A workload without an oracle, or without memory for it here: that workload's trouble, not the run's."""


@dataclass
class LocalExecutor:
    """One device of this machine.

    Args:
        context: run id, machine and secret seed.
        folder: scratch folder of the run; workers get folders of their own below it.
        effort: how long to time.
        rigor: what a pass takes.
        emit: called with every trace the moment it exists.
        starting: called with a short description of what is about to happen.
        peaks: what this device can do; None where that is not known, and then no time has a speed of light or a floor.
        played: called after every tournament with its workload and entrants, whose rounds are the raw times.
    """

    context: RunContext
    folder: Path
    effort: Effort
    rigor: Rigor
    emit: Emit
    starting: Starting = field(default=lambda what: None)
    peaks: GpuPeaks | None = None
    played: Played = field(default=lambda workload, entrants: None)

    def run(self, plan: DefinitionPlan) -> None:
        """Everything one Definition's plan asks for. Workers end with it, whatever happens."""
        with ExitStack() as stack:
            referee = None
            if self.rigor.audited:
                referee = Referee(self.context.machine.device, self.folder)
                stack.callback(referee.close)
            self._run_definition(plan, referee)

    def _run_definition(self, plan: DefinitionPlan, referee: Referee | None) -> None:
        cache = ExpectedCache(plan.definition, self.context.machine.device)
        with ExitStack() as stack:
            members: list[Member] = []
            taking_part = [
                (solution, config)
                for solution in (*plan.timed, *plan.interpreted)
                for config in plan.configs_of(solution)
                if any(plan.takes_part(solution, workload, config) for workload in plan.workloads)
            ]
            on_gpu = self.context.machine.is_gpu
            busy = sum(
                solution.record.spec.role == "kernel" if on_gpu else uses_torch_compile(solution.sources.values())
                for solution, _ in taking_part
            )
            for solution, config in taking_part:
                member = self.make_member(
                    plan.definition, solution, config, interpret=solution in plan.interpreted, busy=busy
                )
                stack.callback(member.close)
                members.append(member)
                if member.broken is None and not config:
                    member.start()
            for workload in plan.workloads:
                entered = [member for member in members if plan.takes_part(member.solution, workload, member.config)]
                if entered:
                    self._run_workload(plan, workload, entered, cache, referee)
                cache.clear()
                for member in entered:
                    if member.config:
                        member.close()  # every workload may have a config of its own: their workers must not pile up

    def make_member(
        self,
        definition: Definition,
        solution: SolutionFiles,
        config: Config,
        *,
        interpret: bool = False,
        busy: int = 1,
    ) -> Member:
        """A member of this machine, not started yet; broken where the static scan refuses its source.

        Args:
            definition: what it computes.
            solution: its source.
            config: a value per tunable; empty for the source's own defaults.
            interpret: run it in the Triton interpreter.
            busy: how many members compile for long, and so share the machine's cores while they are verified.
        """
        machine = self.context.machine
        findings = scan.scan_sources(solution.record, solution.sources)
        hard = [str(finding) for finding in scan.hard_findings(findings)]
        compiles = uses_torch_compile(solution.sources.values())  # on a CPU nothing else takes long for a new shape
        return Member(
            definition,
            solution,
            machine.device,
            machine.sm,
            self.folder,
            rigor=INTERPRETER if interpret else self.rigor,
            config=config,
            interpret=interpret,
            limits=Limits(
                arena_bytes=min(4 << 30, machine.memory_bytes // 32) if machine.is_gpu else CPU_ARENA_BYTES,
                envelope_workers=envelope_workers(busy) if machine.is_gpu or compiles else 1,
            ),
            broken=Failure("REJECTED", f"the static scan: {'; '.join(hard)}", gate="scan") if hard else None,
            notes=tuple(str(finding) for finding in scan.soft_findings(findings)),
        )

    def _run_workload(
        self,
        plan: DefinitionPlan,
        workload: Workload,
        members: list[Member],
        cache: ExpectedCache,
        referee: Referee | None,
    ) -> None:
        self.starting(f"{plan.definition.name} {' '.join(f'{k}={v}' for k, v in workload.axes.items())}")
        try:
            contents = WorkloadContents.draw(plan.definition, workload, self.context.seed, cache)
        except CANNOT_VERIFY as error:
            self._fail_all(plan, workload, members, f"cannot be verified on this machine: {error}")
            return
        if not contents.sets:
            reason = "the reference itself passes no content set at this shape, so nothing can be proved"
            self._fail_all(plan, workload, members, reason)
            return
        entrants: list[Entrant[Member]] = []
        for member, outcome in self._verify(members, contents, plan.workloads, cache):
            if isinstance(outcome, Failure):
                self._emit_failure(plan, member, workload, outcome)
            else:
                entrants.append(Entrant(member, outcome))
        for entrant in entrants:
            if entrant.member.interpret:
                self._emit_pass(plan, entrant, contents, None, None)
        timed = [entrant for entrant in entrants if not entrant.member.interpret]
        if timed:
            self._time(plan, contents, timed, referee)

    def _fail_all(self, plan: DefinitionPlan, workload: Workload, members: list[Member], reason: str) -> None:
        for member in members:
            self._emit_failure(plan, member, workload, member.broken or Failure("UNSUPPORTED", reason))

    def _verify(
        self, members: Iterable[Member], contents: WorkloadContents, anchors: list[Workload], cache: ExpectedCache
    ) -> list[tuple[Member, Verified | Failure]]:
        supported: list[Member] = []
        outcomes: list[tuple[Member, Verified | Failure]] = []
        for member in members:
            reason = member.unsupported(contents.workload)
            if member.broken is not None:
                outcomes.append((member, member.broken))
            elif reason is not None:
                outcomes.append((member, Failure("UNSUPPORTED", reason)))
            else:
                supported.append(member)
        # Members wait for compilers, each in its own worker, while the GPU work of verification interleaves; more of them at
        # once than there are cores would only run into each other's deadlines.
        with ThreadPoolExecutor(max_workers=max(1, min(len(supported), os.cpu_count() or 1))) as pool:
            seed = self.context.seed
            verified = pool.map(lambda member: member.verify(contents, anchors, seed, cache), supported)
            try:
                outcomes += list(zip(supported, verified, strict=True))
            except KeyboardInterrupt:
                for member in supported:
                    member.abort()  # or the pool would wait for a call that hangs
                raise
        return outcomes

    def _time(
        self, plan: DefinitionPlan, contents: WorkloadContents, entrants: list[Entrant[Member]], referee: Referee | None
    ) -> None:
        order = random.Random(self.context.seed).randrange(1 << 62)
        try:
            stage = Stage(
                plan.definition, contents.sets, self.context.machine.device, entrants[0].member.limits.arena_bytes
            )
        except CANNOT_VERIFY as error:
            self._fail_all(
                plan, contents.workload, [entrant.member for entrant in entrants], f"cannot be timed here: {error}"
            )
            return
        try:
            for entrant in entrants:
                entrant.failure = entrant.member.enter(stage)
            device = self.context.machine.device
            with timing_lock(device), ClockWatch(device, CLOCK_INTERVAL_S) as clocks:
                results = run_tournament(entrants, stage, self.effort, order, clocks)
                self.played(contents.workload, entrants)
                for entrant in entrants:
                    self._conclude(plan, contents, stage, entrant, results[entrant.member.name], referee)
        finally:
            for entrant in entrants:
                entrant.member.leave()
            stage.close()

    def _conclude(
        self,
        plan: DefinitionPlan,
        contents: WorkloadContents,
        stage: Stage,
        entrant: Entrant[Member],
        result: Performance | Failure,
        referee: Referee | None,
    ) -> None:
        if not isinstance(result, Failure) and self.peaks is not None:
            result = judge_time(result, plan.definition, entrant.member.solution.record, contents.workload, self.peaks)
        audit: Audit | Failure | None = None
        if not isinstance(result, Failure) and referee is not None:
            audit = self._audit(entrant.member, referee, stage, contents, result)
        failure = result if isinstance(result, Failure) else audit
        if isinstance(failure, Failure):
            self._emit_failure(plan, entrant.member, contents.workload, failure)
        else:
            assert not isinstance(result, Failure)
            self._emit_pass(plan, entrant, contents, result, failure)

    def _audit(
        self,
        member: Member,
        referee: Referee,
        stage: Stage,
        contents: WorkloadContents,
        performance: Performance,
    ) -> Audit | Failure:
        """Who did the work, then whether the time can be true: the second overwrites the stage's contents."""
        owned: Ownership | None = None
        if self.context.machine.is_gpu:
            stage.fill()
            found = audit_ownership(member, stage)
            if isinstance(found, Failure):
                return found
            owned = found
        try:
            wall_us = audit_clock(member, referee, stage, contents, performance)
        except CANNOT_VERIFY as error:
            return Failure("UNSUPPORTED", f"its time cannot be checked on this machine: {error}")
        if isinstance(wall_us, Failure):
            return wall_us
        return Audit(
            wall_us=round(wall_us, 3),
            owned_share=None if owned is None else round(owned.share, 4),
            profiled_us=None if owned is None else round(owned.total_us / PROFILED_CALLS, 3),
            kernels=() if owned is None else owned.kernels,
            notes=member.notes,
        )

    def _emit_failure(self, plan: DefinitionPlan, member: Member, workload: Workload, failure: Failure) -> None:
        level = member.sandbox_level
        if member.after_failure(failure):
            require_healthy(self.context.machine)
        tier = member.rigor.tier
        self.emit(self.context.failed(plan.definition, member.solution, workload, tier, failure, member.config, level))

    def _emit_pass(
        self,
        plan: DefinitionPlan,
        entrant: Entrant[Member],
        contents: WorkloadContents,
        performance: Performance | None,
        audit: Audit | None,
    ) -> None:
        verified, member = entrant.verified, entrant.member
        cases = [*verified.envelope.passed, *(str(expected.case) for expected in contents.sets)]
        self.emit(
            self.context.passed(
                plan.definition,
                member.solution,
                contents.workload,
                member.rigor.tier,
                verified.verdict.correctness("as_written" if plan.definition.oracle == "as_written" else "fp64"),
                performance,
                envelope_of(cases, [*verified.envelope.dropped, *contents.dropped], self.context.seed),
                audit,
                member.config,
                member.sandbox_level,
            )
        )

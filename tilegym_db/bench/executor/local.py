"""Runs plans on this machine: verify members side by side, time them one workload at a time, emit traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilegym_db.bench.audit import PROFILED_CALLS, Referee, audit_clock, audit_ownership
from tilegym_db.bench.clocks import ClockWatch
from tilegym_db.bench.contents import ExpectedCache, WorkloadContents
from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.executor.heats import Room, Window, make_windows
from tilegym_db.bench.machine import require_healthy
from tilegym_db.bench.member import Limits, Member, Verified, envelope_workers
from tilegym_db.bench.physics import judge_time
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.rigor import INTERPRETER, Rigor
from tilegym_db.bench.stage import Stage, stage_bytes
from tilegym_db.bench.tournament import Effort, Entrant, run_tournament
from tilegym_db.bench.tracing import RunContext, envelope_of
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records import Config, Definition, Trace, Workload
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.trace import Audit, Performance
from tilegym_db.verify import scan
from tilegym_db.verify.ownership import Ownership
from tilegym_db.verify.sandbox.bounds import available_memory, available_processors
from tilegym_db.verify.verifier import Failure

__all__ = ["LocalExecutor"]

Emit = Callable[[Trace], None]
Starting = Callable[[str], None]
Played = Callable[[Workload, Sequence[Entrant[Member]]], None]

CLOCK_INTERVAL_S = 0.02
"""Shorter than a round, so that each is seen while the device works: one that idles does not say that it is hot."""
CANNOT_VERIFY = (RecordError, StoreError, torch.OutOfMemoryError)
"""A workload without an oracle, or without memory for it here: that workload's trouble, not the run's."""


@dataclass
class Bout:
    """One workload on its way through a heat: who takes part, what they are fed with, and how each was verified."""

    plan: DefinitionPlan
    workload: Workload
    members: list[Member]
    cache: ExpectedCache
    contents: Future[WorkloadContents | Failure] | None = None
    outcomes: dict[str, tuple[Verified | Failure, int]] = field(default_factory=dict)
    """Member name -> its outcome, and the level at which its worker was confined."""

    def __str__(self) -> str:
        return f"{self.plan.definition.name} {' '.join(f'{k}={v}' for k, v in self.workload.axes.items())}"


@dataclass
class Crew:
    """Everyone who is measured for one Definition, and the oracle's answers that they share."""

    plan: DefinitionPlan
    cache: ExpectedCache
    members: list[Member] = field(default_factory=list)

    def bout(self, workload: Workload) -> Bout:
        """Those of them that are planned for a workload."""
        takes_part = self.plan.takes_part
        members = [member for member in self.members if takes_part(member.solution, workload, member.config)]
        return Bout(self.plan, workload, members, self.cache)

    def rest(self) -> None:
        """After a heat. Every workload may have a config of its own: the workers of those must not pile up."""
        self.cache.clear()
        for member in self.members:
            if member.config:
                member.close()


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
        room: what is measured at a time; by default what this machine has room for.
    """

    context: RunContext
    folder: Path
    effort: Effort
    rigor: Rigor
    emit: Emit
    starting: Starting = field(default=lambda what: None)
    peaks: GpuPeaks | None = None
    played: Played = field(default=lambda workload, entrants: None)
    room: Room | None = None

    def run(self, plans: Sequence[DefinitionPlan]) -> None:
        """Everything that the plans ask for: window by window, and in each heat by heat. Workers end with their window."""
        room = self.room or Room.of(self.context.machine, available_memory())
        with ExitStack() as stack:
            referee = None
            if self.rigor.audited:
                referee = Referee(self.context.machine.device, self.folder)
                stack.callback(referee.close)
            for window in make_windows(plans, room):
                self._run_window(window, referee)

    def _run_window(self, window: Window, referee: Referee | None) -> None:
        entrants = [(plan, plan.entrants()) for plan in window.plans]
        busy = sum(self._compiles_for_long(solution) for _, entered in entrants for solution, _ in entered)
        with ExitStack() as stack:
            crews = {}
            for plan, entered in entrants:
                crew = Crew(plan, ExpectedCache(plan.definition, self.context.machine.device))
                crews[plan.definition.name] = crew
                for solution, config in entered:
                    interpret = solution in plan.interpreted
                    member = self.make_member(plan.definition, solution, config, interpret=interpret, busy=busy)
                    stack.callback(member.close)
                    crew.members.append(member)
            for heat in window.heats:
                self._run_heat([crews[plan.definition.name].bout(workload) for plan, workload in heat], referee)
                for crew in crews.values():
                    crew.rest()

    def _compiles_for_long(self, solution: SolutionFiles) -> bool:
        if self.context.machine.is_gpu:
            return solution.record.spec.role == "kernel"
        return solution.uses_torch_compile

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
        compiles = solution.uses_torch_compile  # on a CPU nothing else takes long for a new shape
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
                arena_bytes=stage_bytes(machine),
                envelope_workers=envelope_workers(busy) if machine.is_gpu or compiles else 1,
            ),
            broken=Failure("REJECTED", f"the static scan: {'; '.join(hard)}", gate="scan") if hard else None,
            notes=tuple(str(finding) for finding in scan.soft_findings(findings)),
        )

    def _run_heat(self, bouts: list[Bout], referee: Referee | None) -> None:
        """Verify everything side by side, then time one workload after the other while no other work is under way."""
        several = len(bouts) > 1
        if several:
            names = dict.fromkeys(bout.plan.definition.name for bout in bouts)
            self.starting(f"verifying {', '.join(names)}: {len(bouts)} workloads")
        else:
            self.starting(str(bouts[0]))
        self._verify(bouts)
        if self.context.machine.is_gpu:
            torch.cuda.empty_cache()  # what comparing took is for the workers to use
        while bouts:
            bout = bouts.pop(0)  # its contents are given back when it has been timed
            if several:
                self.starting(str(bout))
            self._conclude_verification(bout, referee)

    def _verify(self, bouts: Sequence[Bout]) -> None:
        """Every member through its workloads, in its own worker, while the GPU work of verification interleaves.

        Members wait for compilers most of the time; more of them at once than there are cores would only run into each
        other's deadlines.
        """
        tasks: dict[int, tuple[Member, list[Bout]]] = {}
        for bout in bouts:
            for member in bout.members:
                tasks.setdefault(id(member), (member, []))[1].append(bout)
        longest_first = sorted(tasks.values(), key=lambda task: _expected_length(task[0]))
        with (
            ThreadPoolExecutor(max_workers=1) as drawing,
            ThreadPoolExecutor(max_workers=max(1, min(len(tasks), available_processors()))) as verifying,
        ):
            for bout in bouts:
                bout.contents = drawing.submit(self._draw, bout)
            running = [verifying.submit(self._verify_member, member, entered) for member, entered in longest_first]
            try:
                lost = [task.result() for task in running]
            except BaseException:
                for member, _ in tasks.values():
                    member.abort()  # or the pool would wait for a call that hangs
                verifying.shutdown(wait=False, cancel_futures=True)
                drawing.shutdown(wait=False, cancel_futures=True)
                raise
        if any(lost):
            require_healthy(self.context.machine)

    def _verify_member(self, member: Member, bouts: Sequence[Bout]) -> bool:
        """The outcome of every workload into its bout; true where a worker was lost on the way."""
        lost = False
        for bout in bouts:
            outcome = self._verify_workload(member, bout)
            bout.outcomes[member.name] = outcome, member.sandbox_level
            if isinstance(outcome, Failure) and member.after_failure(outcome):
                lost = True
        return lost

    def _verify_workload(self, member: Member, bout: Bout) -> Verified | Failure:
        if member.broken is not None:
            return member.broken
        unsupported = member.unsupported(bout.workload)
        if unsupported is not None:
            return Failure("UNSUPPORTED", unsupported)
        not_loaded = member.load()  # while the contents are drawn
        if not_loaded is not None:
            return not_loaded
        assert bout.contents is not None
        contents = bout.contents.result()
        if isinstance(contents, Failure):
            return contents
        return member.verify(contents, bout.plan.workloads, self.context.seed, bout.cache)

    def _draw(self, bout: Bout) -> WorkloadContents | Failure:
        definition = bout.plan.definition
        own = ExpectedCache(definition, self.context.machine.device)  # given back with the contents
        # An exception would be kept with the memory of everything that its frames refer to.
        try:
            contents = WorkloadContents.draw(definition, bout.workload, self.context.seed, own)
        except CANNOT_VERIFY as error:
            return Failure("UNSUPPORTED", f"cannot be verified on this machine: {error}")
        if not contents.sets:
            reason = "the reference itself passes no content set at this shape, so nothing can be proved"
            return Failure("UNSUPPORTED", reason)
        return contents

    def _conclude_verification(self, bout: Bout, referee: Referee | None) -> None:
        entrants: list[Entrant[Member]] = []
        for member in bout.members:
            outcome, level = bout.outcomes[member.name]
            if isinstance(outcome, Failure):
                self._emit_failure(bout, member, outcome, level)
            else:
                is_incumbent = bout.plan.is_incumbent(member.solution, bout.workload, member.config)
                entrants.append(Entrant(member, outcome, incumbent=is_incumbent))
        if not entrants:
            return
        assert bout.contents is not None
        contents = bout.contents.result()
        assert not isinstance(contents, Failure)
        for entrant in entrants:
            if entrant.member.interpret:
                self._emit_pass(bout, entrant, contents, None, None)
        timed = [entrant for entrant in entrants if not entrant.member.interpret]
        if timed:
            self._time(bout, contents, timed, referee)

    def _time(
        self, bout: Bout, contents: WorkloadContents, entrants: list[Entrant[Member]], referee: Referee | None
    ) -> None:
        order = random.Random(self.context.seed).randrange(1 << 62)
        try:
            arena_bytes = entrants[0].member.limits.arena_bytes
            stage = Stage(bout.plan.definition, contents.sets, self.context.machine.device, arena_bytes)
        except CANNOT_VERIFY as error:
            for entrant in entrants:
                self._lose(bout, entrant.member, Failure("UNSUPPORTED", f"cannot be timed here: {error}"))
            return
        try:
            for entrant in entrants:
                entrant.failure = entrant.member.enter(stage)
            device = self.context.machine.device
            with timing_lock(device), ClockWatch(device, CLOCK_INTERVAL_S) as clocks:
                results = run_tournament(entrants, stage, self.effort, order, clocks)
                self.played(contents.workload, entrants)
                for entrant in entrants:
                    self._conclude(bout, contents, stage, entrant, results[entrant.member.name], referee)
        finally:
            for entrant in entrants:
                entrant.member.leave()
            stage.close()

    def _conclude(
        self,
        bout: Bout,
        contents: WorkloadContents,
        stage: Stage,
        entrant: Entrant[Member],
        result: Performance | Failure,
        referee: Referee | None,
    ) -> None:
        if not isinstance(result, Failure) and self.peaks is not None:
            result = judge_time(result, bout.plan.definition, entrant.member.solution.record, bout.workload, self.peaks)
        audit: Audit | Failure | None = None
        if not isinstance(result, Failure) and referee is not None:
            audit = self._audit(entrant.member, referee, stage, contents, result)
        failure = result if isinstance(result, Failure) else audit
        if isinstance(failure, Failure):
            self._lose(bout, entrant.member, failure)
        else:
            assert not isinstance(result, Failure)
            self._emit_pass(bout, entrant, contents, result, failure)

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

    def _lose(self, bout: Bout, member: Member, failure: Failure) -> None:
        """What is to be done after a failure while timing."""
        level = member.sandbox_level
        if member.after_failure(failure):
            require_healthy(self.context.machine)
        self._emit_failure(bout, member, failure, level)

    def _emit_failure(self, bout: Bout, member: Member, failure: Failure, level: int) -> None:
        tier, definition = member.rigor.tier, bout.plan.definition
        self.emit(self.context.failed(definition, member.solution, bout.workload, tier, failure, member.config, level))

    def _emit_pass(
        self,
        bout: Bout,
        entrant: Entrant[Member],
        contents: WorkloadContents,
        performance: Performance | None,
        audit: Audit | None,
    ) -> None:
        verified, member = entrant.verified, entrant.member
        cases = [*verified.envelope.passed, *(str(expected.case) for expected in contents.sets)]
        self.emit(
            self.context.passed(
                bout.plan.definition,
                member.solution,
                bout.workload,
                member.rigor.tier,
                verified.verdict.correctness("as_written" if bout.plan.definition.oracle == "as_written" else "fp64"),
                performance,
                envelope_of(cases, [*verified.envelope.dropped, *contents.dropped], self.context.seed),
                audit,
                member.config,
                member.sandbox_level,
            )
        )


def _expected_length(member: Member) -> int:
    """Sorts members by how long they take to verify: torch.compile first, kernels next, what compiles nothing last."""
    if member.solution.uses_torch_compile:
        return 0
    return 1 if member.solution.record.spec.role == "kernel" else 2

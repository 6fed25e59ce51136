"""Runs plans on this machine: verify runners side by side, time them one workload at a time, emit traces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilegym_db.bench.audit import AuditWorker
from tilegym_db.bench.buffer_pool import pool_bytes
from tilegym_db.bench.contents import ExpectedCache
from tilegym_db.bench.executor.batches import MEMORY_SHARE, Batch, Capacity, DefinitionGroup, make_definition_groups
from tilegym_db.bench.executor.time_workload import AfterTiming, Emit, WorkloadTiming
from tilegym_db.bench.executor.verify_batch import verify_batch
from tilegym_db.bench.executor.workload_run import SolutionGroup
from tilegym_db.bench.interleaved import TimingBudget
from tilegym_db.bench.phases import VERIFY
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.runner import Runner
from tilegym_db.bench.stock_witness import StockWitness
from tilegym_db.bench.tier_policy import INTERPRETER, UNTIMED, TierPolicy
from tilegym_db.bench.tracing import RunContext
from tilegym_db.bench.verification import Verification, most_fuzz_workers
from tilegym_db.bench.worker_handle import RunnerLimits, WorkerHandle
from tilegym_db.catalog import SolutionFiles, stock_of
from tilegym_db.confinement.bounds import available_memory, host_share
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.verify import scan
from tilegym_db.verify.verifier import Failure

__all__ = ["LocalExecutor"]

Starting = Callable[[str], None]


@dataclass
class LocalExecutor:
    """One device of this machine.

    Args:
        context: run id, machine and secret seed.
        folder: scratch folder of the run; workers get folders of their own below it.
        budget: how long to time.
        policy: what a pass takes.
        emit: called with every trace the moment it exists.
        starting: called with a short description of what is about to happen.
        peaks: what this device can do; None where that is not known, and then no time has a speed of light or a floor.
        after_timing: called after every workload with its workload and candidates, whose rounds are the raw times.
        capacity: what is measured at a time; by default what this machine has room for.
        concluded: called when every trace of a workload has been emitted.
    """

    context: RunContext
    folder: Path
    budget: TimingBudget
    policy: TierPolicy
    emit: Emit
    starting: Starting = field(default=lambda what: None)
    peaks: GpuPeaks | None = None
    after_timing: AfterTiming = field(default=lambda workload, candidates: None)
    capacity: Capacity | None = None
    concluded: Callable[[Workload], None] = field(default=lambda workload: None)

    def run(self, plans: Sequence[DefinitionPlan]) -> None:
        """Everything that the plans ask for: group by group, and in each batch by batch. Workers end with their group."""
        capacity = self.capacity or Capacity.of(self.context.machine, available_memory())
        with ExitStack() as stack:
            audit_worker = None
            if self.policy.audited:
                audit_worker = AuditWorker(self.context.machine.device, self.folder)
                stack.callback(audit_worker.close)
            timing = WorkloadTiming(self.context, self.budget, self.emit, self.after_timing, self.peaks, audit_worker)
            for definition_group in make_definition_groups(plans, capacity):
                self._run_definition_group(definition_group, timing)

    def _run_definition_group(self, definition_group: DefinitionGroup, timing: WorkloadTiming) -> None:
        candidates = [(plan, plan.candidates()) for plan in definition_group.plans]
        with ExitStack() as stack:
            groups = {}
            for plan, entered in candidates:
                group = SolutionGroup(
                    plan, ExpectedCache(plan.definition, self.context.machine.device, self.context.phases)
                )
                groups[plan.definition.name] = group
                witness = StockWitness(functools.partial(self._make_stock, plan, [item for item, _ in entered]))
                stack.callback(witness.close)
                for solution, config in entered:
                    interpret = solution in plan.interpreted
                    runner = self.make_runner(plan.definition, solution, config, interpret=interpret)
                    runner.verification.witness = witness
                    stack.callback(runner.handle.close)
                    group.runners.append(runner)
            without_memory: list[Batch] = []
            for batch in definition_group.batches:
                without_memory += self._run_batch(batch, groups, timing)
                for group in groups.values():
                    group.rest()
            for batch in without_memory:
                for group in groups.values():
                    group.close_workers()
                self._run_batch(batch, groups, timing, alone=True)

    def _make_stock(self, plan: DefinitionPlan, solutions: Sequence[SolutionFiles]) -> Verification | None:
        stock = stock_of(solutions)
        if stock is None:
            return None
        return self.make_runner(plan.definition, stock, {}, profiled=False).verification

    def _run_batch(
        self, batch: Batch, groups: dict[str, SolutionGroup], timing: WorkloadTiming, *, alone: bool = False
    ) -> list[Batch]:
        """Verify everything side by side, then time one workload after the other while no other work is under way.

        Returns:
            The workloads for which a runner had no memory beside the other workers, each as a batch of its own: not concluded,
            and to be done again when those have ended. With ``alone`` there is no such other worker, and none comes back.
        """
        workload_runs = [groups[plan.definition.name].workload_run(workload) for plan, workload in batch]
        several = len(workload_runs) > 1
        if several:
            names = dict.fromkeys(workload_run.plan.definition.name for workload_run in workload_runs)
            self.starting(f"verifying {', '.join(names)}: {len(workload_runs)} workloads")
        else:
            self.starting(str(workload_runs[0]))
        with self.context.phases(VERIFY):
            verify_batch(workload_runs, self.context)
        if self.context.machine.is_gpu:
            torch.cuda.empty_cache()  # what comparing took is for the workers to use
        without_memory: list[Batch] = []
        while workload_runs:
            workload_run = workload_runs.pop(0)  # its contents are given back when it has been timed
            if workload_run.lacked_memory and not alone:
                without_memory.append(((workload_run.plan, workload_run.workload),))
                continue
            if several:
                self.starting(str(workload_run))
                self._make_room(groups, {run.plan.definition.name for run in (workload_run, *workload_runs)})
            timing.conclude(workload_run)
            self.concluded(workload_run.workload)
        return without_memory

    def _make_room(self, groups: dict[str, SolutionGroup], waiting: Collection[str]) -> None:
        """Where little memory is left, end the workers of Definitions of which nothing waits to be timed in this batch."""
        if not self.context.machine.is_gpu:
            return
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.context.machine.device)
        if free_bytes < all_bytes // MEMORY_SHARE:
            for name, group in groups.items():
                if name not in waiting:
                    group.close_workers()

    def make_runner(
        self,
        definition: Definition,
        solution: SolutionFiles,
        config: Config,
        *,
        interpret: bool = False,
        profiled: bool = True,
    ) -> Runner:
        """A runner of this machine, not started yet; broken where the static scan refuses its source.

        Args:
            definition: what it computes.
            solution: its source.
            config: a value per tunable; empty for the source's own defaults.
            interpret: run it in its language's interpreter.
            profiled: whether its time may be audited.
        """
        machine = self.context.machine
        findings = scan.scan_sources(solution.record, solution.sources)
        hard = [str(finding) for finding in scan.hard_findings(findings)]
        compiles = solution.uses_torch_compile  # on a CPU nothing else takes long for a new shape
        handle = WorkerHandle(
            definition,
            solution,
            machine.device,
            self.folder,
            policy=INTERPRETER if interpret else UNTIMED if solution.record.spec.omits else self.policy,
            config=config,
            interpret=interpret,
            profiled=profiled,
            limits=RunnerLimits(
                buffer_bytes=pool_bytes(machine),
                fuzz_workers=most_fuzz_workers(host_share()) if machine.is_gpu or compiles else 1,
            ),
            broken=Failure("REJECTED", f"the static scan: {'; '.join(hard)}", gate="scan") if hard else None,
        )
        return Runner(handle, machine.sm, tuple(str(finding) for finding in scan.soft_findings(findings)))

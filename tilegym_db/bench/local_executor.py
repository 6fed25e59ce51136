"""Runs plans on this machine: verify runners side by side, time them one workload at a time, emit traces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch

from tilegym_db.bench.audit import AuditWorker
from tilegym_db.bench.machine import Machine, require_healthy
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.run_setup import RunContext
from tilegym_db.bench.runner import Runner, pool_bytes
from tilegym_db.bench.time_workload import AfterTiming, Emit, SolutionGroup, WorkloadRun, WorkloadTiming
from tilegym_db.bench.timing import TimingBudget
from tilegym_db.catalog import SolutionFiles, stock_of
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.case import Case
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.sandbox import scan
from tilegym_db.sandbox.limits import available_memory, available_processors, host_share
from tilegym_db.sandbox.shared_buffers import plan_slot
from tilegym_db.verify.contents import CONTENT_SETS, ExpectedCache, WorkloadContents, unusual_distributions
from tilegym_db.verify.phases import COMPILE, DRAW, VERIFY
from tilegym_db.verify.session import Processors, ShapesAhead, StockWitness, Verification, Verified, most_fuzz_workers
from tilegym_db.verify.verifier import CANNOT_VERIFY, Failure, cannot_verify
from tilegym_db.verify.worker_handle import INTERPRETER, UNTIMED, RunnerLimits, TierPolicy, WorkerHandle

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
        peaks: what this device can do; None if that is not known, and then no time has a speed of light or a floor.
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
        """Return a runner of this machine, not started yet; broken where the static scan refuses its source.

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


# ---- verify batch ---------------------------------------------------------------------------------
# Verifies the workload runs of a batch side by side: every runner in its own worker, while contents are drawn.


def verify_batch(workload_runs: Sequence[WorkloadRun], context: RunContext) -> None:
    """Every runner through its workloads, in its own worker, while the GPU work of verification interleaves.

    Runners wait for compilers most of the time; more of them at once than there are cores would only run into each
    other's deadlines. Cores that are left over when most are done start helpers for those that are not.

    Raises:
        HardwareError: a worker was lost, and the device does not work any more.
    """
    tasks: dict[int, tuple[Runner, list[WorkloadRun]]] = {}
    for workload_run in workload_runs:
        for runner in workload_run.runners:
            tasks.setdefault(id(runner), (runner, []))[1].append(workload_run)
    longest_first = sorted(tasks.values(), key=lambda task: _expected_length(task[0]))
    cores = available_processors()
    processors = Processors(
        cores, len(tasks), sum(not runner.verification.may_have_helpers for runner, _ in longest_first)
    )
    for runner, _ in longest_first:
        runner.verification.processors = processors
    with (
        ThreadPoolExecutor(max_workers=1) as drawing,
        ThreadPoolExecutor(max_workers=max(1, min(len(tasks), cores))) as verifying,
    ):
        for workload_run in _in_turn(workload_runs):
            workload_run.contents = drawing.submit(_draw, workload_run, context)
        running = [
            verifying.submit(_verify_runner, runner, entered, context, processors) for runner, entered in longest_first
        ]
        try:
            lost = [task.result() for task in running]
        except BaseException:
            for runner, _ in tasks.values():
                runner.verification.abort()  # or the pool would wait for a call that hangs
            verifying.shutdown(wait=False, cancel_futures=True)
            drawing.shutdown(wait=False, cancel_futures=True)
            raise
    if any(lost):
        require_healthy(context.machine)


def _verify_runner(
    runner: Runner, workload_runs: Sequence[WorkloadRun], context: RunContext, processors: Processors
) -> bool:
    """Return the outcome of every workload into its workload run; true where a worker was lost on the way."""
    lost = False
    verification = runner.verification
    supported = [entered for entered in workload_runs if runner.unsupported(entered.workload) is None]
    verification.ahead = ShapesAhead.of(entered.contents for entered in supported)
    try:
        for workload_run in workload_runs:
            outcome = _verify_workload(runner, workload_run, context)
            workload_run.outcomes[runner.name] = outcome, runner.handle.sandbox_level
            if isinstance(outcome, Failure) and runner.handle.after_failure(outcome):
                lost = True
    finally:
        verification.ahead = ShapesAhead()  # contents are given back when they have been timed
        processors.done(alone=not verification.may_have_helpers)
    return lost


def _verify_workload(runner: Runner, workload_run: WorkloadRun, context: RunContext) -> Verified | Failure:
    if runner.handle.broken is not None:
        return runner.handle.broken
    unsupported = runner.unsupported(workload_run.workload)
    if unsupported is not None:
        return Failure("UNSUPPORTED", unsupported)
    with context.phases(COMPILE):
        not_loaded = runner.handle.load()  # while the contents are drawn
    if not_loaded is not None:
        return not_loaded
    assert workload_run.contents is not None
    contents = workload_run.contents.result()
    if isinstance(contents, Failure):
        return contents
    return runner.verification.verify(contents, workload_run.plan.workloads, context.seed, workload_run.cache)


def _in_turn(workload_runs: Sequence[WorkloadRun]) -> list[WorkloadRun]:
    """Return the first workload of every Definition, then the second: nobody waits for all contents of another."""
    by_definition: dict[str, list[WorkloadRun]] = {}
    for workload_run in workload_runs:
        by_definition.setdefault(workload_run.plan.definition.name, []).append(workload_run)
    return [workload_run for turn in zip_longest(*by_definition.values()) for workload_run in turn if workload_run]


def _draw(workload_run: WorkloadRun, context: RunContext) -> WorkloadContents | Failure:
    definition = workload_run.plan.definition
    roots = workload_run.plan.roots
    own = ExpectedCache(definition, context.machine.device, roots=roots)  # given back with the contents
    # An exception would be kept with the memory of everything that its frames refer to.
    try:
        in_turn = any(runner.handle.policy.in_turn for runner in workload_run.runners)
        with context.phases(DRAW):
            contents = WorkloadContents.draw(definition, workload_run.workload, context.seed, own, in_turn=in_turn)
    except CANNOT_VERIFY as error:
        return cannot_verify(error)
    if not contents.sets:
        reason = "the reference itself passes no content set at this shape, so nothing can be proved"
        return Failure("UNSUPPORTED", reason)
    return contents


def _expected_length(runner: Runner) -> int:
    """Sorts runners by how long they take to verify, on an H200: kernels in TileLang 150 s, what torch.compile compiles a minute,
    other kernels 40 s, and last what compiles nothing.
    """
    spec = runner.solution.record.spec
    if spec.role == "kernel" and spec.language == "tilelang":
        return 0
    if runner.solution.uses_torch_compile:
        return 1
    return 2 if spec.role == "kernel" else 3


# ---- batches --------------------------------------------------------------------------------------
# Groups what is planned into batches: what is verified side by side, and then timed one by one on a quiet device.
# Pure.

BATCH_WORKLOADS = 12
"""Of one Definition in one batch. The last kernel of a batch compiles alone, so that a few large batches end before many small
ones; but nothing is known of a workload before its batch has been verified."""
COMPILED_WORKLOADS = 6
"""The same where torch.compile takes part. It keeps eight graphs of a function: in a screen of one dtype, those of the fuzz cases
and of so many workloads, so that what is compiled while verifying is still there when it is timed. And where workers live under
the configs of workloads, of which there are as many."""
GPU_RUNNER_BYTES, HOST_RUNNER_BYTES = 2 << 30, 3 << 30
"""What a worker holds while it waits: its CUDA context, its kernels and what its compiler has imported."""
SUPERVISOR_BYTES = 6 << 30
"""What the measuring process holds: its CUDA context, oracles and comparisons in fp64, and the worker that audits the clock."""
MEMORY_SHARE = 3
"""One part in so many of the device's memory is for contents and outputs that wait to be timed."""
ORACLE_SIZE = 4
"""An oracle's output in fp64 takes at most so many times the memory of the output of a kernel in 16 bits."""

Batch = tuple[tuple[DefinitionPlan, Workload], ...]
"""Workloads that are verified together, in the order in which they are timed."""


@dataclass(frozen=True)
class Capacity:
    """What a machine has room for at a time: workers, bytes of contents, and workloads of one Definition."""

    runners: int
    contents_bytes: int
    workloads: int

    @classmethod
    def of(cls, machine: Machine, host_bytes: int) -> Capacity:
        """Of this machine; ``host_bytes`` is its main memory.

        A CPU is measured one workload at a time: there is nothing to gain, and every trace comes as soon as it can.
        """
        if not machine.is_gpu:
            return cls(runners=1, contents_bytes=0, workloads=1)
        contents_bytes = machine.memory_bytes // MEMORY_SHARE
        left_bytes = machine.memory_bytes - contents_bytes - pool_bytes(machine) - SUPERVISOR_BYTES
        runners = min(left_bytes // GPU_RUNNER_BYTES, host_bytes // HOST_RUNNER_BYTES)
        return cls(max(runners, 1), contents_bytes, BATCH_WORKLOADS)


@dataclass(frozen=True)
class DefinitionGroup:
    """Definitions whose workers live at the same time, and the batches that they go through."""

    plans: tuple[DefinitionPlan, ...]
    batches: tuple[Batch, ...]


def make_definition_groups(plans: Sequence[DefinitionPlan], capacity: Capacity) -> list[DefinitionGroup]:
    """Return every workload that something is planned for in exactly one batch, those of one plan in their order.

    A group has at least one Definition and a batch at least one workload, whatever the capacity.
    """
    return [DefinitionGroup(group, tuple(_batches(group, capacity))) for group in _groups(plans, capacity)]


def _groups(plans: Sequence[DefinitionPlan], capacity: Capacity) -> Iterator[tuple[DefinitionPlan, ...]]:
    group: list[DefinitionPlan] = []
    taken = 0
    for plan in plans:
        wanted = _workers(plan, capacity)
        if group and taken + wanted > capacity.runners:
            yield tuple(group)
            group, taken = [], 0
        group.append(plan)
        taken += wanted
    if group:
        yield tuple(group)


def _batches(plans: Sequence[DefinitionPlan], capacity: Capacity) -> Iterator[Batch]:
    left = {id(plan): list(filter(plan.is_wanted, plan.workloads)) for plan in plans}
    while any(left.values()):
        batch: list[tuple[DefinitionPlan, Workload]] = []
        taken_bytes = 0
        for plan in plans:
            waiting = left[id(plan)]
            for _ in range(min(_at_a_time(plan, capacity), len(waiting))):
                wanted_bytes = _contents_bytes(plan, waiting[0])
                if batch and taken_bytes + wanted_bytes > capacity.contents_bytes:
                    break
                taken_bytes += wanted_bytes
                batch.append((plan, waiting.pop(0)))
        yield tuple(batch)


def _workers(plan: DefinitionPlan, capacity: Capacity) -> int:
    """Return how many live at a time: one for each Solution, and those under a config of one batch."""
    return len(plan.timed) + len(plan.interpreted) + _at_a_time(plan, capacity) * _configured(plan)


def _at_a_time(plan: DefinitionPlan, capacity: Capacity) -> int:
    """Return how many of its workloads go into one batch at most."""
    compiled = any(solution.uses_torch_compile for solution in plan.timed)
    return min(capacity.workloads, COMPILED_WORKLOADS) if compiled or _configured(plan) else capacity.workloads


def _configured(plan: DefinitionPlan) -> int:
    return max(map(plan.configured, plan.workloads), default=0)


def _contents_bytes(plan: DefinitionPlan, workload: Workload) -> int:
    """At most so much is kept of a workload until it is timed: every content set, and every runner's outputs for it."""
    runners = len(plan.timed) + len(plan.interpreted) + plan.configured(workload)
    case = Case.of_workload(plan.definition, workload, distribution=CONTENT_SETS[0], seed=0)
    slot = plan_slot(plan.definition, case)
    written = [*slot.outputs, *(tensor for tensor in slot.inputs if tensor.name in plan.definition.in_place)]
    inputs, outputs = sum(tensor.span for tensor in slot.inputs), sum(tensor.span for tensor in written)
    kept = len(CONTENT_SETS) + len(unusual_distributions(plan.definition, workload, 0))
    return kept * (inputs + outputs * (ORACLE_SIZE + runners))

"""Execution of plans on this machine: verify runners in parallel, time them one workload at a time, emit traces."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Self

import torch

from tilegym_db.catalog import SolutionFiles, stock_of
from tilegym_db.measurement.audit import AuditWorker
from tilegym_db.measurement.machine import Machine, require_healthy
from tilegym_db.measurement.plan import DefinitionPlan
from tilegym_db.measurement.run_setup import RunContext
from tilegym_db.measurement.runner import Runner, pool_bytes, slots_of
from tilegym_db.measurement.time_workload import AfterTiming, Emit, SolutionGroup, WorkloadRun, WorkloadTiming
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.workload import Case
from tilegym_db.sandbox import scan
from tilegym_db.sandbox.processes import available_memory, available_processors, host_share
from tilegym_db.sandbox.shared_buffers import plan_slot
from tilegym_db.verification.expected import (
    CONTENT_SETS,
    ExpectedCache,
    WorkloadContents,
    give_back_memory,
    unusual_distributions,
)
from tilegym_db.verification.phases import COMPILE, DRAW, VERIFY
from tilegym_db.verification.session import (
    BaselineCheck,
    Drawing,
    ShapesAhead,
    Verification,
    VerifiedWorkload,
    max_fuzz_workers,
)
from tilegym_db.verification.verifier import CANNOT_VERIFY, Failure, cannot_verify
from tilegym_db.verification.worker_handle import (
    INTERPRETER,
    UNTIMED,
    Processors,
    RunnerLimits,
    TierPolicy,
    WorkerHandle,
    cpu_series_s,
)

Starting = Callable[[str], None]


@dataclass
class LocalExecutor:
    """Executor for one device of this machine.

    Args:
        folder: scratch folder of the run; each worker gets a folder below it.
        peaks: measured peaks of this device. None if unknown; then times have no speed of light and no physics floor.
        after_timing: called after each workload with the workload and its candidates; their rounds are the raw times.
        capacity: how much runs at a time; by default what this machine has room for.
        concluded: called when all traces of a workload have been emitted.
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
        """Carry out the plans, group by group and batch by batch. Workers end with their group."""
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
                baseline_check = BaselineCheck(functools.partial(self._make_stock, plan, [item for item, _ in entered]))
                stack.callback(baseline_check.close)
                for solution, config in entered:
                    interpret = solution in plan.interpreted
                    runner = self.make_runner(plan.definition, solution, config, interpret=interpret)
                    runner.verification.baseline_check = baseline_check
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
        """Verify all runners in parallel, then time one workload after the other while the machine does no other work.

        Returns:
            The workloads for which a runner ran out of memory because of the other workers, each as its own batch. They are
                not concluded; run them again after those workers have ended. With ``alone`` there are no such workers, and
                the list is empty.
        """
        workload_runs = [groups[plan.definition.name].workload_run(workload) for plan, workload in batch]
        several = len(workload_runs) > 1
        if several:
            names = dict.fromkeys(workload_run.plan.definition.name for workload_run in workload_runs)
            self.starting(f"verifying {', '.join(names)}: {len(workload_runs)} workloads")
        else:
            self.starting(str(workload_runs[0]))
        with self.context.phases(VERIFY):
            verify_batch(workload_runs, self.context, self.starting)
        if self.context.machine.is_gpu:
            torch.cuda.empty_cache()  # leave the memory of the comparisons to the workers
        without_memory: list[Batch] = []
        while workload_runs:
            workload_run = workload_runs.pop(0)  # its contents are freed when it has been timed
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
        """End the workers of Definitions that have nothing left to time in this batch, if little memory is left."""
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
        """Return a runner for this machine, not started yet. It is broken if the static scan refuses its source.

        Args:
            profiled: if true, its time can be audited.
        """
        machine = self.context.machine
        findings = scan.scan_sources(solution.record, solution.sources)
        hard = [str(finding) for finding in scan.hard_findings(findings)]
        compiles = solution.uses_torch_compile  # on a CPU, only this is slow for a new shape
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
                fuzz_workers=max_fuzz_workers(host_share()) if machine.is_gpu or compiles else 1,
                series_s=math.inf if machine.is_gpu else cpu_series_s(),
            ),
            phases=self.context.phases,
            broken=Failure("REJECTED", f"the static scan: {'; '.join(hard)}", gate="scan") if hard else None,
        )
        return Runner(handle, machine.sm, tuple(str(finding) for finding in scan.soft_findings(findings)))


# ---- verify batch ---------------------------------------------------------------------------------
# Verify the workload runs of a batch in parallel: each runner in its worker, while contents are drawn.


MAX_ALONE = 2
"""Maximum number of new Solutions that are verified before those that they are compared with."""


def verify_batch(
    workload_runs: Sequence[WorkloadRun], context: RunContext, starting: Starting = lambda what: None
) -> None:
    """Verify each runner on its workloads, in its own worker, while the GPU work of verification interleaves.

    One or two new Solutions are verified alone at first, so that a wrong one is known in seconds. What they are compared with
    follows as soon as one of them passes a workload. More of them are verified together with everything else.

    Runners wait for compilers most of the time. There are never more of them at once than cores, so that they do not exceed
    each other's timeouts. When most are done, free cores start helpers for the others.
    """
    open_runs = [workload_run for workload_run in workload_runs if _is_open(workload_run)]
    asked, compared = one_task_each(_tasks_of(workload_runs, asked=True), _tasks_of(open_runs, asked=False))
    is_few = 0 < sum(runner.solution.record.spec.provides != "stock" for runner, _ in asked.values()) <= MAX_ALONE
    with ThreadPoolExecutor(max_workers=1) as drawing:
        ordered = _in_turn(open_runs)
        for workload_run in ordered:
            workload_run.contents = drawing.submit(_draw, workload_run, context)
        ahead = FreshAhead(context.machine)
        for workload_run in ordered:
            drawing.submit(ahead.draw, workload_run)
        try:
            if not (is_few and compared):
                _verify_tasks(_merged(asked, compared), context)
            elif not _verify_asked_first(asked, compared, workload_runs, context, starting):
                drawing.shutdown(wait=False, cancel_futures=True)  # nothing needs the other contents
        except BaseException:
            drawing.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            ahead.stop.set()


def _verify_asked_first(
    asked: _Tasks,
    compared: _Tasks,
    workload_runs: Sequence[WorkloadRun],
    context: RunContext,
    starting: Starting,
) -> bool:
    """Verify new Solutions and, as soon as one passes, what they are compared with; return True if one passed."""
    names = ", ".join(sorted({runner.solution.name for runner, _ in asked.values()}))
    starting(f"verifying {names}; {len(compared)} to compare with wait for it")
    with _Followed(
        compared, context, lambda which: starting(f"verifying what {names} is compared with: {which}")
    ) as others:
        _verify_tasks(asked, context, others.follow)
    for workload_run in workload_runs:
        if not workload_run.has_winner:  # nothing is compared there
            for runner, _ in compared.values():
                workload_run.outcomes.pop(runner.name, None)
    return others.followed


def _is_open(workload_run: WorkloadRun) -> bool:
    """Return True unless every runner that is planned for itself is known to fail. Then nothing is drawn or compared."""
    asked = [runner for runner in workload_run.runners if workload_run.is_asked(runner)]
    return any(_decided(runner, workload_run.workload) is None for runner in asked) or not asked


AHEAD_SHARE = 16
"""One part in so many of the device's memory is for fresh contents that are drawn during verification."""


@dataclass
class FreshAhead:
    """Fresh contents for clock audits, drawn while a GPU waits for compilers; timing draws those that are missing.

    The oracle of 32 contents takes longer than all timed calls, if the reference loops over tokens or heads.
    """

    machine: Machine
    stop: threading.Event = field(default_factory=threading.Event)
    _drawn_bytes: int = 0

    def draw(self, workload_run: WorkloadRun) -> None:
        """Draw the contents of a workload, if its promotion is on a GPU and there is memory for them."""
        if self.stop.is_set() or not self.machine.is_gpu or workload_run.contents is None:
            return
        policies = [runner.handle.policy for runner in workload_run.runners]
        contents = workload_run.contents.result()
        if isinstance(contents, Failure) or not any(policy.audited for policy in policies):
            return
        plan = plan_slot(contents.definition, contents.sets[0].case)
        slots = slots_of(plan, len(contents.sets), self.machine.device, pool_bytes(self.machine))
        count = slots // 4 * 4
        oracle = sum(8 * math.prod(tensor.shape) for tensor in plan.outputs)
        self._drawn_bytes += count * (plan.size + oracle)
        if self._drawn_bytes > self.machine.memory_bytes // AHEAD_SHARE:
            return
        drawn = False
        with contextlib.suppress(*CANNOT_VERIFY):  # the audit draws them again, and reports it
            contents.draw_ahead(count, self.stop.is_set)
            drawn = True
        if not drawn:
            give_back_memory(self.machine.device)


_Tasks = dict[int, tuple[Runner, list[WorkloadRun]]]


def _tasks_of(workload_runs: Sequence[WorkloadRun], *, asked: bool) -> _Tasks:
    """Return the workload runs of each runner that is planned for itself, or only to be compared with."""
    tasks: _Tasks = {}
    for workload_run in workload_runs:
        for runner in workload_run.runners:
            if workload_run.is_asked(runner) == asked:
                tasks.setdefault(id(runner), (runner, []))[1].append(workload_run)
    return tasks


def one_task_each(asked: _Tasks, compared: _Tasks) -> tuple[_Tasks, _Tasks]:
    """Move the workloads of a runner that is in both to the first: its worker verifies one workload at a time."""
    both = {key: task for key, task in compared.items() if key in asked}
    return _merged(asked, both), {key: task for key, task in compared.items() if key not in both}


def _merged(one: _Tasks, other: _Tasks) -> _Tasks:
    runs = {key: (runner, list(found)) for key, (runner, found) in one.items()}
    for key, (runner, found) in other.items():
        runs.setdefault(key, (runner, []))[1].extend(found)
    return runs


@dataclass
class _Followed:
    """Verification of what new Solutions are compared with, in a thread that starts when :meth:`follow` is called."""

    compared: _Tasks
    context: RunContext
    starting: Starting
    followed: bool = False
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    _verifying: Future[None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def follow(self) -> None:
        """Start, unless it has started."""
        with self._lock:
            if self.followed:
                return
            self.followed = True
        self.starting(", ".join(sorted({runner.solution.name for runner, _ in self.compared.values()})))
        self._verifying = self._pool.submit(_verify_tasks, self.compared, self.context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self._verifying is not None:
                self._verifying.result()
        finally:
            if self._verifying is not None and not self._verifying.done():
                for runner, _ in self.compared.values():
                    runner.verification.abort()  # else the pool would wait for a call that hangs
            self._pool.shutdown()


def _verify_tasks(tasks: _Tasks, context: RunContext, passed: Callable[[], None] = lambda: None) -> None:
    """Verify runners in parallel, each on its workloads, whose contents are being drawn; call ``passed`` after each pass."""
    longest_first = sorted(tasks.values(), key=lambda task: _expected_length(task[0]))
    cores = available_processors()
    processors = Processors(
        cores, len(tasks), sum(not runner.verification.may_have_helpers for runner, _ in longest_first)
    )
    for runner, _ in longest_first:
        runner.verification.processors = processors
    with ThreadPoolExecutor(max_workers=max(1, min(len(tasks), cores))) as verifying:
        running = [
            verifying.submit(_verify_runner, runner, entered, context, processors, passed)
            for runner, entered in longest_first
        ]
        try:
            lost = [task.result() for task in running]
        except BaseException:
            for runner, _ in tasks.values():
                runner.verification.abort()  # else the pool would wait for a call that hangs
            verifying.shutdown(wait=False, cancel_futures=True)
            raise
    if any(lost):
        require_healthy(context.machine)


def _verify_runner(
    runner: Runner,
    workload_runs: Sequence[WorkloadRun],
    context: RunContext,
    processors: Processors,
    passed: Callable[[], None],
) -> bool:
    """Store the outcome of each workload in its workload run; return true if a worker was lost."""
    lost = False
    verification = runner.verification
    supported = [entered for entered in workload_runs if runner.unsupported(entered.workload) is None]
    verification.ahead = ShapesAhead.of(entered.contents for entered in supported)
    try:
        with verification.expecting(entered.workload for entered in supported):
            for workload_run in workload_runs:
                outcome = _verify_workload(runner, workload_run, context)
                workload_run.outcomes[runner.name] = outcome, runner.handle.sandbox_level
                if not isinstance(outcome, Failure):
                    passed()
                elif runner.handle.after_failure(outcome):
                    lost = True
    finally:
        verification.ahead = ShapesAhead()  # contents are freed when they have been timed
        processors.done(alone=not verification.may_have_helpers)
    return lost


def _decided(runner: Runner, workload: Workload) -> Failure | None:
    """Return the failure of a runner on a workload if it is known before contents are drawn, else None."""
    if runner.handle.broken is not None:
        return runner.handle.broken
    unsupported = runner.unsupported(workload)
    return Failure("UNSUPPORTED", unsupported) if unsupported is not None else runner.verification.refusal(workload)


def _verify_workload(runner: Runner, workload_run: WorkloadRun, context: RunContext) -> VerifiedWorkload | Failure:
    decided = _decided(runner, workload_run.workload)
    if decided is not None:
        return decided
    with context.phases(COMPILE):
        not_loaded = runner.handle.load()  # while the contents are drawn
    if not_loaded is not None:
        return not_loaded
    assert workload_run.contents is not None
    drawing = Drawing(workload_run.workload, workload_run.contents)
    if drawing.contents.done() and isinstance(failed := drawing.contents.result(), Failure):
        return failed
    return runner.verification.verify(drawing, workload_run.plan.workloads, context.seed, workload_run.cache)


def _in_turn(workload_runs: Sequence[WorkloadRun]) -> list[WorkloadRun]:
    """Return the first workload of every Definition, then the second, and so on.

    No Definition waits for all contents of another.
    """
    by_definition: dict[str, list[WorkloadRun]] = {}
    for workload_run in workload_runs:
        by_definition.setdefault(workload_run.plan.definition.name, []).append(workload_run)
    return [workload_run for turn in zip_longest(*by_definition.values()) for workload_run in turn if workload_run]


def _draw(workload_run: WorkloadRun, context: RunContext) -> WorkloadContents | Failure:
    definition = workload_run.plan.definition
    roots = workload_run.plan.roots
    own = ExpectedCache(definition, context.machine.device, roots=roots)  # freed with the contents
    # Return a failure: a stored exception would keep the memory of all objects in its frames.
    try:
        in_turn = any(runner.handle.policy.in_turn for runner in workload_run.runners)
        with context.phases(DRAW), context.phases(DRAW, definition.name):
            contents: WorkloadContents | Failure = WorkloadContents.draw(
                definition, workload_run.workload, context.seed, own, in_turn=in_turn
            )
    except CANNOT_VERIFY as error:
        contents = cannot_verify(error)
    if isinstance(contents, Failure):
        give_back_memory(context.machine.device)
        return contents
    if not contents.sets:
        reason = "the reference itself passes no content set at this shape, so nothing can be proved"
        return Failure("UNSUPPORTED", reason)
    return contents


def _expected_length(runner: Runner) -> int:
    """Return a sort key: runners that take longest to verify come first.

    On an H200, TileLang kernels take 150 s, ``torch.compile`` a minute and other kernels 40 s. Code that compiles nothing
    is last.
    """
    spec = runner.solution.record.spec
    if spec.role == "kernel" and spec.language == "tilelang":
        return 0
    if runner.solution.uses_torch_compile:
        return 1
    return 2 if spec.role == "kernel" else 3


# ---- batches --------------------------------------------------------------------------------------
# Group planned workloads into batches. The workloads of a batch are verified in parallel and then timed one by one. Pure.

MAX_BATCH_WORKLOADS = 12
"""Maximum number of workloads of one Definition in one batch. The last kernel of a batch compiles alone, so a few large
batches end before many small ones. But no result of a workload is known before its batch is verified.
"""
MAX_COMPILED_WORKLOADS = 6
"""The same limit if ``torch.compile`` takes part, or if workers run under configs of single workloads. ``torch.compile``
keeps eight graphs per function. In a screen of one dtype, the fuzz cases and this number of workloads need no more, so the
graphs compiled during verification still exist at the timing.
"""
GPU_RUNNER_BYTES, HOST_RUNNER_BYTES = 2 << 30, 3 << 30
"""Memory that a waiting worker holds: its CUDA context, its kernels and the imports of its compiler."""
SUPERVISOR_BYTES = 6 << 30
"""Memory that the measuring process holds: its CUDA context, fp64 oracles and comparisons, and the worker of the clock
audit.
"""
MIN_RUNNERS = 8
"""Maximum number of workers of a group if there are fewer processors."""
MEMORY_SHARE = 3
"""One part in so many of the device's memory is for contents and outputs that wait to be timed."""
ORACLE_SIZE = 4
"""Maximum size of an fp64 oracle output relative to the output of a 16-bit kernel."""

Batch = tuple[tuple[DefinitionPlan, Workload], ...]
"""Workloads that are verified together, in the order of timing."""


@dataclass(frozen=True)
class Capacity:
    """Limits of a machine for what runs at a time: workers, bytes of contents, and workloads of one Definition."""

    runners: int
    contents_bytes: int
    workloads: int

    @classmethod
    def of(cls, machine: Machine, host_bytes: int, processors: int | None = None) -> Capacity:
        """Return the capacity of a machine; ``host_bytes`` is its main memory, and ``processors`` by default those it has.

        A CPU measures one workload at a time: more would gain nothing, and so each trace comes as soon as possible. For the
        same reason, a GPU verifies only as many Solutions in a group as there are processors.
        """
        processors = available_processors() if processors is None else processors
        if not machine.is_gpu:
            return cls(runners=1, contents_bytes=0, workloads=1)
        contents_bytes = machine.memory_bytes // MEMORY_SHARE
        left_bytes = machine.memory_bytes - contents_bytes - pool_bytes(machine) - SUPERVISOR_BYTES
        runners = min(left_bytes // GPU_RUNNER_BYTES, host_bytes // HOST_RUNNER_BYTES, max(processors, MIN_RUNNERS))
        return cls(max(runners, 1), contents_bytes, MAX_BATCH_WORKLOADS)


@dataclass(frozen=True)
class DefinitionGroup:
    """Definitions whose workers live at the same time, and the batches of their workloads."""

    plans: tuple[DefinitionPlan, ...]
    batches: tuple[Batch, ...]


def make_definition_groups(plans: Sequence[DefinitionPlan], capacity: Capacity) -> list[DefinitionGroup]:
    """Put every planned workload into exactly one batch; the workloads of one plan keep their order.

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
    """Return the maximum number of concurrent workers: one per Solution, and those under the configs of one batch."""
    return len(plan.timed) + len(plan.interpreted) + _at_a_time(plan, capacity) * _configured(plan)


def _at_a_time(plan: DefinitionPlan, capacity: Capacity) -> int:
    """Return the maximum number of workloads of the plan in one batch."""
    compiled = any(solution.uses_torch_compile for solution in plan.timed)
    return min(capacity.workloads, MAX_COMPILED_WORKLOADS) if compiled or _configured(plan) else capacity.workloads


def _configured(plan: DefinitionPlan) -> int:
    return max(map(plan.configured, plan.workloads), default=0)


def _contents_bytes(plan: DefinitionPlan, workload: Workload) -> int:
    """Return an upper bound of the bytes kept for a workload until it is timed: all content sets, and the outputs of all
    runners.
    """
    runners = len(plan.timed) + len(plan.interpreted) + plan.configured(workload)
    case = Case.of_workload(plan.definition, workload, distribution=CONTENT_SETS[0], seed=0)
    slot = plan_slot(plan.definition, case)
    written = [*slot.outputs, *(tensor for tensor in slot.inputs if tensor.name in plan.definition.in_place)]
    inputs, outputs = sum(tensor.span for tensor in slot.inputs), sum(tensor.span for tensor in written)
    kept = len(CONTENT_SETS) + len(unusual_distributions(plan.definition, workload, 0))
    return kept * (inputs + outputs * (ORACLE_SIZE + runners))

"""Verifies the workload runs of a batch side by side: every runner in its own worker, while contents are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

from tilegym_db.bench.contents import ExpectedCache, WorkloadContents
from tilegym_db.bench.executor.workload_run import WorkloadRun
from tilegym_db.bench.machine import require_healthy
from tilegym_db.bench.own_shape import ShapesAhead
from tilegym_db.bench.phases import COMPILE, DRAW
from tilegym_db.bench.processors import Processors
from tilegym_db.bench.runner import Runner
from tilegym_db.bench.tracing import RunContext
from tilegym_db.bench.verification import Verified
from tilegym_db.confinement.bounds import available_processors
from tilegym_db.verify.outcome import CANNOT_VERIFY, Failure, cannot_verify

__all__ = ["verify_batch"]


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
    """The outcome of every workload into its workload run; true where a worker was lost on the way."""
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
    """The first workload of every Definition, then the second: nobody waits for all contents of another."""
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

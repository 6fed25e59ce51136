"""Audits of the promotion tier beyond outputs: whose kernels did the work, and whether the claimed time can be true.

The audits are the wall clock, fresh contents, and the ownership of kernels.
"""

from __future__ import annotations

import ast
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tilegym_db.measurement.runner import (
    BufferPool,
    Elapsed,
    Runner,
    WallRun,
    alone_us,
    check_latency,
    may_be_host_delay,
)
from tilegym_db.records import Solution
from tilegym_db.records.hardware import CPU
from tilegym_db.records.solution import TILE_LANGUAGES
from tilegym_db.records.trace import Performance
from tilegym_db.records.verdicts import MACHINE_SLOW
from tilegym_db.sandbox.protocol import KernelUse
from tilegym_db.sandbox.worker import WorkerProcess, processors
from tilegym_db.verification.expected import OracleCase, WorkloadContents
from tilegym_db.verification.session import MAX_DROPPED_SHARE
from tilegym_db.verification.verifier import Failure, judge, read_outputs

BUSY_US = (1_000.0, 4_000.0, 16_000.0)
"""Times for which the device may be kept busy before the calls of a wall-clock run, so that their launches are hidden."""
BASELINE_BUSY_US = (*BUSY_US, 32_000.0)
"""The same for a baseline, which may make a hundred launches per call. A kernel gets no longer time, since it could hide
work there.
"""
MAX_QUEUED = 900
"""Launches that can wait on a device without blocking further launches: its queue holds 1,024."""
MIN_CALLS_BY_TIME = 4
"""Minimum number of calls for any launch time that the worker reports; with fewer calls the check is weaker."""
NULL_CALLS = 5
AUDIT_TIMEOUT_S = 60.0
FRESH_S = 2.0
"""Seconds of drawing contents for a run of the clock's audit."""
CLEAR_US = 600.0
"""Time of calls beside which the noise of a request, 30 us and what its host adds, is a few percent."""

PROFILED_CALLS = 2

MAX_SPREAD_US = 250.0
CLOCK_ATTEMPTS, GPU_CLOCK_ATTEMPTS = 5, 8
"""Attempts of the clock audit. A busy machine can disturb a run; a slow Solution is slow every time. On two H100 of a
virtual machine the host disturbed one attempt in six, for 1 to 20 ms.
"""
PAUSE_S = 1.0
"""Seconds of pause after the first attempt for which a CPU may have been too slow; the pause doubles each time."""


def audit_ownership(runner: Runner, pool: BufferPool) -> Ownership | Failure:
    """Profile a few calls and check whose kernels ran; on a GPU only."""
    slots = range(PROFILED_CALLS)
    pool.prepare(slots, poison=False)
    used = runner.profile(slots)
    if isinstance(used, Failure):
        return used
    found = check_ownership(runner.solution.record, runner.solution.sources, used)
    return found if found.problem is None else Failure("REJECTED", found.problem, gate="ownership")


@dataclass(frozen=True)
class _Slots:
    """Slots of the short and the long run. Each slot is used once; the long run has three times as many."""

    calls: int

    @property
    def short(self) -> range:
        return range(self.calls)

    @property
    def long(self) -> range:
        return range(self.calls, 4 * self.calls)


class AuditWorker:
    """A worker that never loads a Solution, so its cost of an empty request can be trusted.

    It is asked directly before each wall-clock run, since the busy time depends on the current clock of the device.
    """

    def __init__(self, device: str, folder: Path) -> None:
        """Start the process in the background."""
        self._device = device
        self._worker = WorkerProcess(device, folder / "audit_worker")
        self._ready = False

    def null_us(self, busy_us: float) -> list[float]:
        """Return the times of a few empty requests behind a busy device, sorted, in microseconds."""
        if not self._ready:
            self._worker.request("prepare", timeout_s=AUDIT_TIMEOUT_S, profile=False)
            self._ready = True
        times = []
        for _ in range(NULL_CALLS):
            start = time.perf_counter_ns()
            self._worker.request("run", timeout_s=AUDIT_TIMEOUT_S, slots=[], busy_us=busy_us)
            times.append((time.perf_counter_ns() - start) / 1e3)
        return sorted(times)

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def audit_clock(
    runner: Runner,
    audit_worker: AuditWorker,
    pool: BufferPool,
    contents: WorkloadContents,
    performance: Performance,
    activities: int = 0,
) -> float | Failure:
    """Run the Solution on contents it never saw, by this process's clock, and check every output.

    Args:
        pool: buffers of the workload; their contents are overwritten.
        activities: kernels, copies and fills of ``PROFILED_CALLS`` calls; 0 if they were not counted, as on a CPU.

    Returns:
        The larger estimate in microseconds per call; or a failure if the time or the outputs cannot be right.
    """
    problem: str | None = None
    reasons: list[str] = []
    attempts = CLOCK_ATTEMPTS if runner.device == CPU else GPU_CLOCK_ATTEMPTS
    for attempt in range(attempts):
        outcome = _run(runner, audit_worker, pool, contents, performance, attempt, activities)
        if isinstance(outcome, Failure):
            return outcome
        problem = check_latency(performance.latency_us, outcome, on_gpu=runner.device != CPU)
        if problem is None:
            return max(outcome.slope_us, outcome.absolute_us, 0.0)
        reason: str | Failure = ""
        if runner.device == CPU:
            reason = _machine_reason(runner, pool, performance.latency_us, outcome)
        elif attempt + 1 == attempts and runner.solution.record.spec.role == "baseline":
            reason = _contents_reason(runner, pool, contents, performance.latency_us, outcome)
        if isinstance(reason, Failure):
            return reason
        if reason:
            reasons.append(reason)
            if attempt + 1 < attempts:
                time.sleep(PAUSE_S * 2 ** (len(reasons) - 1))
    if reasons:
        return Failure("UNSUPPORTED", reasons[-1])
    assert problem is not None
    if contents.is_fixed:  # calls on drawn contents may really take longer
        return Failure(
            "UNSUPPORTED", f"its time on the contents of its files cannot be checked with drawn contents: {problem}"
        )
    return Failure("REJECTED", problem, gate="wall clock")


def _machine_reason(runner: Runner, pool: BufferPool, claimed_us: float, run: WallRun) -> str | Failure:
    """Return the reason why this machine, not the Solution, may have slowed down a run on a CPU; empty without one."""
    if may_be_host_delay(claimed_us, run):
        return f"{MACHINE_SLOW}: its host ran something else on its processors. Repeat the command when the host is less busy"
    now_us = _latency_now(runner, range(pool.slots // 4, pool.slots))
    if isinstance(now_us, Failure):
        return now_us
    if check_latency(now_us, run, on_gpu=False) is None:
        return (
            f"{MACHINE_SLOW}: {claimed_us:.4g} us per call first and {now_us:.4g} us later, by the same clock. Repeat the "
            "command when the machine is less busy"
        )
    return ""


def _contents_reason(
    runner: Runner, pool: BufferPool, contents: WorkloadContents, claimed_us: float, run: WallRun
) -> str | Failure:
    """Return why the last run on a GPU may be slower than what a baseline truly claimed; empty if nothing explains it.

    Only baselines are excused so, never kernels. Some code waits for the device within a call, for example to loop over the
    experts that its contents name. New contents then call new products, and the first call of each product takes longer.
    The worker measures this on unseen contents with its own clock; a false clock repeats its first claim. A call that
    caches results would be slower there as well. The result is UNSUPPORTED, not a pass, so a false claim gains nothing.
    """
    unseen = contents.fresh(GPU_CLOCK_ATTEMPTS, 4 * run.calls)
    if len(unseen) < 4 * run.calls:
        return ""
    pool.fill_with(unseen)
    unseen_us = _latency_now(runner, range(run.calls, 4 * run.calls))
    if isinstance(unseen_us, Failure):
        return unseen_us
    if check_latency(unseen_us, run, on_gpu=True) is not None:
        return ""
    return (
        f"its time depends on whether it has seen the contents before, and cannot be checked: {claimed_us:.4g} us per call on "
        f"the timed contents, {unseen_us:.4g} us on others, by the same clock"
    )


def _latency_now(runner: Runner, slots: range) -> float | Failure:
    """Return the mean time of a call by the worker's clock, directly after a run that contradicted its claim.

    A worker with a false clock repeats its claim. If the new time agrees with the run, the machine became slower.
    """
    outcome = runner.time_block(slots)
    return outcome if isinstance(outcome, Failure) else fmean(outcome[0])


def _run(
    runner: Runner,
    audit_worker: AuditWorker,
    pool: BufferPool,
    contents: WorkloadContents,
    performance: Performance,
    attempt: int,
    activities: int = 0,
) -> WallRun | Failure:
    host_us = 0.0 if runner.device == CPU else performance.host_us or 0.0
    busy_times = BASELINE_BUSY_US if runner.solution.record.spec.role == "baseline" else BUSY_US
    contents.fresh(attempt, 4)  # needed in any case, and shows what one takes
    most = affordable_calls(pool.slots // 4, contents.seconds_of_fresh, performance.latency_us)
    slots = _Slots(hidden_calls(most, activities / PROFILED_CALLS, host_us, busy_times[-1]))
    fresh = contents.fresh(attempt, 4 * slots.calls)
    if len(fresh) < 4 * slots.calls:
        return Failure("UNSUPPORTED", "the reference passes too few contents at this shape to check the clock on")
    pool.fill_with(fresh)
    busy_us = 0.0 if runner.device == CPU else _busy_us(3 * slots.calls * host_us, busy_times)
    null = audit_worker.null_us(busy_us)
    elapsed: list[Elapsed] = []
    for part in (slots.short, slots.long):
        outcome = runner.run_calls(part, busy_us)
        # The outputs must be complete now, whatever the worker replied.
        found = [read_outputs(pool.buffers, slot, runner.definition) for slot in part]
        if isinstance(outcome, Failure):
            return outcome
        wrong = check_fresh_contents(runner, [fresh[slot] for slot in part], found)
        if wrong is not None:
            return wrong
        elapsed.append(outcome)
    short, long = elapsed
    on_cpu = runner.device == CPU
    # Use the fastest request on a CPU: on a busy one the median waits for a processor, and must not be subtracted.
    null_us = null[0] if on_cpu else null[len(null) // 2]
    return WallRun(
        slots.calls,
        short.wall_us,
        long.wall_us,
        null_us,
        # Leave out the slowest request: one may be disturbed. The limit keeps a busy machine from hiding a slow kernel.
        noise_us=30.0 + min(null[-2] - null[0], MAX_SPREAD_US),
        copies_us=_copying_us(runner, pool),
        alone_us=alone_us(long, null_us, 3 * slots.calls, processors()) if on_cpu else None,
        unstolen_us=alone_us(long.unstolen, null_us, 3 * slots.calls, processors()) if on_cpu else None,
    )


def _copying_us(runner: Runner, pool: BufferPool) -> float:
    """Return the most that copying returned outputs costs per call: a launch for each, at the speed of slow memory."""
    if runner.solution.record.spec.destination_passing_style:
        return 0.0
    launch_us, bytes_per_us = (5.0, 2e3) if runner.device == CPU else (4.0, 1.5e6)
    return sum(launch_us + 2 * plan.span / bytes_per_us for plan in pool.buffers.plan.outputs)


def affordable_calls(most: int, content_s: float, latency_us: float) -> int:
    """Return the number of calls of the short run, from 1 to ``most``, for which there is time to draw contents: four per call.

    The reference of a recurrence takes a fifth of a second for a content, where a kernel takes a millisecond. The shorter a call
    is, the more calls stand out from the noise of a request.
    """
    by_time = int(FRESH_S / content_s / 4) if content_s else most
    by_noise = math.ceil(CLEAR_US / latency_us) if latency_us else most
    return min(most, max(1, by_time, by_noise))


def hidden_calls(most: int, launches: float, host_us: float, longest_us: float = BUSY_US[-1]) -> int:
    """Return the number of calls of the short run, from 1 to ``most``, so that all launches fit into the busy time.

    The long run launches three times as many. A call of many launches fills the device's queue, and further launches then wait. A
    call with a long host time outlasts the busy time. Either would count as time of the calls. The host's time alone reduces the
    number to 4 at least. A ``launches`` or ``host_us`` of 0 sets no limit.
    """
    by_queue = int(MAX_QUEUED / (3 * launches)) if launches else most
    by_time = int((longest_us - 100.0) / 1.5 / (3 * host_us)) if host_us else most
    return min(most, max(1, min(by_queue, max(MIN_CALLS_BY_TIME, by_time))))


def _busy_us(host_us: float, busy_times: Sequence[float]) -> float:
    """Return the shortest busy time that hides the launches of all calls."""
    return next((busy for busy in busy_times if busy >= 1.5 * host_us + 100.0), busy_times[-1])


# ---- fresh contents -------------------------------------------------------------------------------
# Check outputs on contents that a Solution has not seen before, relative to those of stock code.


def check_fresh_contents(
    runner: Runner, contents: Sequence[OracleCase], found: Sequence[Mapping[str, Any]]
) -> Failure | None:
    """Return a failure if the outputs are wrong on contents that the Solution has not seen before, or None.

    Stock code rounds more often than its Definition. So it fails on a few contents, such as tiny values or small
    differences of large terms. Such contents do not count against stock code, or against a kernel with the same outputs,
    unless they are too many.
    """
    definition, record = runner.definition, runner.solution.record
    judged = [
        judge(definition, record, expected.with_tensors(), outputs)
        for expected, outputs in zip(contents, found, strict=True)
    ]
    wrong = [number for number, outcome in enumerate(judged) if isinstance(outcome, Failure)]
    few = len(wrong) <= MAX_DROPPED_SHARE * len(contents)
    refuting = (
        number
        for number in wrong
        if not (few and _matches_stock_outputs(runner, contents[number].with_tensors(), found[number]))
    )
    worst = next((judged[number] for number in refuting), None)
    if not isinstance(worst, Failure):
        return None
    reason = f"wrong on contents that it had not seen before: {worst.reason}"
    return Failure("REJECTED", reason, "", "fresh contents", None, worst.case, worst.output, worst.verdict)


def _matches_stock_outputs(runner: Runner, expected: OracleCase, outputs: Mapping[str, Any]) -> bool:
    """Return True if stock code fails on these contents too, and these outputs match its outputs within tolerance."""
    definition, record, baseline_check = runner.definition, runner.solution.record, runner.verification.baseline_check
    if record.spec.provides == "stock":
        return True
    stock = None if baseline_check is None else baseline_check.outputs(expected)
    if stock is None or not isinstance(judge(definition, record, expected, stock), Failure):
        return False
    truth = {name: value.to(expected.outputs[name].dtype) for name, value in stock.items()}
    return not isinstance(judge(definition, record, replace(expected, outputs=truth), outputs), Failure)


# ---- ownership ------------------------------------------------------------------------------------
# Check which kernels used the device time: those of the Solution's own language, or others. Pure.

MIN_OWNED_SHARE = 0.9
_MAX_NAME_LENGTH, _MAX_NAMES = 120, 40
"""Maximum length of a kernel name, and maximum number of names, in a Trace."""


@dataclass(frozen=True)
class Ownership:
    """Use of the device time by the calls.

    ``total_us`` is the time of all kernels, memsets and copies, and ``activities`` is their number. ``kernels`` has the shortened
    names of the first kernels. ``problem`` is a sentence, or None.
    """

    share: float
    kernels: tuple[str, ...]
    total_us: float
    problem: str | None = None
    activities: int = 0


# Decorators that mark a kernel in the three languages.
_MARKS = ("jit", "kernel", "prim_func")
# Names of kernels of libraries and of PyTorch's compiler. A function with such a name does not count as own.
_OF_LIBRARIES = re.compile(
    r"nvjet|cutlass|cublas|cudnn|sm\d+_|ampere_|volta_|gemm[kKS]\w*_|triton_(poi|red|per|tem|mm|for)"
)


def kernel_names(sources: Mapping[str, bytes]) -> set[str]:
    """Return the names of all functions in the Python sources that are marked as kernels, nested ones included."""
    trees = (ast.parse(source) for path, source in sources.items() if path.endswith(".py"))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {
        node.name
        for node in functions
        if any(_is_mark(decorator) for decorator in node.decorator_list) and not _OF_LIBRARIES.match(node.name)
    }


def _is_mark(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in _MARKS


def own_kernel(functions: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the names of kernels that are built from one of the functions.

    Triton names a kernel like its function, TileLang appends ``_kernel`` and a number, cuTile ``_K`` and the signature. A
    library cannot choose such a name at run time: the names are read from the sources, not from the process.
    """
    own = "|".join(sorted(map(re.escape, functions))) or "(?!)"
    return re.compile(rf"(void )?({own})(_kernel(_\d+)?|_K\w+)?(\(.*\))?")


def check_ownership(solution: Solution, sources: Mapping[str, bytes], used: Sequence[KernelUse]) -> Ownership:
    """Check that a tile Solution does its own work, on the stream it was called on.

    Memsets (an output, a workspace) are not counted. A ``python`` Solution may launch all kernels that PyTorch launches.
    """
    kernels = tuple(dict.fromkeys(use.name[:_MAX_NAME_LENGTH] for use in used))[:_MAX_NAMES]
    total_us, activities = sum(use.us for use in used), sum(use.count for use in used)
    streams = sorted({use.stream for use in used})
    if len(streams) > 1:
        return Ownership(
            0.0, kernels, total_us, f"work ran on {len(streams)} streams, not only on the one it was called on"
        )
    if solution.spec.language not in TILE_LANGUAGES:
        return Ownership(1.0, kernels, total_us, activities=activities)
    counted = [use for use in used if not use.name.startswith("Memset")]
    pattern = own_kernel(kernel_names(sources))
    owned = sum(use.us for use in counted if pattern.fullmatch(use.name.strip()))
    total = sum(use.us for use in counted)
    if total <= 0:
        return Ownership(0.0, kernels, total_us, "nothing ran on the device")
    share = owned / total
    if share < MIN_OWNED_SHARE:
        names = (use.name for use in counted if not pattern.fullmatch(use.name.strip()))
        foreign = tuple(dict.fromkeys(name[:_MAX_NAME_LENGTH] for name in names))
        more = f" and {len(foreign) - _MAX_NAMES} more" if len(foreign) > _MAX_NAMES else ""
        problem = (
            f"only {share:.0%} of the device time is in kernels that its {solution.spec.language} source defines "
            f"(at least {MIN_OWNED_SHARE:.0%} must be); the rest: {', '.join(foreign[:_MAX_NAMES])}{more}"
        )
        return Ownership(share, kernels, total_us, problem)
    return Ownership(share, kernels, total_us, activities=activities)

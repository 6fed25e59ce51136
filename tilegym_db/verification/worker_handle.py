"""The harness's handle of a worker process with one Solution: starts it, loads the source, and sends requests."""

from __future__ import annotations

import itertools
import math
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import torch

from tilegym_db.backends.compile_cache import compile_cache_folder
from tilegym_db.backends.toolchains import INTERPRETERS
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import RecordError
from tilegym_db.paths import number_of_setting
from tilegym_db.records import Config, Definition, Solution
from tilegym_db.records.definition_parts import layout_class
from tilegym_db.records.hardware import CPU
from tilegym_db.records.solution import narrowed
from tilegym_db.records.verdicts import PUBLISHED_SANDBOX_LEVEL, Tier
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.protocol import Reply, load_request
from tilegym_db.sandbox.shared_buffers import SharedBuffers, plan_slot, same_bytes
from tilegym_db.sandbox.situation import PLAIN, Situation
from tilegym_db.sandbox.worker import WorkerDied, WorkerHasNoMemory, WorkerProcess, WorkerTimeout
from tilegym_db.verification.cases import MAX_ROWS
from tilegym_db.verification.expected import OracleCase, broken_constraint
from tilegym_db.verification.gates import OutputComparison
from tilegym_db.verification.oracle import at_indices
from tilegym_db.verification.phases import CALLS, FIRST_CALLS, LOAD, START_WORKER, UNCERTAINTY, Phases
from tilegym_db.verification.verifier import (
    Failure,
    call_again,
    incorrect,
    judge,
    not_set_up,
    one_call,
    verify_slot,
)

# ---- tier policy ----------------------------------------------------------------------------------

MIN_SANDBOX_LEVEL = PUBLISHED_SANDBOX_LEVEL
"""Minimum sandbox level of the promotion tier; below it, a Solution could have changed its verifier."""


@dataclass(frozen=True)
class TierPolicy:
    """The checks of one tier.

    ``fuzz_cases``: number of shapes, layouts and contents beyond the workload's own. ``baseline_fuzz_cases``: the same for
    baselines, which are never resolved to; a few cases suffice, because compiled stock code compiles anew for each.
    ``fuzz_rows``: rows of the largest tensor of such a case. ``calls``: number of calls on the same inputs, whose bytes must
    agree. ``audited``: also check the ownership of the device time, and time calls on new contents by the harness's clock.
    ``in_turn``: follow each fuzz case by another call of its shape with other ranges and scalars, and by the first case again, in
    drawn situations. ``as_served``: also call kernels at large sizes and in sequences.
    ``draws``: draws per case that are checked together, for operators that draw at random.
    """

    tier: Tier
    fuzz_cases: int
    baseline_fuzz_cases: int
    calls: int
    audited: bool
    fuzz_rows: int = MAX_ROWS
    in_turn: bool = False
    as_served: bool = False
    draws: int = 1024

    def fuzz_cases_of(self, solution: Solution) -> int:
        """Return the number of fuzz cases for a Solution."""
        return self.fuzz_cases if solution.spec.role == "kernel" else self.baseline_fuzz_cases


# An interpreted program takes 10 ms, and there is one per few rows; 160 rows are enough for two tiles.
INTERPRETER = TierPolicy(
    "interpreter", fuzz_cases=4, baseline_fuzz_cases=4, calls=2, audited=False, fuzz_rows=160, draws=64
)
SCREEN = TierPolicy("screen", fuzz_cases=4, baseline_fuzz_cases=2, calls=2, audited=False)
UNTIMED = replace(SCREEN, tier="untimed")
"""Policy for a Solution that omits an output: a screen without times, because no other Solution's time is comparable."""

PROMOTION = TierPolicy(
    "promotion", fuzz_cases=24, baseline_fuzz_cases=4, calls=5, audited=True, in_turn=True, as_served=True, draws=16384
)


CALLING = ("call", "repeat", "time", "run", "profile")
"""Requests that call the Solution."""
FIRST_IN_SITUATION = 0.5
"""Share of the cases whose first call is made in a drawn situation, as the first call of a model is."""
IN_TURN = 98
"""Number of the situation of the call after another case; the calls before it have lower ones."""
MAX_DEATHS = 3
_WORKERS = itertools.count(1)  # names a folder per worker, in a scratch folder that several runners share


_NAMES_CUDA_ERROR = re.compile("CUDA error|CUDA_ERROR|cudaError")
_REFUSED_LAUNCH = re.compile(
    "CUDA error: (invalid (configuration )?argument|out of memory|too many resources requested for launch)|CUDA_ERROR_"
    "(INVALID_VALUE|OUT_OF_MEMORY|LAUNCH_OUT_OF_RESOURCES)|cudaError(InvalidValue|InvalidConfiguration|"
    "MemoryAllocation|LaunchOutOfResources)"
)
"""Errors that the driver gives before a kernel starts: the context stays as it was."""


def slices_along(size: int, seed: int) -> list[tuple[int, int]]:
    """Return the start and length of slices to call alone: one row, and some but not all of them."""
    generator = random.Random(f"slices {seed}")
    lengths = {1, generator.randrange(1, size)} if size > 1 else set()
    return [(generator.randrange(size - length + 1), length) for length in sorted(lengths)]


@dataclass(frozen=True)
class RunnerLimits:
    """Deadlines in seconds and memory in bytes for one runner."""

    first_call_s: float = 180.0
    call_s: float = 60.0
    buffer_bytes: int = 6 << 30
    fuzz_workers: int = 1
    """Maximum number of worker processes that share one set of fuzz cases; each may have to compile them."""
    series_s: float = math.inf
    """Maximum seconds of each series of calls with many sizes; the series have shorter limits too."""
    device_share: int = 1
    """Number of verifications that share the device's memory: each has its part of it for large cases."""


MAX_CPU_SERIES_S = "TILEGYM_DB_MAX_CPU_SERIES_S"
"""Variable for ``RunnerLimits.series_s`` on a CPU. On a GPU, whose results serve models, every series has all its time."""


def cpu_series_s() -> float:
    """Return the maximum seconds of a series of calls on a CPU."""
    return number_of_setting(MAX_CPU_SERIES_S, math.inf)


@dataclass
class WorkerHandle:
    """One Solution under one config, and the process that runs it: not started, alive or lost.

    ``broken`` is the reason why the Solution is given up on. ``spoilt``: later CUDA calls of the process would fail.
    ``profiled``: the profiler will record its calls; setting it up takes four seconds, before a source is loaded.
    """

    definition: Definition
    solution: SolutionFiles
    device: str
    folder: Path
    policy: TierPolicy = SCREEN
    config: Config = field(default_factory=dict)
    interpret: bool = False
    profiled: bool = True
    limits: RunnerLimits = field(default_factory=RunnerLimits)
    phases: Phases = field(default_factory=Phases)
    worker: WorkerProcess | None = None
    broken: Failure | None = None
    deaths: int = 0
    spoilt: bool = False
    aborted: bool = False
    _loaded: bool = False
    _load_failed: bool = False
    _is_first_call: bool = True

    def __post_init__(self) -> None:
        """Remove the outputs that the Solution omits from the definition."""
        self.definition = narrowed(self.definition, self.solution.record.spec.omits)

    @property
    def usable(self) -> bool:
        """True while the worker lives and its CUDA context works."""
        return self.worker is not None and self.worker.alive and not self.spoilt

    @property
    def sandbox_level(self) -> int:
        """The worker's sandbox level; 0 without a worker, or if it ended before it could report its level."""
        try:
            return 0 if self.worker is None else self.worker.sandbox_level
        except (WorkerDied, WorkerTimeout):
            return 0

    @property
    def is_given_up(self) -> bool:
        """True after the last death that is allowed."""
        return self.broken is not None and self.deaths >= MAX_DEATHS

    def excludes(self, case: Case) -> str | None:
        """Return the reason why the Solution does not support the sizes and layouts of a case, or None."""
        shapes = {name: self.definition.shape_of(name, case.call.axes) for name in case.call.layouts}
        classes = {name: layout_class(shape, case.strides(self.definition, name)) for name, shape in shapes.items()}
        return self.solution.record.unsupported(case.call.axes, case.call.dtypes, classes)

    def another(self) -> WorkerHandle:
        """Return a handle of the same Solution with a separate, started worker, for verifying cases only."""
        other = replace(
            self, worker=None, broken=None, deaths=0, spoilt=False, profiled=False, _loaded=False, _load_failed=False
        )
        other.worker = other.start()
        return other

    def start(self) -> WorkerProcess:
        """Start a process in a separate folder, with nothing loaded."""
        environment = INTERPRETERS[self.solution.record.spec.language].environment if self.interpret else {}
        folder = self.folder / f"{self.solution.name}-{next(_WORKERS)}"
        compiles = self.device == CPU and self.solution.uses_torch_compile
        worker = WorkerProcess(
            self.device,
            folder,
            environment,
            readable=self.solution.folders,
            compile_cache=compile_cache_folder() if compiles else None,
        )
        worker.on_answer = self._note_answer
        if self.aborted:
            worker.kill()
        return worker

    def _note_answer(self, op: str, seconds: float) -> None:
        """Add the time of a request that makes calls to the phases. The first call on mapped memory may compile."""
        if op == "attach":
            self._is_first_call = True
        elif op in CALLING:
            self.phases.add(FIRST_CALLS if self._is_first_call else CALLS, seconds, self.solution.name)
            self._is_first_call = False

    def abort(self) -> None:
        """Kill the worker for good. Every thread that waits for its answer gets an error."""
        self.aborted = True
        worker = self.worker  # a helper that has ended has none
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def after_failure(self, failure: Failure) -> bool:
        """End a worker that the failure broke, and return True if there was one; the third time, give the Solution up."""
        if self.worker is None or self.usable:
            return False
        self.close()
        if failure.no_memory:
            return False  # it never began: neither the Solution nor the device is the cause
        self.deaths += 1
        if self.deaths >= MAX_DEATHS:
            reason = f"its worker died {self.deaths} times; last: {failure.reason}"
            self.broken = replace(failure, reason=reason)
        return True

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self) -> Failure | None:
        """Ensure a worker with the source loaded; start a new one if it was lost. Nothing is called yet."""
        if self.worker is not None and (not self.usable or self._load_failed):
            self.close()  # a failed source may have changed the process
        if self.worker is None:
            try:
                with self.phases(START_WORKER, self.solution.name):
                    self.worker = self.start()
            except (WorkerDied, WorkerTimeout) as error:
                return not_set_up(Failure("RUNTIME_ERROR", "no process could be started", str(error)))
            self._loaded = self._load_failed = False
        if self._loaded:
            return None
        self.spoilt = False
        failure = self._load(self.worker)
        self._loaded, self._load_failed = failure is None, failure is not None
        if failure is not None and not failure.no_memory:
            self.broken = self.broken or failure
        return failure

    def _load(self, worker: WorkerProcess) -> Failure | None:
        """Prepare the worker and load the source, which may run code at import."""
        timeout_s = self.limits.first_call_s
        with self.phases(START_WORKER, self.solution.name):
            failure = self.order("prepare", timeout_s, profile=self.policy.audited and self.profiled)
        if failure is not None:
            return not_set_up(failure)
        try:
            request = load_request(self.definition, self.solution, interpret=self.interpret)
            with self.phases(LOAD, self.solution.name):
                reply = worker.request("load", timeout_s=timeout_s, **request)
        except WorkerTimeout as error:
            return Failure("TIMEOUT", "loading the source did not finish", str(error))
        except WorkerDied as error:
            return Failure("RUNTIME_ERROR", "the worker died while loading the source", str(error))
        if reply.ok:
            return None
        return Failure(reply.failed_as, "the source does not load", reply.error)

    # -- asking -------------------------------------------------------------------------------------------------------

    def attach(self, buffers: SharedBuffers, *cases: Case) -> Failure | None:
        """Map memory for the next calls in the worker, under the current config: of one case, or of a case per slot."""
        return self.order(
            "attach",
            self.limits.call_s,
            descriptors=(buffers.descriptor,),
            buffers=buffers.to_message(),
            config=self.config,
            scalars=[dict(case.call.scalars) for case in cases],
        )

    @contextmanager
    def mapping(self, buffers: SharedBuffers) -> Iterator[SharedBuffers]:
        """Free memory after the block. The block attaches it; the worker detaches afterwards.

        An error in the block, such as a comparison without memory, must not leave the memory mapped in the worker: that would
        keep it for as long as the worker lives.
        """
        with buffers:
            try:
                yield buffers
            except Exception:
                self.detach()
                raise
            self.detach()

    def memory_for(self, case: Case) -> AbstractContextManager[SharedBuffers]:
        """Allocate the memory of one call, and free it after the block; see :meth:`mapping`."""
        return self.mapping(SharedBuffers(plan_slot(self.definition, case), 1, self.device))

    def detach(self) -> None:
        """Unmap the memory of :meth:`attach`, if the worker is alive."""
        if self.worker is not None and self.worker.alive:
            self.order("detach", self.limits.call_s)

    def verify_slot(
        self, buffers: SharedBuffers, expected: OracleCase, calls: int
    ) -> tuple[dict[str, OutputComparison], dict[str, torch.Tensor]] | Failure:
        """Check every gate on the first slot of attached memory; see :func:`tilegym_db.verification.verifier.verify_slot`."""
        assert self.worker is not None
        before = expected.uncertainties.seconds
        outcome = verify_slot(
            self.worker,
            buffers,
            0,
            self.definition,
            self.solution.record,
            expected,
            calls=calls,
            situations=[self.situation(expected.case, number) for number in range(1, calls)],
            first_in=self._first_situation(expected.case),
            draws=self.policy.draws,
            timeout_s=self.limits.first_call_s,  # a new shape may have to compile
        )
        if expected.uncertainties.seconds > before:
            self.phases.add(UNCERTAINTY, expected.uncertainties.seconds - before, self.solution.name)
        if isinstance(outcome, Failure):
            self._note_spoilt(outcome.log)
        return outcome

    def _first_situation(self, case: Case) -> Situation:
        """Return a plain situation for half of the cases: what a kernel makes at its first call of a shape stays for others."""
        is_kernel = self.solution.record.spec.role == "kernel"
        drawn = is_kernel and random.Random(f"first {case.seed}").random() < FIRST_IN_SITUATION
        return self.situation(case, 0) if drawn else PLAIN

    def situation(self, case: Case, number: int) -> Situation:
        """Return the situation of a call on a case; a tier that makes no calls in turn has plain calls.

        ``torch.compile`` compiles for each situation, and raises after eight. It never serves a model.
        """
        if not self.policy.in_turn or self.solution.record.spec.provides == "compile":
            return PLAIN
        definition, on_gpu = self.definition, self.device != CPU
        read_only = [name for name in definition.tensor_inputs if name not in definition.in_place]
        by_torch = self.solution.record.spec.language == "python"
        return Situation.drawn(case.seed * 31 + number, read_only, multiplies_by_torch=by_torch, on_gpu=on_gpu)

    def one_call(
        self, buffers: SharedBuffers, expected: OracleCase, poison: int | None = None
    ) -> dict[str, torch.Tensor] | Failure:
        """Return the outputs of one call on the first slot of attached memory without comparing them."""
        assert self.worker is not None
        timeout_s = self.limits.first_call_s
        outcome = one_call(self.worker, buffers, 0, self.definition, expected, poison, timeout_s)
        if isinstance(outcome, Failure):
            self._note_spoilt(outcome.log)
        return outcome

    def call_in_turn(
        self, buffers: SharedBuffers, expected: OracleCase, other: OracleCase, first: Mapping[str, torch.Tensor]
    ) -> Failure | None:
        """Call on ``other`` at the same addresses, then on ``expected`` again, in other situations.

        ``first`` has the outputs of the earlier calls on ``expected``.
        """
        assert self.worker is not None
        failure = self.order("scalars", self.limits.call_s, scalars=other.case.call.scalars)
        if failure is None:
            found = self.verify_slot(buffers, other, calls=2)
            failure = found if isinstance(found, Failure) else None
        failure = failure or self.order("scalars", self.limits.call_s, scalars=expected.case.call.scalars)
        return failure or call_again(
            self.worker,
            buffers,
            self.definition,
            self.solution.record,
            expected,
            first,
            self.situation(expected.case, IN_TURN),
            timeout_s=self.limits.first_call_s,
        )

    def call_nearly(self, buffers: SharedBuffers, nearly: OracleCase) -> Failure | None:
        """Call once on contents that differ little from those of the call before, at the same addresses, and judge the result."""
        found = self.one_call(buffers, nearly)
        if isinstance(found, Failure):
            return found
        judged = judge(self.definition, self.solution.record, nearly, found)
        if isinstance(judged, Failure):
            return replace(judged, reason=f"after a call whose contents differ in one input: {judged.reason}")
        return None

    def check_slices(
        self, expected: OracleCase, first: Mapping[str, torch.Tensor], *, single: bool = False
    ) -> int | Failure:
        """Call slices of a case along the batch axis alone, if the Solution promises that this changes no bit of them.

        No memory may be attached. ``first`` has the outputs of the whole call. With ``single``, only one row is called alone.

        Returns:
            The number of slices whose outputs had the bytes that they have in ``first``, or the failure.
        """
        if not self.solution.record.spec.batch_invariant:
            return 0
        axis, same = self.definition.batch_axis, 0
        slices = slices_along(expected.case.call.axes[axis], expected.case.seed)
        for start, length in slices[:1] if single else slices:
            part = self._slice(expected, axis, start, length)
            if part is None:
                continue
            with self.memory_for(part.case) as buffers:
                found = self.attach(buffers, part.case) or self.one_call(buffers, part)
            if isinstance(found, Failure):
                return found
            rows = torch.arange(start, start + length, device=self.device)
            for name, value in at_indices(self.definition, first, {axis: rows}).items():
                if not same_bytes(found[name], value.contiguous()):
                    size = expected.case.call.axes[axis]
                    what = f"{name}: {length} of {axis}={size} from {start} on gave other bytes in a call without the others"
                    hint = "spec.batch_invariant promises that they do not"
                    return incorrect("batch invariance", f"{what}, at {expected.case}; {hint}", expected.case)
            same += 1
        return same

    def _slice(self, expected: OracleCase, axis: str, start: int, length: int) -> OracleCase | None:
        """Return a slice of a case as a call of fewer rows; None if the operator or the Solution excludes such a call."""
        definition, call = self.definition, expected.case.call
        axes = {**call.axes, axis: length}
        case = replace(expected.case, call=replace(call, axes=axes))
        try:
            definition.bind_axes({name: axes[name] for name in definition.var_axes})
        except RecordError:
            return None
        if self.excludes(case) is not None:
            return None
        rows = torch.arange(start, start + length, device=self.device)
        inputs = {
            name: value.contiguous() if isinstance(value, torch.Tensor) else value
            for name, value in at_indices(definition, expected.inputs, {axis: rows}).items()
        }
        if broken_constraint(definition, axes, inputs) is not None:
            return None
        return OracleCase(case, inputs, {}, {})

    def check_state(self) -> Failure | None:
        """Return a failure if the calls changed the process beyond their outputs, which must not happen in a model's process."""
        reply = self.ask("state", self.limits.call_s)
        if isinstance(reply, Failure):
            return reply
        found = reply.content.get("changes")
        if not isinstance(found, list):
            return Failure("REJECTED", "the worker's report of its state is not a list", gate="state")
        what = "; ".join(map(str, found))[:600]
        return Failure("REJECTED", f"it changes its process: {what}", gate="state") if found else None

    def memory_bytes(self) -> int:
        """Return the memory in use by the worker's processes."""
        return 0 if self.worker is None else self.worker.memory_bytes()

    def repeat_calls(
        self,
        slots: Sequence[int],
        count: int,
        *,
        threads: int = 1,
        seconds: float = math.inf,
        watched: int | None = None,
    ) -> Reply | Failure:
        """Make ``count`` calls on these slots in turn, or as many as fit in ``seconds``; see the worker's ``repeat``."""
        return self.ask(
            "repeat",
            self.limits.first_call_s,
            slots=list(slots),
            count=count,
            threads=threads,
            seconds=min(seconds, 1e6),
            watched=watched,
        )

    def order(self, op: str, timeout_s: float, descriptors: Sequence[int] = (), **content: object) -> Failure | None:
        """Send a request whose answer only says that it is done."""
        reply = self.ask(op, timeout_s, descriptors, **content)
        return reply if isinstance(reply, Failure) else None

    def ask(self, op: str, timeout_s: float, descriptors: Sequence[int] = (), **content: object) -> Reply | Failure:
        """Return the worker's answer; a failure if the worker was lost or could not do it."""
        assert self.worker is not None
        try:
            reply = self.worker.request(op, timeout_s=timeout_s, descriptors=descriptors, **content)
        except WorkerTimeout as error:
            return Failure("TIMEOUT", f"'{op}' did not finish", str(error))
        except WorkerHasNoMemory as error:
            return Failure("UNSUPPORTED", str(error), no_memory=True)
        except WorkerDied as error:
            return Failure("RUNTIME_ERROR", f"the worker was lost during '{op}'", str(error))
        if reply.ok:
            return reply
        self._note_spoilt(reply.error)
        reason = f"'{op}' failed in the worker: {reply.summary}"
        return Failure(reply.failed_as, reason, reply.error, no_memory=reply.no_memory)

    def _note_spoilt(self, text: str) -> None:
        """Note that the CUDA context is broken: after an illegal access, every later CUDA call of that process fails.

        A launch that the driver refuses, such as one with a grid beyond its limits, breaks nothing.
        """
        if _NAMES_CUDA_ERROR.search(_REFUSED_LAUNCH.sub("", text)):
            self.spoilt = True


# ---- case queue -----------------------------------------------------------------------------------
# The queue of fuzz cases from which a free worker takes the next, and the processors that such workers share.

Pair = tuple[OracleCase, OracleCase | None]
"""A fuzz case, and another call of its shape that follows it."""


class CaseQueue:
    """A queue that hands out cases in order until one has failed for good; thread-safe.

    All cases before the failed one have been handed out and are checked to the end. The first failure in the order of the cases
    therefore does not depend on the number and speed of workers. Cases may be added in their order while others are checked.
    """

    def __init__(self, pairs: Sequence[Pair], coming: int = 0) -> None:
        """Start with some cases in the queue, and with the number of those that will be added."""
        self._pairs, self._coming, self._next = list(pairs), coming, 0
        self._failures: list[tuple[int, Failure]] = []
        self.slices = 0
        """Slices of the checked cases that had the same bits alone as in their call."""
        self._lock = threading.Condition()

    def __iter__(self) -> Iterator[tuple[int, Pair]]:
        """Yield the remaining cases with their numbers; wait for those that are coming."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._next < len(self._pairs) or not self._coming)
                if self._next >= len(self._pairs):
                    return
                number = self._next
                self._next += 1
            yield number, self._pairs[number]

    def put(self, pair: Pair | None) -> None:
        """Add the next case that was coming, or with None, leave it out."""
        with self._lock:
            if self._coming:
                self._coming -= 1
                self._pairs += [] if pair is None else [pair]
            self._lock.notify_all()

    @property
    def left(self) -> int:
        """The number of remaining cases, including those that are coming."""
        with self._lock:
            return len(self._pairs) + self._coming - self._next

    def close(self) -> None:
        """Stop handing out cases."""
        with self._lock:
            self._next, self._coming = len(self._pairs), 0
            self._lock.notify_all()

    def fail(self, failure: Failure, number: int | None = None) -> None:
        """Record the failure of a case, or without a number, of a worker that has not taken a case."""
        with self._lock:
            self._failures.append((len(self._pairs) if number is None else number, failure))
        if not failure.excused:
            self.close()

    def count_slices(self, slices: int) -> None:
        """Add the slices of a checked case that had the same bits alone."""
        with self._lock:
            self.slices += slices

    @property
    def failures(self) -> list[Failure]:
        """The failures so far, in the order of their cases."""
        with self._lock:
            return [failure for _, failure in sorted(self._failures, key=itemgetter(0))]


# ---- processors -----------------------------------------------------------------------------------
# Processors of a machine are shared by Solutions that are verified in parallel, and by their helpers.


ALONE_PER_PROCESSOR = 4
"""Runners that share a processor if they compile little. They wait for the GPU and the harness most of the time."""


class Processors:
    """Budget of processes. Each runner has a processor until it is done; helpers use the rest.

    Thread-safe.
    """

    def __init__(self, total: int, runners: int = 1, alone: int = 0) -> None:
        """Start with ``runners``, running or waiting; ``alone`` of them compile little and never ask for a helper."""
        self._total, self._runners, self._alone, self._helpers = total, runners, alone, 0
        self._lock = threading.Lock()

    def take(self, workers: int) -> bool:
        """Take a processor for one more worker of a runner that has ``workers``; return False if there is none.

        A runner cannot take more than its share, so that later ones find processors too. Give the processor back with
        :meth:`give_back`.
        """
        with self._lock:
            alone = -(-self._alone // ALONE_PER_PROCESSOR)
            sharing = self._runners - self._alone
            share = -(-(self._total - alone) // max(sharing, 1))
            if sharing + alone + self._helpers >= self._total or workers >= share:
                return False
            self._helpers += 1
            return True

    def give_back(self) -> None:
        """Give back the processor of a helper that has ended."""
        with self._lock:
            self._helpers -= 1

    def done(self, *, alone: bool = False) -> None:
        """Release the processor of a runner that is done."""
        with self._lock:
            self._runners -= 1
            self._alone -= alone

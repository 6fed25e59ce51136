"""The harness's handle of one worker process with one Solution loaded: start it, load, ask, give up on it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tilegym_db.backends.compile_cache import compile_cache_folder
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Config, Definition, Solution
from tilegym_db.records.case import Case
from tilegym_db.records.hardware import CPU
from tilegym_db.records.layouts import layout_class
from tilegym_db.records.solution import narrowed
from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL, Tier
from tilegym_db.sandbox.interpreters import INTERPRETERS
from tilegym_db.sandbox.protocol import Reply, load_request
from tilegym_db.sandbox.shared_buffers import SharedBuffers
from tilegym_db.sandbox.worker import WorkerDied, WorkerHasNoMemory, WorkerProcess, WorkerTimeout
from tilegym_db.verify.cases import MAX_ROWS
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.gates import OutputVerdict
from tilegym_db.verify.verifier import Failure, call_again, not_set_up, one_call, verify_slot

# ---- tier policy ----------------------------------------------------------------------------------
# How much a tier asks of a Solution before it says PASSED.

MIN_SANDBOX_LEVEL = PUBLISHED_SANDBOX_LEVEL
"""Below this, a Solution could have reached what judges it; a promotion needs at least this level."""


@dataclass(frozen=True)
class TierPolicy:
    """The checks of one tier.

    ``fuzz_cases``: shapes, layouts and contents beyond the workload's own. ``baseline_fuzz_cases``: the same for what is never
    resolved to, so that its fuzz cases serve nobody; a few show that it is honest, and compiled stock code is compiled anew for
    each. ``fuzz_rows``: of the largest tensor of such a case. ``calls``: on the same inputs, whose bytes must agree. ``audited``:
    ownership of the device time, and the harness's own clock over contents never seen before. ``in_turn``: each fuzz case is
    followed by another call of its shape, with other ranges and scalars, and then by the first again. ``draws``: how many of each
    case are judged together, of operators that draw at random.
    """

    tier: Tier
    fuzz_cases: int
    baseline_fuzz_cases: int
    calls: int
    audited: bool
    fuzz_rows: int = MAX_ROWS
    in_turn: bool = False
    draws: int = 1024

    def fuzz_cases_of(self, solution: Solution) -> int:
        """Return how many cases a Solution is fuzzed with."""
        return self.fuzz_cases if solution.spec.role == "kernel" else self.baseline_fuzz_cases


# An interpreted program takes a hundredth of a second, and one is started for every few rows: enough of them for two tiles.
INTERPRETER = TierPolicy(
    "interpreter", fuzz_cases=4, baseline_fuzz_cases=4, calls=2, audited=False, fuzz_rows=160, draws=64
)
SCREEN = TierPolicy("screen", fuzz_cases=4, baseline_fuzz_cases=2, calls=2, audited=False)
UNTIMED = replace(SCREEN, tier="untimed")
"""What omits an output is verified as in a screen, and not timed: no other Solution's time is comparable with its own."""

PROMOTION = TierPolicy(
    "promotion", fuzz_cases=24, baseline_fuzz_cases=4, calls=5, audited=True, in_turn=True, draws=16384
)


MAX_DEATHS = 3
_WORKERS = itertools.count(1)  # a folder of its own for each, in a scratch folder that several runners share


@dataclass(frozen=True)
class RunnerLimits:
    """Deadlines in seconds and memory in bytes for one runner."""

    first_call_s: float = 180.0
    call_s: float = 60.0
    buffer_bytes: int = 6 << 30
    fuzz_workers: int = 1
    """Worker processes at most that share one set of fuzz cases, each of which may have to be compiled for."""


@dataclass
class WorkerHandle:
    """One Solution under one config, and the process that runs it: none yet, one that lives, or one that was lost.

    ``broken`` says why the Solution is given up on, ``spoilt`` that every later CUDA call of the process would fail.
    ``profiled``: the profiler is going to look at its calls; setting it up takes four seconds, before a source is loaded.
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
    worker: WorkerProcess | None = None
    broken: Failure | None = None
    deaths: int = 0
    spoilt: bool = False
    aborted: bool = False
    _loaded: bool = False
    _load_failed: bool = False

    def __post_init__(self) -> None:
        """What the Solution omits, it is neither given a buffer for nor judged by."""
        self.definition = narrowed(self.definition, self.solution.record.spec.omits)

    @property
    def usable(self) -> bool:
        """True while the worker lives and nothing has spoilt its CUDA context."""
        return self.worker is not None and self.worker.alive and not self.spoilt

    @property
    def sandbox_level(self) -> int:
        """How well the worker is confined; 0 while there is none, or where it ended before it could say."""
        try:
            return 0 if self.worker is None else self.worker.sandbox_level
        except (WorkerDied, WorkerTimeout):
            return 0

    @property
    def is_given_up(self) -> bool:
        """True after the last death that is forgiven."""
        return self.broken is not None and self.deaths >= MAX_DEATHS

    def excludes(self, case: Case) -> str | None:
        """Return why the Solution does not say that it takes the sizes and layouts of a case, or None."""
        shapes = {name: self.definition.shape_of(name, case.call.axes) for name in case.call.layouts}
        classes = {name: layout_class(shape, case.strides(self.definition, name)) for name, shape in shapes.items()}
        return self.solution.record.unsupported(case.call.axes, case.call.dtypes, classes)

    def another(self) -> WorkerHandle:
        """Return a handle of the same with a worker of its own, which has started, to verify cases and no more.

        Raises:
            WorkerDied: no worker could be started.
        """
        other = replace(
            self, worker=None, broken=None, deaths=0, spoilt=False, profiled=False, _loaded=False, _load_failed=False
        )
        other.worker = other.start()
        return other

    def start(self) -> WorkerProcess:
        """Return a process in a folder of its own, in which nothing is loaded yet."""
        environment = INTERPRETERS[self.solution.record.spec.language].environment if self.interpret else {}
        folder = self.folder / f"{self.solution.name}-{next(_WORKERS)}"
        compiles = self.device == CPU and self.solution.uses_torch_compile
        worker = WorkerProcess(
            self.device,
            folder,
            environment,
            readable=(self.solution.folder,),
            compile_cache=compile_cache_folder() if compiles else None,
        )
        if self.aborted:
            worker.kill()
        return worker

    def abort(self) -> None:
        """Kill the worker for good, so that whoever waits for an answer, in whatever thread, is told that it died."""
        self.aborted = True
        worker = self.worker  # a helper that ends meanwhile has none any more
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def after_failure(self, failure: Failure) -> bool:
        """End a worker that did not survive; true if so. The Solution is given up on after the third death."""
        if self.worker is None or self.usable:
            return False
        self.close()
        if failure.no_memory:
            return False  # for want of memory it never began: no fault of the Solution, nor of the device
        self.deaths += 1
        if self.deaths >= MAX_DEATHS:
            reason = f"its worker died {self.deaths} times; last: {failure.reason}"
            self.broken = replace(failure, reason=reason)
        return True

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self) -> Failure | None:
        """Return a worker with the source loaded: the one there is, or a fresh one where it was lost. Nothing is called
        yet.
        """
        if self.worker is not None and (not self.usable or self._load_failed):
            self.close()  # what a source did before it raised is in no later attempt
        if self.worker is None:
            try:
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
        """Everything before the Solution's first call. What its source does at import happens here."""
        timeout_s = self.limits.first_call_s
        failure = self.order("prepare", timeout_s, profile=self.policy.audited and self.profiled)
        if failure is not None:
            return not_set_up(failure)
        try:
            request = load_request(self.definition, self.solution, interpret=self.interpret)
            reply = worker.request("load", timeout_s=timeout_s, **request)
        except WorkerTimeout as error:
            return Failure("TIMEOUT", "loading the source did not finish", str(error))
        except WorkerDied as error:
            return Failure("RUNTIME_ERROR", "the worker died while loading the source", str(error))
        if reply.ok:
            return None
        return Failure(reply.failed_as, "the source does not load", reply.error)

    # -- asking -------------------------------------------------------------------------------------------------------

    def attach(self, buffers: SharedBuffers, case: Case) -> Failure | None:
        """Have the worker map memory that the next calls work on, under the config of now."""
        return self.order(
            "attach",
            self.limits.call_s,
            descriptors=(buffers.descriptor,),
            buffers=buffers.to_message(),
            config=self.config,
            scalars=case.call.scalars,
        )

    def detach(self) -> None:
        """Have a worker that lives let go of that memory."""
        if self.worker is not None and self.worker.alive:
            self.order("detach", self.limits.call_s)

    def verify_slot(
        self, buffers: SharedBuffers, expected: Expected, calls: int, in_model: int | None = None
    ) -> tuple[dict[str, OutputVerdict], dict[str, torch.Tensor]] | Failure:
        """Return every gate on the first slot of attached memory; as :func:`tilegym_db.verify.verifier.verify_slot`."""
        assert self.worker is not None
        outcome = verify_slot(
            self.worker,
            buffers,
            0,
            self.definition,
            self.solution.record,
            expected,
            calls=calls,
            in_model=in_model,
            draws=self.policy.draws,
            timeout_s=self.limits.first_call_s,  # any new shape may compile anew
        )
        if isinstance(outcome, Failure):
            self._note_spoilt(outcome.log)
        return outcome

    def one_call(self, buffers: SharedBuffers, expected: Expected) -> dict[str, torch.Tensor] | Failure:
        """What one call on the first slot of attached memory leaves, whatever that is."""
        assert self.worker is not None
        timeout_s = self.limits.first_call_s
        return one_call(self.worker, buffers, 0, self.definition, expected, None, timeout_s)

    def call_in_turn(
        self, buffers: SharedBuffers, expected: Expected, other: Expected, first: Mapping[str, torch.Tensor]
    ) -> Failure | None:
        """Call on ``other`` at the same addresses, as a model does where alignment is a model's, then on ``expected`` again.

        ``first`` is what the calls on ``expected`` have given so far.
        """
        assert self.worker is not None
        failure = self.order("scalars", self.limits.call_s, scalars=other.case.call.scalars)
        if failure is None:
            found = self.verify_slot(buffers, other, calls=1 if other.case.offset else 2, in_model=1)
            failure = found if isinstance(found, Failure) else None
        failure = failure or self.order("scalars", self.limits.call_s, scalars=expected.case.call.scalars)
        return failure or call_again(
            self.worker,
            buffers,
            self.definition,
            self.solution.record,
            expected,
            first,
            timeout_s=self.limits.first_call_s,
        )

    def check_state(self) -> Failure | None:
        """Return why the calls so far must not happen in a model's process: what they changed beyond their outputs."""
        reply = self.ask("state", self.limits.call_s)
        if isinstance(reply, Failure):
            return reply
        found = reply.content.get("changes")
        if not isinstance(found, list):
            return Failure("REJECTED", "the worker's account of its state is no list", gate="state")
        what = "; ".join(map(str, found))[:600]
        return Failure("REJECTED", f"it changes its process: {what}", gate="state") if found else None

    def repeat_calls(self, slots: Sequence[int], count: int) -> Failure | None:
        """So many more calls on these slots, as in a process that has served for a while."""
        return self.order("repeat", self.limits.call_s, slots=list(slots), count=count)

    def order(self, op: str, timeout_s: float, descriptors: Sequence[int] = (), **content: object) -> Failure | None:
        """Ask for something whose answer says nothing but that it is done."""
        reply = self.ask(op, timeout_s, descriptors, **content)
        return reply if isinstance(reply, Failure) else None

    def ask(self, op: str, timeout_s: float, descriptors: Sequence[int] = (), **content: object) -> Reply | Failure:
        """Return the worker's answer; a failure where it was lost, or says that it could not do it."""
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
        """After an illegal access every later CUDA call of that process fails, whoever makes it."""
        if "CUDA error" in text or "CUDA_ERROR" in text or "cudaError" in text:
            self.spoilt = True

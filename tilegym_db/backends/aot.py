"""Compiles Solutions ahead of time in worker processes, for GPUs that this machine may not have.

A worker intercepts the language and calls the Solution's ``run`` on arguments without contents. So it compiles exactly
the code of a launch: same grid choice, same constants, same specialisation of sizes and strides.
Jobs and results cross the process boundary as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tilegym_db.backends.toolchains import TOOLCHAINS, toolchain_status
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import SolutionError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.solution import Tunable
from tilegym_db.records.trace import clip_log

# ---- Jobs and results ------------------------------------------------------------------------------------

CompileStatus = Literal["compiled", "refused", "failed", "unsupported", "toolchain-missing"]
"""``refused``: the toolchain cannot compile for this target at all (not even a one-line copy), so nothing is said about
the Solution. ``failed``: the Solution does not compile, or its compiler hung or crashed. ``unsupported``: the Solution
does not declare this target, shape, dtype or layout, or there is nothing to compile."""

DEFAULT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Artifact:
    """The machine code of one kernel specialisation.

    ``key`` tells specialisations apart: two calls that share it run the same code without compiling again.
    """

    kernel: str
    key: str
    bytes: int
    """Size of the device code."""
    shared_bytes: int | None = None
    """Shared memory a block asks for at launch, where the compiler says."""


"""Shared memory that a block requests at launch, if the compiler reports it."""


@dataclass(frozen=True)
class CompileResult:
    """The outcome of one job. ``log`` says why it is not ``compiled``; it is clipped."""

    status: CompileStatus
    seconds: float = 0.0
    artifacts: tuple[Artifact, ...] = ()
    log: str = ""

    def to_json(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> CompileResult:
        """Parse the output of :meth:`to_json`."""
        value: dict[str, Any] = json.loads(text)
        artifacts = tuple(Artifact(**item) for item in value.pop("artifacts"))
        return cls(**{**value, "artifacts": artifacts, "log": clip_log(value["log"])})


@dataclass(frozen=True)
class CompileJob:
    """A job: compile the kernels that one Solution launches for one Workload, under one config, for one target."""

    definition: Definition
    solution: SolutionFiles
    workload: Workload
    target: str
    """A name of ``records.hardware.TARGETS``, such as ``sm_90``."""
    config: Mapping[str, Tunable] = field(default_factory=dict)
    """Keyword arguments of ``run``; empty means the source's own defaults."""
    timeout_s: float = DEFAULT_TIMEOUT_S

    def to_json(self) -> str:
        """Return the job as one line of JSON; it holds the Solution's file and digest."""
        return json.dumps(
            {
                "definition": self.definition.model_dump(mode="json"),
                "record": str(self.solution.path),
                "digest": self.solution.digest,
                "workload": self.workload.model_dump(mode="json"),
                "target": self.target,
                "config": dict(self.config),
                "timeout_s": self.timeout_s,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> CompileJob:
        """Parse the output of :meth:`to_json` and read the Solution again.

        Raises:
            SolutionError: its file no longer names the source that the job was made for.
        """
        value: dict[str, Any] = json.loads(text)
        solution = SolutionFiles.read(Path(value["record"]))
        if solution.digest != value["digest"]:
            raise SolutionError(
                f"{solution.path}: the source changed while it was queued to compile. Run it again.",
                code="source_changed",
            )
        return cls(
            definition=Definition.model_validate(value["definition"]),
            solution=solution,
            workload=Workload.model_validate(value["workload"]),
            target=value["target"],
            config=value["config"],
            timeout_s=value["timeout_s"],
        )


# ---- recorder -------------------------------------------------------------------------------------
# Collects what a Solution launches while its language is intercepted.


@dataclass
class Recorder:
    """The launches of one call of ``run`` for one target. Equal specialisations are kept once."""

    target: str
    identity: str = ""
    """Digest of the source, for keys of languages that do not hash a kernel's source themselves."""
    launches: int = 0
    _artifacts: dict[str, Artifact] = field(default_factory=dict)

    def add(self, artifact: Artifact) -> None:
        """Count a launch and keep its machine code's description."""
        self.launches += 1
        self._artifacts.setdefault(artifact.key, artifact)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """Distinct specialisations in the order of their first launch."""
        return tuple(self._artifacts.values())


JOBS_WORTH_A_WORKER = 4
MAX_WORKERS = 16  # a worker with PyTorch and a compiler takes almost a gigabyte

OnResult = Callable[[CompileJob, CompileResult], None]


def compile_many(
    jobs: Sequence[CompileJob], on_result: OnResult | None = None, processes: int | None = None
) -> list[CompileResult]:
    """Compile many jobs; each worker process serves one language at a time, and a crash or hang fails only its job.

    Args:
        processes: how many workers at most. By default one less than the machine's cores, but no more than are worth
            the seconds that each takes to import its language.
    """
    results: dict[int, CompileResult] = {}
    waiting: list[tuple[int, CompileJob]] = []
    missing = {language: _missing(language) for language in {job.solution.record.spec.language for job in jobs}}

    def finish(index: int, result: CompileResult) -> None:
        results[index] = result
        if on_result is not None:
            on_result(jobs[index], result)

    for index, job in enumerate(jobs):
        early = _unsupported(job) or missing[job.solution.record.spec.language]
        if early is None:
            waiting.append((index, job))
        else:
            finish(index, early)
    if waiting:
        _Pool(waiting).run(finish, processes or _default_processes(len(waiting)))
    return [results[index] for index in range(len(jobs))]


def _default_processes(jobs: int) -> int:
    worth_importing = -(-jobs // JOBS_WORTH_A_WORKER)
    return max(1, min((os.cpu_count() or 2) - 1, worth_importing, MAX_WORKERS))


def _unsupported(job: CompileJob) -> CompileResult | None:
    """Return the result of a job without work: nothing to compile, or not supported by the Solution."""
    spec = job.solution.record.spec
    if not TOOLCHAINS[spec.language].targets:
        return CompileResult("unsupported", log=f"a {spec.language} solution has nothing to compile ahead of time")
    reason = job.solution.record.unsupported_at(job.definition, job.workload, job.target)
    return CompileResult("unsupported", log=reason) if reason else None


def _missing(language: str) -> CompileResult | None:
    status = toolchain_status(language)
    if status.available:
        return None
    return CompileResult("toolchain-missing", log=f"{language}: {status.detail}. Fix: {status.fix}")


class _Pool:
    """Threads that each drive one worker process, with one job queue per language."""

    def __init__(self, jobs: Sequence[tuple[int, CompileJob]]) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._count = len(jobs)
        self._queues: dict[str, deque[tuple[int, CompileJob]]] = {}
        self._workers: list[CompilerProcess] = []
        self._done: queue.Queue[tuple[int, CompileResult] | BaseException] = queue.Queue()
        for index, job in jobs:
            self._queues.setdefault(job.solution.record.spec.language, deque()).append((index, job))

    def run(self, finish: Callable[[int, CompileResult], None], processes: int) -> None:
        """Work until every job is done; end all workers first if ``finish`` raises or the user interrupts."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(processes)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(self._count):
                item = self._done.get()
                if isinstance(item, BaseException):
                    raise item
                finish(*item)
        finally:
            self._stop()
            for thread in threads:
                thread.join()

    def _serve(self) -> None:
        try:
            while (worker := self._new_worker()) is not None:
                with worker:
                    while (taken := self._next_job(worker.language)) is not None:
                        index, job = taken
                        self._done.put((index, worker.compile(job)))
                with self._lock:
                    self._workers.remove(worker)
        except BaseException as error:  # a thread boundary: raised again in the caller's thread, with its traceback
            self._done.put(error)

    def _new_worker(self) -> CompilerProcess | None:
        """Return a worker for the language with the most jobs left per worker, or None if all jobs are taken."""
        with self._lock:
            serving = Counter(worker.language for worker in self._workers)
            left = {name: len(queued) / (1 + serving[name]) for name, queued in self._queues.items() if queued}
            if self._stopped or not left:
                return None
            worker = CompilerProcess(max(left, key=lambda name: left[name]))
            self._workers.append(worker)
            return worker

    def _next_job(self, language: str) -> tuple[int, CompileJob] | None:
        with self._lock:
            queued = self._queues[language]
            return queued.popleft() if queued and not self._stopped else None

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.kill()


# ---- compiler process -----------------------------------------------------------------------------
# The parent starts an ahead-of-time worker, sends it a job and reads the result.

START_TIMEOUT_S = 180.0  # imports of a cold file system; TileLang takes seconds at best
GRACE_S = 10.0  # the worker ends itself at the timeout, with a traceback; this is for one that cannot

_HIDDEN = ("TRITON_INTERPRET",)  # it would replace the compiler by the interpreter


class _WorkerLostError(Exception):
    """The process ended or stayed silent instead of answering."""


class CompilerProcess:
    """A worker for one language, in a separate session. It is replaced after a crash or a timeout."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - closed by __exit__
        self._unread = b""
        self._broken = ""
        self._killed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._log.close()

    def compile(self, job: CompileJob) -> CompileResult:
        """Run one job. A crash or a timeout gives a ``failed`` result with the known facts, never an exception."""
        start, begin, limit_s = time.monotonic(), 0, START_TIMEOUT_S
        try:
            self._start()
            if self._broken:
                return CompileResult("toolchain-missing", log=self._broken)
            start, begin, limit_s = time.monotonic(), self._log.seek(0, os.SEEK_END), job.timeout_s
            result = CompileResult.from_json(self._ask(job.to_json(), limit_s + GRACE_S))
        except _WorkerLostError as lost:
            seconds = time.monotonic() - start
            reason = f"timed out after {limit_s:g} s" if seconds >= limit_s else self._how_it_ended(lost)
            self.close()
            return CompileResult("failed", seconds, log=_join(reason, self._printed(begin)))
        if result.status == "failed":
            return replace(result, log=_join(result.log, self._printed(begin)))
        return result

    def compile_supported(self, job: CompileJob) -> CompileResult:
        """Run one job as :func:`compile_many` does: not at all if the Solution excludes it or the compiler is missing."""
        return _unsupported(job) or _missing(self.language) or self.compile(job)

    def kill(self) -> None:
        """End the process and every compiler it started. From any thread: a job in progress, or begun later, then fails."""
        self._killed = True
        self._end()

    def _end(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its session: nvcc and ptxas outlive a worker that dies

    def close(self) -> None:
        """End the process and free what belongs to it; the next job starts another, unless :meth:`kill` was called."""
        self._end()
        process, self._process = self._process, None
        if process is not None:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._process is not None:
            return
        if self._killed:
            raise _WorkerLostError("was ended before it started")
        self._unread = b""
        with open(
            self._log.name, "ab"
        ) as log:  # a separate file position, because the parent reads while the worker writes
            self._process = subprocess.Popen(
                # -P: no file of the working folder may stand for a module of Python.
                [sys.executable, "-P", "-m", "tilegym_db.backends.aot_worker", self.language],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        if self._killed:  # by another thread, before the process existed
            self._end()
        ready = json.loads(self._answer(START_TIMEOUT_S))
        if not ready["ready"]:
            fix = f"pip install --force-reinstall 'tilegym-db[{TOOLCHAINS[self.language].extra}]'"
            self._broken = f"{self.language} is installed but does not import. Fix: {fix}\n{ready['log']}"

    def _ask(self, line: str, timeout_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _WorkerLostError("ended before it took the job") from None
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise _WorkerLostError("did not answer")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise _WorkerLostError("ended without an answer")
                self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _how_it_ended(self, lost: _WorkerLostError) -> str:
        if self._process is None:
            return f"the {self.language} compiler process {lost}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        return f"the {self.language} compiler process {lost} ({_describe_exit(self._process.returncode)})"

    def _printed(self, begin: int) -> str:
        """Return the output of the worker, its compilers and the Solution since a position."""
        self._log.seek(begin)
        return self._log.read().decode(errors="replace").strip()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "still running"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _join(reason: str, printed: str) -> str:
    return clip_log(f"{reason}\n-- printed --\n{printed}" if printed else reason)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])  # a checkout that is not installed must be found as well
    environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    search = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return environment | {
        "PYTHONPATH": os.pathsep.join(search),
        "CUDA_VISIBLE_DEVICES": "",  # compilation must not touch, or depend on, a GPU that happens to be here
        "TILELANG_PRINT_ON_COMPILATION": "0",
        "PYTHONWARNINGS": "ignore",  # what a job prints ends up in its log, which is for errors
    }

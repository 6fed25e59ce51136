"""The parent's end of an ahead-of-time worker: start it, give it a job, take the result or its remains."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tilegym_db.backends.compile_jobs import CompileJob, CompileResult
from tilegym_db.backends.toolchains import TOOLCHAINS
from tilegym_db.records.trace import clip_log

__all__ = ["CompilerProcess"]

START_TIMEOUT_S = 180.0  # imports of a cold file system; TileLang takes seconds at best
GRACE_S = 10.0  # the worker ends itself at the timeout, with a traceback; this is for one that cannot

_HIDDEN = ("TRITON_INTERPRET",)  # it would replace the compiler by the interpreter


class _WorkerLostError(Exception):
    """The process ended or stayed silent instead of answering."""


class CompilerProcess:
    """One worker for one language, in a session of its own. It is replaced after a crash or a timeout."""

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
        """Run one job. A crash or a timeout is a ``failed`` result that carries what is known, never an exception."""
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
        with open(self._log.name, "ab") as log:  # a position of its own: the parent reads while the worker writes
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tilegym_db.backends.aot_worker", self.language],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        if self._killed:  # meanwhile, by a thread that saw no process yet
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
        """What the worker, its compilers and the Solution wrote since a position."""
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

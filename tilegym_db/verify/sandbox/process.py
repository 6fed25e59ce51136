"""The supervisor's end of a worker: start it in its own session, ask with a deadline, kill it whole.

Level 1 of the sandbox (``docs/verification.md``): own process group, scrubbed environment, private caches and scratch folder.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_db.verify.sandbox import protocol

__all__ = ["SANDBOX_LEVEL", "WorkerDied", "WorkerProcess", "WorkerTimeout"]

SANDBOX_LEVEL = 1
START_TIMEOUT_S = 180.0
LOG_TAIL_BYTES = 4000
MAX_SUMMARY = 300

# What a compiler or the CUDA driver needs to find itself; nothing else of the user's environment reaches a Solution.
KEPT_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "VIRTUAL_ENV",
    "LANG",
    "LC_ALL",
)


class WorkerDied(Exception):
    """The worker ended, or broke the protocol, before it answered."""


class WorkerTimeout(Exception):
    """The worker did not answer in time and was killed."""


@dataclass(frozen=True)
class Reply:
    """An answer: ``ok`` with its content, or the Solution's error. Its texts are the worker's word, made fit to store."""

    ok: bool
    content: Mapping[str, Any]

    @property
    def error(self) -> str:
        """The traceback, where the Solution raised."""
        return _storable(self.content.get("error", ""))

    @property
    def summary(self) -> str:
        """The last line of the traceback: the exception and its message."""
        return (self.error.strip().splitlines() or ["no message"])[-1][:MAX_SUMMARY]

    @property
    def mismatch(self) -> tuple[bool, str] | None:
        """Where a returned value does not fit its output: (true for its dtype, false for its shape or kind; what)."""
        found = self.content.get("mismatch")
        if not isinstance(found, dict):
            return None
        return found.get("kind") == "dtype", _storable(found.get("what"))[:MAX_SUMMARY]

    @property
    def is_compile_error(self) -> bool:
        """True where the language's compiler refused the kernel."""
        return self.content.get("kind") == "compile"


def _storable(text: object) -> str:
    """Text without what JSON, a database or a terminal must not be given: lone surrogates, NUL, escape sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(text))


class WorkerProcess:
    """One worker. Starts at once and imports in the background; the first request waits until it is ready."""

    def __init__(self, device: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start the process.

        Args:
            device: ``cpu`` or ``cuda:<n>``.
            folder: its private scratch folder (caches, HOME, log); created, and removed by :meth:`close`.
            environment: variables to add, such as ``TRITON_INTERPRET``.
        """
        self.device = device
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "output.log").open("wb")
        requests_read, self._requests = os.pipe()
        self._replies, replies_write = os.pipe()
        self._next_id = 0
        self._buffer = b""
        self._ready = False
        command = [
            sys.executable,
            "-m",
            "tilegym_db.verify.sandbox.worker",
            str(requests_read),
            str(replies_write),
            device,
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=folder,
            env=self._environment(environment or {}),
            pass_fds=(requests_read, replies_write),
            start_new_session=True,
        )
        os.close(requests_read)
        os.close(replies_write)

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        package_root = str(Path(__file__).resolve().parents[3])
        paths = [package_root, *environment.get("PYTHONPATH", "").split(os.pathsep)]
        caches = self.folder / "cache"
        environment |= {
            "PYTHONPATH": os.pathsep.join(path for path in dict.fromkeys(paths) if path),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TILELANG_CACHE_DIR": str(caches / "tilelang"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "CUDA_CACHE_PATH": str(caches / "cuda"),
            "CUDA_TILE_CACHE_DIR": str(caches / "cutile"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1)),
        }
        return environment | dict(extra)

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def request(self, op: str, *, timeout_s: float, **content: Any) -> Reply:
        """Ask, and wait for the answer to this very request.

        Raises:
            WorkerTimeout: no answer in ``timeout_s`` seconds; the worker has been killed.
            WorkerDied: the process ended or sent something else than the answer; it has been killed.
        """
        if not self._ready:
            self._receive(0, START_TIMEOUT_S)
            self._ready = True
        self._next_id += 1
        try:
            os.write(self._requests, protocol.encode({"id": self._next_id, "op": op, **content}))
        except OSError:
            raise self._died("is gone") from None
        try:
            message = self._receive(self._next_id, timeout_s)
        except KeyboardInterrupt:
            self.kill()  # nobody waits for its answer any more, and the next request must not get it
            raise
        return Reply(bool(message.get("ok")), message)

    def _receive(self, expected: int, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    self.kill()
                    raise WorkerTimeout(f"no answer within {timeout_s:g} s{self._log_tail()}")
                piece = os.read(self._replies, 1 << 16)
                if not piece:
                    raise self._died("ended")
                self._buffer += piece
                if len(self._buffer) > 2 * protocol.MAX_LINE:
                    raise self._died("sent an endless message")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = protocol.decode(line)
        except protocol.ProtocolError as error:
            raise self._died(f"broke the protocol: {error}") from None
        if message["id"] != expected:
            raise self._died(f"answered request {message['id']} instead of {expected}")
        return message

    def _died(self, how: str) -> WorkerDied:
        if how == "ended":
            try:
                self._process.wait(1.0)  # its pipe closes a moment before its exit status is known
            except subprocess.TimeoutExpired:
                how = "closed its pipe"
        self.kill()
        code = self._process.returncode
        by = f" by {signal.Signals(-code).name}" if code is not None and code < 0 and how == "ended" else ""
        return WorkerDied(f"the worker {how}{by} (exit status {code}){self._log_tail()}")

    def _log_tail(self) -> str:
        self._log.flush()
        path = self.folder / "output.log"
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - LOG_TAIL_BYTES))
            tail = _storable(file.read().decode(errors="replace")).strip()
        return f"; its last output:\n{tail}" if tail else ""

    def kill(self) -> None:
        """SIGKILL the worker's whole process group and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill the worker and remove its folder. Safe to call twice."""
        self.kill()
        for descriptor in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._requests = self._replies = -1
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

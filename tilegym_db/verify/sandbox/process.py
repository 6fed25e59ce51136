"""The supervisor's end of a worker: start it confined, ask with a deadline, end it with everything it started.

Between the two stands the :mod:`~tilegym_db.verify.sandbox.keeper`, which does the confining, the watching and the ending.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_db.paths import home
from tilegym_db.scratch import remove_tree
from tilegym_db.verify.sandbox import protocol
from tilegym_db.verify.sandbox.bounds import ResourceBounds, available_processors
from tilegym_db.verify.sandbox.keeper_process import (
    KEEPER_CHANNEL,
    KeeperProcess,
    NurseryLost,
    start_keeper,
    start_nursery,
)
from tilegym_db.verify.sandbox.levels import Sandbox, best_level
from tilegym_db.verify.sandbox.processes import descendants, kill_descendants, processor_us, queued_us
from tilegym_db.verify.sandbox.reply import Reply, storable
from tilegym_db.verify.sandbox.spec import Confinement, WorkerSpec

__all__ = [
    "Reply",
    "Sandbox",
    "WorkerDied",
    "WorkerProcess",
    "WorkerTimeout",
    "best_level",
    "prepare_workers",
    "processors",
]

START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 12.0

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
    """The worker ended, was ended because it exceeded a bound, or broke the protocol, before it answered."""


class WorkerTimeout(Exception):
    """The worker did not answer in time and was killed."""


@dataclass(frozen=True)
class _Ending:
    """What the keeper reports of an ended worker; ``code`` None where it could not."""

    code: int | None
    reason: str
    tail: str


class WorkerProcess:
    """One worker. Starts at once and imports in the background; the first request waits until it is ready."""

    def __init__(
        self,
        device: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        readable: Sequence[Path] = (),
        level: int | Confinement | None = None,
        bounds: ResourceBounds | None = None,
        script: Path | None = None,
        head_start: Path | None = None,
    ) -> None:
        """Start the process.

        Args:
            device: ``cpu`` or ``cuda:<n>``.
            folder: its private scratch folder (caches, HOME), the only one that it may write to; created, and removed by
                :meth:`close`.
            environment: variables to add, such as ``TRITON_INTERPRET``.
            readable: what it may read besides interpreter, packages and compilers: the Solution's folder.
            level: of the sandbox; by default the best that this machine has for the device, which the first call finds out.
            bounds: how much of the machine it may take; by default :meth:`ResourceBounds.of_machine`.
            script: run this Python file in place of the worker's own program.
            head_start: of :func:`tilegym_db.backends.inductor.head_start_folder`, for a Solution that uses torch.compile: the
                worker can read it, and comes from a process that has it.
        """
        if level is None:
            level = best_level(device).confinement
        self.device = device
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._buffer = b""
        self._ready = False
        self._sandbox: Mapping[str, Any] | None = None
        self._ending: _Ending | None = None
        self._lock = threading.Lock()
        self._channel, channel = socket.socketpair()
        self._channel.setblocking(False)
        with channel:
            self._keeper = self._start_keeper(environment or {}, channel.fileno(), head_start)
            begun_with = [head_start] if head_start is not None and head_start.is_dir() else []
            spec = WorkerSpec(
                confinement=Confinement(level) if isinstance(level, int) else level,
                bounds=bounds or ResourceBounds.of_machine(),
                device=device,
                folder=str(self.folder),
                channel=KEEPER_CHANNEL,
                readable=tuple(str(path.resolve()) for path in (*readable, *([script] if script else []), *begun_with)),
                hidden=(str(home()),),
                script=str(script.resolve()) if script else None,
                protected=(
                    *(-1, os.getpid(), -os.getpgrp(), self._keeper.nursery, -self._keeper.nursery),
                    *(self._keeper.pid, -self._keeper.pid),
                ),
            )
            self._keeper.tell(spec.to_json().encode() + b"\n")

    def _start_keeper(self, extra: Mapping[str, str], channel: int, head_start: Path | None) -> KeeperProcess:
        common = common_environment(self.device)
        environment = common | self._own_environment() | dict(extra)
        try:
            return start_keeper(environment, common, self.folder, channel, head_start)
        except NurseryLost as error:
            raise WorkerDied(str(error)) from None

    def _own_environment(self) -> dict[str, str]:
        """Its own folders."""
        caches = self.folder / "cache"
        return {
            "HOME": str(self.folder),
            "USER": "worker",  # a user of its own has no entry in the system's list, where libraries would look it up
            "TMPDIR": str(self.folder),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TILELANG_CACHE_DIR": str(caches / "tilelang"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "CUDA_CACHE_PATH": str(caches / "cuda"),
            "CUDA_TILE_CACHE_DIR": str(caches / "cutile"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its pool of compiling processes finds no GPU inside the sandbox
        }

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._ending is None and not self._keeper.has_ended()

    def processor_use(self) -> tuple[float, float]:
        """Microseconds so far of the worker and of all that lives of what it started.

        On a processor; and ready to run without one, the supervisor's own threads, which wait for the worker, included.
        """
        running = descendants(self._keeper.pid)
        return processor_us(running), queued_us([*running, os.getpid()])

    @property
    def sandbox_level(self) -> int:
        """The level that this worker really has, by the word of the code that confined it. Waits until it is.

        Raises:
            WorkerTimeout: it did not start in time.
            WorkerDied: it cannot be confined like that here; the message says what the kernel refused.
        """
        return int(self._introduction()["level"])

    @property
    def runs_as(self) -> int:
        """The user that the worker runs as. Waits and raises like :attr:`sandbox_level`."""
        return int(self._introduction()["user"])

    def _introduction(self) -> Mapping[str, Any]:
        if self._sandbox is None:
            self._sandbox = self._receive(0, time.monotonic() + START_TIMEOUT_S, START_TIMEOUT_S).get("sandbox")
            if self._sandbox is None:
                raise self._died("did not say how it is confined")
        return self._sandbox

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the worker has imported what it needs; raises like :meth:`request`."""
        if not self._ready:
            self._introduction()
            self._receive(0, time.monotonic() + timeout_s, timeout_s)
            self._ready = True

    def request(self, op: str, *, timeout_s: float, descriptors: Sequence[int] = (), **content: Any) -> Reply:
        """Ask, and wait for the answer to this very request.

        Args:
            op: what the worker is to do.
            timeout_s: seconds for sending and answering.
            descriptors: open files that the worker gets a copy of, in its ``request["descriptors"]``.
            **content: the rest of the request.

        Raises:
            WorkerTimeout: no answer in ``timeout_s`` seconds; the worker has been killed.
            WorkerDied: the process ended or sent something else than the answer; it has been killed.
        """
        try:
            self.wait_until_ready()
            deadline = time.monotonic() + timeout_s
            number = secrets.randbits(53)
            self._send(protocol.encode({"id": number, "op": op, **content}), descriptors, deadline, timeout_s)
            message = self._receive(number, deadline, timeout_s)
        except KeyboardInterrupt:
            self.kill()  # nobody waits for its answer any more, and the next request must not get it
            raise
        return Reply(bool(message.get("ok")), message)

    def _send(self, line: bytes, descriptors: Sequence[int], deadline: float, timeout_s: float) -> None:
        if self._buffer or self._says_something():
            raise self._died("sent something that it was not asked for")
        rest = memoryview(line)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_WRITE)
            while rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._timed_out(timeout_s)
                try:
                    sent = socket.send_fds(self._channel, [rest], list(descriptors))
                except BlockingIOError:
                    continue
                except OSError:
                    raise self._died("is gone") from None
                rest, descriptors = rest[sent:], ()

    def _says_something(self) -> bool:
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        except OSError:
            return False  # it is gone, as sending will find out

    def _receive(self, expected: int, deadline: float, timeout_s: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    raise self._timed_out(timeout_s)
                try:
                    piece = self._channel.recv(1 << 16)  # files that a worker sends along are dropped by the kernel
                except OSError:
                    piece = b""
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
            raise self._died("answered another request than the one that it was asked")
        return message

    def _timed_out(self, timeout_s: float) -> WorkerTimeout:
        tail = self._end().tail
        return WorkerTimeout(f"no answer within {timeout_s:g} s{tail}")

    def _died(self, how: str) -> WorkerDied:
        # Its channel closes a moment before the keeper has seen its end.
        if how == "ended" and not self._keeper.has_ended(1.0):
            how = "closed its channel"
        ending = self._end()
        if ending.reason:
            return WorkerDied(f"the worker was ended: {ending.reason}{ending.tail}")
        code = ending.code
        by = f" by {_signal_name(-code)}" if code is not None and code < 0 and how == "ended" else ""
        return WorkerDied(f"the worker {how}{by} (exit status {code}){ending.tail}")

    def kill(self) -> None:
        """End the worker and every process that it started, whatever they do. Safe to call from any thread, and twice."""
        self._end()

    def _end(self) -> _Ending:
        with self._lock:
            if self._ending is None:
                self._ending = self._end_now()
        return self._ending

    def _end_now(self) -> _Ending:
        printed = self._keeper.finish(END_TIMEOUT_S)
        if printed is None:
            while kill_descendants(self._keeper.pid):
                time.sleep(0.002)
            printed = self._keeper.kill()
        try:
            report = json.loads(printed.splitlines()[-1])
            code, reason, tail = report["code"], report["reason"], report["tail"]
            if report["leftover"]:
                reason += f"{'; ' if reason else ''}some of its processes could not be ended"
        except (ValueError, TypeError, KeyError, IndexError):
            # The keeper could not even start, and said why, or was killed, as the machine or a worker at level 1 may do.
            self._kill_group()
            code, reason, tail = None, "", printed.decode(errors="replace")
        tail = storable(tail).strip()
        return _Ending(code, storable(reason), f"; its last output:\n{tail}" if tail else "")

    def _kill_group(self) -> None:
        """Kill what a keeper that was killed has left; at level 3 the kernel has done that."""
        if self._sandbox is not None and self._sandbox["level"] < 3:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._sandbox["process"], signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker and remove its folder. Safe to call twice."""
        self.kill()
        self._channel.close()
        self._keeper.close()
        remove_tree(self.folder)


def prepare_workers(device: str) -> None:
    """Begin with what the first worker for a device would have to wait for; returns at once."""
    start_nursery(common_environment(device))


def common_environment(device: str) -> dict[str, str]:
    """What the environments of all workers for a device have in common."""
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in dict.fromkeys(paths) if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": str(processors()),
    }
    if device == "cpu":
        # Threads that wait for each other sleep rather than spin, or their processor time would say nothing.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        # The C library keeps what is freed. By itself it gives memory back to the system, or not, depending on what was freed
        # before, and then a call takes four times as long for the pages that it has to be given again.
        environment["MALLOC_MMAP_THRESHOLD_"] = str(32 << 20)
        environment["MALLOC_TRIM_THRESHOLD_"] = str(1 << 40)
    return environment


def processors() -> int:
    """How many processors the maths of one worker may use at once: OMP_NUM_THREADS, or all that this process may use."""
    available = available_processors()
    asked_for = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked_for), available) if asked_for.isdigit() and int(asked_for) else available


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

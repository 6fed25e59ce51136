"""The harness's end of a worker: it starts the worker confined, sends requests with deadlines, and ends all its processes.

The :mod:`~tilegym_db.sandbox.fork_server` confines, watches and ends the worker on the other side.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_db.errors import TilegymDBError
from tilegym_db.paths import home, remove_tree, scratch_folder
from tilegym_db.sandbox import protocol
from tilegym_db.sandbox.confine import Sandbox, choices, find_sandbox
from tilegym_db.sandbox.fork_server import MAX_PACKET, SUPERVISOR_CHANNEL
from tilegym_db.sandbox.processes import (
    Confinement,
    ResourceBounds,
    WorkerSpec,
    available_processors,
    descendants,
    kill_descendants,
    memory_bytes,
    processor_us,
    queued_us,
)
from tilegym_db.sandbox.protocol import Reply, storable

START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 12.0


class WorkerProcess:
    """A worker. It starts at once and imports in the background; the first request waits until it is ready."""

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
        compile_cache: Path | None = None,
    ) -> None:
        """Start the process.

        Args:
            device: ``cpu`` or ``cuda:<n>``.
            folder: its private scratch folder (caches, HOME), the only one that it may write to; created, and removed by
                :meth:`close`.
            environment: variables to add, such as those of an interpreter.
            readable: paths that it may read in addition to interpreter, packages and compilers: the Solution's folder.
            level: of the sandbox; by default the best that this machine has for the device, which the first call finds out.
            bounds: how much of the machine it may take; by default :meth:`ResourceBounds.of_machine`.
            script: run this Python file in place of the worker's own program.
            compile_cache: folder of :mod:`tilegym_db.backends.compile_cache`, for a Solution that uses torch.compile: the
                worker can read it, and comes from a process that has loaded it.
        """
        if level is None:
            level = best_level(device).confinement
        self.device = device
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.on_answer: Callable[[str, float], None] = lambda op, seconds: None
        """Called after each answer with the kind of the request and the seconds that the worker took."""
        self._ready = False
        self._sandbox: Mapping[str, Any] | None = None
        self._ending: Ending | None = None
        self._lock = threading.Lock()
        self._channel = RequestChannel()
        with self._channel.other as channel:
            self._supervisor = self._start_supervisor(environment or {}, channel.fileno(), compile_cache)
            # Check only now: the fork server has made a missing folder and removed a broken one.
            begun_with = [compile_cache] if compile_cache is not None and compile_cache.is_dir() else []
            spec = self._spec(
                Confinement(level) if isinstance(level, int) else level,
                bounds or ResourceBounds.of_machine(),
                (*readable, *([script] if script else []), *begun_with),
                script,
            )
            self._supervisor.tell(spec.to_json().encode() + b"\n")

    def _spec(
        self, confinement: Confinement, bounds: ResourceBounds, readable: Sequence[Path], script: Path | None
    ) -> WorkerSpec:
        supervisor = self._supervisor
        return WorkerSpec(
            confinement=confinement,
            bounds=bounds,
            device=self.device,
            folder=str(self.folder),
            channel=SUPERVISOR_CHANNEL,
            readable=tuple(str(path.resolve()) for path in readable),
            hidden=(str(home()),),
            script=str(script.resolve()) if script else None,
            protected=(
                *(-1, os.getpid(), -os.getpgrp(), supervisor.fork_server, -supervisor.fork_server),
                *(supervisor.pid, -supervisor.pid),
            ),
        )

    def _start_supervisor(
        self, extra: Mapping[str, str], channel: int, compile_cache: Path | None
    ) -> SupervisorProcess:
        common = common_environment(self.device)
        environment = common | own_environment(self.folder) | dict(extra)
        try:
            return start_supervisor(environment, common, self.folder, channel, compile_cache)
        except ForkServerLost as error:
            raise WorkerDied(str(error), code="fork_server_lost") from None

    @property
    def supervisor_pid(self) -> int:
        """The process id of the supervisor, which is the worker's parent."""
        return self._supervisor.pid

    @property
    def fork_server_pid(self) -> int:
        """The process id of the fork server that forked the supervisor."""
        return self._supervisor.fork_server

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._ending is None and not self._supervisor.has_ended()

    def processor_use(self) -> tuple[float, float]:
        """Return the microseconds of the worker and its living processes: on a processor, and ready without a processor.

        The second number includes the harness's threads that wait for the worker.
        """
        running = descendants(self._supervisor.pid)
        return processor_us(running), queued_us([*running, os.getpid()])

    def memory_bytes(self) -> int:
        """Return the memory in use by the worker and its living processes."""
        return memory_bytes(descendants(self._supervisor.pid))

    @property
    def queued_us(self) -> float:
        """The microseconds in which threads of the worker and its living processes were ready and had no processor."""
        return queued_us(descendants(self._supervisor.pid))

    @property
    def sandbox_level(self) -> int:
        """The sandbox level that the confining code reports. The property waits until it is known.

        Raises:
            WorkerTimeout: the worker did not start in time.
            WorkerDied: this confinement is not possible here.
        """
        return int(self._introduction()["level"])

    @property
    def runs_as(self) -> int:
        """The user that the worker runs as. The property waits and raises like :attr:`sandbox_level`."""
        return int(self._introduction()["user"])

    def _introduction(self) -> Mapping[str, Any]:
        if self._sandbox is None:
            self._sandbox = self._receive(0, time.monotonic() + START_TIMEOUT_S, START_TIMEOUT_S).get("sandbox")
            if self._sandbox is None:
                raise self._died("did not say how it is confined", "confinement_unknown")
        return self._sandbox

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the worker has imported what it needs; raises like :meth:`request`."""
        if not self._ready:
            self._introduction()
            begun = self._receive(0, time.monotonic() + timeout_s, timeout_s)
            if Reply(bool(begun.get("ok")), begun).no_memory:
                self.kill()
                raise WorkerHasNoMemory("the GPU had no memory left for the worker to start", code="gpu_memory_full")
            self._ready = True

    def request(self, op: str, *, timeout_s: float, descriptors: Sequence[int] = (), **content: Any) -> Reply:
        """Send a request and wait for its answer.

        Raises:
            WorkerTimeout: no answer in ``timeout_s`` seconds; the worker has been killed.
            WorkerDied: the process ended or broke the protocol; it has been killed.
        """
        try:
            self.wait_until_ready()
            began = time.perf_counter()
            deadline = time.monotonic() + timeout_s
            number = secrets.randbits(53)
            line = protocol.encode({"id": number, "op": op, **content})
            with self._ending_where_it_breaks(timeout_s):
                self._channel.send(line, descriptors, deadline)
            message = self._receive(number, deadline, timeout_s)
            self.on_answer(op, time.perf_counter() - began)
        except KeyboardInterrupt:
            self.kill()  # the answer is not awaited any more, and the next request must not receive it
            raise
        return Reply(bool(message.get("ok")), message)

    def _receive(self, expected: int, deadline: float, timeout_s: float) -> dict[str, Any]:
        with self._ending_where_it_breaks(timeout_s):
            return self._channel.receive(expected, deadline)

    @contextlib.contextmanager
    def _ending_where_it_breaks(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except ChannelTimeout:
            raise self._timed_out(timeout_s) from None
        except ChannelBroken as error:
            raise self._died(str(error), error.code) from None

    def _timed_out(self, timeout_s: float) -> WorkerTimeout:
        tail = self._end().tail
        return WorkerTimeout(f"no answer within {timeout_s:g} s{tail}", code="worker_timeout")

    def _died(self, how: str, code: str) -> WorkerDied:
        # Its channel closes a moment before the supervisor has seen its end.
        if how == "ended" and not self._supervisor.has_ended(1.0):
            how, code = "closed its channel", "channel_closed"
        ending = self._end()
        if ending.reason:
            return WorkerDied(f"the worker was ended: {ending.reason}{ending.tail}", code="worker_was_ended")
        by = ending.signalled if how == "ended" else ""
        return WorkerDied(f"the worker {how}{by} (exit status {ending.code}){ending.tail}", code=code)

    def kill(self) -> None:
        """End the worker and every process that it started. Safe to call from any thread, and twice."""
        self._end()

    def _end(self) -> Ending:
        with self._lock:
            if self._ending is None:
                self._ending = self._end_now()
        return self._ending

    def _end_now(self) -> Ending:
        printed = self._supervisor.finish(END_TIMEOUT_S)
        if printed is None:
            while kill_descendants(self._supervisor.pid):
                time.sleep(0.002)
            printed = self._supervisor.kill()
        ending = read_ending(printed)
        if ending is None:
            # The supervisor failed to start and said why, or the machine or a worker at level 1 killed it.
            self._kill_group()
            ending = Ending.of(None, "", printed.decode(errors="replace"))
        return ending

    def _kill_group(self) -> None:
        """Kill the processes that a killed supervisor left; at level 3 the kernel does so."""
        if self._sandbox is not None and self._sandbox["level"] < 3:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._sandbox["process"], signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker and remove its folder. Safe to call twice."""
        self.kill()
        self._channel.close()
        self._supervisor.close()
        remove_tree(self.folder)


def prepare_workers(device: str) -> None:
    """Start in advance the fork server that the first worker for a device needs; return at once."""
    start_fork_server(common_environment(device))


_sandboxes: dict[str, Sandbox] = {}
_trying = threading.Lock()


def best_level(device: str) -> Sandbox:
    """Return the best sandbox in which a worker for this device can import PyTorch and, on a GPU, start CUDA.

    Tried once per process and device; that takes as long as a worker takes to start, for each level tried.
    """
    with _trying:
        if device not in _sandboxes:
            with scratch_folder() as folder:
                start = functools.partial(_try_level, device, folder)
                _sandboxes[device] = find_sandbox(choices(device), start, (WorkerDied, WorkerTimeout))
        return _sandboxes[device]


def _try_level(device: str, folder: Path, number: int, choice: Confinement) -> int:
    """Return the user that a worker under that confinement runs as."""
    worker = WorkerProcess(device, folder / str(number), level=choice)
    try:
        worker.wait_until_ready()
        return worker.runs_as
    finally:
        worker.close()


# ---- request channel ------------------------------------------------------------------------------
# The harness sends one request and receives the answer to it before a deadline.


class ChannelBroken(TilegymDBError):
    """The other end is closed or breaks the protocol; the message completes "the worker ..."."""

    code = "channel_broken"


class ChannelTimeout(Exception):
    """The deadline passed."""


class RequestChannel:
    """A socket and the received part of an incomplete message."""

    def __init__(self) -> None:
        """Make a pair of sockets; close the worker's end, :attr:`other`, after the worker has it."""
        self._socket, self.other = socket.socketpair()
        self._socket.setblocking(False)
        self._buffer = b""

    def close(self) -> None:
        """Close this end. Safe to call twice."""
        self._socket.close()

    def send(self, line: bytes, descriptors: Sequence[int], deadline: float) -> None:
        """Send a request, with copies of open files.

        Args:
            line: as :func:`protocol.encode` gives it.
            descriptors: of the files.
            deadline: of ``time.monotonic()``.
        """
        if self._buffer or self._says_something():
            raise ChannelBroken("sent something that it was not asked for", code="message_unasked")
        rest = memoryview(line)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE)
            while rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ChannelTimeout
                try:
                    sent = socket.send_fds(self._socket, [rest], list(descriptors))
                except BlockingIOError:
                    continue
                except OSError:
                    raise ChannelBroken("is gone", code="worker_gone") from None
                rest, descriptors = rest[sent:], ()

    def receive(self, expected: int, deadline: float) -> dict[str, Any]:
        """Return the next message, which must be the answer to request number ``expected``.

        Raises:
            ChannelBroken: it is another message, or the worker is gone.
            ChannelTimeout: none came before ``deadline``, of ``time.monotonic()``.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    raise ChannelTimeout
                try:
                    piece = self._socket.recv(1 << 16)  # files that a worker sends along are dropped by the kernel
                except OSError:
                    piece = b""
                if not piece:
                    raise ChannelBroken("ended", code="worker_ended")
                self._buffer += piece
                if len(self._buffer) > 2 * protocol.MAX_LINE:
                    raise ChannelBroken("sent an endless message", code="message_too_long")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = protocol.decode(line)
        except protocol.ProtocolError as error:
            raise ChannelBroken(f"broke the protocol: {error}", code=error.code) from None
        if message["id"] != expected:
            raise ChannelBroken("answered another request than the one that it was asked", code="answer_mismatched")
        return message

    def _says_something(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        except OSError:
            return False  # it is gone, as sending will find out


# ---- ending ---------------------------------------------------------------------------------------
# The supervisor reports the end of a worker.


@dataclass(frozen=True)
class Ending:
    """The end of a worker; ``code`` is None if the supervisor could not tell, and negative for a signal."""

    code: int | None
    reason: str
    tail: str

    @classmethod
    def of(cls, code: int | None, reason: str, output: str) -> Ending:
        """Build an ending from the supervisor's report, with text cleaned for storage."""
        tail = storable(output).strip()
        return cls(code, storable(reason), f"; its last output:\n{tail}" if tail else "")

    @property
    def signalled(self) -> str:
        """The signal that ended the worker, in words that follow "ended"; empty without a signal."""
        return f" by {_signal_name(-self.code)}" if self.code is not None and self.code < 0 else ""


def read_ending(printed: bytes) -> Ending | None:
    """Parse the output of the supervisor; return None if its report is missing."""
    try:
        report = json.loads(printed.splitlines()[-1])
        code, reason, tail = report["code"], report["reason"], report["tail"]
        if report["leftover"]:
            reason += f"{'; ' if reason else ''}some of its processes could not be ended"
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return Ending.of(code, reason, tail)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- losses ---------------------------------------------------------------------------------------
# Errors for a worker that is lost.


class WorkerDied(TilegymDBError):
    """The worker ended before it answered: by itself, because it exceeded a bound, or because it broke the protocol."""

    code = "worker_ended"


class WorkerHasNoMemory(WorkerDied):
    """The GPU has no memory left for another process: other workers or programs use it."""

    code = "gpu_memory_full"


class WorkerTimeout(TilegymDBError):
    """The worker did not answer in time and was killed."""

    code = "worker_timeout"


# ---- environment ----------------------------------------------------------------------------------
# The environment of a worker: the user's kept variables, those common to a device, and those of its folders.

# Variables that a compiler or the CUDA driver needs. A Solution sees no other variable of the user.
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


def common_environment(device: str) -> dict[str, str]:
    """Return the part of the environment that all workers for a device share."""
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in dict.fromkeys(paths) if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": str(processors()),
    }
    if device == "cpu":
        # Waiting threads sleep instead of spinning, because spinning would distort their processor time.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        # The C library keeps what is freed. By itself it gives memory back to the system, or not, depending on what was freed
        # before, and then a call takes four times as long for the pages that it has to be given again.
        environment["MALLOC_MMAP_THRESHOLD_"] = str(32 << 20)
        environment["MALLOC_TRIM_THRESHOLD_"] = str(1 << 40)
    else:
        # A reference in float64 may need nearly all memory of the GPU. Without this, a third of it is lost between blocks.
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return environment


def processors() -> int:
    """Return the maximum number of processors for one worker: OMP_NUM_THREADS, or all that this process may use."""
    available = available_processors()
    asked_for = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked_for), available) if asked_for.isdigit() and int(asked_for) else available


def own_environment(folder: Path) -> dict[str, str]:
    """Return the variables that name the folders of one worker, all below its scratch folder."""
    caches = folder / "cache"
    return {
        "HOME": str(folder),
        "USER": "worker",  # libraries look up the user, but a separate user is not in the system's list
        "TMPDIR": str(folder),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TILELANG_CACHE_DIR": str(caches / "tilelang"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
        "CUDA_TILE_CACHE_DIR": str(caches / "cutile"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its pool of compiling processes finds no GPU inside the sandbox
    }


# ---- end of a supervisor --------------------------------------------------------------------------
# The harness's end of a supervisor: it asks the fork server for one, sends orders, and reads the report.


LAST_WORDS_BYTES = 4000


class ForkServerLost(Exception):
    """The process that forks supervisors ended or does not answer."""


class SupervisorProcess:
    """One supervisor, which is no child of this process. ``pid`` is its process id, ``fork_server`` that of its parent."""

    def __init__(self, pid: int, fork_server: int, handle: int, orders: int, report: int) -> None:
        """Take over the descriptors: of the process, the writing end of its input, the reading end of its output."""
        self.pid = pid
        self.fork_server = fork_server
        self._handle, self._orders, self._report = handle, orders, report
        self._printed = b""

    def tell(self, line: bytes) -> None:
        """Write to its standard input; do nothing if the supervisor has ended."""
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._orders, line) :]

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return True if the process has ended; wait up to ``timeout_s`` seconds for it."""
        if self._handle < 0:
            return True
        return bool(select.select([self._handle], [], [], timeout_s)[0])

    def finish(self, timeout_s: float) -> bytes | None:
        """Order the supervisor to end the worker; return its whole output, or None after ``timeout_s``."""
        self.tell(b"end\n")
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select([self._report], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self._report, 1 << 16)
            if not piece:
                return self._printed if self.has_ended(max(0.0, deadline - time.monotonic())) else None
            self._printed += piece

    def kill(self) -> bytes:
        """Kill a supervisor that does not finish; return what it printed."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        return self._printed

    def close(self) -> None:
        """Close the descriptors; safe to call twice."""
        for descriptor in (self._handle, self._orders, self._report):
            if descriptor >= 0:
                os.close(descriptor)
        self._handle = self._orders = self._report = -1


class _ForkServer:
    """One fork server process, of one environment."""

    def __init__(self, environment: Mapping[str, str], compile_cache: Path | None) -> None:
        self._lock = threading.Lock()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the fork server
        self._folders = contextlib.ExitStack()
        started_with = (
            [compile_cache, self._folders.enter_context(scratch_folder())] if compile_cache is not None else []
        )
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tilegym_db.sandbox.fork_server", *map(str, started_with)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",
                env=dict(environment),
                start_new_session=True,
            )

    def fork(self, environment: Mapping[str, str], folder: Path, channel: int) -> SupervisorProcess:
        """Return a new supervisor. The call waits until the fork server has its imports."""
        packet = json.dumps({"environment": environment, "folder": str(folder)}).encode()
        if len(packet) > MAX_PACKET:
            raise ForkServerLost(
                f"an environment of {len(packet)} bytes is more than the {MAX_PACKET} that can be passed on"
            )
        theirs_in, orders = os.pipe()
        report, theirs_out = os.pipe()
        forked = False
        try:
            with self._lock:
                self._socket.settimeout(START_TIMEOUT_S)
                socket.send_fds(self._socket, [packet], [theirs_in, theirs_out, channel])
                answer, handles, _, _ = socket.recv_fds(self._socket, 64, 1)
            if not answer:
                raise ForkServerLost(f"it ended with status {self._process.wait()}")
            forked = True
        except (OSError, ForkServerLost) as error:
            raise ForkServerLost(f"the process that starts workers is lost: {error}{self._last_words()}") from None
        finally:
            for descriptor in (theirs_in, theirs_out, *(() if forked else (orders, report))):
                os.close(descriptor)
            if not forked:
                self.close()  # also where the user interrupted: the answer still to come must not be taken for another
        os.set_inheritable(handles[0], False)
        return SupervisorProcess(int(answer), self._process.pid, handles[0], orders, report)

    def _last_words(self) -> str:
        said = os.pread(self._said.fileno(), LAST_WORDS_BYTES, 0).decode(errors="replace").strip()
        return f", saying:\n{said}" if said else ""

    @property
    def is_closed(self) -> bool:
        """True if the server does not fork any more."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """End the fork server and the supervisors that stem from it. Safe to call twice."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._folders.close()


_fork_servers: dict[tuple[int, frozenset[tuple[str, str]], Path | None], _ForkServer] = {}
"""By the process that started them, the environment that their supervisors have in common, and their compile cache."""
_lock = threading.Lock()


@atexit.register
def _close_fork_servers() -> None:
    """End the servers before Python exits, which would warn about their sockets and processes."""
    for (process, *_), fork_server in _fork_servers.items():
        if process == os.getpid():  # a fork of this process ends as well, and they are not its own
            fork_server.close()


def start_fork_server(common: Mapping[str, str]) -> None:
    """Begin to start the fork server of supervisors with this environment in common, so that the first need not wait."""
    _fork_server(common)


def _fork_server(common: Mapping[str, str], compile_cache: Path | None = None) -> _ForkServer:
    key = os.getpid(), frozenset(common.items()), compile_cache
    with _lock:
        if key not in _fork_servers or _fork_servers[key].is_closed:
            _fork_servers[key] = _ForkServer(common, compile_cache)
        return _fork_servers[key]


def start_supervisor(
    environment: Mapping[str, str],
    common: Mapping[str, str],
    folder: Path,
    channel: int,
    compile_cache: Path | None = None,
) -> SupervisorProcess:
    """Fork a supervisor, from a fork server that is started with the first one.

    Args:
        common: the part of it that libraries read when they are imported; a fork server serves those that have it in common.
        compile_cache: for workers that use torch.compile, the folder of :mod:`tilegym_db.backends.compile_cache`.
    """
    for begin, last in ((compile_cache, False), (None, True)):  # a compile cache is worth some time, not a worker
        try:
            return _fork_server(common, begin).fork(environment, folder, channel)
        except ForkServerLost:
            if last:
                raise
    raise AssertionError("the second attempt either returns or raises")

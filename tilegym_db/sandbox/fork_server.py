"""The fork server: a trusted process that has PyTorch imported, from which supervisors are forked. ``python -m`` starts it.

Importing PyTorch is most of what the start of a worker takes. The fork server does it once: it runs nothing of any Solution,
keeps no thread, touches no device and sees nothing of what it is asked for but an environment and a folder. With two folders as
its arguments it loads a compile cache first (:mod:`tilegym_db.backends.compile_cache`), for Solutions that use torch.compile. On
standard input it has a socket; each packet asks for one supervisor and brings the three files that it gets: its standard input,
its standard output and the worker's channel. The answer is the supervisor's process id with a descriptor of the process. It ends
when the socket does.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tilegym_db.sandbox import protocol
from tilegym_db.sandbox.confine import (
    choose_user,
    confine,
    is_readable_by_others,
    isolate_view,
    new_process_namespace,
    program_folders,
)
from tilegym_db.sandbox.processes import (
    SET_DUMPABLE,
    SandboxError,
    Watch,
    WorkerSpec,
    drop_capabilities,
    forgo_capabilities,
    kill_descendants,
    prctl,
    reap,
)

SUPERVISOR_CHANNEL = 3
"""The number of the supervisor's descriptor of the worker's channel."""
MAX_PACKET = 1 << 17

# What every worker imports sooner or later, whatever its language. A language is not among them: how it is imported depends
# on the worker's environment.
EARLY_IMPORTS = (
    "torch",
    "tilegym_db.backends.load",
    "tilegym_db.catalog",
    "tilegym_db.sandbox.program",
    "tilegym_db.sandbox.shared_buffers",
    "tilegym_db.sandbox.timing",
)

_FILES_OF_A_SUPERVISOR = 3
_ABOVE_ALL_TARGETS = 10


def main() -> None:
    """Fork supervisors until the harness is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(SandboxError):
        prctl(SET_DUMPABLE, 0)  # a worker of the same user may not look into this process either
    for name in EARLY_IMPORTS:
        with contextlib.suppress(ImportError):  # the worker meets it again, and says what is missing
            importlib.import_module(name)
    if len(sys.argv) > 1:
        _use_compile_cache(*map(Path, sys.argv[1:3]))
    gc.freeze()  # a collection in a fork would copy every page that holds an object
    orders = socket.socket(fileno=os.dup(0))
    while True:
        packet, files, _, _ = socket.recv_fds(orders, MAX_PACKET, _FILES_OF_A_SUPERVISOR)
        if not packet:
            return
        order = json.loads(packet)
        child = fork_to(functools.partial(_become_supervisor, order["environment"], order["folder"], files))
        for descriptor in files:
            os.close(descriptor)
        handle = os.pidfd_open(child)
        socket.send_fds(orders, [str(child).encode()], [handle])
        os.close(handle)
        reap()


def _use_compile_cache(folder: Path, private: Path) -> None:
    """Prepare inductor for the forks; if that fails, start this program again without it."""
    from tilegym_db.backends.compile_cache import forget_compile_cache, use_compile_cache

    before = dict(os.environ)
    try:
        use_compile_cache(folder, private)
    except Exception:  # a missing or broken compiler raises any error; a worker meets it again and reports it
        traceback.print_exc()
        forget_compile_cache(folder)
        # What failed half way is remembered all over inductor, and forks must not begin with that.
        os.execve(sys.executable, [sys.executable, "-P", "-m", "tilegym_db.sandbox.fork_server"], before)


def _become_supervisor(environment: dict[str, str], folder: str, files: list[int]) -> int:
    """Prepare the fork as ``subprocess.Popen`` does before exec, then run the supervisor."""
    os.setsid()
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE_ALL_TARGETS) for descriptor in files]
    for target, source in zip((0, 1, SUPERVISOR_CHANNEL), aside, strict=True):
        os.dup2(source, target)
    os.dup2(1, 2)
    os.closerange(SUPERVISOR_CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # what the fork server's environment says may have been looked up already
    supervise()
    return 0


# ---- supervisor -----------------------------------------------------------------------------------
# The supervisor: a small trusted process between the harness and one worker, forked from the fork server.
#
# It starts the worker confined, reads the worker's output, watches what it takes, adopts every process that the
# worker leaves behind, and ends all of them when the harness says so or is gone. On standard input it gets one line,
# the :class:`~tilegym_db.sandbox.processes.WorkerSpec`; anything more, or the end of it, is the order to end. On
# standard output it writes one line at its own end, the :class:`WorkerEnd`.
#
# At level 3 a second trusted process, the first of the worker's process namespace, stands between the two.

WORKER_MODULE = "tilegym_db.sandbox.program"
CHANNEL = 3  # the worker's descriptor of its socket
LOG_TAIL_BYTES = 4000
END_TIMEOUT_S = 8.0
MAX_SLEEP_S = 0.05
SETUP_FAILED = 70

_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36


@dataclass(frozen=True)
class WorkerEnd:
    """The end of a worker: its exit code (negative for a signal), the reason if it was ended, and its last output.

    ``leftover`` is true if some of its processes could not be ended in time.
    """

    code: int | None
    reason: str = ""
    tail: str = ""
    leftover: bool = False


def supervise() -> None:
    """Supervise one worker."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = os.getppid()
    spec = WorkerSpec.from_json(_first_line())
    with contextlib.suppress(SandboxError):  # without it, level 1 is as good as it can be
        prctl(_ADOPT_ORPHANS, 1)
    prctl(SET_DUMPABLE, 0)  # a worker of the same user may not look into this process
    try:
        report = Supervisor(spec, parent).supervise()
    except SandboxError as error:
        sys.exit(str(error))
    os.write(1, json.dumps(asdict(report)).encode() + b"\n")


class Supervisor:
    """A worker and all its processes."""

    def __init__(self, spec: WorkerSpec, parent: int) -> None:
        """Start the worker; it ends with the process ``parent``."""
        self.spec = spec
        self._parent = parent
        self._log, log = os.pipe()
        self._status, status = os.pipe()
        os.set_blocking(self._log, False)
        self._tail, self._written = b"", 0
        self._user = _user_for(spec)
        if spec.confinement.level >= 3:
            new_process_namespace()
            self.child = fork_to(lambda: _first_process(spec, self._user, log, status))
        else:
            self.child = fork_to(lambda: _worker(spec, None, log))
        for descriptor in (log, status, spec.channel):
            os.close(descriptor)
        self._ended: dict[int, int] = {}

    def supervise(self) -> WorkerEnd:
        """Wait until the worker has ended or was ended, and none of its processes is left."""
        reason = self._watch()
        done = self._end_all()
        self._read_log()
        return WorkerEnd(self._exit_code(), reason, self._tail.decode(errors="replace"), not done)

    def _watch(self) -> str:
        """Wait for the worker's end or for a reason to end it; return the reason, or an empty text."""
        trusted = 1 if self.spec.confinement.level >= 3 else 0
        watch = Watch(os.getpid(), Path(self.spec.folder), self.spec.bounds, trusted)
        child = os.pidfd_open(self.child)
        while os.getppid() == self._parent:
            ready, _, _ = select.select([0, self._log, child], [], [], MAX_SLEEP_S)
            if self._log in ready:
                self._read_log()
            if 0 in ready or child in ready:
                return ""
            reap(spare=self.child)  # its number must not be given to another process before its end is dealt with
            reason = watch.check(self._written)
            if reason:
                return reason
        return ""

    def _read_log(self) -> None:
        """Read available output of the worker and keep the end of it; do not wait for a worker that keeps writing."""
        for _ in range(64):
            try:
                piece = os.read(self._log, 1 << 16)
            except BlockingIOError:
                return
            if not piece:
                return
            self._written += len(piece)
            self._tail = (self._tail + piece)[-LOG_TAIL_BYTES:]

    def _end_all(self) -> bool:
        """End every process of the worker; return False if some could not be ended in time."""
        deadline = time.monotonic() + END_TIMEOUT_S
        with contextlib.suppress(ProcessLookupError):
            # The end of a namespace's first process ends all others. At level 2 a worker cannot leave its process group, and one
            # signal ends the whole group, however fast it forks.
            os.kill(self.child, signal.SIGKILL)
            os.killpg(self.child, signal.SIGKILL)
        while kill_descendants(os.getpid()):
            self._ended |= reap()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _exit_code(self) -> int | None:
        if self.spec.confinement.level >= 3:
            text = os.read(self._status, 100)
            if text:
                return os.waitstatus_to_exitcode(int(text))
        status = self._ended.get(self.child)
        return None if status is None else os.waitstatus_to_exitcode(status)


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit("the harness is gone")
        line += piece
    return line


def _user_for(spec: WorkerSpec) -> int | None:
    """Return the user to become, or None if it is not requested or the Solution's files are not readable by others."""
    if spec.confinement.level < 3 or not spec.confinement.own_user:
        return None
    return choose_user(os.getpid()) if all(is_readable_by_others(Path(path)) for path in spec.readable) else None


def fork_to(run: Callable[[], int]) -> int:
    """Run a function in a child process, which exits with its result."""
    child = os.fork()
    if child:
        return child
    code = SETUP_FAILED
    try:
        code = run()
    except SandboxError as error:
        print(error, file=sys.stderr)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # a process boundary: what it says goes to the log
        code = 1
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _first_process(spec: WorkerSpec, user: int | None, log: int, status: int) -> int:
    """Run the first process of the namespace: prepare it, start the worker, reap, and report the worker's end."""
    prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    _use_log(log)
    folder = Path(spec.folder)
    visible = [*program_folders(os.environ), *map(Path, spec.readable)]
    if user is not None:
        os.chown(folder, user, user)
    isolate_view(folder, visible, spec.bounds, reveal=user is not None, shm=spec.confinement.private_shm)
    worker = fork_to(lambda: _worker(spec, user, log))
    forgo_capabilities()
    drop_capabilities()
    os.dup2(status, CHANNEL)
    os.closerange(CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    for descriptor in range(CHANNEL):
        os.close(descriptor)
    while True:
        ended, how = os.wait()
        if ended == worker:
            os.write(CHANNEL, str(how).encode())
            return 0


def _worker(spec: WorkerSpec, user: int | None, log: int) -> int:
    """Run the worker: confine it and introduce it to the harness; from then on it is untrusted."""
    os.setsid()
    prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    _use_log(log)
    os.dup2(spec.channel, CHANNEL)
    os.set_inheritable(CHANNEL, False)  # compilers have no business with it
    os.closerange(CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    applied = confine(spec, os.environ, user)
    os.write(CHANNEL, protocol.encode({"id": 0, "sandbox": applied}))
    if spec.script:
        sys.argv = [spec.script, str(CHANNEL), spec.device]
        runpy.run_path(spec.script, run_name="__main__")
    else:
        importlib.import_module(WORKER_MODULE).main(CHANNEL, spec.device)
    return 0


def _use_log(log: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in enumerate((nothing, log, log)):
        os.dup2(source, descriptor)


if __name__ == "__main__":
    main()

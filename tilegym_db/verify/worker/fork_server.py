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
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

from tilegym_db.confinement.processes import reap
from tilegym_db.confinement.system_calls import SandboxError, prctl
from tilegym_db.verify.worker import supervisor

__all__ = ["MAX_PACKET", "SUPERVISOR_CHANNEL", "main"]

SUPERVISOR_CHANNEL = 3
"""The descriptor that a supervisor finds the worker's channel under."""
MAX_PACKET = 1 << 17

# What every worker imports sooner or later, whatever its language. A language is not among them: how it is imported depends
# on the worker's environment.
_EARLY_IMPORTS = (
    *("torch", "tilegym_db.backends.load", "tilegym_db.catalog", "tilegym_db.verify.worker.program"),
    *(f"tilegym_db.verify.worker.{name}" for name in ("shared_buffers", "profiling", "timing")),
)

_SET_DUMPABLE = 4
_FILES_OF_A_SUPERVISOR = 3
_ABOVE_ALL_TARGETS = 10


def main() -> None:
    """Fork supervisors until the harness is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(SandboxError):
        prctl(_SET_DUMPABLE, 0)  # a worker of the same user may not look into this process either
    for name in _EARLY_IMPORTS:
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
        child = supervisor.fork_to(functools.partial(_become_supervisor, order["environment"], order["folder"], files))
        for descriptor in files:
            os.close(descriptor)
        handle = os.pidfd_open(child)
        socket.send_fds(orders, [str(child).encode()], [handle])
        os.close(handle)
        reap()


def _use_compile_cache(folder: Path, private: Path) -> None:
    """Have inductor ready for the forks; where that fails, this program begins again and does without."""
    from tilegym_db.backends.compile_cache import forget_compile_cache, use_compile_cache

    before = dict(os.environ)
    try:
        use_compile_cache(folder, private)
    except Exception:  # whatever a compiler that is missing or broken raises: a worker meets it again, and says so
        traceback.print_exc()
        forget_compile_cache(folder)
        # What failed half way is remembered all over inductor, and forks must not begin with that.
        os.execve(sys.executable, [sys.executable, "-P", "-m", "tilegym_db.verify.worker.fork_server"], before)


def _become_supervisor(environment: dict[str, str], folder: str, files: list[int]) -> int:
    """What ``subprocess.Popen`` does between fork and exec, and then the supervisor's own program."""
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
    supervisor.main()
    return 0


if __name__ == "__main__":
    main()

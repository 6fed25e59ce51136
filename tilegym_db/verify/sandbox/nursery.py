"""The nursery: a trusted process that has PyTorch imported, from which keepers are forked. ``python -m`` starts it.

Importing PyTorch is most of what the start of a worker takes. The nursery does it once: it runs nothing of any Solution, keeps no
thread, touches no device and sees nothing of what it is asked for but an environment and a folder. With two folders as its
arguments it takes a head start first (:mod:`tilegym_db.backends.inductor`), for Solutions that use torch.compile. On standard
input it has a socket; each packet asks for one keeper and brings the three files that it gets: its standard input, its standard
output and the worker's channel. The answer is the keeper's process id with a descriptor of the process. It ends when the socket
does.
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

from tilegym_db.verify.sandbox import keeper
from tilegym_db.verify.sandbox.processes import reap
from tilegym_db.verify.sandbox.system_calls import SandboxError, prctl

__all__ = ["KEEPER_CHANNEL", "MAX_PACKET", "main"]

KEEPER_CHANNEL = 3
"""The descriptor that a keeper finds the worker's channel under."""
MAX_PACKET = 1 << 17

# What every worker imports sooner or later, whatever its language. A language is not among them: how it is imported depends
# on the worker's environment.
_EARLY_IMPORTS = (
    *("torch", "tilegym_db.backends.load", "tilegym_db.catalog", "tilegym_db.verify.sandbox.worker"),
    *(f"tilegym_db.verify.sandbox.{name}" for name in ("arena", "profiling", "timing")),
)

_SET_DUMPABLE = 4
_FILES_OF_A_KEEPER = 3
_ABOVE_ALL_TARGETS = 10


def main() -> None:
    """Fork keepers until the supervisor is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(SandboxError):
        prctl(_SET_DUMPABLE, 0)  # a worker of the same user may not look into this process either
    for name in _EARLY_IMPORTS:
        with contextlib.suppress(ImportError):  # the worker meets it again, and says what is missing
            importlib.import_module(name)
    if len(sys.argv) > 1:
        _take_head_start(*map(Path, sys.argv[1:3]))
    gc.freeze()  # a collection in a fork would copy every page that holds an object
    orders = socket.socket(fileno=os.dup(0))
    while True:
        packet, files, _, _ = socket.recv_fds(orders, MAX_PACKET, _FILES_OF_A_KEEPER)
        if not packet:
            return
        order = json.loads(packet)
        child = keeper.fork_to(functools.partial(_become_keeper, order["environment"], order["folder"], files))
        for descriptor in files:
            os.close(descriptor)
        handle = os.pidfd_open(child)
        socket.send_fds(orders, [str(child).encode()], [handle])
        os.close(handle)
        reap()


def _take_head_start(folder: Path, private: Path) -> None:
    """Have inductor ready for the forks; where that fails, this program begins again and does without."""
    from tilegym_db.backends.inductor import forget_head_start, take_head_start

    before = dict(os.environ)
    try:
        take_head_start(folder, private)
    except Exception:  # whatever a compiler that is missing or broken raises: a worker meets it again, and says so
        traceback.print_exc()
        forget_head_start(folder)
        # What failed half way is remembered all over inductor, and forks must not begin with that.
        os.execve(sys.executable, [sys.executable, "-P", "-m", "tilegym_db.verify.sandbox.nursery"], before)


def _become_keeper(environment: dict[str, str], folder: str, files: list[int]) -> int:
    """What ``subprocess.Popen`` does between fork and exec, and then the keeper's own program."""
    os.setsid()
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE_ALL_TARGETS) for descriptor in files]
    for target, source in zip((0, 1, KEEPER_CHANNEL), aside, strict=True):
        os.dup2(source, target)
    os.dup2(1, 2)
    os.closerange(KEEPER_CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # what the nursery's environment says may have been looked up already
    keeper.main()
    return 0


if __name__ == "__main__":
    main()

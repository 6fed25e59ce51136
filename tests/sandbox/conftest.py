"""Workers with a peer of the test's choice, at every level of confinement that this machine offers."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.sandbox.worker import WorkerProcess

# Stands in for the worker: no torch, and in place of its loop whatever a test wants.
PEER = """
import contextlib, ctypes, json, os, signal, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[1]))
def say(line):
    channel.sendall(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\\n")
def hear():
    line = b""
    while not line.endswith(b"\\n"):
        line += channel.recv(1 << 16)
    return json.loads(line)
def answer(**content):
    say({{"id": request["id"], "ok": True, **content}})
say({{"id": 0}})
request = hear()
{body}
time.sleep(60)
"""


CAN_UNSHARE = """
import ctypes, sys
mounts, ipc, processes, network = 0x00020000, 0x08000000, 0x20000000, 0x40000000
sys.exit(ctypes.CDLL(None).unshare(mounts | ipc | processes | network) != 0)
"""


def offered_by_kernel() -> int:
    """Return the highest level that this kernel should allow this user, found in other ways than the sandbox uses."""
    landlock = ctypes.CDLL(None).syscall(444, None, 0, 1)
    if landlock < 3 or not Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        return 1
    # unshare needs a separate process: there is no way back from it
    if os.geteuid() != 0 or subprocess.run([sys.executable, "-c", CAN_UNSHARE]).returncode != 0:
        return 2
    return 3


OFFERED = offered_by_kernel()
NOT_HERE = pytest.mark.skip(reason="not with this kernel and this user")
LEVELS = [pytest.param(level, marks=() if level <= OFFERED else NOT_HERE, id=f"level{level}") for level in (2, 3)]


@pytest.fixture(scope="session")
def offered_level() -> int:
    """Return the highest level that this kernel should allow this user."""
    return OFFERED


@pytest.fixture(scope="session", params=LEVELS)
def confining_level(request: pytest.FixtureRequest) -> int:
    """Return each level that confines."""
    return int(request.param)


@pytest.fixture(scope="session")
def write_peer() -> Callable[[Path, str], Path]:
    """Write the program of a worker that runs these lines once it got its first request."""

    def write(path: Path, body: str) -> Path:
        path.write_text(PEER.format(body=body))
        return path

    return write


@pytest.fixture
def peer(tmp_path: Path, write_peer: Callable[[Path, str], Path]) -> Iterator[Callable[..., WorkerProcess]]:
    """Yield a worker process whose other end runs these lines once it got its first request; the default is level 1."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def start(body: str, *, level: int = 1, **options: Any) -> WorkerProcess:
            number = next(numbers)
            script = write_peer(tmp_path / f"peer-{number}.py", body)
            worker = WorkerProcess("cpu", tmp_path / f"worker-{number}", level=level, script=script, **options)
            stack.callback(worker.close)
            return worker

        yield start

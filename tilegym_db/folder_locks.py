"""Locks of folders that several processes write to: one writer at a time, whoever it is and however it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tilegym_db.errors import StoreError
from tilegym_db.files import reason_of

__all__ = ["LOCK_NAME", "POLL_S", "hold_lock", "writing"]

LOCK_NAME = ".tilegym-db.lock"
LOCK_TIMEOUT_S = 60.0
POLL_S = 0.02


@contextlib.contextmanager
def writing(folder: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of a folder that several processes write to, ``<folder>/.tilegym-db.lock``; made if it is not there.

    Raises:
        StoreError: another process holds it for longer than ``timeout_s`` seconds, or the folder cannot be written.
    """
    with hold_lock(folder / LOCK_NAME, folder, timeout_s, "Nothing was changed."):
        yield


@contextlib.contextmanager
def hold_lock(path: Path, what: Path, timeout_s: float, consequence: str) -> Iterator[None]:
    """Hold a lock file. The kernel lets go of it when the process ends, however it ends.

    Args:
        path: the lock file; it stays, since removing it would let two in at once.
        what: what is locked, for the message.
        timeout_s: how long to wait for another holder.
        consequence: what it means that the lock was not got, for the message.

    Raises:
        StoreError: it was not got.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # filelock tries again for as long as it waits where a file cannot be made for good, as in /proc; this says so at once
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644))
        # not thread local: a store may be closed by another thread than opened it
        lock = FileLock(path, timeout=timeout_s, poll_interval=POLL_S, thread_local=False)
        lock.acquire()
    except Timeout:
        raise StoreError(
            f"{what} is locked: {_holder(path)} is writing it. Wait for that to finish or stop it, and try again. "
            f"{consequence}",
            code="store_locked",
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"cannot write the folder {path.parent}: {reason_of(error)}. {consequence} Make it writable, "
            "or set TILEGYM_DB_HOME to a folder on a local disk that is.",
            code="folder_unwritable",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """Who holds a lock, as far as the kernel tells."""
    try:
        inode = str(path.stat().st_ino)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return "another process"
    for line in lines:
        fields = line.split()
        if "->" not in fields and len(fields) > 5 and fields[5].rpartition(":")[2] == inode and int(fields[4]) > 0:
            pid = int(fields[4])
            return "another part of this process" if pid == os.getpid() else f"another process (PID {pid})"
    return "another process"

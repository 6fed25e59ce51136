"""The writers' lock: one process at a time changes the database, and the next one waits its turn."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilegym_db.errors import StoreError

__all__ = ["POLL_S", "writer_lock"]

POLL_S = 0.02


@contextmanager
def writer_lock(database: Path, timeout_s: float) -> Iterator[None]:
    """Hold ``<database>.lock``. The kernel lets go of it when the process ends, however it ends.

    Raises:
        StoreError: another process (or another store of this one) holds it for longer than ``timeout_s`` seconds, or
            the folder cannot be written.
    """
    path = database.with_name(database.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(
            f"cannot write the store's folder {path.parent}: {error.strerror or error}. "
            "Make it writable, or set TILEGYM_DB_HOME to a folder that is."
        ) from None
    try:
        _wait(descriptor, database, timeout_s)
        _sign(descriptor)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, database: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{database} is locked: {_holder(descriptor)} is writing it. Wait for that to finish "
                    "or stop it, and try again; nothing measured meanwhile is lost, it stays in the journals."
                ) from None
        except OSError as error:
            raise StoreError(
                f"cannot lock {database}: {error.strerror}. Set TILEGYM_DB_HOME to a local disk."
            ) from None
        time.sleep(POLL_S)


def _sign(descriptor: int) -> None:
    """Leave the process id for the message of whoever waits; not even a full disk may stop the lock over it."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except OSError:
        return


def _holder(descriptor: int) -> str:
    pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    if pid == str(os.getpid()):
        return "another part of this process"
    return f"another process (PID {pid})" if pid else "another process"

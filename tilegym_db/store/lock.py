"""The writers' lock: one process at a time changes the database, and the next one waits its turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilegym_db.folder_locks import POLL_S, hold_lock

__all__ = ["POLL_S", "writer_lock"]


@contextmanager
def writer_lock(database: Path, timeout_s: float) -> Iterator[None]:
    """Hold ``<database>.lock``. The kernel lets go of it when the process ends, however it ends.

    Raises:
        StoreError: another process (or another store of this one) holds it for longer than ``timeout_s`` seconds, or
            the folder cannot be written.
    """
    path = database.with_name(database.name + ".lock")
    consequence = "Nothing measured meanwhile is lost, it stays in the journals."
    with hold_lock(path, database, max(timeout_s, 0.0), consequence):
        yield

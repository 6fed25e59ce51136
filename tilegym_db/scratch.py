"""Scratch folders that do not outlive their process: one that was killed is cleaned up after by the next that starts."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove_tree", "scratch_folder", "sweep"]

PREFIX = "tilegym-db-scratch-"
LOCK = "lock"
UNLOCKED_GRACE_S = 3600.0


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end; first, those of processes that are gone are.

    Args:
        parent: where; by default where temporary files go.
    """
    where = parent or Path(tempfile.gettempdir())
    sweep(where)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        remove_tree(folder)
        os.close(lock)


def sweep(where: Path) -> list[Path]:
    """Remove this user's scratch folders that no process holds, and return what they were."""
    removed = []
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # someone else's, or another process sweeps it at this moment
            if folder.lstat().st_uid == os.geteuid() and not folder.is_symlink() and _is_abandoned(folder):
                remove_tree(folder)
                removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # its owner may be about to lock it
        return time.time() - folder.lstat().st_mtime > UNLOCKED_GRACE_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def remove_tree(folder: Path) -> None:
    """Remove a folder whatever is in it: folders that cannot be entered, or nested deeper than any path can name.

    Every folder found inside is emptied by moving what it holds one level up, so that no path grows. Follows no links.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    numbers = itertools.count()
    while inner := _remove_files(folder):
        for path in inner:
            for entry in _entries(path):
                os.rename(entry.path, folder / f".removed-{next(numbers)}-{os.getpid()}")
            os.rmdir(path)
    os.rmdir(folder)


def _remove_files(folder: Path) -> list[str]:
    """Remove what is no folder, and return the folders."""
    inner = []
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            inner.append(entry.path)
        else:
            os.unlink(entry.path)
    return inner


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    os.chmod(path, 0o700)
    with os.scandir(path) as entries:
        return list(entries)

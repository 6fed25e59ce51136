"""Paths of the shipped catalog and of the home folder, scratch folders, and the switch that turns serving off."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from tilegym_db.errors import UsageError

HOME_VARIABLE = "TILEGYM_DB_HOME"


def home() -> Path:
    """Return ``$TILEGYM_DB_HOME``, else the platform's user data folder. The folder is not created.

    Raises:
        UsageError: the variable cannot name a folder: it is empty, relative or too long, holds control characters, or names
            something that is not a folder.
    """
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen is None:
        return Path(platformdirs.user_data_dir("tilegym-db"))
    try:
        path, problem, code = Path(chosen).expanduser(), "", ""
    except RuntimeError as error:  # an unknown user, as in ~unknown_user
        path, problem, code = Path(chosen), str(error), "home_user_unknown"
    if not problem:
        problem, code = _problem(chosen, path)
    if problem:
        shown = repr(chosen) if len(chosen) <= 120 else f"{chosen[:120]!r}... ({len(chosen)} characters)"
        raise UsageError(
            f"{HOME_VARIABLE}={shown} cannot be used: {problem}. Set it to an absolute path of a folder, "
            f"or unset it for the default ({platformdirs.user_data_dir('tilegym-db')}).",
            code=code,
        )
    return path


def _problem(text: str, path: Path) -> tuple[str, str]:
    """Return the reason why a path cannot be the home folder, and its code; two empty texts if it can."""
    if not text.strip():
        return "it is empty", "home_empty"
    if not text.isprintable():
        return "it holds a character that cannot be printed", "home_unprintable"
    if not path.is_absolute():
        return "it is relative, and would name another folder in each working directory", "home_relative"
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        dangling = _dangling(path)
        return dangling, "home_dangling" if dangling else ""
    except OSError as error:  # a loop of links, a name too long, a file as parent, or a folder without permission
        return error.strerror or str(error), "home_unreachable"
    return ("", "") if stat.S_ISDIR(mode) else ("it is no folder", "home_not_folder")


def _dangling(path: Path) -> str:
    """Return the reason why a missing path cannot be created, a dangling link; empty if it can."""
    for place in (path, *path.parents):
        if place.is_symlink():
            return "" if place.exists() else f"{place} is a link to {os.readlink(place)!r}, which does not exist"
    return ""


DISABLE_VARIABLE = "TILEGYM_DB_DISABLE"
DISABLED = f"{DISABLE_VARIABLE} is set, so stock code runs"


def is_disabled() -> bool:
    """Return True if ``$TILEGYM_DB_DISABLE`` is set to anything but ``0``, ``false``, ``no``, ``off`` or an empty text."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")


def number_of_setting(variable: str, default: float) -> float:
    """Return the number that an environment variable states.

    Raises:
        UsageError: it states something else.
    """
    text = os.environ.get(variable, "").strip()
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise UsageError(
            f"{variable} is {text!r}, which is no number. Try: {variable}=0.5, or unset {variable}",
            code="setting_no_number",
        )
    return number


_chosen: list[Path] = []


@contextlib.contextmanager
def use_root(root: Path) -> Iterator[Path]:
    """Let :func:`shipped_root` return ``root`` in this process until the block ends. Blocks may be nested."""
    _chosen.append(root)
    try:
        yield root
    finally:
        _chosen.pop()


def shipped_root() -> Path:
    """Return the folder of ``definitions/ solutions/ workloads/ traces/ schema/``: the checkout, or package data."""
    if _chosen:
        return _chosen[-1]
    package = Path(__file__).resolve().parent
    checkout = package.parent
    if (checkout / "definitions").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout
    return package / "_data"


# ---- scratch folders ------------------------------------------------------------------------------
# A killed process leaves its scratch folder; the next process that makes one removes it.

PREFIX = "tilegym-db-scratch-"
LOCK = "lock"
UNLOCKED_GRACE_S = 3600.0


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that only this user can enter, and remove it at the end. Remove abandoned ones first.

    Args:
        parent: the folder to create it in; by default the system's folder for temporary files.
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
    """Remove this user's scratch folders that no process holds, and return their paths."""
    removed = []
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or another process removes it at this moment
            if folder.lstat().st_uid == os.geteuid() and not folder.is_symlink() and _is_abandoned(folder):
                remove_tree(folder)
                removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # its process may be about to create the lock
        return time.time() - folder.lstat().st_mtime > UNLOCKED_GRACE_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def remove_tree(folder: Path) -> None:
    """Remove a folder and everything in it, even folders without permissions or nested deeper than a path can name.

    Each inner folder is emptied by moving its entries one level up, so that no path grows. Links are not followed.
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
    """Remove every entry that is not a folder, and return the folders."""
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

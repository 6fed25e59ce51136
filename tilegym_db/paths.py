"""Where things lie: the shipped catalog, the user's home folder of this package, and the store inside it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import platformdirs

from tilegym_db.errors import UsageError

__all__ = ["home", "shipped_root"]

HOME_VARIABLE = "TILEGYM_DB_HOME"


def home() -> Path:
    """``$TILEGYM_DB_HOME``, else the platform's user data folder. Not created here.

    Raises:
        UsageError: the variable cannot name a folder: it is empty or relative, holds control characters, is too long, or
            names something that is no folder.
    """
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen is None:
        return Path(platformdirs.user_data_dir("tilegym-db"))
    try:
        path, problem = Path(chosen).expanduser(), ""
    except RuntimeError as error:  # ~nobody-of-that-name
        path, problem = Path(chosen), str(error)
    problem = problem or _problem(chosen, path)
    if problem:
        shown = repr(chosen) if len(chosen) <= 120 else f"{chosen[:120]!r}... ({len(chosen)} characters)"
        raise UsageError(
            f"{HOME_VARIABLE}={shown} cannot be used: {problem}. Set it to an absolute path of a folder, "
            f"or unset it for the default ({platformdirs.user_data_dir('tilegym-db')})."
        )
    return path


def _problem(text: str, path: Path) -> str:
    if not text.strip():
        return "it is empty"
    if not text.isprintable():
        return "it holds a character that cannot be printed"
    if not path.is_absolute():
        return "it is relative, and would name another folder in each working directory"
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return _dangling(path)
    except OSError as error:  # a loop of links, a name too long, a file on the way, a folder that may not be entered
        return error.strerror or str(error)
    return "" if stat.S_ISDIR(mode) else "it is no folder"


def _dangling(path: Path) -> str:
    """What is wrong with a path that does not exist: nothing, or that it goes through a link to nowhere."""
    for place in (path, *path.parents):
        if place.is_symlink():
            return "" if place.exists() else f"{place} is a link to {os.readlink(place)!r}, which does not exist"
    return ""


def shipped_root() -> Path:
    """The folder that holds ``definitions/ solutions/ workloads/ traces/ schema/``: the checkout, or package data."""
    package = Path(__file__).resolve().parent
    checkout = package.parent
    if (checkout / "definitions").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout
    return package / "_data"

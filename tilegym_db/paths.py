"""Where things lie: the shipped catalog, the user's home folder of this package, and the store inside it."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

__all__ = ["home", "shipped_root"]

HOME_VARIABLE = "TILEGYM_DB_HOME"


def home() -> Path:
    """``$TILEGYM_DB_HOME``, else the platform's user data folder. Not created here."""
    chosen = os.environ.get(HOME_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_data_dir("tilegym-db"))


def shipped_root() -> Path:
    """The folder that holds ``definitions/ solutions/ workloads/ traces/ schema/``: the checkout, or package data."""
    package = Path(__file__).resolve().parent
    checkout = package.parent
    if (checkout / "definitions").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout
    return package / "_data"

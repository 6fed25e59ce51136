"""Landlock: which files this process and its children may touch, for good; no privilege is needed.

What is not granted is refused. Landlock does not guard the attributes of files (mode, owner, times): the system call filter
and, at level 3, read-only mounts do.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tilegym_db.confinement.system_calls import SandboxError, invoke

__all__ = ["MINIMAL_VERSION", "SIGNAL_SCOPE_VERSION", "Access", "Grant", "landlock_version", "restrict_files"]

MINIMAL_VERSION = 3
"""Before it, a file that may not be written can still be truncated (Linux 6.2 is the first with this version)."""
SIGNAL_SCOPE_VERSION = 6
"""From it on, signals to processes outside can be refused (Linux 6.12)."""

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE = 1 << 4 | 1 << 5
_MAKE_DEVICE = 1 << 6 | 1 << 11
_MAKE = 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12  # folder, file, socket, pipe, link
_REFER, _TRUNCATE, _DEVICE_CONTROL = 1 << 13, 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_CONTROL

_TCP = 1 << 0 | 1 << 1  # bind and connect
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets and signals
_ASK_VERSION, _PATH_RULE = 1, 1


class Access(Enum):
    """What a grant allows on a path and everything below it."""

    LIST = _READ_FOLDER
    READ = _READ_FOLDER | _READ_FILE | _EXECUTE
    PROC = _READ_FOLDER | _READ_FILE | _WRITE_FILE | _TRUNCATE
    DEVICE = _READ_FOLDER | _READ_FILE | _WRITE_FILE | _DEVICE_CONTROL
    WRITE = _READ_FOLDER | _READ_FILE | _EXECUTE | _WRITE_FILE | _REMOVE | _MAKE | _REFER | _TRUNCATE


@dataclass(frozen=True)
class Grant:
    """One path and what is allowed there."""

    path: Path
    access: Access


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 where it has none."""
    try:
        return invoke("landlock_create_ruleset", None, 0, _ASK_VERSION)
    except SandboxError:
        return 0


def restrict_files(grants: Iterable[Grant]) -> None:
    """Allow the grants and nothing else. Paths that do not exist are passed over.

    Raises:
        SandboxError: the kernel has no Landlock, or one that is too old.
    """
    version = landlock_version()
    if version < MINIMAL_VERSION:
        has = f"has only version {version}" if version else "has none"
        raise SandboxError(
            f"Landlock of version {MINIMAL_VERSION} is needed (Linux 6.2); this kernel {has}", code="landlock_absent"
        )
    handled = _EXECUTE | _WRITE_FILE | _READ_FILE | _READ_FOLDER | _REMOVE | _MAKE | _MAKE_DEVICE | _REFER | _TRUNCATE
    handled |= _DEVICE_CONTROL if version >= 5 else 0
    rules = _Ruleset(handled, _TCP if version >= 4 else 0, _SCOPES if version >= SIGNAL_SCOPE_VERSION else 0)
    ruleset = invoke("landlock_create_ruleset", ctypes.byref(rules), ctypes.sizeof(rules), 0)
    for grant in grants:
        _allow(ruleset, grant.path, grant.access.value & handled)
    invoke("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # it is not there, or not for this user: then there is nothing to allow
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _ON_FILES
    if rights:
        rule = _PathRule(rights, descriptor)
        invoke("landlock_add_rule", ruleset, _PATH_RULE, ctypes.byref(rule), 0)
    os.close(descriptor)

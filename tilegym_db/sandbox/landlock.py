"""Landlock: restricts the files of this process and its children permanently, without privileges.

What is not granted is refused. Landlock does not guard the attributes of files (mode, owner, times): the system call filter
and, at level 3, read-only mounts do.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tilegym_db.sandbox.limits import WorkerSpec
from tilegym_db.sandbox.system_calls import SandboxError, invoke

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
    """The operations that a grant allows on a path and everything below it."""

    LIST = _READ_FOLDER
    READ = _READ_FOLDER | _READ_FILE | _EXECUTE
    PROC = _READ_FOLDER | _READ_FILE | _WRITE_FILE | _TRUNCATE
    DEVICE = _READ_FOLDER | _READ_FILE | _WRITE_FILE | _DEVICE_CONTROL
    WRITE = _READ_FOLDER | _READ_FILE | _EXECUTE | _WRITE_FILE | _REMOVE | _MAKE | _REFER | _TRUNCATE


@dataclass(frozen=True)
class Grant:
    """A path and its allowed operations."""

    path: Path
    access: Access


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    try:
        return invoke("landlock_create_ruleset", None, 0, _ASK_VERSION)
    except SandboxError:
        return 0


def restrict_files(grants: Iterable[Grant]) -> None:
    """Allow only the grants. Paths that do not exist are skipped.

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


# ---- grants ---------------------------------------------------------------------------------------
# Which paths a worker may touch: the interpreter, the packages, the compilers and its own folders. Only looks at
# names.
#
# A folder is granted as a whole, except where something that must stay unreadable (the store, the definitions) lies
# inside: then its other entries are granted one by one.

PACKAGE = Path(__file__).resolve().parents[1]

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/opt", "/sys", "/proc")
# What the loader, the C library, compiler links and the languages read of /etc; nothing with secrets in it.
_SETTINGS = (
    *(
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "ld.so.preload",
        "alternatives",
        "localtime",
        "timezone",
        "locale.conf",
    ),
    *("nsswitch.conf", "passwd", "group", "os-release", "debian_version", "mime.types", "gai.conf", "host.conf"),
    *("OpenCL", "cufile.json", "nvidia", "nvidia-container-runtime", "python3"),
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_TOOLS = ("nvcc", "ptxas", "tileiras", "cicc", "gcc", "g++", "cc", "c++", "clang", "ld", "as")
_SEARCHED = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV")


def grants_for(spec: WorkerSpec, environ: Mapping[str, str]) -> list[Grant]:
    """Return all grants of one worker; call it in the worker's process, whose folder below ``/proc`` it includes."""
    hidden = [Path(path).resolve() for path in (*spec.hidden, *map(str, catalog_folders()))]
    grants: list[Grant] = []
    for folder in (*program_folders(environ), *map(Path, _SYSTEM), *_settings()):
        grants += _without(folder, hidden)
    grants += [Grant(Path(path), Access.READ) for path in spec.readable]
    grants += [Grant(path, Access.DEVICE) for path in _devices(spec)]
    writes = {"none": [], "self": ["/proc/self"], "all": ["/proc"]}[spec.confinement.proc_writes]
    grants += [Grant(Path(path), Access.PROC) for path in writes]
    if spec.confinement.level >= 3 and spec.confinement.private_shm:
        grants.append(Grant(Path("/dev/shm"), Access.WRITE))
    return [*grants, Grant(Path(spec.folder), Access.WRITE)]


def program_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders of code: interpreter, packages, this package, and compilers that the environment names."""
    checkout = PACKAGE.parent if catalog_folders() and catalog_folders()[0].parent == PACKAGE.parent else None
    found = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path) if path]
    found += [Path(part) for name in _SEARCHED for part in environ.get(name, "").split(os.pathsep) if part]
    found += [Path(sys.prefix), Path(sys.executable).resolve().parent, PACKAGE]
    for tool in _TOOLS:
        where = shutil.which(tool, path=environ.get("PATH", ""))
        found += [Path(where).resolve().parent.parent] if where else []
    apart = (checkout, Path("/"))
    return [path for path in dict.fromkeys(found) if path.is_absolute() and path not in apart and os.path.exists(path)]


def catalog_folders() -> list[Path]:
    """Return the folders of definitions, solutions, workloads and traces, in a checkout or an installed package."""
    names = ("definitions", "solutions", "workloads", "traces")
    for root in (PACKAGE.parent, PACKAGE / "_data"):
        if (root / "definitions").is_dir():
            return [root / name for name in names]
    return []


def _settings() -> list[Path]:
    own = [Path("/etc") / name for name in _SETTINGS]
    return [*own, *Path("/etc").glob("python3.*")]


def _devices(spec: WorkerSpec) -> list[Path]:
    plain = [Path("/dev") / name for name in _DEVICES]
    return plain if spec.device == "cpu" else [*plain, *sorted(Path("/dev").glob("nvidia*"))]


def _without(folder: Path, hidden: Iterable[Path]) -> list[Grant]:
    """Return grants to read a folder without the hidden paths inside it; names can be listed everywhere."""
    folder = folder.resolve()
    inside = [path for path in hidden if path != folder and path.is_relative_to(folder)]
    if not inside:
        return [Grant(folder, Access.READ)]
    grants = [Grant(folder, Access.LIST)]
    for entry in _entries(folder):
        if entry not in inside and not entry.is_symlink():
            grants += _without(entry, inside)
    return grants


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except PermissionError:  # nor could the worker's user read anything there
        return []

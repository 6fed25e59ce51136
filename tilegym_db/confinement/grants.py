"""Which paths a worker may touch: the interpreter, the packages, the compilers and its own folders. Only looks at names.

A folder is granted as a whole, except where something that must stay unreadable (the store, the definitions) lies inside: then
its other entries are granted one by one.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tilegym_db.confinement.landlock import Access, Grant
from tilegym_db.confinement.spec import WorkerSpec

__all__ = ["PACKAGE", "catalog_folders", "grants_for", "program_folders"]

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
    """Everything that one worker is granted, in its own process (its folder below ``/proc`` is its own)."""
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
    """Where code comes from: interpreter, packages, this package, and the compilers that the environment names."""
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
    """The folders of definitions, solutions, workloads and traces, in a checkout or in an installed package."""
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
    """Grants to read a folder but not what is hidden inside it; names can be listed everywhere."""
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

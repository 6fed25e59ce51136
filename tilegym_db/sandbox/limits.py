"""How much of the machine one worker may take, and the pure decision whether it took more."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

_MIB = 1 << 20
HOST_SHARE = "TILEGYM_DB_HOST_SHARE"
"""The variable that tells a process that it is one of so many harnesses at work on this host, one for each of its GPUs."""
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class ResourceBounds:
    """Bounds on a worker together with every process that it starts. Sizes in bytes.

    Where they are exceeded the worker is killed. ``memory_bytes`` counts private and shared memory that is in use, not address
    space, of which CUDA reserves terabytes. ``threads`` is enforced by the kernel where it can be: a thread more is
    refused; where workers share their user, one more than several of them may have.
    """

    memory_bytes: int
    processes: int
    threads: int
    output_bytes: int = 64 * _MIB
    disk_bytes: int = 8 << 30
    files: int = 200_000
    open_files: int = 4096

    @classmethod
    def of_machine(cls) -> ResourceBounds:
        """Half of the memory, and processes and threads in proportion to the processors."""
        cores = os.cpu_count() or 1
        return cls(memory_bytes=available_memory() // 2, processes=128 + 4 * cores, threads=512 + 64 * cores)


@dataclass(frozen=True)
class Usage:
    """What a worker and its processes have taken so far, in the units of :class:`ResourceBounds`."""

    memory_bytes: int = 0
    processes: int = 0
    output_bytes: int = 0
    disk_bytes: int = 0
    files: int = 0


def violation(usage: Usage, bounds: ResourceBounds) -> str | None:
    """Return the bound that is exceeded, in words, or None."""
    if usage.processes > bounds.processes:
        return f"it ran {usage.processes} processes (at most {bounds.processes})"
    if usage.memory_bytes > bounds.memory_bytes:
        return f"it used {_mib(usage.memory_bytes)} of memory (at most {_mib(bounds.memory_bytes)})"
    if usage.output_bytes > bounds.output_bytes:
        return f"it wrote {_mib(usage.output_bytes)} of output (at most {_mib(bounds.output_bytes)})"
    if usage.disk_bytes > bounds.disk_bytes:
        return f"its files took {_mib(usage.disk_bytes)} of disk (at most {_mib(bounds.disk_bytes)})"
    if usage.files > bounds.files:
        return f"it made {usage.files} files (at most {bounds.files})"
    return None


def available_memory() -> int:
    """Bytes of this machine's memory; in a container what that may have: beyond it the kernel kills whom it likes.

    Of one of several harnesses on this host, its part.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_container_limits()]) // host_share()


def available_processors(root: Path = Path("/")) -> int:
    """Return how many processors this process may run on at once, at least one; ``root`` is for tests.

    A container's quota counts as well: with more threads than it allows, all of them are stopped for a while in turns.
    """
    return max(1, min(len(os.sched_getaffinity(0)), *_quotas(root)))


def host_share() -> int:
    """Return how many harnesses, each with a GPU of its own, share this host by word of whoever started them; one where
    nobody did.
    """
    text = os.environ.get(HOST_SHARE, "")
    return max(1, int(text)) if text.isdecimal() else 1


def _quotas(root: Path) -> list[int]:
    """Return how many processors a control group allows, this harness's part of it; without a quota, as many as there
    can be.
    """
    folder = root / "sys/fs/cgroup"
    found = [1 << 16]
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in files).split()
        except (OSError, ValueError):
            continue
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) // int(period) // host_share())
    return found


def _container_limits() -> list[int]:
    """Bytes of memory that control groups allow this process; empty if none says so."""
    texts = []
    for path in _MEMORY_LIMITS:
        try:
            texts.append(Path(path).read_text().strip())
        except OSError:
            continue
    return [int(text) for text in texts if text.isdecimal()]


def _mib(size: int) -> str:
    return f"{size / _MIB:.0f} MiB"


# ---- spec -----------------------------------------------------------------------------------------
# What the harness asks of the sandbox for one worker, in a form that crosses a process boundary.

HIGHEST_LEVEL = 3

ProcWrites = Literal["none", "self", "all"]
"""Where below ``/proc`` a worker may write: nowhere, its own folder (CUDA names its threads there), or everywhere."""


@dataclass(frozen=True)
class Confinement:
    """A level of the sandbox and the choices within it.

    Levels: 1, a session of its own, a scrubbed environment and resource limits; 2, and Landlock, a system call filter and no
    capabilities; 3, and namespaces of its own (processes, mounts, network, IPC), which takes root.

    ``own_user``: at level 3, run as a user that owns nothing but the scratch folder, where that user can read what it needs.
    ``proc_writes``: see :data:`ProcWrites`. ``unix_sockets``: allow sockets of the machine itself that
    listen and never connect, without which CUDA does not start.
    ``private_shm``: at level 3, a ``/dev/shm`` of its own rather than none.
    """

    level: int
    own_user: bool = True
    proc_writes: ProcWrites = "self"
    unix_sockets: bool = False
    private_shm: bool = True


@dataclass(frozen=True)
class WorkerSpec:
    """One worker: how it is confined, what it may read besides its interpreter, and what it runs.

    ``channel`` is the descriptor of its socket. ``script`` replaces the worker's own program. ``hidden`` are folders that stay
    unreadable even if they lie inside one that is readable as a whole.
    """

    confinement: Confinement
    bounds: ResourceBounds
    device: str
    folder: str
    channel: int
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    script: str | None = None
    protected: tuple[int, ...] = field(default=())

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> WorkerSpec:
        """Return the inverse of :meth:`to_json`."""
        fields: Mapping[str, Any] = json.loads(line)
        lists = {name: tuple(fields[name]) for name in ("readable", "hidden", "protected")}
        confinement, bounds = Confinement(**fields["confinement"]), ResourceBounds(**fields["bounds"])
        return cls(**{**fields, **lists, "confinement": confinement, "bounds": bounds})

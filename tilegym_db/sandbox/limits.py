"""Resource limits of one worker, the check of its usage, and the specification of its sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

_MIB = 1 << 20
HOST_SHARE = "TILEGYM_DB_HOST_SHARE"
"""Environment variable with the number of harnesses on this host, one per GPU."""
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class ResourceBounds:
    """Bounds on a worker together with every process that it starts. Sizes in bytes.

    The supervisor kills a worker that exceeds them. ``memory_bytes`` counts private and shared memory in use. It does not
    count address space, of which CUDA reserves terabytes. The kernel enforces ``threads`` if it can and refuses one more
    thread. Workers that share a user also share a bound, which is several times as large.
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
        """Return half of the memory, and processes and threads in proportion to the processors."""
        cores = os.cpu_count() or 1
        return cls(memory_bytes=available_memory() // 2, processes=128 + 4 * cores, threads=512 + 64 * cores)


@dataclass(frozen=True)
class Usage:
    """The resources that a worker and its processes use, in the units of :class:`ResourceBounds`."""

    memory_bytes: int = 0
    processes: int = 0
    output_bytes: int = 0
    disk_bytes: int = 0
    files: int = 0


def violation(usage: Usage, bounds: ResourceBounds) -> str | None:
    """Return a description of the exceeded bound, or None."""
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
    """Return the bytes of memory that this harness may use.

    In a container this is the container's limit, because the kernel kills processes beyond it. Several harnesses on one
    host divide it equally.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_container_limits()]) // host_share()


def available_processors(root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use at once, at least 1; ``root`` is for tests.

    A container's quota counts as well. With more threads than it allows, the kernel pauses all of them from time to time.
    """
    return max(1, min(len(os.sched_getaffinity(0)), *_quotas(root)))


def host_share() -> int:
    """Return the number of harnesses that share this host, one per GPU; 1 if :data:`HOST_SHARE` is not set."""
    text = os.environ.get(HOST_SHARE, "")
    return max(1, int(text)) if text.isdecimal() else 1


def _quotas(root: Path) -> list[int]:
    """Return this harness's part of each processor quota, after an upper bound for the case without a quota."""
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
    """Return the memory limits of this process's control groups, in bytes; empty without a limit."""
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
# The harness sends a WorkerSpec to the sandbox, as JSON.

ProcWrites = Literal["none", "self", "all"]
"""Places below ``/proc`` that a worker may write: none, its own folder (CUDA names its threads there), or all."""


@dataclass(frozen=True)
class Confinement:
    """A level of the sandbox and the choices within it.

    Level 1 has a separate session, a scrubbed environment and resource limits. Level 2 adds Landlock and a system call
    filter, and drops capabilities. Level 3 adds separate namespaces (processes, mounts, network, IPC) and requires root.

    ``own_user``: at level 3, run as a user that owns only the scratch folder, if that user can read what it needs.
    ``proc_writes``: see :data:`ProcWrites`. ``unix_sockets``: allow local sockets that listen and never connect;
    CUDA does not start without them. ``private_shm``: at level 3, mount a separate ``/dev/shm``.
    """

    level: int
    own_user: bool = True
    proc_writes: ProcWrites = "self"
    unix_sockets: bool = False
    private_shm: bool = True


@dataclass(frozen=True)
class WorkerSpec:
    """A worker: its confinement, the files that it may read beyond its interpreter, and its program.

    ``channel`` is the descriptor of its socket. ``script`` replaces the default program of a worker. ``hidden`` folders
    stay unreadable even if they lie inside a readable one.
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
        """Return the specification as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> WorkerSpec:
        """Parse the output of :meth:`to_json`."""
        fields: Mapping[str, Any] = json.loads(line)
        lists = {name: tuple(fields[name]) for name in ("readable", "hidden", "protected")}
        confinement, bounds = Confinement(**fields["confinement"]), ResourceBounds(**fields["bounds"])
        return cls(**{**fields, **lists, "confinement": confinement, "bounds": bounds})

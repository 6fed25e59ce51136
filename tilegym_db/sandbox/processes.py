"""Bounds of a worker and its sandbox; finds, measures and ends its processes through ``/proc``."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tilegym_db.errors import TilegymDBError

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


def free_memory() -> int:
    """Return the bytes that this process may hold now: what is free for it, and what it holds already.

    Beyond that, the kernel of Linux ends a process instead of refusing the allocation.
    """
    return min(
        available_memory(), _linux_bytes("/proc/meminfo", "MemAvailable:") + _linux_bytes("/proc/self/status", "VmRSS:")
    )


def _linux_bytes(file: str, key: str) -> int:
    """Return a size that Linux states in kB; more than any machine has if it states none."""
    try:
        lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 1 << 62
    found = [line.split()[1] for line in lines if line.startswith(key)]
    return int(found[0]) * 1024 if found else 1 << 62


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


_BLOCK = 512
_DEEPEST = 64
_SCHEDULED = 2
_STOLEN = 7


def descendants(ancestor: int) -> list[int]:
    """Return the descendants of a process in no particular order, zombies included."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found += below
        waiting += below
    return found


def kill_descendants(ancestor: int) -> int:
    """Send SIGKILL to all descendants of a process and return their number; repeat until it is 0."""
    found = descendants(ancestor)
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    return len(found)


def processor_us(processes: Iterable[int]) -> float:
    """Return the processor time of processes so far, including their ended threads, in microseconds."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime_ns(~process << 3 | _SCHEDULED)  # what clock_getcpuclockid(3) makes of a process
    return total / 1e3


def queued_us(processes: Iterable[int]) -> float:
    """Return the time that living threads have waited for a processor, in microseconds; 0 if unknown."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended, or this kernel does not count
            for thread in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError):
                    total += int(_read(f"/proc/{process}/task/{thread}/schedstat").split()[1])
    return total / 1e3


def stolen_us() -> list[float]:
    """Return the time that the host withheld each processor of a virtual machine, in microseconds.

    The time counts from the start of the machine, in steps of a hundredth of a second; empty if the kernel does not report it.
    """
    us_a_tick = 1e6 / os.sysconf("SC_CLK_TCK")
    stolen = []
    with contextlib.suppress(OSError), open("/proc/stat", "rb") as file:
        next(file, b"")  # the sum of all
        for line in file:
            name, *ticks = line.split()
            if not name.startswith(b"cpu"):
                break
            stolen.append(int(ticks[_STOLEN]) * us_a_tick)
    return stolen


def reap(spare: int = 0) -> dict[int, int]:
    """Wait status of each of this process's children that has ended; stops at the child that is to be spared."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid != spare:
            process, status = os.waitpid(found.si_pid, 0)
            ended[process] = status
    return ended


def memory_bytes(processes: Iterable[int]) -> int:
    """Return the private plus shared memory in use, without mapped files. Pages shared since a fork count for each process."""
    return sum(_sum_of_lines(f"/proc/{process}/status", (b"RssAnon:", b"RssShmem:")) or 0 for process in processes)


def shared_out_memory_bytes(processes: Iterable[int]) -> int:
    """Return the same with shared pages counted once, which takes the kernel longer."""
    total = 0
    for process in processes:
        found = _sum_of_lines(f"/proc/{process}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))
        total += memory_bytes([process]) if found is None else found
    return total


def _sum_of_lines(path: str, starts: tuple[bytes, ...]) -> int | None:
    """Return the sum of sizes, given in KiB, in those lines of a file; None if it cannot be read."""
    try:
        return sum(int(line.split()[1]) << 10 for line in _read(path).splitlines() if line.startswith(starts))
    except OSError:
        return None


def hidden_file_bytes(processes: Iterable[int], disk: int) -> tuple[int, int]:
    """Return the size of open files without a name: on the device ``disk``, and elsewhere, which is memory."""
    seen: dict[tuple[int, int], int] = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{process}/fd/{entry}")
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        seen[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK
    on_disk = sum(size for (device, _), size in seen.items() if device == disk)
    return on_disk, sum(seen.values()) - on_disk


def tree_size(folder: Path, max_files: int) -> tuple[int, int]:
    """Return (bytes on disk, number of entries) of a folder; stop counting beyond ``max_files``.

    A folder that is nested too deep counts as too many files.
    """
    size, files = 0, 0
    waiting = [(str(folder), 0)]
    while waiting and files <= max_files:
        path, depth = waiting.pop()
        if depth > _DEEPEST:
            return size, max_files + 1
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(path) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(FileNotFoundError):
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))
                if files > max_files:
                    break
    return size, files


def tasks_of_user(user: int) -> int:
    """Return the number of threads of a user, in all processes."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


# ---- watch ----------------------------------------------------------------------------------------
# The watch compares a worker's usage with its bounds and takes about a hundredth of one processor.

_SHARE_OF_TIME = 0.01
_PROCESSES_EVERY_S = 0.05, 0.5
_FILES_EVERY_S = 0.5, 5.0
"""Minimum and maximum interval of checks: a fork bomb must not gain time by slowing them."""


class Watch:
    """A watch over the descendants of a process and one folder. Call ``check`` often; it measures when the interval is over."""

    def __init__(self, ancestor: int, folder: Path, bounds: ResourceBounds, ignored: int = 0) -> None:
        """Begin; ``ignored`` is the number of the sandbox's processes, which are not counted."""
        self._ancestor, self._folder, self._bounds, self._ignored = ancestor, folder, bounds, ignored
        self._device = os.stat(folder).st_dev
        self._processes: list[int] = []
        self._memory = self._hidden_memory = self._disk = self._files = 0
        self._processes_due = self._files_due = 0.0

    def check(self, output_bytes: int) -> str | None:
        """Return a description of the exceeded bound, or None."""
        now = time.monotonic()
        if now >= self._processes_due:
            self._processes = descendants(self._ancestor)
            if len(self._processes) - self._ignored <= self._bounds.processes:  # for a fork bomb the number is enough
                self._memory = memory_bytes(self._processes)
                if self._memory > self._bounds.memory_bytes:
                    self._memory = shared_out_memory_bytes(self._processes)
            self._processes_due = _next(now, _PROCESSES_EVERY_S)
        if now >= self._files_due:
            unnamed, self._hidden_memory = hidden_file_bytes(self._processes, self._device)
            named, self._files = tree_size(self._folder, self._bounds.files)
            self._disk = named + unnamed
            self._files_due = _next(now, _FILES_EVERY_S)
        processes = len(self._processes) - self._ignored
        # A file in memory that is mapped as well would otherwise count twice.
        memory = self._memory + max(0, self._hidden_memory - self._memory)
        return violation(Usage(memory, processes, output_bytes, self._disk, self._files), self._bounds)


def _next(started: float, every_s: tuple[float, float]) -> float:
    now = time.monotonic()
    shortest, longest = every_s
    return now + min(longest, max(shortest, (now - started) / _SHARE_OF_TIME))


# ---- system calls ---------------------------------------------------------------------------------
# Linux system calls that the sandbox needs and Python lacks, made through the C library; and their numbers.
#
# Every function raises :class:`SandboxError`, naming the call and what the kernel said, if the kernel refuses.


class SandboxError(TilegymDBError):
    """A part of the sandbox that is not available here; the message names it and the reason."""

    code = "sandbox"


@dataclass(frozen=True)
class Processor:
    """The data of a processor for a system call filter: its audit code and its column in :data:`NUMBERS`."""

    audit_code: int
    column: int


PROCESSORS = {"x86_64": Processor(0xC000003E, 0), "aarch64": Processor(0xC00000B7, 1)}

# Name -> number on x86_64 and on aarch64; None if the processor has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "accept": (43, 202),
    "accept4": (288, 242),
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bind": (49, 200),
    "bpf": (321, 280),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "connect": (42, 203),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "file_setattr": (469, 469),
    "finit_module": (313, 273),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, None),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "lchown": (94, None),
    "listen": (50, 201),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vhangup": (153, 58),
}

_libc = ctypes.CDLL(None, use_errno=True)

_AT_CURRENT_FOLDER = -100
_CLONE_TREE, _RECURSIVE, _EMPTY_FROM_PATH = 1, 0x8000, 0x4
_CAPABILITY_VERSION = 0x20080522
_DROP_FROM_BOUNDING_SET, _AMBIENT, _CLEAR_AMBIENT = 24, 47, 4


def this_processor() -> Processor:
    """Return the processor that this process runs on."""
    name = platform.machine()
    if name not in PROCESSORS:
        raise SandboxError(f"no system call numbers are known for {name}", code="processor_unknown")
    return PROCESSORS[name]


def invoke(name: str, *arguments: Any) -> int:
    """Make a system call by its name."""
    number = NUMBERS[name][this_processor().column]
    _libc.syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(name, _libc.syscall(ctypes.c_long(number or -1), *wide))


SET_DUMPABLE = 4
"""The option of :func:`prctl` for whether other processes of the same user may look into this one."""


def prctl(option: int, *arguments: int) -> int:
    """Change something about this process."""
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked(f"prctl({option})", _libc.prctl(option, *values))


def unshare(flags: int) -> None:
    """Leave namespaces that are shared with others."""
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount; the arguments of mount(2)."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _checked(f"mount on {target}", _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def set_mount_attributes(path: str, attributes: int) -> None:
    """Add attributes to a mount and to everything mounted below it."""
    change = _MountAttributes(attr_set=attributes)
    size = ctypes.sizeof(change)
    invoke("mount_setattr", _AT_CURRENT_FOLDER, path.encode(), _RECURSIVE, ctypes.byref(change), size)


def clone_mount(path: str) -> int:
    """Return a descriptor of the mounts at a path, to be attached elsewhere or later."""
    return invoke("open_tree", _AT_CURRENT_FOLDER, path.encode(), _CLONE_TREE | _RECURSIVE | os.O_CLOEXEC)


def attach_mount(clone: int, path: str) -> None:
    """Attach the result of :func:`clone_mount` and close its descriptor."""
    invoke("move_mount", clone, b"", _AT_CURRENT_FOLDER, path.encode(), _EMPTY_FROM_PATH)
    os.close(clone)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def forgo_capabilities() -> None:
    """Remove capabilities that later programs could gain; this needs a capability."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    for capability in range(last + 1):
        prctl(_DROP_FROM_BOUNDING_SET, capability)
    prctl(_AMBIENT, _CLEAR_AMBIENT)


def drop_capabilities() -> None:
    """Drop every capability of this process; this needs no capability."""
    nothing = (ctypes.c_uint32 * 6)()
    header = _CapabilityHeader(_CAPABILITY_VERSION, 0)
    _checked("capset", _libc.capset(ctypes.byref(header), ctypes.byref(nothing)))


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise SandboxError(f"{what}: {os.strerror(ctypes.get_errno())}", code="system_call_refused")
    return result

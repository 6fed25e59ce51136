"""Confines the calling process, a worker that has not loaded untrusted code yet.

The order matters: steps that need privileges come first, the system call filter last. A level applies in full or not at
all. If the kernel refuses a part of it, :class:`SandboxError` names the part and the worker does not start.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tilegym_db.sandbox.processes import (
    NUMBERS,
    SET_DUMPABLE,
    Confinement,
    Processor,
    ProcWrites,
    ResourceBounds,
    SandboxError,
    WorkerSpec,
    attach_mount,
    clone_mount,
    drop_capabilities,
    forgo_capabilities,
    invoke,
    mount,
    prctl,
    set_mount_attributes,
    tasks_of_user,
    this_processor,
    unshare,
)

_NO_NEW_PRIVILEGES = 38


_WORKERS_BESIDE = 4
"""Number of workers that may reach their bound of threads before the kernel refuses a thread to a worker of the same user."""


def confine(spec: WorkerSpec, environ: Mapping[str, str], user: int | None) -> dict[str, Any]:
    """Apply a level to this process permanently.

    Args:
        environ: its environment, for the folders of compilers.
        user: the user to become; None to stay.

    Returns:
        The applied level, the user, and the process id (in the new namespace, at level 3), for the harness.
    """
    level = spec.confinement.level
    _die_first()
    _limit(spec.bounds, user)
    applied: dict[str, Any] = {"level": level, "user": os.getuid() if user is None else user, "process": os.getpid()}
    if level < 2:
        return applied
    prctl(_NO_NEW_PRIVILEGES, 1)
    with contextlib.suppress(
        SandboxError
    ):  # only root may do this; other users cannot regain capabilities because of the line above
        forgo_capabilities()
    if user is not None:
        become_user(user)
    drop_capabilities()
    prctl(SET_DUMPABLE, 1)  # makes the process the owner of its folder below /proc
    restrict_files(grants_for(spec, environ))
    install_filter(
        FilterOptions(
            shared_processes=level < 3,
            protected=spec.protected,
            writable_attributes=level >= 3,
            unix_sockets=spec.confinement.unix_sockets,
        )
    )
    return applied


def _die_first() -> None:
    """Make this process the first that the kernel kills when memory runs out."""
    with contextlib.suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit(bounds: ResourceBounds, user: int | None) -> None:
    """Set resource limits. Address space has no limit, because CUDA reserves more of it than there is memory."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, bounds.disk_bytes)
    _lower(resource.RLIMIT_NOFILE, bounds.open_files)
    # The kernel counts all threads of the user, including those of workers that start later. It does not limit root.
    threads = bounds.threads if user is not None else tasks_of_user(os.getuid()) + _WORKERS_BESIDE * bounds.threads
    _lower(resource.RLIMIT_NPROC, threads)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


# ---- levels ---------------------------------------------------------------------------------------
# A machine's level is found by trying all of them, from the highest down.

_PROC_WRITES: tuple[ProcWrites, ...] = ("self", "all")


def choices(device: str) -> list[Confinement]:
    """Return the confinements to try, best first.

    Writes anywhere below ``/proc`` are tried only if the kernel's part of it is protected. At level 3 that part is mounted
    read-only, and at level 2 only root could write to it.
    """
    sockets = device != "cpu"
    tried = [
        Confinement(3, own_user, writes, unix_sockets=sockets) for own_user in (True, False) for writes in _PROC_WRITES
    ]
    tried += [
        Confinement(2, proc_writes=writes, unix_sockets=sockets)
        for writes in _PROC_WRITES
        if writes == "self" or os.geteuid() != 0
    ]
    return [*tried, Confinement(1)]


@dataclass(frozen=True)
class Sandbox:
    """The best sandbox of a machine: its level, a description, and the reasons why better ones are not available."""

    confinement: Confinement
    description: str
    reasons: tuple[str, ...]

    @property
    def level(self) -> int:
        """1, 2 or 3; 3 confines most."""
        return self.confinement.level


def find_sandbox(
    tried: Sequence[Confinement], start: Callable[[int, Confinement], int], refused: tuple[type[Exception], ...]
) -> Sandbox:
    """Return the first confinement in which a process starts.

    Args:
        start: starts a process under the confinement with that number, ends it, and returns its user.
        refused: the exceptions that ``start`` raises if the process does not start.
    """
    reasons: list[str] = []
    for number, choice in enumerate(tried):
        try:
            return Sandbox(choice, _describe(choice, start(number, choice)), tuple(reasons))
        except refused as error:
            if choice == tried[-1]:
                raise
            reasons.append(f"{_name(choice)} is not available: {_last_line(str(error))}")
    raise AssertionError("the last choice either starts or raises")


def _name(choice: Confinement) -> str:
    user = {True: " with a separate user", False: " with the same user"}[choice.own_user] if choice.level == 3 else ""
    return f"level {choice.level}{user}{_proc(choice)}"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:300]


def _proc(choice: Confinement) -> str:
    return ", writes below /proc" if choice.proc_writes == "all" else ""


def _describe(choice: Confinement, user: int) -> str:
    if choice.level == 1:
        return "level 1: a separate session, a scrubbed environment and resource limits"
    version = landlock_version()
    parts = f"Landlock {version}, a system call filter, no capabilities, resource limits, a scrubbed environment"
    parts += _proc(choice)
    if choice.level == 2:
        signals = (
            ""
            if version >= SIGNAL_SCOPE_VERSION
            else "; signals to other processes of the user are only partly refused"
        )
        return f"level 2: {parts}{signals}"
    identity = f"separate user {user}" if choice.own_user else f"user {user} without capabilities"
    return f"level 3: process, mount, network and IPC namespaces, {identity}, {parts}"


# ---- namespaces -----------------------------------------------------------------------------------
# Level 3 creates namespaces for processes, mounts, network and IPC, and runs as a user that owns nothing. It needs root.
# It creates no user namespace, because CUDA does not start in some of them.

_NEW_MOUNTS, _NEW_IPC, _NEW_PROCESSES, _NEW_NETWORK = 0x00020000, 0x08000000, 0x20000000, 0x40000000
_NO_SUID, _NO_DEVICES, _NO_PROGRAMS, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_READ_ONLY_ATTRIBUTE, _NO_SUID_ATTRIBUTE = 1, 2

# Parts of /proc that belong to the kernel, not to a process.
_KERNEL_PARTS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr")
_MIN_PROCESS_LIMIT = 400  # the kernel reserves 300 numbers
_LIMIT_IS_PER_NAMESPACE = (6, 14)
_READABLE_CHECK_LIMIT = 10_000
_USERS_FROM, _MAX_USERS = 1 << 16, 1 << 31


def new_process_namespace() -> None:
    """Put the next child into a new process namespace; all processes in it end with that child."""
    try:
        unshare(_NEW_PROCESSES)
    except SandboxError as error:
        raise SandboxError(f"a separate process namespace requires root: {error}", code="namespace_refused") from None


def isolate_view(folder: Path, visible: Iterable[Path], bounds: ResourceBounds, *, reveal: bool, shm: bool) -> None:
    """Give this process, the first of its namespace, read-only mounts except its folder, and a new ``/proc``.

    Args:
        folder: the scratch folder, which stays writable.
        visible: paths that any user must reach if ``reveal`` is set.
        bounds: the size of ``/dev/shm`` and, if the kernel supports it, the number of threads.
        reveal: hide the contents of each folder that other users cannot enter but that leads to a visible path (a home
            folder that contains Python), and show only those paths.
        shm: mount a separate ``/dev/shm``.
    """
    unshare(_NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC)
    mount("none", "/", None, _RECURSIVE | _PRIVATE)
    own = clone_mount(str(folder))
    if reveal:
        _reveal([*visible, folder])
    set_mount_attributes("/", _READ_ONLY_ATTRIBUTE | _NO_SUID_ATTRIBUTE)
    attach_mount(own, str(folder))
    _mount_proc(bounds)
    if shm and Path("/dev/shm").is_dir():
        options = f"size={bounds.memory_bytes // 4},mode=1777"
        mount("tmpfs", "/dev/shm", "tmpfs", _NO_SUID | _NO_DEVICES | _NO_PROGRAMS, options)
    os.chdir(folder)


def _mount_proc(bounds: ResourceBounds) -> None:
    mount("proc", "/proc", "proc", _NO_SUID | _NO_DEVICES | _NO_PROGRAMS)
    version = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2])
    if version >= _LIMIT_IS_PER_NAMESPACE:  # before that it would be the whole machine's
        limit = max(_MIN_PROCESS_LIMIT, bounds.threads)
        Path("/proc/sys/kernel/pid_max").write_text(str(limit))
    for name in _KERNEL_PARTS:
        path = f"/proc/{name}"
        if os.path.exists(path):
            mount(path, path, None, _BIND | _RECURSIVE)
            set_mount_attributes(path, _READ_ONLY_ATTRIBUTE)


def _reveal(paths: Iterable[Path]) -> None:
    """Show paths that lie in folders which other users cannot enter: mount an empty folder there with only these paths in it."""
    hidden_by: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(path.resolve() for path in paths if path.exists()):
        closed = next((ancestor for ancestor in reversed(path.parents) if not _lets_others_in(ancestor)), None)
        if closed is not None:
            hidden_by.setdefault(closed, []).append(path)
    for closed, hidden in hidden_by.items():
        outermost = [path for path in hidden if not any(path != other and other in path.parents for other in hidden)]
        clones = [(path, path.is_dir(), clone_mount(str(path))) for path in outermost]
        mount("tmpfs", str(closed), "tmpfs", _NO_SUID | _NO_DEVICES, "mode=0711,size=1m")
        for path, is_folder, clone in clones:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=True) if is_folder else path.touch()
            attach_mount(clone, str(path))


def _lets_others_in(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def choose_user(supervisor: int) -> int:
    """Return an unused user number, derived from the supervisor's process id, that this system can map."""
    _, _, count = (int(text) for text in Path("/proc/self/uid_map").read_text().split()[:3])
    most = min(count, _MAX_USERS) - 2
    return most - supervisor % (most - _USERS_FROM if most > 2 * _USERS_FROM else most // 4)


def is_readable_by_others(path: Path) -> bool:
    """Return True if every user who reaches this path can read it and all of its contents."""
    waiting, checked = [path], 0
    while waiting:
        current = waiting.pop()
        checked += 1
        mode = current.stat().st_mode
        needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
        if mode & needed != needed or checked > _READABLE_CHECK_LIMIT:
            return False
        if stat.S_ISDIR(mode):
            waiting += current.iterdir()
    return True


def become_user(user: int) -> None:
    """Drop to a user and a group of the same number, with no other groups."""
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        raise SandboxError(f"cannot become user {user}: {error}", code="user_refused") from None


# ---- seccomp --------------------------------------------------------------------------------------
# The kernel refuses system calls that a Solution and its compilers do not need.
# The filter is a classic BPF program. A call in another convention (32-bit, x32) has other numbers and ends the process.

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, constant."""

_NETWORK = ("socket", "connect", "bind", "listen", "accept", "accept4")

# Other processes, the kernel, mounts and the clock; names and memory that outlive the process.
_REFUSED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "pidfd_getfd", "kcmp"),
    *("move_pages", "migrate_pages", "bpf", "perf_event_open", "userfaultfd", "memfd_secret", "fanotify_init"),
    *("add_key", "request_key", "keyctl", "shmget", "msgget", "semget", "mq_open"),
    *("mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "open_tree_attr", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "unshare", "setns", "open_by_handle_at", "name_to_handle_at"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon", "swapoff"),
    *("acct", "quotactl", "quotactl_fd", "syslog", "vhangup", "sethostname", "setdomainname", "iopl", "ioperm"),
    *("settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "tkill"),
)

# Libraries try these first and have an alternative if the kernel does not support them.
_UNKNOWN = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")

# Attributes of files, which Landlock does not protect. Linkers and copying tools set them on files that they wrote. The
# filter reports success, as fakeroot does.
_ATTRIBUTES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat"),
)
_EXTENDED_ATTRIBUTES = (
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "file_setattr"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
# All processes of a worker stay in one process group, so that one signal kills them all, however fast they fork.
_GROUPS = ("setsid", "setpgid")

# Calls that are allowed on the calling process (0) but not on another one: call -> index of the argument with the process.
_ONESELF_ONLY = {
    "prlimit64": 0,
    "sched_setaffinity": 0,
    "sched_setscheduler": 0,
    "sched_setparam": 0,
    "sched_setattr": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
_SIGNALS = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")

_NEW_NAMESPACES = 0x7E020000  # the CLONE_NEW... flags that clone takes
_UNIX_FAMILY = 1
_SEQUENCED_PACKETS, _SOCKET_KIND = 5, 0xF  # the other bits of a socket's type are flags
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_SET_FILTER = 1


@dataclass(frozen=True)
class FilterOptions:
    """Filter options that differ between levels and kernels.

    ``shared_processes``: the worker can address other processes of its user (it has no separate process namespace), so
    calls that take a process are filtered. ``protected``: process (positive) and group (negative) ids that may get no
    signal. ``writable_attributes``: another part of the sandbox protects the attributes of files. ``unix_sockets``: allow
    local packet sockets (SOCK_SEQPACKET) that listen and never connect; CUDA does not start without them (error 304).
    """

    shared_processes: bool = True
    protected: tuple[int, ...] = ()
    writable_attributes: bool = False
    unix_sockets: bool = False


def build_filter(machine: Processor, options: FilterOptions) -> list[Instruction]:
    """Return the filter program for one processor."""
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine.audit_code),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for names, error in _plain_rules(options):
        for number in _numbers(machine, names):
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
    for number in _numbers(machine, ("clone",)):
        program += _on_argument(number, 0, [(_ANY_BIT, 0, 1, _NEW_NAMESPACES)], errno.EPERM)
    if options.unix_sockets:
        for number in _numbers(machine, ("socket",)):
            program += _on_argument(number, 0, [(_EQUAL, 1, 0, _UNIX_FAMILY)], errno.EPERM)
            # A datagram socket could reach another process without a connection.
            program += _on_argument(
                number, 1, [(_AND, 0, 0, _SOCKET_KIND), (_EQUAL, 1, 0, _SEQUENCED_PACKETS)], errno.EPERM
            )
    if options.shared_processes:
        for name, position in _ONESELF_ONLY.items():
            for number in _numbers(machine, (name,)):
                program += _on_argument(number, position, [(_EQUAL, 1, 0, 0)], errno.EPERM)
        for number in _numbers(machine, _SIGNALS):
            for process in options.protected:
                program += _on_argument(number, 0, [(_EQUAL, 0, 1, process & 0xFFFFFFFF)], errno.EPERM)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _plain_rules(options: FilterOptions) -> list[tuple[tuple[str, ...], int]]:
    rules = [(_REFUSED, errno.EPERM), (_UNKNOWN, errno.ENOSYS)]
    rules.append((("connect",) if options.unix_sockets else _NETWORK, errno.EPERM))
    if not options.writable_attributes:
        rules += [(_ATTRIBUTES, 0), (_EXTENDED_ATTRIBUTES, errno.ENOTSUP)]
    if options.shared_processes:
        rules += [(_GROUPS, 0), (("pidfd_send_signal",), errno.ENOSYS)]
    return rules


def _numbers(machine: Processor, names: Iterable[str]) -> list[int]:
    return [number for name in names if (number := NUMBERS[name][machine.column]) is not None]


def _on_argument(number: int, position: int, test: list[Instruction], error: int) -> list[Instruction]:
    """Return a test of an argument's low 32 bits that refuses the call unless the test jumps over the refusal."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * position), *test, (_RETURN, 0, 0, _ERROR | error), (_LOAD, 0, 0, _NUMBER)]
    return [(_EQUAL, 0, len(body), number), *body]


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def install_filter(options: FilterOptions) -> None:
    """Filter the calls of this process and its children permanently. ``no_new_privs`` must be set."""
    program = build_filter(this_processor(), options)
    instructions = (_Instruction * len(program))(*(_Instruction(*instruction) for instruction in program))
    try:
        invoke("seccomp", _SET_FILTER, 0, ctypes.byref(_Program(len(program), instructions)))
    except SandboxError as error:
        raise SandboxError(f"the system call filter cannot be installed: {error}", code="seccomp_refused") from None


# ---- Landlock -------------------------------------------------------------------------------------
# Landlock: restricts the files of this process and its children permanently, without privileges.
#
# What is not granted is refused. Landlock does not guard the attributes of files (mode, owner, times): the system call filter
# and, at level 3, read-only mounts do.


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
    """Allow only the grants. Paths that do not exist are skipped."""
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

"""The system call filter: what a Solution and its compilers have no use for is refused by the kernel.

The program is built by hand, as classic BPF. Calls of another processor's convention (32-bit, x32) would have other numbers:
they end the process.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterable
from dataclasses import dataclass

from tilegym_db.confinement.system_calls import NUMBERS, Processor, SandboxError, invoke, this_processor

__all__ = ["FilterOptions", "build_filter", "install_filter"]

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, constant."""

_NETWORK = ("socket", "connect", "bind", "listen", "accept", "accept4")

# Reading and changing other processes, the kernel, mounts, the clock; names and memory that outlive the process.
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

# libraries try these first and have another way where the kernel does not know them
_UNKNOWN = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")

# The attributes of files, which Landlock does not guard. Linkers and copying tools set them on what they wrote; they are told
# that it worked, as under fakeroot.
_ATTRIBUTES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat"),
)
_EXTENDED_ATTRIBUTES = (
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "file_setattr"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
# All of a worker's processes stay in one process group, which can be killed at one stroke, however fast they fork.
_GROUPS = ("setsid", "setpgid")

# What may be done to oneself (0) but not to another process of the same user: call -> its argument that names the process.
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
    """What differs between levels and kernels.

    ``shared_processes``: other processes of the user can be named (no process namespace of its own), so that calls which name
    one are filtered. ``protected``: the process (positive) and group (negative) ids that may get no signal.
    ``writable_attributes``: attributes of files are guarded elsewhere. ``unix_sockets``: allow packet sockets of the machine
    itself (SOCK_SEQPACKET) that listen, without which CUDA does not start (error 304). None may connect.
    """

    shared_processes: bool = True
    protected: tuple[int, ...] = ()
    writable_attributes: bool = False
    unix_sockets: bool = False


def build_filter(machine: Processor, options: FilterOptions) -> list[Instruction]:
    """The program for one processor."""
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
            # A datagram socket would need no connection to reach another process.
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
    """Refuse a call if the test of its argument (the low 32 bits of it) says so, by not jumping."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * position), *test, (_RETURN, 0, 0, _ERROR | error), (_LOAD, 0, 0, _NUMBER)]
    return [(_EQUAL, 0, len(body), number), *body]


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def install_filter(options: FilterOptions) -> None:
    """Filter the calls of this process and its children, for good. ``no_new_privs`` must be set.

    Raises:
        SandboxError: the kernel has no filters, or the processor is unknown.
    """
    program = build_filter(this_processor(), options)
    instructions = (_Instruction * len(program))(*(_Instruction(*instruction) for instruction in program))
    try:
        invoke("seccomp", _SET_FILTER, 0, ctypes.byref(_Program(len(program), instructions)))
    except SandboxError as error:
        raise SandboxError(f"the system call filter cannot be installed: {error}", code="seccomp_refused") from None

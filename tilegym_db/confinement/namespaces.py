"""Level 3: namespaces of its own for processes, mounts, network and IPC, and a user that owns nothing. Takes root.

No user namespaces: CUDA does not start in some of them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from tilegym_db.confinement.bounds import ResourceBounds
from tilegym_db.confinement.system_calls import (
    SandboxError,
    attach_mount,
    clone_mount,
    mount,
    set_mount_attributes,
    unshare,
)

__all__ = ["become_user", "choose_user", "is_readable_by_others", "isolate_view", "new_process_namespace"]

_NEW_MOUNTS, _NEW_IPC, _NEW_PROCESSES, _NEW_NETWORK = 0x00020000, 0x08000000, 0x20000000, 0x40000000
_NO_SUID, _NO_DEVICES, _NO_PROGRAMS, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_READ_ONLY_ATTRIBUTE, _NO_SUID_ATTRIBUTE = 1, 2

# The parts of /proc that belong to the kernel and not to a process.
_KERNEL_PARTS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr")
_LEAST_PROCESS_LIMIT = 400  # the kernel reserves 300 numbers
_LIMIT_IS_PER_NAMESPACE = (6, 14)
_READABLE_CHECK_LIMIT = 10_000
_USERS_FROM, _MOST_USERS = 1 << 16, 1 << 31


def new_process_namespace() -> None:
    """The next child is the first process of a namespace of its own; with it, everything in there dies."""
    try:
        unshare(_NEW_PROCESSES)
    except SandboxError as error:
        raise SandboxError(f"a process namespace of its own takes root: {error}", code="namespace_refused") from None


def isolate_view(folder: Path, visible: Iterable[Path], bounds: ResourceBounds, *, reveal: bool, shm: bool) -> None:
    """Give this process, the first of its namespace, mounts of its own: all read-only but its folder, and a new ``/proc``.

    Args:
        folder: the scratch folder, which stays writable.
        visible: what must be reachable by any user if ``reveal``.
        bounds: for the size of ``/dev/shm`` and, where the kernel can, the number of threads.
        reveal: hide the contents of every folder that other users cannot enter but that leads to something visible (a home
            folder with a Python in it), and show only that.
        shm: mount a ``/dev/shm`` of its own.
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
        limit = max(_LEAST_PROCESS_LIMIT, bounds.threads)
        Path("/proc/sys/kernel/pid_max").write_text(str(limit))
    for name in _KERNEL_PARTS:
        path = f"/proc/{name}"
        if os.path.exists(path):
            mount(path, path, None, _BIND | _RECURSIVE)
            set_mount_attributes(path, _READ_ONLY_ATTRIBUTE)


def _reveal(paths: Iterable[Path]) -> None:
    """Put an empty folder over each one that others cannot enter, and in it only the given paths."""
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
    """A user number that nobody else has: by the supervisor's process id, within what this system can map."""
    _, _, count = (int(text) for text in Path("/proc/self/uid_map").read_text().split()[:3])
    most = min(count, _MOST_USERS) - 2
    return most - supervisor % (most - _USERS_FROM if most > 2 * _USERS_FROM else most // 4)


def is_readable_by_others(path: Path) -> bool:
    """True if every user who gets to this path can read it and all that is in it."""
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

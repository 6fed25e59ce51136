"""Finds, measures and ends a worker's processes through ``/proc``."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from tilegym_db.sandbox.limits import ResourceBounds, Usage, violation

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

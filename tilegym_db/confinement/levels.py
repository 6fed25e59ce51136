"""The levels of confinement, and which of them a machine has: found out by trying, from the highest down."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilegym_db.confinement.landlock import SIGNAL_SCOPE_VERSION, landlock_version
from tilegym_db.confinement.spec import Confinement, ProcWrites

__all__ = ["Sandbox", "choices", "find_sandbox"]

_PROC_WRITES: tuple[ProcWrites, ...] = ("self", "all")


def choices(device: str) -> list[Confinement]:
    """What is tried, best first.

    Writes anywhere below ``/proc`` are for where the kernel's own part of it cannot be written to: at level 3 it is mounted
    read-only, and at level 2 only root could.
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
    """The best sandbox of a machine: its level, what that is in words, and why nothing better is available."""

    confinement: Confinement
    description: str
    reasons: tuple[str, ...]

    @property
    def level(self) -> int:
        """1, 2 or 3."""
        return self.confinement.level


def find_sandbox(
    tried: Sequence[Confinement], start: Callable[[int, Confinement], int], refused: tuple[type[Exception], ...]
) -> Sandbox:
    """The first confinement in which a process starts.

    Args:
        tried: best first.
        start: starts one under the confinement with that number, ends it, and gives the user that it ran as.
        refused: what ``start`` raises where it does not start.

    Raises:
        Exception: of ``refused``, where it does not start in the last one either.
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
    user = {True: " with a user of its own", False: " with the same user"}[choice.own_user] if choice.level == 3 else ""
    return f"level {choice.level}{user}{_proc(choice)}"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:300]


def _proc(choice: Confinement) -> str:
    return ", writes below /proc" if choice.proc_writes == "all" else ""


def _describe(choice: Confinement, user: int) -> str:
    if choice.level == 1:
        return "level 1: a session of its own, a scrubbed environment and resource limits"
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
    who = f"user {user} of its own" if choice.own_user else f"user {user} without capabilities"
    return f"level 3: process, mount, network and IPC namespaces, {who}, {parts}"

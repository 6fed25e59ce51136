"""What the harness asks of the sandbox for one worker, in a form that crosses a process boundary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tilegym_db.confinement.bounds import ResourceBounds

__all__ = ["HIGHEST_LEVEL", "Confinement", "ProcWrites", "WorkerSpec"]

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
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> WorkerSpec:
        """The inverse of :meth:`to_json`."""
        fields: Mapping[str, Any] = json.loads(line)
        lists = {name: tuple(fields[name]) for name in ("readable", "hidden", "protected")}
        confinement, bounds = Confinement(**fields["confinement"]), ResourceBounds(**fields["bounds"])
        return cls(**{**fields, **lists, "confinement": confinement, "bounds": bounds})

"""Confines the calling process, a worker that has not yet loaded anything it could not be trusted with.

The order matters: what takes privileges comes first, the system call filter last. A level is had in full or not at all: where
the kernel refuses a part of it, :class:`SandboxError` says which, and the worker does not start.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilegym_db.confinement.bounds import ResourceBounds
from tilegym_db.confinement.grants import grants_for
from tilegym_db.confinement.landlock import restrict_files
from tilegym_db.confinement.namespaces import become_user
from tilegym_db.confinement.processes import tasks_of_user
from tilegym_db.confinement.seccomp import FilterOptions, install_filter
from tilegym_db.confinement.spec import WorkerSpec
from tilegym_db.confinement.system_calls import SandboxError, drop_capabilities, forgo_capabilities, prctl

__all__ = ["confine"]

_SET_DUMPABLE, _NO_NEW_PRIVILEGES = 4, 38


_WORKERS_BESIDE = 4
"""So many workers may reach their bound of threads before one that shares their user is refused its own."""


def confine(spec: WorkerSpec, environ: Mapping[str, str], user: int | None) -> dict[str, Any]:
    """Apply a level to this process, for good.

    Args:
        spec: the worker's.
        environ: its environment, for the folders of compilers.
        user: who to become; None to stay.

    Returns:
        What was applied, for the harness: the level, the user, and the process id (in its own namespace, at level 3).

    Raises:
        SandboxError: which part the kernel refused.
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
    ):  # only root may, and whoever may not cannot regain any either, by the line above
        forgo_capabilities()
    if user is not None:
        become_user(user)
    drop_capabilities()
    prctl(_SET_DUMPABLE, 1)  # its own folder below /proc shall be its own
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
    """Be the first that the kernel kills when memory runs out."""
    with contextlib.suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit(bounds: ResourceBounds, user: int | None) -> None:
    """Resource limits. Address space has none: CUDA reserves more of it than there is memory."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, bounds.disk_bytes)
    _lower(resource.RLIMIT_NOFILE, bounds.open_files)
    # It counts all threads of the user, wherever they come from, those of workers that start later too; root is not bound
    # by it.
    threads = bounds.threads if user is not None else tasks_of_user(os.getuid()) + _WORKERS_BESIDE * bounds.threads
    _lower(resource.RLIMIT_NPROC, threads)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))

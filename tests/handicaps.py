"""What takes a part of the kernel away from a process and from all that it starts: lines of Python to run first."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NO_CAPABILITIES = """
from tilegym_db.sandbox.processes import drop_capabilities, forgo_capabilities
import contextlib
with contextlib.suppress(Exception):
    forgo_capabilities()
drop_capabilities()
"""
NO_LANDLOCK = """
import errno
from tilegym_db.sandbox import confine
from tilegym_db.sandbox.processes import prctl
confine._plain_rules = lambda options: [(("landlock_create_ruleset",), errno.ENOSYS)]
prctl(38, 1)
confine.install_filter(confine.FilterOptions(shared_processes=False))
"""

_DROP_FROM_BOUNDS = 24
_OF_A_CONTAINER = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
"""The capabilities that Docker leaves to root by default; CAP_SYS_ADMIN is not among them."""


def keep_a_containers_capabilities() -> None:
    """Drop the capabilities that root lacks in a container, for ``preexec_fn``. Only root can ask for it."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in set(range(last + 1)) - _OF_A_CONTAINER:
        if ctypes.CDLL(None).prctl(_DROP_FROM_BOUNDS, capability, 0, 0, 0) != 0:
            os._exit(71)

"""One timing at a time per device, across processes: a lock file named after the GPU's UUID."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

__all__ = ["timing_lock"]

ANYBODY = 0o666
"""Mode of the lock file: the users of a machine share its GPUs."""


@contextlib.contextmanager
def timing_lock(device: str) -> Iterator[None]:
    """Hold the device for timing; waits for whoever holds it. The lock dies with its process."""
    path = Path(tempfile.gettempdir()) / f"tilegym-db-timing-{_identity(device)}.lock"
    with FileLock(path, mode=ANYBODY, thread_local=False):
        yield


def _identity(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)

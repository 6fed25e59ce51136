"""The ways in which a worker is lost, as the harness learns of them."""

from __future__ import annotations

from tilegym_db.errors import TilegymDBError

__all__ = ["WorkerDied", "WorkerHasNoMemory", "WorkerTimeout"]


class WorkerDied(TilegymDBError):
    """The worker ended, was ended because it exceeded a bound, or broke the protocol, before it answered."""

    code = "worker_ended"


class WorkerHasNoMemory(WorkerDied):
    """The GPU had no memory left for another process: other workers, or other programs, have it."""

    code = "gpu_memory_full"


class WorkerTimeout(TilegymDBError):
    """The worker did not answer in time and was killed."""

    code = "worker_timeout"

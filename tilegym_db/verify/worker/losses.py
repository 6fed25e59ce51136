"""The ways in which a worker is lost, as the harness learns of them."""

from __future__ import annotations

__all__ = ["WorkerDied", "WorkerHasNoMemory", "WorkerTimeout"]


class WorkerDied(Exception):
    """The worker ended, was ended because it exceeded a bound, or broke the protocol, before it answered."""


class WorkerHasNoMemory(WorkerDied):
    """The GPU had no memory left for another process: other workers, or other programs, have it."""


class WorkerTimeout(Exception):
    """The worker did not answer in time and was killed."""

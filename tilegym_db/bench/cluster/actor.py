"""The actor of one device, a process that Ray starts on the node that has it.

It does what the process that plans does for a device of its own host: starts the same supervisor, gives it orders, hears what it
tells. Between the two are only the parcels: records and sources come by digest into a catalog of this actor's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from tilegym_db.bench.cluster.parcels import ParcelStore
from tilegym_db.bench.gpus.devices import MeasuringDevice, share_processors
from tilegym_db.bench.gpus.messages import Failed, Traced
from tilegym_db.bench.gpus.process import DeviceProcess, SupervisorLost
from tilegym_db.bench.gpus.site import Missing
from tilegym_db.errors import TilegymDBError
from tilegym_db.scratch import scratch_folder

__all__ = ["DeviceActor", "TracedText"]

LISTEN_S = 1.0
THREADS_OF_RAY = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class TracedText:
    """A trace as JSON, which its receiver validates."""

    text: str


class DeviceActor:
    """One device. Its methods are called by one driver, at the same time from several threads of this process."""

    def __init__(self, gpu: str, number: int, of: int) -> None:
        """Start the supervisor for a GPU slug (``auto``: whatever Ray gave), as the ``number``-th of ``of`` on this node."""
        # Ray sets it to the CPUs that an actor asked for; a supervisor's pools are as large as its block of processors.
        os.environ.pop(THREADS_OF_RAY, None)
        self._stack = ExitStack()
        self._parcels = ParcelStore(self._stack.enter_context(scratch_folder()))
        block = share_processors(sorted(os.sched_getaffinity(0)), of)[number]
        self._process = DeviceProcess(MeasuringDevice(f"device {number}", number, gpu), gpu, block, of)
        self._failures: list[Any] = []

    def missing(self, dependencies: Mapping[str, tuple[str, ...]]) -> Missing:
        """What cannot be used on this node; ``dependencies`` are those that Solutions declare, by name."""
        from tilegym_db.bench.run_setup import lacking_dependencies, unusable_languages

        return Missing(unusable_languages(), lacking_dependencies(dependencies))

    def send(self, body: bytes, references: Mapping[str, Any]) -> None:
        """Give the supervisor an order, after fetching what it names and this actor lacks; what fails is told as a failure."""
        import ray

        try:
            lacking = self._parcels.lacks(references)
            for key, parcel in zip(lacking, ray.get([references[key] for key in lacking]), strict=True):
                self._parcels.add(key, parcel)
            self._process.send(self._parcels.unpack(body))
        except TilegymDBError as error:
            self._failures.append(Failed(f"the order could not be taken there: {error}", is_device=True))
        except SupervisorLost as lost:
            self._failures.append(Failed(str(lost), is_device=False))

    def receive(self) -> list[Any]:
        """What the supervisor has told since it was last asked; empty where that is nothing within a second."""
        told: list[Any] = []
        try:
            if not self._failures and wait([self._process.connection], LISTEN_S):
                while not told or self._process.connection.poll():
                    message = self._process.receive()
                    told.append(TracedText(message.trace.to_json()) if isinstance(message, Traced) else message)
        except (SupervisorLost, OSError, ValueError) as lost:  # the last two: its socket was closed meanwhile
            told.append(Failed(str(lost), is_device=False))
        told += self._failures
        self._failures.clear()
        return told

    def close(self, timeout_s: float) -> None:
        """End the supervisor and everything below it."""
        self._process.end(timeout_s)
        self._stack.close()

"""Where a run measures: in this process, on several GPUs of this host, or on those of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from tilegym_db.bench.cluster.address import names_cluster
from tilegym_db.bench.gpus.devices import MeasuringDevice, devices_of, share_processors
from tilegym_db.bench.gpus.pool import DevicePool
from tilegym_db.bench.gpus.process import DeviceProcess
from tilegym_db.errors import UsageError

__all__ = ["host_pool", "open_pool"]


@contextlib.contextmanager
def open_pool(
    executor: str | None,
    gpus: str | Sequence[MeasuringDevice] | None,
    gpu: str,
    waiting: Callable[[str], None] = lambda what: None,
) -> Iterator[DevicePool | None]:
    """The supervisors of several devices, which load what they need while this process plans; None where it measures itself.

    Args:
        executor: None or ``local`` for this host, or what :func:`~tilegym_db.bench.cluster.address.parse_executor` takes.
        gpus: which GPUs, as :func:`~tilegym_db.bench.gpus.devices.devices_of` takes it.
        gpu: what ``--gpu`` says.
        waiting: told what is waited for.

    Raises:
        HardwareError, UsageError: no such devices, or no such executor.
        MissingPackageError: the executor needs a package that is not installed.
    """
    if executor is not None and names_cluster(executor):
        from tilegym_db.bench.cluster.pool import cluster_pool

        if gpus is not None and not isinstance(gpus, str):
            raise UsageError(
                "devices of this host cannot be given to another executor; name a number of GPUs, or leave them out.",
                code="devices_of_executor",
            )
        with cluster_pool(executor, gpus, gpu, waiting) as pool:
            yield pool
        return
    devices = devices_of(gpus, gpu)
    if not devices:
        yield None
        return
    with host_pool(devices) as pool:
        yield pool


def host_pool(devices: Sequence[MeasuringDevice]) -> DevicePool:
    """Of devices of this host, all of one kind."""
    blocks = share_processors(sorted(os.sched_getaffinity(0)), len(devices))
    processors = dict(zip((device.label for device in devices), blocks, strict=True))

    def start(device: MeasuringDevice) -> DeviceProcess:
        return DeviceProcess(device, device.gpu, processors[device.label], len(devices))

    return DevicePool(devices, start)

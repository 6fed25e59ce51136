"""Machines: the device to measure on with its software versions, the check of its label and health, and its timing lock."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from tilegym_db.catalog import SolutionFiles
from tilegym_db.driver import driver_files, driver_gpu_names, driver_version
from tilegym_db.errors import HardwareError
from tilegym_db.measurement.devices.devices import Devices, GpuChoice, choose_gpus, parse_gpus
from tilegym_db.measurement.devices.ray_address import max_devices, names_cluster, parse_executor, require_ray
from tilegym_db.records.hardware import CPU, gpu_slug, parse_gpu, same_gpu
from tilegym_db.sandbox.worker import prepare_workers

LIBRARIES = (
    *("torch", "triton", "tilelang", "cuda-tile", "nvidia-cuda-tileiras", "transformers"),
    # Libraries that baselines call. Without the last one, FlashInfer's norms use other kernels.
    *("liger-kernel", "flash-linear-attention", "flashinfer-python", "nvidia-cutlass-dsl"),
)


@dataclass(frozen=True)
class Machine:
    """One device to measure on. ``device`` is torch's name, ``gpu`` the slug; ``sm`` and ``gpu_uuid`` are empty on a CPU."""

    device: str
    gpu: str
    gpu_name: str
    sm: str = ""
    driver: str = ""
    cuda: str = ""
    libs: dict[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    gpu_uuid: str = ""
    host: str = ""

    @property
    def is_gpu(self) -> bool:
        """True for a CUDA device."""
        return self.gpu != CPU


def library_versions() -> dict[str, str]:
    """Return the installed versions of the packages that influence a measurement."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def select_machine(asked: str, index: int = 0, find: Callable[[int], Machine | None] | None = None) -> Machine:
    """Return the device that ``--gpu`` names.

    Args:
        asked: ``auto`` (the GPU if there is one, else the CPU), ``cpu``, or a GPU slug or family.
        index: which CUDA device.
        find: returns the GPU of an index, or None; asks PyTorch by default.

    Raises:
        HardwareError: the requested GPU is unknown, or is not the one that the driver reports.
    """
    found = None if asked.strip().lower() == CPU else (find or _cuda_machine)(index)
    wanted = None if asked == "auto" else parse_gpu(asked, () if found is None else (found.gpu,))
    if wanted == CPU:
        return cpu_machine()
    if wanted is None:
        return found or cpu_machine()
    if found is None:
        raise HardwareError(_NO_GPU.format(asked=asked), code="gpu_absent")
    _refuse_other(asked, wanted, (found.gpu_name,))
    return found


_NO_GPU = (
    "--gpu {asked}: this machine has no usable GPU. Use --gpu cpu or --gpu auto here, or run the command on a machine "
    "that has one; 'tilegym-db doctor' says what is missing."
)


def devices_of_options(gpu: str, gpus: str | None = None, executor: str | None = None) -> Devices:
    """Return the devices that the options ``--gpu``, ``--gpus`` and ``--executor`` name, after :func:`refuse_absent`.

    Raises:
        HardwareError, UsageError, MissingPackageError: as :func:`refuse_absent`, or ``gpus`` is malformed.
    """
    devices = Devices(gpu, None if gpus is None else parse_gpus(gpus), executor)
    refuse_absent(devices)
    return devices


def begin_workers(devices: Devices) -> None:
    """Begin to start the workers of this host, before this process imports PyTorch; both imports then run at the same time.

    Several devices and those of a cluster have processes that begin their own.
    """
    if devices.gpus is None and devices.executor is None:
        is_cpu = devices.gpu.strip().lower() == CPU or not driver_files()
        prepare_workers(CPU if is_cpu else FIRST_GPU)


FIRST_GPU = "cuda:0"


def refuse_absent_gpu(asked: str) -> None:
    """Raise as :func:`refuse_absent` for one GPU, which ``--gpu`` names."""
    refuse_absent(Devices(asked))


def refuse_absent(devices: Devices) -> None:
    """Raise early, without PyTorch, if a requested GPU is unknown or absent according to the driver.

    Success proves nothing more: only :func:`select_machine` knows if PyTorch can use the GPU. For a cluster, only checks that
    need no connection are made.

    Raises:
        HardwareError: as :func:`select_machine`.
        UsageError: the executor is malformed, or the request names GPUs of a cluster by index.
        MissingPackageError: the executor needs a package that is not installed.
    """
    asked, gpus = devices.gpu, devices.gpus if isinstance(devices.gpus, GpuChoice) else None
    if devices.executor is not None and names_cluster(devices.executor):
        parse_executor(devices.executor)
        max_devices(gpus)
        require_ray()
        if asked != "auto":
            parse_gpu(asked)
        return
    if gpus is not None and (asked == CPU or not driver_files()):
        choose_gpus(gpus, [], asked)
    wanted = None if asked == "auto" else parse_gpu(asked, map(gpu_slug, driver_gpu_names()))
    if wanted is None or wanted == CPU:
        return
    if not driver_files():
        raise HardwareError(_NO_GPU.format(asked=asked), code="gpu_absent")
    _refuse_other(asked, wanted, driver_gpu_names())


def _refuse_other(asked: str, wanted: str, names: Sequence[str]) -> None:
    """Raise :class:`HardwareError` if there are device names, but none is of the requested GPU."""
    slugs = [gpu_slug(name) for name in names]
    if slugs and not any(same_gpu(wanted, slug) for slug in slugs):
        raise HardwareError(
            f"--gpu {asked}: the GPU here is {names[0]} ({slugs[0]}), and a trace is never labelled with another. "
            f"Use --gpu {slugs[0]} or --gpu auto.",
            code="gpu_other",
        )


def cpu_machine() -> Machine:
    """Return this machine's CPU."""
    return Machine("cpu", CPU, cpu_name(), libs=library_versions(), host=platform.node())


def cpu_name() -> str:
    """Return the name of the processor from the kernel."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cuda_machine(index: int) -> Machine | None:
    if not driver_files():
        return None  # PyTorch, which takes seconds to load, would say so too
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(index)
    return Machine(
        device=f"cuda:{index}",
        gpu=gpu_slug(properties.name),
        gpu_name=properties.name,
        sm=f"sm_{properties.major}{properties.minor}",
        driver=driver_version(),
        cuda=torch.version.cuda or "",
        libs=library_versions(),
        memory_bytes=properties.total_memory,
        gpu_uuid=f"GPU-{properties.uuid}",
        host=platform.node(),
    )


def require_healthy(machine: Machine) -> None:
    """Run a kernel with a known result on the GPU, to be called after a worker was lost.

    Raises:
        HardwareError: the device does not answer, or its result is wrong; later measurements could not be trusted.
    """
    import torch

    if not machine.is_gpu:
        return
    count = 1 << 20
    try:
        total = int(torch.arange(count, device=machine.device, dtype=torch.int64).sum())
    except RuntimeError as error:
        raise HardwareError(
            f"{machine.gpu_name} no longer works after a worker was lost: {error}", code="gpu_broken"
        ) from None
    if total != count * (count - 1) // 2:
        raise HardwareError(
            f"{machine.gpu_name} computes wrongly after a worker was lost: sum of 0..{count - 1} = {total}.",
            code="gpu_broken",
        )


@contextmanager
def leaving_processors(machine: Machine) -> Iterator[None]:
    """Limit the CPU maths of this process to one thread while it measures a CPU.

    Workers need the other processors, and spinning threads would make them wait.
    """
    import torch

    before = torch.get_num_threads()
    if not machine.is_gpu:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- device lock ----------------------------------------------------------------------------------
# Lock of a device for timing, across processes: a lock file named after the GPU's UUID.

LOCK_MODE = 0o666
"""Mode of the lock file: all users of a machine share its GPUs."""


@contextlib.contextmanager
def timing_lock(device: str) -> Iterator[None]:
    """Hold the device for timing; wait until it is free. The lock ends with its process."""
    path = Path(tempfile.gettempdir()) / f"tilegym-db-timing-{_identity(device)}.lock"
    with FileLock(path, mode=LOCK_MODE, thread_local=False):
        yield


def _identity(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


# ---- site -----------------------------------------------------------------------------------------
# The devices of a pool, as far as planning needs to know them.


@dataclass(frozen=True)
class Missing:
    """Languages and Solutions (by name) that cannot be used at a site, with reasons."""

    languages: Mapping[str, str]
    solutions: Mapping[str, str]


@dataclass(frozen=True)
class Site:
    """Devices of other hosts: one of them, whose kind and libraries all share, and a check for missing requirements."""

    machine: Machine
    missing: Callable[[Iterable[SolutionFiles]], Missing]

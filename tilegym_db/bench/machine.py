"""What this machine is: its GPU as the driver says, software versions, and the check that a label is true."""

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

from tilegym_db.bench.devices.devices import choose_gpus, parse_gpus
from tilegym_db.bench.devices.ray_address import most_devices, names_cluster, parse_executor, require_ray
from tilegym_db.catalog import SolutionFiles
from tilegym_db.driver import driver_files, driver_gpu_names, driver_version
from tilegym_db.errors import HardwareError
from tilegym_db.records.hardware import CPU, gpu_slug, parse_gpu, same_gpu

LIBRARIES = (
    *("torch", "triton", "tilelang", "cuda-tile", "nvidia-cuda-tileiras", "transformers"),
    # What baselines call. FlashInfer's norms are other kernels where the last one is not installed.
    *("liger-kernel", "flashinfer-python", "nvidia-cutlass-dsl"),
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
    """Installed versions of what a measurement depends on."""
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
        HardwareError: the GPU asked for is unknown, or is not the one that the driver reports.
    """
    wanted = None if asked == "auto" else parse_gpu(asked)
    if wanted == CPU:
        return cpu_machine()
    found = (find or _cuda_machine)(index)
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


def refuse_absent_gpu(asked: str, gpus: str | None = None, executor: str | None = None) -> None:
    """Refuse at once, without PyTorch, a GPU that is unknown or that the driver says is not here; ``gpus`` is ``--gpus``.

    Says nothing about what is left: only :func:`select_machine` knows whether PyTorch can use it. Of a cluster, which
    ``executor`` names, only what needs no connection to it.

    Raises:
        HardwareError: as :func:`select_machine`.
        UsageError: ``gpus`` is no way to name some, or ``executor`` none to name a cluster.
        MissingPackageError: the executor needs a package that is not installed.
    """
    if executor is not None and names_cluster(executor):
        parse_executor(executor)
        most_devices(gpus)
        require_ray()
        if asked != "auto":
            parse_gpu(asked)
        return
    if gpus is not None:
        choice = parse_gpus(gpus)
        if asked == CPU or not driver_files():
            choose_gpus(choice, [], asked)
    wanted = None if asked == "auto" else parse_gpu(asked)
    if wanted is None or wanted == CPU:
        return
    if not driver_files():
        raise HardwareError(_NO_GPU.format(asked=asked), code="gpu_absent")
    _refuse_other(asked, wanted, driver_gpu_names())


def _refuse_other(asked: str, wanted: str, names: Sequence[str]) -> None:
    """Raise :class:`HardwareError` where there are device names, and none of them is of the GPU that was asked for."""
    slugs = [gpu_slug(name) for name in names]
    if slugs and not any(same_gpu(wanted, slug) for slug in slugs):
        raise HardwareError(
            f"--gpu {asked}: the GPU here is {names[0]} ({slugs[0]}), and a trace is never labelled with another. "
            f"Use --gpu {slugs[0]} or --gpu auto.",
            code="gpu_other",
        )


def cpu_machine() -> Machine:
    """This machine's processor."""
    return Machine("cpu", CPU, cpu_name(), libs=library_versions(), host=platform.node())


def cpu_name() -> str:
    """Return the processor as the kernel names it."""
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
    """A canary on the GPU, after a worker was lost: a kernel whose result is known.

    Raises:
        HardwareError: the device no longer answers, or answers wrongly; nothing measured after this could be believed.
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
    """On a CPU, one thread for this process's own maths: workers need the others, and threads that spin make them wait."""
    import torch

    before = torch.get_num_threads()
    if not machine.is_gpu:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- device lock ----------------------------------------------------------------------------------
# One timing at a time per device, across processes: a lock file named after the GPU's UUID.

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


# ---- site -----------------------------------------------------------------------------------------
# Where the devices of a pool are, as far as planning has to know it.


@dataclass(frozen=True)
class Missing:
    """What cannot be used somewhere, and why: languages, and Solutions (by name) that declare a package."""

    languages: Mapping[str, str]
    solutions: Mapping[str, str]


@dataclass(frozen=True)
class Site:
    """Devices of other hosts: one of them, whose kind and libraries all have, and what is missing there for Solutions."""

    machine: Machine
    missing: Callable[[Iterable[SolutionFiles]], Missing]

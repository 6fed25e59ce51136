"""Machines: the choice of devices, of this host or of a cluster, software versions, check of label and health, timing lock."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import platform
import queue
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from tilegym_db.catalog import SolutionFiles
from tilegym_db.driver import driver_files, driver_gpu_names, driver_version
from tilegym_db.errors import HardwareError, UsageError, missing_package
from tilegym_db.records.hardware import CPU, gpu_slug, parse_gpu, same_gpu
from tilegym_db.sandbox.worker import prepare_workers

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class MeasuringDevice:
    """A device with its own supervisor process.

    ``label`` is its name in progress and summaries, ``index`` its number on this host, ``gpu`` its slug. ``environment``
    makes it the only device that its processes see.
    """

    label: str
    index: int = 0
    gpu: str = CPU
    gpu_name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuChoice:
    """The GPUs that a user requests: all, a number (``count``), or exactly these (``indices``)."""

    text: str
    """The request as the user wrote it, for messages: ``--gpus 0,2`` or ``devices=[0, 2]``."""
    count: int | None = None
    indices: tuple[int, ...] | None = None


def parse_gpus(text: str) -> GpuChoice:
    """Parse ``all``, a number of GPUs (``2``), or their indices (``0,2``; ``2,`` for one of them); refuse others."""
    words = [word.strip() for word in text.strip().lower().rstrip(",").split(",")]
    option = f"--gpus {text}"
    if words == ["all"]:
        return GpuChoice(option)
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"{option}: neither 'all', nor a number of GPUs (2), nor their indices (0,2).", code="gpus_invalid"
        )
    numbers = tuple(map(int, words))
    if "," not in text:
        if numbers[0] == 0:
            raise UsageError(
                "--gpus 0 asks for no GPU at all. GPU 0 alone is '--gpus 0,'; a CPU needs no --gpus.", code="gpus_zero"
            )
        return GpuChoice(option, count=numbers[0])
    return _of_indices(option, numbers)


def _of_indices(text: str, indices: Sequence[int]) -> GpuChoice:
    twice = sorted(number for number, times in Counter(indices).items() if times > 1)
    if twice:
        raise UsageError(f"{text} names GPU {twice[0]} twice.", code="gpus_repeated")
    return GpuChoice(text, indices=tuple(indices))


# ---- Devices of a run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Devices:
    """Devices to measure on. All are of one kind, as a plan is.

    ``gpu`` is the kind: ``auto``, ``cpu``, or a GPU slug or family. ``gpus`` are several GPUs of this host, with one process per
    GPU; None is one device, in this process. ``executor`` names a Ray cluster (``ray``, ``ray:HOST:PORT``), of whose devices
    ``gpus`` limits the number; None is this host.
    """

    gpu: str = "auto"
    gpus: GpuChoice | tuple[MeasuringDevice, ...] | None = None
    executor: str | None = None


DevicesLike = str | int | Sequence[int] | Sequence[MeasuringDevice] | Devices
"""What :func:`parse_devices` takes."""

_KNOWN = (
    "'auto', 'cpu', 'all', the name of a GPU such as 'h200', an index (0), indices ([0, 2]), or 'ray' for a cluster"
)


def parse_devices(devices: DevicesLike) -> Devices:
    """Return the devices that an argument ``devices`` means. Pure: nothing is asked of this machine.

    Args:
        devices: ``auto`` (the GPU of this machine if it has one, else its CPU), ``cpu``, a GPU slug or family such as ``h200``,
            ``all`` GPUs of this host, the index of one or a list of indices, ``ray`` or ``ray:HOST:PORT`` for the devices of
            a Ray cluster, or a :class:`Devices`.
    """
    if isinstance(devices, Devices):
        return devices
    if isinstance(devices, str):
        return _named_devices(devices.strip().lower(), devices)
    listed = [devices] if isinstance(devices, int) else list(devices) if isinstance(devices, Sequence) else []
    given = tuple(one for one in listed if isinstance(one, MeasuringDevice))
    if given and len(given) == len(listed):
        return Devices(given[0].gpu, given)
    indices = [one for one in listed if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    if not indices or len(indices) != len(listed):
        raise UsageError(f"devices={devices!r}: not {_KNOWN}.", code="devices_invalid")
    return Devices(gpus=_of_indices(f"devices={devices!r}", indices))


def _named_devices(name: str, text: str) -> Devices:
    if name == "all":
        return Devices(gpus=GpuChoice("devices='all'"))
    if name == "ray" or name.startswith("ray:"):
        return Devices(executor=text.strip())
    if not name or name[0].isdigit():
        raise UsageError(
            f"devices={text!r}: not {_KNOWN}. An index is a number and not a text.", code="devices_invalid"
        )
    return Devices(name if name == "auto" else parse_gpu(name))


def choose_gpus(choice: GpuChoice, found: Sequence[MeasuringDevice], gpu: str = "auto") -> list[MeasuringDevice]:
    """Return the requested GPUs among the ``found`` ones; ``gpu`` is the value of ``--gpu``.

    All are of one kind, as a plan is.
    """
    here = ", ".join(f"{device.index}: {device.gpu_name}" for device in found)
    meant = [
        device for device in found if gpu == "auto" or same_gpu(parse_gpu(gpu, [one.gpu for one in found]), device.gpu)
    ]
    if gpu == CPU or not found:
        why = "--gpu cpu asks for none" if gpu == CPU else "this machine has no usable GPU"
        raise HardwareError(
            f"{choice.text}: {why}. A CPU is measured by one process: several would disturb each other's times. "
            "Leave it out.",
            code="gpus_without_gpu",
        )
    if choice.indices is not None:
        missing = sorted(set(choice.indices) - {device.index for device in found})
        if missing:
            raise HardwareError(
                f"{choice.text}: there is no GPU {missing[0]} here. This machine has {here}.",
                code="gpu_index_unknown",
            )
        meant = [device for device in meant if device.index in choice.indices]
    wanted = choice.count or len(choice.indices or meant) or 1
    if wanted > len(meant):
        of_kind = "" if gpu == "auto" else f" of kind {gpu}"
        raise HardwareError(
            f"{choice.text}: this machine has {len(meant)}{of_kind}, not {wanted}. It has {here}. Try: --gpus all",
            code="gpus_too_few",
        )
    chosen = meant[:wanted]
    kinds = sorted({device.gpu for device in chosen})
    if len(kinds) > 1:
        raise HardwareError(
            f"{choice.text}: GPUs of several kinds ({here}), and times of two kinds are never compared. "
            f"Name one with --gpu: {' or '.join(kinds)}.",
            code="gpu_kinds_mixed",
        )
    return chosen


def find_gpus() -> list[MeasuringDevice]:
    """Return all GPUs that PyTorch sees, each with the variable that makes a process see it alone."""
    if not driver_files():
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        given = named[index] if index < len(named) and named[index].startswith(("GPU-", "MIG-")) else ""
        environment = {VISIBLE: given or f"GPU-{properties.uuid}"}
        found.append(MeasuringDevice(f"GPU {index}", index, gpu_slug(properties.name), properties.name, environment))
    return found


def cpu_slots(count: int) -> list[MeasuringDevice]:
    """Return ``count`` devices that are all this CPU, each with its own supervisor.

    They time in turns but verify in parallel. Tests use them for everything but times.
    """
    return [MeasuringDevice(f"slot {index}", index) for index in range(count)]


def devices_of(devices: Devices) -> list[MeasuringDevice]:
    """Return the devices of this host that have a process each; an empty list if this process measures one itself."""
    if devices.gpus is None:
        return []
    if isinstance(devices.gpus, GpuChoice):
        return choose_gpus(devices.gpus, [] if devices.gpu == CPU else find_gpus(), devices.gpu)
    return list(devices.gpus)


def share_processors(processors: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return one block of neighbouring processors per supervisor, so that supervisors do not disturb each other's timing.

    If there are fewer processors than supervisors, each gets one processor, in turn. All thread pools of a supervisor and
    its workers are as large as its block: PyTorch's maths, verification, fuzzing.
    """
    if len(processors) < count:
        return [(processors[number % len(processors)],) for number in range(count)]
    ends = [round(len(processors) * number / count) for number in range(count + 1)]
    return [tuple(processors[start:end]) for start, end in itertools.pairwise(ends)]


# ---- clusters ------------------------------------------------------------------------------------

LOCAL, RAY = "local", "ray"
AUTO = "auto"
CLIENT = "ray://"
REASON_CHARACTERS = 400
ADDRESS_VARIABLE = "RAY_ADDRESS"
REACH_S = 3.0
"""Seconds to wait for a host to accept a connection."""
CONNECT_S = 12.0
"""Seconds to wait for Ray. Ray connects within two seconds; if another program listens at the port, it would try for a
minute.
"""
CLIENT_CONNECT_S = 30.0
"""The same for Ray's client, since the cluster first starts a process."""


def names_cluster(executor: str) -> bool:
    """Return True if ``--executor`` names devices outside this host."""
    return executor != LOCAL


def parse_executor(text: str) -> str:
    """Return the address of the cluster that ``--executor`` names.

    ``ray`` is the cluster in ``RAY_ADDRESS``, else the one on this machine. ``ray:HOST:PORT`` names one, and
    ``ray://HOST:PORT`` does so through Ray's client.
    """
    if text == RAY:
        return os.environ.get(ADDRESS_VARIABLE) or AUTO
    address = text if text.startswith(CLIENT) else text.removeprefix(f"{RAY}:")
    if not text.startswith(f"{RAY}:") or _host_and_port(address) is None:
        raise UsageError(
            f"--executor {text}: neither 'local', nor 'ray' (the cluster that RAY_ADDRESS names, or that runs here), nor an "
            "address of one: ray:HOST:6379, or ray://HOST:10001 for Ray's client.",
            code="executor_invalid",
        )
    return address


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() and int(port) < 1 << 16 else None


def max_devices(gpus: GpuChoice | None) -> int | None:
    """Return the maximum number of devices of a cluster that are requested, None for all. Only a host has GPUs by index."""
    if gpus is None:
        return None
    if gpus.indices is not None:
        raise UsageError(
            f"{gpus.text}: the GPUs of a cluster have no indices. Name a number of them, or 'all'.",
            code="gpu_indices_refused",
        )
    return gpus.count


def require_ray() -> None:
    """Raise :class:`MissingPackageError` if Ray is not installed."""
    found = importlib.util.find_spec(RAY)
    if found is None or found.origin is None:  # a folder of that name is not a package
        error = missing_package(RAY)
        assert error is not None
        raise error


@contextlib.contextmanager
def connected(address: str, patience_s: float | None = None) -> Iterator[None]:
    """Connect this process to the cluster as a driver while the block runs; keep an existing connection."""
    require_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    place = _host_and_port(address)
    if place is not None:
        _require_listener(address, place)
    with _kept_off_stdout():
        _connect(address, patience_s or (CLIENT_CONNECT_S if address.startswith(CLIENT) else CONNECT_S))
        try:
            yield
        finally:
            ray.shutdown()


def _require_listener(address: str, place: tuple[str, int]) -> None:
    try:
        socket.create_connection(place, timeout=REACH_S).close()
    except OSError as error:
        raise HardwareError(_no_answer(address, error.strerror or str(error)), code="cluster_silent") from None


def _where(address: str) -> str:
    return "on this machine" if address == AUTO else f"at {address}"


def _no_answer(address: str, reason: str) -> str:
    return (
        f"--executor ray: no Ray cluster answers {_where(address)}: {reason}. Start one with 'ray start --head', or name one: "
        "--executor ray:HOST:6379."
    )


def _connect(address: str, patience_s: float) -> None:
    """Connect in a thread with a timeout.

    Ray itself waits for a minute, and then ends the process, if another program answers.
    """
    import ray
    from ray.exceptions import RayError

    logging.getLogger("ray").setLevel(logging.ERROR)
    outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            ray.init(address, log_to_driver=False, configure_logging=False)
            outcome.put(None)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            outcome.put(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        error = outcome.get(timeout=patience_s)
    except queue.Empty:
        raise HardwareError(
            _no_answer(address, f"nothing within {patience_s:.0f} s that Ray understands"), code="cluster_silent"
        ) from None
    if error is None:
        return
    reason = " ".join(str(error).split())[:REASON_CHARACTERS].rstrip(".")
    if isinstance(error, OSError):
        raise HardwareError(_no_answer(address, reason), code="cluster_silent")
    raise HardwareError(
        f"--executor ray: the Ray cluster {_where(address)} cannot be used from here: {reason}.",
        code="cluster_unusable",
    )


@contextlib.contextmanager
def _kept_off_stdout() -> Iterator[None]:
    """Suppress Ray's messages on standard output while the block runs: our results go there.

    When a node ends, Ray prints pages of its state there. It has no switch for that, so this replaces the printing
    function, if it still exists. The pool reports losses itself.
    """
    from ray._private import worker

    printing = getattr(worker, "print_to_stdstream", None)
    if printing is None:
        yield
        return
    worker.print_to_stdstream = lambda *lines, **options: None
    try:
        yield
    finally:
        worker.print_to_stdstream = printing


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
        find: returns the GPU of an index, or None; asks PyTorch by default.
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


def devices_of_options(gpu: str, gpus: str | None, executor: str | None = None) -> Devices:
    """Return the devices that the options ``--gpu``, ``--gpus`` and ``--executor`` name, after :func:`refuse_absent`."""
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
    if asked in (CPU, "auto"):
        return
    wanted = parse_gpu(asked, map(gpu_slug, driver_gpu_names()))
    if wanted == CPU:  # in capital letters
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
    """Run a kernel with a known result on the GPU, after a worker was lost; raise if it fails, as later times would be wrong."""
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

    @classmethod
    def here(cls, needed: Mapping[str, tuple[str, ...]]) -> Missing:
        """Return what is missing here, with the fix; ``needed`` are the packages that Solutions declare, by name.

        Solutions in such a language are not run, since a failed trace would blame them.
        """
        from tilegym_db.backends.toolchains import TOOLCHAINS, lacking_dependency, toolchain_status

        statuses = {language: toolchain_status(language) for language in TOOLCHAINS}
        languages = {
            language: f"{language} cannot be used here: {status.detail}. Fix: {status.fix}"
            for language, status in statuses.items()
            if not status.available
        }
        lacking = {name: lacking_dependency(dependencies) for name, dependencies in needed.items()}
        return cls(languages, {name: f"needs {text}" for name, text in lacking.items() if text is not None})

    def of(self, solution: SolutionFiles, *, its_language: bool = True) -> str | None:
        """Return the reason why a Solution cannot run here, or None."""
        language = self.languages.get(solution.record.spec.language) if its_language else None
        return language or self.solutions.get(solution.name)


@dataclass(frozen=True)
class Site:
    """Devices of other hosts, all of one kind and with equal libraries: one of them, and a check for missing requirements."""

    machine: Machine
    missing: Callable[[Iterable[SolutionFiles]], Missing]

"""Choice of the GPUs of this host that measure. Pure, except for :func:`find_gpus`, which asks PyTorch."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilegym_db.driver import driver_files
from tilegym_db.errors import HardwareError, UsageError
from tilegym_db.records.hardware import CPU, gpu_slug, parse_gpu, same_gpu

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
    """Parse ``all``, a number of GPUs (``2``), or their indices (``0,2``; ``2,`` for one of them).

    Raises:
        UsageError: the text is malformed, or names a GPU twice.
    """
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

    Raises:
        UsageError: the argument has none of these forms, or names a GPU twice.
        HardwareError: the name of the GPU is unknown.
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

    Raises:
        HardwareError: there are too few GPUs, a requested one is missing, or they are of several kinds.
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
    """Return the devices of this host that have a process each; an empty list if this process measures one itself.

    Raises:
        HardwareError: as :func:`choose_gpus`.
    """
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

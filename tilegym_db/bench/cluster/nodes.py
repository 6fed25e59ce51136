"""Which nodes of a cluster take part, with which devices, and why others do not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilegym_db.bench.gpus.devices import MeasuringDevice
from tilegym_db.bench.machine import Machine
from tilegym_db.errors import HardwareError
from tilegym_db.records.hardware import CPU, gpu_slug, parse_gpu, same_gpu

__all__ = ["Node", "Slot", "chosen_kind", "differs", "label_of", "nodes_of", "refusal", "slots_of"]

AUTO = "auto"


@dataclass(frozen=True)
class Node:
    """A node that is alive, and how many GPUs and CPUs Ray has there to give."""

    node_id: str
    address: str
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Slot:
    """One device of a node, the ``number``-th of so many ``of`` it; Ray is asked for so many ``gpus`` and ``processors``."""

    device: MeasuringDevice
    node: Node
    number: int
    of: int
    gpus: int
    processors: int


def nodes_of(rows: Sequence[Mapping[str, Any]]) -> list[Node]:
    """From what ``ray.nodes()`` says."""
    found = []
    for row in rows:
        if row["Alive"]:
            resources = row["Resources"]
            gpus, cpus = (int(resources.get(name, 0)) for name in ("GPU", "CPU"))
            found.append(Node(row["NodeID"], row["NodeManagerAddress"], gpus, cpus))
    return found


def refusal(facts: Mapping[str, Any], own: Mapping[str, Any], gpu: str) -> str | None:
    """Why a node cannot take part in a run for a GPU (``auto``: any), or None. ``own`` describes this process's package."""
    if "missing" in facts:
        return (
            f"tilegym-db cannot be imported by {facts['executable']} there ({facts['missing']}). Install it on every node: "
            f"pip install 'tilegym-db[all,ray]=={own['version']}'"
        )
    if facts["version"] != own["version"]:
        return f"it has tilegym-db {facts['version']}, and this is {own['version']}. Install the same on every node"
    if facts["digest"] != own["digest"]:
        return f"its tilegym-db {facts['version']} has other source files than this one. Install the same on every node"
    names = facts["gpu_names"]
    if gpu in (AUTO, CPU) or not names or any(same_gpu(parse_gpu(gpu), gpu_slug(name)) for name in names):
        return None
    return f"its GPUs are {', '.join(dict.fromkeys(names))}, and this run is for {gpu}"


def chosen_kind(gpu: str, found: Collection[str]) -> str:
    """The GPU that a run is for: what was asked for, or the only kind among the device names that were ``found``.

    Raises:
        HardwareError: there are several.
    """
    kinds = sorted({gpu_slug(name) for name in found})
    if gpu != AUTO or not kinds:
        return gpu
    if len(kinds) > 1:
        raise HardwareError(
            f"--executor ray: the cluster has GPUs of several kinds ({', '.join(kinds)}), and times of two kinds are never "
            f"compared. Name one with --gpu: {' or '.join(kinds)}.",
            code="gpu_kinds_mixed",
        )
    return kinds[0]


def slots_of(node: Node, label: str, gpu: str) -> list[Slot]:
    """Every device of a node for a run on a GPU, or on CPUs.

    All processors of a node are one device, of which Ray is asked for the whole: two at once would disturb each other's times.
    """
    if gpu == CPU:
        return [Slot(MeasuringDevice(f"{label} CPU", gpu=CPU), node, 0, 1, 0, node.cpus)] if node.cpus else []
    own = 1 if node.cpus >= node.gpus else 0
    return [
        Slot(MeasuringDevice(f"{label} GPU {number}", number, gpu), node, number, node.gpus, 1, own)
        for number in range(node.gpus)
    ]


def label_of(host: str, node_id: str, taken: Collection[str]) -> str:
    """A name of a node for people: its host's, with the start of its id where another node of this run is on that host."""
    return f"{host} ({node_id[:6]})" if host in taken else host


def differs(machine: Machine, planned: Machine) -> str | None:
    """Why a device cannot take part in a run that was ``planned`` for another, or None: another kind, or other libraries.

    What can run, and which Solutions are left out, was decided for all of them at once.
    """
    if machine.gpu != planned.gpu:
        return f"it is {machine.gpu_name} ({machine.gpu}), and this run is for {planned.gpu}"
    for name in sorted({*machine.libs, *planned.libs}):
        here, there = machine.libs.get(name, "none"), planned.libs.get(name, "none")
        if here != there:
            return f"it has {name} {here}, and {planned.host}, for which this run was planned, has {there}"
    return None

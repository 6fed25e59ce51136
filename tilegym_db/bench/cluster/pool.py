"""The devices of a Ray cluster as a pool: Ray places an actor on each, and nodes that join later are taken in."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tilegym_db.bench.cluster import probe
from tilegym_db.bench.cluster.actor import DeviceActor
from tilegym_db.bench.cluster.address import connected, most_devices, parse_executor
from tilegym_db.bench.cluster.nodes import Node, Slot, chosen_kind, differs, label_of, nodes_of, refusal, slots_of
from tilegym_db.bench.cluster.parcels import pack
from tilegym_db.bench.cluster.remote import RemoteProcess
from tilegym_db.bench.gpus.devices import MeasuringDevice
from tilegym_db.bench.gpus.messages import Order
from tilegym_db.bench.gpus.pool import DevicePool
from tilegym_db.bench.gpus.site import Missing, Site
from tilegym_db.bench.machine import Machine
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import HardwareError
from tilegym_db.records.hardware import CPU, parse_gpu

__all__ = ["cluster_pool"]

Item = TypeVar("Item")

LOOK_EVERY_S = 2.0
PROBE_S = 60.0
LEAST_PIECES = 4
"""Of any plan, so that a node that joins a cluster of one finds something left to do."""
POLL_S = 0.1


@contextlib.contextmanager
def cluster_pool(
    executor: str, gpus: str | None, gpu: str, waiting: Callable[[str], None] = lambda what: None
) -> Iterator[DevicePool]:
    """The devices of one kind in the cluster that ``executor`` names, the first of them ready; at most as ``gpus`` says.

    Raises:
        HardwareError: no cluster answers, it has no such device, or none of them works.
        UsageError, MissingPackageError: as the functions of :mod:`~tilegym_db.bench.cluster.address`.
    """
    address, most = parse_executor(executor), most_devices(gpus)
    if gpu != "auto":
        parse_gpu(gpu)
    with connected(address):
        cluster = _Cluster(gpu, most)
        devices = cluster.first_devices()
        pool = DevicePool(devices, cluster.start, cluster.arrivals, least_pieces=LEAST_PIECES)
        with pool, cluster.looking():
            pool.site = Site(cluster.first_machine(pool, waiting), cluster.missing)
            yield pool


class _Cluster:
    """What this driver knows of the cluster: nodes seen, devices taken, parcels that Ray holds."""

    def __init__(self, gpu: str, most: int | None) -> None:
        self.gpu = gpu
        self.machine: Machine | None = None
        self._most = most
        self._own = probe.package_facts()
        self._seen: set[str] = set()
        self._labels: set[str] = set()
        self._slots: dict[str, Slot] = {}
        self._references: dict[str, Any] = {}
        self._ready: RemoteProcess | None = None
        self._found: queue.SimpleQueue[MeasuringDevice] = queue.SimpleQueue()
        self._remarks: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()

    # -- nodes --------------------------------------------------------------------------------------------------------

    def first_devices(self) -> list[MeasuringDevice]:
        """Those that are there.

        Raises:
            HardwareError: there are none of the kind, each node is refused, or there are several kinds.
        """
        nodes = self._unseen()
        facts = self._described(nodes)
        self.gpu = chosen_kind(self.gpu, {name for said in facts.values() for name in said["gpu_names"]})
        devices = self._taken_in(nodes, facts)
        if devices:
            return devices
        if not nodes:
            what = "CPU" if self.gpu == CPU else "GPU"
            hint = "" if self.gpu == CPU else " '--gpu cpu' measures on its processors."
            raise HardwareError(
                f"--executor ray: no node of the cluster has a {what} that Ray knows of.{hint}",
                code="cluster_device_absent",
            )
        raise HardwareError(
            f"--executor ray: no node of the cluster can be used. {' '.join(_drained(self._remarks))}",
            code="cluster_nodes_unusable",
        )

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look for new nodes meanwhile, in a thread: a node that does not answer holds nobody up."""
        ended = threading.Event()

        def look() -> None:
            from ray.exceptions import RayError

            while not ended.wait(LOOK_EVERY_S):
                with contextlib.suppress(RayError, OSError):  # the cluster does not answer now: the next look may
                    nodes = self._unseen()
                    for device in self._taken_in(nodes, self._described(nodes)):
                        self._found.put(device)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(LOOK_EVERY_S)

    def arrivals(self) -> tuple[list[MeasuringDevice], list[str]]:
        """Devices, and remarks on nodes that cannot be used, since it was last asked."""
        return _drained(self._found), _drained(self._remarks)

    def _unseen(self) -> list[Node]:
        """Nodes that have come since the last look, of those that have what is measured on."""
        import ray

        nodes = [node for node in nodes_of(ray.nodes()) if node.node_id not in self._seen]
        self._seen |= {node.node_id for node in nodes}
        return [node for node in nodes if (node.cpus if self.gpu == CPU else node.gpus)]

    def _described(self, nodes: list[Node]) -> dict[str, dict[str, Any]]:
        """What each says of itself, by its id; one that cannot be asked is remarked on."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        ray.cloudpickle.register_pickle_by_value(probe)
        ask = ray.remote(probe.describe_node)
        asked = {node.node_id: ask.options(**_placed(node)).remote(self._own) for node in nodes}
        found = {}
        for node in nodes:
            try:
                found[node.node_id] = ray.get(asked[node.node_id], timeout=PROBE_S)
            except GetTimeoutError:
                self._remarks.put(f"node {node.address} is not used: it started no process within {PROBE_S:.0f} s.")
            except RayError as error:
                self._remarks.put(f"node {node.address} is not used: {str(error).strip().splitlines()[-1]}.")
        return found

    def _taken_in(self, nodes: list[Node], facts: dict[str, dict[str, Any]]) -> list[MeasuringDevice]:
        devices = []
        for node in nodes:
            said = facts.get(node.node_id)
            if said is None:
                continue
            reason = refusal(said, self._own, self.gpu)
            if reason is not None:
                self._remarks.put(f"node {said['host']} ({node.node_id[:6]}) is not used: {reason}.")
                continue
            label = label_of(said["host"], node.node_id, self._labels)
            self._labels.add(label)
            for slot in slots_of(node, label, self.gpu):
                if self._most is None or len(self._slots) < self._most:
                    self._slots[slot.device.label] = slot
                    devices.append(slot.device)
        return devices

    # -- devices ------------------------------------------------------------------------------------------------------

    def start(self, device: MeasuringDevice) -> RemoteProcess:
        """An actor for it, which Ray starts when the device is free."""
        import ray

        slot = self._slots[device.label]
        options = _placed(slot.node) | {"num_cpus": slot.processors, "num_gpus": slot.gpus, "max_concurrency": 4}
        actor = ray.remote(DeviceActor).options(**options).remote(device.gpu, slot.number, slot.of)
        return RemoteProcess(slot, actor, self._deliver, self._refuse, _is_alive)

    def _deliver(self, actor: Any, order: Order) -> None:
        """Each parcel is given to Ray once, which keeps it for whoever asks for it."""
        import ray

        body, parcels = pack(order)
        for key in parcels.keys() - self._references.keys():
            self._references[key] = ray.put(parcels[key])
        actor.send.remote(body, {key: self._references[key] for key in parcels})

    def _refuse(self, machine: Machine) -> str | None:
        if self.gpu != CPU and not machine.is_gpu:
            return "Ray gave it a GPU, and PyTorch finds none there that it can use"
        with self._lock:
            if self.machine is None:
                self.machine = machine
            return differs(machine, self.machine)

    def first_machine(self, pool: DevicePool, waiting: Callable[[str], None]) -> Machine:
        """That of the first device that is ready; the plan is made for it.

        Raises:
            HardwareError: not one of them works.
        """
        waiting(f"waiting for the first of {len(pool.devices)} devices of the cluster")
        while True:
            processes = [process for process in pool.processes.values() if isinstance(process, RemoteProcess)]
            for process in processes:
                if process.machine is not None:
                    self._ready = process
                    return process.machine
            reasons = [f"{process.device.label}: {process.failure}" for process in processes if process.failure]
            if len(reasons) == len(processes):
                raise HardwareError(
                    f"--executor ray: no device of the cluster works. {' '.join(reasons)}", code="devices_lost"
                )
            time.sleep(POLL_S)

    def missing(self, solutions: Iterable[SolutionFiles]) -> Missing:
        """What Solutions need and the nodes lack; all have the libraries of the first device.

        Raises:
            HardwareError: its node was lost.
        """
        import ray
        from ray.exceptions import RayError

        assert self._ready is not None
        needed = {files.name: files.record.spec.dependencies for files in solutions}
        try:
            found: Missing = ray.get(self._ready.actor.missing.remote(needed))
        except RayError as error:
            raise HardwareError(
                f"{self._ready.device.label} was lost before anything was planned: {error}. Run the command again.",
                code="device_lost",
            ) from None
        return found


def _placed(node: Node) -> dict[str, Any]:
    """Options of what runs on this node or nowhere."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False), "num_cpus": 0}


def _is_alive(node_id: str) -> bool:
    import ray

    return any(node.node_id == node_id for node in nodes_of(ray.nodes()))


def _drained(items: queue.SimpleQueue[Item]) -> list[Item]:
    found: list[Item] = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(items.get_nowait())
    return found

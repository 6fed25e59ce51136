"""Places where a run measures: this process, several GPUs of this host, or the devices of a Ray cluster.

For a cluster, an actor on each node starts the same supervisor as a pool on this host does. The driver checks the nodes,
their devices and each trace.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from typing import Any, TypeVar

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import HardwareError, RecordError, TilegymDBError
from tilegym_db.measurement.devices import ray_probe
from tilegym_db.measurement.devices.messages import Failed, Order, Ready, TraceMessage, WorkItem
from tilegym_db.measurement.devices.pool import DevicePool, DeviceProcess, SupervisorLost
from tilegym_db.measurement.devices.ray_parcels import ParcelStore, pack
from tilegym_db.measurement.machine import (
    GpuChoice,
    Machine,
    MeasuringDevice,
    Missing,
    Site,
    connected,
    max_devices,
    parse_executor,
    share_processors,
)
from tilegym_db.measurement.plan import DefinitionPlan
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Trace, Workload
from tilegym_db.records.hardware import CPU, gpu_slug, parse_gpu, same_gpu
from tilegym_db.records.trace import new_trace_id
from tilegym_db.records.verdicts import UNTIMED_TIERS
from tilegym_db.verification.worker_handle import MIN_SANDBOX_LEVEL


def host_pool(devices: Sequence[MeasuringDevice]) -> DevicePool:
    """Return a pool of devices of this host, all of one kind."""
    blocks = share_processors(sorted(os.sched_getaffinity(0)), len(devices))
    processors = dict(zip((device.label for device in devices), blocks, strict=True))

    def start(device: MeasuringDevice) -> DeviceProcess:
        return DeviceProcess(device, device.gpu, processors[device.label], len(devices))

    return DevicePool(devices, start)


# ---- pool -----------------------------------------------------------------------------------------
# Pool of the devices of a Ray cluster. Ray places an actor on each device; nodes that join later are added.

Item = TypeVar("Item")

LOOK_EVERY_S = 2.0
PROBE_S = 60.0
MIN_PIECES = 4
"""Minimum number of work items per plan, so that a node that joins later finds work."""
POLL_S = 0.1


@contextlib.contextmanager
def cluster_pool(
    executor: str, gpus: GpuChoice | None, gpu: str, waiting: Callable[[str], None] = lambda what: None
) -> Iterator[DevicePool]:
    """Yield a pool of the devices of one kind in a cluster, after the first one is ready; ``gpus`` limits their number."""
    address, most = parse_executor(executor), max_devices(gpus)
    if gpu != "auto":
        parse_gpu(gpu)
    with connected(address):
        cluster = _Cluster(gpu, most)
        devices = cluster.first_devices()
        pool = DevicePool(devices, cluster.start, cluster.arrivals, min_pieces=MIN_PIECES)
        with pool, cluster.looking():
            pool.site = Site(cluster.first_machine(pool, waiting), cluster.missing)
            yield pool


class _Cluster:
    """State of a cluster in this driver: known nodes, devices in use, parcels that Ray holds."""

    def __init__(self, gpu: str, most: int | None) -> None:
        self.gpu = gpu
        self.machine: Machine | None = None
        self._most = most
        self._own = ray_probe.package_facts()
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
        """Return the devices that are there now."""
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
        """Look for new nodes in a thread while the block runs. A node that does not answer blocks no other work."""
        ended = threading.Event()

        def look() -> None:
            from ray.exceptions import RayError

            while not ended.wait(LOOK_EVERY_S):
                with contextlib.suppress(RayError, OSError):  # no answer now: the next look tries again
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
        """Return new devices since the last call, and remarks on nodes that cannot be used."""
        return _drained(self._found), _drained(self._remarks)

    def _unseen(self) -> list[Node]:
        """Return nodes that joined since the last look and have devices of the kind."""
        import ray

        nodes = [node for node in nodes_of(ray.nodes()) if node.node_id not in self._seen]
        self._seen |= {node.node_id for node in nodes}
        return [node for node in nodes if (node.cpus if self.gpu == CPU else node.gpus)]

    def _described(self, nodes: list[Node]) -> dict[str, dict[str, Any]]:
        """Return the facts of each node by its id; add a remark for a node that does not answer."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        ray.cloudpickle.register_pickle_by_value(ray_probe)
        ask = ray.remote(ray_probe.describe_node)
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
        """Create an actor for a device; Ray starts it when the device is free."""
        import ray

        slot = self._slots[device.label]
        options = _placed(slot.node) | {"num_cpus": slot.processors, "num_gpus": slot.gpus, "max_concurrency": 4}
        actor = ray.remote(DeviceActor).options(**options).remote(device.gpu, slot.number, slot.of)
        return RemoteProcess(slot, actor, self)

    def deliver(self, actor: Any, order: Order) -> None:
        """Send an order to an actor. Each parcel is stored in Ray once, for all actors."""
        import ray

        body, parcels = pack(order)
        for key in parcels.keys() - self._references.keys():
            self._references[key] = ray.put(parcels[key])
        actor.send.remote(body, {key: self._references[key] for key in parcels})

    def refuse(self, machine: Machine) -> str | None:
        """Return the reason why the machine of a device cannot take part, or None."""
        if self.gpu != CPU and not machine.is_gpu:
            return "Ray assigned a GPU, but PyTorch finds no usable GPU there"
        with self._lock:
            if self.machine is None:
                self.machine = machine
            return differs(machine, self.machine)

    def first_machine(self, pool: DevicePool, waiting: Callable[[str], None]) -> Machine:
        """Return the machine of the first ready device; the plan is made for it."""
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
        """Return the requirements of Solutions that the nodes lack; all nodes have the libraries of the first device."""
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
    """Return the options that place a task on this node only."""
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


# ---- actor ----------------------------------------------------------------------------------------
# Actor of one device: a process that Ray starts on the node.
#
# It does the same as the planning process for a device of this host: it starts a supervisor, sends orders and receives
# messages. In addition it unpacks parcels: records and sources arrive by digest in a catalog of the actor.

LISTEN_S = 1.0
THREADS_OF_RAY = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class TraceText:
    """A trace as JSON, which the receiver validates."""

    text: str


class DeviceActor:
    """Actor for one device. One driver calls its methods, concurrently from several threads of this process."""

    def __init__(self, gpu: str, number: int, of: int) -> None:
        """Start the supervisor for a GPU slug (``auto``: any GPU from Ray), as number ``number`` of ``of`` on this node."""
        # Ray sets it to the CPUs of the actor, but thread pools of a supervisor must be as large as its block of processors.
        os.environ.pop(THREADS_OF_RAY, None)
        self._stack = ExitStack()
        self._parcels = ParcelStore(self._stack.enter_context(scratch_folder()))
        block = share_processors(sorted(os.sched_getaffinity(0)), of)[number]
        self._process = DeviceProcess(MeasuringDevice(f"device {number}", number, gpu), gpu, block, of)
        self._failures: list[Any] = []

    def missing(self, dependencies: Mapping[str, tuple[str, ...]]) -> Missing:
        """Return the requirements that this node lacks; ``dependencies`` are those that Solutions declare, by name."""
        return Missing.here(dependencies)

    def send(self, body: bytes, references: Mapping[str, Any]) -> None:
        """Send the supervisor an order, after fetching the parcels that this actor lacks. Errors become Failed messages."""
        import ray

        try:
            lacking = self._parcels.lacks(references)
            for key, parcel in zip(lacking, ray.get([references[key] for key in lacking]), strict=True):
                self._parcels.add(key, parcel)
            self._process.send(self._parcels.unpack(body))
        except TilegymDBError as error:
            self._failures.append(Failed(f"the node could not accept the order: {error}", is_device=True))
        except SupervisorLost as lost:
            self._failures.append(Failed(str(lost), is_device=False))

    def receive(self) -> list[Any]:
        """Return the supervisor's messages since the last call; empty if none arrives within a second."""
        received: list[Any] = []
        try:
            if not self._failures and wait([self._process.connection], LISTEN_S):
                while not received or self._process.connection.poll():
                    message = self._process.receive()
                    received.append(
                        TraceText(message.trace.to_json()) if isinstance(message, TraceMessage) else message
                    )
        except (SupervisorLost, OSError, ValueError) as lost:  # the last two: its socket was closed
            received.append(Failed(str(lost), is_device=False))
        received += self._failures
        self._failures.clear()
        return received

    def close(self, timeout_s: float) -> None:
        """End the supervisor and all processes below it."""
        self._process.end(timeout_s)
        self._stack.close()


# ---- remote ---------------------------------------------------------------------------------------
# Connection of the driver to an actor. For a pool it is a supervisor like those of this host.

REASON_CHARACTERS = 400


class RemoteProcess:
    """A supervisor on a node of the cluster. A thread receives its actor's messages, checks them, and passes them on."""

    def __init__(self, slot: Slot, actor: Any, cluster: _Cluster) -> None:
        """Listen to Ray's handle of the actor of a device."""
        self.device = slot.device
        self.item: WorkItem | None = None
        self.done: set[str] = set()
        self.last_message_at = time.monotonic()
        self.machine: Machine | None = None
        self.failure: str | None = None
        """Reason why it stopped, before the pool receives it."""
        self.actor = actor
        self.connection, self._relayed = Pipe(duplex=False)
        self._node_id = slot.node.node_id
        self._cluster = cluster
        self._order: Order | None = None
        self._closing: Any = None
        threading.Thread(target=self._relay, daemon=True).start()

    @property
    def is_ready(self) -> bool:
        """True after Ray has assigned the device, which other jobs may hold, and the supervisor has started."""
        return self.machine is not None

    def send(self, order: Order) -> None:
        """Send the next order to the supervisor. If the actor is gone, a message reports it."""
        self.item, self.done, self._order = order.item, set(), order
        self.last_message_at = time.monotonic()
        self._cluster.deliver(self.actor, order)

    def receive(self) -> Any:
        """Wait for the next message of the supervisor and return it."""
        message = self.connection.recv()
        self.last_message_at = time.monotonic()
        return message

    def leave(self) -> None:
        """Let the supervisor end, without waiting."""
        if self._closing is None:
            self._closing = self.actor.close.remote(2.0)

    def end(self, timeout_s: float = 2.0) -> str:
        """End the supervisor; after :meth:`leave`, wait up to the timeout first."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # it died, or has no device yet
            if self._closing is not None and self.is_ready:
                ray.get(self._closing, timeout=timeout_s)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.actor)
        self.connection.close()
        return "its actor was ended"

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _relay(self) -> None:
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(OSError):  # the pool has closed its end
            while self.failure is None:
                try:
                    messages = ray.get(self.actor.receive.remote())
                except RayError as error:
                    messages = [Failed(f"Ray lost it: {_first_words(error)}", is_device=not _is_alive(self._node_id))]
                for message in map(self._checked, messages):
                    self._relayed.send(message)
                    if isinstance(message, Failed):
                        self.failure = message.reason
                        return
                if self.connection.closed:
                    return

    def _checked(self, message: Any) -> Any:
        """Return the message, or a failure of the device if the message is not valid."""
        match message:
            case Ready():
                reason = self._cluster.refuse(message.machine)
                if reason is not None:
                    return Failed(reason, is_device=True)
                self.machine = message.machine
            case TraceText(text):
                return self._checked_trace(text)
        return message

    def _checked_trace(self, text: str) -> TraceMessage | Failed:
        assert self._order is not None
        assert self.machine is not None
        try:
            trace = Trace.from_json(text, f"a trace from {self.device.label}")
        except RecordError as error:
            return Failed(str(error), is_device=True)
        reason = trace_problem(trace, self._order, self.machine)
        return TraceMessage(trace) if reason is None else Failed(f"it sent an invalid trace: {reason}", is_device=True)


def _first_words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "namespace:", "pid:", "ip:"))]
    return " ".join(said)[:REASON_CHARACTERS]


# ---- nodes ----------------------------------------------------------------------------------------
# Choice of the nodes and devices of a cluster that take part, with reasons for the others. Pure.

AUTO = "auto"


@dataclass(frozen=True)
class Node:
    """A node that is alive, and the numbers of GPUs and CPUs that Ray has there."""

    node_id: str
    address: str
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Slot:
    """One device of a node, number ``number`` of ``of``. Ray is asked for ``gpus`` GPUs and ``processors`` CPUs."""

    device: MeasuringDevice
    node: Node
    number: int
    of: int
    gpus: int
    processors: int


def nodes_of(rows: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Return the live nodes in the output of ``ray.nodes()``."""
    found = []
    for row in rows:
        if row["Alive"]:
            resources = row["Resources"]
            gpus, cpus = (int(resources.get(name, 0)) for name in ("GPU", "CPU"))
            found.append(Node(row["NodeID"], row["NodeManagerAddress"], gpus, cpus))
    return found


def refusal(facts: Mapping[str, Any], own: Mapping[str, Any], gpu: str) -> str | None:
    """Return the reason why a node cannot take part in a run for a GPU (``auto``: any), or None.

    ``own`` describes the package of this process.
    """
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
    if (
        gpu in (AUTO, CPU)
        or not names
        or any(same_gpu(parse_gpu(gpu, map(gpu_slug, names)), gpu_slug(name)) for name in names)
    ):
        return None
    return f"its GPUs are {', '.join(dict.fromkeys(names))}, and this run is for {gpu}"


def chosen_kind(gpu: str, found: Collection[str]) -> str:
    """Return the GPU of a run: the requested one, or the only kind among the device names ``found``; refuse several."""
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
    """Return every device of a node for a run on a GPU or on CPUs.

    All processors of a node are one device: two measurements at once would disturb each other. So Ray is asked for all of
    them.
    """
    if gpu == CPU:
        return [Slot(MeasuringDevice(f"{label} CPU", gpu=CPU), node, 0, 1, 0, node.cpus)] if node.cpus else []
    own = 1 if node.cpus >= node.gpus else 0
    return [
        Slot(MeasuringDevice(f"{label} GPU {number}", number, gpu), node, number, node.gpus, 1, own)
        for number in range(node.gpus)
    ]


def label_of(host: str, node_id: str, taken: Collection[str]) -> str:
    """Return a readable name of a node: its host name, with the start of its id if another node is on that host."""
    return f"{host} ({node_id[:6]})" if host in taken else host


def differs(machine: Machine, planned: Machine) -> str | None:
    """Return the reason why a device differs in kind or libraries from the ``planned`` one, or None.

    The plan, including the Solutions left out, is the same for all devices.
    """
    if machine.gpu != planned.gpu:
        return f"it is {machine.gpu_name} ({machine.gpu}), and this run is for {planned.gpu}"
    for name in sorted({*machine.libs, *planned.libs}):
        here, there = machine.libs.get(name, "none"), planned.libs.get(name, "none")
        if here != there:
            return f"it has {name} {here}, and {planned.host}, for which this run was planned, has {there}"
    return None


# ---- checks ---------------------------------------------------------------------------------------
# Checks of a trace from another host, before the driver signs it. Pure.

MACHINE_FIELDS = ("gpu", "gpu_name", "sm", "driver", "cuda", "libs", "gpu_uuid", "host")


def trace_problem(trace: Trace, order: Order, machine: Machine) -> str | None:
    """Return the reason why a trace does not belong to an order and its device, or None.

    Plausibility of its figures is checked later, whenever a trace is read (docs/trust.md).
    """
    session = order.session
    if trace.run_id != session.run_id:
        return f"it is of run {trace.run_id}, not {session.run_id}"
    if trace.tier not in (session.policy.tier, *UNTIMED_TIERS):
        return f"it is of the tier {trace.tier}, but {session.policy.tier} was ordered"
    for name in MACHINE_FIELDS:
        stated, known = getattr(trace, name), getattr(machine, name)
        if stated != known:
            return f"its {name} is {stated!r}, but the device of the order has {known!r}"
    if session.confined and trace.status == "PASSED" and trace.sandbox_level < MIN_SANDBOX_LEVEL:
        return f"its worker was confined at level {trace.sandbox_level}, but verification needs {MIN_SANDBOX_LEVEL}"
    planned = _planned(trace, order)
    if planned is None:
        return f"the order has no {trace.solution} on workload {trace.workload_uuid}"
    plan, workload = planned
    if trace.axes != plan.definition.bind_axes(workload.axes):
        return f"its axes are {trace.axes}, which are not those of its workload"
    if session.job == "measure" and not _takes_part(plan, workload, trace):
        return f"the order has no {trace.solution} with config {trace.config} on workload {trace.workload_uuid}"
    key: tuple[Any, ...] = (trace.solution_digest, trace.config, trace.workload_uuid)
    if trace.trace_id != new_trace_id(trace.run_id, trace.tier, trace.attempt, *key):
        return f"its id {trace.trace_id} is not that of its content"
    return None


def _planned(trace: Trace, order: Order) -> tuple[DefinitionPlan, Workload] | None:
    wanted = set(order.item.uuids)
    for plan in order.item.plans:
        if (plan.definition.name, plan.definition.digest) != (trace.definition, trace.definition_digest):
            continue
        solutions = {
            solution.digest for solution in (*plan.timed, *plan.interpreted) if solution.name == trace.solution
        }
        workload = next((one for one in plan.workloads if one.uuid == trace.workload_uuid), None)
        if trace.solution_digest in solutions and workload is not None and workload.uuid in wanted:
            return plan, workload
    return None


def _takes_part(plan: DefinitionPlan, workload: Workload, trace: Trace) -> bool:
    solutions = (*plan.timed, *plan.interpreted)
    return any(
        solution.digest == trace.solution_digest and plan.takes_part(solution, workload, dict(trace.config))
        for solution in solutions
        if solution.name == trace.solution
    )

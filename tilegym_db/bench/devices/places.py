"""Where a run measures: in this process, on several GPUs of this host, or on those of a Ray cluster."""

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

from tilegym_db.bench.devices import ray_probe
from tilegym_db.bench.devices.devices import MeasuringDevice, devices_of, share_processors
from tilegym_db.bench.devices.messages import Failed, Order, Ready, Traced, WorkItem
from tilegym_db.bench.devices.pool import DevicePool, DeviceProcess, SupervisorLost
from tilegym_db.bench.devices.ray_address import connected, most_devices, names_cluster, parse_executor
from tilegym_db.bench.devices.ray_parcels import ParcelStore, pack
from tilegym_db.bench.machine import Machine, Missing, Site
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import HardwareError, RecordError, TilegymDBError, UsageError
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Trace, Workload
from tilegym_db.records.hardware import CPU, gpu_slug, parse_gpu, same_gpu
from tilegym_db.records.trace import UNTIMED_TIERS, new_trace_id
from tilegym_db.verify.worker_handle import MIN_SANDBOX_LEVEL


@contextlib.contextmanager
def open_pool(
    executor: str | None,
    gpus: str | Sequence[MeasuringDevice] | None,
    gpu: str,
    waiting: Callable[[str], None] = lambda what: None,
) -> Iterator[DevicePool | None]:
    """The supervisors of several devices, which load what they need while this process plans; None if it measures itself.

    Args:
        executor: None or ``local`` for this host, or what :func:`~tilegym_db.bench.devices.ray_address.parse_executor` takes.
        gpus: which GPUs, as :func:`~tilegym_db.bench.devices.devices.devices_of` takes it.
        gpu: what ``--gpu`` says.
        waiting: told what is waited for.

    Raises:
        HardwareError, UsageError: no such devices, or no such executor.
        MissingPackageError: the executor needs a package that is not installed.
    """
    if executor is not None and names_cluster(executor):
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


# ---- pool -----------------------------------------------------------------------------------------
# The devices of a Ray cluster as a pool: Ray places an actor on each, and nodes that join later are taken in.

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
        UsageError, MissingPackageError: as the functions of :mod:`~tilegym_db.bench.devices.ray_address`.
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
        """Return those that are there.

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
        """Return an actor for it, which Ray starts when the device is free."""
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


# ---- actor ----------------------------------------------------------------------------------------
# The actor of one device, a process that Ray starts on the node that has it.
#
# It does what the process that plans does for a device of its own host: starts the same supervisor, gives it orders,
# hears what it tells. Between the two are only the parcels: records and sources come by digest into a catalog of this
# actor's own.

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
        """What the supervisor has told since it was last asked; empty if that is nothing within a second."""
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


# ---- remote ---------------------------------------------------------------------------------------
# The driver's end of an actor: to a pool it is a supervisor as those of this host are.

REASON_CHARACTERS = 400


class RemoteProcess:
    """A supervisor on a node of the cluster. A thread asks its actor for messages, checks them, and passes them on."""

    def __init__(
        self,
        slot: Slot,
        actor: Any,
        deliver: Callable[[Any, Order], Any],
        refuse: Callable[[Machine], str | None],
        is_alive: Callable[[str], bool],
    ) -> None:
        """Listen to an actor.

        Args:
            slot: the device that it is for.
            actor: Ray's handle of it.
            deliver: sends it an order.
            refuse: why a device cannot take part, when it says what it is.
            is_alive: whether a node is there, by its id.
        """
        self.device = slot.device
        self.item: WorkItem | None = None
        self.done: set[str] = set()
        self.last_message_at = time.monotonic()
        self.machine: Machine | None = None
        self.failure: str | None = None
        """Why it does nothing any more, before a pool has heard of it."""
        self.actor = actor
        self.connection, self._relayed = Pipe(duplex=False)
        self._node_id = slot.node.node_id
        self._deliver, self._refuse, self._is_alive = deliver, refuse, is_alive
        self._order: Order | None = None
        self._closing: Any = None
        threading.Thread(target=self._relay, daemon=True).start()

    @property
    def is_ready(self) -> bool:
        """Not before Ray has given it its device, which other jobs of the cluster may hold, and the supervisor has started."""
        return self.machine is not None

    def send(self, order: Order) -> None:
        """Give it its next order. Where it is gone, that comes as a message."""
        self.item, self.done, self._order = order.item, set(), order
        self.last_message_at = time.monotonic()
        self._deliver(self.actor, order)

    def receive(self) -> Any:
        """Return its next message."""
        message = self.connection.recv()
        self.last_message_at = time.monotonic()
        return message

    def leave(self) -> None:
        """Let its supervisor end; does not wait for that."""
        if self._closing is None:
            self._closing = self.actor.close.remote(2.0)

    def end(self, timeout_s: float = 2.0) -> str:
        """End it, with patience where it was told to leave."""
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

        with contextlib.suppress(OSError):  # the pool is done with it, and has closed its end
            while self.failure is None:
                try:
                    messages = ray.get(self.actor.receive.remote())
                except RayError as error:
                    messages = [
                        Failed(f"Ray lost it: {_first_words(error)}", is_device=not self._is_alive(self._node_id))
                    ]
                for message in map(self._checked, messages):
                    self._relayed.send(message)
                    if isinstance(message, Failed):
                        self.failure = message.reason
                        return
                if self.connection.closed:
                    return

    def _checked(self, message: Any) -> Any:
        """Return the message, or in its place a failure of the device where it cannot be believed."""
        match message:
            case Ready():
                reason = self._refuse(message.machine)
                if reason is not None:
                    return Failed(reason, is_device=True)
                self.machine = message.machine
            case TracedText(text):
                return self._checked_trace(text)
        return message

    def _checked_trace(self, text: str) -> Traced | Failed:
        assert self._order is not None
        assert self.machine is not None
        try:
            trace = Trace.from_json(text, f"a trace from {self.device.label}")
        except RecordError as error:
            return Failed(str(error), is_device=True)
        reason = doubt(trace, self._order, self.machine)
        return Traced(trace) if reason is None else Failed(f"it sent a trace that is refused: {reason}", is_device=True)


def _first_words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "namespace:", "pid:", "ip:"))]
    return " ".join(said)[:REASON_CHARACTERS]


# ---- nodes ----------------------------------------------------------------------------------------
# Which nodes of a cluster take part, with which devices, and why others do not. Pure.

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
    """Return why a node cannot take part in a run for a GPU (``auto``: any), or None. ``own`` describes this process's
    package.
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
    if gpu in (AUTO, CPU) or not names or any(same_gpu(parse_gpu(gpu), gpu_slug(name)) for name in names):
        return None
    return f"its GPUs are {', '.join(dict.fromkeys(names))}, and this run is for {gpu}"


def chosen_kind(gpu: str, found: Collection[str]) -> str:
    """Return the GPU that a run is for: what was asked for, or the only kind among the device names that were
    ``found``.

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
    """Return every device of a node for a run on a GPU, or on CPUs.

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
    """Return a name of a node for people: its host's, with the start of its id where another node of this run is on
    that host.
    """
    return f"{host} ({node_id[:6]})" if host in taken else host


def differs(machine: Machine, planned: Machine) -> str | None:
    """Return why a device cannot take part in a run that was ``planned`` for another, or None: another kind, or other
    libraries.

    What can run, and which Solutions are left out, was decided for all of them at once.
    """
    if machine.gpu != planned.gpu:
        return f"it is {machine.gpu_name} ({machine.gpu}), and this run is for {planned.gpu}"
    for name in sorted({*machine.libs, *planned.libs}):
        here, there = machine.libs.get(name, "none"), planned.libs.get(name, "none")
        if here != there:
            return f"it has {name} {here}, and {planned.host}, for which this run was planned, has {there}"
    return None


# ---- checks ---------------------------------------------------------------------------------------
# What a driver can check of a trace that was measured on another host, before it signs it as its own. Pure.

MACHINE_FIELDS = ("gpu", "gpu_name", "sm", "driver", "cuda", "libs", "gpu_uuid", "host")


def doubt(trace: Trace, order: Order, machine: Machine) -> str | None:
    """Return why a trace is none of those that an order asked for, on the device that the order went to; None if it
    is.

    Whether its figures can be true is asked whenever a trace is read (docs/trust.md), and not here.
    """
    session = order.session
    if trace.run_id != session.run_id:
        return f"it is of run {trace.run_id}, not {session.run_id}"
    if trace.tier not in (session.policy.tier, *UNTIMED_TIERS):
        return f"it is of the tier {trace.tier}, and {session.policy.tier} was asked for"
    for name in MACHINE_FIELDS:
        stated, known = getattr(trace, name), getattr(machine, name)
        if stated != known:
            return f"its {name} is {stated!r}, and the device that was asked has {known!r}"
    if session.confined and trace.status == "PASSED" and trace.sandbox_level < MIN_SANDBOX_LEVEL:
        return f"its worker was confined at level {trace.sandbox_level}, and a promotion asks for {MIN_SANDBOX_LEVEL}"
    planned = _planned(trace, order)
    if planned is None:
        return f"nobody asked for {trace.solution} on workload {trace.workload_uuid}"
    plan, workload = planned
    if trace.axes != plan.definition.bind_axes(workload.axes):
        return f"its axes are {trace.axes}, which are not those of its workload"
    if session.job == "measure" and not _takes_part(plan, workload, trace):
        return f"nobody asked for {trace.solution} with config {trace.config} on workload {trace.workload_uuid}"
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

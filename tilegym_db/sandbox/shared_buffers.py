"""Memory that the harness shares with a worker: the inputs and outputs of one call, and nothing else.

An buffers is one dedicated allocation, passed to workers as a file descriptor: anonymous memory on the CPU, an exported block of
device memory on a GPU. It holds one or more slots; each slot holds every tensor of one call, at its own address, with guard
bytes around each.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import shared_place, span_of
from tilegym_db.records.workload import Case

GUARD_BYTES = 4096
ALIGNMENT = 512


@dataclass(frozen=True)
class TensorPlan:
    """The position of one tensor in a slot. ``offset`` and ``span`` in bytes, ``strides`` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    span: int


@dataclass(frozen=True)
class SlotPlan:
    """The tensors of one call, and the size of a slot that holds them with their guard bands, in bytes."""

    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    size: int

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """The inputs, then the outputs."""
        return self.inputs + self.outputs

    def to_message(self) -> dict[str, Any]:
        """Return JSON for the worker."""
        return {
            "size": self.size,
            "inputs": [vars(tensor) for tensor in self.inputs],
            "outputs": [vars(tensor) for tensor in self.outputs],
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> SlotPlan:
        """Parse the output of :meth:`to_message`."""

        def tensors(key: str) -> tuple[TensorPlan, ...]:
            return tuple(
                TensorPlan(**{**item, "shape": tuple(item["shape"]), "strides": tuple(item["strides"])})
                for item in message[key]
            )

        return cls(tensors("inputs"), tensors("outputs"), message["size"])


def plan_slot(definition: Definition, case: Case) -> SlotPlan:
    """Lay out the tensors of one call: 512-byte aligned plus the case's offset, 4 KiB of guard around each.

    Inputs that the case puts in the memory of another input have no guard between them, and may interleave with it. Two of
    equal offset, shape and strides are one tensor.
    """
    offset, names = GUARD_BYTES, definition.tensor_inputs
    hosts = {name: place for name, text in case.call.layouts.items() if (place := shared_place(text))}
    for name, (host, _) in hosts.items():
        if name not in names or host not in names or host in hosts:
            raise RecordError(
                f"layouts.{name}: '{name}' can lie in the memory of '{host}' only if both are inputs, and '{host}' has separate "
                "memory.",
                code="layout_place",
            )
    placed: dict[str, TensorPlan] = {}
    # Each host is followed by what lies in its memory, so that the next tensor begins behind all of them.
    together = sorted(names, key=lambda name: (names.index(hosts[name][0] if name in hosts else name), name in hosts))
    for name in (*together, *definition.written_outputs):
        dtype = definition.dtype_of(name, case.call.dtypes)
        itemsize = storage_dtype(dtype).itemsize
        shape, strides = definition.shape_of(name, case.call.axes), case.strides(definition, name)
        span = span_of(shape, strides) * itemsize
        start = offset + case.offset * itemsize
        if name in hosts:
            host, distance = hosts[name]
            start = placed[host].offset + distance * itemsize
        placed[name] = TensorPlan(name, dtype, shape, strides, start, span)
        offset = max(offset, -(-(start + span + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT)
    inputs, outputs = (tuple(placed[name] for name in part) for part in (names, definition.written_outputs))
    return SlotPlan(inputs, outputs, offset)


def same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return True if two tensors of one dtype hold the same bytes, including NaN payloads and signs of zero."""
    return bool(torch.equal(_bytes_in_order(one), _bytes_in_order(two)))


def _bytes_in_order(value: torch.Tensor) -> torch.Tensor:
    flat = value.reshape(-1)
    # A single column keeps its stride, and only neighbours can be viewed as bytes.
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def fill_tensor(view: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value of the same shape into a strided tensor; along strides of zero, only its first elements."""
    once = each_once(view)
    once.copy_(value[tuple(slice(size) for size in once.shape)])


def each_once(view: torch.Tensor) -> torch.Tensor:
    """Return a view with each address once: only the first elements along strides of zero."""
    return view[tuple(slice(1) if step == 0 else slice(None) for step in view.stride())]


def tensor_view(slot: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """Return the planned tensor as a strided view of a slot's bytes."""
    dtype = storage_dtype(plan.dtype)
    flat = slot[plan.offset : plan.offset + plan.span].view(dtype)
    return flat.as_strided(plan.shape, plan.strides)


def tensors_of_slot(slot: torch.Tensor, plan: SlotPlan) -> dict[str, torch.Tensor]:
    """Return every tensor of a slot by name, as a model passes them.

    Inputs in one memory are views of one storage, and two at one place are one tensor; see :func:`tensor_of_its_own`.
    """
    groups: list[list[TensorPlan]] = []
    end = 0
    for tensor in sorted(plan.tensors, key=lambda tensor: tensor.offset):
        groups += [] if groups and tensor.offset < end + GUARD_BYTES else [[]]
        groups[-1].append(tensor)
        end = max(end, tensor.offset + tensor.span)
    found: dict[str, torch.Tensor] = {}
    made: dict[TensorPlan, torch.Tensor] = {}
    for group in groups:
        end = max(tensor.offset + tensor.span for tensor in group)
        for tensor in group:
            place = replace(tensor, name="")
            if place not in made:
                made[place] = tensor_of_its_own(slot, tensor, group[0].offset, end)
            found[tensor.name] = made[place]
    return found


def tensor_of_its_own(
    slot: torch.Tensor, plan: TensorPlan, begin: int | None = None, end: int | None = None
) -> torch.Tensor:
    """Return a tensor like :func:`tensor_view`, with a storage that begins at the tensor, as in a model.

    The storage offset of a view would reveal that it lies in shared memory, and so that it is checked. ``begin`` and ``end`` are
    those of a storage that other tensors share, in bytes.
    """
    if plan.span == 0:
        return tensor_view(slot, plan)
    begin, end = plan.offset if begin is None else begin, end or plan.offset + plan.span
    # Nothing else leaves the offset behind. The guard band behind it belongs to the storage: what is written there shows. A
    # tensor off its alignment has an offset, as in a model: PyTorch's own attention tells by it, and would read misaligned.
    start, itemsize = begin // ALIGNMENT * ALIGNMENT, storage_dtype(plan.dtype).itemsize
    span = torch.utils.dlpack.from_dlpack(slot[start : end + GUARD_BYTES])
    whole = span[: span.numel() // itemsize * itemsize].view(storage_dtype(plan.dtype))
    return whole.as_strided(plan.shape, plan.strides, (plan.offset - start) // itemsize)


def fill_with_garbage(memory: torch.Tensor) -> None:
    """Fill memory with random bytes in place. ``memory``: 1-D uint8. Aligned memory is filled eight bytes at a time."""
    words = memory.numel() // 8 * 8 if memory.storage_offset() % 8 == 0 else 0
    memory[:words].view(torch.int64).random_(-(1 << 63), None)
    memory[words:].random_(0, 256)


class SharedBuffers:
    """A shared allocation with ``slots`` equal slots. Close it when its workers have detached."""

    def __init__(self, plan: SlotPlan, slots: int, device: str, calls: Sequence[SlotPlan] = ()) -> None:
        """Allocate.

        Args:
            plan: the layout of each slot.
            slots: how many.
            device: ``cpu`` or ``cuda:<n>``.
            calls: plans of several calls in the one slot, whose tensors may share memory; the worker gets these as its slots.

        Raises:
            StoreError: there is not that much memory.
        """
        self.plan = plan
        self.slots = slots
        self.device = device
        self.calls = tuple(calls)
        self._copy: torch.Tensor | None = None
        size = plan.size * slots
        self.memory: torch.Tensor
        self.descriptor: int
        self._release: Callable[[], None]
        export = _export_host_memory if device == "cpu" else export_memory
        self.memory, self.descriptor, self._release = export(size, device)

    def slot(self, index: int) -> torch.Tensor:
        """Return the bytes of one slot, guard bands included."""
        return self.memory[index * self.plan.size : (index + 1) * self.plan.size]

    def copy_of(self, index: int) -> torch.Tensor:
        """Return a copy of the bytes of one slot, until the next copy.

        On a CPU each copy has the same memory: a new block of megabytes takes longer to map than to fill.
        """
        slot = self.slot(index)
        if self.device != "cpu":
            return slot.clone()
        self._copy = torch.empty_like(slot) if self._copy is None else self._copy
        return self._copy.copy_(slot)

    def tensor(self, index: int, name: str) -> torch.Tensor:
        """Return one tensor of one slot."""
        plan = next(tensor for tensor in self.plan.tensors if tensor.name == name)
        return tensor_view(self.slot(index), plan)

    def settle(self) -> None:
        """Wait until all writes have finished: a worker's stream does not wait for streams of this process."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def to_message(self) -> dict[str, Any]:
        """Return the data that a worker needs to attach, except the descriptor."""
        return {
            "device": self.device,
            "size": self.memory.numel(),
            "slots": self.slots,
            "plans": [plan.to_message() for plan in self.calls or (self.plan,)],
        }

    def close(self) -> None:
        """Free the memory; safe to call twice. Tensors taken from the buffers must not be used any more."""
        if self.descriptor >= 0:
            self.memory, self.descriptor, self._copy = torch.empty(0, dtype=torch.uint8), -1, None
            self._release()

    def __enter__(self) -> SharedBuffers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def attach(
    message: Mapping[str, Any], descriptor: int
) -> tuple[torch.Tensor, list[tuple[int, SlotPlan]], Callable[[], None]]:
    """Attach in the worker and close the descriptor; return all bytes, the start and plan of each call, and a detach function."""
    plans = [SlotPlan.from_message(plan) for plan in message["plans"]]
    starts = [number * plans[0].size for number in range(message["slots"])]
    placed = [(0, plan) for plan in plans] if len(plans) > 1 else [(start, plans[0]) for start in starts]
    try:
        if message["device"] == "cpu":
            return _map_host_memory(descriptor, message["size"]), placed, lambda: None
        memory, release = import_memory(descriptor, message["size"], message["device"])
        return memory, placed, release
    finally:
        os.close(descriptor)


def _export_host_memory(size: int, device: str) -> tuple[torch.Tensor, int, Callable[[], None]]:
    descriptor = os.memfd_create("tilegym-db", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"cannot allocate {size} bytes of shared memory: {error}.", code="shared_memory_full"
        ) from None
    # A worker that shrank it would end the harness with SIGBUS.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return _map_host_memory(descriptor, size), descriptor, lambda: os.close(descriptor)


def _map_host_memory(descriptor: int, size: int) -> torch.Tensor:
    # The mapping lives as long as a tensor refers to it; there is nothing to release by hand.
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


# ---- shared cuda ----------------------------------------------------------------------------------
# Device memory that two processes share by a file descriptor: allocate and export, import and map.
#
# The driver's virtual memory API is used, not CUDA IPC: a descriptor gives access to this one allocation and nothing
# beside it, the memory lives as long as anyone maps it, whatever the other process does, and each process maps it
# like its own (``docs/decisions/timing.md``, 0007 has the measurements).

Release = Callable[[], None]

# Values of the driver's enumerations.
_PINNED, _ON_DEVICE, _READ_WRITE, _AS_DESCRIPTOR, _MINIMUM = 1, 1, 3, 1, 0

_Size = ctypes.c_size_t
_Pointer = ctypes.c_ulonglong


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("handle_kinds", ctypes.c_int),
        ("location", _Location),
        ("windows_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _DeviceBytes:
    """Raw device memory with the interface that ``torch.as_tensor`` reads."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code != 0:
        raise StoreError(f"{function} failed with CUDA driver error {code}.", code="cuda_call_failed")


def _properties(index: int) -> _AllocationProperties:
    properties = _AllocationProperties()
    properties.kind = _PINNED
    properties.handle_kinds = _AS_DESCRIPTOR
    properties.location = _Location(_ON_DEVICE, index)
    return properties


def _index(device: str) -> int:
    return torch.device(device).index or 0


def export_memory(size: int, device: str) -> tuple[torch.Tensor, int, Release]:
    """Allocate device memory and a descriptor that another process can map it by.

    Returns:
        The bytes as a tensor, the descriptor, and a function that gives both back.
    """
    index = _index(device)
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # creates the context
        properties = _properties(index)
        step = _Size()
        _call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(properties), _MINIMUM)
        whole = -(-max(size, 1) // step.value) * step.value
        handle = _Pointer()
        try:
            _call("cuMemCreate", ctypes.byref(handle), _Size(whole), ctypes.byref(properties), _Pointer(0))
        except StoreError:
            torch.cuda.empty_cache()  # what PyTorch keeps for itself may be all that is missing
            _call("cuMemCreate", ctypes.byref(handle), _Size(whole), ctypes.byref(properties), _Pointer(0))
        descriptor = ctypes.c_int(-1)
        _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _AS_DESCRIPTOR, _Pointer(0))
        memory, unmap = _map(handle, size, whole, index)

    def release() -> None:
        unmap()
        os.close(descriptor.value)

    return memory, descriptor.value, release


def import_memory(descriptor: int, size: int, device: str) -> tuple[torch.Tensor, Release]:
    """Map memory that another process exported; the descriptor may be closed afterwards.

    Returns:
        The bytes as a tensor, and a function that unmaps them.
    """
    index = _index(device)
    with torch.cuda.device(index):
        torch.cuda.synchronize()
        handle, step, properties = _Pointer(), _Size(), _properties(index)
        _call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(properties), _MINIMUM)
        _call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(descriptor),
            ctypes.c_int(_AS_DESCRIPTOR),
        )
        return _map(handle, size, -(-max(size, 1) // step.value) * step.value, index)


def _map(handle: _Pointer, size: int, whole: int, index: int) -> tuple[torch.Tensor, Release]:
    address = _Pointer()
    _call("cuMemAddressReserve", ctypes.byref(address), _Size(whole), _Size(0), _Pointer(0), _Pointer(0))
    _call("cuMemMap", address, _Size(whole), _Size(0), handle, _Pointer(0))
    access = _Access(_Location(_ON_DEVICE, index), _READ_WRITE)
    _call("cuMemSetAccess", address, _Size(whole), ctypes.byref(access), _Size(1))
    _call("cuMemRelease", handle)  # the mapping keeps the memory alive
    memory = torch.as_tensor(_DeviceBytes(address.value, size), device=f"cuda:{index}")

    def unmap() -> None:
        with torch.cuda.device(index):
            torch.cuda.synchronize()
            _call("cuMemUnmap", address, _Size(whole))
            _call("cuMemAddressFree", address, _Size(whole))

    return memory, unmap


# ---- dtypes --------------------------------------------------------------------------------------
# Converts between dtype names of records and torch dtypes.


TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint32",
        "bool",
    )
} | {"float4_e2m1": torch.uint8}  # two codes a byte: torch's own packed dtype supports no arithmetic

_NAMES = {dtype: name for name, dtype in reversed(TORCH_DTYPES.items()) if name != "float4_e2m1"}


def storage_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that stores a record dtype; packed 4-bit floats are stored as bytes."""
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a torch dtype's name in records; raise ``KeyError`` if records cannot hold it."""
    return _NAMES[dtype]

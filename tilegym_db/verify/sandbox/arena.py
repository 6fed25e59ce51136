"""Memory that the supervisor shares with a worker: the inputs and outputs of one call, and nothing else.

An arena is one dedicated allocation: a memory-mapped file on the CPU, a ``cudaMalloc`` of its own on a GPU (an exported
CUDA handle gives access to the whole block, so no other tensor may live there). It holds one or more slots; each slot holds
every tensor of one call, at its own address, with guard bytes around each.
"""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym_db.errors import StoreError
from tilegym_db.records import Definition
from tilegym_db.verify.inputs import Case
from tilegym_db.verify.torch_dtypes import storage_dtype

__all__ = ["Arena", "SlotPlan", "TensorPlan", "attach", "plan_slot"]

GUARD_BYTES = 4096
ALIGNMENT = 512


@dataclass(frozen=True)
class TensorPlan:
    """Where one tensor lies in a slot. ``offset`` and ``span`` in bytes, ``strides`` in elements."""

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
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    def to_message(self) -> dict[str, Any]:
        """JSON for the worker."""
        return {
            "size": self.size,
            "inputs": [vars(tensor) for tensor in self.inputs],
            "outputs": [vars(tensor) for tensor in self.outputs],
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> SlotPlan:
        """The inverse of :meth:`to_message`."""

        def tensors(key: str) -> tuple[TensorPlan, ...]:
            return tuple(
                TensorPlan(**{**item, "shape": tuple(item["shape"]), "strides": tuple(item["strides"])})
                for item in message[key]
            )

        return cls(tensors("inputs"), tensors("outputs"), message["size"])


def plan_slot(definition: Definition, case: Case) -> SlotPlan:
    """Lay out the tensors of one call: 512-byte aligned plus the case's offset, 4 KiB of guard around each."""
    offset = GUARD_BYTES

    def place(name: str) -> TensorPlan:
        nonlocal offset
        dtype = definition.dtype_of(name, case.dtypes)
        shape, strides = definition.shape_of(name, case.axes), case.strides(definition, name)
        elements = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        span = elements * storage_dtype(dtype).itemsize
        start = offset + case.offset * storage_dtype(dtype).itemsize
        plan = TensorPlan(name, dtype, shape, strides, start, span)
        offset = -(-(start + span + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        return plan

    inputs = tuple(place(name) for name in definition.tensor_inputs)
    outputs = tuple(place(name) for name in definition.written_outputs)
    return SlotPlan(inputs, outputs, offset)


def tensor_view(slot: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """The planned tensor as a strided view of a slot's bytes."""
    dtype = storage_dtype(plan.dtype)
    flat = slot[plan.offset : plan.offset + plan.span].view(dtype)
    return flat.as_strided(plan.shape, plan.strides)


class Arena:
    """One shared allocation with ``slots`` equal slots. Close it when its workers have detached."""

    def __init__(self, plan: SlotPlan, slots: int, device: str, folder: Path) -> None:
        """Allocate.

        Args:
            plan: the layout of each slot.
            slots: how many.
            device: ``cpu`` or ``cuda:<n>``.
            folder: where the memory-mapped file of a CPU arena goes; the worker must be able to read it.
        """
        self.plan = plan
        self.slots = slots
        self.device = device
        size = plan.size * slots
        self._release: Any
        if device == "cpu":
            path = folder / f"arena-{id(self):x}"
            self.memory, self._release = _map_file(path, size, create=True)
            self._handle: dict[str, Any] = {"kind": "file", "path": str(path)}
            self._path: Path | None = path
        else:
            self.memory, handle, self._release = _allocate_cuda(size, device)
            self._handle = {"kind": "cuda_ipc", "handle": base64.b64encode(handle).decode(), "device": device}
            self._path = None

    def slot(self, index: int) -> torch.Tensor:
        """The bytes of one slot, guard bands included."""
        return self.memory[index * self.plan.size : (index + 1) * self.plan.size]

    def tensor(self, index: int, name: str) -> torch.Tensor:
        """One tensor of one slot."""
        plan = next(tensor for tensor in self.plan.tensors if tensor.name == name)
        return tensor_view(self.slot(index), plan)

    def settle(self) -> None:
        """Wait until everything written here has arrived: a worker's stream knows nothing of this process's streams."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def to_message(self) -> dict[str, Any]:
        """What a worker needs to attach."""
        return {**self._handle, "size": self.memory.numel(), "slots": self.slots, "plan": self.plan.to_message()}

    def close(self) -> None:
        """Give the memory back. The tensors taken from the arena must no longer be used."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._release()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def attach(message: Mapping[str, Any]) -> tuple[torch.Tensor, SlotPlan, Any]:
    """Worker side: (all bytes, slot plan, a function that detaches)."""
    plan = SlotPlan.from_message(message["plan"])
    if message["kind"] == "file":
        memory, release = _map_file(Path(message["path"]), message["size"], create=False)
    else:
        memory, release = _open_cuda(base64.b64decode(message["handle"]), message["size"], message["device"])
    return memory, plan, release


def _map_file(path: Path, size: int, *, create: bool) -> tuple[torch.Tensor, Any]:
    if create:
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # a sparse file would end in SIGBUS on a full disk
            except OSError as error:
                path.unlink()
                raise StoreError(f"cannot allocate {size} bytes of shared memory in {path.parent}: {error}.") from None
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), size)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    # The mapping lives as long as a tensor refers to it; there is nothing to release by hand.
    return memory, lambda: None


class _CudaView:
    """Raw device memory with the interface that ``torch.as_tensor`` reads."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def _runtime() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    # torch has loaded it already; asking by name gives the same library.
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def _checked(code: int, what: str) -> None:
    if code != 0:
        raise StoreError(f"{what} failed with CUDA error {code}.")


def _allocate_cuda(size: int, device: str) -> tuple[torch.Tensor, bytes, Any]:
    runtime = _runtime()
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        if runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
            runtime.cudaGetLastError()  # clear it, or the next unrelated call reports it
            torch.cuda.empty_cache()
            _checked(runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)), f"cudaMalloc of {size} bytes")
        handle = _IpcHandle()
        _checked(runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer), "cudaIpcGetMemHandle")
        memory = torch.as_tensor(_CudaView(pointer.value or 0, size), device=device)

    def release() -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            _checked(runtime.cudaFree(pointer), "cudaFree")

    return memory, bytes(memoryview(handle)), release


def _open_cuda(handle: bytes, size: int, device: str) -> tuple[torch.Tensor, Any]:
    runtime = _runtime()
    pointer = ctypes.c_void_p()
    opened = _IpcHandle.from_buffer_copy(handle)
    lazy_peer_access = 1
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # creates the context
        runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, _IpcHandle, ctypes.c_uint]
        _checked(runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), opened, lazy_peer_access), "cudaIpcOpenMemHandle")
        memory = torch.as_tensor(_CudaView(pointer.value or 0, size), device=device)

    def release() -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            _checked(runtime.cudaIpcCloseMemHandle(pointer), "cudaIpcCloseMemHandle")

    return memory, release

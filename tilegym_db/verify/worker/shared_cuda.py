"""Device memory that two processes share by a file descriptor: allocate and export, import and map.

The driver's virtual memory API is used, not CUDA IPC: a descriptor gives access to this one allocation and nothing beside
it, the memory lives as long as anyone maps it, whatever the other process does, and each process maps it like its own
(``docs/decisions/timing.md``, 0007 has the measurements).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from tilegym_db.errors import StoreError

__all__ = ["export_memory", "import_memory"]

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

    Args:
        size: bytes wanted; the allocation is rounded up to the driver's granularity.
        device: ``cuda:<n>``.

    Returns:
        The bytes as a tensor, the descriptor, and a function that gives both back.

    Raises:
        StoreError: the driver refuses.
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

    Raises:
        StoreError: the driver refuses.
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

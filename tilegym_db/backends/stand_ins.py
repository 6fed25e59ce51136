"""Stand-ins for a compile target's device: its limits, and a replacement of ``torch.cuda``."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tilegym_db.errors import SolutionError


@dataclass(frozen=True)
class Device:
    """A GPU that a target is named after. Limits are those of the compute capability (CUDA programming guide)."""

    name: str
    major: int
    minor: int
    multiprocessors: int
    shared_bytes: int
    """Shared memory that one block may ask for."""


DEVICES: dict[str, Device] = {
    "sm_80": Device("NVIDIA A100-SXM4-80GB", 8, 0, 108, 163 << 10),
    "sm_89": Device("NVIDIA L40S", 8, 9, 142, 99 << 10),
    "sm_90": Device("NVIDIA H200", 9, 0, 132, 227 << 10),
    "sm_100": Device("NVIDIA B200", 10, 0, 148, 227 << 10),
    "sm_120": Device("NVIDIA GeForce RTX 5090", 12, 0, 170, 99 << 10),
}

_MAX_BLOCKS = (2**31 - 1, 2**16 - 1, 2**16 - 1)


def check_shared_memory(kernel: str, shared_bytes: int, target: str) -> None:
    """Raise :class:`SolutionError` if a block requests more than the target has, which the compiler does not check."""
    limit = DEVICES[target].shared_bytes
    if shared_bytes > limit:
        raise SolutionError(
            f"{kernel} asks for {shared_bytes} bytes of shared memory a block; {target} has {limit}. "
            "Use smaller tiles or fewer stages there, or leave the target out of spec.target_hardware.",
            code="shared_memory_exceeded",
        )


def check_grid(kernel: str, grid: object) -> None:
    """Raise :class:`SolutionError` unless the grid is one that CUDA can launch: 1 to 3 sizes within its limits."""
    sizes = tuple(grid) if isinstance(grid, tuple | list) else (grid,)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if not 1 <= len(sizes) <= 3 or not whole:
        raise SolutionError(f"{kernel}: the grid {grid!r} is not 1 to 3 whole numbers.", code="grid_invalid")
    for axis, (size, limit) in enumerate(zip(sizes, _MAX_BLOCKS, strict=False)):
        if not 0 < size <= limit:
            raise SolutionError(
                f"{kernel}: axis {axis} of the grid {grid!r} must be between 1 and {limit}.", code="grid_out_of_range"
            )


@contextmanager
def pretend_device(target: str) -> Iterator[None]:
    """Answer what a Solution may ask ``torch.cuda`` before a launch as the target's device would; undone on exit.

    ``is_available`` stays false: sources that ask it know that there is no GPU.
    """
    device = DEVICES[target]
    properties = SimpleNamespace(
        name=device.name,
        major=device.major,
        minor=device.minor,
        multi_processor_count=device.multiprocessors,
        shared_memory_per_block_optin=device.shared_bytes,
        warp_size=32,
    )
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0))
    answers: dict[str, Callable[..., Any]] = {
        "current_stream": lambda device=None: stream,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
    }
    before = {name: getattr(torch.cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)


# ---- cutile stand ins -----------------------------------------------------------------------------
# Without a GPU cuTile still requires CUDA arrays and a driver, but it does not call the driver.
#
# Imported in worker processes only.

# -- arguments -------------------------------------------------------------------------------------------------------

_DLPACK_DEVICE_TYPE_OFFSET = 8  # DLManagedTensor starts with DLTensor: void *data, then int32 device_type
_DLPACK_CUDA = 2

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _CudaView:
    """A CPU tensor whose DLPack capsule says that it lies on a GPU. Its memory is never read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        address = _capsule_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + _DLPACK_DEVICE_TYPE_OFFSET).value = _DLPACK_CUDA
        return capsule


def as_cuda(argument: Any) -> Any:
    """Return a launch argument with its CPU tensors presented as CUDA arrays, which cuTile inspects."""
    if isinstance(argument, torch.Tensor):
        return _CudaView(argument)
    if type(argument) in (tuple, list):
        return type(argument)(as_cuda(item) for item in argument)
    return argument


# -- driver ----------------------------------------------------------------------------------------------------------

_DRIVER_MODULE = "cuda.tile._load_libcuda"
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED, of every call but these two
_DRIVER_VERSION = 13000

_DriverCall = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 8)
_GetProcAddress = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p
)


def _unsupported(*_: Any) -> int:
    return _NOT_SUPPORTED


def _succeed(*_: Any) -> int:
    return 0


def _driver_version(result: int, *_: Any) -> int:
    ctypes.c_int.from_address(result).value = _DRIVER_VERSION
    return 0


_CALLS = {
    b"cuInit": _DriverCall(_succeed),
    b"cuDriverGetVersion": _DriverCall(_driver_version),
    b"": _DriverCall(_unsupported),
}


def _get_proc_address(name: bytes, result: Any, *_: Any) -> int:
    result[0] = ctypes.cast(_CALLS.get(name, _CALLS[b""]), ctypes.c_void_p).value
    return 0


_entry = _GetProcAddress(_get_proc_address)
_entry_pointer = ctypes.c_void_p(ctypes.cast(_entry, ctypes.c_void_p).value)


def install_driver() -> None:
    """Stand in for the module with which cuTile loads libcuda; for good, since cuTile keeps the pointers it gets."""
    if _DRIVER_MODULE not in sys.modules:
        module = ModuleType(_DRIVER_MODULE)
        module.cuGetProcAddress_v2_ptrptr = ctypes.addressof(_entry_pointer)  # type: ignore[attr-defined]
        sys.modules[_DRIVER_MODULE] = module

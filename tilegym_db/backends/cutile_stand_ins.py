"""What cuTile's own code insists on where there is no GPU: CUDA arrays, and a driver, which it asks for nothing.

Imported in worker processes only.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import torch

__all__ = ["as_cuda", "install_driver"]

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
    """The argument of a launch with its CPU tensors presented as CUDA arrays, for cuTile to look at."""
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

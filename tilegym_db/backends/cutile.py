"""cuTile ahead of time: ``cuda.tile.launch`` replaced by an export of the specialisation that the launch would compile.

Imported in worker processes only. cuTile derives the specialisation (static sizes, divisibility, aliasing) from the
launch's arguments with its own code, ``KernelSignature.from_kernel_args``. That code insists on CUDA arrays and on a
driver, which it asks for nothing: arguments are presented as CUDA memory through DLPack, and the driver is a stand-in.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import CallingConvention, KernelSignature, export_kernel

from tilegym_db.backends.absent_device import check_grid
from tilegym_db.backends.compile_jobs import Artifact
from tilegym_db.backends.recorder import Recorder
from tilegym_db.backends.toolchains import TOOLCHAINS
from tilegym_db.errors import SolutionError

__all__ = ["as_cuda", "compile_probe", "install_driver", "recording"]

_exported: dict[str, int] = {}  # key -> size of the cubin, as cuTile's own launch compiles a specialisation once


@contextmanager
def recording(target: str, identity: str = "") -> Iterator[Recorder]:
    """Turn every launch into an export for ``target``; undone on exit.

    A launch raises what cuTile's compiler raises, and :class:`SolutionError` where CUDA could not launch the grid.
    """
    install_driver()
    recorder = Recorder(target, identity)
    original = ct.launch

    def export(stream: object, grid: object, kernel: Any, kernel_args: tuple[Any, ...], /, **options: Any) -> None:
        if not isinstance(kernel, ct.kernel):
            raise SolutionError(f"cuda.tile.launch takes a kernel, not {type(kernel).__name__}.")
        check_grid(kernel._pyfunc.__name__, grid)
        recorder.add(_export(recorder, kernel, kernel_args))

    ct.launch = export
    try:
        yield recorder
    finally:
        ct.launch = original


def _export(recorder: Recorder, kernel: Any, kernel_args: tuple[Any, ...]) -> Artifact:
    arguments = tuple(as_cuda(argument) for argument in kernel_args)
    signature = KernelSignature.from_kernel_args(kernel, arguments, CallingConvention.cutile_python_v2())
    code = TOOLCHAINS["cutile"].targets[recorder.target]
    options = getattr(kernel, "_compiler_options", None)
    text = "\0".join((recorder.identity, kernel._pyfunc.__qualname__, signature.symbol or "", repr(options), code))
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in _exported:
        binary = io.BytesIO()
        export_kernel(kernel, [signature], binary, gpu_code=code, output_format="cubin")
        _exported[key] = len(binary.getvalue())
    return Artifact(kernel._pyfunc.__name__, key, _exported[key])


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


# -- probe -----------------------------------------------------------------------------------------------------------


@ct.kernel  # type: ignore[untyped-decorator]
def _copy(source, target, SIZE: ct.Constant[int]):  # type: ignore[no-untyped-def]
    ct.store(target, index=(ct.bid(0),), tile=ct.load(source, index=(ct.bid(0),), shape=(SIZE,)))


def compile_probe(target: str) -> None:
    """Compile a copy kernel; raises what the compiler raises where it cannot make code for ``target``."""
    source = torch.empty(64)
    with recording(target, "probe"):
        ct.launch(None, (1,), _copy, (source, torch.empty_like(source), 64))

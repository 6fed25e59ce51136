"""Compiles TileLang ahead of time: a variable sets its default target, and compiled kernels are recorded but not called.

Only worker processes import this module. A factory (``@tilelang.jit``) compiles when it is called; calling the kernel that it
returns is the launch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tilelang
import tilelang.language as T
import torch
from tilelang.jit.kernel import JITKernel

from tilegym_db.backends.aot import Artifact, Recorder
from tilegym_db.backends.stand_ins import check_shared_memory
from tilegym_db.backends.toolchains import TOOLCHAINS
from tilegym_db.errors import SolutionError

TARGET_VARIABLE = "TILELANG_DEFAULT_TARGET"
ELF_MACHINE_CUDA = 190


@contextmanager
def recording(target: str, identity: str = "") -> Iterator[Recorder]:
    """Compile every factory for ``target`` and record every kernel call without running it; undone on exit."""
    recorder = Recorder(target, identity)
    original = JITKernel.__call__
    before = os.environ.get(TARGET_VARIABLE)
    arch = TOOLCHAINS["tilelang"].targets[target]

    def record(kernel: Any, *args: Any, **named: Any) -> None:
        _check_target(kernel, arch)
        _check_arguments(kernel, args, named)
        recorder.add(_artifact(kernel, target))

    JITKernel.__call__ = record
    os.environ[TARGET_VARIABLE] = json.dumps({"kind": "cuda", "arch": arch})
    try:
        yield recorder
    finally:
        JITKernel.__call__ = original
        if before is None:
            del os.environ[TARGET_VARIABLE]
        else:
            os.environ[TARGET_VARIABLE] = before


def _name(kernel: Any) -> str:
    return str(kernel.prim_func.attrs["global_symbol"])


def _check_target(kernel: Any, arch: str) -> None:
    found = str(kernel.target.attrs["arch"])
    if found != arch:
        raise SolutionError(
            f"{_name(kernel)} is compiled for {found}, not {arch}: name no target in the source.", code="target_fixed"
        )


def _check_arguments(kernel: Any, args: Sequence[Any], named: dict[str, Any]) -> None:
    """Raise :class:`SolutionError` if the generated host code would refuse the arguments at a real launch."""
    parameters = [parameter for index, parameter in enumerate(kernel.params) if index not in (kernel.out_idx or ())]
    if len(args) != len(parameters) or named:
        given = f"{len(args)} and {len(named)} named ones"
        raise SolutionError(
            f"{_name(kernel)} takes {len(parameters)} positional arguments, got {given}.", code="argument_count"
        )
    for index, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        if not isinstance(value, torch.Tensor):
            continue
        want = parameter.torch_dtype()
        sizes = [size if isinstance(size, int) else None for size in parameter.shape]
        same_rank = len(sizes) == value.ndim
        if (
            value.dtype != want
            or not same_rank
            or any(size not in (None, found) for size, found in zip(sizes, value.shape, strict=True))
        ):
            shape = ", ".join("?" if size is None else str(size) for size in sizes)
            raise SolutionError(
                f"{_name(kernel)}: argument {index} is {value.dtype} {list(value.shape)}, not {want} [{shape}].",
                code="argument_differs",
            )


def _artifact(kernel: Any, target: str) -> Artifact:
    device, host = kernel.get_kernel_source(), kernel.get_host_source()
    shared = dynamic_shared_bytes(host, device)
    check_shared_memory(_name(kernel), shared, target)
    key = hashlib.sha256(f"{kernel.target}\0{kernel.pass_configs}\0{device}\0{host}".encode()).hexdigest()
    return Artifact(_name(kernel), key, _device_code_bytes(kernel), shared)


_LAUNCH = re.compile(r"TVMFFIFunctionCall\((\w+)_packed, \(TVMFFIAny\*\) (\w+), (\d+),")


def dynamic_shared_bytes(host_source: str, device_source: str) -> int:
    """Return the maximum shared memory that the generated host code requests at a launch, or 0.

    nvcc does not check it. The size is an argument of the launch, a constant after the grid and the block. It exists only
    for a kernel that declares an array of open size.
    """
    open_sized = {
        name
        for body in device_source.split("__global__")
        if "extern __shared__" in body
        for name in re.findall(r"(\w+)\(", body.partition("{")[0])
    }
    largest = 0
    for launch in _LAUNCH.finditer(host_source):
        kernel, stack, count = launch.group(1), launch.group(2), int(launch.group(3))
        if kernel in open_sized:
            stored = rf"\){stack}\)\[{count - 1}\]\.v_int64\) = \(\(int64_t\)(\d+)\);"
            largest = max(largest, int(re.findall(stored, host_source[: launch.start()])[-1]))
    return largest


def _device_code_bytes(kernel: Any) -> int:
    """Return the size of the cubin inside the library that TileLang saved; 0 if its cache is switched off."""
    folder = getattr(kernel, "_tilelang_cache_path", None)
    library = Path(folder) / "executable.so" if folder else None
    return _embedded_cubin_bytes(library.read_bytes()) if library and library.is_file() else 0


def _embedded_cubin_bytes(library: bytes) -> int:
    total, start = 0, library.find(b"\x7fELF", 1)
    while start > 0:
        (machine,) = struct.unpack_from("<H", library, start + 18)
        if machine == ELF_MACHINE_CUDA:
            (table,) = struct.unpack_from("<Q", library, start + 40)
            entry, count = struct.unpack_from("<HH", library, start + 58)
            total += table + entry * count  # an ELF file ends with its section table
        start = library.find(b"\x7fELF", start + 4)
    return total


@tilelang.jit
def _copy(size, threads):  # type: ignore[no-untyped-def]
    @T.prim_func  # type: ignore[untyped-decorator]
    def copy(
        source: T.Tensor((size,), "float32"),  # type: ignore[valid-type]
        target: T.Tensor((size,), "float32"),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(T.ceildiv(size, threads), threads=threads) as block:
            lane = block * threads + T.get_thread_binding(0)
            target[lane] = source[lane]

    return copy


def compile_probe(target: str) -> None:
    """Compile a copy kernel; let the compiler's error through if it cannot make code for ``target``."""
    source = torch.empty(128)
    with recording(target):
        _copy(128, 128)(source, torch.empty_like(source))

"""Compiles Triton ahead of time: a driver without a device, and launches that stop after compilation.

Only worker processes import this module. It works with Triton 3.4 and newer, and relies on ``JITFunction.run``, its
``warmup`` flag and ``triton.runtime.driver.set_active``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tilegym_db.backends.aot import Artifact, Recorder
from tilegym_db.backends.stand_ins import DEVICES, check_grid, check_shared_memory
from tilegym_db.backends.toolchains import refuse_autotune


class _CompileOnlyDriver:
    """A driver that answers the questions of a launch before it compiles. The number of a device is the capability of its target.

    Triton keeps compiled kernels by device number, so different numbers keep the targets apart.
    """

    def __init__(self, target: str) -> None:
        device = DEVICES[target]
        self.capability = device.major * 10 + device.minor

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        refuse_autotune()


@contextmanager
def recording(target: str, identity: str = "") -> Iterator[Recorder]:
    """Turn every kernel launch into a compilation for ``target``; undone on exit.

    A launch raises what Triton's compiler raises, and :class:`SolutionError` if CUDA could not launch the result.
    """
    recorder = Recorder(target, identity)
    original = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = original(function, *args, grid=grid, warmup=True, **options)
        name = kernel.metadata.name
        check_grid(name, grid(_named_arguments(function, args, options)) if callable(grid) else grid)
        check_shared_memory(name, kernel.metadata.shared, target)
        recorder.add(Artifact(name, kernel.hash, len(kernel.asm["cubin"]), kernel.metadata.shared))
        return kernel

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(_CompileOnlyDriver(target))
    try:
        yield recorder
    finally:
        JITFunction.run = original
        triton.runtime.driver._active = None  # the default driver is made again when it is needed


def _named_arguments(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return every argument of the kernel by name, as a grid function receives them."""
    defaults = {parameter.name: parameter.default for parameter in function.params if parameter.has_default}
    return {**defaults, **dict(zip(function.arg_names, args, strict=False)), **options}


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lanes, tl.load(source + lanes, mask=lanes < size), mask=lanes < size)


def compile_probe(target: str) -> None:
    """Compile a copy kernel; let the compiler's error through if it cannot make code for ``target``."""
    source = torch.empty(64)
    with recording(target):
        _copy[(1,)](source, torch.empty_like(source), 64, BLOCK=64)

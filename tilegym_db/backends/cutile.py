"""Compiles cuTile ahead of time: ``cuda.tile.launch`` exports the specialisation that the launch would compile.

Only worker processes import this module. cuTile derives the specialisation (static sizes, divisibility, aliasing) from
the launch's arguments with its own code, ``KernelSignature.from_kernel_args``. That code needs CUDA arrays and a driver,
although it does not use the driver. Arguments are therefore presented as CUDA memory through DLPack, and the driver is a
stand-in.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import CallingConvention, KernelSignature, export_kernel

from tilegym_db.backends.aot import Artifact, Recorder
from tilegym_db.backends.stand_ins import as_cuda, check_grid, install_driver
from tilegym_db.backends.toolchains import TOOLCHAINS
from tilegym_db.errors import SolutionError

_exported: dict[str, int] = {}  # key -> size of the cubin, as cuTile's own launch compiles a specialisation once


@contextmanager
def recording(target: str, identity: str = "") -> Iterator[Recorder]:
    """Turn every launch into an export for ``target``; undone on exit.

    A launch raises what cuTile's compiler raises, and :class:`SolutionError` if CUDA could not launch the grid.
    """
    install_driver()
    recorder = Recorder(target, identity)
    original = ct.launch

    def export(stream: object, grid: object, kernel: Any, kernel_args: tuple[Any, ...], /, **options: Any) -> None:
        if not isinstance(kernel, ct.kernel):
            raise SolutionError(f"cuda.tile.launch takes a kernel, not {type(kernel).__name__}.", code="kernel_type")
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


# -- probe -----------------------------------------------------------------------------------------------------------


@ct.kernel  # type: ignore[untyped-decorator]
def _copy(source, target, SIZE: ct.Constant[int]):  # type: ignore[no-untyped-def]
    ct.store(target, index=(ct.bid(0),), tile=ct.load(source, index=(ct.bid(0),), shape=(SIZE,)))


def compile_probe(target: str) -> None:
    """Compile a copy kernel; let the compiler's error through if it cannot make code for ``target``."""
    source = torch.empty(64)
    with recording(target, "probe"):
        ct.launch(None, (1,), _copy, (source, torch.empty_like(source), 64))

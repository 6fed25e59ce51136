"""Runs cuTile kernels on CPU tensors, on machines without a GPU.

cuTile's own front end determines every type, shape and constant of a kernel, and contracts products and sums, as it does before
the compiler. NumPy then executes the result, block after block. The rules of cuTile are therefore not written a second time. A
run does not show how a device rounds transcendental functions and sums, in which order it runs blocks, or how fast it is.

Imported in worker processes and tests only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import numpy as np
import torch
from cuda.tile._bytecode.version import BytecodeVersion
from cuda.tile._compile import compile_tile
from cuda.tile.compilation import CallingConvention, KernelSignature

from tilegym_db.backends.cutile_interpreter.tile_ops import OBJECTS, ArrayMemory, Launch
from tilegym_db.backends.cutile_interpreter.tiles import constant, host_dtype
from tilegym_db.backends.cutile_interpreter.writer import Writer, emits
from tilegym_db.backends.stand_ins import as_cuda, check_grid, install_driver, pretend_device
from tilegym_db.errors import SolutionError

__all__ = ["install", "interpreting"]

_for_good = ExitStack()

DEVICE = "sm_90"
"""The target that stands in for the device of which a kernel's host code may ask."""


def install() -> None:
    """Replace launches for the rest of this process. Call it before a Solution is loaded."""
    _for_good.enter_context(interpreting())


@contextmanager
def interpreting() -> Iterator[None]:
    """Run every launch here; undone on exit."""

    def launch(stream: object, grid: object, kernel: Any, kernel_args: tuple[Any, ...], /, **options: Any) -> None:
        if not isinstance(kernel, ct.kernel):
            raise SolutionError(f"cuda.tile.launch takes a kernel, not {type(kernel).__name__}.", code="kernel_type")
        run(grid, kernel, kernel_args)

    install_driver()
    original, ct.launch = ct.launch, launch
    try:
        with pretend_device(DEVICE):
            yield
    finally:
        ct.launch = original


# ---- Launches --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TranslatedKernel:
    """One specialisation of a kernel."""

    prepare: Callable[..., Callable[..., None]]
    arrays: tuple[str, ...]
    """The dtype of each array, in order."""
    scalars: tuple[str, ...]
    written: frozenset[int]
    """Flags of the arrays that it writes to."""
    text: str


_programs: dict[tuple[int, str], tuple[Any, TranslatedKernel]] = {}  # holds the kernel, so that its id stays unique


def run(grid: Any, kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Run a launch on CPU tensors."""
    name = kernel._pyfunc.__name__
    check_grid(name, grid)
    values = tuple(_plain(argument) for argument in arguments)
    shown = tuple(as_cuda(value) for value in values)
    signature = KernelSignature.from_kernel_args(kernel, shown, CallingConvention.cutile_python_v2())
    key = (id(kernel), signature.symbol or "")
    if key not in _programs:
        _programs[key] = (kernel, compile_program(kernel, signature))
    program = _programs[key][1]
    launch = Launch(name)
    sizes = (*(grid if isinstance(grid, tuple | list) else (grid,)), 1, 1)[:3]
    counts = tuple(map(np.int32, sizes))
    with np.errstate(all="ignore"):
        block = program.prepare(*counts, *_bind(program, launch, signature.parameters, values))
        for z, y, x in itertools.product(*(range(size) for size in reversed(sizes))):
            launch.block += 1
            block(np.int32(x), np.int32(y), np.int32(z))


def _plain(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.detach()
    if type(argument) in (tuple, list):
        return type(argument)(map(_plain, argument))
    return argument


# -- arguments -------------------------------------------------------------------------------------------------------


def _single_values(constraints: Any, values: Any) -> Iterator[tuple[Any, Any]]:
    """Return the kernel's run-time arguments: each value with the constraint that describes it."""
    for constraint, value in zip(constraints, values, strict=True):
        kind = type(constraint).__name__
        if kind == "TupleConstraint":
            yield from _single_values(constraint.items, value)
        elif kind != "ConstantConstraint":
            yield constraint, value


def _bind(program: TranslatedKernel, launch: Launch, constraints: Any, values: Any) -> list[Any]:
    singles = list(_single_values(constraints, values))
    tensors = [value for _, value in singles if isinstance(value, torch.Tensor)]
    written = {tensors[position].untyped_storage().data_ptr() for position in program.written}
    bound: list[Any] = []
    position, scalars = 0, iter(program.scalars)
    for constraint, value in singles:
        if not isinstance(value, torch.Tensor):
            bound.append(constant(value, next(scalars)))
            continue
        is_written = value.untyped_storage().data_ptr() in written
        bound.append(ArrayMemory(value, program.arrays[position], launch, position, is_written))
        bound.append(np.uint64(value.storage_offset()))
        index = host_dtype(constraint.index_dtype.name)
        bound.extend(map(index, (*value.shape, *value.stride())))
        position += 1
    return bound


# -- specialisation --------------------------------------------------------------------------------------------------


def compile_program(kernel: Any, signature: Any) -> TranslatedKernel:
    """Let cuTile infer every type and shape of a kernel, and translate the result into a Python function."""
    compiled = compile_tile(
        kernel._annotated_function,
        [signature],
        compiler_options=kernel._compiler_options,
        return_final_ir=True,
        return_cubin=False,
        bytecode_version=max(BytecodeVersion),
    )
    [body] = compiled.final_ir
    writer = Writer()
    names: list[str] = []
    arrays: list[str] = []
    scalars: list[str] = []
    parameters = iter(body.params)
    for constraint in _constraints(signature.parameters):
        if type(constraint).__name__ == "ScalarConstraint":
            names.append(writer.parameter(next(parameters)))
            scalars.append(constraint.dtype.name)
            continue
        base = next(parameters)
        memory = f"m{len(arrays)}"
        arrays.append(constraint.dtype.name)
        writer.memories[base.name] = memory
        names += [memory, writer.parameter(base)]
        names += [writer.parameter(next(parameters)) for _ in range(2 * constraint.ndim)]
    writer.block(body)
    text = writer.text(names)
    space = {**OBJECTS, **writer.objects}
    exec(compile(text, f"<{kernel._pyfunc.__name__}>", "exec"), space)
    written = frozenset(int(name[1:]) for name in writer.written)
    return TranslatedKernel(space["prepare"], tuple(arrays), tuple(scalars), written, text)


def _constraints(constraints: Any) -> Iterator[Any]:
    for constraint in constraints:
        kind = type(constraint).__name__
        if kind == "TupleConstraint":
            yield from _constraints(constraint.items)
        elif kind in ("ScalarConstraint", "ArrayConstraint"):
            yield constraint
        elif kind != "ConstantConstraint":
            raise SolutionError(
                f"The cuTile interpreter has no argument like {kind.removesuffix('Constraint')}.",
                code="not_interpreted",
            )


# ---- control ops ----------------------------------------------------------------------------------
# Control flow: blocks of the grid, loops, branches, assertions.


@emits("tile_bid")
def _block_index(writer: Writer, op: Any) -> None:
    writer.names[op.result_var.name] = f"block_{op.axis}"


@emits("tile_num_blocks")
def _block_count(writer: Writer, op: Any) -> None:
    writer.uniform(op.result_var, f"blocks_{op.axis}")


@emits("make_token", "join_tokens", "tile_printf")
def _nothing(writer: Writer, op: Any) -> None:
    """Write nothing: tokens only order operations, and printed text is not a result."""


@emits("assert")
def _assert(writer: Writer, op: Any) -> None:
    writer.line(f"require({writer.of(op.cond)}, {op.message!r})")


emits("loop")(Writer.loop)
emits("ifelse")(Writer.branch)
emits("continue")(lambda writer, op: writer.leave("loop", op.values, "continue"))
emits("break")(lambda writer, op: writer.leave("loop", op.values, "break"))
emits("end_branch")(lambda writer, op: writer.leave("branch", op.outputs, ""))
emits("return")(lambda writer, op: writer.line("return"))

"""Runs TileLang kernels on CPU tensors, as Triton's interpreter does, on machines without a GPU.

A kernel runs from the tree that TileLang's language makes of it, before any lowering. Wrong masks, indices, dtypes and roundings
show. An access outside of a tensor raises, and so do lanes that disagree. Errors of the compiler or the device do not show, such
as layouts, pipelines and missing barriers. An operation without a rule raises an error that names it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import tilelang  # noqa: F401 - its module of the same name as a function of it is patched below
import torch
from tvm import tirx

from tilegym_db.backends.stand_ins import pretend_device
from tilegym_db.backends.tilelang_interpreter.expressions import REDUCTIONS, SHUFFLES, Expressions, operation_of
from tilegym_db.backends.tilelang_interpreter.state import (
    Array,
    BlockMemory,
    GlobalMemory,
    KernelFault,
    LaneMemory,
    NotInterpreted,
    Slots,
    State,
    dtype_of,
    flat_memory,
)
from tilegym_db.backends.tilelang_interpreter.statements import Action, Statements

__all__ = ["InterpretedKernel", "KernelFault", "NotInterpreted", "install", "interpreting"]

DEVICE = "sm_90"
"""The target that stands in for the device of which a kernel's host code may ask."""

_for_good = ExitStack()


def install() -> None:
    """Make every ``@tilelang.jit`` factory of this process give interpreted kernels from now on."""
    _for_good.enter_context(interpreting())


@contextmanager
def interpreting() -> Iterator[None]:
    """Make every ``@tilelang.jit`` factory give interpreted kernels; undone on exit."""
    factory: Any = sys.modules["tilelang.jit"].JITImpl
    original = factory.compile

    def compile(self: Any, *args: Any, **named: Any) -> InterpretedKernel:
        return InterpretedKernel(self.get_tir(*args, **named), self.out_idx)

    factory.compile = compile
    try:
        with pretend_device(DEVICE):
            yield
    finally:
        factory.compile = original


# ---- Kernels ---------------------------------------------------------------------------------------------

_TORCH = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}


class InterpretedKernel:
    """A kernel that runs on CPU tensors and is called like the compiled one."""

    def __init__(self, function: Any, out_idx: Any = None) -> None:
        """Compile a ``T.prim_func``.

        Raises:
            NotInterpreted: it has a part that the interpreter has no rule for; the message names the kernel.
        """
        self.prim_func = function
        self.name = str(function.attrs["global_symbol"])
        if out_idx is not None and out_idx != []:
            raise NotInterpreted(
                f"{self.name}: no rule for out_idx; outputs are arguments here", code="not_interpreted"
            )
        self.params = list(function.params)
        self.buffers = {param: function.buffer_map[param] for param in self.params if param in function.buffer_map}
        self.program = self._named(lambda: Program(function))

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel on its arguments, in the order of its parameters."""
        if len(arguments) != len(self.params):
            raise ValueError(f"Kernel expected {len(self.params)} inputs, but {len(arguments)} are provided.")
        values: dict[Any, Any] = {}
        tensors = []
        pairs = list(zip(self.params, arguments, strict=True))
        for param, argument in pairs:
            if param in self.buffers:
                self._check_tensor(self.buffers[param], argument)
                _bind_sizes(self.buffers[param], argument, values)
            else:
                values[param] = self._scalar(param, argument)
        for param, argument in pairs:
            if param in self.buffers:
                buffer = self.buffers[param]
                self._check_sizes(buffer, argument, values)
                memory = flat_memory(argument, dtype_of(buffer.dtype))
                tensors.append((buffer, GlobalMemory(str(buffer.name), argument.shape, argument.stride(), memory)))
        self._named(lambda: self.program.run(values, tensors))

    def _named(self, action: Any) -> Any:
        """Add the kernel's name to errors."""
        try:
            return action()
        except (KernelFault, NotInterpreted) as error:
            raise type(error)(f"{self.name}: {error}", code=error.code) from error

    def _scalar(self, param: Any, value: Any) -> Any:
        dtype = dtype_of(param.dtype)
        if isinstance(value, torch.Tensor):
            raise RuntimeError(f"kernel {self.name}: {param.name} is a tensor, not a {param.dtype}")
        if dtype.kind in "iub" and isinstance(value, float):
            raise RuntimeError(f"kernel {self.name}: {param.name} is a float, not a {param.dtype}")
        return dtype.type(value) if dtype.kind in "iub" else np.float64(value).astype(dtype)

    def _check_tensor(self, buffer: Any, value: Any) -> None:
        where = f"kernel {self.name} input {buffer.name}"
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(f"{where} is a {type(value).__name__}, not a tensor")
        name = str(buffer.dtype)
        want = _TORCH.get(name) or getattr(torch, name, None)
        if want is None:
            raise NotInterpreted(f"{self.name}: no rule for a tensor of {name}", code="not_interpreted")
        if value.dtype != want:
            raise RuntimeError(f"{where} dtype is {value.dtype}, expected {name}")
        if value.ndim != len(buffer.shape):
            raise RuntimeError(f"{where} ndim is {value.ndim}, expected {len(buffer.shape)}")

    def _check_sizes(self, buffer: Any, value: torch.Tensor, values: dict[Any, Any]) -> None:
        where = f"kernel {self.name} input {buffer.name}"
        for axis, (size, found) in enumerate(zip(buffer.shape, value.shape, strict=True)):
            if (want := _evaluate(size, values)) != found:
                raise RuntimeError(
                    f"{where} shape[{axis}] violates packed ABI constraint; expected: {want}, got: {found}"
                )
        for axis, (step, found) in enumerate(zip(buffer.strides, value.stride(), strict=True)):
            # The stride of an axis with one element does not matter.
            if value.shape[axis] != 1 and (want := _evaluate(step, values)) != found:
                raise RuntimeError(
                    f"{where} strides[{axis}] violates packed ABI constraint; expected: {want}, got: {found}"
                )


def _bind_sizes(buffer: Any, value: torch.Tensor, values: dict[Any, Any]) -> None:
    """Set variables that stand for a size or a stride, unless they are set."""
    for expressions, found in ((buffer.shape, value.shape), (buffer.strides, value.stride())):
        for expression, number in zip(expressions, found, strict=True):
            if type(expression).__name__ == "Var" and expression not in values:
                values[expression] = dtype_of(expression.dtype).type(number)


def _evaluate(expression: Any, values: dict[Any, Any]) -> int:
    if type(expression).__name__ == "IntImm":
        return int(expression.value)
    slots = Slots()
    value = Expressions(slots).compile(expression)
    state = State(1, 1, [None] * slots.variables, [])
    for variable, number in values.items():
        slot = slots.variable(variable)
        if slot < len(state.values):
            state.values[slot] = number
    return int(value(state))


# ---- program --------------------------------------------------------------------------------------
# A kernel is compiled once from its tree, then run for one chunk of blocks after the other.

MAX_LANES = 1 << 15
MAX_ELEMENTS = 1 << 21
"""Approximate bytes that the buffers of a chunk of blocks hold together."""
MAX_BLOCKS = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
_AXES = {f"blockIdx.{axis}": number for number, axis in enumerate("xyz")}


class Program:
    """The actions of a kernel and the slots of its variables and buffers."""

    def __init__(self, function: Any) -> None:
        """Compile a ``T.prim_func``.

        Raises:
            NotInterpreted: it has a part that the interpreter has no rule for.
        """
        self.slots = Slots()
        self.expressions = Expressions(self.slots)
        self.statements = Statements(self.expressions, self._launch)
        self.action = self.statements.compile(function.body)

    def run(self, values: dict[Any, Any], tensors: Sequence[tuple[Any, GlobalMemory]]) -> None:
        """Run the program with the variables and tensors that its arguments bind."""
        for variable in values:
            self.slots.variable(variable)
        for buffer, _ in tensors:
            self.slots.buffer(buffer)
        state = State(1, 1, [None] * self.slots.variables, [None] * self.slots.buffers)
        for variable, value in values.items():
            state.values[self.slots.variable(variable)] = value
        for buffer, memory in tensors:
            state.memories[self.slots.buffer(buffer)] = memory
        with np.errstate(all="ignore"):
            self.action(state)

    def _launch(self, loop: Any) -> Action:
        """Return the action that runs the blocks of a launch, whose axes are nested loops."""
        axes: list[Any] = []
        while type(loop).__name__ == "For" and int(loop.kind) == 4:
            tag = str(loop.thread_binding.thread_tag)
            if tag not in _AXES:
                raise NotInterpreted(f"no rule for a loop bound to {tag}", code="not_interpreted")
            axes.append((_AXES[tag], self.slots.variable(loop.loop_var), self.expressions.compile(loop.extent)))
            loop = loop.body
        body = self.statements.compile(loop)
        shape, allocated, cluster = _block_of(loop)
        for buffer in allocated:
            self.slots.buffer(buffer)  # unused buffers need a slot too
        threads = shape if _uses_threads(loop) else (1, 1, 1)

        def launch(state: State) -> None:
            sizes = [1, 1, 1]
            for axis, _, extent in axes:
                sizes[axis] = int(extent(state))
            _check_launch(sizes, shape)
            total = sizes[0] * sizes[1] * sizes[2]
            step = _blocks_at_once(allocated, threads, cluster)
            for start in range(0, total, step):
                ids = np.arange(start, min(start + step, total), dtype=np.int64)[:, None]
                chunk = self._chunk(state, len(ids), threads, allocated)
                places = (ids % sizes[0], ids // sizes[0] % sizes[1], ids // (sizes[0] * sizes[1]))
                for axis, slot, _ in axes:
                    chunk.values[slot] = places[axis].astype(np.int32)
                body(chunk)

        return launch

    def _chunk(self, state: State, blocks: int, threads: Sequence[int], allocated: Sequence[Any]) -> State:
        count = threads[0] * threads[1] * threads[2]
        chunk = State(blocks, count, list(state.values), list(state.memories))
        lane = np.arange(count, dtype=np.int32)[None, :]
        chunk.notes["thread 0"] = lane % threads[0]
        chunk.notes["thread 1"] = lane // threads[0] % threads[1]
        chunk.notes["thread 2"] = lane // (threads[0] * threads[1])
        for buffer in allocated:
            chunk.memories[self.slots.buffer(buffer)] = _allocate(buffer, blocks, count)
        return chunk


def _block_of(node: Any) -> tuple[tuple[int, int, int], list[Any], int]:
    """Return the threads of a block, the buffers that it allocates, and the blocks of a cluster."""
    threads, cluster = [1, 1, 1], 1
    buffers: list[Any] = []

    def visit(part: Any) -> None:
        nonlocal cluster
        if type(part).__name__ != "SBlock":
            return
        buffers.extend(part.alloc_buffers)
        for key, value in part.annotations.items():
            if key == "tl.launch_threads":
                threads[:] = [int(size) for size in value]
            elif "cluster" in str(key):
                cluster = int(np.prod([int(size) for size in value]))

    tirx.stmt_functor.post_order_visit(node, visit)
    return (threads[0], threads[1], threads[2]), buffers, cluster


def _uses_threads(node: Any) -> bool:
    """Return True if a result depends on the thread; otherwise one thread stands for all threads of a block."""
    indices: list[Any] = []
    found = False

    def bound(part: Any) -> None:
        called = type(part).__name__ == "Bind" and type(part.value).__name__ == "Call"
        if called and operation_of(part.value) == "tl.launch_thread_idx":
            indices.append(part.var)

    def visit(part: Any) -> None:
        nonlocal found
        if type(part).__name__ == "Var":
            found |= any(part.same_as(index) for index in indices)
        elif type(part).__name__ == "Call":
            name = operation_of(part)
            found |= name in SHUFFLES or name in REDUCTIONS or "atomic" in name

    tirx.stmt_functor.post_order_visit(node, bound)
    tirx.stmt_functor.post_order_visit(node, visit)
    return found


def _check_launch(sizes: Sequence[int], threads: Sequence[int]) -> None:
    if 0 in sizes or any(size < 0 or size > most for size, most in zip(sizes, MAX_BLOCKS, strict=True)):
        raise KernelFault(f"is launched with a grid of {sizes}, which a device refuses", code="grid_out_of_range")
    if threads[0] * threads[1] * threads[2] > MAX_THREADS:
        raise KernelFault(
            f"is launched with {list(threads)} threads per block, more than {MAX_THREADS}", code="block_too_large"
        )


def _blocks_at_once(allocated: Sequence[Any], threads: Sequence[int], cluster: int) -> int:
    count = threads[0] * threads[1] * threads[2]
    elements = sum(
        _elements(buffer) * (count if buffer.scope().startswith("local") and "fragment" not in buffer.scope() else 1)
        for buffer in allocated
    )
    blocks = max(1, min(MAX_LANES // count, MAX_ELEMENTS // max(1, elements)))
    return max(1, blocks // cluster) * cluster


def _elements(buffer: Any) -> int:
    return int(np.prod([int(size) for size in buffer.shape], dtype=np.int64))


def _allocate(buffer: Any, blocks: int, threads: int) -> Array:
    scope, dtype = str(buffer.scope()), dtype_of(buffer.dtype)
    if any(type(size).__name__ != "IntImm" for size in buffer.shape):
        raise NotInterpreted(
            f"no rule for {buffer.name}, whose size is not known before the launch", code="not_interpreted"
        )
    shape = [int(size) for size in buffer.shape]
    if scope in ("local", "local.var"):
        return LaneMemory(str(buffer.name), shape, dtype, blocks, threads, zero=scope == "local.var")
    if scope in ("shared", "shared.dyn", "local.fragment"):
        return BlockMemory(str(buffer.name), shape, dtype, blocks)
    raise NotInterpreted(f"no rule for memory of the scope {scope}", code="not_interpreted")

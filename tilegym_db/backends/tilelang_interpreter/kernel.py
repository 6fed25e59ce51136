"""What a TileLang factory returns under the interpreter: takes the arguments of a launch, checks them, and runs the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilegym_db.backends.tilelang_interpreter.expressions import Expressions
from tilegym_db.backends.tilelang_interpreter.faults import KernelFault, NotInterpreted
from tilegym_db.backends.tilelang_interpreter.memory import GlobalMemory
from tilegym_db.backends.tilelang_interpreter.numbers import dtype_of, flat_memory
from tilegym_db.backends.tilelang_interpreter.program import Program
from tilegym_db.backends.tilelang_interpreter.slots import Slots
from tilegym_db.backends.tilelang_interpreter.state import State

__all__ = ["InterpretedKernel"]

_TORCH = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}


class InterpretedKernel:
    """A kernel that runs on CPU tensors; called as the compiled one would be."""

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
        """Run the kernel on its arguments, in the order of its parameters.

        Raises:
            RuntimeError: the generated host code would refuse the arguments.
            KernelFault: the kernel does what is undefined on a device.
        """
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
        """Errors that name the kernel."""
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
            # The stride of an axis of one element is of no account.
            if value.shape[axis] != 1 and (want := _evaluate(step, values)) != found:
                raise RuntimeError(
                    f"{where} strides[{axis}] violates packed ABI constraint; expected: {want}, got: {found}"
                )


def _bind_sizes(buffer: Any, value: torch.Tensor, values: dict[Any, Any]) -> None:
    """Give variables that stand for a size or a stride its value, where they have none."""
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

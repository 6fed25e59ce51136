"""The languages that run on a CPU, in an interpreter, and how a worker is made to interpret them.

A verdict from here says that the numbers are right at small sizes. It is of the tier ``interpreter`` and never one of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# ---- triton interpreter ---------------------------------------------------------------------------
# Makes the Triton interpreter compute with bfloat16 and 8-bit floats as hardware does, inside a worker process.
#
# The interpreter keeps bfloat16 values as raw 16-bit integers. Three of its operations forget what that means: a cast
# from float32 cuts the low bits off where hardware rounds to nearest even, a cast to float32 makes other numbers of
# subnormals, and ``tl.dot`` multiplies the integers. A cast from float32 to 8 bits rounds ties away from zero, and
# loses the carry where a value rounds up to a power of two. All are seen in Triton 3.6 and 3.9. A kernel must not be
# blamed, or excused, for any.


def repair_interpreter() -> None:
    """Replace these operations for the rest of this process. Call it before a Solution is loaded."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    broken: Any = interpreter
    convert_float, create_dot = broken._convert_float, broken.InterpreterBuilder.create_dot

    eight_bits = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def to_float32(data: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(data).view(np.int16)).view(torch.bfloat16).float().numpy()

    def to_bfloat16(data: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def to_eight_bits(data: Any, target: Any) -> Any:
        dtype = eight_bits[target]
        most = torch.finfo(dtype).max  # beyond, hardware gives the largest number
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.clamp(-most, most).to(dtype).view(torch.uint8).numpy()

    def cast(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bfloat16(data)
        if source == tl.bfloat16 and target == tl.float32:
            return to_float32(data).view(np.uint32)
        if source == tl.float32 and target in eight_bits and rounding_mode != broken._ir.ROUNDING_MODE.RTZ:
            return to_eight_bits(data, target)
        return convert_float(data, source, target, rounding_mode)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return broken.TensorHandle(to_float32(handle.data), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    broken._convert_float = cast
    broken.InterpreterBuilder.create_dot = dot


@dataclass(frozen=True)
class Interpreter:
    """The setup of one language's interpreter in a worker that runs only one Solution."""

    install: Callable[[], None]
    """Called in the worker before the Solution is loaded; for the rest of the process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the worker starts with."""


def _triton() -> None:

    repair_interpreter()


def _cutile() -> None:
    from tilegym_db.backends.cutile_interpreter import install

    install()


def _tilelang() -> None:
    from tilegym_db.backends.tilelang_interpreter import install

    install()


INTERPRETERS: dict[str, Interpreter] = {
    "triton": Interpreter(_triton, {"TRITON_INTERPRET": "1"}),
    "cutile": Interpreter(_cutile),
    "tilelang": Interpreter(_tilelang),
}


def interpreted_here(language: str, *, on_gpu: bool) -> bool:
    """Return True if a Solution in a language is interpreted on this machine, and so not timed."""
    return not on_gpu and language in INTERPRETERS

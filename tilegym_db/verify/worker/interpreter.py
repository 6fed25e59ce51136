"""Makes the Triton interpreter compute with bfloat16 as hardware does, inside a worker process.

The interpreter keeps bfloat16 values as raw 16-bit integers. Three of its operations forget what that means: a cast from
float32 cuts the low bits off where hardware rounds to nearest even, a cast to float32 makes other numbers of subnormals,
and ``tl.dot`` multiplies the integers. All are seen in Triton 3.6 and 3.9. A kernel must not be blamed, or excused, for any.
"""

from __future__ import annotations

from typing import Any

__all__ = ["repair_interpreter"]


def repair_interpreter() -> None:
    """Replace the three operations for the rest of this process. Call it before a Solution is loaded."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    broken: Any = interpreter
    convert_float, create_dot = broken._convert_float, broken.InterpreterBuilder.create_dot

    def to_float32(data: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(data).view(np.int16)).view(torch.bfloat16).float().numpy()

    def to_bfloat16(data: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def cast(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bfloat16(data)
        if source == tl.bfloat16 and target == tl.float32:
            return to_float32(data).view(np.uint32)
        return convert_float(data, source, target, rounding_mode)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return broken.TensorHandle(to_float32(handle.data), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    broken._convert_float = cast
    broken.InterpreterBuilder.create_dot = dot

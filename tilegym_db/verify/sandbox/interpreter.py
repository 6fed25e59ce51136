"""Makes the Triton interpreter compute with bfloat16 as hardware does, inside a worker process.

The interpreter keeps bfloat16 values as raw 16-bit integers. Two of its operations forget that: a cast from float32
cuts the low bits off where hardware rounds to nearest even, and ``tl.dot`` multiplies the integers. Both are seen in
Triton 3.6 and 3.9. A kernel must not be blamed, or excused, for either.
"""

from __future__ import annotations

from typing import Any

__all__ = ["repair_interpreter"]


def repair_interpreter() -> None:
    """Replace the two operations for the rest of this process. Call it before a Solution is loaded."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    broken: Any = interpreter
    convert_float, create_dot = broken._convert_float, broken.InterpreterBuilder.create_dot

    def rounded(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert_float(data, source, target, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.int16))
        return broken.TensorHandle(bits.view(torch.bfloat16).float().numpy(), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    broken._convert_float = rounded
    broken.InterpreterBuilder.create_dot = dot

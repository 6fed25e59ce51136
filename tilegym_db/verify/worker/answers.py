"""What a worker answers about a call: what is wrong with the values it returned, or which kind of error stopped it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["copy_returned", "is_compile_error", "is_memory_error"]

# How the languages' own compile errors are told from errors while running: by the class names along the exception chain.
COMPILE_ERROR_NAMES = ("Compil", "TileSyntax", "TileType", "TileValue", "TileUnsupported", "OutOfResources", "PTXAS")


def is_compile_error(error: BaseException) -> bool:
    """Whether an error, or what caused it, is a compiler's."""
    seen: BaseException | None = error
    while seen is not None:
        if any(part in type(seen).__name__ for part in COMPILE_ERROR_NAMES):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def is_memory_error(error: BaseException) -> bool:
    """Whether the GPU had no memory left, which other processes may have taken."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    # What CUDA itself says where not even a context fits.
    return isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)


def copy_returned(returned: Any, slot: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, str] | None:
    """Copy what a call returned to the outputs of its slot; where it does not fit, the kind of misfit and a sentence.

    Args:
        returned: one tensor, or several in a tuple or a list.
        slot: name -> tensor of the buffers.
        outputs: names of the outputs, in order.
    """
    import torch

    values = returned if isinstance(returned, tuple | list) else (returned,)
    if len(values) != len(outputs):
        return {"kind": "shape", "what": f"{len(values)} values returned, {len(outputs)} expected"}
    for name, value in zip(outputs, values, strict=True):
        target = slot[name]
        if type(value) is not torch.Tensor:
            return {"kind": "shape", "what": f"{name} is a {type(value).__name__}, not a plain tensor"}
        if value.shape != target.shape:
            return {"kind": "shape", "what": f"{name} has shape {list(value.shape)}, expected {list(target.shape)}"}
        if value.dtype != target.dtype:
            return {"kind": "dtype", "what": f"{name} has dtype {value.dtype}, expected {target.dtype}"}
        if value.device != target.device:
            return {"kind": "shape", "what": f"{name} is on {value.device}, expected {target.device}"}
        target.copy_(value)
    return None

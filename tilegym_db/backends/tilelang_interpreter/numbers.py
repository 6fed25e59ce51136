"""Numbers as a GPU computes them: TileLang's dtypes in NumPy, conversions between them, and tensors as arrays.

Arithmetic needs no rules here: NumPy rounds every operation to the dtype of its operands, as the device does, for
bfloat16 and the 8-bit formats through ``ml_dtypes``, and its integers wrap around.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from tilegym_db.backends.tilelang_interpreter.faults import NotInterpreted

__all__ = ["Array", "convert", "dtype_of", "flat_memory", "is_float", "poison", "reinterpret", "wide"]

Array = Any
"""A NumPy array or scalar."""

_DTYPES: dict[str, Any] = {
    **{
        name: np.dtype(name)
        for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    **{name: np.dtype(name) for name in ("float16", "float32", "float64")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_NARROW = {np.dtype(ml_dtypes.float8_e4m3fn): 448.0, np.dtype(ml_dtypes.float8_e5m2): 57344.0}
"""Formats to which a cast saturates, with their largest numbers."""
_FLOATS = frozenset(_DTYPES[name] for name in _DTYPES if name.startswith(("float", "bfloat")))
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(name: Any) -> Any:
    """The NumPy dtype of a scalar dtype of TileLang."""
    found = _DTYPES.get(str(name))
    if found is None:
        raise NotInterpreted(f"no rule for the dtype {name}", code="not_interpreted")
    return found


def is_float(dtype: Any) -> bool:
    """Whether it is one of the floating formats, the 8-bit ones included."""
    return dtype in _FLOATS


def wide(value: Array) -> Array:
    """A number of a 16-bit or 8-bit floating format as float32, any other as it is."""
    return value.astype(np.float32) if value.dtype.itemsize < 4 and is_float(value.dtype) else value


def convert(value: Array, target: Any) -> Array:
    """A cast: to nearest even, saturating to 8-bit formats, toward zero and saturating from floats to integers."""
    source = value.dtype
    if source == target:
        return value
    if is_float(source) and not is_float(target) and target != np.bool_:
        return _to_integer(value, target)
    if target in _NARROW:
        most = np.float32(_NARROW[target])
        return np.clip(value.astype(np.float32), -most, most).astype(target)  # NaN stays
    if is_float(target) and target.itemsize < 4 and not is_float(source):
        return value.astype(np.float32).astype(target)  # as the device's conversion operators do
    return value.astype(target)


def _to_integer(value: Array, target: Any) -> Array:
    """The device's conversion: NaN is 0; what 32 or 64 bits cannot hold becomes their end; fewer bits are cut from those."""
    held = target if target.itemsize >= 4 else np.dtype(np.int32)
    exact = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
    info = np.iinfo(held)
    inside = np.where(
        (exact >= -(2.0 ** (held.itemsize * 8))) & (exact < float(info.max) + 1) & (exact >= info.min), exact, 0
    )
    found = inside.astype(held)
    found = np.where(exact >= float(info.max) + 1, held.type(info.max), found)
    found = np.where(exact < info.min, held.type(info.min), found)
    return found.astype(target)


def reinterpret(value: Array, target: Any) -> Array:
    """The same bits as another dtype of the same size."""
    if value.dtype.itemsize != target.itemsize:
        raise NotInterpreted(f"no rule for reinterpreting {value.dtype} as {target}", code="not_interpreted")
    return np.array(value, order="C").view(target)


def poison(shape: tuple[int, ...] | int, dtype: Any) -> Array:
    """Memory that nobody has written: NaN, and numbers that no index may be."""
    if is_float(dtype):
        return (
            np.full(shape, np.nan, dtype=np.float32).astype(dtype)
            if dtype.itemsize < 4
            else np.full(shape, np.nan, dtype)
        )
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    return (
        np.full(shape, 0x6B, np.uint8).astype(dtype)
        if dtype.itemsize == 1
        else np.full(shape, np.iinfo(dtype).max // 5 * 2, dtype)
    )


def flat_memory(tensor: torch.Tensor, dtype: Any) -> Array:
    """The elements from a tensor's first to its last in memory, gaps included; one of no tensor's where it has none."""
    if tensor.numel() == 0:
        return poison(1, dtype)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.as_strided(tensor.detach(), (span,), (1,))
    if dtype == np.bool_:
        return flat.view(torch.uint8).numpy().view(np.bool_)
    return flat.view(_SAME_SIZE[dtype.itemsize]).numpy().view(dtype)

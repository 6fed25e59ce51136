"""Converts between dtype names of records and torch dtypes."""

from __future__ import annotations

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint32",
        "bool",
    )
} | {"float4_e2m1": torch.uint8}  # two codes a byte: torch's own packed dtype supports no arithmetic

_NAMES = {dtype: name for name, dtype in reversed(TORCH_DTYPES.items()) if name != "float4_e2m1"}


def storage_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that stores a record dtype; packed 4-bit floats are stored as bytes."""
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a torch dtype's name in records; raise ``KeyError`` if records cannot hold it."""
    return _NAMES[dtype]

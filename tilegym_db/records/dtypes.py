"""The dtype names of records, with storage size and kind; does not import torch."""

from __future__ import annotations

Scalar = bool | int | float | str | None
"""A value of a scalar input or a tunable, which JSON and DuckDB can both hold."""

# float4_e2m1 is stored packed, two codes per byte; cost formulas count half a byte.
DTYPE_BYTES: dict[str, float] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1": 0.5,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint32": 4,
    "bool": 1,
}
SHORT_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip
"""What people write for a dtype, for messages that suggest its name."""
STORED_BYTES: dict[str, int] = {name: max(1, int(size)) for name, size in DTYPE_BYTES.items()}
"""Stored bytes per element. An element of a packed tensor is one byte, and its shape counts bytes."""
CODE_DTYPES = frozenset(("float8_e4m3fn", "float8_e5m2", "float4_e2m1"))
"""Quantised formats, compared code by code."""
FLOAT_DTYPES = frozenset(name for name in DTYPE_BYTES if name.startswith(("float", "bfloat")))
INTEGER_DTYPES = frozenset(name for name in DTYPE_BYTES if name.startswith(("int", "uint")))
RECORD_DTYPES = frozenset(DTYPE_BYTES) - {"float64"}  # float64 is only for oracles, not for Definitions


def scalar_type(dtype: str) -> type:
    """Return the Python type of a scalar input of a dtype."""
    return bool if dtype == "bool" else int if dtype in INTEGER_DTYPES else float

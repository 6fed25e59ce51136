"""What a dialect allows: a table of rules, and the checks of single fields."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FIB_DTYPES",
    "STATUSES",
    "Problem",
    "Rules",
    "check_name",
    "check_optional_text",
    "check_text",
    "check_texts",
    "is_count",
    "is_one_of",
    "number",
]

Problem = tuple[str, str]
"""A key and why it is refused."""

FIB_DTYPES = frozenset(
    [
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float4_e2m1",
        "int64",
        "int32",
        "int16",
        "int8",
        "bool",
    ]
)

STATUSES = (
    "PASSED", "INCORRECT_SHAPE", "INCORRECT_NUMERICAL", "INCORRECT_DTYPE", "RUNTIME_ERROR", "COMPILE_ERROR", "TIMEOUT",
)  # fmt: skip

_UNSAFE = frozenset({".", ".."})


@dataclass(frozen=True)
class Rules:
    """Where dialects differ. ``dtypes`` None: any text; ``reference`` optional where a dialect writes none."""

    languages: frozenset[str]
    dtypes: frozenset[str] | None = FIB_DTYPES
    axis_kinds: frozenset[str] = frozenset({"const", "var"})
    const_needs_value: bool = True
    op_type_required: bool = True
    reference_required: bool = True
    entry_named_run: bool = True
    in_place_by_name: bool = False
    """An output may have the name of an input, which it then overwrites."""
    input_kinds: frozenset[str] = frozenset({"random", "safetensors", "scalar"})
    statuses: tuple[str, ...] = STATUSES
    languages_key: str = "language"
    sources_inline: bool = True
    destination_passing_default: bool = True
    binding_default: str | None = "tvm-ffi"


def check_text(record: Mapping[str, Any], key: str, where: str = "") -> Iterator[Problem]:
    """A key that must be there, with a text."""
    value = record.get(key)
    if key not in record:
        yield where + key, "missing key"
    elif not isinstance(value, str) or not value:
        yield where + key, f"must be a text that is not empty, not {value!r:.80}"


def check_name(record: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """A key that must be there, with a text that can be a part of a path."""
    yield from check_text(record, key)
    value = record.get(key)
    if isinstance(value, str) and value and (value in _UNSAFE or any(mark in value for mark in "/\\\0")):
        yield key, f"{value!r} is not safe as a part of a path"


def check_texts(record: Mapping[str, Any], key: str, where: str = "") -> Iterator[Problem]:
    """A list of texts, where it is there."""
    value = record.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        yield where + key, "must be a list of texts"


def check_optional_text(record: Mapping[str, Any], key: str, where: str = "") -> Iterator[Problem]:
    """A text or null, where it is there."""
    if not isinstance(record.get(key), str | None):
        yield where + key, f"must be a text or null, not {record[key]!r:.80}"


def is_one_of(value: Any, allowed: Collection[str]) -> bool:
    """Whether a value is a text and one of these; JSON may hold a list or an object there, which no set can be asked for."""
    return isinstance(value, str) and value in allowed


def number(value: Any) -> float | None:
    """A number of JSON that a float can hold; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_count(value: Any) -> bool:
    """Whether a value is a whole number that fits 64 bits, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63

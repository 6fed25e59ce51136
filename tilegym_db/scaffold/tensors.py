"""``x[M, N], weight[N], eps`` as the inputs of a Definition: what a person types, and what a record says."""

from __future__ import annotations

import re
from typing import Any

from tilegym_db.errors import UsageError
from tilegym_db.records.dtypes import RECORD_DTYPES

__all__ = ["axes_of", "parse_tensors"]

_ITEM = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\[(?P<shape>[^\]]*)\])?\s*(?::\s*(?P<dtype>\w+))?\s*(?:,|$)")
_SPELLING = (
    "Write tensors as name[AXIS, AXIS] or name[AXIS]:dtype and scalars as name or name:dtype, as in 'x[M, N], eps'."
)


def parse_tensors(option: str, text: str) -> dict[str, dict[str, Any]]:
    """Name -> ``{"shape": [...], "dtype": ...}``; a shape of None is a scalar. Tensors have the dtype variable T by default.

    Raises:
        UsageError: the text does not read so, a name is repeated, or a dtype is unknown.
    """
    found: dict[str, dict[str, Any]] = {}
    position = 0
    while position < len(text.rstrip()):
        match = _ITEM.match(text, position)
        if match is None:
            raise UsageError(f"{option}: cannot read {text[position:].strip()!r}. {_SPELLING}", code="tensor_syntax")
        name, shape = match["name"], match["shape"]
        dtype = match["dtype"] or ("float32" if shape is None else "T")
        if name in found:
            raise UsageError(f"{option}: '{name}' is given twice.", code="tensor_repeated")
        if dtype != "T" and dtype not in RECORD_DTYPES:
            raise UsageError(
                f"{option}: unknown dtype '{dtype}' of '{name}'; known: T, {', '.join(sorted(RECORD_DTYPES))}.",
                code="dtype_unknown",
            )
        if shape is not None and not shape.strip():
            raise UsageError(f"{option}: '{name}[]' has no axis. {_SPELLING}", code="axis_empty")
        if shape is not None and not all(part.strip() for part in shape.split(",")):
            raise UsageError(
                f"{option}: '{name}[{shape}]' lacks an axis beside a comma. {_SPELLING}", code="axis_empty"
            )
        entries = None if shape is None else _entries(shape)
        for entry in entries or ():
            if entry == 0 or (isinstance(entry, str) and not re.search("[A-Za-z_]", entry)):
                raise UsageError(
                    f"{option}: '{entry}' of '{name}' is no size: a whole number from 1, or an axis. {_SPELLING}",
                    code="tensor_size",
                )
        found[name] = {"shape": entries, "dtype": dtype}
        position = match.end()
    if not found:
        raise UsageError(f"{option}: names no tensor. {_SPELLING}", code="tensor_missing")
    return found


def _entries(shape: str) -> list[str | int]:
    parts = [part.strip() for part in shape.split(",")]
    return [int(part) if part.isascii() and part.isdecimal() else part for part in parts]


def axes_of(*groups: dict[str, dict[str, Any]]) -> list[str]:
    """Every axis that the shapes name, in the order in which they occur."""
    names: dict[str, None] = {}
    for group in groups:
        for spec in group.values():
            for entry in spec["shape"] or ():
                if isinstance(entry, str):
                    names.update(
                        dict.fromkeys(word for word in re.findall(r"[A-Za-z_]\w*", entry) if word != "ceil_div")
                    )
    return list(names)

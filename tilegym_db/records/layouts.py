"""Layouts: how a Workload lays a tensor out in memory, and which layouts a Solution declares it can read.

A Workload names concrete strides (``contiguous`` or ``strided(S*Hq*D, D, Hq*D, 1)``, in elements, over axes). A
Solution declares a class (:data:`LAYOUT_CLASSES`) per tensor; :func:`layout_class` says which class strides belong to. A
Definition names strides that are part of what it means, such as those of column-major scales.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tilegym_db.errors import RecordError
from tilegym_db.records.expressions import evaluate_int, parse_expression

__all__ = [
    "LAYOUT_CLASSES",
    "accepts",
    "contiguous_strides",
    "layout_class",
    "layout_strides",
    "overlaps",
    "parse_layout",
]

# Each class includes the ones before it.
LAYOUT_CLASSES: tuple[str, ...] = ("contiguous", "row_contiguous", "strided")

_STRIDED = re.compile(r"^strided\((.*)\)$", re.DOTALL)


def parse_layout(text: str) -> tuple[str, ...] | None:
    """None for ``contiguous``, else the stride expressions of ``strided(...)``; ``ValueError`` for anything else."""
    if text == "contiguous":
        return None
    match = _STRIDED.match(text)
    if not match:
        raise ValueError(f"layout {text!r} must be 'contiguous' or 'strided(<stride>, ...)'")
    entries = tuple(part.strip() for part in _split(match.group(1)))
    for entry in entries:
        try:
            parse_expression(entry)
        except RecordError as error:
            raise ValueError(f"layout {text!r}: {error}") from None
    return entries


def _split(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [*parts, current]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def layout_strides(text: str, shape: Sequence[int], axes: Mapping[str, int]) -> tuple[int, ...]:
    """The strides in elements that a Workload's layout gives a tensor of this shape.

    Raises:
        RecordError: not as many strides as dimensions, or a negative one.
    """
    entries = parse_layout(text)
    if entries is None:
        return contiguous_strides(shape)
    if len(entries) != len(shape):
        raise RecordError(f"layout {text!r} has {len(entries)} strides for {len(shape)} dimensions")
    strides = tuple(evaluate_int(entry, axes) for entry in entries)
    if any(stride < 0 for stride in strides):
        raise RecordError(f"layout {text!r} gives a negative stride: {strides}")
    return strides


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share an address; what is written must not. Dimensions that interleave count as overlapping."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


def layout_class(shape: Sequence[int], strides: Sequence[int]) -> str:
    """The narrowest class that holds a tensor of this shape and these strides; a dimension of size 1 has any stride."""
    if 0 in shape:
        return "contiguous"
    expected = contiguous_strides(shape)
    if all(size == 1 or stride == want for size, stride, want in zip(shape, strides, expected, strict=True)):
        return "contiguous"
    if not shape or shape[-1] == 1 or strides[-1] == 1:
        return "row_contiguous"
    return "strided"


def accepts(declared: str, found: str) -> bool:
    """True where a Solution that declares one class may be given a tensor of the other."""
    return LAYOUT_CLASSES.index(found) <= LAYOUT_CLASSES.index(declared)

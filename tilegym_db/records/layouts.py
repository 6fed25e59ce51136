"""Layouts: how a Workload lays a tensor out in memory, and which layouts a Solution declares it can read.

A Workload names concrete strides (``contiguous`` or ``strided(S*Hq*D, D, Hq*D, 1)``, in elements, over axes). A
Solution declares a class (:data:`LAYOUT_CLASSES`) per tensor; :func:`layout_class` says which class strides belong to. A
Definition names strides that are part of what it means, such as those of column-major scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from tilegym_db.errors import RecordError
from tilegym_db.records.expressions import evaluate_int, parse_expression

# Each class includes the ones before it.
LAYOUT_CLASSES: tuple[str, ...] = ("contiguous", "row_contiguous", "strided")

Overlap = Literal["none", "possible", "certain"]
MOST_COUNTED = 1 << 16
"""Elements whose addresses are counted one by one; that takes some 10 ms."""

_STRIDED = re.compile(r"^strided\((.*)\)$", re.DOTALL)


def parse_layout(text: str) -> tuple[str, ...] | None:
    """None for ``contiguous``, else the stride expressions of ``strided(...)``; :class:`RecordError` for anything else."""
    if text == "contiguous":
        return None
    match = _STRIDED.match(text)
    if not match:
        raise RecordError(f"layout {text!r} must be 'contiguous' or 'strided(<stride>, ...)'", code="layout_syntax")
    entries = tuple(part.strip() for part in _split(match.group(1)))
    for entry in entries:
        try:
            parse_expression(entry)
        except RecordError as error:
            raise RecordError(f"layout {text!r}: {error}", code=error.code) from None
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
    """Return the strides in elements that a Workload's layout gives a tensor of this shape.

    Raises:
        RecordError: it is no layout, or has not as many strides as dimensions, or a negative one.
    """
    entries = parse_layout(text)
    if entries is None:
        return contiguous_strides(shape)
    if len(entries) != len(shape):
        raise RecordError(f"layout {text!r} has {len(entries)} strides for {len(shape)} dimensions", code="layout_rank")
    strides = tuple(evaluate_int(entry, axes) for entry in entries)
    if any(stride < 0 for stride in strides):
        raise RecordError(f"layout {text!r} gives a negative stride: {strides}", code="stride_negative")
    return strides


def overlap(shape: Sequence[int], strides: Sequence[int]) -> Overlap:
    """Whether two elements have one address; what is written must not.

    Dimensions that interleave are ``possible`` where the elements are too many to count their addresses.
    """
    reach, interleave = 0, False
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride == 0 and 0 not in shape:
            return "certain"
        interleave |= stride <= reach
        reach += stride * (size - 1)
    if not interleave or 0 in shape:
        return "none"
    if math.prod(shape) > MOST_COUNTED:
        return "possible"
    addresses = {0}
    for stride, size in zip(strides, shape, strict=True):
        addresses = {address + stride * index for address in addresses for index in range(size)}
    return "certain" if len(addresses) < math.prod(shape) else "none"


def overlap_words(text: str, shape: Sequence[int], strides: Sequence[int]) -> str | None:
    """What to say of a layout that gives two elements one address, or may; None of any other."""
    found = overlap(shape, strides)
    verb = {"none": "", "possible": "may give", "certain": "gives"}[found]
    return f"{text} {verb} two elements of {list(shape)} one address" if verb else None


def layout_class(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the narrowest class that holds a tensor of this shape and these strides; a dimension of size 1 has any
    stride.
    """
    if 0 in shape:
        return "contiguous"
    expected = contiguous_strides(shape)
    if all(size == 1 or stride == want for size, stride, want in zip(shape, strides, expected, strict=True)):
        return "contiguous"
    if not shape or shape[-1] == 1 or strides[-1] == 1:
        return "row_contiguous"
    return "strided"


def accepts(declared: str, found: str) -> bool:
    """Return True if a Solution that declares one class may be given a tensor of the other."""
    return LAYOUT_CLASSES.index(found) <= LAYOUT_CLASSES.index(declared)

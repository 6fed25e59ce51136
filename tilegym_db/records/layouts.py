"""Layouts of tensors in memory: concrete strides in Workloads, and classes of strides that Solutions accept.

A Workload states ``contiguous`` or strides such as ``strided(S*Hq*D, D, Hq*D, 1)``, in elements over axes. A Solution
declares a class (:data:`LAYOUT_CLASSES`) per tensor, and :func:`layout_class` returns the class of strides. A Definition
states strides that are part of the operator, such as those of column-major scales.

A fuzz case also states inputs in the memory of another input: ``strided(384, 1)@q+128`` begins 128 elements behind the first
one of ``q``. Such inputs are parts of one projection, lie behind each other, or are one tensor that is passed twice (``@q+0``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from tilegym_db.errors import RecordError
from tilegym_db.records.expressions import evaluate_int, parse_expression

# Each class includes the previous ones.
LAYOUT_CLASSES: tuple[str, ...] = ("contiguous", "row_contiguous", "strided")

Overlap = Literal["none", "possible", "certain"]
MAX_COUNTED_ELEMENTS = 1 << 16
"""Maximum number of elements whose addresses are counted one by one; takes about 10 ms."""

_STRIDED = re.compile(r"^strided\((.*)\)(?:@([A-Za-z_]\w*)\+(\d+))?$", re.DOTALL)


def parse_layout(text: str) -> tuple[str, ...] | None:
    """Return the stride expressions of ``strided(...)``, None for ``contiguous``; raise :class:`RecordError` for other texts."""
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


def shared_place(text: str | None) -> tuple[str, int] | None:
    """Return the tensor in whose memory a layout begins and the elements from its first one; None for separate memory."""
    match = _STRIDED.match(text or "")
    return (match.group(2), int(match.group(3))) if match and match.group(2) else None


def spelled(strides: Sequence[int], place: tuple[str, int] | None = None) -> str:
    """Return the text of a layout, the inverse of :func:`layout_strides` and :func:`shared_place`."""
    return f"strided({', '.join(map(str, strides))})" + (f"@{place[0]}+{place[1]}" if place else "")


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
    """Return row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first of a tensor to its last in memory, gaps included; 0 without elements."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def layout_strides(text: str, shape: Sequence[int], axes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the strides in elements that a layout gives a tensor of this shape.

    Raises:
        RecordError: the layout is invalid, has a wrong number of strides, or has a negative one.
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
    """Return ``certain`` if two elements share an address, which must not happen in written tensors; else ``none``.

    The result is ``possible`` if dimensions interleave and the elements are too many to count their addresses.
    """
    reach, interleave = 0, False
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride == 0 and 0 not in shape:
            return "certain"
        interleave |= stride <= reach
        reach += stride * (size - 1)
    if not interleave or 0 in shape:
        return "none"
    if math.prod(shape) > MAX_COUNTED_ELEMENTS:
        return "possible"
    addresses = {0}
    for stride, size in zip(strides, shape, strict=True):
        addresses = {address + stride * index for address in addresses for index in range(size)}
    return "certain" if len(addresses) < math.prod(shape) else "none"


def overlap_words(text: str, shape: Sequence[int], strides: Sequence[int]) -> str | None:
    """Return a message about a layout in which two elements share an address, or may; None for other layouts."""
    found = overlap(shape, strides)
    verb = {"none": "", "possible": "may give", "certain": "gives"}[found]
    return f"{text} {verb} two elements of {list(shape)} one address" if verb else None


def layout_class(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the narrowest class of a shape and strides; a dimension of size 1 fits any stride."""
    if 0 in shape:
        return "contiguous"
    expected = contiguous_strides(shape)
    if all(size == 1 or stride == want for size, stride, want in zip(shape, strides, expected, strict=True)):
        return "contiguous"
    if not shape or shape[-1] == 1 or strides[-1] == 1:
        return "row_contiguous"
    return "strided"


def accepts(declared: str, found: str) -> bool:
    """Return True if a Solution that declares one class accepts a tensor of the other."""
    return LAYOUT_CLASSES.index(found) <= LAYOUT_CLASSES.index(declared)

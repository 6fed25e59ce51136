"""How far measured points reach: inside the range of every axis, and beyond it along axes that only repeat work. Pure.

Whether a model has 8 or 16 heads of keys, each head is the same work: a kernel that was verified over the fuzz cases, and is
faster at points that differ in their heads, is no other for more of them. That is not taken on trust alone. The Definition must
say so of the axis, several of its sizes must have been measured, the size must be near them, and the amount of work as a whole
must lie inside of what was measured: below it a launch decides what is faster, above it a kernel may run out of its integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilegym_db.records import Definition

__all__ = ["FARTHEST", "LEAST_SIZES", "axes_beyond"]

LEAST_SIZES = 2
"""So many sizes of an axis must have been measured before it is believed that more of it is only more work."""
FARTHEST = 4
"""A size is at most so many times the largest that was measured, or one part in so many of the smallest."""

Axes = Mapping[str, int]


def axes_beyond(
    definition: Definition, asked: Axes, dtypes: Mapping[str, str], points: Sequence[Axes]
) -> tuple[str, ...] | str:
    """The axes whose measured range a request is beyond, harmlessly; or why no point says anything about it.

    Args:
        definition: the operator.
        asked: every axis of the request.
        dtypes: every dtype of the request, which is that of the points.
        points: the axes of the measured points; at least one.
    """
    beyond = []
    for name in definition.var_axes:
        sizes = {point[name] for point in points}
        if min(sizes) <= asked[name] <= max(sizes):
            continue
        outside = f"{name}={asked[name]} is outside the measured range {min(sizes)}..{max(sizes)}"
        group = _group_of(definition, name)
        if not group:
            return outside
        why = _why_far(asked[name], sizes) or _why_other_ratio(name, group, asked, points)
        if why:
            return f"{outside}, and {why}"
        beyond.append(name)
    if beyond:
        why = _why_other_work(definition, asked, dtypes, points)
        if why:
            return f"{beyond[0]}={asked[beyond[0]]} was not measured, and {why}"
    return tuple(beyond)


def _group_of(definition: Definition, name: str) -> tuple[str, ...]:
    groups = () if definition.serving is None else definition.serving.independent
    return next((group for group in groups if name in group), ())


def _why_far(size: int, sizes: set[int]) -> str:
    if len(sizes) < LEAST_SIZES:
        return f"{len(sizes)} measured size does not show that more of it is only more work"
    if size > FARTHEST * max(sizes) or size * FARTHEST < min(sizes):
        return f"further from it than a factor of {FARTHEST}"
    return ""


def _why_other_ratio(name: str, group: Sequence[str], asked: Axes, points: Sequence[Axes]) -> str:
    """Why the ratio of an axis to one of its group is another than those that were measured."""
    for other in group:
        if other == name or not asked[other]:
            continue
        known = [point[name] / point[other] for point in points if point[other]]
        ratio = asked[name] / asked[other]
        if not known or not min(known) <= ratio <= max(known):
            measured = f"{min(known):g}..{max(known):g}" if known else "none"
            return f"so is {name}/{other}={ratio:g} (measured: {measured})"
    return ""


def _why_other_work(definition: Definition, asked: Axes, dtypes: Mapping[str, str], points: Sequence[Axes]) -> str:
    """Why the work of a request, in bytes that must move, is less or more than that of all points."""
    work = definition.cost_of(asked, dtypes)[1]
    known = [definition.cost_of({**asked, **point}, dtypes)[1] for point in points]
    if min(known) <= work <= max(known):
        return ""
    return f"its {_megabytes(work)} MB are outside the measured {_megabytes(min(known))}..{_megabytes(max(known))} MB"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.3g}"

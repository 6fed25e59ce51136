"""The measured point that a request is judged by: the exact one, else the nearest in log space, else the reason for none.

How far from the measured points a request may be is decided by :mod:`tilegym_db.resolver.reach`.

This goes through all entries and is what a point means; :mod:`tilegym_db.resolver.index` finds exact ones sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilegym_db.records import Definition, axes_key
from tilegym_db.records.binding import is_code_selecting
from tilegym_db.records.dtypes import Scalar
from tilegym_db.resolver.reach import axes_beyond
from tilegym_db.resolver.request import Request
from tilegym_db.resolver.table import Entry, ResolverTable

__all__ = [
    "CONTIGUOUS",
    "MeasuredPoint",
    "equal_scalars",
    "find_point",
    "layouts_match",
    "outside_scalars",
    "selecting_scalars",
]

CONTIGUOUS = "contiguous"


class MeasuredPoint(NamedTuple):
    """A measured point, whether it is the request's own, and the independent axes whose measured range the request is beyond."""

    entry: Entry
    exact: bool
    beyond: tuple[str, ...] = ()


def find_point(request: Request, table: ResolverTable) -> MeasuredPoint | str:
    """The point to judge by, or why there is none."""
    definition = request.definition
    entries: Sequence[Entry] = table.believed_entries(definition, request.dtypes)
    if not entries:
        return _why_no_entries(request, table)
    entries = [entry for entry in entries if entry.definition_digest == definition.digest]
    if not entries:
        return f"{definition.name} was measured on {table.gpu} under another meaning than version {definition.version}"
    selecting = {name: request.scalars.get(name) for name in selecting_scalars(definition) if name in request.scalars}
    entries = [entry for entry in entries if equal_scalars(entry, selecting) == len(selecting)]
    if not entries:
        return f"{definition.name} was not measured on {table.gpu} with these code-selecting scalars"
    entries = [entry for entry in entries if layouts_match(entry, request.layouts, definition)]
    if not entries:
        spelled = ", ".join(f"{name} {layout}" for name, layout in sorted(request.layouts.items())) or "all contiguous"
        return f"{definition.name} was not measured on {table.gpu} with these layouts ({spelled})"
    sizes = {name: request.axes[name] for name in definition.var_axes}  # const axes are the same everywhere
    exact = [entry for entry in entries if all(entry.axes[name] == size for name, size in sizes.items())]
    if exact:
        return MeasuredPoint(max(exact, key=lambda entry: equal_scalars(entry, request.scalars)), exact=True)
    beyond = axes_beyond(definition, request.axes, request.dtypes, [entry.axes for entry in entries])
    if isinstance(beyond, str):
        return beyond
    nearest = min(entries, key=lambda entry: (entry.log_distance(sizes), axes_key(dict(entry.axes))))
    return MeasuredPoint(nearest, exact=False, beyond=beyond)


def selecting_scalars(definition: Definition) -> tuple[str, ...]:
    """Scalars that select code, which must be equal; a continuous one such as eps does not change what is fastest."""
    return tuple(
        name for name, spec in definition.inputs.items() if spec.is_scalar and is_code_selecting(definition, name)
    )


def outside_scalars(
    definition: Definition, scalars: Mapping[str, Scalar], ranges: Mapping[str, tuple[float, float]]
) -> str | None:
    """Why a continuous scalar of a call is none that was verified; None where each lies within its range or has none."""
    for name, value in scalars.items():
        if name not in ranges or name in definition.size_scalars or is_code_selecting(definition, name):
            continue
        if not isinstance(value, int | float):
            continue
        low, high = ranges[name]
        if not low <= value <= high:  # NaN is outside, too
            return f"{name}={value:g} is outside the verified range {low:g}..{high:g}"
    return None


def equal_scalars(entry: Entry, scalars: Mapping[str, Scalar]) -> int:
    """How many scalars have the value that was measured."""
    return sum(entry.scalars.get(name) == value for name, value in scalars.items())


def layouts_match(entry: Entry, layouts: Mapping[str, str], definition: Definition) -> bool:
    """Verified and timed for these layouts: each tensor of the same class, outputs only where stated."""
    for name, spec in definition.inputs.items():
        if not spec.is_scalar and entry.layouts.get(name, CONTIGUOUS) != layouts.get(name, CONTIGUOUS):
            return False
    return all(
        name not in layouts or entry.layouts.get(name, CONTIGUOUS) == layouts[name] for name in definition.outputs
    )


def _why_no_entries(request: Request, table: ResolverTable) -> str:
    measured = [", ".join(f"{k}={v}" for k, v in dtypes.items()) for dtypes in table.dtypes_of(request.definition.name)]
    if not measured:
        return f"{request.definition.name} was not measured on {table.gpu}"
    asked = ", ".join(f"{name}={dtype}" for name, dtype in request.dtypes.items())
    return f"{request.definition.name} was not measured on {table.gpu} with {asked} (measured: {'; '.join(measured)})"

"""Sizes that no shape shows: axes that are the value of a whole-number scalar (K of a top-k, a block size, an alignment).

Such an axis is one like any other: a Workload states its size, constraints, cost and shapes name it, fuzz cases vary it, and
measured points are compared by it. The scalar always has the axis's size.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilegym_db.errors import UsageError
from tilegym_db.records.definition import Definition
from tilegym_db.records.dtypes import Scalar

__all__ = ["axes_with_scalars", "scalars_with_axes", "sizes_of_scalars"]


def sizes_of_scalars(definition: Definition, scalars: Mapping[str, Scalar]) -> dict[str, int]:
    """Axis -> size, for every axis whose scalar is among those given.

    Raises:
        UsageError: such a scalar is no whole number, or is negative.
    """
    sizes: dict[str, int] = {}
    for scalar, axis in definition.size_scalars.items():
        if scalar not in scalars:
            continue
        value = scalars[scalar]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(
                f"'{scalar}' of {definition.name} is the size of axis '{axis}': a whole number, not {value!r}.",
                code="size_scalar_invalid",
            )
        sizes[axis] = value
    return sizes


def axes_with_scalars(definition: Definition, axes: Mapping[str, int], scalars: Mapping[str, Scalar]) -> dict[str, int]:
    """The axes of a call, with those that only a scalar states.

    Raises:
        UsageError: an axis and its scalar contradict each other.
    """
    sizes = sizes_of_scalars(definition, scalars)
    for axis, size in sizes.items():
        if axes.get(axis, size) != size:
            scalar = definition.axes[axis].scalar
            raise UsageError(
                f"axis {axis}={axes[axis]} of {definition.name} is the scalar '{scalar}', which is {size}.",
                code="size_scalar_differs",
            )
    return {**axes, **sizes}


def scalars_with_axes(
    definition: Definition, scalars: Mapping[str, Scalar], axes: Mapping[str, int]
) -> dict[str, Scalar]:
    """The scalars of a call whose sizes are known: those that are a size have that of their axis."""
    sizes = {scalar: axes[axis] for scalar, axis in definition.size_scalars.items() if axis in axes}
    return {**scalars, **sizes}

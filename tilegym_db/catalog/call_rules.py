"""What the names of scalars and the places of inputs say, which no record of an operator states.

A record bounds axes alone: a negative eps or count fits its dtype, and the results of it are NaN, or none. Contents cannot be
drawn for an input of which two elements have one address, nor can an output be written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.layouts import overlap_words

__all__ = ["check_call", "check_layouts", "check_scalar_values"]

# Pattern over the name of a scalar -> why it is not negative.
NOT_NEGATIVE: tuple[tuple[str, str], ...] = (
    (r"(^|_)eps(ilon)?$", "it keeps a divisor or a root above zero"),
    (r"^(num|block)_|^(top_k|group|groups|kept_groups|block|alignment|streams|repeat|shifts)$", "it counts something"),
)


def check_call(definition: Definition, workload: Workload) -> None:
    """Raise :class:`RecordError` where a Workload does not fit its Definition, or has a scalar or a layout that makes no call."""
    workload.check_against(definition)
    check_scalar_values(definition, workload.scalars())
    check_layouts(definition, workload.axes, workload.layouts)


def check_scalar_values(definition: Definition, scalars: Mapping[str, Scalar]) -> None:
    """Raise :class:`RecordError` for a scalar whose value its name excludes, or that is a flag where a number is due."""
    for name, value in scalars.items():
        spec = definition.inputs.get(name)
        if spec is not None and isinstance(value, bool) and spec.dtype != "bool":
            raise RecordError(
                f"inputs.{name}: {str(value).lower()} is not a number ({spec.dtype}).", code="scalar_not_number"
            )
        why = next((reason for pattern, reason in NOT_NEGATIVE if re.search(pattern, name)), None)
        if why is not None and isinstance(value, int | float) and value < 0:
            raise RecordError(
                f"inputs.{name}: {value!r} is negative, and '{name}' of {definition.name} is not: {why}.",
                code="scalar_negative",
            )


def check_layouts(definition: Definition, axes: Mapping[str, int], layouts: Mapping[str, str]) -> None:
    """Raise :class:`RecordError` for a layout that is none, or that gives two elements of a tensor one address."""
    sizes = definition.bind_axes(dict(axes)) if layouts else {}
    for name, text in layouts.items():
        if name in definition.tensor_inputs or name in definition.outputs:
            shape = definition.shape_of(name, sizes)
            try:
                shared = overlap_words(text, shape, definition.strides_of(name, sizes, text))
            except RecordError as error:
                raise RecordError(f"layouts.{name}: {str(error).rstrip('.')}.", code=error.code) from None
            if shared is not None:
                raise RecordError(f"layouts.{name}: {shared}.", code="layout_overlap")

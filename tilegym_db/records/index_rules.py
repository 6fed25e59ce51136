"""What outputs of indices point into, and what other outputs follow from them.

Each rule raises :class:`ValueError` with the culprit's key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilegym_db.records.definition_parts import TensorSpec
from tilegym_db.records.dtypes import INTEGER_DTYPES
from tilegym_db.records.python_source import function_parameters

__all__ = ["ROUNDING", "check_follows", "check_gathers"]

ROUNDING = "rounding"
"""The parameter by which a function of a reference is told how far equal values may lie apart, relative to themselves."""

Specs = Mapping[str, TensorSpec]


def check_gathers(
    gathers: Mapping[str, str],
    unordered: Sequence[str],
    inputs: Specs,
    outputs: Specs,
    dtypes: Mapping[str, tuple[str, ...]],
    reference: str,
) -> None:
    """An output of indices is of integers, and has the shape of what they point into but for the last axis."""
    for output, source in gathers.items():
        if output not in outputs:
            raise ValueError(f"gathers '{output}': no such output")
        indices, values = outputs[output], {**inputs, **outputs}.get(source)
        choices = dtypes.get(indices.dtype, (indices.dtype,))
        if not INTEGER_DTYPES.issuperset(choices):
            raise ValueError(f"gathers '{output}': its dtype is {', '.join(choices)}, and indices are integers")
        if values is None and source.isidentifier() and function_parameters(reference, source) is not None:
            if not indices.shape:
                raise ValueError(f"gathers '{output}': it has no axis of choices")
            _check_function(f"gathers '{output}'", source, reference, tuple(inputs), (output,))
            continue
        if values is None or source == output:
            raise ValueError(
                f"gathers '{output}': '{source}' must be an input or another output, or a function of the reference"
            )
        if not indices.shape or not values.shape or indices.shape[:-1] != values.shape[:-1]:
            raise ValueError(f"gathers '{output}': '{source}' must have its shape but for the last axis")
    for output in unordered:
        if output not in gathers or gathers[output] in {**inputs, **outputs}:
            raise ValueError(f"unordered names '{output}', which gathers no values of a function of the reference")


def check_follows(
    follows: Mapping[str, str], gathers: Mapping[str, str], inputs: Specs, outputs: Specs, reference: str
) -> None:
    """An output that follows from indices is given by a function of the inputs and the indices."""
    for output, function in follows.items():
        if output not in outputs or output in gathers:
            raise ValueError(f"follows '{output}': it must be an output that is no output of indices")
        if not gathers:
            raise ValueError(f"follows '{output}': no output of indices is named in 'gathers'")
        _check_function(f"follows '{output}'", function, reference, tuple(inputs), tuple(gathers))


def _check_function(
    where: str, function: str, reference: str, inputs: tuple[str, ...], indices: tuple[str, ...]
) -> None:
    found = function_parameters(reference, function)
    if found is None:
        raise ValueError(f"{where}: the reference defines no function '{function}'")
    allowed = (*indices, ROUNDING)
    if found[: len(inputs)] != inputs or not set(found[len(inputs) :]) <= set(allowed):
        raise ValueError(
            f"{where}: {function}({', '.join(found)}) must take the inputs in order ({', '.join(inputs)}), and then "
            f"none, some or all of {', '.join(allowed)}"
        )

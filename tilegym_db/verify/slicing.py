"""Evaluates a reference slice by slice along axes whose slices do not depend on each other, to bound the memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilegym_db.records import Definition
from tilegym_db.records.expressions import names_in

__all__ = ["ORACLE_BYTES", "sliced"]

ORACLE_BYTES = 4 << 30
"""Default budget of one evaluation, inputs and outputs in fp64 and what lies between them together."""

_BYTES_PER_ELEMENT = 8 * 4
"""An element in fp64, and as much again three times for the intermediate results that are alive with it."""

Inputs = Mapping[str, Any]
Outputs = dict[str, torch.Tensor]


def sliced(
    definition: Definition, inputs: Inputs, run: Callable[[Definition, Inputs], Outputs], *, budget_bytes: int
) -> Outputs:
    """Every output of ``run``, put together from halves of the inputs, of halves of these, until each fits the budget.

    The memory of an evaluation is estimated from the elements of its inputs and outputs, and of one slice of each sliced input.
    Along which of the Definition's ``independent_axes`` to halve is decided by what it saves; the whole is evaluated where none
    can be halved any more.

    Args:
        definition: says which axes are independent.
        inputs: input name -> tensor or scalar.
        run: evaluates the reference.
        budget_bytes: of one evaluation.
    """
    sizes = _axis_sizes(definition, inputs)
    if _estimate(definition, inputs, sizes) <= budget_bytes:
        return run(definition, inputs)
    axis = max(
        (name for name in _divisible_axes(definition) if sizes.get(name, 0) > 1),
        key=lambda name: _elements_along(definition, inputs, name),
        default=None,
    )
    if axis is None:
        return run(definition, inputs)
    half = sizes[axis] // 2
    parts = [
        sliced(definition, _part(definition, inputs, axis, start, length), run, budget_bytes=budget_bytes)
        for start, length in ((0, half), (half, sizes[axis] - half))
    ]
    return {
        name: torch.cat([part[name] for part in parts], dim=_dimension(spec.shape, axis))
        for name, spec in definition.outputs.items()
    }


def _divisible_axes(definition: Definition) -> list[str]:
    """The independent axes that every output has, and that no tensor has in an expression or twice."""
    specs = [spec for spec in (*definition.inputs.values(), *definition.outputs.values()) if spec.shape]
    entangled = {
        name
        for spec in specs
        for entry in spec.shape or ()
        if isinstance(entry, str)
        for name in names_in(entry)[0]
        if entry != name or (spec.shape or ()).count(entry) > 1
    }
    return [
        axis
        for axis in definition.independent_axes
        if axis not in entangled and all(axis in (spec.shape or ()) for spec in definition.outputs.values())
    ]


def _axis_sizes(definition: Definition, inputs: Inputs) -> dict[str, int]:
    stated = {axis: inputs[scalar] for scalar, axis in definition.size_scalars.items()}
    return stated | {
        entry: size
        for name, spec in definition.inputs.items()
        for entry, size in zip(spec.shape or (), getattr(inputs[name], "shape", ()), strict=True)
        if isinstance(entry, str)
    }


def _estimate(definition: Definition, inputs: Inputs, sizes: Mapping[str, int]) -> int:
    given = sum(int(inputs[name].numel()) // _slices(definition, sizes, name) for name in definition.tensor_inputs)
    made = 0
    for spec in definition.outputs.values():
        elements = 1
        for entry in spec.shape or ():
            # An output's own expression (ceil_div(H, G)) is of a scale or an index: small beside what it belongs to.
            elements *= entry if isinstance(entry, int) else sizes.get(entry, 1)
        made += elements
    return (given + made) * _BYTES_PER_ELEMENT


def _slices(definition: Definition, sizes: Mapping[str, int], name: str) -> int:
    """How many slices an input is taken in, of which one is widened at a time."""
    return max(1, sizes.get(definition.sliced_inputs.get(name, ""), 1))


def _elements_along(definition: Definition, inputs: Inputs, axis: str) -> int:
    return sum(
        inputs[name].numel() for name in definition.tensor_inputs if axis in (definition.inputs[name].shape or ())
    )


def _part(definition: Definition, inputs: Inputs, axis: str, start: int, length: int) -> dict[str, Any]:
    part = dict(inputs)
    for name, spec in definition.inputs.items():
        if axis in (spec.shape or ()):  # a reference may count on contiguous inputs
            part[name] = inputs[name].narrow(_dimension(spec.shape, axis), start, length).contiguous()
    return part


def _dimension(shape: tuple[str | int, ...] | None, axis: str) -> int:
    return (shape or ()).index(axis)

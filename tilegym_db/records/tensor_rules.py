"""What holds between the tensors of a Definition: what is written in place, what indices point into, what gradients are named.

Each rule raises :class:`ValueError` with the culprit's key.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilegym_db.records.definition_parts import TensorSpec
from tilegym_db.records.dtypes import INTEGER_DTYPES

__all__ = ["GRADIENT", "check_backward", "check_gathers", "check_in_place"]

GRADIENT = "grad_"
"""How the gradient of a tensor is named in a backward Definition."""

Specs = Mapping[str, TensorSpec]


def check_in_place(in_place: Mapping[str, str], inputs: Specs, outputs: Specs) -> None:
    """An output written over an input has its shape and dtype."""
    for source, target in in_place.items():
        if source not in inputs or target not in outputs:
            raise ValueError(f"in_place '{source}': '{target}' must map an input to an output")
        one, two = inputs[source], outputs[target]
        if one.shape != two.shape or one.dtype != two.dtype:
            raise ValueError(f"in_place '{source}' and '{target}' differ in shape or dtype")


def check_backward(
    name: str, backward_of: str | None, inputs: Specs, outputs: Specs, in_place: Mapping[str, str]
) -> None:
    """A backward takes and gives gradients, and overwrites nothing."""
    if backward_of is None:
        return
    if backward_of == name:
        raise ValueError(f"backward_of names the definition itself, '{name}'")
    if not any(tensor.startswith(GRADIENT) for tensor in inputs):
        raise ValueError(f"backward_of needs an input '{GRADIENT}<output of {backward_of}>'")
    for tensor in outputs:
        if not tensor.startswith(GRADIENT):
            raise ValueError(f"outputs.{tensor} of a backward must be named '{GRADIENT}<input of {backward_of}>'")
    if in_place:
        raise ValueError("a backward overwrites none of its inputs: others may read them after it")


def check_gathers(
    gathers: Mapping[str, str], inputs: Specs, outputs: Specs, dtypes: Mapping[str, tuple[str, ...]]
) -> None:
    """An output of indices is of integers, and has the shape of what they point into but for the last axis."""
    for output, source in gathers.items():
        if output not in outputs:
            raise ValueError(f"gathers '{output}': no such output")
        indices, values = outputs[output], {**inputs, **outputs}.get(source)
        choices = dtypes.get(indices.dtype, (indices.dtype,))
        if not INTEGER_DTYPES.issuperset(choices):
            raise ValueError(f"gathers '{output}': its dtype is {', '.join(choices)}, and indices are integers")
        if values is None or source == output:
            raise ValueError(f"gathers '{output}': '{source}' must be an input or another output")
        if not indices.shape or not values.shape or indices.shape[:-1] != values.shape[:-1]:
            raise ValueError(f"gathers '{output}': '{source}' must have its shape but for the last axis")

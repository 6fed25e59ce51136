"""What holds between the tensors of a Definition: what they are made of, what is written in place, what gradients are named.

Each rule raises :class:`ValueError` with the culprit's key.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilegym_db.errors import RecordError
from tilegym_db.records.definition_parts import Axis, Cost, TensorSpec
from tilegym_db.records.dtypes import INTEGER_DTYPES, RECORD_DTYPES
from tilegym_db.records.expressions import names_in

__all__ = ["GRADIENT", "check_backward", "check_expressions", "check_in_place", "check_sizes", "check_tensors"]

GRADIENT = "grad_"
"""How the gradient of a tensor is named in a backward Definition."""

Specs = Mapping[str, TensorSpec]
DTypes = Mapping[str, tuple[str, ...]]


def check_tensors(axes: Mapping[str, Axis], dtypes: DTypes, inputs: Specs, outputs: Specs) -> None:
    """Tensors are of declared dtypes and axes; an output is a tensor."""
    for group, specs in (("inputs", inputs), ("outputs", outputs)):
        for name, spec in specs.items():
            where = f"{group}.{name}"
            if spec.dtype not in dtypes and spec.dtype not in RECORD_DTYPES:
                known = ", ".join([*dtypes, "or a dtype such as bfloat16"])
                raise ValueError(f"{where} uses undeclared dtype '{spec.dtype}' (known: {known})")
            if spec.shape is None and group == "outputs":
                raise ValueError(f"{where} has no shape: an output is a tensor")
            for entry in spec.shape or ():
                if isinstance(entry, int):
                    continue
                used, _ = _names(entry, where)
                for axis in sorted(used - set(axes)):
                    raise ValueError(f"{where} uses undeclared axis '{axis}'")


def check_sizes(axes: Mapping[str, Axis], dtypes: DTypes, inputs: Specs) -> None:
    """An axis that a scalar states is the value of a whole-number input, and of one that states no other."""
    stated: dict[str, str] = {}
    for name, axis in axes.items():
        if axis.scalar is None:
            continue
        where, spec = f"axes.{name}: scalar '{axis.scalar}'", inputs.get(axis.scalar)
        if spec is None or not spec.is_scalar:
            raise ValueError(f"{where} must be an input without a shape")
        choices = dtypes.get(spec.dtype, (spec.dtype,))
        if not INTEGER_DTYPES.issuperset(choices):
            raise ValueError(f"{where} is {', '.join(choices)}, and a size is a whole number")
        if axis.scalar in stated:
            raise ValueError(f"{where} is the size of '{stated[axis.scalar]}' already")
        stated[axis.scalar] = name


def check_expressions(
    constraints: tuple[str, ...], cost: Cost | None, axes: Mapping[str, Axis], dtypes: DTypes
) -> None:
    """Constraints and cost name declared axes and dtype variables only."""
    named = [(f"constraints[{i}]", text) for i, text in enumerate(constraints)]
    if cost is not None:
        named += [("cost.flops", cost.flops), ("cost.bytes", cost.bytes)]
    for where, text in named:
        used, variables = names_in(text)
        for axis in sorted(used - set(axes)):
            raise ValueError(f"{where} uses undeclared axis '{axis}'")
        for variable in sorted(variables - set(dtypes)):
            raise ValueError(f"{where} uses undeclared dtype variable '{variable}'")


def _names(entry: str, where: str) -> tuple[frozenset[str], frozenset[str]]:
    try:
        return names_in(entry)
    except RecordError as error:
        raise ValueError(f"{where}: {error}") from None


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

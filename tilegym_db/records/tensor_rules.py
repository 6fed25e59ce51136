"""What holds between the tensors of a Definition: what they are made of, what is written in place, what gradients are named.

Each rule raises :class:`ValueError` with the culprit's key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tilegym_db.errors import RecordError
from tilegym_db.records.definition_parts import Axis, Cost, TensorSpec
from tilegym_db.records.dtypes import INTEGER_DTYPES, RECORD_DTYPES
from tilegym_db.records.expressions import names_in
from tilegym_db.records.layouts import parse_layout

__all__ = [
    "GRADIENT",
    "check_backward",
    "check_expressions",
    "check_in_place",
    "check_layouts",
    "check_optional_outputs",
    "check_sizes",
    "check_sliced_inputs",
    "check_tensors",
]

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


def check_optional_outputs(
    optional: tuple[str, ...],
    outputs: tuple[str, ...],
    in_place: Collection[str],
    sampled: Collection[str],
    gathers: Mapping[str, str],
    follows: Collection[str],
) -> None:
    """They are the last outputs, in order, not all of them, and no other field needs them."""
    if not optional:
        return
    for name in optional:
        if name not in outputs:
            raise ValueError(f"optional_outputs names the undeclared output '{name}'")
    if len(optional) >= len(outputs):
        raise ValueError("optional_outputs names every output; a call gives at least one")
    if outputs[-len(optional) :] != optional:
        raise ValueError(f"optional_outputs must be the last outputs, in order ({', '.join(outputs)})")
    needed = {"in_place": in_place, "sampled": sampled, "gathers": {*gathers, *gathers.values()}, "follows": follows}
    for key, names in needed.items():
        for name in optional:
            if name in names:
                raise ValueError(f"optional_outputs names '{name}', which {key} relies on")


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
    name: str,
    backward_of: str | None,
    saved: Collection[str],
    inputs: Specs,
    outputs: Specs,
    in_place: Mapping[str, str],
) -> None:
    """A backward takes and gives gradients, and overwrites nothing; what it takes of the forward's outputs it names."""
    for tensor in saved:
        if backward_of is None:
            raise ValueError("saved names outputs of the forward definition; 'backward_of' must name that")
        if tensor not in inputs or inputs[tensor].is_scalar or tensor.startswith(GRADIENT):
            raise ValueError(
                f"saved names '{tensor}', which is no tensor among the inputs and no output of {backward_of}"
            )
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


def check_layouts(
    layouts: Mapping[str, str], tensors: Specs, in_place: Mapping[str, str], axes: Collection[str]
) -> None:
    """Strides that are part of an operator are of a tensor of its own, one stride a dimension, over its axes."""
    for name, text in layouts.items():
        spec = tensors.get(name)
        if spec is None or spec.shape is None:
            raise ValueError(f"layouts.{name}: no such tensor")
        if name in in_place or name in in_place.values():
            raise ValueError(
                f"layouts.{name}: a tensor that is written in place has the strides that its caller gives it"
            )
        entries = parse_layout(text)
        if entries is None:
            raise ValueError(f"layouts.{name}: 'contiguous' is what a tensor is without; leave it out")
        if len(entries) != len(spec.shape):
            raise ValueError(f"layouts.{name}: {text!r} has {len(entries)} strides for {len(spec.shape)} dimensions")
        unknown = sorted({axis for entry in entries for axis in names_in(entry)[0]} - set(axes))
        if unknown:
            raise ValueError(f"layouts.{name}: {text!r} uses the undeclared axis '{unknown[0]}'")


def check_sliced_inputs(sliced: Mapping[str, str], inputs: Specs, in_place: Mapping[str, str]) -> None:
    """An input that the reference takes one slice at a time has that axis, once, and is only read."""
    for name, axis in sliced.items():
        spec = inputs.get(name)
        if spec is None or spec.shape is None:
            raise ValueError(f"sliced_inputs.{name}: no such tensor among the inputs")
        if spec.shape.count(axis) != 1:
            raise ValueError(f"sliced_inputs.{name}: its shape must have the axis '{axis}' once")
        if name in in_place:
            raise ValueError(f"sliced_inputs.{name} is written in place")

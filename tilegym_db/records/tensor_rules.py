"""What holds between the tensors of a Definition: what they are made of, what is written in place, what gradients are named.

Each rule raises :class:`RecordError` with the culprit's key.
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
                raise RecordError(
                    f"{where} uses undeclared dtype '{spec.dtype}' (known: {known})", code="dtype_undeclared"
                )
            if spec.shape is None and group == "outputs":
                raise RecordError(f"{where} has no shape: an output is a tensor", code="output_without_shape")
            for entry in spec.shape or ():
                if isinstance(entry, int):
                    continue
                used, _ = _names(entry, where)
                for axis in sorted(used - set(axes)):
                    raise RecordError(f"{where} uses undeclared axis '{axis}'", code="axis_undeclared")


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
            raise RecordError(f"optional_outputs names the undeclared output '{name}'", code="output_undeclared")
    if len(optional) >= len(outputs):
        raise RecordError("optional_outputs names every output; a call gives at least one", code="optional_all")
    if outputs[-len(optional) :] != optional:
        raise RecordError(
            f"optional_outputs must be the last outputs, in order ({', '.join(outputs)})", code="optional_order"
        )
    needed = {"in_place": in_place, "sampled": sampled, "gathers": {*gathers, *gathers.values()}, "follows": follows}
    for key, names in needed.items():
        for name in optional:
            if name in names:
                raise RecordError(f"optional_outputs names '{name}', which {key} relies on", code="optional_needed")


def check_sizes(axes: Mapping[str, Axis], dtypes: DTypes, inputs: Specs) -> None:
    """An axis that a scalar states is the value of a whole-number input, and of one that states no other."""
    stated: dict[str, str] = {}
    for name, axis in axes.items():
        if axis.scalar is None:
            continue
        where, spec = f"axes.{name}: scalar '{axis.scalar}'", inputs.get(axis.scalar)
        if spec is None or not spec.is_scalar:
            raise RecordError(f"{where} must be an input without a shape", code="size_scalar_not_input")
        choices = dtypes.get(spec.dtype, (spec.dtype,))
        if not INTEGER_DTYPES.issuperset(choices):
            raise RecordError(
                f"{where} is {', '.join(choices)}, and a size is a whole number", code="size_scalar_not_whole"
            )
        if axis.scalar in stated:
            raise RecordError(f"{where} is the size of '{stated[axis.scalar]}' already", code="size_scalar_repeated")
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
            raise RecordError(f"{where} uses undeclared axis '{axis}'", code="axis_undeclared")
        for variable in sorted(variables - set(dtypes)):
            raise RecordError(f"{where} uses undeclared dtype variable '{variable}'", code="dtype_variable_undeclared")


def _names(entry: str, where: str) -> tuple[frozenset[str], frozenset[str]]:
    try:
        return names_in(entry)
    except RecordError as error:
        raise RecordError(f"{where}: {error}", code=error.code) from None


def check_in_place(in_place: Mapping[str, str], inputs: Specs, outputs: Specs) -> None:
    """An output written over an input has its shape and dtype."""
    for source, target in in_place.items():
        if source not in inputs or target not in outputs:
            raise RecordError(
                f"in_place '{source}': '{target}' must map an input to an output", code="in_place_unknown"
            )
        one, two = inputs[source], outputs[target]
        if one.shape != two.shape or one.dtype != two.dtype:
            raise RecordError(f"in_place '{source}' and '{target}' differ in shape or dtype", code="in_place_differs")


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
            raise RecordError(
                "saved names outputs of the forward definition; 'backward_of' must name that",
                code="saved_without_backward",
            )
        if tensor not in inputs or inputs[tensor].is_scalar or tensor.startswith(GRADIENT):
            raise RecordError(
                f"saved names '{tensor}', which is no tensor among the inputs and no output of {backward_of}",
                code="saved_unknown",
            )
    if backward_of is None:
        return
    if backward_of == name:
        raise RecordError(f"backward_of names the definition itself, '{name}'", code="backward_of_itself")
    if not any(tensor.startswith(GRADIENT) for tensor in inputs):
        raise RecordError(f"backward_of needs an input '{GRADIENT}<output of {backward_of}>'", code="gradient_missing")
    for tensor in outputs:
        if not tensor.startswith(GRADIENT):
            raise RecordError(
                f"outputs.{tensor} of a backward must be named '{GRADIENT}<input of {backward_of}>'",
                code="gradient_name",
            )
    if in_place:
        raise RecordError(
            "a backward overwrites none of its inputs: others may read them after it", code="backward_in_place"
        )


def check_layouts(
    layouts: Mapping[str, str], tensors: Specs, in_place: Mapping[str, str], axes: Collection[str]
) -> None:
    """Strides that are part of an operator are of a tensor of its own, one stride a dimension, over its axes."""
    for name, text in layouts.items():
        spec = tensors.get(name)
        if spec is None or spec.shape is None:
            raise RecordError(f"layouts.{name}: no such tensor", code="tensor_unknown")
        if name in in_place or name in in_place.values():
            raise RecordError(
                f"layouts.{name}: a tensor that is written in place has the strides that its caller gives it",
                code="layout_of_in_place",
            )
        entries = parse_layout(text)
        if entries is None:
            raise RecordError(
                f"layouts.{name}: 'contiguous' is what a tensor is without; leave it out", code="layout_contiguous"
            )
        if len(entries) != len(spec.shape):
            raise RecordError(
                f"layouts.{name}: {text!r} has {len(entries)} strides for {len(spec.shape)} dimensions",
                code="layout_rank",
            )
        unknown = sorted({axis for entry in entries for axis in names_in(entry)[0]} - set(axes))
        if unknown:
            raise RecordError(
                f"layouts.{name}: {text!r} uses the undeclared axis '{unknown[0]}'", code="axis_undeclared"
            )


def check_sliced_inputs(sliced: Mapping[str, str], inputs: Specs, in_place: Mapping[str, str]) -> None:
    """An input that the reference takes one slice at a time has that axis, once, and is only read."""
    for name, axis in sliced.items():
        spec = inputs.get(name)
        if spec is None or spec.shape is None:
            raise RecordError(f"sliced_inputs.{name}: no such tensor among the inputs", code="tensor_unknown")
        if spec.shape.count(axis) != 1:
            raise RecordError(f"sliced_inputs.{name}: its shape must have the axis '{axis}' once", code="slice_axis")
        if name in in_place:
            raise RecordError(f"sliced_inputs.{name} is written in place", code="slice_in_place")

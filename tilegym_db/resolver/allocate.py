"""The outputs of a call, uninitialised, in the layout that the Definition promises to whoever calls it in a model.

Written out as one expression per output, because it runs at every call that a kernel serves, and because a compiler traces it
with sizes that are symbols.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import UsageError
from tilegym_db.records import Definition
from tilegym_db.records.expressions import names_in
from tilegym_db.records.layouts import parse_layout
from tilegym_db.records.quantised import is_packed
from tilegym_db.records.serving import Serving

if TYPE_CHECKING:
    from tilegym_db.records.definition_parts import TensorSpec

__all__ = ["Allocate", "allocate_of", "with_outputs"]

Allocate = Callable[..., Any]
"""``allocate(*inputs)``: the one output, or a tuple of them, uninitialised."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_MULTIPLE = re.compile(r"^\s*(\d+)\s*\*\s*([A-Za-z_]\w*)\s*$|^\s*([A-Za-z_]\w*)\s*\*\s*(\d+)\s*$")
_PACKED = re.compile(r"^\s*([A-Za-z_]\w*)\s*//\s*(\d+)\s*$")
"""The last dimension of packed codes (``H // 2``): they fill whole bytes, so that the division leaves no rest."""


def allocate_of(definition: Definition) -> Allocate:
    """What makes the outputs of a Definition that are written, for inputs in its shapes.

    Where ``serving.rows`` names an axis, inputs may have any leading axes in its place, and the outputs have them too.

    Raises:
        UsageError: the shape of an output does not follow from the inputs.
    """
    serving = definition.serving or Serving()
    key = definition.name, definition.digest, serving.model_dump_json()
    known = _made.get(key)
    if known is None:
        known = _made[key] = _compile(definition, serving)
    return known


_made: dict[tuple[str, str, str], Allocate] = {}


def _compile(definition: Definition, serving: Serving) -> Allocate:
    import torch

    from tilegym_db.verify.torch_dtypes import storage_dtype

    namespace: dict[str, Any] = {"_torch": torch, "_dtype": storage_dtype, "ceil_div": lambda a, b: -(-a // b)}
    made = [_expression(definition, serving, name) for name in definition.written_outputs]
    returned = made[0] if len(made) == 1 else f"({', '.join(made)},)" if made else "()"
    source = f"def _allocate({', '.join(definition.inputs)}):\n    return {returned}\n"
    exec(compile(source, f"<outputs of {definition.name}>", "exec"), namespace)
    allocate: Allocate = namespace["_allocate"]
    allocate.__doc__ = f"The outputs of {definition.name} for its inputs, uninitialised."
    return allocate


def _expression(definition: Definition, serving: Serving, name: str) -> str:
    spec, layout = definition.outputs[name], serving.outputs.get(name)
    if name in definition.layouts:
        return _strided(definition, serving, name)
    if layout is not None and layout.like is not None:
        return f"_torch.empty_like({layout.like})"
    if layout is None:
        same = next((given for given in definition.tensor_inputs if _is_like(definition.inputs[given], spec)), None)
        if same is not None:
            return f"_torch.empty_like({same}, memory_format=_torch.contiguous_format)"
    base, dtype = _base(definition, spec)
    order = range(len(spec.shape or ())) if layout is None or layout.order is None else layout.order
    sizes = _sizes(definition, serving, name)
    dense = f"{base}.new_empty(({''.join(f'{sizes[which]}, ' for which in order)}){dtype})"
    if list(order) == sorted(order):
        return dense
    back = sorted(range(len(sizes)), key=lambda which: list(order)[which])
    return f"{dense}.permute({', '.join(map(str, back))})"


def _strided(definition: Definition, serving: Serving, name: str) -> str:
    """An output whose strides the Definition says; gaps between its elements are memory that nobody writes to."""
    spec, text = definition.outputs[name], definition.layouts[name]
    if serving.rows is not None and serving.rows in (spec.shape or ()):
        raise UsageError(
            f"'{name}' of {definition.name} has the layout {text}, which no leading axes can stand in.",
            code="output_layout_unfit",
        )
    base, dtype = _base(definition, spec)
    sizes, strides = (
        "".join(f"{_size(definition, entry, name)}, " for entry in entries)
        for entries in (spec.shape or (), parse_layout(text) or ())
    )
    return f"{base}.new_empty_strided(({sizes}), ({strides}){dtype})"


def _is_like(given: TensorSpec, output: TensorSpec) -> bool:
    return (given.shape, given.dtype) == (output.shape, output.dtype)


def _base(definition: Definition, spec: TensorSpec) -> tuple[str, str]:
    """The input that a new tensor takes its device from, and the dtype argument where it is not that of the input."""
    for name in definition.tensor_inputs:
        if definition.inputs[name].dtype == spec.dtype:
            return name, ""
    if spec.dtype in definition.dtypes or not definition.tensor_inputs:
        raise UsageError(
            f"no input of {definition.name} says the dtype or the device of an output.", code="output_dtype_unknown"
        )
    return definition.tensor_inputs[0], f", dtype=_dtype({spec.dtype!r})"


def _sizes(definition: Definition, serving: Serving, name: str) -> list[str]:
    """One Python expression of the inputs per dimension of an output; leading axes of rows are one, with a star."""
    found = []
    for entry in definition.outputs[name].shape or ():
        if entry == serving.rows and serving.rows is not None:
            having = next(given for given in definition.tensor_inputs if serving.rows in _shape(definition, given))
            found.append(f"*{having}.shape[:-1]")
        else:
            found.append(_size(definition, entry, name))
    return found


def _shape(definition: Definition, name: str) -> tuple[str | int, ...]:
    return definition.inputs[name].shape or ()


def _size(definition: Definition, entry: str | int, name: str) -> str:
    if isinstance(entry, int):
        return str(entry)
    axes, _ = names_in(entry)
    spelled = _NAME.sub(lambda word: _axis(definition, word[0], name) if word[0] in axes else word[0], entry)
    return spelled if entry in axes else f"({spelled})"


def _axis(definition: Definition, axis: str, name: str) -> str:
    value = definition.axes[axis].value
    if value is not None:
        return str(value)
    scalar = definition.axes[axis].scalar
    if scalar is not None:
        return scalar
    for given in definition.tensor_inputs:
        shape = _shape(definition, given)
        if axis in shape:  # counted from the end: leading axes may stand in place of the first
            return f"{given}.shape[{shape.index(axis) - len(shape)}]"
    for given in definition.tensor_inputs:
        shape = _shape(definition, given)
        for index, entry in enumerate(shape):
            match = _MULTIPLE.match(str(entry))
            if match and axis in (match.group(2), match.group(3)):
                return f"({given}.shape[{index - len(shape)}] // {match.group(1) or match.group(4)})"
        packed = shape and is_packed(definition.inputs[given], definition.dtypes)
        if packed and (row := _PACKED.match(str(shape[-1]))) and axis == row.group(1):
            return f"({given}.shape[-1] * {row.group(2)})"
    raise UsageError(
        f"the size of {axis} in '{name}' of {definition.name} does not follow from the shapes of its inputs.",
        code="output_size_unknown",
    )


def with_outputs(inputs: tuple[Any, ...], allocate: Allocate) -> tuple[Any, ...]:
    """Inputs and outputs as they would be, without memory: enough to bind a call by shapes, strides and dtypes."""
    import torch

    shadows = tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
        for value in inputs
    )
    outputs = allocate(*shadows)
    return (*shadows, *(outputs if isinstance(outputs, tuple) else (outputs,)))

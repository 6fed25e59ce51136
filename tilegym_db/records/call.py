"""Binds the arguments of a call to the axes, dtypes, layouts and scalars of its Definition.

Shapes in a Definition are axes and small expressions of them (``2*I``). Binding solves these expressions for the axes and
checks that all other shapes agree. It uses only shapes, strides and dtype names, so that the verifier, the resolver and
the model integrations can share it without a framework.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tilegym_db.errors import RecordError, UsageError
from tilegym_db.records.definition import Definition
from tilegym_db.records.definition_parts import TensorSpec, layout_class
from tilegym_db.records.definition_rules import GRADIENT, is_packed
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.expressions import evaluate, evaluate_int, names_in, parse_expression
from tilegym_db.records.text import canonical_json

# Record dtypes that frameworks store as another dtype: two 4-bit codes share one byte.
_STORED_AS: dict[str, tuple[str, ...]] = {"float4_e2m1": ("uint8", "float4_e2m1fn_x2")}


@dataclass(frozen=True)
class TensorInfo:
    """Shape, strides in elements and record dtype name of a tensor argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> TensorInfo:
        """Describe an object with ``shape``, ``stride()`` and ``dtype``, such as a PyTorch tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).rpartition(".")[2])


@dataclass(frozen=True)
class Call:
    """A call of an operator: everything that decides about a kernel for it.

    ``layouts`` has a layout class, or the strides, per tensor. A tensor that it does not name is contiguous; an output that it
    does not name may lie in memory in any way.
    """

    definition: str
    """The name of the operator's Definition."""
    axes: Mapping[str, int]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def key(self) -> str:
        """Return the text that equal calls share, whatever the order of their names."""
        parts = (self.axes, self.dtypes, self.layouts, self.scalars)
        return canonical_json([self.definition, *(dict(part) for part in parts)])

    def bind(self, definition: Definition) -> Call:
        """Return the call with const axes, single dtypes and the scalars that are sizes filled in.

        Raises:
            UsageError: an axis or dtype is missing, unknown or not allowed, or an axis and its scalar differ.
        """
        axes = axes_with_scalars(definition, self.axes, self.scalars)
        try:
            bound, dtypes = definition.bind_axes(axes), definition.bind_dtypes(self.dtypes)
        except RecordError as error:
            raise UsageError(str(error), code=error.code) from None
        return Call(
            definition.name, bound, dtypes, dict(self.layouts), scalars_with_axes(definition, self.scalars, bound)
        )

    def cost(self, definition: Definition) -> tuple[float, float]:
        """Return the floating-point operations and the bytes of the bound call, 0 and 0 if the Definition states no cost."""
        return definition.cost_of(self.axes, self.dtypes)


Mode = Literal["inference", "training"]
MODES: tuple[Mode, ...] = ("inference", "training")

Launch = Literal["call", "replay"]
"""The way in which the device gets a call: the host launches each call, or launched it once, in the capture of a CUDA graph."""
LAUNCHES: tuple[Launch, ...] = ("call", "replay")
GRAPHED_TOKENS = 4096
"""The largest prompt that ``patch`` runs in CUDA graphs, in tokens of all sequences. For more, the GPU takes the time."""


@dataclass(frozen=True)
class Request:
    """One call to serve. :func:`~tilegym_db.resolver.resolve.make_request` builds and checks it."""

    definition: Definition
    call: Call
    """The call, bound: const axes and single dtypes are filled in."""
    gpu: str
    sm: str
    """The device's ``sm_XX``, or ``cpu``."""
    mode: Mode = "inference"
    serving: str | None = None
    """The solution that serves this call site now; it wins a tie inside noise."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Language -> reason if it cannot run in this process, because its toolchain is not installed."""
    launch: Launch = "call"
    """``replay`` leaves the host time of a call out of the decision, because the call pays it once."""


def bind_call(definition: Definition, values: Sequence[Any]) -> Call:
    """Bind positional arguments: every input in order, optionally followed by every written output.

    Raises:
        UsageError: their number is wrong, or one does not fit the Definition (:func:`bind_arguments`).
    """
    names = (*definition.inputs, *definition.written_outputs)
    if len(values) not in (len(definition.inputs), len(names)):
        raise UsageError(
            f"{definition.name} takes ({', '.join(definition.inputs)}), optionally followed by its outputs "
            f"({', '.join(definition.written_outputs) or 'none'}); got {len(values)} arguments.",
            code="argument_count",
        )
    given = {
        name: TensorInfo.of(value) if hasattr(value, "stride") and hasattr(value, "dtype") else value
        for name, value in zip(names, values, strict=False)
    }
    return bind_arguments(definition, given)


def bind_arguments(definition: Definition, arguments: Mapping[str, TensorInfo | Scalar]) -> Call:
    """Return the axes, dtypes, layouts and scalars of a call.

    Args:
        arguments: every input by name, and any of the outputs; tensors as :class:`TensorInfo`, scalars as they are.

    Raises:
        UsageError: an argument is missing, is not a tensor but should be (or the reverse), its rank, size or dtype does
            not fit, or the shapes do not determine an axis. The message names the argument.
    """
    tensors: dict[str, TensorInfo] = {}
    scalars: dict[str, Scalar] = {}
    for name, spec in {**definition.inputs, **definition.outputs}.items():
        if name not in arguments:
            if name in definition.inputs:
                raise UsageError(f"{definition.name} needs the argument '{name}'.", code="argument_missing")
            continue
        value = arguments[name]
        if isinstance(value, TensorInfo):
            if spec.is_scalar:
                raise UsageError(
                    f"'{name}' of {definition.name} is a Python number, not a tensor.", code="scalar_expected"
                )
            tensors[name] = value
        elif not spec.is_scalar:
            raise UsageError(
                f"'{name}' of {definition.name} is a tensor, not {type(value).__name__}.", code="tensor_expected"
            )
        elif value is not None and not isinstance(value, bool | int | float):
            raise UsageError(
                f"'{name}' of {definition.name} is a Python number, not {type(value).__name__}.", code="scalar_expected"
            )
        else:
            scalars[name] = value
    axes = solve_axes(definition, {name: tensor.shape for name, tensor in tensors.items()}, scalars)
    for name in definition.layouts.keys() & tensors.keys():
        _check_strides(definition, name, tensors[name], axes)
    layouts = {name: layout_class(tensor.shape, tensor.strides) for name, tensor in tensors.items()}
    dtypes = solve_dtypes(definition, {name: tensor.dtype for name, tensor in tensors.items()})
    return Call(definition.name, axes, dtypes, layouts, scalars)


def _check_strides(definition: Definition, name: str, tensor: TensorInfo, axes: Mapping[str, int]) -> None:
    """Raise :class:`UsageError` if strides differ from those of the Definition; a dimension of size 1 may have any stride."""
    want = definition.strides_of(name, axes)
    if 0 not in tensor.shape and any(
        size > 1 and found != step for size, found, step in zip(tensor.shape, tensor.strides, want, strict=True)
    ):
        text = definition.layouts[name]
        raise UsageError(
            f"'{name}' of {definition.name} must have the strides {want} ({text}), not {tensor.strides}.",
            code="strides_differ",
        )


def is_code_selecting(definition: Definition, scalar: str) -> bool:
    """Return True for a scalar whose value selects the code that runs (a flag, a window), False for a continuous one (eps).

    A scalar that is the size of an axis gives False, because the axis already has its value.
    """
    if scalar in definition.size_scalars:
        return False
    choices = definition.dtypes.get(definition.inputs[scalar].dtype, (definition.inputs[scalar].dtype,))
    return not all(choice.startswith(("float", "bfloat")) for choice in choices)


def solve_dtypes(definition: Definition, dtypes: Mapping[str, str]) -> dict[str, str]:
    """Return the dtype of every dtype variable, from the dtypes of the tensors by name."""
    bound: dict[str, str] = {}
    for name, found in dtypes.items():
        declared = (definition.inputs.get(name) or definition.outputs[name]).dtype
        if declared in definition.dtypes:
            want = bound.setdefault(declared, _record_dtype(found, definition.dtypes[declared]))
        else:
            want = declared
        if found != want and found not in _STORED_AS.get(want, ()):
            raise UsageError(f"'{name}' of {definition.name} must be {want}, not {found}.", code="dtype_differs")
    try:
        return definition.bind_dtypes(bound)
    except RecordError as error:
        raise UsageError(str(error), code=error.code) from None


def _record_dtype(found: str, choices: Sequence[str]) -> str:
    return next((choice for choice in choices if found in _STORED_AS.get(choice, ())), found)


def solve_axes(
    definition: Definition, shapes: Mapping[str, Sequence[int]], scalars: Mapping[str, Scalar] | None = None
) -> dict[str, int]:
    """Return the size of every axis, from the shapes of the tensors and the scalars that are sizes, by name.

    A dimension ``N`` binds the axis N. An expression with one unknown axis is solved if it uses ``+``, ``-`` and ``*``
    (``2*I`` of size 8 gives I = 4). ``//`` is solved only in a packed row, whose codes fill whole bytes
    (:func:`~tilegym_db.records.definition_rules.check_packed`). Other dimensions are only checked.
    """
    axes = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
    axes |= sizes_of_scalars(definition, scalars or {})
    pending = list(_dimensions(definition, shapes))
    while pending:
        left = []
        for entry, size, where, packed in pending:
            if not _settle(entry, size, where, axes):
                left.append((entry, size, where, packed))
        if len(left) == len(pending) and not any(_settle(*item[:3], axes, packed=True) for item in left if item[3]):
            entry, size, where, _ = left[0]
            raise UsageError(
                f"cannot tell the axes of {definition.name} apart: {where} has size {size} = {entry}.",
                code="axis_ambiguous",
            )
        pending = left
    try:
        return definition.bind_axes(axes)
    except RecordError as error:
        raise UsageError(str(error), code=error.code) from None


def _dimensions(
    definition: Definition, shapes: Mapping[str, Sequence[int]]
) -> Sequence[tuple[str | int, int, str, bool]]:
    """Return the entry of the Definition, the size, the place and whether it is a packed row, for every dimension."""
    found = []
    for name, shape in shapes.items():
        spec = definition.inputs.get(name) or definition.outputs[name]
        entries, packed = spec.shape or (), is_packed(spec, definition.dtypes)
        if len(entries) != len(shape):
            spelled, further = ", ".join(str(entry) for entry in entries), len(shape) - len(entries)
            merged = f" Merge its first dimensions: {name}.flatten(0, {further})." if entries and further > 0 else ""
            raise UsageError(
                f"'{name}' of {definition.name} has {len(entries)} dimensions [{spelled}], not {len(shape)} "
                f"(its shape is {list(shape)}).{merged}",
                code="rank_differs",
            )
        for index, (entry, size) in enumerate(zip(entries, shape, strict=True)):
            is_row = packed and index == len(entries) - 1
            found.append((entry, int(size), f"{definition.name}: dimension {index} of '{name}'", is_row))
    return found


def _settle(entry: str | int, size: int, where: str, axes: dict[str, int], *, packed: bool = False) -> bool:
    """Check a dimension whose axes are known, or bind its one unknown axis; return False if it must wait for others."""
    if isinstance(entry, str) and entry.isidentifier() and axes.setdefault(entry, size) == size:
        return True  # fast path: nearly every dimension is a plain axis
    unknown = set() if isinstance(entry, int) else set(names_in(entry)[0]) - set(axes)
    if unknown:
        value = _invert(parse_expression(str(entry)), size, axes, packed) if len(unknown) == 1 else None
        if value is None:
            return False
        axes[unknown.pop()] = value
    want = evaluate_int(entry, axes)
    if want != size:
        spelled = f"{entry} = {want}" if str(entry) != str(want) else str(want)
        raise UsageError(f"{where} has size {size}, but must be {spelled}.", code="size_differs")
    return True


def _invert(node: ast.expr, target: int, axes: Mapping[str, int], packed: bool) -> int | None:
    """Return the value of the one unknown name in ``node`` that makes it ``target``, rounded down; None if not unique.

    ``packed`` means that divisions have no remainder. The caller evaluates the whole expression afterwards, so a value that
    does not divide evenly is still refused.
    """
    if isinstance(node, ast.Name):
        return target
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _known(node.left, axes), _known(node.right, axes)
    match node.op:
        case ast.Add() if left is not None:
            return _invert(node.right, target - left, axes, packed)
        case ast.Add() if right is not None:
            return _invert(node.left, target - right, axes, packed)
        case ast.Sub() if left is not None:
            return _invert(node.right, left - target, axes, packed)
        case ast.Sub() if right is not None:
            return _invert(node.left, target + right, axes, packed)
        case ast.Mult() if left:
            return _invert(node.right, target // left, axes, packed)
        case ast.Mult() if right:
            return _invert(node.left, target // right, axes, packed)
        case ast.FloorDiv() if right and packed:
            return _invert(node.left, target * right, axes, packed)
    return None


def _known(node: ast.expr, axes: Mapping[str, int]) -> int | None:
    """Return the value of a part of an expression if all its axes are known, else None."""
    text = ast.unparse(node)
    if names_in(text)[0] - set(axes):
        return None
    value = evaluate(text, axes)
    return int(value) if value == int(value) else None


# ---- sizes from scalars ---------------------------------------------------------------------------
# Some axes appear in no shape: they are the value of a whole-number scalar (K of a top-k, a block size, an alignment).
#
# Such an axis is used like any other: a Workload states its size, constraints, cost and shapes name it, and fuzz cases
# vary it. The scalar always equals the axis's size.


def sizes_of_scalars(definition: Definition, scalars: Mapping[str, Scalar]) -> dict[str, int]:
    """Return axis -> size, for every axis whose scalar is given."""
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
    """Return the axes of a call, including those that only a scalar states; the two must agree."""
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
    """Return the scalars of a call; each scalar that is a size gets the size of its axis."""
    sizes = {scalar: axes[axis] for scalar, axis in definition.size_scalars.items() if axis in axes}
    return {**scalars, **sizes}


# ---- backward -------------------------------------------------------------------------------------
# Rules that connect a Definition and its backward, by names, shapes and dtypes of their tensors.
#
# A backward Definition takes the forward's inputs that it needs, and ``grad_<output>`` for every output. It returns
# ``grad_<input>`` for some of the inputs. It may also take outputs of the forward as ``saved`` tensors (an attention's output
# and log-sum-exp, the row factors of a norm); the gradient of a saved output may be left out. A forward Definition may have
# several backwards for different inputs: frozen weights need no gradient, and stock code does not compute it either.


def bind_forward(backward: Definition, forward: Definition) -> Definition:
    """Return the same backward, bound to the forward that computes its saved tensors."""
    problem = backward_problem(forward, backward)
    if problem:
        raise RecordError(
            f"{backward.name} cannot be the backward of {forward.name}: {problem}.", code="backward_differs"
        )
    backward._forward = forward
    return backward


def forward_of(backward: Definition) -> Definition:
    """Return the forward of a backward; raise :class:`RecordError` unless a catalog with both has read it."""
    if backward._forward is None:
        raise RecordError(
            f"{backward.name}: saved: '{backward.saved[0]}' is computed by '{backward.backward_of}', which is in no catalog "
            "that was read. Add it first (tilegym-db add-definition FILE).",
            code="forward_unknown",
        )
    return backward._forward


def differentiated(backward: Definition) -> tuple[str, ...]:
    """Return the forward's inputs whose gradients a backward computes: in the order of its outputs, then those that share one."""
    return tuple(gradient_outputs(backward))


def gradient_outputs(backward: Definition) -> dict[str, str]:
    """Return input of the forward -> output of the backward that is its gradient; several inputs may share an output."""
    shared = {} if backward.serving is None else backward.serving.same_gradient
    return {**{name.removeprefix(GRADIENT): name for name in backward.outputs}, **shared}


def backward_problem(forward: Definition, backward: Definition) -> str:
    """Return the reason why one Definition cannot be the backward of another; empty if it can."""
    if forward.in_place:
        return f"{forward.name} overwrites its input '{next(iter(forward.in_place))}', which its gradient may need"
    for name, spec in backward.inputs.items():
        source = forward.outputs if name.startswith(GRADIENT) or name in backward.saved else forward.inputs
        problem = _differs(f"inputs.{name}", spec, source.get(name.removeprefix(GRADIENT)), forward)
        if problem:
            return problem
    for name, spec in backward.outputs.items():
        problem = _differs(f"outputs.{name}", spec, forward.inputs.get(name.removeprefix(GRADIENT)), forward)
        if problem:
            return problem
    for name, output in gradient_outputs(backward).items():
        problem = _differs(f"the gradient of {name}", backward.outputs[output], forward.inputs.get(name), forward)
        if problem:
            return problem
    for name in forward.outputs:
        if GRADIENT + name not in backward.inputs and name not in backward.saved:
            return f"it has no input '{GRADIENT}{name}', but {forward.name} has an output '{name}'"
    for variable, choices in backward.dtypes.items():
        if set(choices) - set(forward.dtypes.get(variable, ())):
            return f"its dtypes of '{variable}' are not among those of {forward.name}"
    return _cannot_be_drawn(forward, backward) if backward.saved else ""


def in_training_problem(asked: Definition, instead: Definition) -> str:
    """Return the reason why training cannot ask for one Definition in place of another; empty if it can."""
    if instead.in_place:
        return f"it overwrites its input '{next(iter(instead.in_place))}', which autograd may have kept"
    for what, own, other in (("inputs", asked.inputs, instead.inputs), ("outputs", asked.outputs, instead.outputs)):
        if list(own) != list(other):
            return f"its {what} are {', '.join(other)}, and not {', '.join(own)}"
        for name, spec in other.items():
            problem = _differs(f"{what}.{name}", spec, own[name], asked)
            if problem:
                return problem
    return ""


def _cannot_be_drawn(forward: Definition, backward: Definition) -> str:
    """Return the reason why a backward call cannot evaluate the forward; empty if it can. Missing tensors are drawn."""
    scalars = [name for name, spec in forward.inputs.items() if spec.is_scalar]
    for what, needed, known in (
        ("axis", forward.axes, backward.axes),
        ("dtype variable", forward.dtypes, backward.dtypes),
        ("scalar input", scalars, backward.inputs),
    ):
        missing = [name for name in needed if name not in known]
        if missing:
            return f"its saved tensors depend on the {what} '{missing[0]}' of {forward.name}, which it does not have"
    return ""


def _differs(where: str, spec: TensorSpec, twin: TensorSpec | None, forward: Definition) -> str:
    if twin is None:
        return f"{where} belongs to no tensor of {forward.name}"
    if (spec.shape, spec.dtype) != (twin.shape, twin.dtype):
        return f"{where} differs in shape or dtype from its tensor of {forward.name}"
    return ""


def backward_call(backward: Definition, call: Call) -> Call:
    """Return the call that will be made of a backward Definition after a call of the forward one, as far as can be
    known then.

    Incoming gradients are assumed to have the layouts of the outputs, which holds for most PyTorch operations. Layouts of
    outgoing gradients are left open.
    """
    layouts = {}
    for name in backward.tensor_inputs:
        layout = call.layouts.get(name.removeprefix(GRADIENT) if name.startswith(GRADIENT) else name)
        if layout is not None:
            layouts[name] = layout
    return Call(
        backward.name,
        axes={name: size for name, size in call.axes.items() if name in backward.axes},
        dtypes={name: dtype for name, dtype in call.dtypes.items() if name in backward.dtypes},
        layouts=layouts,
        scalars={name: value for name, value in call.scalars.items() if name in backward.inputs},
    )

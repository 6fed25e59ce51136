"""Runs a Definition's reference: as written, or lifted to fp64 as the oracle; in slices to bound its memory."""

from __future__ import annotations

import ast
import functools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.expressions import function_parameters, names_in

# ---- slicing --------------------------------------------------------------------------------------
# Evaluates a reference slice by slice along independent axes.

ORACLE_BYTES = 4 << 30
"""Default memory of one evaluation in bytes, for fp64 inputs, outputs and intermediate results."""

PART_BYTES = 16 << 30
"""Memory of a reference's largest intermediate result and three of its size in fp64, above which a call is evaluated in parts.

A reference that loops over heads holds the scores of a key head's queries: 64 GiB at 32,768 positions and eight query heads.
"""

_BYTES_PER_ELEMENT = 8 * 4
"""Bytes per element in fp64, including three intermediate results of the same size."""

Inputs = Mapping[str, Any]
Outputs = dict[str, torch.Tensor]


def sliced(
    definition: Definition,
    inputs: Inputs,
    run: Callable[[Definition, Inputs], Outputs],
    *,
    budget_bytes: int,
    part_bytes: int = PART_BYTES,
) -> Outputs:
    """Return every output of ``run``; inputs are halved along independent axes until each part fits the budget.

    The memory of an evaluation is estimated from the elements of its inputs and outputs, and of one slice of each sliced input.
    The axis of ``independent_axes`` with the most elements is halved. If no axis can be halved, the whole is evaluated.

    A part whose intermediate results take more than ``part_bytes`` is halved further, also along axes that grow together, such
    as query heads and key heads; see :func:`_is_independent`.
    """
    return _Slicing(definition, run, budget_bytes, part_bytes).evaluate(inputs)


@dataclass
class _Slicing:
    """An evaluation in parts."""

    definition: Definition
    run: Callable[[Definition, Inputs], Outputs]
    budget_bytes: int
    part_bytes: int
    probed: dict[tuple[tuple[str, int], ...], bool] = field(default_factory=dict)
    """Axes that grow together, with their sizes -> True if a small call gives the same results in parts.

    Halves of eight heads may be independent where those of four are not, as in a norm over four heads.
    """

    def evaluate(self, inputs: Inputs) -> Outputs:
        sizes = _axis_sizes(self.definition, inputs)
        axes = self._halved(inputs, sizes)
        if not axes:
            return self.run(self.definition, inputs)
        parts = [
            self.evaluate(_part(self.definition, inputs, ranges))
            for ranges in _halves({axis: sizes[axis] for axis in axes})
        ]
        return _put_together(self.definition, parts, axes)

    def _halved(self, inputs: Inputs, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes to halve together; empty for a part that is evaluated as it is."""
        definition = self.definition
        axis = max(
            (name for name in definition.divisible_axes if sizes.get(name, 0) > 1),
            key=lambda name: _elements_along(definition, inputs, name),
            default=None,
        )
        if axis is not None and _estimate(definition, inputs, sizes) > self.budget_bytes:
            return (axis,)
        groups = [together for group in _groups(definition) if (together := _divisible(definition, group, sizes))]
        if (axis is None and not groups) or not _exceeds(definition, inputs, sizes, self.part_bytes):
            return ()
        if axis is not None:
            return (axis,)
        return next((together for together in groups if self._may_halve(inputs, together, sizes)), ())

    def _may_halve(self, inputs: Inputs, axes: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
        key = tuple((axis, sizes[axis]) for axis in axes)
        if key not in self.probed:
            self.probed[key] = _is_independent(self.definition, inputs, axes, sizes)
        return self.probed[key]


def _put_together(definition: Definition, parts: Sequence[Outputs], axes: Sequence[str]) -> Outputs:
    """Return the outputs of a call that was evaluated in parts along axes; each output has one of these."""
    along = {
        name: next(axis for axis in axes if axis in (spec.shape or ())) for name, spec in definition.outputs.items()
    }
    return {
        name: torch.cat([part[name] for part in parts], dim=_dimension(definition.outputs[name].shape, axis))
        for name, axis in along.items()
    }


def _halves(sizes: Mapping[str, int]) -> list[dict[str, tuple[int, int]]]:
    """Return where each axis begins, and its length, in both halves; sizes are multiples of the smallest."""
    smallest = min(sizes.values())
    half = smallest // 2
    return [
        {axis: (start * (size // smallest), length * (size // smallest)) for axis, size in sizes.items()}
        for start, length in ((0, half), (half, smallest - half))
    ]


def _groups(definition: Definition) -> tuple[tuple[str, ...], ...]:
    """Return the groups of axes of which more is more of the same, if they may be probed: whole numbers may be ids or lengths."""
    plain = {"float32", "float16", "bfloat16", "bool"}
    dtypes = {definition.inputs[name].dtype for name in definition.tensor_inputs}
    if definition.serving is None or not all({*definition.dtypes.get(dtype, (dtype,))} <= plain for dtype in dtypes):
        return ()
    return definition.serving.independent


def _divisible(definition: Definition, group: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a group that can be halved together; empty if there are none.

    Heads of queries that follow each other share a head of keys. If one axis has a single index, the others are halved alone.
    """
    axes = tuple(axis for axis in group if sizes.get(axis, 0) > 1)
    smallest = min((sizes[axis] for axis in axes), default=0)
    if not axes or any(sizes[axis] % smallest or not _is_plain(definition, axis) for axis in axes):
        return ()
    shapes = [spec.shape or () for spec in definition.outputs.values()]
    return axes if all(sum(axis in shape for axis in axes) == 1 for shape in shapes) else ()


def _is_plain(definition: Definition, axis: str) -> bool:
    """Return True if an axis can be narrowed: it is no scalar, and occurs only alone and once per tensor."""
    shapes = [spec.shape for spec in (*definition.inputs.values(), *definition.outputs.values()) if spec.shape]
    entries = [entry for shape in shapes for entry in shape if isinstance(entry, str) and entry != axis]
    return (
        axis not in definition.size_scalars.values()
        and all(shape.count(axis) <= 1 for shape in shapes)
        and not any(axis in names_in(entry)[0] for entry in entries)
    )


PROBED_LENGTH = 16


def _is_independent(definition: Definition, inputs: Inputs, axes: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """Return True if halves along axes give the same results as the whole, for the first indices of every other axis."""
    others = [axis for axis in definition.var_axes if axis not in axes and _is_plain(definition, axis)]
    few = _part(definition, inputs, {axis: (0, min(sizes[axis], PROBED_LENGTH)) for axis in others if axis in sizes})
    run = run_reference if definition.oracle == "as_written" else run_lifted
    try:
        whole = run(definition, few)
        halves = [
            run(definition, _part(definition, few, part)) for part in _halves({axis: sizes[axis] for axis in axes})
        ]
    except (RecordError, torch.OutOfMemoryError):
        return False
    found = _put_together(definition, halves, axes)
    return all(found[name].shape == value.shape and _is_same(found[name], value) for name, value in whole.items())


def _is_same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two results differ by rounding in fp64 at most, relative to the largest element."""
    value, other = value.double(), other.double()
    largest = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max()) if other.numel() else 0.0
    return torch.allclose(value, other, rtol=1e-9, atol=1e-10 * largest, equal_nan=True)


def _exceeds(definition: Definition, inputs: Inputs, sizes: Mapping[str, int], max_bytes: int) -> bool:
    """Return True if the largest result inside the reference, and three of its size, take more bytes in fp64."""
    largest = max((inputs[name].numel() for name in definition.tensor_inputs), default=0)
    if largest * max(sizes.values(), default=1) * _BYTES_PER_ELEMENT <= max_bytes:
        return False  # pairs of positions, or one row for each id
    return largest_inside(definition, inputs) * _BYTES_PER_ELEMENT > max_bytes


MAX_SHAPED_STEPS = 512


def largest_inside(definition: Definition, inputs: Inputs) -> int:
    """Return the elements of the largest tensor that an operation of the reference gives, computing nothing but shapes.

    Of a reference that reads contents, or has many steps, only the first steps are known.
    """
    shapes = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    effort = Effort(MAX_SHAPED_STEPS)
    with suppress(RecordError), effort:
        run_reference(definition, shapes)
    return effort.elements


class Effort(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of operations of a reference, and the elements of the largest tensor that one gives."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: see :class:`Lifted`."""
        return False

    def __init__(self, max_steps: float = math.inf) -> None:
        """Create the mode; more operations than ``max_steps`` raise ``RuntimeError``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = self.elements = 1
        self._max_steps = max_steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count it."""
        if self.steps > self._max_steps:
            raise RuntimeError(f"more than {self._max_steps} operations")
        found = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in tree_leaves(found) if isinstance(value, torch.Tensor)]
        self.steps += 1
        self.elements = max(self.elements, *sizes, 0)
        return found


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
            # An output with an expression (ceil_div(H, G)) is a scale or an index, which is comparatively small.
            elements *= entry if isinstance(entry, int) else sizes.get(entry, 1)
        made += elements
    return (given + made) * _BYTES_PER_ELEMENT


def _slices(definition: Definition, sizes: Mapping[str, int], name: str) -> int:
    """Return the number of slices of an input; one is widened at a time."""
    return max(1, sizes.get(definition.sliced_inputs.get(name, ""), 1))


def _elements_along(definition: Definition, inputs: Inputs, axis: str) -> int:
    return sum(
        inputs[name].numel() for name in definition.tensor_inputs if axis in (definition.inputs[name].shape or ())
    )


def _part(definition: Definition, inputs: Inputs, ranges: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the inputs at a range of each axis, given by its start and length."""
    part = dict(inputs)
    for name, spec in definition.inputs.items():
        for axis, (start, length) in ranges.items():
            if axis in (spec.shape or ()):  # a reference may require contiguous inputs
                part[name] = part[name].narrow(_dimension(spec.shape, axis), start, length).contiguous()
    return part


def at_indices(
    definition: Definition, values: Mapping[str, Any], indices: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return inputs or outputs by name at some indices of independent axes; a reference of these gives these outputs."""
    found = dict(values)
    for name, value in values.items():
        spec = definition.inputs.get(name) or definition.outputs[name]
        for axis, chosen in indices.items():
            if axis in (spec.shape or ()):
                value = value.index_select(_dimension(spec.shape, axis), chosen)
        found[name] = value
    return found


def _dimension(shape: tuple[str | int, ...] | None, axis: str) -> int:
    return (shape or ()).index(axis)


@functools.lru_cache(maxsize=512)
def load_function(source: str, where: str, name: str = "run") -> Callable[..., Any]:
    """Return a function that a reference's source text defines, by default ``run``; raise with the text's own error."""
    scope: dict[str, Any] = {}  # without __name__: torch.compile of PyTorch 2.11 would import that module
    try:
        # Definitions are reviewed records and passed the self-test; a Solution's source is never executed here.
        exec(compile(source, where, "exec"), scope)
    except (Exception, SystemExit) as error:
        raise RecordError(
            f"{where}: the reference raises when it is loaded: {error!r}.", code="reference_load_failed"
        ) from None
    function: Callable[..., Any] = scope[name]
    return function


def run_reference(definition: Definition, inputs: Inputs, *, source: str | None = None, label: str = "") -> Outputs:
    """Run the reference as written and return every output by name, including in-place ones.

    Args:
        inputs: input name -> tensor or scalar. Tensors are never modified: in-place ones are copied first.
        source: another text that defines ``run``, such as the self-test's independent formulation.
        label: the name of that text in errors.
    """
    where = f"{definition.name}: {label or ('reference' if source is None else 'alternative formulation')}"
    function = load_function(source or definition.reference, where)
    given = {
        name: value.clone() if name in definition.in_place and isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    versions = {
        name: value._version
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and name not in definition.in_place and not value.is_inference()
    }
    try:
        with torch.no_grad():
            returned = function(*(given[name] for name in definition.inputs))
    except torch.OutOfMemoryError:
        raise  # of a GPU: callers free memory, or take less at a time
    except (Exception, SystemExit):
        raise RecordError(f"{where} raises:\n{traceback.format_exc(limit=-3)}", code="reference_raises") from None
    for name, version in versions.items():
        if given[name]._version != version:
            raise RecordError(
                f"{where} writes to its input '{name}'. Compute a new tensor, or declare the output in 'in_place'.",
                code="reference_writes_input",
            )
    return name_outputs(definition, returned, given, where)


def evaluate_function(definition: Definition, name: str, inputs: Inputs, known: Inputs) -> Any:
    """Return the result of another function of the reference than ``run``, which takes the inputs in order.

    Of the parameters in ``known``, the function gets those that it takes.
    """
    where = f"{definition.name}: {name} of the reference"
    function = load_function(definition.reference, where, name)
    more = [parameter for parameter in function_parameters(definition.reference, name) or () if parameter in known]
    try:
        with torch.no_grad():
            return function(*(inputs[given] for given in definition.inputs), **{key: known[key] for key in more})
    except torch.OutOfMemoryError:
        raise  # of a GPU: callers free memory, or take less at a time
    except (Exception, SystemExit):
        raise RecordError(f"{where} raises:\n{traceback.format_exc(limit=-3)}", code="reference_raises") from None


def name_outputs(definition: Definition, returned: Any, given: Inputs, where: str) -> Outputs:
    """Return the values that a function returned by output name.

    A function may return every output, or all except those that are written in place.
    """
    values = returned if isinstance(returned, tuple | list) else (returned,)
    replaced = {target: source for source, target in definition.in_place.items()}
    names: Iterable[str]
    if len(values) == len(definition.outputs):
        names = definition.outputs
    elif len(values) == len(definition.written_outputs):
        names = definition.written_outputs
    else:
        raise RecordError(
            f"{where} returns {len(values)} values; {definition.name} has outputs {', '.join(definition.outputs)}.",
            code="output_count_differs",
        )
    outputs = dict(zip(names, values, strict=True))
    for target, source in replaced.items():
        outputs.setdefault(target, given[source])
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            raise RecordError(
                f"{where} returns a {type(value).__name__} for '{name}', not a tensor.", code="output_not_tensor"
            )
    return {name: outputs[name] for name in definition.outputs}


def run_lifted(definition: Definition, inputs: Inputs, *, source: str | None = None, label: str = "") -> Outputs:
    """Run the reference with every floating input and every cast lifted to fp64; see :func:`run_reference`.

    Each slice of ``sliced_inputs`` is lifted when the reference reads it.
    """
    whole, slices = {}, []
    for name, value in inputs.items():
        axis = definition.sliced_inputs.get(name)
        if axis is not None and isinstance(value, torch.Tensor) and value.dtype in LIFTED_DTYPES:
            slices.append(SlicedInput(name, value, (definition.inputs[name].shape or ()).index(axis)))
        else:
            whole[name] = value
    lifted = lift(whole)
    with LiftedCalls(slices):
        return run_reference(
            definition, {name: lifted.get(name, value) for name, value in inputs.items()}, source=source, label=label
        )


def lift(inputs: Inputs) -> dict[str, Any]:
    """Return the inputs with every floating-point tensor in fp64."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.dtype in LIFTED_DTYPES else value
        for name, value in inputs.items()
    }


def as_written(definition: Definition, inputs: Inputs, *, budget_bytes: int = ORACLE_BYTES) -> Outputs:
    """Return the outputs of the reference in the given dtypes, in slices; see :func:`run_reference`."""
    return sliced(definition, inputs, run_reference, budget_bytes=budget_bytes)


def oracle(definition: Definition, inputs: Inputs, *, budget_bytes: int = ORACLE_BYTES) -> Outputs:
    """Return the outputs that Solutions are compared with: fp64 on the same quantised bits, or as written for quantisers."""
    if definition.oracle == "as_written":
        return as_written(definition, inputs, budget_bytes=budget_bytes)
    return in_fp64(definition, inputs, budget_bytes=budget_bytes)


def in_fp64(definition: Definition, inputs: Inputs, *, budget_bytes: int = ORACLE_BYTES) -> Outputs:
    """Return the outputs of the reference lifted to fp64, in slices; see :func:`run_lifted`."""
    return sliced(definition, inputs, run_lifted, budget_bytes=budget_bytes)


# ---- joined calls ---------------------------------------------------------------------------------
# Evaluates a reference for several calls of one shape at once. One that loops over tokens launches as many kernels for several
# calls as for one.


def joining_axis(definition: Definition) -> str | None:
    """Return an axis along which calls can be joined to one: an independent one of every tensor; None without one.

    A reference without a loop gains nothing, and the order of its sums may depend on the number of calls.
    """
    if definition.sliced_inputs or not loops(definition.reference):
        return None
    shapes = [definition.inputs[name].shape or () for name in definition.tensor_inputs]
    sizes = {*definition.size_scalars.values()}
    axes = [axis for axis in definition.divisible_axes if axis in definition.var_axes and axis not in sizes]
    return next((axis for axis in axes if all(axis in shape for shape in shapes)), None)


@functools.lru_cache(maxsize=512)
def loops(reference: str) -> bool:
    """Return True if the text of a reference has a loop."""
    return any(isinstance(node, ast.For | ast.While) for node in ast.walk(ast.parse(reference)))


def joined(definition: Definition, calls: Sequence[Inputs], axis: str) -> dict[str, Any]:
    """Return the inputs of one call that consists of several of one shape with the same scalars."""
    return {
        name: torch.cat([call[name] for call in calls], dim=_dimension(spec.shape, axis))
        if name in definition.tensor_inputs
        else calls[0][name]
        for name, spec in definition.inputs.items()
    }


def parted(definition: Definition, outputs: Mapping[str, torch.Tensor], axis: str, calls: int) -> list[Outputs]:
    """Return the outputs of each of the calls that were joined."""
    parts = {
        name: value.chunk(calls, dim=_dimension(definition.outputs[name].shape, axis))
        for name, value in outputs.items()
    }
    return [
        {name: part[number].clone(memory_format=torch.contiguous_format) for name, part in parts.items()}
        for number in range(calls)
    ]


def joined_budget(device: torch.device) -> int:
    """Return the memory of one evaluation of joined calls: half of what a GPU has left."""
    if device.type == "cpu":
        return ORACLE_BYTES
    return max(ORACLE_BYTES, torch.cuda.mem_get_info(device)[0] // 2)


def in_fp64_together(definition: Definition, calls: Sequence[Inputs]) -> list[Outputs]:
    """Return the outputs of several calls of one shape with the same scalars, as :func:`in_fp64` does for each."""
    axis = joining_axis(definition)
    if axis is not None and len(calls) > 1:
        try:
            together = joined(definition, calls, axis)
            device = next(value.device for value in together.values() if isinstance(value, torch.Tensor))
            outputs = in_fp64(definition, together, budget_bytes=joined_budget(device))
            return parted(definition, outputs, axis, len(calls))
        except torch.OutOfMemoryError:
            pass  # one call at a time may fit
    return [in_fp64(definition, call) for call in calls]


# ---- lifting --------------------------------------------------------------------------------------

LIFTED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class SlicedInput:
    """An input that stays in its dtype until the reference reads a slice of it, ``value[index]`` along ``dimension``."""

    name: str
    value: torch.Tensor
    dimension: int


class Lifted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that replaces every floating-point dtype with float64.

    A reference restates a model's code, which casts down and up between steps. Lifted casts do not round, so the result differs
    from the mathematical one only by fp64 rounding.

    The weights of all experts in fp64 would be four times as large as the layer. Of a sliced input only the selected slice is
    lifted. Any other use of it is an error, because that would lift the whole.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because PyTorch would import ``torch._dynamo``, for seconds, to keep its compiler out of this mode."""
        return False

    def __init__(self, slices: Sequence[SlicedInput] = ()) -> None:
        """Create the mode; ``slices`` are inputs that the reference reads one slice at a time."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._slices = tuple(slices)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator with any floating ``dtype`` argument replaced; refuse to read more than one slice of an input."""
        kwargs = dict(kwargs or {})
        if self._slices and (taken := self._sliced_among((*args, *kwargs.values()))) is not None:
            return self._slice(taken, func, args)
        if kwargs.get("dtype") in LIFTED_DTYPES:
            kwargs["dtype"] = torch.float64
        return func(*(torch.float64 if _is_float_dtype(value) else value for value in args), **kwargs)

    def _sliced_among(self, values: Sequence[Any]) -> SlicedInput | None:
        for value in values:
            parts = value if isinstance(value, list | tuple) else (value,)
            for part in parts:
                for item in self._slices:
                    if part is item.value:
                        return item
        return None

    def _slice(self, taken: SlicedInput, func: Any, args: tuple[Any, ...]) -> torch.Tensor:
        dimension = args[1] if len(args) > 1 else None
        if func is not torch.ops.aten.select.int or dimension not in (
            taken.dimension,
            taken.dimension - taken.value.dim(),
        ):
            raise TypeError(
                f"'{taken.name}' is one of sliced_inputs: take one slice at a time ({taken.name}[e], of dimension "
                f"{taken.dimension}), as {func} needs the whole in fp64"
            )
        slice_: torch.Tensor = func(*args)
        return slice_.double()


_T, _F = torch.Tensor, torch.nn.functional
PLAIN_CALLS = frozenset(
    {
        *(torch.einsum, torch.matmul, torch.mm, torch.bmm, torch.baddbmm, torch.softmax, torch.exp, torch.rsqrt, torch.cat),
        *(torch.stack, _T.matmul, _T.__matmul__, _T.mul, _T.__mul__, _T.add, _T.__add__, _T.add_, _T.sub, _T.__sub__),
        *(_T.div, _T.__truediv__, _T.neg, _T.abs, _T.square, _T.sqrt, _T.exp, _T.sum, _T.amax, _T.mean),
        *(_T.__getitem__, _T.__setitem__, _T.masked_fill, _T.triu, _T.tril, _T.transpose, _T.permute, _T.reshape, _T.view),
        *(_T.unbind, _T.expand, _T.unsqueeze, _T.squeeze, _T.chunk, _T.flatten, _T.contiguous, _T.clone, _T.dim, _T.numel),
        *(_T.ge, _T.gt, _T.le, _T.lt, _T.__invert__, _T.__and__, _T.__or__, _T.long, _T.is_inference, torch.ones),
        *(_T.__eq__, _T.__ne__, _T.eq, _T.ne, _T.__rsub__, _T.__rtruediv__, _T.__len__, _T.to, _T.clamp, _T.pow, _T.cumsum),
        *(_T.gather, _T.index_select, _T.unflatten, _T.sigmoid, torch.sigmoid, torch.tanh, torch.log, torch.log1p),
        *(torch.expm1, _F.linear, _F.silu),
    }
)  # fmt: skip
"""Functions that add no dtype argument. On fp64 tensors they give the same bits without a dispatch mode."""
FLOAT_CASTS = frozenset({_T.float, _T.half, _T.bfloat16, _T.double})


class LiftedCalls(TorchFunctionMode):
    """Mode with the results of :class:`Lifted`, for references that call thousands of small operators.

    A dispatch mode costs 10 us for each operator, of which ``einsum`` calls six. So only calls that may cast enter it, or that
    read a sliced input.
    """

    def __init__(self, slices: Sequence[SlicedInput] = ()) -> None:
        """Create the mode; see :class:`Lifted`."""
        super().__init__()
        self._slices = {id(item.value) for item in slices}
        self._lifted: Any = Lifted(slices)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, under :class:`Lifted` if it may cast or reads a sliced input."""
        kwargs = kwargs or {}
        if not (self._slices and self._reads_slices((*args, *kwargs.values()))):
            if _only_copies(func, args, kwargs):
                return args[0].clone()
            if not _may_cast(func, args, kwargs):
                return func(*args, **kwargs)
        with self._lifted:
            return func(*args, **kwargs)

    def _reads_slices(self, values: Sequence[Any]) -> bool:
        return any(
            id(value) in self._slices
            or (isinstance(value, list | tuple) and any(id(part) in self._slices for part in value))
            for value in values
        )


def _only_copies(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for the cast of a float64 tensor to a lifted dtype, which is float64 then; a cast between two dtypes copies."""
    casts = (func in FLOAT_CASTS and len(args) == 1) or (func is _T.to and len(args) == 2 and _is_float_dtype(args[1]))
    return casts and not kwargs and args[0].dtype is torch.float64


def _may_cast(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return False if a function can make no tensor of a dtype that is lifted, other than those of its inputs."""
    if func in PLAIN_CALLS:
        return kwargs.get("dtype") in LIFTED_DTYPES or any(map(_is_float_dtype, args))
    if func is torch.where:  # of two plain numbers, PyTorch makes a tensor of its default dtype
        return not any(isinstance(value, torch.Tensor) for value in args[1:])
    return getattr(func, "__name__", "") != "__get__"  # an attribute, such as the shape


def _is_float_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in LIFTED_DTYPES

"""Oracle cases: drawn inputs, the oracle's outputs, and the error of the reference itself."""

from __future__ import annotations

import gc
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilegym_db.backends.torch_dtypes import storage_dtype
from tilegym_db.errors import RecordError, is_out_of_memory
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import layout_strides, shared_place
from tilegym_db.records.expressions import Unknown, holds
from tilegym_db.records.hardware import CPU
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import check_reference, exact_outputs, followed, reference_errors
from tilegym_db.verification.conditioning import Uncertainties
from tilegym_db.verification.distributions import may_overflow, shows_bias
from tilegym_db.verification.gates import ReferenceDeviation
from tilegym_db.verification.inputs import BlobReader, draw_inputs, draws_noise
from tilegym_db.verification.large import LargeCase
from tilegym_db.verification.oracle import (
    LIFTED_DTYPES,
    as_written,
    at_indices,
    in_fp64,
    joined,
    joined_budget,
    joining_axis,
    oracle,
    parted,
)


@dataclass(frozen=True)
class OracleCase:
    """A case with its inputs, the oracle's outputs and the error of the reference per output."""

    case: Case
    inputs: Mapping[str, Any]
    outputs: Mapping[str, torch.Tensor]
    e_base: Mapping[str, ReferenceDeviation]
    exact: frozenset[str] = frozenset()
    """Outputs without rounding: they must equal the oracle's, rounded to their dtype."""
    conditioned: frozenset[str] = frozenset()
    """Outputs that the reference gives accurately even for small elements; Solutions must do so too."""
    redraw: Callable[[], Mapping[str, Any]] | None = field(default=None, compare=False)
    """Draws the inputs again, if they are not kept; see :meth:`without_inputs`."""
    uncertainties: Uncertainties = field(default_factory=Uncertainties, init=False, compare=False)
    """Of its elements, as far as a comparison has asked for them."""

    def without_inputs(self, redraw: Callable[[], Mapping[str, Any]]) -> OracleCase:
        """Return the case without the memory of its inputs, which ``redraw`` draws again."""
        return replace(self, inputs={}, redraw=redraw)

    def with_inputs(self) -> OracleCase:
        """Return the case with its inputs: this one if it has them, else one that is gone after its use."""
        return self if self.redraw is None else replace(self, inputs=self.redraw(), redraw=None)


@contextmanager
def raising_out_of_memory() -> Iterator[None]:
    """Raise ``torch.OutOfMemoryError`` for every failed allocation. On a CPU, PyTorch and Python raise other errors."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error).partition("\n")[0]) from None


def give_back_memory(device: str) -> None:
    """Free what a failed allocation has left behind in this process, so that workers and the next workload have room.

    Call it after the ``except`` block: until then the frames of the exception hold its tensors. Futures that raised refer to
    themselves by such a frame, so only the garbage collector frees them. PyTorch keeps what is freed, and other processes
    cannot use it.
    """
    gc.collect()
    if device != CPU:
        torch.cuda.empty_cache()


@raising_out_of_memory()
def make_oracle_case(
    definition: Definition,
    case: Case,
    device: str,
    blobs: BlobReader | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
) -> OracleCase | None:
    """Draw a case and evaluate the oracle.

    Returns:
        None if the case proves nothing: its contents break a rule of the operator, or the reference as written fails it.

    Args:
        definition: the operator.
        case: sizes and contents.
        device: where inputs are drawn and the oracle runs.
        blobs: reads inputs from files.
        inputs: replace drawn inputs, by name.

    Raises:
        RecordError: the reference raises or returns another shape or dtype than declared; or contents from files cannot be
            read or break a rule of the operator.
    """
    if inputs is None:
        inputs = tied(case, draw_inputs(definition, case, device, blobs=blobs))
    if _is_broken(definition, case, inputs):
        return None
    written = as_written(definition, inputs)
    _check_declared(definition, case, written)
    truth = written if definition.oracle == "as_written" else oracle(definition, inputs)
    return _checked(definition, case, inputs, written, truth)


_stacking = threading.Lock()
"""Held while oracles are evaluated together, which may take half of the free memory."""


@raising_out_of_memory()
def make_oracle_cases(
    definition: Definition, cases: Sequence[Case], device: str, blobs: BlobReader | None = None
) -> list[OracleCase | None]:
    """Draw cases of one shape and evaluate the oracle of all of them at once, side by side along an independent axis.

    A reference that loops over tokens launches as many kernels for several cases as for one. Without such an axis, or without
    memory, the cases are evaluated one by one. Arguments and errors are those of :func:`make_oracle_case`.
    """
    axis = stacking_axis(definition, cases)
    if axis is not None:
        try:
            with _stacking:
                return _make_stacked(definition, cases, device, blobs, axis)
        except torch.OutOfMemoryError:
            pass  # one case at a time may fit
        give_back_memory(device)
    return [make_oracle_case(definition, case, device, blobs) for case in cases]


def stacking_axis(definition: Definition, cases: Sequence[Case]) -> str | None:
    """Return an axis along which cases can be joined to one call; None without one, or if they differ in more than contents."""
    first = cases[0].call
    if len(cases) < 2 or any(
        (case.call.axes, case.call.dtypes, case.call.scalars) != (first.axes, first.dtypes, first.scalars)
        for case in cases
    ):
        return None
    return joining_axis(definition)


def _make_stacked(
    definition: Definition, cases: Sequence[Case], device: str, blobs: BlobReader | None, axis: str
) -> list[OracleCase | None]:
    drawn = [tied(case, draw_inputs(definition, case, device, blobs=blobs)) for case in cases]
    kept = [number for number, case in enumerate(cases) if not _is_broken(definition, case, drawn[number])]
    found: list[OracleCase | None] = [None] * len(cases)
    if not kept:
        return found
    together, budget = joined(definition, [drawn[number] for number in kept], axis), joined_budget(torch.device(device))
    written = parted(definition, as_written(definition, together, budget_bytes=budget), axis, len(kept))
    truth = written
    if definition.oracle != "as_written":
        truth = parted(definition, oracle(definition, together, budget_bytes=budget), axis, len(kept))
    del together
    for number, own_written, own_truth in zip(kept, written, truth, strict=True):
        _check_declared(definition, cases[number], own_written)
        found[number] = _checked(definition, cases[number], drawn[number], own_written, own_truth)
    if device != CPU:
        torch.cuda.empty_cache()  # leave the memory to the workers
    return found


def _is_broken(definition: Definition, case: Case, inputs: Mapping[str, Any]) -> bool:
    """Return True if the drawn contents break a rule of the operator.

    Raises:
        RecordError: contents from files break one.
    """
    broken = broken_constraint(definition, case.call.axes, inputs)
    if broken is not None and case.files:
        raise RecordError(
            f"{definition.name} requires {broken}, which the contents break at {case}.",
            code="content_constraint_broken",
        )
    return broken is not None


def _checked(
    definition: Definition,
    case: Case,
    inputs: Mapping[str, Any],
    written: Mapping[str, torch.Tensor],
    truth: Mapping[str, torch.Tensor],
) -> OracleCase | None:
    """Return the case with its oracle and the errors of the reference as written; None if that fails the case."""
    # Outputs are compared for the reference's own choice of indices: another choice among equal values is right too.
    own = followed(definition, inputs, truth, written)
    e_base, conditioned = reference_errors(definition, case.call.dtypes, written, own)
    if not shows_bias(case.distribution) or case.spread_as:  # equal ids share the rounding of a factor
        e_base = {name: error._replace(bias=math.inf) for name, error in e_base.items()}
    verdicts = check_reference(definition, case.call.dtypes, inputs, truth, written, e_base)
    if not all(verdict.passed for verdict in verdicts.values()) or _may_overflow(definition, case, inputs, written):
        return None
    exact = exact_outputs(written, own) if case.exact and not draws_noise(definition) else frozenset()
    return OracleCase(case, inputs, truth, e_base, exact, conditioned)


@dataclass(frozen=True)
class LargeOracleCase:
    """A large call, and the oracle of some of its rows."""

    given: OracleCase
    """The inputs of the call, without outputs."""
    compared: OracleCase
    indices: Mapping[str, torch.Tensor]

    def outputs_at(self, definition: Definition, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs of the call at the compared rows."""
        return at_indices(definition, outputs, self.indices)


def make_large_case(definition: Definition, large: LargeCase, device: str) -> LargeOracleCase | None:
    """Draw a large case and evaluate the oracle at its compared rows; None if the case proves nothing.

    Raises:
        Exception: see :func:`make_oracle_case`; or there is no memory for its inputs.
    """
    if large.is_sparse:
        return _made_sparse(definition, large, device)
    if large.is_long and not is_affordable(definition, large.case, device, unknown=bool(large.rows)):
        return None
    found = _made_large(definition, large, device)
    return _made_large(definition, large.usual, device) if found is None and large.usual is not None else found


def _made_large(definition: Definition, large: LargeCase, device: str) -> LargeOracleCase | None:
    axes, base = large.case.call.axes, draw_inputs(definition, large.base, device)
    indices = {axis: torch.tensor(rows, device=device) for axis, rows in large.rows.items()}
    period = {axis: torch.arange(axes[axis], device=device) % large.base.call.axes[axis] for axis in indices}
    inputs = {**at_indices(definition, base, period), **large.case.call.scalars}
    if broken_constraint(definition, axes, inputs) is not None:
        return None
    few = {axis: len(rows) for axis, rows in large.rows.items()}
    case = replace(large.case, call=replace(large.case.call, axes={**axes, **few}))
    compared = make_oracle_case(definition, case, device, inputs=at_indices(definition, inputs, indices))
    return None if compared is None else LargeOracleCase(OracleCase(large.case, inputs, {}, {}), compared, indices)


def _made_sparse(definition: Definition, large: LargeCase, device: str) -> LargeOracleCase | None:
    """Return a long call whose oracle has a few positions; None if the whole is affordable, or if other positions count."""
    ((axis, rows),) = large.rows.items()
    case = large.case
    if is_affordable(definition, case, device, unknown=True) or not leaves_the_rest_out(definition, case, axis, device):
        return None
    kept = torch.tensor(rows, device=device)
    inputs = without_weight(definition, draw_inputs(definition, case, device), axis, kept, case.seed)
    if inputs is None or broken_constraint(definition, case.call.axes, inputs) is not None:
        return None
    few = replace(case, call=replace(case.call, axes={**case.call.axes, axis: len(rows)}))
    compared = make_oracle_case(definition, few, device, inputs=at_indices(definition, inputs, {axis: kept}))
    return None if compared is None else LargeOracleCase(OracleCase(case, inputs, {}, {}), compared, {axis: kept})


PROBED_SIZES = (128, 256)
MAX_PROBED_ELEMENTS_ON_CPU, MAX_PROBED_ELEMENTS, MAX_PROBED_STEPS = 1 << 24, 1 << 26, 1 << 15
"""Maximum elements of a tensor inside a reference, such as the scores of all pairs of positions, and maximum steps."""


class _Effort(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of operations of a reference, and the elements of the largest tensor that one gives."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: see :class:`tilegym_db.verification.oracle.Lifted`."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = self.elements = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in tree_leaves(found) if isinstance(value, torch.Tensor)]
        self.steps += 1
        self.elements = max(self.elements, *sizes, 0)
        return found


def is_affordable(definition: Definition, case: Case, device: str, *, unknown: bool = False) -> bool:
    """Return True if a reference can be evaluated whole at a case whose one long axis is its largest.

    Two small sizes of that axis show how the steps and the tensors of the reference grow with it: by a loop over tokens, or with
    the square of their number. Other long axes keep their ratio to it. ``unknown`` is returned if that breaks a constraint.
    """
    axes, efforts = case.call.axes, []
    long = max(definition.var_axes, key=lambda name: axes[name])
    for size in PROBED_SIZES:
        sizes = {
            name: axes[name] if axes[name] <= PROBED_SIZES[-1] else max(1, axes[name] * size // axes[long])
            for name in definition.var_axes
        }
        try:
            small = replace(case, call=replace(case.call, axes=definition.bind_axes(sizes)))
            inputs = draw_inputs(definition, small, device)
            with _Effort() as effort:
                as_written(definition, inputs)
        except RecordError:
            return unknown
        efforts.append(effort)
    first, second = efforts
    octaves = math.log2(axes[long] / PROBED_SIZES[1])
    steps, elements = (
        after * (after / before) ** octaves
        for before, after in ((first.steps, second.steps), (first.elements, second.elements))
    )
    most = MAX_PROBED_ELEMENTS_ON_CPU if device == CPU else MAX_PROBED_ELEMENTS
    return bool(steps <= MAX_PROBED_STEPS and elements <= most)


def tied(case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs as the layouts of a case store them: elements that share an address are equal.

    Elements repeat along strides of zero. An input that lies at the place of another input is replaced by it.
    """
    found = dict(inputs)
    places = {name: shared_place(layout) for name, layout in case.call.layouts.items() if name in inputs}
    for name, place in sorted(places.items(), key=lambda item: item[1] is not None):
        value = found[name]
        if place is not None and place[1] == 0:
            found[name] = found[place[0]]
        elif value.numel():
            strides = layout_strides(case.call.layouts[name], value.shape, case.call.axes)
            first = value[tuple(slice(1) if step == 0 else slice(None) for step in strides)]
            found[name] = value if first.shape == value.shape else first.expand_as(value).contiguous()
    return found


def broken_constraint(definition: Definition, axes: Mapping[str, int], inputs: Mapping[str, Any]) -> str | None:
    """Return the first content constraint of the Definition that these inputs break, or None.

    Raises:
        RecordError: a constraint cannot be evaluated.
    """
    for text in definition.content_constraints:
        try:
            if not holds(text, {**axes, **inputs}):
                return text
        except Unknown as error:
            raise RecordError(
                f"{definition.name}: content_constraints: {error}.", code="content_constraint_failed"
            ) from None
    return None


def _may_overflow(definition: Definition, case: Case, inputs: Mapping[str, Any], written: Mapping[str, Any]) -> bool:
    """Return True if another order of operations may overflow, for contents near the end of a dtype's range.

    A reference that is its own oracle shows an overflow in its result. For other references, the check repeats the call with
    all terms of one sign: a sum that stays in range then does so in any order.
    """
    if not may_overflow(case.distribution) or not all(map(_is_finite, inputs.values())):
        return False
    if definition.oracle == "as_written":
        return not all(map(_is_finite, written.values()))
    of_one_sign = {name: value.abs() if _has_signs(value) else value for name, value in inputs.items()}
    sums = as_written(definition, of_one_sign)
    return any(
        bool((value.isfinite() & ~sums[name].isfinite()).any()) for name, value in written.items() if _has_signs(value)
    )


def _has_signs(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1


def _is_finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not value.is_floating_point() or bool(value.float().isfinite().all())


def _check_declared(definition: Definition, case: Case, outputs: Mapping[str, torch.Tensor]) -> None:
    for name, value in outputs.items():
        found = (tuple(value.shape), value.dtype)
        declared = (
            definition.shape_of(name, case.call.axes),
            storage_dtype(definition.dtype_of(name, case.call.dtypes)),
        )
        if found != declared:
            raise RecordError(
                f"{definition.name}: reference: '{name}' has shape {found[0]} and dtype {found[1]} at {case}, "
                f"but outputs.{name} declares {declared[0]} and {declared[1]}.",
                code="output_differs",
            )


# ---- positions of a long prompt -------------------------------------------------------------------
# Long calls of which an oracle is affordable at a few positions only, such as attention to all of 65,536 keys.
#
# All positions but a few get no weight: a column of the other inputs makes their scores so low that exp gives zero. What is
# left is the same operator at the few positions, which lie far apart. The reference of each operator is tried at a small
# size, because this does not hold for all. Then a kernel that leaves out keys far away is wrong, because most of the few are
# far from each other.

PROBED_SIZE, PROBED_POSITIONS = 160, 24
LIFT, SINK = 64.0, -16384.0
"""Values of one column: of all queries, and of the keys without weight. Their product ends every score near zero."""
_MATRIX = 2


def without_weight(
    definition: Definition, inputs: Mapping[str, Any], axis: str, kept: torch.Tensor, seed: int
) -> dict[str, Any] | None:
    """Return the inputs, changed so that a softmax over an axis leaves all indices out that are not kept.

    The first matrix gets a column of large numbers. Others get the same column: zero at kept indices of the axis, and far below
    zero elsewhere. None if no other matrix has rows along the axis.
    """
    matrices = [
        name
        for name in definition.tensor_inputs
        if len(definition.inputs[name].shape or ()) >= _MATRIX and inputs[name].dtype in LIFTED_DTYPES
    ]
    along = [name for name in matrices[1:] if (definition.inputs[name].shape or ())[-2] == axis]
    if not along or min(inputs[name].shape[-1] for name in (matrices[0], *along)) < _MATRIX:
        return None
    column = random.Random(f"column {seed}").randrange(min(inputs[name].shape[-1] for name in (matrices[0], *along)))
    found = {**inputs, **{name: inputs[name].clone() for name in (matrices[0], *along)}}
    found[matrices[0]][..., column] = LIFT
    for name in along:
        found[name][..., column] = SINK
        found[name][..., kept, column] = 0
    return found


def leaves_the_rest_out(definition: Definition, case: Case, axis: str, device: str) -> bool:
    """Return True if the reference gives the same results at some indices of an axis alone as among others without weight."""
    try:
        axes = definition.bind_axes({name: case.call.axes[name] for name in definition.var_axes} | {axis: PROBED_SIZE})
        small = replace(case, call=replace(case.call, axes=axes))
        drawn = random.Random(f"probe {case.seed}").sample(range(PROBED_SIZE), PROBED_POSITIONS)
        kept = torch.tensor(sorted(drawn), device=device)
        inputs = without_weight(definition, draw_inputs(definition, small, device), axis, kept, case.seed)
        if inputs is None:
            return False
        among = at_indices(definition, in_fp64(definition, inputs), {axis: kept})
        alone = in_fp64(definition, at_indices(definition, inputs, {axis: kept}))
    except RecordError:
        return False
    return all(
        value.dtype is torch.float64 and torch.allclose(among[name], value, rtol=1e-9, atol=1e-12)
        for name, value in alone.items()
    )

"""Cases with drawn inputs, the oracle's outputs and the error of the reference: of fuzz cases, and of a Workload's contents."""

from __future__ import annotations

import functools
import gc
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tilegym_db.errors import RecordError, StoreError, is_out_of_memory
from tilegym_db.records import Definition, Workload
from tilegym_db.records.definition_parts import layout_strides, shared_place
from tilegym_db.records.expressions import Unknown, holds
from tilegym_db.records.hardware import CPU
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.processes import free_memory
from tilegym_db.sandbox.shared_buffers import SlotPlan, plan_slot, storage_dtype
from tilegym_db.verification.comparison import check_reference, exact_outputs, followed, reference_errors
from tilegym_db.verification.conditioning import Uncertainties, may_be_moved
from tilegym_db.verification.distributions import (
    BLANK,
    RANGES,
    ROW_SCALE,
    VARIED,
    allowed_modifiers,
    may_overflow,
    shows_bias,
    vary_scalars,
)
from tilegym_db.verification.gates import ReferenceDeviation
from tilegym_db.verification.inputs import BlobReader, draw_inputs, draws_noise, draws_spread, spreads_otherwise
from tilegym_db.verification.large import LargeCase
from tilegym_db.verification.oracle import (
    LIFTED_DTYPES,
    Effort,
    as_written,
    at_indices,
    in_fp64,
    joined,
    joined_budget,
    joining_axis,
    oracle,
    parted,
)
from tilegym_db.verification.phases import MAKE_ORACLE, ORACLE, Phases


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
    draw: Callable[[], Mapping[str, Any]] | None = field(default=None, compare=False)
    """Draws large inputs again, which are not kept; see :meth:`without_tensors`."""
    evaluate: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]] | None = field(default=None, compare=False)
    """Computes large outputs again from the inputs."""
    uncertainties: Uncertainties = field(default_factory=Uncertainties, init=False, compare=False)
    """Of its elements, as far as a comparison has asked for them."""

    def without_tensors(
        self,
        draw: Callable[[], Mapping[str, Any]],
        evaluate: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]] | None,
    ) -> OracleCase:
        """Return the case without the memory of its inputs, and of its outputs if ``evaluate`` computes them again."""
        outputs = self.outputs if evaluate is None else {}
        return replace(self, inputs={}, outputs=outputs, draw=draw, evaluate=evaluate)

    def with_inputs(self) -> OracleCase:
        """Return the case with its inputs: this one if it has them, else one that is gone after its use."""
        return self if self.draw is None else replace(self, inputs=self.draw(), draw=None)

    def with_tensors(self) -> OracleCase:
        """Return the case with its inputs and outputs: this one if it has them, else one that is gone after its use."""
        found = self.with_inputs()
        return found if self.evaluate is None else replace(found, outputs=self.evaluate(found.inputs), evaluate=None)


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
        blobs: reads inputs from files.
        inputs: replace drawn inputs, by name.
    """
    if inputs is None:
        inputs = tied(case, draw_inputs(definition, case, device, blobs=blobs))
    if _is_broken(definition, case, inputs):
        return None
    written = as_written(definition, inputs)
    _check_declared(definition, case, written)
    truth = written if definition.oracle == "as_written" else oracle(definition, inputs)
    return _checked(definition, case, inputs, written, truth)


CANCELS = 0.999
"""Share of the sum of magnitudes below which terms of both signs are in a result."""

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
    """Return True if the drawn contents break a rule of the operator; raise if contents from files break one."""
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
    biased = shows_bias(case.distribution) and not case.spread_as  # equal ids share the rounding of a factor
    e_base, conditioned = reference_errors(definition, case.call.dtypes, written, own, shows_bias=biased)
    verdicts = check_reference(definition, case.call.dtypes, inputs, truth, written, e_base)
    if not all(verdict.passed for verdict in verdicts.values()) or _may_overflow(
        definition, case, inputs, written, truth
    ):
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
    """Draw a large case and evaluate the oracle at its compared rows; None if the case proves nothing."""
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


def is_affordable(definition: Definition, case: Case, device: str, *, unknown: bool = False) -> bool:
    """Return True if a reference can be evaluated at a large case without slicing it.

    The reference runs at two small sizes of the longest axis. They show how its steps and its memory grow, for example by a loop
    over tokens, or with their square. Other long axes keep their ratio to it. If the small sizes break a constraint, the answer
    is ``unknown``.
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
            with Effort() as effort:
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
    """Return the first content constraint of the Definition that these inputs break, or None."""
    for text in definition.content_constraints:
        try:
            if not holds(text, {**axes, **inputs}):
                return text
        except Unknown as error:
            raise RecordError(
                f"{definition.name}: content_constraints: {error}.", code="content_constraint_failed"
            ) from None
    return None


def _may_overflow(
    definition: Definition, case: Case, inputs: Mapping[str, Any], written: Mapping[str, Any], truth: Mapping[str, Any]
) -> bool:
    """Return True if another order of operations may overflow, for contents near the end of a dtype's range.

    A reference that is its own oracle shows an overflow in its result. For other references, the check repeats the call with
    all terms of one sign: a sum that stays in range then does so in any order. Of a result beyond the range, terms of both signs
    may leave NaN in another order, as parts of the sum are infinities that cancel.
    """
    if not may_overflow(case.distribution) or not all(map(_is_finite, inputs.values())):
        return False
    if definition.oracle == "as_written":
        return not all(map(_is_finite, written.values()))
    of_one_sign = {name: value.abs() if _has_signs(value) else value for name, value in inputs.items()}
    sums = as_written(definition, of_one_sign)
    signed = [name for name, value in written.items() if _has_signs(value)]
    if any(bool((written[name].isfinite() & ~sums[name].isfinite()).any()) for name in signed):
        return True
    beyond = {name: truth[name].isfinite() & ~written[name].isfinite() for name in signed}
    if not any(bool(elements.any()) for elements in beyond.values()):
        return False
    terms = oracle(definition, of_one_sign)
    return any(bool((truth[name].abs() < CANCELS * terms[name])[beyond[name]].any()) for name in signed)


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


# ---- contents ------------------------------------------------------------------------------------
# The contents of a Workload's calls with their oracle outputs: drawn once and shared by every Solution.


SLOW_ORACLE_S = 0.5
"""Seconds of an oracle above which those of several contents are evaluated together."""
MAX_FRESH_AT_ONCE = 8
KEPT_BYTES = 2 << 30
"""Bytes of inputs, or of outputs in float64, above which contents are made one at a time, and again when they are used."""

CONTENT_SETS = ("normal", ROW_SCALE, "outliers", "small_integers")

_FOR_LARGE_CALLS = tuple(name for name in CONTENT_SETS if name != ROW_SCALE)

# The seeds of one run are one secret number plus these offsets, so that no two cases share contents.
_OWN_SHAPE, _UNUSUAL, _OTHER, _FRESH = 1_000, 1_500, 2_000, 1_000_000


UNUSUAL_BYTES = 4 << 30
"""Maximum bytes of all unusual sets of one workload; above it, one set is used, which differs from run to run."""


def unusual_distributions(
    definition: Definition, workload: Workload, seed: int, max_bytes: int = UNUSUAL_BYTES
) -> tuple[str, ...]:
    """Return the content sets that are verified but not timed: those with an unusual spread of ids or lengths.

    Without such inputs there are none; if a file holds timed inputs, there are all.
    """
    others = tuple(name for name in CONTENT_SETS if workload.files() or spreads_otherwise(definition, name))
    if not others:
        return ()
    case = Case.of_workload(definition, workload, distribution=others[0], seed=0)
    if len(others) * plan_slot(definition, case).size <= max_bytes:
        return others
    return (others[(seed + int(workload.uuid.replace("-", ""), 16)) % len(others)],)


class ExpectedCache:
    """A cache of oracle cases, computed once per case and shared by every runner; thread-safe."""

    def __init__(
        self, definition: Definition, device: str, phases: Phases | None = None, *, roots: Sequence[Path] = ()
    ) -> None:
        """Create the cache for one Definition on one device; waiting time is added to ``phases``.

        Files with inputs lie below one of ``roots`` and are read once each.
        """
        self._definition = definition
        self._blobs = BlobReader(roots)
        self._phases = phases or Phases()
        self.device = device
        self._lock = threading.Lock()
        self._known: dict[str, Future[OracleCase | None]] = {}
        self._is_slow = False

    def get(self, case: Case) -> OracleCase | None:
        """Return the case with its oracle, or None if the reference itself fails it.

        Threads that ask for different cases do not wait for each other. An error is raised in every thread that waits for the
        case, and is not cached.
        """
        with self._phases(ORACLE):
            key, mine = case.key, Future[OracleCase | None]()
            with self._lock:
                found = self._known.setdefault(key, mine)
            if found is mine:
                try:
                    mine.set_result(self.once(case))
                except BaseException as error:
                    with self._lock:
                        self._known.pop(key, None)
                    mine.set_exception(error)
            try:
                return found.result()
            finally:
                del found, mine  # the frames of an error hold the tensors of the case, and would hold the error here

    def several(self, cases: Sequence[Case]) -> list[OracleCase | None]:
        """Return cases of one shape with their oracles without caching them; together if one of them takes long."""
        found: list[OracleCase | None] = []
        while not self._is_slow and len(found) < len(cases):
            began = time.perf_counter()
            found.append(self.once(cases[len(found)]))
            self._is_slow = time.perf_counter() - began > SLOW_ORACLE_S
        if len(found) < len(cases):
            with self._phases(MAKE_ORACLE, self._definition.name):
                found += make_oracle_cases(self._definition, cases[len(found) :], self.device, self._blobs)
        return found

    def once(self, case: Case) -> OracleCase | None:
        """Return the case with its oracle without caching it; see :meth:`get`.

        An oracle that lacks memory is tried again once PyTorch has given back what it keeps in pieces.
        """
        with self._phases(MAKE_ORACLE, self._definition.name):
            with suppress(torch.OutOfMemoryError):
                return make_oracle_case(self._definition, case, self.device, self._blobs)
            give_back_memory(self.device)
            return make_oracle_case(self._definition, case, self.device, self._blobs)

    def inputs_of(self, case: Case) -> Mapping[str, Any]:
        """Draw the inputs of a case again, without its oracle; large ones leave no memory in pieces behind."""
        inputs = tied(case, draw_inputs(self._definition, case, self.device, blobs=self._blobs))
        if self.device != CPU:
            torch.cuda.empty_cache()
        return inputs

    @raising_out_of_memory()
    def outputs_of(self, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Evaluate the oracle of large inputs again, as :meth:`once` does, and leave the memory that it took to the workers."""
        try:
            with suppress(torch.OutOfMemoryError):
                return oracle(self._definition, inputs)
            give_back_memory(self.device)
            return oracle(self._definition, inputs)
        finally:
            give_back_memory(self.device)

    def clear(self) -> None:
        """Forget everything, so that tensors of large workloads do not pile up."""
        with self._lock:
            self._known.clear()
            self._blobs.clear()


@dataclass
class WorkloadContents:
    """Contents of one Workload's own shape.

    ``sets`` are verified by every Solution and then reused for timing; ``dropped`` are those that the reference itself fails.
    ``fresh`` draws further contents, which a Solution sees once.

    If ids or lengths decide the amount of work, all of these spread them as usual in a model, so that every call takes the
    same time (``docs/decisions/inputs.md``, 0035). ``unusual`` are verified but never timed.

    Inputs from files are the same in all ``sets``, and are drawn in contents that are verified but not timed.
    """

    definition: Definition
    workload: Workload
    seed: int
    cache: ExpectedCache
    sets: list[OracleCase] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unusual: list[OracleCase] = field(default_factory=list)
    """Calls with an unusual spread of ids or lengths: over few groups, or all in one."""
    other: OracleCase | None = None
    """A second call of the shape with other ranges and scalars, verified in turn with the first."""
    kept_bytes: int = KEPT_BYTES
    """Contents with larger inputs or outputs are kept without them, unless a call overwrites inputs and timing restores them."""
    _fresh: dict[int, tuple[list[OracleCase], int]] = field(default_factory=dict)
    """By attempt: the contents, and how many were tried."""
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _seconds: float = 0.0
    _drawn: int = 0
    """How many contents all attempts drew, in ``_seconds``."""

    @classmethod
    def draw(
        cls,
        definition: Definition,
        workload: Workload,
        seed: int,
        cache: ExpectedCache,
        *,
        in_turn: bool = False,
        kept_bytes: int = KEPT_BYTES,
    ) -> WorkloadContents:
        """Return every content set; with ``in_turn``, the second call too.

        Raises:
            RecordError: this workload has no oracle.
            StoreError: the contents cannot fit in the memory of this machine.
            torch.OutOfMemoryError: the oracle does not fit in memory here.
        """
        contents = cls(definition, workload, seed, cache, kept_bytes=kept_bytes)
        contents._check_memory()
        others = unusual_distributions(definition, workload, seed)
        for kept, distributions, typical, offset in (
            (contents.sets, contents._distributions(), True, _OWN_SHAPE),
            (contents.unusual, others, False, _UNUSUAL),
        ):
            cases = [
                contents._case(distribution, offset + number, typical=typical, drawn=kept is contents.unusual)
                for number, distribution in enumerate(distributions)
            ]
            restored = kept is contents.sets and bool(definition.in_place)
            for case, expected in zip(cases, contents._evaluated(cases, keep=restored), strict=True):
                if expected is None:
                    contents.dropped.append(str(case))
                else:
                    kept.append(expected)
        if in_turn:
            blank = f"{VARIED}+{BLANK}" if BLANK in allowed_modifiers(definition, VARIED) else VARIED
            case = contents._case(blank, _OTHER, typical=False, drawn=True)
            scalars = vary_scalars(definition, case.call.scalars, VARIED, case.seed)
            (contents.other,) = contents._evaluated([replace(case, call=replace(case.call, scalars=scalars))])
        return contents

    def _distributions(self) -> tuple[str, ...]:
        """Return the content sets of the workload's own shape.

        Rows far apart in scale leave a few elements among millions that are right only within what moving the inputs shows.
        A call that is too large to be moved goes without them; fuzz cases have them at smaller shapes.
        """
        if self.is_fixed:
            return CONTENT_SETS[:1]
        axes = self._case(CONTENT_SETS[0], _OWN_SHAPE).call.axes
        return CONTENT_SETS if may_be_moved(self.definition, axes) else _FOR_LARGE_CALLS

    @property
    def verified(self) -> list[OracleCase]:
        """Every set that is verified at this shape: the timed ones, then the unusual ones."""
        return [*self.sets, *self.unusual]

    def fresh(self, attempt: int, count: int) -> Sequence[OracleCase]:
        """Return up to ``count`` contents that no Solution has seen before this attempt; the same ones for every Solution."""
        # Every Solution makes the first attempt, but few make later ones: of those only the newest is kept.
        self._fresh = {number: found for number, found in self._fresh.items() if number in (0, attempt)}
        self._draw_fresh(attempt, count)
        return self._fresh[attempt][0][:count]

    @property
    def seconds_of_fresh(self) -> float:
        """Seconds that one content of :meth:`fresh` took so far, with its oracle; 0 before the first."""
        return self._seconds / self._drawn if self._drawn else 0.0

    def draw_ahead(self, count: int, stopped: Callable[[], bool]) -> None:
        """Draw contents for the first attempt of :meth:`fresh` before they are needed, until ``stopped``.

        Drawing must have ended before :meth:`fresh` is called. Large contents are not drawn ahead: the
        workers that verify the shape then need the memory of their oracle.
        """
        if not self._is_large:
            self._draw_fresh(0, count, stopped)

    def _draw_fresh(self, attempt: int, count: int, stopped: Callable[[], bool] = lambda: False) -> None:
        # Inputs that the Definition draws as noise keep their range: other ranges may be ill-conditioned for some elements.
        varies, ranges = not draws_noise(self.definition), tuple(RANGES)
        known, tried = self._fresh.setdefault(attempt, ([], 0))
        while len(known) < count and tried < 4 * count and not stopped():
            cases = []
            for number in range(tried, min(tried + min(count - len(known), MAX_FRESH_AT_ONCE), 4 * count)):
                known_good = self.sets[number // 2 % len(self.sets)].case.distribution
                distribution = ranges[(self.seed + number // 2) % len(ranges)] if number % 2 and varies else known_good
                cases.append(self._case(distribution, _FRESH * (attempt + 1) + number, drawn=self.is_fixed))
            began = time.perf_counter()
            known += [drawn for drawn in self._evaluated(cases) if drawn is not None]
            self._seconds += time.perf_counter() - began
            self._drawn += len(cases)
            tried += len(cases)
            self._fresh[attempt] = known, tried

    def _evaluated(self, cases: Sequence[Case], *, keep: bool = False) -> list[OracleCase | None]:
        """Return cases of one shape with their oracles. Unless ``keep``, large tensors are in memory one case at a time."""
        if keep or not cases or not self._is_large:
            return self.cache.several(cases)
        found: list[OracleCase | None] = []
        evaluate = self.cache.outputs_of if self._has_large_outputs else None
        for case in cases:
            drawn = self.cache.once(case)
            found.append(drawn and drawn.without_tensors(functools.partial(self.cache.inputs_of, case), evaluate))
            del drawn
            give_back_memory(self.cache.device)  # an oracle takes many times the memory of the inputs
        return found

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other Solution is verified with large contents, since each has the inputs three times in memory."""
        with self._turn if self._is_large else nullcontext():
            yield

    @property
    def _has_large_outputs(self) -> bool:
        return self._bytes_of_oracle > self.kept_bytes

    @property
    def _is_large(self) -> bool:
        return self._has_large_outputs or sum(tensor.span for tensor in self._slot.inputs) > self.kept_bytes

    @functools.cached_property
    def _slot(self) -> SlotPlan:
        return plan_slot(self.definition, self._case(CONTENT_SETS[0], _OWN_SHAPE))

    @property
    def _bytes_of_oracle(self) -> int:
        return sum(8 * math.prod(tensor.shape) for tensor in self._slot.outputs)  # in float64

    def free_verified(self) -> None:
        """Free the memory of contents that are verified and not timed. Call it when every Solution is verified."""
        self.unusual = [replace(expected, inputs={}, outputs={}) for expected in self.unusual]
        if self.other is not None:
            self.other = replace(self.other, inputs={}, outputs={})

    @property
    def is_fixed(self) -> bool:
        """True if files hold every tensor: there is one content set, and drawn contents may differ in the amount of work."""
        drawn = {*self.definition.tensor_inputs} - {*self.definition.saved}
        return bool(drawn) and drawn <= {*self.workload.files()}

    def _check_memory(self) -> None:
        """Refuse contents larger than the memory: on a CPU, the kernel would end the process instead of the allocation."""
        inputs = sum(tensor.span for tensor in self._slot.inputs)
        kept = 1 if self.is_fixed or (self._is_large and not self.definition.in_place) else len(CONTENT_SETS)
        needed = kept * (inputs + self._bytes_of_oracle)
        device = self.cache.device
        available = free_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[1]
        if needed > available:
            raise StoreError(
                f"the contents of this workload need {needed / 1e9:.1f} GB of memory, and there are {available / 1e9:.1f} GB.",
                code="memory_short",
            )

    def _case(self, distribution: str, offset: int, *, typical: bool = True, drawn: bool = False) -> Case:
        case = Case.of_workload(self.definition, self.workload, distribution=distribution, seed=self.seed + offset)
        files = {} if drawn else case.files
        return replace(case, typical=typical and draws_spread(self.definition), files=files)

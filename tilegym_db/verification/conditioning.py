"""Accepts output elements whose error is explained by the rounding of their terms: small differences of large terms."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.verification.gates import OutputComparison, relative_error
from tilegym_db.verification.oracle import (
    LIFTED_DTYPES,
    as_written,
    in_fp64,
    in_fp64_together,
    joining_axis,
    lift,
    loops,
)

Outputs = Mapping[str, torch.Tensor]

STEP = 2.0**-19
"""Inputs are multiplied by 1 plus or minus at most this. A float32 kernel rounds each term a few times by up to 2**-24; half
of the moves move an element as far as ten such errors of its terms. Products of bfloat16 parts that leave one part out are
off by 2**-17, those of TF32 by 2**-11."""
DRAWS = 4
SLACK_OF_ONE_DRAW = 16.0
"""Factor on the move of the first draw, which is a rough estimate. An error beyond it is not checked with more draws."""
SPREAD = 3.0
"""Roundings of half precision add up to a normal distribution, and draws show its standard deviation; correct errors are up
to three times that. ``STEP`` needs no such factor, because it is many roundings of float32."""
MAX_ASYMMETRY = 0.25
"""Maximum asymmetry of the moves forth and back, as a share of the way. Above it, the element jumps, and its side is certain."""
MAX_EXCUSED_SHARE = 0.01
"""Maximum share of an output's elements that may be excused, at least one; a kernel with more errors is wrong."""
_GATES = frozenset({"rel_fro", "worst_row", "elementwise"})
MAX_ELEMENTS = 1 << 27
"""Maximum numbers in the inputs and an output, so that eight more evaluations of the oracle stay within seconds."""
SAME_IN_FP64 = 0.01
"""Maximum relative difference between the reference in fp64 and its oracle; above it, moves in fp64 say nothing."""
SEED = 20_261_127
MAX_MOVES_AT_ONCE = 5
"""Moves whose references are evaluated together, forth and back."""

_Move = tuple[Sequence[str], float, int]
"""The inputs to move, the maximum step relative to each number, and a seed."""


def excuse_ill_conditioned(
    definition: Definition,
    inputs: Mapping[str, Any],
    truth: Outputs,
    outputs: Outputs,
    check: Callable[[Outputs], Mapping[str, OutputComparison]],
    *,
    math: str = "ieee",
    uncertainties: Uncertainties | None = None,
) -> dict[str, OutputComparison]:
    """Check outputs, and accept failing elements that are ill-conditioned in float32, or in TF32 if that is declared.

    Args:
        check: compares outputs through the gates.
        uncertainties: those of earlier comparisons with this oracle.

    Returns:
        A comparison for each output. Its figures exclude the excused elements, so that passing figures are within bounds.
    """
    verdicts = dict(check(outputs))
    refused = [name for name, verdict in verdicts.items() if not verdict.passed]
    tf32 = math == "tf32" and any(_is_float32(value) for value in inputs.values())

    def may_be_excused(share: float) -> bool:
        return all(
            _may_be_ill_conditioned(definition, inputs, outputs[name], verdicts[name], share) for name in refused
        )

    if not refused or not may_be_excused(1.0 if tf32 else MAX_EXCUSED_SHARE):
        return verdicts
    if tf32:
        rounding = _tf32_rounding(definition, inputs, truth)
        known = {name: _settled(outputs[name], truth[name], rounding[name]) for name in refused if name in rounding}
        excused = dict(check({**outputs, **known}))
        if all(verdict.passed for verdict in excused.values()):
            return excused
        if not may_be_excused(MAX_EXCUSED_SHARE):
            return verdicts
    excused, uncertainties = verdicts, uncertainties or Uncertainties()
    for draws, factor in ((1, SLACK_OF_ONE_DRAW), (DRAWS, 1.0)):
        found = uncertainties.after(draws, definition, inputs, truth)
        if found is None:
            return verdicts
        known = {name: _settled(outputs[name], truth[name], factor * found[name]) for name in refused if name in found}
        excused = dict(check({**outputs, **known}))
        if not all(verdict.passed for verdict in excused.values()):
            return verdicts
    return excused


def _may_be_ill_conditioned(
    definition: Definition, inputs: Mapping[str, Any], output: torch.Tensor, verdict: OutputComparison, share: float
) -> bool:
    """Return True if at most a share of the numbers fails and more evaluations of the oracle fit in memory.

    Index outputs, and outputs that follow from them, change with the choice and are never excused.
    """
    if definition.gathers or definition.follows or definition.sampled or output.dtype not in LIFTED_DTYPES:
        return False
    elements = output.numel()
    wrong = round((1.0 - verdict.matched_ratio) * elements)
    moved = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
    return verdict.gate in _GATES and wrong <= max(1, int(share * elements)) and moved + elements <= MAX_ELEMENTS


def may_be_moved(definition: Definition, axes: Mapping[str, int]) -> bool:
    """Return True if the numbers of a call and of each output are few enough for evaluations of moved inputs."""
    inputs = sum(math.prod(definition.shape_of(name, axes)) for name in definition.tensor_inputs)
    outputs = (math.prod(definition.shape_of(name, axes)) for name in definition.outputs)
    return inputs + max(outputs, default=0) <= MAX_ELEMENTS


class Uncertainties:
    """Uncertainties of the elements of one case, computed on first use and kept for all its comparisons; thread-safe."""

    def __init__(self) -> None:
        """Start without uncertainties; ``seconds`` is the time spent on computing them."""
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._known: dict[tuple[tuple[str, ...], int], dict[str, torch.Tensor] | None] = {}
        self._begun: dict[tuple[str, ...], tuple[Iterator[dict[str, _Moved]], list[dict[str, _Moved]]]] = {}

    def after(
        self, draws: int, definition: Definition, inputs: Mapping[str, Any], truth: Outputs
    ) -> dict[str, torch.Tensor] | None:
        """Return the uncertainty of each element by output after some draws; None if fewer were made.

        ``definition`` may lack outputs that a Solution omits. The other arguments are those of the case.
        """
        outputs = tuple(definition.outputs)
        with self._lock:
            if (outputs, draws) not in self._known:
                began = time.perf_counter()
                moves, found = self._begun.setdefault(outputs, (_moves(definition, inputs, truth), []))
                found.extend(islice(moves, draws - len(found)))
                self._known[outputs, draws] = (
                    None
                    if len(found) < draws
                    else {name: _uncertainty([each[name] for each in found]) for name in found[0]}
                )
                if len(found) >= DRAWS:
                    del self._begun[outputs]
                self.seconds += time.perf_counter() - began
            return self._known[outputs, draws]


class _Moved(NamedTuple):
    """The distances that one draw moves an output by: with all inputs at once, and squared, by half-precision inputs alone."""

    together: torch.Tensor
    half_precision: torch.Tensor


def _moves(definition: Definition, inputs: Mapping[str, Any], truth: Outputs) -> Iterator[dict[str, _Moved]]:
    """Yield per draw how far each element moves if every input number moves by up to ``STEP`` of itself, or by its rounding.

    The second kind moves each half-precision input alone by the rounding of its dtype, because kernels and the reference
    round weights to that dtype before they multiply them. Each draw is evaluated in fp64, forth and back. Inputs that the
    oracle reads one slice at a time stay unchanged.

    Yields:
        Output name -> absolute distances, in the output's shape. An output is absent if the fp64 reference differs from its
        oracle: codes, their scales, and results of float32 bits. There are no draws if the reference cannot be evaluated in
        fp64 or the memory does not suffice.
    """
    try:
        distances, lifted = _distances(definition, inputs, truth)
        numbers = [name for name in lifted if _is_number_to_move(inputs[name])]
        for seed in count(SEED):
            halves = _half_precision(inputs, numbers)
            together, *alone = distances([(numbers, STEP, seed), *(([one], rounds, seed) for one, rounds in halves)])
            squares = {name: torch.zeros_like(value) for name, value in together.items()}
            for each in alone:
                for name, value in each.items():
                    squares[name] += value.square()
            yield {name: _Moved(together[name], squares[name]) for name in together}
    except (RecordError, torch.OutOfMemoryError):  # such as a reference that reads the bits of a float32
        return


def _distances(
    definition: Definition, inputs: Mapping[str, Any], truth: Outputs
) -> tuple[Callable[[Sequence[_Move]], list[dict[str, torch.Tensor]]], dict[str, Any]]:
    """Return a function that moves some inputs by up to a step of themselves, by a seed, and the inputs that it may move in fp64.

    The function returns for each move the distance of every element by output, as :func:`_moves` yields it.
    """
    if definition.oracle == "as_written" and _is_recurrence(definition, inputs):
        return _distances_as_written(definition, inputs, truth)
    lifted = lift({name: value for name, value in inputs.items() if name not in definition.sliced_inputs})
    start = truth if definition.oracle == "lifted" else in_fp64(definition, inputs)
    judged = [
        name
        for name, value in start.items()
        if truth[name].is_floating_point() and relative_error(value, truth[name]) <= SAME_IN_FP64
    ]

    def some(moves: Sequence[_Move]) -> list[dict[str, torch.Tensor]]:
        calls = [
            {**inputs, **{name: _moved(lifted[name], seed, way * step) for name in names}}
            for names, step, seed in moves
            for way in (1.0, -1.0)
        ]
        ends = in_fp64_together(definition, calls)
        return [
            {name: _distance(start[name], forth[name], back[name]) for name in judged}
            for forth, back in zip(ends[::2], ends[1::2], strict=True)
        ]

    def distances(moves: Sequence[_Move]) -> list[dict[str, torch.Tensor]]:
        if joining_axis(definition) is not None:
            try:
                parts = range(0, len(moves), MAX_MOVES_AT_ONCE)
                return [one for first in parts for one in some(moves[first : first + MAX_MOVES_AT_ONCE])]
            except torch.OutOfMemoryError:
                pass  # one move at a time may fit
        return [one for move in moves for one in some([move])]

    return distances, lifted


# ---- recurrences with roundings -------------------------------------------------------------------
# A reference that rounds on purpose is no longer itself in fp64. Over a long recurrence a rounded step moves everything after
# it, so distances of the lifted reference would say nothing. It runs as written, in fp64 for the inputs that it does not round.

UNROUNDED = 1e-6
"""Maximum relative difference that lifting an input to fp64 makes to the outputs of a reference that does not round it."""
_unrounded: dict[str, tuple[str, ...]] = {}
"""Reference -> its inputs that it does not round, found at the first case that asks."""


def _is_recurrence(definition: Definition, inputs: Mapping[str, Any]) -> bool:
    """Return True if a reference loops over numbers that are no codes. Quantisers also loop, over the parts of a product."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    return loops(definition.reference) and all(value.dtype in LIFTED_DTYPES for value in tensors)


def _distances_as_written(
    definition: Definition, inputs: Mapping[str, Any], truth: Outputs
) -> tuple[Callable[[Sequence[_Move]], list[dict[str, torch.Tensor]]], dict[str, Any]]:
    """Return what :func:`_distances` does, with the inputs that the reference does not round."""
    names = _unrounded.get(definition.reference)
    if names is None:
        names = tuple(name for name in inputs if _is_unrounded(definition, inputs, truth, name))
        _unrounded[definition.reference] = names
    lifted = {name: inputs[name].double() for name in names}
    judged = [name for name, value in truth.items() if value.is_floating_point()]

    def distances(moves: Sequence[_Move]) -> list[dict[str, torch.Tensor]]:
        found = []
        for moved, step, seed in moves:
            forth, back = (
                as_written(
                    definition, {**inputs, **lifted, **{name: _moved(lifted[name], seed, way * step) for name in moved}}
                )
                for way in (1.0, -1.0)
            )
            found.append({name: _distance(truth[name], forth[name], back[name]) for name in judged})
        return found

    return distances, lifted


def _is_unrounded(definition: Definition, inputs: Mapping[str, Any], truth: Outputs, name: str) -> bool:
    value = inputs[name]
    if not _is_number_to_move(value):
        return False
    try:
        found = as_written(definition, {**inputs, name: value.double()})
        moved = as_written(definition, {**inputs, name: _moved(value.double(), SEED, STEP)})
    except RecordError:
        return False
    is_same = all(
        relative_error(found[output].double(), expected.double()) <= UNROUNDED
        for output, expected in truth.items()
        if expected.is_floating_point()
    )
    # One that is rounded back swallows a move.
    return is_same and any(not torch.equal(found[output], moved[output]) for output in truth)


# ---- TF32 -----------------------------------------------------------------------------------------
# Tensor cores read ten bits of the mantissa of each float32 operand of a product, and sum in float32. The operands may be
# rounded to nearest or cut off. Each error is small beside its operand, and not beside the sum if its terms cancel. So no bound
# relative to the sum, or to its row, holds: one in two verifications of correct kernels was refused (decision 0060). The
# errors of the terms are mostly independent, so their effect is a standard deviation per element, which random moves of the
# inputs show. Equal operands, and the mean of what is cut off, err alike, which the rounded inputs themselves show. Operands
# with seven bits, as bfloat16 has them, are off by eight times that.

TF32_STEP = 2.0**-11
"""Maximum rounding of an operand relative to itself, and maximum distance of a cut-off operand from the mean of the cut-off."""
TF32_DRAWS = 16
TF32_SPREAD = 6.0
"""Factor on the standard deviation. Sixteen draws show it within a half, and an operand that is itself a result adds to it."""
_TF32_LOST_BITS, _HALF_OF_THEM = 0x1FFF, 0x1000


def _tf32_rounding(definition: Definition, inputs: Mapping[str, Any], truth: Outputs) -> dict[str, torch.Tensor]:
    """Return how far a correct product in TF32 may move each element; empty if the oracle cannot be evaluated with moved inputs.

    It is twice the move by rounding the inputs either way, plus :data:`TF32_SPREAD` standard deviations of random moves.
    """
    try:
        distances, lifted = _distances(definition, inputs, truth)
        numbers = [name for name in lifted if _is_float32(inputs[name])]
        draws = distances([(numbers, TF32_STEP, SEED + number) for number in range(TF32_DRAWS)])
        rounded = [
            in_fp64(definition, {**inputs, **{name: _to_tf32(inputs[name], added) for name in numbers}})
            for added in (0, _HALF_OF_THEM)
        ]
    except (RecordError, torch.OutOfMemoryError):
        return {}
    found = {}
    for name in draws[0]:
        deviation = torch.stack([each[name] for each in draws]).square().mean(dim=0).sqrt()
        moved = torch.stack([each[name].double() - truth[name].double() for each in rounded]).abs().amax(dim=0)
        found[name] = 2.0 * torch.nan_to_num(moved, nan=0.0, posinf=0.0, neginf=0.0) + TF32_SPREAD * deviation
    return found


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _to_tf32(value: torch.Tensor, added: int) -> torch.Tensor:
    """Return the tensor with ten bits of the mantissa, after a number was added to the others: 0 cuts them off."""
    rounded = ((value.contiguous().view(torch.int32) + added) & ~_TF32_LOST_BITS).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)


def _uncertainty(draws: Sequence[_Moved]) -> torch.Tensor:
    """Return the uncertainty of each element: the lower median of the draws plus :data:`SPREAD` times the half-precision rms.

    The lower median ignores a jump in a single draw.
    """
    together = torch.stack([each.together for each in draws]).sort(dim=0).values[(len(draws) - 1) // 2]
    return together + SPREAD * torch.stack([each.half_precision for each in draws]).mean(dim=0).sqrt()


def _settled(output: torch.Tensor, truth: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Return the output with the oracle's value for each element within ``distance`` of it."""
    near = (output.double() - truth.double()).abs() <= distance
    return torch.where(near, truth.to(output.dtype), output)


def _is_number_to_move(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LIFTED_DTYPES


def _half_precision(inputs: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, float]]:
    """Return the inputs whose dtype rounds by more than ``STEP``, with that rounding."""
    rounds = {name: torch.finfo(inputs[name].dtype).eps / 2 for name in names}
    return [(name, step) for name, step in rounds.items() if step > STEP]


def _moved(value: torch.Tensor, seed: int, most: float) -> torch.Tensor:
    generator = torch.Generator(value.device).manual_seed(seed)
    step = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device) * 2 - 1
    return value * (1.0 + most * step)


def _distance(start: torch.Tensor, forth: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Return half of the way between both ends if the start is about in the middle; else zero."""
    start, forth, back = start.double(), forth.double(), back.double()
    way = (forth - back).abs()
    distance = torch.where((forth + back - 2 * start).abs() <= MAX_ASYMMETRY * way, way / 2, 0.0)
    return torch.nan_to_num(distance, nan=0.0, posinf=0.0, neginf=0.0)

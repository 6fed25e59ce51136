"""Tells an element that nobody's arithmetic gives any better, a small difference of large terms, from one that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.verify.gates import OutputVerdict, relative_error
from tilegym_db.verify.oracle import LIFTED_DTYPES, in_fp64, lift

Outputs = Mapping[str, torch.Tensor]

STEP = 2.0**-19
"""Inputs are multiplied by 1 plus or minus at most this. A kernel that computes in float32 rounds each term a few times by up to
2**-24; by half of the moves an element moves as far as ten such errors of its terms. Products of bfloat16 parts that leave one
out are off by 2**-17, those of TF32 by 2**-11."""
DRAWS = 4
SLACK_OF_ONE_DRAW = 16.0
"""What one draw moves an element by says little; where not even so much explains an error, more draws will not."""
SPREAD = 3.0
"""Roundings of half precision add up to a normal distribution, and draws show its standard deviation: an honest error is up to
three times that. ``STEP`` needs no such factor, since it is many roundings of float32."""
LEAST_SYMMETRIC = 0.25
"""Where moving inputs back does not move an element back, to this share, it jumps: which side it is on is known exactly."""
MOST_UNCERTAIN = 0.01
"""Share of an output's elements that may be excused, or one: a kernel that is off in more of them is wrong."""
_GATES = frozenset({"rel_fro", "worst_row", "elementwise"})
MOST_ELEMENTS = 1 << 27
"""Numbers in the inputs and an output, up to which evaluating the oracle eight more times takes neither minutes nor gigabytes."""
SAME_IN_FP64 = 0.01
"""How far the reference in fp64 may be off its oracle, as a whole, for moves of the one to tell what is known of the other."""
SEED = 20_261_127


def without_uncertain(
    definition: Definition,
    inputs: Mapping[str, Any],
    truth: Outputs,
    outputs: Outputs,
    check: Callable[[Outputs], Mapping[str, OutputVerdict]],
) -> dict[str, OutputVerdict]:
    """What the gates say of outputs, without the elements that nobody can know any better where they alone fail.

    Args:
        definition: the operator.
        inputs: what the call was given.
        truth: the oracle's outputs.
        outputs: the call's.
        check: puts outputs through the gates.

    Returns:
        A verdict for each output. Its figures leave out what was excused, so that they are within the bounds of what passes.
    """
    verdicts = dict(check(outputs))
    refused = [name for name, verdict in verdicts.items() if not verdict.passed]
    if not refused or not all(_may_be_uncertain(definition, inputs, outputs[name], verdicts[name]) for name in refused):
        return verdicts
    excused, found = verdicts, list[dict[str, _Moved]]()
    moves = _moves(definition, inputs, truth)
    for draws, factor in ((1, SLACK_OF_ONE_DRAW), (DRAWS, 1.0)):
        found.extend(islice(moves, draws - len(found)))
        if len(found) < draws:
            return verdicts
        known = {
            name: _settled(outputs[name], truth[name], factor * _uncertainty([each[name] for each in found]))
            for name in refused
            if name in found[0]
        }
        excused = dict(check({**outputs, **known}))
        if not all(verdict.passed for verdict in excused.values()):
            return verdicts
    return excused


def _may_be_uncertain(
    definition: Definition, inputs: Mapping[str, Any], output: torch.Tensor, verdict: OutputVerdict
) -> bool:
    """Return True if it makes sense to ask: only a few numbers are off, and evaluating the oracle some more times takes
    no gigabytes.

    What points into something, or follows from such a choice, changes with the choice and is never excused.
    """
    if definition.gathers or definition.follows or definition.sampled or output.dtype not in LIFTED_DTYPES:
        return False
    elements = output.numel()
    wrong = round((1.0 - verdict.matched_ratio) * elements)
    moved = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
    return (
        verdict.gate in _GATES and wrong <= max(1, int(MOST_UNCERTAIN * elements)) and moved + elements <= MOST_ELEMENTS
    )


class _Moved(NamedTuple):
    """How far a draw moves the elements of an output: with all inputs together, and the squares with those of half precision."""

    together: torch.Tensor
    half_precision: torch.Tensor


def _moves(definition: Definition, inputs: Mapping[str, Any], truth: Outputs) -> Iterator[dict[str, _Moved]]:
    """Draw after draw, how far each element of an output moves where every number that goes in moves by up to ``STEP`` of itself;
    and where each input of half precision moves alone, by what its dtype rounds: kernels and the reference alike round weights to
    it before they multiply them with such an input.

    Each draw is evaluated in fp64, forth and back. Inputs that the oracle takes one slice at a time stay as they are.

    Yields:
        Output name -> absolute distances, in the output's shape. An output is absent where the reference says something else in
        fp64 than the oracle does: codes, their scales, and what comes of the bits of a float32. There are no draws where the
        reference cannot be evaluated in fp64 or there is no memory for it.
    """
    lifted = lift({name: value for name, value in inputs.items() if name not in definition.sliced_inputs})
    numbers = [name for name in lifted if _is_number_to_move(inputs[name])]
    try:
        start = truth if definition.oracle == "lifted" else in_fp64(definition, inputs)
        judged = [
            name
            for name, value in start.items()
            if truth[name].is_floating_point() and relative_error(value, truth[name]) <= SAME_IN_FP64
        ]

        def distances(names: Sequence[str], step: float, seed: int) -> dict[str, torch.Tensor]:
            forth, back = (
                in_fp64(definition, {**inputs, **{name: _moved(lifted[name], seed, way * step) for name in names}})
                for way in (1.0, -1.0)
            )
            return {name: _distance(start[name], forth[name], back[name]) for name in judged}

        for seed in count(SEED):
            together = distances(numbers, STEP, seed)
            squares = {name: torch.zeros_like(value) for name, value in together.items()}
            for alone, rounds in _half_precision(inputs, numbers):
                for name, value in distances([alone], rounds, seed).items():
                    squares[name] += value.square()
            yield {name: _Moved(together[name], squares[name]) for name in judged}
    except (RecordError, torch.OutOfMemoryError):  # such as a reference that reads the bits of a float32
        return


def _uncertainty(draws: Sequence[_Moved]) -> torch.Tensor:
    """What nobody knows an element any better than: the lower median of the draws, so that a jump which one of them meets counts
    for nothing, and :data:`SPREAD` times the rms of what half precision moves it by."""
    together = torch.stack([each.together for each in draws]).sort(dim=0).values[(len(draws) - 1) // 2]
    return together + SPREAD * torch.stack([each.half_precision for each in draws]).mean(dim=0).sqrt()


def _settled(output: torch.Tensor, truth: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Return the output with the oracle's value for each element that is no further from it than that."""
    near = (output.double() - truth.double()).abs() <= distance
    return torch.where(near, truth.to(output.dtype), output)


def _is_number_to_move(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LIFTED_DTYPES


def _half_precision(inputs: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, float]]:
    """Of these inputs those that a number on the way may be rounded like, and by how much that is."""
    rounds = {name: torch.finfo(inputs[name].dtype).eps / 2 for name in names}
    return [(name, step) for name, step in rounds.items() if step > STEP]


def _moved(value: torch.Tensor, seed: int, most: float) -> torch.Tensor:
    generator = torch.Generator(value.device).manual_seed(seed)
    step = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device) * 2 - 1
    return value * (1.0 + most * step)


def _distance(start: torch.Tensor, forth: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Half of the way from one end to the other, where the start is about in its middle; else zero."""
    start, forth, back = start.double(), forth.double(), back.double()
    way = (forth - back).abs()
    distance = torch.where((forth + back - 2 * start).abs() <= LEAST_SYMMETRIC * way, way / 2, 0.0)
    return torch.nan_to_num(distance, nan=0.0, posinf=0.0, neginf=0.0)

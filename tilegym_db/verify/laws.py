"""Judges outputs of indices drawn at random by their law: a function of the reference that the harness evaluates beside ``run``.

It runs in fp64 as the oracle does, on the inputs of the call and a part of the rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.index_rules import ROUNDING
from tilegym_db.records.tolerance import LIMITS
from tilegym_db.verify.reference import Lifted, evaluate_function, lift
from tilegym_db.verify.sampling import Draws, check_drawn, place
from tilegym_db.verify.verdicts import PASSED, OutputVerdict

__all__ = ["check_sampled_outputs"]

ELEMENTS_AT_ONCE = 1 << 24
"""Of the inputs of the rows that are judged together; in fp64, with what is sorted and added up of them, about 2 GB."""
_WORD = 0x9E3779B97F4A7C15 - (1 << 64)

Inputs = Mapping[str, Any]
Outputs = Mapping[str, torch.Tensor]


def check_sampled_outputs(
    definition: Definition,
    inputs: Inputs,
    truth: Outputs,
    calls: Sequence[Outputs],
    *,
    elements_at_once: int = ELEMENTS_AT_ONCE,
) -> dict[str, OutputVerdict]:
    """A verdict for each output that is drawn at random.

    Args:
        definition: says which outputs these are, and what their laws are.
        inputs: what the calls were given, but for their random numbers.
        truth: the reference's outputs for the first call.
        calls: the outputs of calls that differ in their random numbers alone.
        elements_at_once: the elements of the inputs of the rows that are judged together.

    Raises:
        RecordError: a law raises, or gives something other than a row of weights for each draw.
    """
    return {
        name: _check(
            definition, name, inputs, truth[name], torch.stack([call[name] for call in calls]), elements_at_once
        )
        for name in definition.sampled
        if name in calls[0]
    }


def _check(
    definition: Definition, name: str, inputs: Inputs, truth: torch.Tensor, drawn: torch.Tensor, at_once: int
) -> OutputVerdict:
    if drawn.numel() == 0:
        return PASSED
    parts, keys, start = [], [], 0
    for given in _parts(definition, name, inputs, at_once):
        law, widest, narrowest = _laws(definition, name, given)
        parts.append(place(drawn[:, start : start + len(law)], law, widest, narrowest))
        keys.append(_keys(law))
        start += len(law)
    draws = Draws.together(parts)
    same, law_of_same = _most_alike(definition, name, inputs, torch.cat(keys), draws.judged[0], at_once)
    return check_drawn(name, drawn, draws, truth, same, law_of_same)


def _parts(definition: Definition, name: str, inputs: Inputs, at_once: int) -> Iterator[Inputs]:
    """The inputs in groups of rows; all at once where some input has the rows in another place than first."""
    axis, shapes = definition.outputs[name].shape, {key: spec.shape or () for key, spec in definition.inputs.items()}
    rows = len(inputs[definition.sampled[name].uniforms])
    of_rows = {key: inputs[key] for key, shape in shapes.items() if shape[:1] == axis}
    step = max(1, at_once // max(value[:1].numel() for value in of_rows.values()))
    if any(entry == axis for shape in shapes.values() for entry in (shape[i : i + 1] for i in range(1, len(shape)))):
        step = rows
    for start in range(0, rows, step):
        yield {**inputs, **{key: value[start : start + step] for key, value in of_rows.items()}}


def _laws(definition: Definition, name: str, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The law of each row, and the widest and the narrowest that rounding makes of it; each ``[rows, columns]``."""
    function, rounding = definition.sampled[name].law, LIMITS["float32"].rtol
    found = []
    for moved in (0.0, rounding, -rounding):
        mode: Any = Lifted
        with mode():
            value = evaluate_function(definition, function, lift(inputs), {ROUNDING: moved})
        shape = inputs[definition.sampled[name].uniforms].shape
        if not isinstance(value, torch.Tensor) or value.shape[:-1] != shape or not value.dtype.is_floating_point:
            what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise RecordError(
                f"{definition.name}: {function} gives {what}, not a row of weights for each of {list(shape)}.",
                code="law_shape_differs",
            )
        found.append(value.double())
    return found[0], found[1], found[2]


def _keys(law: torch.Tensor) -> torch.Tensor:
    """A number for each row by which equal laws are told."""
    bits = law.contiguous().view(torch.int64)
    places = torch.arange(1, law.shape[-1] + 1, dtype=torch.int64, device=law.device) * _WORD
    return ((bits ^ (bits >> 29)) * (places | 1)).sum(dim=-1)


def _most_alike(
    definition: Definition, name: str, inputs: Inputs, keys: torch.Tensor, judged: torch.Tensor, at_once: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The rows of the law that most rows have, and this law; of a single row where no two are alike."""
    if not bool(judged.any()):
        return None, None
    values, counts = torch.unique(keys[judged], return_counts=True)
    same = (keys == values[counts.argmax()]) & judged
    row = int(same.nonzero()[0])
    for given in _parts(definition, name, inputs, at_once):
        rows = len(given[definition.sampled[name].uniforms])
        if row < rows:
            law = _laws(definition, name, given)[0][row]
            return same, law / law.sum()
        row -= rows
    return None, None

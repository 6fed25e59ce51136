"""What a router ranks, and what follows from a choice: functions of a reference that the harness evaluates beside ``run``.

A router may rank values that are neither input nor output (probabilities, scores with a bias added), so that its indices can be
judged by no tensor of the call. The Definition names a function of its reference that gives these values (``gathers``), and one
for each output that depends on which of several equal values was chosen (``follows``). Both run as the oracle does, in fp64 or
as they are written, on the inputs of the call, and on nothing of a Solution but the indices that it chose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.index_rules import ROUNDING
from tilegym_db.records.tolerance import LIMITS
from tilegym_db.verify.indices import check_ranked
from tilegym_db.verify.reference import Lifted, evaluate_function, lift
from tilegym_db.verify.torch_dtypes import dtype_name
from tilegym_db.verify.verdicts import OutputVerdict

__all__ = ["check_ranked_outputs", "followed"]

Inputs = Mapping[str, Any]
Outputs = Mapping[str, torch.Tensor]


def check_ranked_outputs(definition: Definition, inputs: Inputs, outputs: Outputs) -> dict[str, OutputVerdict]:
    """A verdict for each output of indices into values that a function of the reference ranks.

    Args:
        definition: says which outputs these are.
        inputs: what the call was given.
        outputs: the call's, in the declared shapes.

    Raises:
        RecordError: a function of the reference raises, or gives something other than a row of values per row of indices.
    """
    verdicts = {}
    for name, source in definition.gathers.items():
        if name not in outputs or source in definition.inputs or source in definition.outputs:
            continue
        index, rounding = outputs[name].long(), LIMITS["float32"].rtol
        # In the dtype in which the reference as written ranks, equal is what its rounding cannot tell apart.
        written = _ranked(definition, source, inputs, name, torch.zeros_like(index), rounding)
        limits, columns = LIMITS[dtype_name(written.dtype)], written.shape[-1]
        chosen = index.clamp(0, columns - 1)  # what points outside is refused below, and indexes nothing before that
        if definition.oracle == "as_written":
            ranked = _ranked(definition, source, inputs, name, chosen, limits.rtol).double()
        else:
            with _lifted():
                ranked = _ranked(definition, source, lift(inputs), name, chosen, limits.rtol).double()
        smallest, ordered = float(torch.finfo(written.dtype).tiny), name not in definition.unordered
        verdicts[name] = check_ranked(name, outputs[name], ranked, limits, smallest, ordered=ordered)
    return verdicts


def followed(
    definition: Definition, inputs: Inputs, truth: Outputs, outputs: Outputs, wrong: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The oracle's outputs, with those that follow from indices evaluated for the indices that a call chose.

    Args:
        definition: says which outputs follow, and by which function.
        inputs: what the call was given.
        truth: the oracle's outputs.
        outputs: the call's.
        wrong: outputs of indices that are refused already: the oracle's take their place.
    """
    found = dict(truth)
    if not definition.follows or any(name not in outputs for name in definition.gathers):
        return found
    indices = {name: (truth if name in wrong else outputs)[name].long() for name in definition.gathers}
    rounding = LIMITS["float32"].rtol
    for name, function in definition.follows.items():
        if name not in outputs:
            continue
        if definition.oracle == "as_written":
            value = evaluate_function(definition, function, inputs, indices | {ROUNDING: rounding})
        else:
            with _lifted():
                value = evaluate_function(definition, function, lift(inputs), indices | {ROUNDING: rounding})
        if not isinstance(value, torch.Tensor) or value.shape != truth[name].shape:
            raise RecordError(
                f"{definition.name}: {function} does not give '{name}' in the shape that run gives it.",
                code="follows_shape_differs",
            )
        found[name] = value
    return found


def _lifted() -> Any:
    mode: Any = Lifted
    return mode()


def _ranked(
    definition: Definition, function: str, inputs: Inputs, name: str, index: torch.Tensor, rounding: float
) -> torch.Tensor:
    value = evaluate_function(definition, function, inputs, {name: index, ROUNDING: rounding})
    rows = index.shape[:-1]
    if not isinstance(value, torch.Tensor) or value.shape[:-1] != rows or not value.dtype.is_floating_point:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise RecordError(
            f"{definition.name}: {function} gives {found}, not a row of values for each of {list(rows)}.",
            code="ranking_shape_differs",
        )
    if value.shape[-1] < index.shape[-1]:
        raise RecordError(
            f"{definition.name}: {function} ranks {value.shape[-1]} values, fewer than '{name}' chooses.",
            code="ranking_too_short",
        )
    return value

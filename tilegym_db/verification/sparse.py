"""Long calls of which an oracle is affordable at a few positions only, such as attention to all of 65,536 keys.

All positions but a few get no weight: a column of the other inputs makes their scores so low that exp gives zero. What is left is
the same operator at the few positions, which lie far apart. Whether that is so for an operator is tried on its reference, at a
small size. Then a kernel that leaves out keys far away is wrong, because most of the few are far from each other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.case import Case
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import LIFTED_DTYPES, at_indices, in_fp64

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

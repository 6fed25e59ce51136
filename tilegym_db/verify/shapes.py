"""Shape fuzzing: sizes around tile edges, primes and tiny ones, inside a Definition's and a Solution's constraints."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Solution

__all__ = ["fuzz_axes"]

# Around every tile size that the languages use, primes in between, and the sizes that break vector loads.
_SIZES: tuple[int, ...] = (1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 33, 61, 63, 64, 65, 97, 127, 128, 129, 131, 251, 255, 257)
_MAX_TRIES = 400
MAX_ELEMENTS = 1 << 20
"""Of the largest tensor. Fuzzing is about edges, not size; the Triton interpreter must get through a case in seconds."""


def fuzz_axes(
    definition: Definition,
    solution: Solution,
    anchors: Sequence[Mapping[str, int]],
    dtypes: Mapping[str, str],
    count: int,
    seed: int,
) -> list[dict[str, int]]:
    """Distinct axis bindings that the Definition and the Solution both allow.

    Args:
        definition: its constraints hold for every result.
        solution: so do its own; a Solution is not asked for what it does not declare.
        anchors: bindings of real workloads. Half of the results take some axes from an anchor, so that a shape special
            case cannot tell a fuzz case by its unusual sizes.
        dtypes: the dtype binding in use.
        count: how many at most; fewer where the constraints leave fewer.
        seed: secret of this run.
    """
    generator = random.Random(seed)
    found: list[dict[str, int]] = []
    for attempt in range(_MAX_TRIES):
        if len(found) == count:
            break
        axes = {name: generator.choice(_SIZES) for name in definition.var_axes}
        if anchors and attempt % 2:
            anchor = generator.choice(list(anchors))
            kept = generator.sample(list(axes), min(generator.randint(1, max(len(axes) - 1, 1)), len(axes)))
            axes = {name: anchor[name] if name in kept else size for name, size in axes.items()}
        axes = _repair((*definition.constraints, *solution.spec.constraints), axes, generator)
        if axes in found or not _allowed(definition, solution, axes, dtypes):
            continue
        found.append(axes)
    return found


def _repair(constraints: Sequence[str], axes: dict[str, int], generator: random.Random) -> dict[str, int]:
    """Meet the common constraints (even head sizes, equal axes) that random sizes would seldom meet."""
    candidate = dict(axes)
    for text in constraints:
        name, _, rest = text.partition(" % ")
        divisor = rest.removesuffix(" == 0").strip()
        if name in candidate and rest.endswith("== 0") and divisor.isdigit():
            step = int(divisor)
            candidate[name] = max(step, candidate[name] // step * step)
        elif " == " in text:
            alternatives = [part.strip().split(" == ") for part in text.split(" or ")]
            left, right = (
                (side.strip() for side in generator.choice(alternatives)[:2])
                if all(len(part) == 2 for part in alternatives)
                else ("", "")
            )
            if left in candidate:
                candidate[left] = int(right) if right.isdigit() else candidate.get(right, candidate[left])
    return candidate


def _allowed(definition: Definition, solution: Solution, axes: dict[str, int], dtypes: Mapping[str, str]) -> bool:
    try:
        bound = definition.bind_axes(axes)
        shapes = [definition.shape_of(name, bound) for name in (*definition.tensor_inputs, *definition.outputs)]
        return max(map(math.prod, shapes)) <= MAX_ELEMENTS and solution.unsupported(bound, dtypes) is None
    except RecordError:
        return False

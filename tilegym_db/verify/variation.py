"""What a model varies from call to call, drawn for one case: ranges of each input, kinds of weights, continuous scalars.

Everything is a function of the case's seed, its contents and the name of the input, so that a report that names these shows the
same case again.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping

from tilegym_db.records import Definition
from tilegym_db.records.binding import is_code_selecting
from tilegym_db.records.case import EXACT
from tilegym_db.records.dtypes import Scalar
from tilegym_db.verify.distributions import DEMANDING, LOUD, PLANTED, QUIET, STEPS, VARIED

__all__ = ["ScalarRange", "scalar_ranges", "styles_of", "vary_scalars"]

ScalarRange = tuple[float, float]

DECADES_DOWN, DECADES_UP = 3.0, 2.0
"""By how many decades a continuous scalar is varied around the Workload's own value."""
KEEPS_ITS_SCALARS = 0.2
_WEIGHTS = ("normal", "unit", "channels", "large", "tiny", "shifted")
_PLAIN = frozenset({"normal", PLANTED, EXACT, STEPS, "max_quarter", "subnormals"})
"""Contents whose weights stay N(0, 1), so that no column of a row drowns in others (small integers where those are asked for)."""

LOUD_SHARE = 0.6
_MATRIX = 2
"""Dimensions from which a tensor counts as data; with fewer it is a weight."""


def _drawn(seed: int, what: str) -> random.Random:
    return random.Random(hashlib.sha256(f"{seed}:{what}".encode()).digest())


def vary_scalars(
    definition: Definition, scalars: Mapping[str, Scalar], distribution: str, seed: int
) -> dict[str, Scalar]:
    """The scalars of one fuzz case: continuous ones over decades around the value given, those that select code as given.

    A value grows only where the contents are no challenge by themselves: a softmax of scores of 2**20 is nobody's to compute in
    float32.
    """
    drawn = _drawn(seed, "scalars")
    keeps = distribution == EXACT or drawn.random() < KEEPS_ITS_SCALARS
    varied: dict[str, Scalar] = {}
    for name, value in scalars.items():
        if name not in definition.inputs:
            continue
        exponent = drawn.uniform(-DECADES_DOWN, 0.0 if distribution in DEMANDING | LOUD else DECADES_UP)
        continuous = isinstance(value, float) and math.isfinite(value) and not is_code_selecting(definition, name)
        varied[name] = float(f"{value * 10**exponent:.6g}") if continuous and not keeps else value  # type: ignore[operator]
    return varied


def scalar_ranges(definition: Definition, calls: list[Mapping[str, Scalar]]) -> dict[str, ScalarRange]:
    """Continuous scalar -> the smallest and the largest value among calls that were verified."""
    found: dict[str, ScalarRange] = {}
    for name, spec in definition.inputs.items():
        if spec.is_scalar and name not in definition.size_scalars and not is_code_selecting(definition, name):
            values = [float(call[name]) for call in calls if isinstance(call.get(name), int | float)]  # type: ignore[arg-type]
            if values:
                found[name] = min(values), max(values)
    return found


def styles_of(definition: Definition, distribution: str, seed: int) -> dict[str, str]:
    """Input -> the distribution that its contents are drawn from.

    Inputs that the Definition draws as noise (``normal``), because some contents make its maths ill-conditioned, take part in
    what changes the range alone. At most one input of a case is loud, or products and exponentials would say nothing.
    """
    drawn = _drawn(seed, "styles")
    names = [name for name in definition.tensor_inputs if _is_drawn(definition, name)]
    matrices = [name for name in names if len(definition.inputs[name].shape or ()) >= _MATRIX]
    loud = drawn.choice(matrices or names or [""])
    styles = {}
    for name in definition.tensor_inputs:
        quiet, weight = drawn.choice(QUIET), drawn.choice(_WEIGHTS)
        if name not in names:
            continue
        if name not in matrices:
            generated = name in definition.input_generators
            style = EXACT if distribution == EXACT and not generated else "normal" if distribution in _PLAIN else weight
        elif distribution == VARIED:
            style = drawn.choice(sorted(LOUD)) if name == loud and drawn.random() < LOUD_SHARE else quiet
        elif distribution in LOUD:
            style = distribution if name == loud else "normal"
        elif name in definition.input_generators and distribution not in QUIET:
            style = "normal"
        else:
            style = distribution
        styles[name] = style
    return styles


def _is_drawn(definition: Definition, name: str) -> bool:
    """True for an input without a generator, or with one that says N(0, 1)."""
    if definition.joint_inputs is not None and name in definition.joint_inputs.inputs:
        return False
    generator = definition.input_generators.get(name)
    return generator is None or generator.kind == "normal"

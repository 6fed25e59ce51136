"""What the contents of a floating-point input can look like: each distribution brings out another kind of mistake."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping

import torch

from tilegym_db.records import Definition
from tilegym_db.records.call import is_code_selecting
from tilegym_db.records.case import EXACT
from tilegym_db.records.dtypes import Scalar

Shape = tuple[int, ...]
Draw = Callable[[torch.Generator, Shape, torch.dtype], torch.Tensor]

PLANTED = "planted_special_values"
STEPS = "code_steps"
"""Of operators that give codes: groups whose largest value is a code times a power of two, and values between two codes."""
VARIED = "varied"
"""Every input by a distribution of its own (:func:`tilegym_db.verify.distributions.styles_of`)."""
REFERENCE_MAY_FAIL = frozenset({"max_quarter", "row_scale"})
"""Distributions on which the reference as written may overflow itself, so that the case is dropped."""
DEMANDING = frozenset({"row_scale", "outliers", "max_quarter"})
"""Contents whose range alone makes an operator ill-conditioned: nothing else of the call is to grow with them."""
LOUD = frozenset({"large", "channels", "shifted"})
"""Contents that one input of a call has at a time."""
QUIET = ("normal", "normal", "tiny", "sparse", "sorted_rows")

_SPECIAL: dict[str, tuple[float, ...]] = {"nan": (math.nan,), "inf": (math.inf, -math.inf)}
_ROWS_TO_SPARE_ONE = 4
_ZERO_ROWS = 0.125


def _normal(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _row_scale(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    # 2**±10 where the dtype has room; half precision ends at 2**16, and products of two such tensors at half of that.
    reach = min(10.0, math.log2(torch.finfo(dtype).max) / 4)
    exponent = torch.rand((*shape[:-1], 1), generator=generator, device=generator.device) * (2 * reach) - reach
    return _normal(generator, shape, dtype) * torch.exp2(exponent)


def _outliers(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    value = _normal(generator, shape, dtype)
    rare = torch.rand(shape, generator=generator, device=generator.device) < 1e-3
    return torch.where(rare, value * 100, value)


def _small_integers(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=generator, device=generator.device).float()


def _constant_rows(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    row = torch.randn((*shape[:-1], 1), generator=generator, device=generator.device)
    return row.expand(shape).clone()


def _one_hot(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return a single 1 in each row, anywhere; some rows are all zero, where a norm has only its epsilon to divide by."""
    rows = (*shape[:-1], 1)
    place = torch.randint(0, shape[-1], rows, generator=generator, device=generator.device)
    hot = torch.rand(rows, generator=generator, device=generator.device) >= _ZERO_ROWS
    return torch.zeros(shape, device=generator.device).scatter_(-1, place, hot.float())


def _max_quarter(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    sign = torch.randint(0, 2, shape, generator=generator, device=generator.device) * 2 - 1
    return sign * (torch.finfo(dtype).max / 4)


def _subnormals(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Half the elements subnormal; all of them in half precision, whose subnormals no hardware flushes in fp32 maths.

    Hardware may flush those of float32 and bfloat16 to zero, which must cost nothing beside the other half of a row.
    """
    small = (torch.rand(shape, generator=generator, device=generator.device) * 2 - 1) * torch.finfo(dtype).tiny
    if dtype == torch.float16:
        return small
    kept = torch.rand(shape, generator=generator, device=generator.device) < 0.5
    return torch.where(kept, _normal(generator, shape, dtype), small)


def _ties(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(3, generator=generator, device=generator.device)
    return values[torch.randint(0, 3, shape, generator=generator, device=generator.device)]


def _decades(dtype: torch.dtype) -> tuple[float, float]:
    """By how many decades the range of a tensor may go down and up, so that products of two still are normal numbers."""
    return (2.0, 1.0) if dtype == torch.float16 else (8.0, 3.0)


def _between(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(1, generator=generator, device=generator.device))


def _tiny(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    down, _ = _decades(dtype)
    return _normal(generator, shape, dtype) * 10 ** -_between(generator, down / 4, down)


def _large(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    _, up = _decades(dtype)
    return _normal(generator, shape, dtype) * 10 ** _between(generator, up / 3, up)


def _shifted(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return a mean that is many times the deviation: E[x**2] is no variance then."""
    shift = _between(generator, 4.0, 30.0) * (1 if _between(generator, -1.0, 1.0) > 0 else -1)
    return _normal(generator, shape, dtype) + shift


def _channels(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return the same few columns are large in every row, as the hidden states of language models have them."""
    count = max(1, shape[-1] // 256)
    columns = torch.randint(0, shape[-1], (count,), generator=generator, device=generator.device)
    factors = torch.ones(shape[-1], device=generator.device)
    factors[columns] = 10 ** _between(generator, 0.5, _decades(dtype)[1] * 5 / 6)
    return _normal(generator, shape, dtype) * factors


def _sparse(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Nine of ten elements are zero, and so are some rows."""
    kept = torch.rand(shape, generator=generator, device=generator.device) < 0.1
    rows = torch.rand((*shape[:-1], 1), generator=generator, device=generator.device) >= _ZERO_ROWS
    return _normal(generator, shape, dtype) * (kept & rows)


def _sorted_rows(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    descending = _between(generator, -1.0, 1.0) > 0
    return _normal(generator, shape, dtype).sort(dim=-1, descending=descending).values


_LARGEST = (1.75, 1.5, 1.0)
"""The largest codes of e4m3 (448), of e5m2 and e2m1 (57344, 6), and a power of two, each over a power of two."""
_BESIDE = (0.0, 1.0, -1.0)
"""By how many steps of the dtype a band's largest value lies beside these: just above, a scale is the next power of two."""
_STEP_GROUP = 32
"""Groups that share a scale are this long or a multiple of it, along either axis."""
_STEP_BAND = 128
"""So many columns have the same largest value."""


def _code_steps(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Scales of a power of two and just beside one, where rounding one wrongly shows, and ties of every format of three bits.

    Values have four bits behind the point and lie up to 2**-42 below the largest, so some are subnormal as codes. The first of
    each group of columns, and of rows, is the largest.
    """

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=generator.device).float()

    unit, device = 2.0 ** int(_between(generator, -4, 5)), generator.device
    band = torch.arange(shape[-1], device=device) // _STEP_BAND + int(_between(generator, 0, 97))
    largest = torch.tensor(_LARGEST, device=device)[band % len(_LARGEST)] * unit
    steps = torch.tensor(_BESIDE, device=device) * torch.finfo(dtype).eps
    largest = largest * (1 + steps[band // len(_LARGEST) % len(_BESIDE)])
    value = whole(16, 32) / 32 * torch.exp2(whole(-42, 1)) * unit
    value[..., ::_STEP_GROUP] = largest[::_STEP_GROUP]
    if len(shape) > 1:
        if _between(generator, 0, 1) < 0.5:  # else, blocks of several rows would have the largest of these alone
            value[..., ::_STEP_GROUP] *= 1 + steps[torch.arange(shape[-2], device=device) % len(_BESIDE)][:, None]
        value[..., ::_STEP_GROUP, :] = largest
    return value * (2 * whole(0, 2) - 1)


def _unit(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return 1 + 0.1 * _normal(generator, shape, dtype)


def plant(value: torch.Tensor, generator: torch.Generator, specials: tuple[str, ...]) -> torch.Tensor:
    """Put one of each special value that the operator is defined for at a random place, and mask a whole row.

    The masked row is what an attention mask leaves of a query that may see nothing; it takes rows to spare. So does a NaN in the
    last row, where an index of -1 leads that nobody may follow.
    """
    rows = value.reshape(-1, value.shape[-1])  # contiguous, so that this is a view

    def somewhere(size: int) -> int:
        return int(torch.randint(0, size, (1,), generator=generator, device=generator.device))

    if "inf" in specials and rows.shape[0] >= _ROWS_TO_SPARE_ONE:
        rows[somewhere(rows.shape[0])] = -math.inf
    if "nan" in specials and rows.shape[0] >= _ROWS_TO_SPARE_ONE:
        rows[-1, somewhere(rows.shape[1])] = math.nan
    for special in (number for name in specials for number in _SPECIAL[name]):
        rows[somewhere(rows.shape[0]), somewhere(rows.shape[1])] = special
    return value


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal,
    "row_scale": _row_scale,
    "outliers": _outliers,
    EXACT: _small_integers,
    "constant_rows": _constant_rows,
    "one_hot": _one_hot,
    "max_quarter": _max_quarter,
    "subnormals": _subnormals,
    "ties": _ties,
    PLANTED: _normal,  # then plant, which needs to know what the Definition allows
}
"""What the contents of a case may be, so that each brings out another kind of mistake in the maths."""

RANGES: dict[str, Draw] = {
    VARIED: _normal,  # of an operator without inputs that could vary
    "tiny": _tiny,
    "channels": _channels,
    "shifted": _shifted,
    "sparse": _sparse,
    "large": _large,
    "sorted_rows": _sorted_rows,
}
"""The same for mistakes in what a kernel expects of its inputs: a second call of a shape takes one of these."""

CONTENTS: dict[str, Draw] = {**DISTRIBUTIONS, **RANGES, STEPS: _code_steps}
STYLES: dict[str, Draw] = {**CONTENTS, "unit": _unit}
"""What fills one floating-point tensor: the contents of the case, or what weights are like in models."""


# ---- variation ------------------------------------------------------------------------------------
# What a model varies from call to call, drawn for one case: ranges of each input, kinds of weights, continuous
# scalars.
#
# Everything is a function of the case's seed, its contents and the name of the input, so that a report that names
# these shows the same case again.

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
    """Return the scalars of one fuzz case: continuous ones over decades around the value given, those that select code
    as given.

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
    """Return True for an input without a generator, or with one that says N(0, 1)."""
    if definition.joint_inputs is not None and name in definition.joint_inputs.inputs:
        return False
    generator = definition.input_generators.get(name)
    return generator is None or generator.kind == "normal"

"""Distributions of floating-point inputs, each of which exposes another kind of mistake, and their choice per case."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence

import torch

from tilegym_db.records import Definition
from tilegym_db.records.call import is_code_selecting
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.workload import EXACT

Shape = tuple[int, ...]
Draw = Callable[[torch.Generator, Shape, torch.dtype], torch.Tensor]

PLANTED = "planted_special_values"
STEPS = "code_steps"
"""Contents for operators that return codes: group maxima near a code times a power of two, and values between two codes."""
VARIED = "varied"
"""A different distribution for every input (:func:`styles_of`)."""
ROW_SCALE = "row_scale"
"""Rows of scales that differ by orders of magnitude."""
FAR_BELOW = "far_below"
"""All values of the first matrix far below zero and those of others far above, so that all scores are far below zero too.

Each tensor has a separate style, so this has no draw."""
REFERENCE_MAY_FAIL = frozenset({"max_quarter", ROW_SCALE, FAR_BELOW})
"""Distributions on which the reference as written may overflow, so that the case is dropped."""
MASSIVE = "massive"
"""Modifier on which it may overflow too (:func:`may_overflow`)."""
ILL_CONDITIONED = frozenset({ROW_SCALE, "outliers", "max_quarter"})
"""Contents whose range alone makes an operator ill-conditioned; scalars must not grow with them."""
SHIFTED = "shifted"
EXTREME = frozenset({"large", "channels", SHIFTED})
"""Contents that at most one input of a call has."""
SAME_VALUE, ALL_ONES, ALL_ZEROS = "same_value", "all_ones", "all_zeros"
"""Styles of a weight that has one value in all places: any, or what it has before training."""
ONES, ZEROS = "ones", "zeros"
"""Modifiers of weights: one of them, and others perhaps, are all ones or all zeros, as before training."""
BELOW, ABOVE, BELOW_ALONE = "below", "above", "below_alone"
"""Styles of far values: of the first matrix, of others, and of the only one."""
MODERATE = frozenset({"normal", "constant_rows", "one_hot", "ties", "tiny", "sparse", "sorted_rows"})
"""Contents that infinities may join. Elsewhere a factor may be zero or just not, such as GELU of -100, and times inf differ."""
WITH_ZEROS = frozenset({"ties", "sparse"})
"""Contents in which half of the uniform numbers from zero are zero; a draw hardly ever is."""
ORDINARY = ("normal", "normal", "tiny", "sparse", "sorted_rows")

_SPECIAL: dict[str, tuple[float, ...]] = {"nan": (math.nan,), "inf": (math.inf, -math.inf)}
_ROWS_TO_SPARE_ONE = 4
_ZERO_ROWS = 0.125


def _normal(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _row_scale(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    # 2**±10 if the dtype has room; half precision ends at 2**16, and products of two such tensors double the exponent.
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
    """Return a single 1 in each row; some rows are all zero, so that a norm divides by its epsilon only."""
    rows = (*shape[:-1], 1)
    place = torch.randint(0, shape[-1], rows, generator=generator, device=generator.device)
    hot = torch.rand(rows, generator=generator, device=generator.device) >= _ZERO_ROWS
    return torch.zeros(shape, device=generator.device).scatter_(-1, place, hot.float())


def _max_quarter(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    sign = torch.randint(0, 2, shape, generator=generator, device=generator.device) * 2 - 1
    return sign * (torch.finfo(dtype).max / 4)


def _subnormals(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return rows with half of the elements subnormal; in float16 all are, because hardware keeps them in fp32 maths.

    Hardware may flush subnormals of float32 and bfloat16 to zero, which must not matter next to the other half of a row.
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
    """Return the decades by which a tensor's range may go down and up such that products of two stay normal numbers."""
    return (2.0, 1.0) if dtype == torch.float16 else (8.0, 3.0)


def _between(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(1, generator=generator, device=generator.device))


def _to_the_end(generator: torch.Generator, low: float, high: float) -> float:
    """Return the end of a range in every second case, as a limit anywhere within it then shows, and else any number."""
    return high if _between(generator, 0, 1) < 0.5 else _between(generator, low, high)


def _tiny(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    down, _ = _decades(dtype)
    return _normal(generator, shape, dtype) * 10 ** -_to_the_end(generator, down / 4, down)


def _large(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    _, up = _decades(dtype)
    return _normal(generator, shape, dtype) * 10 ** _to_the_end(generator, up / 3, up)


def _shifted(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return values whose mean is many times their deviation, so that E[x**2] is not the variance.

    Rows of most matrices differ in their mean and its sign. Those of keys do not: scores far apart would make a softmax
    ill-conditioned.
    """
    shift = torch.tensor(_to_the_end(generator, 4.0, 30.0), device=generator.device)
    sign = 1 if _between(generator, -1.0, 1.0) > 0 else -1
    if len(shape) == _MATRIX and _between(generator, 0, 1) < 0.75:
        each = torch.rand((shape[0], 1), generator=generator, device=generator.device) * 2 - 1
        shift = each.sign() * (4.0 + (shift - 4.0) * each.abs())
    return _normal(generator, shape, dtype) + sign * shift


def _channels(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return values with the same few large columns in every row, as in hidden states of language models."""
    count = max(1, shape[-1] // 256)
    columns = torch.randint(0, shape[-1], (count,), generator=generator, device=generator.device)
    factors = torch.ones(shape[-1], device=generator.device)
    factors[columns] = 10 ** _between(generator, 0.5, _decades(dtype)[1] * 5 / 6)
    return _normal(generator, shape, dtype) * factors


def _sparse(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return values with nine of ten elements zero, and some zero rows."""
    kept = torch.rand(shape, generator=generator, device=generator.device) < 0.1
    rows = torch.rand((*shape[:-1], 1), generator=generator, device=generator.device) >= _ZERO_ROWS
    return _normal(generator, shape, dtype) * (kept & rows)


def _sorted_rows(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    descending = _between(generator, -1.0, 1.0) > 0
    return _normal(generator, shape, dtype).sort(dim=-1, descending=descending).values


_LARGEST_CODES = (1.75, 1.5, 1.0)
"""The largest codes of e4m3 (448), of e5m2 and e2m1 (57344, 6), and a power of two, each divided by a power of two."""
_NEIGHBOUR_STEPS = (0.0, 1.0, -1.0)
"""Steps of the dtype between a band's largest value and these; one step above, the scale is the next power of two."""
_STEP_GROUP = 32
"""Length of a group that shares a scale, or a divisor of it, along either axis."""
_STEP_BAND = 128
"""Number of columns with the same largest value."""


def _code_steps(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return values with scales at and next to powers of two, where wrong rounding shows, and ties of all three-bit formats.

    Values have four bits after the point and lie down to 2**-42 below the largest, so some codes are subnormal. The first
    element of each group of columns, and of rows, is the largest.
    """

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=generator.device).float()

    unit, device = 2.0 ** int(_between(generator, -4, 5)), generator.device
    band = torch.arange(shape[-1], device=device) // _STEP_BAND + int(_between(generator, 0, 97))
    largest = torch.tensor(_LARGEST_CODES, device=device)[band % len(_LARGEST_CODES)] * unit
    steps = torch.tensor(_NEIGHBOUR_STEPS, device=device) * torch.finfo(dtype).eps
    largest = largest * (1 + steps[band // len(_LARGEST_CODES) % len(_NEIGHBOUR_STEPS)])
    value = whole(16, 32) / 32 * torch.exp2(whole(-42, 1)) * unit
    value[..., ::_STEP_GROUP] = largest[::_STEP_GROUP]
    if len(shape) > 1:
        if _between(generator, 0, 1) < 0.5:  # otherwise, blocks of several rows would only have the largest of these
            value[..., ::_STEP_GROUP] *= (
                1 + steps[torch.arange(shape[-2], device=device) % len(_NEIGHBOUR_STEPS)][:, None]
            )
        value[..., ::_STEP_GROUP, :] = largest
    return value * (2 * whole(0, 2) - 1)


_FAR_STEPS, _FAR_MOST, _FAR_FACTORS, _FAR_IN_HALF = 128, 640, (1, 2, 3), 8


def _far(sign: int, exponents: tuple[int, int], *, differing: int | None = None) -> Draw:
    """Return a draw of large values of one sign. In each row of their scores, one score is far above the others.

    The indices of a dimension have different sizes, at least a 128th apart, so a softmax of the scores is well-conditioned,
    although float32 has steps of 2**-9 there. Sums of products of such values hardly round.

    Args:
        exponents: range of the power of two that all values are multiplied by; half precision has less room.
        differing: the dimension of the scores, -2 or -1; by default the values are small whole numbers.
    """
    low, high = exponents

    def draw(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        device = generator.device
        most = min(high, _FAR_IN_HALF) if dtype == torch.float16 else high
        value = torch.full(shape, sign * 2.0 ** int(_between(generator, min(low, most), most + 1)), device=device)
        if differing is not None:
            rank = torch.randperm(shape[differing], generator=generator, device=device).clamp(max=_FAR_MOST)
            sizes = (1 + rank % _FAR_STEPS / _FAR_STEPS) * torch.exp2(rank // _FAR_STEPS)
            value *= sizes[:, None] if differing == -2 else sizes
        if differing != -1:
            few = torch.tensor(_FAR_FACTORS, device=device)
            value *= few[torch.randint(0, len(few), shape[-1:], generator=generator, device=device)]
        return value

    return draw


def _unit(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return 1 + 0.1 * _normal(generator, shape, dtype)


def _same(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return one value for all elements."""
    value = torch.randn((), generator=generator, device=generator.device)
    return torch.full(shape, float(value), device=generator.device)


def _specks(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return normal values of which a quarter are zeros of both signs and subnormal numbers, as after pruning."""
    value, tiny = _normal(generator, shape, dtype), torch.finfo(dtype).tiny
    specks = torch.tensor((0.0, -0.0, tiny / 2, -tiny / 4), device=generator.device)
    kind = torch.randint(0, 4 * len(specks), shape, generator=generator, device=generator.device)
    return torch.where(kind < len(specks), specks[kind % len(specks)], value)


def plant(value: torch.Tensor, generator: torch.Generator, specials: tuple[str, ...]) -> torch.Tensor:
    """Put one of each special value of the operator at a random place, and set one row to -inf.

    The -inf row is like a query that an attention mask excludes completely; it is set only if there are enough rows. In that
    case the last row gets a NaN, which a kernel reads if it follows an index of -1.
    """
    rows = value.reshape(-1, value.shape[-1])  # contiguous, so this is a view

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
    ROW_SCALE: _row_scale,
    "outliers": _outliers,
    EXACT: _small_integers,
    "constant_rows": _constant_rows,
    "one_hot": _one_hot,
    "max_quarter": _max_quarter,
    "subnormals": _subnormals,
    "ties": _ties,
    PLANTED: _normal,  # then plant, which depends on the Definition
}
"""Contents of cases, each of which exposes another kind of mistake in the maths."""

RANGES: dict[str, Draw] = {
    VARIED: _normal,  # for operators without inputs that could vary
    "tiny": _tiny,
    "channels": _channels,
    SHIFTED: _shifted,
    "sparse": _sparse,
    "large": _large,
    "sorted_rows": _sorted_rows,
}
"""Contents that expose wrong assumptions about the range of inputs; the second call of a shape uses one of these."""

CONTENTS: dict[str, Draw] = {**DISTRIBUTIONS, **RANGES, STEPS: _code_steps, FAR_BELOW: _normal}
STYLES: dict[str, Draw] = {
    **CONTENTS,
    "unit": _unit,
    SAME_VALUE: _same,
    ALL_ONES: lambda generator, shape, dtype: torch.ones(shape, device=generator.device),
    ALL_ZEROS: lambda generator, shape, dtype: torch.zeros(shape, device=generator.device),
    "specks": _specks,
    BELOW: _far(-1, (6, 7)),
    ABOVE: _far(1, (6, 7), differing=-2),
    BELOW_ALONE: _far(-1, (14, 17), differing=-1),
}
"""Draws for one floating-point tensor: the contents of the case, or values like those of weights."""


# ---- modifiers ------------------------------------------------------------------------------------
# Changes of drawn values that models have: padding, massive channels, equal rows, winners in one place, ragged lengths.
#
# A case's contents are a distribution and up to two of these, such as ``normal+clustered+padded``. Each draws its kind and
# sizes from the generator of the tensor, so the cases of one promotion meet kinds that no list names.

Modify = Callable[[torch.Tensor, torch.Generator, random.Random, torch.dtype], None]

RAGGED = "ragged"
"""Modifier of ids and lengths: empty groups at any place, and counts at the edges of tiles (:func:`ragged_lengths`)."""
OF_OTHERS = (RAGGED, ONES, ZEROS)
"""Modifiers of other inputs than matrices of numbers."""
NAN_ROWS = "nan_rows"
BLANK = "blank"
EDGES = (16, 32, 64, 128, 256)
_COUNTS = (0, 1, 1, 1, 2, 2)
"""Numbers of modifiers of a case, all alike."""
_RAGGED_SHARE = 0.5
PADDED = "padded"
_PADDED_SHARE, _BLANK_SHARE, _TILE, _SEVERAL = 0.7, 0.4, 64, 4
"""Shares of wide siblings with padding and with zero tiles; columns that a wide row exceeds; minimum rows of a wide tensor."""
_INFINITE = {PADDED, "infinite"}
_SPECIAL_ROWS = 0.25
_MASSIVE_FROM, _MASSIVE_TO = 4.0, 6.0
"""Decades of half of the massive values. The others go up to the dtype's end, or to its root if the end is above 1e6."""


def _power(drawn: random.Random, most: int) -> int:
    """Return a random power of two up to ``most``, all exponents alike."""
    return int(2 ** drawn.randrange(int(math.log2(max(most, 1))) + 1))


def _some(rows: torch.Tensor, generator: torch.Generator, share: float) -> torch.Tensor:
    """Return True for a share of the rows and at least for one, ``[rows]``."""
    chance = torch.rand(rows.shape[0], generator=generator, device=rows.device)
    return (chance < share) | (chance == chance.min())


def _clustered(rows: torch.Tensor, generator: torch.Generator, drawn: random.Random, dtype: torch.dtype) -> None:
    """Lift the elements of one block, of the end or of a stride above all others of their row; a few become near-ties."""
    count, columns = rows.shape
    width = _power(drawn, columns)
    most = torch.stack(torch.aminmax(rows, dim=-1)).abs().amax(dim=0)
    if not bool(most.isfinite().all()):
        most = torch.where(rows.isfinite(), rows, 0).abs().amax(dim=-1)
    kind = drawn.choice(("block", "block", "block of each row", "end", "stride"))
    if kind == "stride":
        place = torch.arange(drawn.randrange(width), columns, width, device=rows.device).expand(count, -1)
    else:
        each = (count, 1) if kind == "block of each row" else (1, 1)
        block = torch.randint(0, columns // width, each, generator=generator, device=rows.device)
        first = block * width if kind != "end" else columns - width
        place = (first + torch.arange(width, device=rows.device)).expand(count, width)
    above = rows.gather(-1, place) + 2 * most[:, None]
    if drawn.random() < 0.25:
        steps = torch.randint(0, 4, place.shape, generator=generator, device=rows.device)
        above = torch.where(above.isfinite(), 2 * most[:, None] * (1 + steps * torch.finfo(dtype).eps), above)
    rows.scatter_(-1, place, above.to(rows.dtype))


def _massive(rows: torch.Tensor, generator: torch.Generator, drawn: random.Random, dtype: torch.dtype) -> None:
    """Set one to three columns to values of 1e4 up to the dtype's end, in all rows, a few or one."""
    most = torch.finfo(dtype).max
    end = math.log10(most) if most < 10**_MASSIVE_TO else math.log10(most) / 2 - 1
    far = drawn.random() < 0.5
    exponent = drawn.uniform(min(_MASSIVE_FROM, end - 0.5), end if far else min(end, _MASSIVE_TO))
    size = drawn.choice((1, -1)) * min(10**exponent, most)
    share = drawn.choice((1.0, 1.0, 0.125, 0.0))
    for _ in range(drawn.randint(1, 3)):
        column = drawn.randrange(rows.shape[1])
        rows[:, column] = torch.where(_some(rows, generator, share), size, rows[:, column])


def _equal_rows(rows: torch.Tensor, generator: torch.Generator, drawn: random.Random, dtype: torch.dtype) -> None:
    """Set all rows to the first one, in three of four cases except for one row: other blocks of these have none."""
    place = drawn.randrange(rows.shape[0])
    other = rows[place].clone()
    rows.copy_(rows[0].clone().expand_as(rows))
    if drawn.random() < 0.75:
        rows[place] = other


def _blank(rows: torch.Tensor, generator: torch.Generator, drawn: random.Random, dtype: torch.dtype) -> None:
    """Set some rows and some columns to zero, as padding and pruned channels are; never all elements.

    A tile of only some zero columns lies where they cross the zero rows, so every case has each kind of zero tile.
    """
    first, last = _part(rows.shape[0], drawn)
    left, right = _part(rows.shape[1], drawn)
    rows[first:last] = 0
    rows[:, left:right] = 0


def _part(size: int, drawn: random.Random) -> tuple[int, int]:
    """Return the begin and end of a part: a tile or more, half, or nearly all, at an end or a multiple of its length."""
    wanted = drawn.choice((_power(drawn, size), size // 2, 3 * size // 4, 3 * size // 4, 7 * size // 8, size - 1))
    length = min(max(wanted, min(_TILE, size // 2)), size - 1)
    if length < 1:
        return 0, 0
    begin = drawn.choice((0, size - length, drawn.randrange(size // length) * length))
    return begin, begin + length


def _padded(rows: torch.Tensor, generator: torch.Generator, drawn: random.Random, dtype: torch.dtype) -> None:
    """Set the begin, the end or both of rows to -inf, by whole tiles or any length, up to the whole row."""
    count, columns = rows.shape
    length = torch.rand((count, 1), generator=generator, device=rows.device) * (columns + 1)
    if drawn.random() < 0.3:
        length = length[:1].expand(count, 1)
    if drawn.random() < 0.6:
        tile = _power(drawn, columns // 2)
        length = (length / tile).round() * tile
    if drawn.random() < 0.5:
        length = torch.where(_some(rows, generator, 0.5)[:, None], length, 0)
    place = torch.arange(columns, device=rows.device)
    if drawn.random() < 0.25:
        from_end = 2 * torch.minimum(place, place.flip(0))
    else:
        from_end = torch.where(_some(rows, generator, drawn.choice((0.0, 0.5, 1.0)))[:, None], place.flip(0), place)
    rows.masked_fill_(from_end < length.floor(), -math.inf)


def _infinite(rows: torch.Tensor, generator: torch.Generator, drawn: random.Random, dtype: torch.dtype) -> None:
    """Set one element of a quarter of the rows to infinity, of either sign."""
    _set_one_each(rows, _some(rows, generator, _SPECIAL_ROWS), generator, drawn.choice((math.inf, -math.inf)))


def _nan_rows(rows: torch.Tensor, generator: torch.Generator, drawn: random.Random, dtype: torch.dtype) -> None:
    """Set a quarter of the rows, or one element of each of these, to NaN."""
    there = _some(rows, generator, _SPECIAL_ROWS)
    if drawn.random() < 0.5:
        rows[there] = math.nan
    else:
        _set_one_each(rows, there, generator, math.nan)


def _set_one_each(rows: torch.Tensor, there: torch.Tensor, generator: torch.Generator, number: float) -> None:
    chosen = there.nonzero().reshape(-1)
    place = torch.randint(0, rows.shape[1], chosen.shape, generator=generator, device=rows.device)
    rows[chosen, place] = number


MODIFIERS: dict[str, Modify] = {
    "clustered": _clustered,
    MASSIVE: _massive,
    "equal_rows": _equal_rows,
    BLANK: _blank,
    PADDED: _padded,
    "infinite": _infinite,
    NAN_ROWS: _nan_rows,
}
"""Name -> change of the rows of one tensor in place, in the order in which they are applied."""


def parts_of(contents: str) -> tuple[str, tuple[str, ...]]:
    """Return the distribution of a case's contents, and the modifiers."""
    distribution, *modifiers = contents.split("+")
    return distribution, tuple(modifiers)


def are_contents(contents: str) -> bool:
    """Return True for a known distribution, with any known modifiers."""
    distribution, modifiers = parts_of(contents)
    return distribution in CONTENTS and all(name in MODIFIERS or name in OF_OTHERS for name in modifiers)


def may_overflow(contents: str) -> bool:
    """Return True if the reference as written may overflow on these contents."""
    distribution, modifiers = parts_of(contents)
    return distribution in REFERENCE_MAY_FAIL or MASSIVE in modifiers


def shows_bias(contents: str) -> bool:
    """Return True if the values of a call differ enough that roundings to nearest cancel out.

    Equal rows, shifted ones and tiny scores share factors such as a probability, and with it the rounding of that factor.
    """
    distribution, modifiers = parts_of(contents)
    return distribution in _SPREAD_OUT and not {"clustered", MASSIVE, "equal_rows"} & {*modifiers}


_SPREAD_OUT = frozenset({"normal", "outliers", "sorted_rows", PLANTED})


def with_modifiers(
    definition: Definition, distribution: str, seed: int, turn: int | None = None, *, wide: bool = False
) -> str:
    """Return the contents of one case: a distribution and up to three modifiers that the Definition allows.

    Args:
        turn: number of the case, if its first modifier is the next one in turn; infinities then make its distribution normal.
        wide: rows hold several tiles (:func:`has_wide_rows`). Many such cases have padding or zero tiles, as narrow ones
            cannot lack a tile.
    """
    if distribution in (EXACT, STEPS, FAR_BELOW):
        return distribution
    allowed, drawn = allowed_modifiers(definition, distribution, any_range=turn is not None), _drawn(seed, "modifiers")
    if distribution == SHIFTED and drawn.random() < 0.5:
        allowed = []  # nearly all of them change the mean or the deviation of rows
    chosen = {RAGGED} if _has_lengths(definition) and drawn.random() < _RAGGED_SHARE else set()
    if allowed and turn is not None:
        chosen.add(allowed[turn % len(allowed)])
    chosen |= set(drawn.sample(allowed, min(int(drawn.choice(_COUNTS)), len(allowed))))
    if wide and PADDED in allowed and drawn.random() < _PADDED_SHARE:
        chosen.add(PADDED)
    if wide and BLANK in allowed and "equal_rows" not in chosen and drawn.random() < _BLANK_SHARE:
        chosen.add(BLANK)
    if chosen & _INFINITE and distribution not in MODERATE and drawn.random() < 0.75:
        chosen -= _INFINITE  # or large and shifted values would hardly ever come about
    if chosen & _INFINITE:
        chosen.discard(MASSIVE)
        distribution = distribution if distribution in MODERATE else "normal"
    if turn is not None and _weights(definition):
        chosen |= (
            {ONES} if turn % _WEIGHTS_EVERY == 0 else {ZEROS} if turn % _WEIGHTS_EVERY == _WEIGHTS_EVERY // 2 else set()
        )
    return "+".join((distribution, *(name for name in (*MODIFIERS, *OF_OTHERS) if name in chosen)))


def has_wide_rows(definition: Definition, axes: Mapping[str, int]) -> bool:
    """Return True if an input that modifiers change has several rows, each of more than one tile of 64."""
    shapes = [definition.shape_of(name, axes) for name in _targets(definition)]
    return any(shape and shape[-1] > _TILE and math.prod(shape[:-1]) >= _SEVERAL for shape in shapes)


def allowed_modifiers(definition: Definition, distribution: str, *, any_range: bool = False) -> list[str]:
    """Return the modifiers of values that suit a Definition; those with infinities need moderate contents or ``any_range``."""
    targets = _targets(definition)
    if not targets:
        return []
    drawn = any(name not in definition.input_generators for name in targets)  # others would be ill-conditioned
    chooses, specials = chosen_from(definition) is not None, definition.special_values
    infinite = drawn and "inf" in specials and (any_range or distribution in MODERATE)
    asked = {
        MASSIVE: drawn and distribution not in REFERENCE_MAY_FAIL and not chooses,
        PADDED: infinite,
        "infinite": infinite,
        NAN_ROWS: chooses or (drawn and "nan" in specials),
    }
    return [name for name in MODIFIERS if asked.get(name, True)]


def ranges_of(definition: Definition) -> tuple[str, ...]:
    """Return the contents that the second calls of shapes have in turn; far values where a softmax must find its maximum."""
    return (*RANGES, *[FAR_BELOW] * (SOFTMAX.search(definition.reference) is not None))


SOFTMAX = re.compile(r"softmax|logsumexp|cross_entropy")


def _has_lengths(definition: Definition) -> bool:
    return any(spec.kind in _LENGTHS for spec in definition.input_generators.values())


_LENGTHS = ("distinct_ids", "offsets", "integers")


def chosen_from(definition: Definition) -> str | None:
    """Return the floating-point input among whose columns the Definition chooses indices; None if it chooses none.

    These are routers, samplers and sorts: an output of indices, and no input of whole numbers that they could be read from.
    """
    dtypes = {
        name: definition.dtypes.get(definition.inputs[name].dtype, (definition.inputs[name].dtype,))[0]
        for name in definition.tensor_inputs
    }
    if not all(dtype.startswith(("float", "bfloat")) for dtype in dtypes.values()):
        return None
    if not any(is_index(definition, name) for name in definition.outputs):
        return None
    return next((name for name in dtypes if len(definition.inputs[name].shape or ()) >= _MATRIX), None)


def is_index(definition: Definition, name: str) -> bool:
    """Return True for an output of indices: one that the Definition names as such, or of int64."""
    return name in definition.gathers or name in definition.sampled or definition.outputs[name].dtype == "int64"


def _targets(definition: Definition) -> list[str]:
    """Return the inputs that modifiers may change: data without a generator or joint draw, else the rows of a choice."""
    matrices = [name for name in definition.tensor_inputs if len(definition.inputs[name].shape or ()) >= _MATRIX]
    drawn = [name for name in matrices if _is_drawn(definition, name) and _is_floating(definition, name)]
    rows = chosen_from(definition)
    return [name for name in drawn if name not in definition.input_generators] or ([rows] if rows else drawn)


def _is_floating(definition: Definition, name: str) -> bool:
    dtype = definition.inputs[name].dtype
    return all(choice.startswith(("float", "bfloat")) for choice in definition.dtypes.get(dtype, (dtype,)))


def modifiers_of(definition: Definition, contents: str, seed: int) -> dict[str, tuple[str, ...]]:
    """Return input -> the modifiers of its values: all for one input, equal rows and zero tiles also for half of the others."""
    _, modifiers = parts_of(contents)
    names = _targets(definition) if modifiers else []
    if not names:
        return {}
    drawn = _drawn(seed, "modified")
    one = drawn.choice(names)
    shared = [name for name in ("equal_rows", BLANK) if name in modifiers]
    found = {name: tuple(shared) for name in names if shared and drawn.random() < 0.5}
    return found | {one: tuple(name for name in modifiers if name in MODIFIERS)}


def modified(
    value: torch.Tensor, modifiers: tuple[str, ...], generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    """Return drawn values changed by these modifiers, perhaps in place. They are rounded to ``dtype`` later."""
    if not modifiers or not value.dim() or not value.numel():
        return value
    value, drawn = value.contiguous(), random.Random(generator.initial_seed())
    for name in modifiers:
        MODIFIERS[name](value.view(-1, value.shape[-1]), generator, drawn, dtype)
    return value


def ragged_lengths(total: int, groups: int, generator: torch.Generator) -> torch.Tensor:
    """Return lengths of groups that add up to a total. Most are 0 or next to the edge of a tile, and one has the rest.

    The first group is empty in half of the cases, and so is the last, unless no other group is left.
    """
    device = generator.device
    tiles = [tile for tile in EDGES if tile <= max(total // 2, EDGES[0])]
    edges = torch.tensor([edge for tile in tiles for edge in (0, tile - 1, tile, tile + 1)], device=device)
    lengths = edges[torch.randint(0, len(edges), (groups,), generator=generator, device=device)]
    takers = torch.ones(groups, dtype=torch.bool, device=device)
    for end in (0, -1):
        if _between(generator, 0, 1) < 0.5 and int(takers.sum()) > 1:
            takers[end] = False
    # Few tokens may not be enough for all: a drawn order decides, so that groups at any place are left without.
    order = torch.randperm(groups, generator=generator, device=device)
    wanted = torch.where(takers, lengths, 0)[order]
    taken = torch.minimum(wanted, (total - wanted.cumsum(0) + wanted).clamp_min(0))
    lengths = torch.empty_like(taken).index_copy_(0, order, taken)
    places = takers.nonzero().reshape(-1)
    lengths[places[int(_between(generator, 0, len(places)))]] += total - int(lengths.sum())
    return lengths


# ---- variation ------------------------------------------------------------------------------------
# Values that a model varies from call to call: ranges of inputs, kinds of weights, continuous scalars.
#
# All of them depend only on the case's seed, its contents and the input's name, so that a report can reproduce the case.

DECADES_DOWN, DECADES_UP = 3.0, 2.0
"""Decades by which a continuous scalar is varied around the Workload's value."""
KEEPS_ITS_SCALARS = 0.2
ROUND_SCALARS = 0.3
"""Share of varied scalars that become one, a power of two or ten, or a whole number: code often treats these apart."""
HIDES_SCALARS = frozenset({EXACT, "subnormals", "one_hot", "max_quarter", ROW_SCALE})
"""Distributions on which a wrong scalar may not show: scalars stay, results are zero or flushed, or the reference fails."""
_WEIGHTS = ("normal", "unit", SAME_VALUE, "specks", "channels", "large", "tiny", "shifted")
_WEIGHTS_EVERY = 8
"""Of so many siblings, one has weights of ones and one has weights of zeros: more would let too many cases prove nothing."""
_PLAIN = frozenset({"normal", PLANTED, EXACT, STEPS, "max_quarter", "subnormals"})
"""Contents whose weights stay N(0, 1) (or small integers), so that all columns of a row matter."""

EXTREME_SHARE = 0.6
_MATRIX = 2
"""Minimum dimensions of data; a tensor with fewer is a weight."""


def _drawn(seed: int, what: str) -> random.Random:
    return random.Random(hashlib.sha256(f"{seed}:{what}".encode()).digest())


def vary_scalars(
    definition: Definition, scalars: Mapping[str, Scalar], distribution: str, seed: int, *, always: bool = False
) -> dict[str, Scalar]:
    """Return the scalars of one fuzz case: continuous ones vary over decades around their value, others stay.

    A value grows only if the contents have a moderate range: float32 cannot compute a softmax of scores of 2**20.

    Args:
        always: vary every continuous scalar, to a number of six digits. Otherwise some cases keep all, and some values are round.
    """
    drawn = _drawn(seed, "scalars")
    distribution, modifiers = parts_of(distribution)
    grows = distribution not in ILL_CONDITIONED | EXTREME and MASSIVE not in modifiers
    keeps = (drawn.random() < KEEPS_ITS_SCALARS and not always) or distribution in (EXACT, FAR_BELOW)
    varied: dict[str, Scalar] = {}
    for name, value in scalars.items():
        if name not in definition.inputs:
            continue
        up = DECADES_UP if grows else 0.0
        exponent, is_round = drawn.uniform(-DECADES_DOWN, up), drawn.random() < ROUND_SCALARS
        continuous = isinstance(value, float) and math.isfinite(value) and not is_code_selecting(definition, name)
        varied[name] = value
        if continuous and not keeps and isinstance(value, float) and value:
            other = float(f"{value * 10**exponent:.6g}")
            bounds = abs(value) * 10**-DECADES_DOWN, abs(value) * 10**up
            varied[name] = _rounded(other, *bounds, drawn) if is_round and not always else other
    return varied


def scalars_to_vary(
    definition: Definition, scalars: Mapping[str, Scalar], others: Sequence[Mapping[str, Scalar]]
) -> dict[str, Scalar]:
    """Return the scalars that those of fuzz cases are varied around: in place of zero, the largest value of other Workloads.

    A bound of zero may have no effect, so a kernel that ignores it would be served with the other values.
    """
    found = dict(scalars)
    for name, value in scalars.items():
        if value != 0 or not isinstance(value, float) or name not in definition.inputs:
            continue
        if not is_code_selecting(definition, name):
            stated = [one for other in others if isinstance(one := other.get(name), float) and math.isfinite(one)]
            found[name] = max(stated, key=abs, default=value)
    return found


def _rounded(value: float, low: float, high: float, drawn: random.Random) -> float:
    """Return one, or the nearest power of two or ten or whole number, with the sign of a value; the value if out of bounds."""
    size = abs(value)
    near = [1.0, 1.0, 2.0 ** round(math.log2(size)), 10.0 ** round(math.log10(size)), float(round(size))]
    inside = [one for one in near if low <= one <= high and one > 0]
    return math.copysign(drawn.choice(inside), value) if inside else value


def styles_of(definition: Definition, distribution: str, seed: int) -> dict[str, str]:
    """Return input -> the distribution of its contents.

    Inputs that the Definition draws as ``normal``, because other contents make its maths ill-conditioned, only change their
    range. At most one input of a case has extreme contents, because otherwise products and exponentials lose all information.
    """
    drawn = _drawn(seed, "styles")
    distribution, modifiers = parts_of(distribution)
    names = [name for name in definition.tensor_inputs if _is_drawn(definition, name)]
    matrices = [name for name in names if len(definition.inputs[name].shape or ()) >= _MATRIX]
    extreme = drawn.choice(matrices or names or [""])
    styles = {}
    for name in definition.tensor_inputs:
        ordinary, weight = drawn.choice(ORDINARY), drawn.choice(_WEIGHTS)
        if name not in names:
            continue
        generated = name in definition.input_generators
        if name not in matrices:
            styles[name] = _style_of_weight(distribution, weight, generated=generated)
        elif distribution == VARIED:
            is_extreme = name == extreme and drawn.random() < EXTREME_SHARE
            styles[name] = drawn.choice(sorted(EXTREME)) if is_extreme else ordinary
        elif distribution in EXTREME:
            styles[name] = distribution if name == extreme else "normal"
        elif distribution == FAR_BELOW:
            styles[name] = BELOW_ALONE if len(matrices) == 1 else BELOW if name == matrices[0] else ABOVE
        else:
            styles[name] = "normal" if generated and distribution not in ORDINARY else distribution
    untrained = ALL_ONES if ONES in modifiers else ALL_ZEROS if ZEROS in modifiers else None
    weights = _weights(definition) if untrained is not None else []
    if untrained is not None and weights:
        one = drawn.choice(weights)
        styles |= {name: untrained for name in weights if name == one or drawn.random() < 0.5}
    return styles


def _style_of_weight(distribution: str, drawn: str, *, generated: bool) -> str:
    """Return the distribution of an input with fewer dimensions than a matrix. One that is generated is never all equal."""
    if distribution == EXACT and not generated:
        return EXACT
    if distribution in _PLAIN:
        return "normal"
    return "unit" if generated and drawn == SAME_VALUE else drawn


def _weights(definition: Definition) -> list[str]:
    """Return the inputs with one dimension that may have any numbers."""
    names = [name for name in definition.tensor_inputs if len(definition.inputs[name].shape or ()) == 1]
    names = [name for name in names if name not in (*definition.input_generators, *definition.saved)]
    return [name for name in names if _is_drawn(definition, name) and _is_floating(definition, name)]


def _is_drawn(definition: Definition, name: str) -> bool:
    """Return True for an input without a generator, or with a ``normal`` one."""
    if definition.joint_inputs is not None and name in definition.joint_inputs.inputs:
        return False
    generator = definition.input_generators.get(name)
    return generator is None or generator.kind == "normal"

"""The rule of neighbours: which measured points stand for a call that was not measured. Pure: no I/O, no torch.

An axis has one of three kinds, which ``serving`` of the Definition states:

- **independent**: more of it is more of the same work (tokens of a norm, heads, batch). Time is a launch plus a rate times the
  work, for a kernel and for stock code. The speedup between two amounts of work therefore lies between their speedups.
- **lengths**: a kernel loops over it in tiles (positions of attention, tokens of a product). Between two measured lengths that
  are near each other, time grows by whole tiles.
- **widths**: all others. A kernel may pad a width to a power of two, read it unaligned or take another path. Its time between
  two measured widths is not known, so a call must have a measured one, or one of the same tiles.

A call is served between a measured point with no more work and one with no less. The kernel must be clearly faster at both.
Beyond the largest measured work, two points show what more work costs. There it is served as far as its index arithmetic was
verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tilegym_db.records import Definition
from tilegym_db.records.expressions import names_in

Axes = Mapping[str, int]

MIN_SPEEDUP_BETWEEN = 1.15
"""Lower bound of the speedup at both points around a call. A last tile or wave that is not full costs up to 11%
(attention_decode on an H200 is 1.10 times as fast as stock code at 4096 positions and 0.98 times at 4001)."""
MAX_LENGTH_GAP = 8
"""Maximum factor between the measured lengths around a call."""
TILE = 128
"""Width of a tile, in elements: smaller tiles divide it."""
ALIGNED = 16
"""Elements of which a width is a multiple if compilers read its rows in whole vectors."""
MAX_TILE_SHARE = 1 / 64
"""Maximum share by which two widths of the same tiles differ, so that the cost of one is that of the other."""
UNVERIFIED_FACTOR = 4
"""Maximum factor between a size and its largest measured one, for a trace that does not state how far indices were verified."""
MIN_GROWTH = 1.5
"""Minimum factor between the times of a kernel at the largest measured work and at half of it, so that work decides them."""
MAX_UNVERIFIED_SIZE = (1 << 16) - 1
"""Maximum size beyond the measured ones for such a trace. A grid dimension and a 16-bit number end there."""
MAX_UNVERIFIED_ELEMENTS = 1 << 31
"""Number of elements of a tensor at which 32-bit indices end. A trace that states no verified elements does not serve beyond."""


class Neighbours(NamedTuple):
    """The measured points around a call, as indices: of less and of more work, and the nearest of both.

    If no measured point has as much work, both indices are those of the largest work, and ``halves`` are points of the same
    lengths with at most half of it: one for ``lower``, one for ``upper``.
    """

    nearest: int
    lower: int
    upper: int
    halves: tuple[int, ...]
    factor: float
    """The work of the call over the largest measured work of its lengths; at most 1 between points."""
    padding: float
    """Factor by which the tiles of the call may be emptier than those of the points, at least 1."""


def neighbours(
    definition: Definition, asked: Axes, dtypes: Mapping[str, str], points: Sequence[Axes]
) -> Neighbours | str:
    """Return the measured points that stand for a call, or the reason if it must be measured itself.

    Args:
        points: the axes of the measured points; at least one.
    """
    alike = [index for index, point in enumerate(points) if _why_other_width(definition, asked, point) is None]
    if not alike:
        return _why_no_width(definition, asked, points)
    lengths = lengths_of(definition)
    outside = _why_outside_lengths(lengths, asked, [points[index] for index in alike])
    if outside:
        return outside
    work = {index: _work(definition, asked, points[index], dtypes) for index in alike}
    whole = definition.cost_of(asked, dtypes)[1]
    less = [i for i in alike if work[i] <= whole and all(points[i][name] <= asked[name] for name in lengths)]
    longer = [i for i in alike if all(points[i][name] >= asked[name] for name in lengths)]
    more = [i for i in longer if work[i] >= whole]
    if not less:
        least = min(work.values())
        if whole < least:
            return f"its {_megabytes(whole)} MB are less than the measured {_megabytes(least)} MB, and launches decide below"
        return f"no measured point has at most its {' and '.join(lengths)} and its work"
    if not longer:
        return f"no measured point has at least its {' and '.join(lengths)}"

    def distance(index: int) -> tuple[float, int]:
        return log_distance(definition, asked, points[index]), index

    def largest(index: int) -> tuple[float, tuple[float, int]]:
        return -work[index], distance(index)

    # Beyond the measured work, the largest points stand for it: their share of launches is the smallest.
    order = distance if more else largest
    pair = _near_pair(sorted(less, key=order), sorted(more or longer, key=order), lengths, points)
    if pair is None:
        nearest_two = points[min(less, key=distance)], points[min(more or longer, key=distance)]
        return _why_far_apart(lengths, asked, *nearest_two)
    lower, upper = pair
    halves: tuple[int, ...] = ()
    if not more:
        found = [_half_of(index, work, points, lengths) for index in (lower, upper)]
        if None in found:
            return "beyond the measured work, one measured point does not show what more of it costs"
        halves = tuple(index for index in found if index is not None)
    nearest = min((lower, upper), key=distance)
    padding = _padding(definition, asked, (points[lower], points[upper]))
    return Neighbours(nearest, lower, upper, halves, whole / max(work[upper], 1.0), padding)


def why_more_costs_more(
    latency_us: float, half_us: float, stock_us: float, half_stock_us: float, factor: float
) -> str | None:
    """Return why a kernel may lose its lead beyond the measured work; None if it keeps its lead.

    Time grows by a rate times the work. Two points give the rate of the kernel and that of stock code.

    Args:
        half_us: its time at half of that work or less.
        half_stock_us: its time at half of that work or less.
        factor: the work of the call over the largest measured one.
    """
    more, stock_more = latency_us - half_us, stock_us - half_stock_us
    if stock_more < MIN_SPEEDUP_BETWEEN * more:
        return f"more work costs it {more:.2f} us and stock code {stock_more:.2f} us"
    if factor > UNVERIFIED_FACTOR and latency_us < MIN_GROWTH * half_us:
        return f"launches decide at the largest measured work, and this call has {factor:.3g} times as much"
    return None


def independent_axes(definition: Definition) -> tuple[str, ...]:
    """Return the axes that only repeat work."""
    groups = () if definition.serving is None else definition.serving.independent
    return tuple(name for group in groups for name in group)


def lengths_of(definition: Definition) -> tuple[str, ...]:
    """Return the axes over which a kernel loops in tiles, a growing one included."""
    serving = definition.serving
    if serving is None:
        return ()
    growing = () if serving.growing is None else (serving.growing,)
    return tuple(dict.fromkeys((*serving.lengths, *growing)))


def widths_of(definition: Definition) -> tuple[str, ...]:
    """Return the axes whose cost between measured sizes is not known."""
    known = {*independent_axes(definition), *lengths_of(definition)}
    return tuple(name for name in definition.var_axes if name not in known)


def same_tiles(size: int, measured: int) -> bool:
    """Return True if a width costs what a measured one costs, whatever the tile of the kernel.

    Both are equal, or both fill whole tiles, have the same next power of two, and differ by at most one tile in 64.
    """
    if size == measured:
        return True
    if size % TILE or measured % TILE or next_power(size) != next_power(measured):
        return False
    return abs(size - measured) <= MAX_TILE_SHARE * max(size, measured)


def padding_of_widths(definition: Definition, asked: Axes, point: Axes) -> tuple[float, str]:
    """Return the factor by which a kernel that pads may lose its lead between a measured point and a call of other widths.

    A kernel may read a whole power of two of each width, and stock code reads what is there. The second value names the
    width of the largest factor; it is "" if no width costs more than at the point.

    Args:
        definition: states the kinds of its axes. If it states none, axes that are never the outermost alone are widths.
    """
    names = _other_widths(definition, asked, point)
    if not _states_kinds(definition):
        inner = {name for shape in _shapes(definition) for part in shape[1:] for name in names_in(str(part))[0]}
        names = [name for name in names if name in inner]
    factors = {name: _more_padding(asked[name], point[name]) for name in names}
    factor = math.prod(factors.values())
    return factor, max(factors, key=lambda name: factors[name]) if factor > 1.0 else ""


def why_unaligned(definition: Definition, asked: Axes, point: Axes) -> str:
    """Return why a measured point does not show what rows of a call cost; "" if its rows are aligned like those of the call.

    Kernels read a row of a matrix in vectors if its width is a multiple of :data:`ALIGNED`. A point of such a width says nothing
    of others: on an H200 a gate in TileLang is 1.5 times as fast as stock code at 2304 and 0.89 times at 4097.
    """
    last = {name for shape in _shapes(definition) if len(shape) > 1 for name in names_in(str(shape[-1]))[0]}
    for name in widths_of(definition):
        if name in last and _is_less_aligned(asked[name], point[name]):
            return (
                f"{name}={asked[name]} was not measured, and it is no multiple of {math.gcd(point[name], ALIGNED)}, as measured "
                "widths are: its rows are read in another way"
            )
    return ""


def _is_less_aligned(size: int, measured: int) -> bool:
    return size > TILE and math.gcd(size, ALIGNED) < math.gcd(measured, ALIGNED)


def _states_kinds(definition: Definition) -> bool:
    return bool(independent_axes(definition) or lengths_of(definition))


def _shapes(definition: Definition) -> list[Sequence[int | str]]:
    """Return the shapes of all tensors as the Definition writes them."""
    specs = (*(definition.inputs[name] for name in definition.tensor_inputs), *definition.outputs.values())
    return [spec.shape or () for spec in specs]


def _more_padding(size: int, measured: int) -> float:
    """Return the padded share of a width over that of a measured one, at least 1."""
    if same_tiles(size, measured):
        return 1.0
    return max(1.0, next_power(size) * max(measured, 1) / (max(size, 1) * next_power(measured)))


def _other_widths(definition: Definition, asked: Axes, point: Axes) -> list[str]:
    """Return the widths, without those that follow an axis in the call and at the point."""
    follows = {} if definition.serving is None else definition.serving.follows
    return [
        name
        for name in widths_of(definition)
        if name not in follows or asked[name] != asked[follows[name]] or point[name] != point[follows[name]]
    ]


def next_power(size: int) -> int:
    """Return the smallest power of two that is not below a size."""
    return 1 << max(size - 1, 0).bit_length()


def log_distance(definition: Definition, asked: Axes, point: Axes) -> float:
    """Return the distance of two calls in log2 of axis sizes: 1.0 is a factor of two on one axis."""
    return math.hypot(
        *(math.log2(max(asked[name], 1) / max(point[name], 1)) for name in definition.var_axes if name in point)
    )


def why_beyond_verified(
    definition: Definition,
    asked: Axes,
    points: Iterable[Axes],
    verified: Axes,
    verified_elements: int,
) -> str | None:
    """Return why the offsets of a call may be too large for the indices of a kernel; None if verified sizes cover them.

    Args:
        verified: axis -> the largest size at which the kernel's outputs were compared; empty if its trace does not state it.
        verified_elements: elements of the largest such tensor; 0 if its trace does not state it.
    """
    points = list(points)
    known = max((largest_tensor(definition, point) for point in points), default=0)
    elements = largest_tensor(definition, asked)
    if elements > max(known, verified_elements, 0 if verified_elements else MAX_UNVERIFIED_ELEMENTS - 1):
        bound = verified_elements or MAX_UNVERIFIED_ELEMENTS - 1
        return f"a tensor of {elements} elements is beyond the {max(known, bound)} that its indices are known to reach"
    for name in independent_axes(definition):
        measured = max((point[name] for point in points), default=0)
        least = 0 if name in verified else min(UNVERIFIED_FACTOR * measured, MAX_UNVERIFIED_SIZE)
        most = max(measured, verified.get(name, 0), least)
        if asked[name] > most:
            return f"{name}={asked[name]} is beyond {most}, up to which its indices are known to be right"
    return None


def largest_tensor(definition: Definition, axes: Axes) -> int:
    """Return the elements of the largest tensor of a call."""
    names = (*definition.tensor_inputs, *definition.written_outputs)
    return max((math.prod(definition.shape_of(name, axes)) for name in names), default=0)


# ---- widths ---------------------------------------------------------------------------------------


def _why_other_width(definition: Definition, asked: Axes, point: Axes) -> str | None:
    """Return the first axis on which a point has another width, or a group of axes with another ratio."""
    for name in _other_widths(definition, asked, point):
        if not same_tiles(asked[name], point[name]):
            return name
    for group in () if definition.serving is None else definition.serving.independent:
        for other in group[1:]:
            if asked[group[0]] * point[other] != point[group[0]] * asked[other]:
                return f"{group[0]}/{other}"
    return None


def _why_no_width(definition: Definition, asked: Axes, points: Sequence[Axes]) -> str:
    """Return the reason: the first axis whose size was not measured, or else the sizes that were not measured together."""
    follows = {} if definition.serving is None else definition.serving.follows
    widths = widths_of(definition)
    for name in widths:
        leader = follows.get(name)
        known = sorted({point[name] for point in points})
        followed = leader is not None and asked[name] == asked[leader]
        if not followed and not any(same_tiles(asked[name], size) for size in known):
            sizes = ", ".join(map(str, known[:12])) + (", ..." if len(known) > 12 else "")
            return f"{name}={asked[name]} was not measured (measured: {sizes}), and cost between widths is not known"
    culprits = {found for point in points if (found := _why_other_width(definition, asked, point))}
    ratios = sorted(name for name in culprits if "/" in name)
    if ratios:
        one, other = ratios[0].split("/")
        return f"{ratios[0]}={asked[one] / max(asked[other], 1):g} was not measured with its other sizes"
    return f"{', '.join(f'{name}={asked[name]}' for name in widths)} were not measured together"


# ---- lengths and work -----------------------------------------------------------------------------


def _why_outside_lengths(lengths: Sequence[str], asked: Axes, alike: Sequence[Axes]) -> str:
    for name in lengths:
        sizes = {point[name] for point in alike}
        if not min(sizes) <= asked[name] <= max(sizes):
            return f"{name}={asked[name]} is outside the measured range {min(sizes)}..{max(sizes)}"
    return ""


def _near_pair(
    less: Sequence[int], more: Sequence[int], lengths: Sequence[str], points: Sequence[Axes]
) -> tuple[int, int] | None:
    """Return the first point of less and of more work whose lengths are near each other; None if no two are."""
    for lower in less:
        for upper in more:
            if all(points[upper][name] <= MAX_LENGTH_GAP * points[lower][name] for name in lengths):
                return lower, upper
    return None


def _why_far_apart(lengths: Sequence[str], asked: Axes, lower: Axes, upper: Axes) -> str:
    name = next((name for name in lengths if upper[name] > MAX_LENGTH_GAP * lower[name]), lengths[0])
    apart = f"{lower[name]} and {upper[name]}, are more than a factor of {MAX_LENGTH_GAP} apart"
    return f"{name}={asked[name]} was not measured, and the measured lengths around it, {apart}"


def _work(definition: Definition, asked: Axes, point: Axes, dtypes: Mapping[str, str]) -> float:
    """Return the bytes of a call with the independent axes of a point and all other axes of the asked call."""
    follows = {} if definition.serving is None else definition.serving.follows
    taken = (
        *independent_axes(definition),
        *(name for name in follows if follows[name] in independent_axes(definition)),
    )
    return definition.cost_of({**asked, **{name: point[name] for name in taken}}, dtypes)[1]


def _half_of(index: int, work: Mapping[int, float], points: Sequence[Axes], lengths: Sequence[str]) -> int | None:
    """Return the largest point of the same lengths with at most half of the work of a point; None if there is none."""
    same = [
        other
        for other in work
        if 2 * work[other] <= work[index] and all(points[other][name] == points[index][name] for name in lengths)
    ]
    return max(same, key=lambda other: (work[other], -other), default=None)


def _padding(definition: Definition, asked: Axes, points: Sequence[Axes]) -> float:
    """Return the factor by which tiles of inner independent axes may be emptier than at the points.

    A program of a kernel may own all heads of a token, padded to a power of two. Outermost axes are not padded.
    """
    factor = 1.0
    for name in independent_axes(definition):
        shapes = (spec.shape or () for spec in definition.outputs.values())
        if any(name in shape[1:] for shape in shapes):
            known = min(_padded(point[name]) for point in points)
            factor *= max(1.0, _padded(asked[name]) / known)
    return factor


def _padded(size: int) -> float:
    """Return the padded size over the size: to a power of two up to a tile, then to whole tiles."""
    size = max(size, 1)
    return (next_power(size) if size <= TILE else -(-size // TILE) * TILE) / size


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.3g}"

"""Large cases: sizes that are served and too large for a whole oracle.

They have many rows, long rows, or tensors beyond 2**31 elements. Contents repeat along the independent axes after a prime number
of rows, so that drawing them is cheap. A row that is mistaken for another one, such as 65536 rows before, shows. Outputs are
compared at some rows only.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilegym_db.errors import RecordError
from tilegym_db.published.neighbours import lengths_of
from tilegym_db.records import Definition, Solution
from tilegym_db.records.call import Call, is_code_selecting, scalars_with_axes
from tilegym_db.records.definition_parts import contiguous_strides
from tilegym_db.records.dtypes import STORED_BYTES, Scalar
from tilegym_db.records.expressions import repaired
from tilegym_db.records.workload import Case
from tilegym_db.verification.cases import SIZES, TILES, summed_axis
from tilegym_db.verification.distributions import CONTENTS, RAGGED, SOFTMAX
from tilegym_db.verification.inputs import has_spreads
from tilegym_db.verification.oracle import loops

FEW_ROWS = tuple((1 << power, 1 << power + 1) for power in range(10, 17))
"""Ranges of rows, one case in each: kernels switch to other code at some number of rows, and back at a larger one."""
ALL_TILES = FEW_ROWS[-1]
"""The range in which the number of rows is always one that nearly every tile divides."""
VERY_MANY_ROWS = (((1 << 17) + 1, 1 << 20), ((1 << 16) + 1, 1 << 17))
"""More rows than a grid dimension and a 16-bit number can have; the second range if the first one is too expensive."""
LONG_ROWS, VERY_LONG_ROWS = ((1 << 10, 1 << 12), (1 << 12, 1 << 14), (1 << 14, 1 << 16)), ((1 << 16) + 1, 1 << 18)
WHOLE_SHARE = 0.6
"""Share of sizes that are multiples of a power of two, as batches are; the others are odd, and often primes."""
MOST_IN_EACH_OCTAVE = 2
"""Maximum number of axes that have a case in every octave of rows."""
COMPOSITES, COMPOSITE_SHARE = (20160, 3360, 1440), 0.2
"""Sizes that nearly every tile divides, such as 96, 144 or 320, and the share of sizes that are multiples of one of them."""
ELEMENTS_ON_CPU, ELEMENTS_ON_GPU = (1 << 20, 1 << 22), (1 << 26, 1 << 30)
INDEX_LIMIT = 1 << 31
LARGEST_AXIS = (1 << 24) - 1
"""Maximum size of an axis: more programs than this are beyond what the languages start at once."""
MAX_FLOPS_ON_CPU, MAX_FLOPS_ON_GPU = 1e8, 2e12
WHOLE_LENGTHS = (*LONG_ROWS, ((1 << 16) + 1, 1 << 17))
"""Ranges of a length that is not independent: its cases have little else, so that their outputs are compared whole."""
MAX_WHOLE, MAX_WHOLE_WITH_REPEATED = 8, 4
"""Maximum numbers of such cases; the second one for an operator that also has cases with repeated rows."""
OTHER_SIZES = (1 << 9) + 1, 1 << 10
"""Range of an axis that differs from model to model and has no longer case, such as the number of experts."""
USUAL_SPREADS = 3
"""One of so many cases spreads ids, lengths and masks as usual."""
DECADES_OF_SCALARS, GOLDEN = 1.1, (math.sqrt(5) - 1) / 2
"""Decades by which scalars grow. Heads are tiny in these cases, so scores would be too equal to show that one is left out.

Each case is the golden ratio further within these decades, so that a few cases reach all parts of them.
"""
MAX_FLOPS_OF_WHOLE = 1e10
"""Limit on a GPU for these cases, as their oracle may hold the scores of all pairs of positions in float64."""
SPARSE_LENGTHS = {False: ((5 << 10, 1 << 13),), True: ((1 << 13, 1 << 14), (1 << 15, 1 << 17))}
"""Ranges of a length at which a reference is affordable at some positions only, on a CPU and on a GPU."""
MAX_FLOPS_OF_SPARSE = {False: 1e9, True: MAX_FLOPS_ON_GPU}
"""Limits for these cases: only the kernel does all of that work. In PyTorch it holds all scores a few times."""
SPARSE_POSITIONS = 192
_PERIODS = (31, 61, 251, 509)
_MAX_COMPARED = 1 << 19
"""Maximum elements of an oracle's tensor; it limits the rows that are compared."""
_MAX_MATRICES = 1 << 7
"""Maximum compared matrices, as references of attention loop over them."""
_MAX_MATRICES_OF_WHOLE = 1 << 11
_MAX_DRAWN = 1 << 20
_NEAR = 4
"""Powers of two by which a multiple is finer in half of the sizes, so that they stay where they were drawn."""
_COMPARED_ROWS = 64
_MARKS = (1 << 10, 1 << 15, 1 << 16)
_NEAR_THE_END, _LAST_ROWS = 4, 256
"""Number of compared rows among the last ones, which may be one tile."""
_LARGE_TRIES = 40
_SIZES_OF_OTHERS = 2
"""Number of sets of sizes of the other axes that cases of one kind share. A kernel compiles anew for most sets."""


@dataclass(frozen=True)
class LargeCase:
    """A large call, the small call whose contents repeat in it, and the compared indices of each repeated axis."""

    case: Case
    base: Case
    rows: Mapping[str, tuple[int, ...]]
    is_long: bool = False
    """True if its large axis is not repeated, so that the oracle has its whole length."""
    usual: LargeCase | None = None
    """The same sizes with the scalars of the Workload and usual ids, lengths and masks, if the reference fails these."""
    is_sparse: bool = False
    """True if only the indices in ``rows`` count, as others have no weight; the oracle has only these (:mod:`.sparse`)."""


def large_cases(
    definition: Definition,
    solution: Solution,
    dtypes: Mapping[str, str],
    scalars: Mapping[str, Scalar],
    *,
    seed: int,
    budget_bytes: int,
    on_gpu: bool,
) -> list[LargeCase]:
    """Return the large cases that the Definition and the Solution allow.

    They have rows in each octave from 1,024 to 131,072, more than 131,072 indices of each independent axis (else more than
    65,536), long rows, rows of more than 65,536 columns, many elements, and on a GPU more than 2**31 elements in one tensor.
    Other axes that vary from call to call, such as tokens that a sort or a sum mixes, have lengths of up to 131,072. Each axis
    is long in some case. Values are normal; scalars grow, and ids, lengths and masks are spread in all ways.

    Args:
        budget_bytes: maximum bytes of all tensors of a call.
    """
    generator = random.Random(f"{seed} large")
    repeated = [axis for axis in definition.divisible_axes if axis not in definition.size_scalars.values()]
    if definition.sampled:
        return []
    others = [axis for axis in definition.var_axes if axis not in repeated]
    drawn = _Large(definition, solution, dtypes, scalars, repeated, budget_bytes, on_gpu, generator, generator.random())
    whole = list(itertools.islice(drawn.whole_cases(), MAX_WHOLE_WITH_REPEATED if repeated else MAX_WHOLE))
    whole += drawn.sparse_cases()
    if not repeated:
        varying = varying_axes(definition)
        return [*whole, *drawn.each_long([axis for axis in others if axis not in varying])]
    octaves, lengths = generator.sample(FEW_ROWS, len(FEW_ROWS)), generator.sample(LONG_ROWS, len(LONG_ROWS))
    many, beyond = ELEMENTS_ON_GPU if on_gpu else ELEMENTS_ON_CPU, (INDEX_LIMIT + 1, INDEX_LIMIT + (1 << 20))
    found = [drawn.case(repeated, octaves[0])]
    found += [drawn.of_very_many([axis]) for axis in repeated]
    generator.shuffle(others)
    long = [drawn.in_turn(others, bounds, turn) for turn, bounds in enumerate((lengths[0], VERY_LONG_ROWS))]
    found += long
    found.append(drawn.case(repeated, many, elements=True))
    for turn, bounds in enumerate(octaves):
        found += [drawn.case([axis], bounds, thin=True) for axis in in_each_octave(definition, repeated, turn)]
    long += [drawn.in_turn(others, bounds, turn, thin=True) for turn, bounds in enumerate(lengths[1:])]
    found += long[2:]
    found += whole
    tried = [large.case.call.axes for large in (*long, *whole) if large is not None and not large.is_sparse]
    found += drawn.each_long([axis for axis in others if all(axes[axis] < OTHER_SIZES[0] for axes in tried)])
    found += [drawn.case(repeated, beyond, elements=True)] if on_gpu else []
    return [large for large in found if large is not None]


def in_each_octave(definition: Definition, repeated: Sequence[str], turn: int) -> list[str]:
    """Return the axes that have a case in the next octave of rows: those that vary in a model, and one of the others.

    Without any that vary, the others take turns. A kernel may have a limit at some number of tokens, and need not at a width.
    """
    varying = [axis for axis in repeated if axis in varying_axes(definition)][:MOST_IN_EACH_OCTAVE]
    others = [axis for axis in repeated if axis not in varying]
    return [*varying, *others[turn % len(others) :][:1]] if others and (turn % 2 or not varying) else varying


def varying_axes(definition: Definition) -> list[str]:
    """Return the axes whose sizes vary from call to call in a model; all if the Definition is not served.

    Heads of queries and of keys, which keep their ratio, belong to a model and stay.
    """
    serving, sizes = definition.serving, {*definition.size_scalars.values()}
    alone = () if serving is None else (names[0] for names in serving.independent if len(names) == 1)
    names = definition.var_axes if serving is None else dict.fromkeys((*lengths_of(definition), *alone))
    return [axis for axis in names if axis not in sizes]


@dataclass(frozen=True)
class _Large:
    definition: Definition
    solution: Solution
    dtypes: Mapping[str, str]
    scalars: Mapping[str, Scalar]
    repeated: Sequence[str]
    budget_bytes: int
    on_gpu: bool
    generator: random.Random
    start: float
    """Share of the decades that the scalars of the first case grow by, and place in each octave of rows."""
    shared: dict[Sequence[str], list[dict[str, int]]] = field(default_factory=dict)
    """Kinds of sizes -> sets of sizes of all axes that a case was made with."""
    several: Collection[str] = ()
    """Axes of rows and tokens, which are not tiny where others are, and whose ids are spread as usual."""
    turns: tuple[Iterator[int], Iterator[int]] = field(default_factory=lambda: (itertools.count(), itertools.count()))
    """Numbers of the cases with many rows and of the long ones, which have their contents in turn, each for themselves."""
    most_flops: float | None = None
    """Limit on the work of a call, if it is another than that of a whole oracle."""

    def whole_cases(self) -> Iterator[LargeCase]:
        """Yield cases with one long axis that varies and is not repeated; each axis has its turn, then another length."""
        axes = [axis for axis in varying_axes(self.definition) if axis not in self.repeated]
        lengths = WHOLE_LENGTHS if self.definition.serving is not None else WHOLE_LENGTHS[:1]
        turns = [self.generator.sample(lengths, len(lengths)) for _ in axes]
        whole = replace(self, repeated=(), shared={})
        for bounds in zip(*turns, strict=True):
            cases = (whole.case([axis], of_axis, thin=True) for axis, of_axis in zip(axes, bounds, strict=True))
            yield from filter(None, cases)

    def sparse_cases(self) -> list[LargeCase]:
        """Return cases with one long axis that varies, whose oracle has a few of its indices only."""
        few = replace(self, repeated=(), shared={}, several=(), most_flops=MAX_FLOPS_OF_SPARSE[self.on_gpu])
        found = list[LargeCase]()
        for axis in self.definition.var_axes if SOFTMAX.search(self.definition.reference) else ():
            for bounds in SPARSE_LENGTHS[self.on_gpu] if self._scores_itself(axis) else ():
                large = few.case([axis], bounds, thin=True, whole=False)
                if large is not None:
                    size = large.case.call.axes[axis]
                    positions = {0, size - 1, *self.generator.sample(range(size), SPARSE_POSITIONS)}
                    case = replace(large.case, spread_as="")
                    found.append(
                        replace(large, case=case, base=case, rows={axis: tuple(sorted(positions))}, is_sparse=True)
                    )
        return found

    def _scores_itself(self, axis: str) -> bool:
        """Return True for positions that a reference may score against each other: rows of the first input and of another.

        A window or another scalar that is a size counts in distances, which are other ones among a few positions, and inputs
        that are drawn jointly may name positions.
        """
        first, *others = (self.definition.inputs[name].shape or () for name in self.definition.tensor_inputs)
        bound = self.definition.size_scalars or self.definition.joint_inputs is not None
        is_free = axis not in self.repeated and not bound
        return is_free and axis in first and any(axis == shape[-2] for shape in others if len(shape) > 1)

    def each_long(self, axes: Sequence[str]) -> list[LargeCase]:
        """Return a case for each of these axes in which it is long, if the constraints allow that.

        There are at least 16 rows or tokens, whose ids reach all parts of such an axis; other axes are tiny. Batches and heads
        have no such case: references loop over them, and no model has so many heads.
        """
        serving = self.definition.serving
        several = {*self.repeated, *(varying_axes(self.definition) if serving is not None else ())}
        whole = replace(self, repeated=(), shared={}, several=several)
        looped = {name for names in (serving.independent if serving is not None else ()) for name in names}
        found = [whole.case([axis], OTHER_SIZES, thin=True) for axis in axes if axis not in looped]
        return [large for large in found if large is not None]

    def in_turn(
        self, axes: Sequence[str], bounds: tuple[int, int], turn: int, *, thin: bool = False
    ) -> LargeCase | None:
        """Return a case in which the next one of the axes is long, or another one if that is not allowed."""
        first = [axes[turn % len(axes)]] if axes else []
        return self.case(first, bounds, thin=thin) or self.case(axes, bounds, thin=thin)

    def of_very_many(self, axes: Sequence[str]) -> LargeCase | None:
        """Return a case within the first of :data:`VERY_MANY_ROWS` that allows one."""
        return next(filter(None, (self.case(axes, bounds) for bounds in VERY_MANY_ROWS)), None)

    def case(
        self,
        axes: Sequence[str],
        bounds: tuple[int, int],
        *,
        elements: bool = False,
        thin: bool = False,
        whole: bool = True,
    ) -> LargeCase | None:
        """Return a case in which one of the axes, or the largest tensor, has a size within the bounds.

        ``thin``: the other axes are tiny, so that the case costs little more than a call. ``whole``: its oracle must be
        affordable at all indices of axes that are not repeated.
        """
        constraints = (*self.definition.constraints, *self.solution.spec.constraints)
        fixed = {name: axis.value for name, axis in self.definition.axes.items() if axis.value is not None}
        for number in range(_LARGE_TRIES if axes else 0):
            kinds = ("tiny", "prime", "tile") if number < _LARGE_TRIES // 2 and not thin else ("one", "tiny")
            kinds = ("prime", "tile", "above a tile") if elements else kinds
            axis = self.generator.choice(axes)
            sizes = repaired(constraints, self._sizes(kinds, number), fixed, self.dtypes, self.generator)
            low, high = bounds
            if elements:
                one = self._bound({**sizes, axis: 1})
                most = self._elements(one) if one else 0
                low, high = (-(-bound // most) for bound in bounds) if most else (1, 1)
            size = self._size(low, high)
            large = self._bound(repaired(constraints, {**sizes, axis: size}, fixed, self.dtypes, self.generator))
            if (
                large is None
                or large[axis] > LARGEST_AXIS
                or not 0.9 * low <= large[axis] <= high + 1
                or not self._affordable(large)
            ):
                continue
            base = self._bound({**large, **{name: self._period(large[name]) for name in self.repeated}})
            rows = {name: self._rows(name, large) for name in self.repeated}
            compared = self._bound({**large, **{name: len(found) for name, found in rows.items()}})
            if base and compared and (not whole or self._are_quick(axis, base, compared)):
                self._share(kinds, sizes)
                is_long = axis not in self.repeated
                seed, contents = self.generator.getrandbits(62), self._contents(is_long)
                made, made_base = (self._case_of(axes, seed, *contents) for axes in (large, base))
                usual, usual_base = (self._case_of(axes, seed, "", 1.0) for axes in (large, base))
                return LargeCase(made, made_base, rows, is_long, LargeCase(usual, usual_base, rows, is_long))
        return None

    def _share(self, kinds: Sequence[str], sizes: dict[str, int]) -> None:
        """Keep the sizes of a case if they are among the first ones of these kinds, with other widths than those before."""
        shared = self.shared.setdefault(kinds, [])
        widths = [[known[name] for name in known if name not in self.repeated] for known in (*shared, sizes)]
        if len(shared) < _SIZES_OF_OTHERS and widths[-1] not in widths[:-1]:
            shared.append(sizes)

    def _sizes(self, kinds: Sequence[str], number: int) -> dict[str, int]:
        """Return sizes of all axes: those of earlier cases of these kinds if there are enough sets of them, or new ones."""
        shared = self.shared.get(kinds, [])
        # The first tries of each half take shared sizes. New ones follow if no case within the bounds has those.
        if len(shared) == _SIZES_OF_OTHERS and number % (_LARGE_TRIES // 2) < _SIZES_OF_OTHERS:
            return self.generator.choice(shared)
        small = [size for kind in kinds for size in SIZES[kind]]
        return {
            name: self.generator.choice(TILES if name in self.several else small) for name in self.definition.var_axes
        }

    def _size(self, low: float, high: float) -> int:
        is_octave = (low, high) in FEW_ROWS
        # At the same place of every octave, so that there is one within a factor of two from any number on.
        size = int(low * (high / low) ** (self.start if is_octave else self.generator.random()))
        steps = [step for step in COMPOSITES if high // step * step >= low]
        if steps and ((low, high) == ALL_TILES or self.generator.random() < COMPOSITE_SHARE):
            step = steps[0] if low > COMPOSITES[0] else self.generator.choice(steps)
            return min(-(-size // step) * step, int(high // step) * step)
        if size < TILES[0] or self.generator.random() >= WHOLE_SHARE:
            return size | 1
        least, most = int(math.log2(TILES[0])), int(math.log2(size))
        whole = 1 << self.generator.randint(least, max(most - _NEAR * self.generator.randint(0, 1), least))
        return -(-size // whole) * whole if low > size // whole * whole else size // whole * whole

    def _contents(self, is_long: bool) -> tuple[str, float]:
        """Return the distribution that spreads ids, lengths and masks of the next case, and the factor of its scalars."""
        turn, names = next(self.turns[is_long]), tuple(CONTENTS)
        share = (self.start + turn * GOLDEN) % 1
        # A sum of equal terms has a larger error, in float32 too.
        varies = has_spreads(self.definition) and summed_axis(self.definition) is None
        spread = ""
        if varies and not self.several and turn % USUAL_SPREADS:
            spread = names[(int(self.start * len(names)) + turn) % len(names)]
            spread += f"+{RAGGED}" * (self.generator.random() < 0.5)
        return spread, 10 ** (share * DECADES_OF_SCALARS)

    def _case_of(self, axes: Mapping[str, int], seed: int, spread: str, factor: float) -> Case:
        grown = {
            name: float(f"{value * factor:.6g}")
            if isinstance(value, float) and math.isfinite(value) and not is_code_selecting(self.definition, name)
            else value
            for name, value in self.scalars.items()
            if name in self.definition.inputs
        }
        scalars = scalars_with_axes(self.definition, grown, axes)
        call = Call(self.definition.name, dict(axes), dict(self.dtypes), {}, scalars)
        return Case(call, seed=seed, spread_as=spread)

    def _bound(self, axes: Mapping[str, int]) -> dict[str, int] | None:
        try:
            bound = self.definition.bind_axes({name: axes[name] for name in self.definition.var_axes})
            self._shapes(bound)
            return bound if self.solution.unsupported(bound, self.dtypes) is None else None
        except RecordError:
            return None

    def _shapes(self, axes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        names = (*self.definition.tensor_inputs, *self.definition.written_outputs)
        return {name: self.definition.shape_of(name, axes) for name in names}

    def _affordable(self, axes: Mapping[str, int]) -> bool:
        sizes = self._shapes(axes)
        total = sum(
            math.prod(shape) * STORED_BYTES[self.definition.dtype_of(name, self.dtypes)]
            for name, shape in sizes.items()
        )
        flops = self.definition.cost_of(axes, self.dtypes)[0]
        most = MAX_FLOPS_ON_CPU
        if self.on_gpu:
            most = MAX_FLOPS_ON_GPU if self.repeated else MAX_FLOPS_OF_WHOLE
        most = most if self.most_flops is None else self.most_flops
        return total <= self.budget_bytes and flops <= most

    def _elements(self, axes: Mapping[str, int], inner: int = 0) -> int:
        """Return the elements of the largest tensor, without the last ``inner`` dimensions."""
        return max(math.prod(shape[: len(shape) - inner]) for shape in self._shapes(axes).values())

    def _are_quick(self, axis: str, base: Mapping[str, int], compared: Mapping[str, int]) -> bool:
        # A model has many positions in any place of a shape, but not many heads.
        has_many = self.definition.serving is None or axis in lengths_of(self.definition)
        of_whole = _MAX_COMPARED if has_many and not loops(self.definition.reference) else _MAX_MATRICES_OF_WHOLE
        most = 2 * _MAX_MATRICES if self.repeated else of_whole
        return (
            self._elements(base) <= _MAX_DRAWN
            and self._elements(compared) <= 2 * _MAX_COMPARED
            and self._elements(compared, inner=2) <= most
        )

    def _period(self, size: int) -> int:
        return min(size, self.generator.choice(_PERIODS))

    def _rows(self, axis: str, axes: Mapping[str, int]) -> tuple[int, ...]:
        shapes = [
            (self.definition.shape_of(name, axes), (spec.shape or ()).index(axis))
            for name, spec in self.definition.outputs.items()
        ]
        strides = [contiguous_strides(shape)[dimension] for shape, dimension in shapes]
        one = {**axes, **dict.fromkeys(self.repeated, 1)}
        count = min(_COMPARED_ROWS, (_MAX_COMPARED / self._elements(one)) ** (1 / len(self.repeated)))
        if any(axis in (spec.shape or ())[:-2] for spec in self.definition.outputs.values()):
            count = min(count, _MAX_MATRICES / self._elements(one, inner=2))
        return sampled_rows(axes[axis], max(strides), int(count), self.generator)


def sampled_rows(size: int, stride: int, count: int, generator: random.Random) -> tuple[int, ...]:
    """Return indices of an axis: both ends, those at limits of numbers of rows and elements, and random ones.

    Args:
        stride: elements from one index to the next.
        count: wanted number of indices; the ends and limits are included beyond it.
    """
    marks = {0, size - 1} | {mark + near for mark in _MARKS for near in (-1, 0, 1)}
    marks |= {limit // stride + near for limit in (INDEX_LIMIT, 2 * INDEX_LIMIT) for near in (0, 1)}
    marks |= {size - generator.randint(2, _LAST_ROWS) for _ in range(_NEAR_THE_END)}
    marks = {mark for mark in marks if 0 <= mark < size}
    more = generator.sample(range(size), min(size, max(0, count - len(marks))))
    return tuple(sorted(marks.union(more)))

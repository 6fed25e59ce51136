"""Fuzz cases: whole calls with sizes around tile edges, primes and tiny sizes, in every layout and with all contents.

Candidates are drawn at random. Of several, the one is kept that covers most new pairs of (axis, kind of size), layout,
contents and alignment. In this way a few cases cover most pairs. The secret seed decides which cases they are.

The module's parts are the cases and their layouts.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Solution
from tilegym_db.records.call import Call, forward_of, scalars_with_axes
from tilegym_db.records.definition import MIN_ELEMENTS_FOR_NORMS
from tilegym_db.records.definition_parts import accepts, contiguous_strides, spelled
from tilegym_db.records.definition_rules import GRADIENT
from tilegym_db.records.dtypes import STORED_BYTES, Scalar
from tilegym_db.records.expressions import evaluate_int, repaired
from tilegym_db.records.workload import Case
from tilegym_db.verification.distributions import (
    DISTRIBUTIONS,
    HIDES_SCALARS,
    PLANTED,
    REFERENCE_MAY_FAIL,
    STEPS,
    has_wide_rows,
    ranges_of,
    vary_scalars,
    with_modifiers,
)

TILES = (16, 32, 64, 128, 256)
SIZES: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "tiny": (2, 3),
    "prime": (5, 7, 13, 61, 97, 131, 251),
    "below a tile": tuple(tile - 1 for tile in TILES),
    "tile": TILES,
    "above a tile": tuple(tile + 1 for tile in TILES),
    "other tiles": (96, 144, 160, 192, 224, 240),
}
"""Kind of size -> sizes around the tiles of all languages; an axis may also take sizes of real workloads.

Tiles of 48, 80, 96 or 112 rows, and their multiples, divide the other ones.
"""
_KIND_OF = {size: kind for kind, sizes in reversed(SIZES.items()) for size in sizes} | {0: "zero"}
WORKLOAD = "workload"

MAX_ELEMENTS = 1 << 20
"""Maximum elements of the largest tensor: fuzzing is about edges, and the fp64 oracle must stay fast."""
MAX_ROWS = 1 << 10
"""Maximum rows of the largest tensor, over all axes except the last: one program is started per few rows."""
_WIDER_LIMITS = 16
"""Factor on both limits for a Solution that accepts no case within them."""

OFFSETS = (0, 1)
FEW_CASES = 8
"""Minimum number of cases for a case with a size of zero, and for contents on which references often fail."""
LONG_SUM = (1 << 13, 3 << 12)
"""Range of the number of rows that a gradient is a sum over in one case; few terms do not show in which dtype they are added."""
MAX_ELEMENTS_OF_SUM = 1 << 24
"""Maximum elements of the largest tensor of that case. The gradient has as many as norms need, if its axes may be that long."""
MANY_ROWS = 65
"""Minimum rows to reach the kernel with large tiles, which uses the tensor copy engine."""
_WITH_BOTH = 3
"""Minimum number of cases to test a misaligned address and misaligned padded rows separately; below, one case has both."""
_CANDIDATES = 16
_FRUITLESS_ROUNDS = 12
_LAYOUT_WEIGHT = 3
"""Number of pairs that a new property of a tensor's layout counts as."""


@dataclass(frozen=True)
class _Demand:
    """A property that one case must have, so that even a small set of cases includes it.

    ``layout``: of every tensor that may have it; an output should then have rows that end within a vector, and be as large
    as a tile. ``varied``: continuous scalars have values of many digits, and contents on which a rounded one shows. ``summed``:
    an axis over which a gradient is a sum, with many rows.
    """

    offset: int | None = None
    layout: str | None = None
    contents: str | None = None
    odd: bool = False
    zero: str | None = None
    varied: bool = False
    summed: str | None = None


@dataclass(frozen=True)
class _Candidate:
    """A case that the records allow, before its seed is drawn."""

    axes: dict[str, int]
    layouts: Layouts
    contents: str
    offset: int
    labels: list[Label]


@dataclass
class _Fuzzer:
    """The properties of cases that may vary, and the pairs of them that are covered."""

    definition: Definition
    solution: Solution
    anchors: Sequence[Mapping[str, int]]
    dtypes: Mapping[str, str]
    generator: random.Random
    distributions: tuple[str, ...]
    max_elements: int = MAX_ELEMENTS
    max_rows: int = MAX_ROWS
    covered: set[tuple[Label, Label]] = field(default_factory=set)
    covered_layouts: set[Label] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.layouts = LayoutChoices.of(self.definition, self.solution)
        self.constraints = (*self.definition.constraints, *self.solution.spec.constraints)
        self.fixed = {name: axis.value for name, axis in self.definition.axes.items() if axis.value is not None}
        specs = {**self.definition.inputs, **self.definition.outputs}
        self.shapes = {spec.shape for spec in specs.values() if spec.shape}

    def next_case(self, demand: _Demand, anchored: bool, scalars: Mapping[str, Scalar]) -> Case | None:
        """Return the allowed candidate with the highest coverage; None if the constraints allow none."""
        for _ in range(_FRUITLESS_ROUNDS):
            drawn = [self._candidate(demand, anchored) for _ in range(_CANDIDATES)]
            allowed = [candidate for candidate in drawn if candidate is not None]
            if not allowed:
                continue
            best = max(allowed, key=lambda one: (self._meets(demand, one), self._gain(one)))
            self.covered.update(_pairs(best.labels))
            self.covered_layouts.update(_of_layouts(best.labels))
            seed, contents = self.generator.getrandbits(62), best.contents
            if demand == _Demand():
                contents = with_modifiers(self.definition, contents, seed)
            scalars = scalars_with_axes(self.definition, scalars, best.axes)
            varied = vary_scalars(self.definition, scalars, contents, seed, always=demand.varied)
            call = Call(self.definition.name, best.axes, dict(self.dtypes), best.layouts, varied)
            return Case(call, distribution=contents, seed=seed, offset=best.offset)
        return None

    def zero_axis(self) -> str | None:
        """Return the first axis that may be empty under all constraints; None if there is none."""
        for name in self.definition.var_axes:
            for _ in range(_FRUITLESS_ROUNDS):
                axes = {**self._sizes(_Demand(), False, "normal"), name: 0}
                if self._fits(axes) and self._bound(axes) is not None:
                    return name
        return None

    def _candidate(self, demand: _Demand, anchored: bool) -> _Candidate | None:
        """Return a random candidate; None if the records do not allow its sizes."""
        pick = self.generator.choice
        rows = demand.layout if self.layouts.padded else None  # such a case must not be dropped
        left_out = REFERENCE_MAY_FAIL if rows else frozenset()
        left_out |= HIDES_SCALARS if demand.varied else frozenset()
        contents = demand.contents or pick([name for name in self.distributions if name not in left_out])
        offset = pick(OFFSETS) if demand.offset is None else demand.offset
        sizes = self._sizes(demand, anchored, contents)
        axes = self._bound(sizes) if self._fits(sizes, demand.summed) else None
        if axes is None:
            return None
        # Equal elements hide mistakes, so a case with a demand has none.
        ties = demand == _Demand() and contents != PLANTED
        layouts, labels = draw_layouts(
            self.layouts, axes, self.dtypes, self.generator, rows, ties=ties, covered=self.covered_layouts
        )
        labels += [(name, _KIND_OF.get(size, WORKLOAD)) for name, size in sizes.items()]
        return _Candidate(axes, layouts, contents, offset, [*labels, ("contents", contents), ("offset", str(offset))])

    def _meets(self, demand: _Demand, candidate: _Candidate) -> int:
        """Return how well a candidate tests the demanded layout or sum."""
        if demand.summed is not None:
            return min(self._summed_elements(candidate.axes, demand.summed), MIN_ELEMENTS_FOR_NORMS)
        if demand.layout is None or not self.layouts.padded:
            return 0
        rows = ragged_rows(self.definition, self.layouts.padded, candidate.axes, self.dtypes)
        return min(rows, MANY_ROWS if demand.layout == ROWS_ALIGNED else 1)

    def _sizes(self, demand: _Demand, anchored: bool, contents: str) -> dict[str, int]:
        generator, names = self.generator, self.definition.var_axes
        # With tiny sizes, one NaN in a tensor would make every output NaN.
        larger = contents == PLANTED or demand.summed or (demand.layout and self.layouts.padded)
        kinds = list(SIZES)[2 if larger else 0 :]
        axes = {name: generator.choice(SIZES[generator.choice(kinds)]) for name in names}
        if demand.odd:
            axes = {name: size | 1 for name, size in axes.items()}
        if demand.summed is not None:
            rows = {demand.summed: generator.randint(*LONG_SUM)}
            return self._shrunk(self._repaired(self._enlarged({**axes, **rows}, demand.summed)), [*rows], demand.summed)
        kept: list[str] = []
        if anchored and self.anchors and names:
            anchor = generator.choice(self.anchors)
            kept = generator.sample(list(names), generator.randint(1, max(len(names) - 1, 1)))
            axes |= {name: anchor[name] for name in kept if name in anchor}
        axes = self._shrunk(self._repaired(axes), kept)
        return axes if demand.zero is None else {**axes, demand.zero: 0}

    def _enlarged(self, axes: dict[str, int], summed: str) -> dict[str, int]:
        """Enlarge one axis so that the gradients that are sums over another have enough elements for norms."""
        names = {name for shape in self._summed_shapes(summed) for name in shape if name in axes}
        if names:
            axes[self.generator.choice(sorted(names))] *= -(
                -MIN_ELEMENTS_FOR_NORMS // self._summed_elements(axes, summed)
            )
        return axes

    def _summed_elements(self, axes: Mapping[str, int], summed: str) -> int:
        sizes = {**self.fixed, **axes}
        return min(
            math.prod(evaluate_int(str(entry), sizes) for entry in shape) for shape in self._summed_shapes(summed)
        )

    def _summed_shapes(self, summed: str) -> list[tuple[int | str, ...]]:
        return [self.definition.outputs[name].shape or () for name in summed_gradients(self.definition, summed)]

    def _repaired(self, axes: Mapping[str, int]) -> dict[str, int]:
        return repaired(self.constraints, axes, self.fixed, self.dtypes, self.generator)

    def _shrunk(self, axes: dict[str, int], kept: Sequence[str], summed: str | None = None) -> dict[str, int]:
        """Make axes smaller, in random order, until the largest tensor is within the bounds."""
        smaller = [size for sizes in SIZES.values() for size in sizes]
        shrinkable = [name for name in axes if name not in kept]
        self.generator.shuffle(shrinkable)
        shrunk = dict(axes)
        while shrinkable and not self._fits(shrunk, summed):
            name = shrinkable.pop()
            shrunk[name] = self.generator.choice([size for size in smaller if size <= shrunk[name]] or [1])
        return axes if shrunk == axes else self._repaired(shrunk)

    def _fits(self, axes: Mapping[str, int], summed: str | None = None) -> bool:
        bound = {**self.fixed, **axes}
        most, rows = (MAX_ELEMENTS_OF_SUM,) * 2 if summed is not None else (self.max_elements, self.max_rows)
        for shape in self.shapes:
            try:
                sizes = [bound[entry] if entry in bound else evaluate_int(entry, bound) for entry in shape]
            except RecordError:  # not a whole number
                return False
            if math.prod(sizes) > most or math.prod(sizes[:-1]) > rows:
                return False
        return True

    def _bound(self, axes: Mapping[str, int]) -> dict[str, int] | None:
        try:
            bound = self.definition.bind_axes(axes)
            return bound if self.solution.unsupported(bound, self.dtypes) is None else None
        except RecordError:
            return None

    def _gain(self, candidate: _Candidate) -> int:
        new = sum(pair not in self.covered for pair in _pairs(candidate.labels))
        return new + _LAYOUT_WEIGHT * len(_of_layouts(candidate.labels) - self.covered_layouts)


def summed_axis(definition: Definition) -> str | None:
    """Return the axis of rows over which a gradient is a sum, as that of weights is over tokens; None without one.

    It is the outermost axis of the first tensor. Some output has it, and some gradient has not.
    """
    first = next((spec.shape for spec in definition.inputs.values() if spec.shape), ("",))[0]
    if first not in definition.var_axes or first in definition.size_scalars.values():
        return None
    having = any(first in (spec.shape or ()) for spec in definition.outputs.values())
    return str(first) if having and summed_gradients(definition, str(first)) else None


def summed_gradients(definition: Definition, axis: str) -> list[str]:
    """Return the gradients that have no such axis."""
    shapes = {name: spec.shape for name, spec in definition.outputs.items() if spec.shape}
    return [name for name, shape in shapes.items() if name.startswith(GRADIENT) and axis not in shape]


def _of_layouts(labels: Sequence[Label]) -> set[Label]:
    return {label for label in labels if label[0].startswith(_LAYOUT_OF)}


def _pairs(labels: Sequence[Label]) -> Iterator[tuple[Label, Label]]:
    """Return all pairs of properties; those of one tensor's layout are one property, because they are many."""
    laid_out = _of_layouts(labels)
    core = [label for label in labels if label not in laid_out] + [("layout", "strided" if laid_out else CONTIGUOUS)]
    return itertools.combinations(core, 2)


def fuzz_cases(
    definition: Definition,
    solution: Solution,
    anchors: Sequence[Mapping[str, int]],
    dtypes: Mapping[str, str],
    scalars: Mapping[str, Scalar],
    *,
    count: int,
    seed: int,
    max_rows: int = MAX_ROWS,
) -> list[Case]:
    """Return distinct cases that the Definition and the Solution both allow; the same ones for the same seed.

    Among the first four cases are a misaligned address, odd sizes and planted special values. Rows are padded, and end within
    a vector of 16 bytes: in one of the first two cases they begin at such vectors, in the other they do not. If a gradient
    of the Definition is a sum over rows, one case of a full set has very many rows. What the layouts of the Solution,
    the constraints or the special values of the Definition exclude is left out.

    Args:
        anchors: sizes of real workloads. Every second case takes some axes from one, so that a special case for a shape
            cannot recognise a fuzz case by its unusual sizes.
        scalars: scalar inputs by name; continuous ones are varied around their values.
        count: maximum number of cases; fewer or none if the constraints leave no more.
        max_rows: maximum rows of the largest tensor, over all axes except the last. Below ``MAX_ROWS``, no sum is long.
    """
    for factor in (1, _WIDER_LIMITS):
        bounds = (factor * MAX_ELEMENTS, factor * max_rows)
        fuzzer = _fuzzer(definition, solution, anchors, dtypes, count, seed, bounds)
        cases: list[Case] = []
        for number, demand in enumerate(_demands(fuzzer, count)):
            case = fuzzer.next_case(demand, bool(number % 2), scalars)
            if case is None and demand != _Demand():
                case = fuzzer.next_case(_Demand(), bool(number % 2), scalars)
            if case is None:
                break
            cases.append(case)
        if cases:
            return cases
    return []


def _fuzzer(
    definition: Definition,
    solution: Solution,
    anchors: Sequence[Mapping[str, int]],
    dtypes: Mapping[str, str],
    count: int,
    seed: int,
    bounds: tuple[int, int],
) -> _Fuzzer:
    left_out = REFERENCE_MAY_FAIL if count < FEW_CASES else frozenset()
    distributions = tuple(
        name for name in DISTRIBUTIONS if name not in left_out and (name != PLANTED or definition.special_values)
    )
    distributions += (STEPS,) if _gives_codes(definition) else ()
    return _Fuzzer(definition, solution, anchors, dtypes, random.Random(seed), distributions, *bounds)


def _gives_codes(definition: Definition) -> bool:
    """Return True if it casts to a format of a few bits, which may be packed into bytes."""
    return any(spec.dtype.startswith(("float8", "float4", "uint8")) for spec in definition.outputs.values())


def _demands(fuzzer: _Fuzzer, count: int) -> list[_Demand]:
    """Return the demand on each case; the last case of a full set has an empty axis if one may be empty."""
    special = PLANTED if fuzzer.definition.special_values else None
    # Of a few cases, all could keep their scalars by chance, or round them to a number that every format has.
    aligned = _Demand(odd=True, offset=0, layout=ROWS_ALIGNED, varied=True)
    off = replace(aligned, layout=ROWS_OFF)
    unaligned = _Demand(offset=1) if count >= _WITH_BOTH else replace(off, offset=1)
    demands = [aligned, unaligned, off, _Demand(contents=special)]
    demands += [_Demand(contents=STEPS)] * 2 if STEPS in fuzzer.distributions else []
    demands += [_Demand()] * (count - len(demands))
    enough = count >= FEW_CASES and fuzzer.max_rows >= MAX_ROWS
    summed = summed_axis(fuzzer.definition) if enough else None
    if summed is not None:
        demands[-2] = _Demand(offset=0, contents="normal", summed=summed)
    zero = fuzzer.zero_axis() if count >= FEW_CASES else None
    if zero is not None:
        demands[-1] = _Demand(zero=zero, contents="normal")
    return demands[:count]


def sibling_of(definition: Definition, case: Case, number: int, scalars: Mapping[str, Scalar], first: int = 0) -> Case:
    """Return the same shape, layouts and alignment with another range, other positions and other scalars, as in a model.

    It needs no further compilation, so it costs one call and one oracle. The range of a long sum stays: values of one sign add
    up with a larger error, in float32 too.

    Args:
        number: its index among them; successive cases use successive ranges.
        first: number of the range of the first case, which is secret, so that each range comes about equally often.
    """
    names, number = ranges_of(definition), first + number
    contents = names[number % len(names)]
    seed = random.Random(case.seed).getrandbits(62)
    if case.call.axes.get(summed_axis(definition) or "", 0) >= LONG_SUM[0]:
        contents = "normal"
    else:
        wide = has_wide_rows(definition, case.call.axes)
        contents = with_modifiers(definition, contents, seed, number, wide=wide)
    scalars = scalars_with_axes(definition, scalars, case.call.axes)
    call = replace(case.call, scalars=vary_scalars(definition, scalars, contents, seed))
    return replace(case, call=call, distribution=contents, seed=seed)


# ---- fuzz layouts ---------------------------------------------------------------------------------
# Strides that a Solution declares to read and that contiguous tensors do not have, and inputs that share memory.

CONTIGUOUS = "contiguous"
ROWS = "row_contiguous"
ROWS_ALIGNED, ROWS_OFF = "rows_aligned", "rows_off"
"""Padded rows that all begin at multiples of 16 bytes, as vectors and the tensor copy engine (TMA) need them, or not.

If they do but the last extent is not such a multiple, code that writes whole vectors writes into the padding. TMA does so.
"""
SEPARATE, SAME, BEHIND, PACKED = "separate", "same", "behind", "packed"
"""Memory of the inputs of a case: separate; two are one tensor; some lie behind each other; or they interleave row by row."""

_VECTOR_BYTES = 16
_ALIGNED_ELEMENTS = 64
_PADDING = (1, 2, 3, 5, 7, 8, 9, 13, 16, 24, 64)
"""Odd padding misaligns every second row for any vector; even padding keeps some alignments and breaks others."""
PERMUTED, BY_FEW, BY_MULTIPLE, EXPANDED = "permuted", "enlarged by a few", "enlarged by a multiple", "expanded"
"""Properties of a dimension: its place in memory; more memory than its size, as a part of a longer cache or every second row
has; or none, as a table that is expanded over a batch has."""
_STEPS = (2, 3)

_SHARE_CONTIGUOUS = 0.35
_SHARE_LAID_OUT = 0.75
_SHARE_ALONE = 0.3
"""Share of the cases with one tensor that is not contiguous: a kernel may look at the first input only."""
_SHARE_PERMUTED, _SHARE_PADDED, _SHARE_ENLARGED = 0.4, 0.5, 0.3
_SHARE_EXPANDED, _SHARE_STEPPED, _SHARE_SEPARATE = 0.1, 0.2, 0.5
_SPARE_ELEMENTS = 1 << 17
"""Maximum elements of a tensor with gaps, beyond twice its own."""

FAR = "far apart"
"""Property of a dimension whose indices lie up to a million elements apart, as the sequences of a long cache do."""
_SHARE_FAR = 0.3
_FAR_ELEMENTS = 1 << 22
"""Elements of memory that such a tensor takes. Guards of the memory are compared after each call, so more would take long."""
_MOST_FAR = 64
"""Maximum size of the dimension, so that its stride needs more than 16 bits."""

_LAYOUT_OF = "layout of "

Layouts = dict[str, str]
Label = tuple[str, str]
"""A property of a case, and its value."""


@dataclass(frozen=True)
class LayoutChoices:
    """The layouts that a Solution accepts: the class of each tensor, and the inputs that may be expanded or equal.

    A tensor with strides in the Definition keeps them in every case; only the sizes in them vary.
    """

    definition: Definition
    classes: Mapping[str, str]
    expandable: frozenset[str]
    """Inputs whose contents may repeat along a dimension: not written, and not drawn together with others."""
    pairs: tuple[tuple[str, str], ...]
    """Inputs that may be one tensor."""

    @classmethod
    def of(cls, definition: Definition, solution: Solution) -> LayoutChoices:
        """Return the choices under the Solution's declared classes."""
        tensors = [
            name for name in (*definition.tensor_inputs, *definition.written_outputs) if name not in definition.layouts
        ]
        bound = {
            *definition.in_place,
            *definition.saved,
            *(sampled.uniforms for sampled in definition.sampled.values()),
        }
        bound |= {*definition.joint_inputs.inputs} if definition.joint_inputs else set()
        if definition.saved:  # these are computed from inputs of the forward
            bound |= {*forward_of(definition).inputs}
        free = [name for name in definition.tensor_inputs if name in tensors and name not in bound]
        alike = {name: (spec := definition.inputs[name]).shape and (spec.shape, spec.dtype) for name in free}
        generators = definition.input_generators
        pairs = [
            (one, other)
            for one, other in itertools.combinations(free, 2)
            if alike[one] and alike[one] == alike[other] and generators.get(one) == generators.get(other)
        ]
        classes = {name: solution.spec.layouts.get(name, CONTIGUOUS) for name in tensors}
        return cls(definition, classes, frozenset(free), tuple(pairs))

    @functools.cached_property
    def padded(self) -> tuple[str, ...]:
        """The tensors that may have padded rows."""
        return tuple(n for n, declared in self.classes.items() if accepts(declared, ROWS) and self._rank(n) > 1)

    def _rank(self, name: str) -> int:
        return len((self.definition.inputs.get(name) or self.definition.outputs[name]).shape or ())

    @functools.cached_property
    def shared(self) -> tuple[str, ...]:
        """The ways in which inputs may share memory; :data:`SEPARATE` if there is none."""
        inputs = [name for name in self.definition.tensor_inputs if name in self.classes]
        rows = [name for name in inputs if name in self.padded]
        return (*[SAME] * bool(self.pairs), *[BEHIND] * (len(inputs) > 1), *[PACKED] * (len(rows) > 1)) or (SEPARATE,)


def draw_layouts(
    choices: LayoutChoices,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    generator: random.Random,
    rows: str | None = None,
    *,
    ties: bool = True,
    covered: Collection[Label] = (),
) -> tuple[Layouts, list[Label]]:
    """Return tensor -> ``strided(...)``, and the properties of these layouts.

    Some tensors stay contiguous, or all but one, and strides differ. A kernel that confuses those of two tensors fails. With
    ``rows``, all tensors that may have padded rows have them, and nothing else. A tensor without elements stays contiguous.
    Without ``ties``, no elements of inputs have one address. Properties that are not yet ``covered`` come first.
    """
    definition = choices.definition
    shapes = {name: definition.shape_of(name, axes) for name in choices.classes}
    shapes = {name: shape for name, shape in shapes.items() if shape and 0 not in shape}
    if rows is not None:
        return _row_layouts(choices, shapes, dtypes, generator, rows), [(_LAYOUT_OF + "rows", rows)]
    layouts: Layouts = {}
    labels: list[Label] = []
    declared = {name: choices.classes[name] for name in shapes if choices.classes[name] != CONTIGUOUS}
    free = [name for name in declared if math.prod(shapes[name]) > 1]
    alone = generator.choice(free) if len(free) > 1 and generator.random() < _SHARE_ALONE else None
    if alone is not None or generator.random() >= _SHARE_CONTIGUOUS:
        for name in declared if alone is None else (alone,):
            if alone is None and generator.random() >= _SHARE_LAID_OUT:
                continue
            strides, found = draw_strides(
                shapes[name],
                _bytes(definition, name, dtypes),
                declared[name],
                generator,
                expandable=ties and name in choices.expandable,
                covered={label for of, label in covered if of == _LAYOUT_OF + name},
            )
            if strides != contiguous_strides(shapes[name]):
                layouts[name] = spelled(strides)
                labels += [(_LAYOUT_OF + name, label) for label in found]
    if alone is not None:
        labels += [(_LAYOUT_OF + "alone", alone)] if layouts else []
    elif generator.random() >= _SHARE_SEPARATE:
        ways = [how for how in choices.shared if ties or how != SAME] or [SEPARATE]
        how, shared = _shared(generator.choice(ways), choices, shapes, layouts, dtypes, generator)
        layouts |= shared
        labels = [label for label in labels if label[0].removeprefix(_LAYOUT_OF) not in shared] + [("memory", how)]
    return layouts, labels


def _row_layouts(
    choices: LayoutChoices,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    generator: random.Random,
    rows: str,
) -> Layouts:
    """Return padded rows for every tensor that may have them."""
    layouts: Layouts = {}
    for name in choices.padded:
        if name in shapes:
            *outer, size = shapes[name]
            stride = generator.choice(_row_strides(rows, size, _bytes(choices.definition, name, dtypes)))
            layouts[name] = spelled(contiguous_strides((*outer, stride)))
    return layouts


def draw_strides(
    shape: tuple[int, ...],
    itemsize: int,
    declared: str,
    generator: random.Random,
    *,
    expandable: bool,
    covered: Collection[str] = (),
) -> tuple[tuple[int, ...], list[str]]:
    """Return strides of a class of layouts, and the properties that they have, such as ``2 permuted``.

    The dimensions lie in memory in any order. Each takes as much memory as its size, or more, or none if the tensor is expanded
    along it. Rows may begin at multiples of 16 bytes, or not. If the last dimension may have any stride, it has any place.
    One property that is not yet covered is certain.
    """
    last, free, chance = len(shape) - 1, _is_free(declared), generator.random
    leading = [dimension for dimension in range(last + free) if shape[dimension] > 1]
    kinds = (PERMUTED, BY_FEW, BY_MULTIPLE, *[EXPANDED] * expandable)
    open_ones = [
        (d, kind) for d in leading for kind in kinds if f"{d} {kind}" not in covered and (d, kind) != (last, EXPANDED)
    ]
    wish = generator.choice(open_ones or [(-1, "")])
    order = _draw_order(last + free, wish, generator)
    labels = [f"{d} {PERMUTED}" for place, d in enumerate(order) if place != d and d in leading]
    order += [] if free else [last]
    step = 1
    if free and chance() < _SHARE_STEPPED:
        step = generator.choice(_STEPS)
        labels.append("stepped")
    strides, extent, found = _draw_extents(shape, itemsize, order, wish, generator, step=step, expandable=expandable)
    labels += found
    if extent > 2 * math.prod(shape) + _SPARE_ELEMENTS:
        return contiguous_strides(shape), []
    first = order[0]
    may_be_far = first in leading and first != last and strides[first] and shape[first] <= _MOST_FAR
    if may_be_far and chance() < _SHARE_FAR:
        # A whole number of vectors, or one element more.
        strides[first] = max(strides[first], _FAR_ELEMENTS // shape[first] // _ALIGNED_ELEMENTS * _ALIGNED_ELEMENTS)
        strides[first] += generator.choice((0, 1))
        labels.append(f"{first} {FAR}")
    aligned = all(stride * itemsize % _VECTOR_BYTES == 0 for stride in strides if stride > 1)
    return tuple(strides), [*labels, "aligned" if aligned else "off"]


def _draw_order(count: int, wish: tuple[int, str], generator: random.Random) -> list[int]:
    """Return dimensions in the order in which they lie in memory, outermost first.

    A dimension that is wished to be permuted is not at its own place. One with padding is not outermost: there it has no effect.
    """
    order = list(range(count))
    if generator.random() < _SHARE_PERMUTED:
        generator.shuffle(order)
    dimension, kind = wish
    if dimension in order and len(order) > 1:
        at = order.index(dimension)
        if (kind == PERMUTED and at == dimension) or (kind in (BY_FEW, BY_MULTIPLE) and at == 0):
            other = generator.choice([place for place in range(len(order)) if place != at])
            order[at], order[other] = order[other], order[at]
    return order


def _draw_extents(
    shape: tuple[int, ...],
    itemsize: int,
    order: Sequence[int],
    wish: tuple[int, str],
    generator: random.Random,
    *,
    step: int,
    expandable: bool,
) -> tuple[list[int], int, list[str]]:
    """Return the strides, the elements that they span, and their properties, from the innermost dimension outwards.

    Each dimension takes as much memory as its size, or more, or none. ``step`` is the stride of the innermost one.
    """
    last, chance = len(shape) - 1, generator.random
    strides, labels = [0] * len(shape), list[str]()
    for place, dimension in enumerate(reversed(order)):
        size, wants = shape[dimension], wish[1] if dimension == wish[0] else ""
        may_expand = expandable and place and dimension != last and size > 1
        if may_expand and (wants == EXPANDED or (not wants and chance() < _SHARE_EXPANDED)):
            labels.append(f"{dimension} {EXPANDED}")
            continue
        strides[dimension] = step
        share = _SHARE_ENLARGED if place else _SHARE_PADDED
        if len(order) > 1 and (wants in (BY_FEW, BY_MULTIPLE) or chance() < share):
            by = wants if wants in (BY_FEW, BY_MULTIPLE) else generator.choice((BY_FEW, BY_MULTIPLE))
            step *= generator.choice(_extents(size, itemsize)[by])
            labels += [f"{dimension} {by}"] * (place < last)
        else:
            step *= size
    return strides, step, labels


def _is_free(declared: str) -> bool:
    """Return True if a class lets the last dimension have any stride."""
    return not accepts(ROWS, declared)


def _extents(size: int, itemsize: int) -> dict[str, list[int]]:
    """Return larger extents in memory: by a few elements, to the next vector or block, or a multiple of the size."""
    few = [size + 1, size + 5, *_row_strides(ROWS_OFF, size, itemsize)[:3], *_row_strides(ROWS_ALIGNED, size, itemsize)]
    return {BY_FEW: few, BY_MULTIPLE: [2 * size, 2 * size, 3 * size]}


def _row_strides(layout: str, size: int, itemsize: int) -> list[int]:
    """Return row strides longer than a row: to the next vector or larger block, or misaligned for every vector."""
    if layout == ROWS_OFF:
        return [size + padding for padding in _PADDING if (size + padding) * itemsize % _VECTOR_BYTES]
    vector = max(1, _VECTOR_BYTES // itemsize)
    blocks = [size // step * step + step for step in (vector, _ALIGNED_ELEMENTS)]
    return [blocks[0], blocks[0] + vector, blocks[1], blocks[1]]


def _shared(
    how: str,
    choices: LayoutChoices,
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Layouts,
    dtypes: Mapping[str, str],
    generator: random.Random,
) -> tuple[str, Layouts]:
    """Return the way in which some inputs share memory, and their layouts; separate memory if no inputs of this case can."""
    if how == SAME:
        one, other = generator.choice(choices.pairs)
        if {one, other} <= shapes.keys() and (one not in layouts or choices.classes[one] == choices.classes[other]):
            text = layouts.get(one, spelled(contiguous_strides(shapes[one])))
            return SAME, {one: text, other: f"{text}@{one}+0"}
    able = [n for n in choices.definition.tensor_inputs if n in shapes and (how == BEHIND or n in choices.padded)]
    if how in (BEHIND, PACKED) and able:
        host = generator.choice(able)
        dtype, rank = choices.definition.dtype_of(host, dtypes), len(shapes[host])
        group = {name: shapes[name] for name in able if choices.definition.dtype_of(name, dtypes) == dtype}
        group = {n: shape for n, shape in group.items() if n == host or generator.random() < _SHARE_LAID_OUT}
        order = list(range(rank))
        if how == PACKED:
            if generator.random() < _SHARE_PERMUTED:
                order[:-1] = generator.sample(order[:-1], rank - 1)
            rows = shapes[host][order[0]]
            group = {n: shape for n, shape in group.items() if len(shape) == rank and shape[order[0]] == rows}
        if len(group) > 1:
            return how, _packed(group, order, generator) if how == PACKED else _behind(group)
    return SEPARATE, {}


def _behind(group: Mapping[str, tuple[int, ...]]) -> Layouts:
    """Return contiguous layouts behind each other in the memory of the first tensor."""
    host, begins = next(iter(group)), itertools.accumulate(map(math.prod, group.values()), initial=0)
    return {
        name: spelled(contiguous_strides(shape), (host, begin) if begin else None)
        for (name, shape), begin in zip(group.items(), begins, strict=False)
    }


def _packed(group: Mapping[str, tuple[int, ...]], order: Sequence[int], generator: random.Random) -> Layouts:
    """Return layouts of parts of the same rows, such as q, k and v of one projection.

    Args:
        group: name -> shape; the sizes of the first dimension of ``order`` are equal.
        order: the dimensions in memory, the outermost first and the last one innermost.
    """
    in_memory = {name: [shape[dimension] for dimension in order] for name, shape in group.items()}
    alike = [len(set(sizes)) == 1 for sizes in zip(*in_memory.values(), strict=True)][:-1]
    outer = generator.randint(1, [*alike, False].index(False))
    parts = [math.prod(sizes[outer:]) for sizes in in_memory.values()]
    host, begins, found = next(iter(group)), itertools.accumulate(parts, initial=0), Layouts()
    for (name, sizes), begin in zip(in_memory.items(), begins, strict=False):
        steps = [step * sum(parts) for step in contiguous_strides(sizes[:outer])] + [*contiguous_strides(sizes[outer:])]
        strides = [steps[order.index(dimension)] for dimension in range(len(order))]
        found[name] = spelled(strides, (host, begin) if begin else None)
    return found


def ragged_rows(
    definition: Definition, takers: Sequence[str], axes: Mapping[str, int], dtypes: Mapping[str, str]
) -> int:
    """Return the maximum rows of an output that end between multiples of 16 bytes; without written tensors, of any tensor."""
    most = 0
    written = [name for name in takers if name in definition.written_outputs or name in definition.in_place]
    for name in written or takers:
        shape = definition.shape_of(name, axes)
        if shape[-1] * _bytes(definition, name, dtypes) % _VECTOR_BYTES:
            most = max(most, math.prod(shape[:-1]))
    return most


def _bytes(definition: Definition, name: str, dtypes: Mapping[str, str]) -> int:
    return STORED_BYTES[definition.dtype_of(name, dtypes)]

"""Fuzz cases: whole calls with sizes around tile edges, primes and tiny sizes, in every layout and with all contents.

Candidates are drawn at random. Of several, the one is kept that covers most new pairs of (axis, kind of size), layout,
contents and alignment. In this way a few cases cover most pairs. The secret seed decides which cases they are.

The module's parts are the cases, their layouts, and the repair of sizes to meet constraints.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Solution
from tilegym_db.records.call import Call, scalars_with_axes
from tilegym_db.records.case import Case
from tilegym_db.records.dtypes import STORED_BYTES, Scalar
from tilegym_db.records.expressions import evaluate, evaluate_bool, evaluate_int, parse_expression
from tilegym_db.records.layouts import accepts, contiguous_strides
from tilegym_db.verification.distributions import (
    DISTRIBUTIONS,
    PLANTED,
    RANGES,
    REFERENCE_MAY_FAIL,
    STEPS,
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
}
"""Kind of size -> sizes around the tiles of all languages; an axis may also take sizes of real workloads."""
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
MANY_ROWS = 65
"""Minimum rows to reach the kernel with large tiles, which uses the tensor copy engine."""
_WITH_BOTH = 3
"""Minimum number of cases to test a misaligned address and misaligned padded rows separately; below, one case has both."""
_CANDIDATES = 16
_FRUITLESS_ROUNDS = 12


@dataclass(frozen=True)
class _Demand:
    """A property that one case must have, so that even a small set of cases includes it.

    ``layout``: of every tensor that may have it; an output should then have rows that end within a vector, and be as large
    as a tile.
    """

    offset: int | None = None
    layout: str | None = None
    contents: str | None = None
    odd: bool = False
    zero: str | None = None


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
    covered: set[tuple[tuple[str, str], tuple[str, str]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.layouts = layout_choices(self.definition, self.solution)
        self.constraints = (*self.definition.constraints, *self.solution.spec.constraints)
        self.fixed = {name: axis.value for name, axis in self.definition.axes.items() if axis.value is not None}
        specs = {**self.definition.inputs, **self.definition.outputs}
        self.shapes = {spec.shape for spec in specs.values() if spec.shape}

    def next_case(self, demand: _Demand, anchored: bool, scalars: Mapping[str, Scalar]) -> Case | None:
        """Return the allowed candidate with the highest coverage; None if the constraints allow none."""
        for _ in range(_FRUITLESS_ROUNDS):
            candidates = [self._candidate(demand, anchored) for _ in range(_CANDIDATES)]
            ranked = sorted(candidates, key=lambda one: (self._meets(demand, one[0]), self._gain(one)), reverse=True)
            for axes, layout, contents, offset in ranked:
                if self._fits(axes) and (bound := self._bound(axes)) is not None:
                    self.covered.update(_pairs(self._features(axes, layout, contents, offset)))
                    takers, everywhere = self.layouts.get(layout, ()), demand.layout == layout
                    laid_out = draw_layouts(
                        self.definition, takers, layout, bound, self.dtypes, self.generator, everywhere=everywhere
                    )
                    seed = self.generator.getrandbits(62)
                    if demand == _Demand():
                        contents = with_modifiers(self.definition, contents, seed)
                    varied = vary_scalars(
                        self.definition, scalars_with_axes(self.definition, scalars, bound), contents, seed
                    )
                    call = Call(self.definition.name, bound, dict(self.dtypes), laid_out, varied)
                    return Case(call, distribution=contents, seed=seed, offset=offset)
        return None

    def zero_axis(self) -> str | None:
        """Return the first axis that may be empty under all constraints; None if there is none."""
        for name in self.definition.var_axes:
            for _ in range(_FRUITLESS_ROUNDS):
                axes = {**self._candidate(_Demand(), anchored=False)[0], name: 0}
                if self._fits(axes) and self._bound(axes) is not None:
                    return name
        return None

    def _candidate(self, demand: _Demand, anchored: bool) -> tuple[dict[str, int], str, str, int]:
        pick = self.generator.choice
        asked = demand.layout in self.layouts  # such a case must not be dropped
        contents = demand.contents or pick([n for n in self.distributions if not asked or n not in REFERENCE_MAY_FAIL])
        layouts = [name for name in self.layouts if name == demand.layout] or list(self.layouts)
        offset = pick(OFFSETS) if demand.offset is None else demand.offset
        return self._sizes(demand, anchored, contents), pick(layouts), contents, offset

    def _meets(self, demand: _Demand, axes: Mapping[str, int]) -> int:
        """Return how well a case of these sizes tests the demanded layout; 0 if the records do not allow it."""
        takers = self.layouts.get(demand.layout or CONTIGUOUS)
        bound = self._bound(axes) if takers and self._fits(axes) else None
        rows = 0 if bound is None else ragged_rows(self.definition, takers or (), bound, self.dtypes)
        return min(rows, MANY_ROWS if demand.layout == ROWS_ALIGNED else 1)

    def _sizes(self, demand: _Demand, anchored: bool, contents: str) -> dict[str, int]:
        generator, names = self.generator, self.definition.var_axes
        # With tiny sizes, one NaN in a tensor would make every output NaN.
        kinds = list(SIZES)[2 if contents == PLANTED or demand.layout in self.layouts else 0 :]
        axes = {name: generator.choice(SIZES[generator.choice(kinds)]) for name in names}
        if demand.odd:
            axes = {name: size | 1 for name, size in axes.items()}
        kept: list[str] = []
        if anchored and self.anchors and names:
            anchor = generator.choice(self.anchors)
            kept = generator.sample(list(names), generator.randint(1, max(len(names) - 1, 1)))
            axes |= {name: anchor[name] for name in kept if name in anchor}
        axes = self._shrunk(self._repaired(axes), kept)
        return axes if demand.zero is None else {**axes, demand.zero: 0}

    def _repaired(self, axes: Mapping[str, int]) -> dict[str, int]:
        return repaired(self.constraints, axes, self.fixed, self.dtypes, self.generator)

    def _shrunk(self, axes: dict[str, int], kept: Sequence[str]) -> dict[str, int]:
        """Make axes smaller, in random order, until the largest tensor is within the bounds."""
        smaller = [size for sizes in SIZES.values() for size in sizes]
        shrinkable = [name for name in axes if name not in kept]
        self.generator.shuffle(shrinkable)
        shrunk = dict(axes)
        while shrinkable and not self._fits(shrunk):
            name = shrinkable.pop()
            shrunk[name] = self.generator.choice([size for size in smaller if size <= shrunk[name]] or [1])
        return axes if shrunk == axes else self._repaired(shrunk)

    def _fits(self, axes: Mapping[str, int]) -> bool:
        bound = {**self.fixed, **axes}
        for shape in self.shapes:
            try:
                sizes = [bound[entry] if entry in bound else evaluate_int(entry, bound) for entry in shape]
            except RecordError:  # not a whole number
                return False
            if math.prod(sizes) > self.max_elements or math.prod(sizes[:-1]) > self.max_rows:
                return False
        return True

    def _bound(self, axes: Mapping[str, int]) -> dict[str, int] | None:
        try:
            bound = self.definition.bind_axes(axes)
            return bound if self.solution.unsupported(bound, self.dtypes) is None else None
        except RecordError:
            return None

    def _gain(self, candidate: tuple[dict[str, int], str, str, int]) -> int:
        return sum(pair not in self.covered for pair in _pairs(self._features(*candidate)))

    def _features(self, axes: Mapping[str, int], layout: str, contents: str, offset: int) -> list[tuple[str, str]]:
        sizes = [(name, _KIND_OF.get(size, WORKLOAD)) for name, size in axes.items()]
        return [*sizes, ("layout", layout), ("contents", contents), ("offset", str(offset))]


def _pairs(features: Sequence[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    return itertools.combinations(features, 2)


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

    The first four cases include: a misaligned address; padded rows that end within a vector of 16 bytes, with rows that
    begin at such vectors and with rows that do not (the first two cases have both); odd sizes; and planted special values.
    They do so as far as the Solution's layouts, the constraints and the Definition's special values allow.

    Args:
        definition: its constraints hold for every case.
        solution: its constraints hold too, and only its declared shapes and layouts are used.
        anchors: sizes of real workloads. Every second case takes some axes from one, so that a special case for a shape
            cannot recognise a fuzz case by its unusual sizes.
        dtypes: the dtype binding in use.
        scalars: scalar inputs by name; continuous ones are varied around their values.
        count: maximum number of cases; fewer or none if the constraints leave no more (:func:`why_no_case`).
        seed: secret of this run.
        max_rows: maximum rows of the largest tensor, over all axes except the last.
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
    aligned, off = _Demand(odd=True, offset=0, layout=ROWS_ALIGNED), _Demand(odd=True, offset=0, layout=ROWS_OFF)
    unaligned = _Demand(offset=1) if count >= _WITH_BOTH else replace(off, offset=1)
    demands = [aligned, unaligned, off, _Demand(contents=special)]
    demands += [_Demand(contents=STEPS)] * 2 if STEPS in fuzzer.distributions else []
    demands += [_Demand()] * (count - len(demands))
    zero = fuzzer.zero_axis() if count >= FEW_CASES else None
    if zero is not None:
        demands[-1] = _Demand(zero=zero, contents="normal")
    return demands[:count]


def sibling_of(definition: Definition, case: Case, number: int, scalars: Mapping[str, Scalar]) -> Case:
    """Return the same shape, layouts and alignment with another range, other positions and other scalars, as in a model.

    It needs no further compilation, so it costs one call and one oracle.

    Args:
        definition: of the case.
        case: one of :func:`fuzz_cases`.
        number: its index among them; successive cases use successive ranges.
        scalars: of the Workload; continuous ones are varied around these values.
    """
    names = tuple(RANGES)
    contents = names[(case.seed + number) % len(names)]
    seed = random.Random(case.seed).getrandbits(62)
    contents = with_modifiers(definition, contents, seed, number)
    scalars = scalars_with_axes(definition, scalars, case.call.axes)
    call = replace(case.call, scalars=vary_scalars(definition, scalars, contents, seed))
    return replace(case, call=call, distribution=contents, seed=seed)


def why_no_case(definition: Definition, solution: Solution) -> str:
    """Return the reason why :func:`fuzz_cases` found no case, for the author of the Solution."""
    constraints = " and ".join((*definition.constraints, *solution.spec.constraints)) or "none"
    most = MAX_ELEMENTS * _WIDER_LIMITS
    return f"no shape of at most {most} elements per tensor was found that meets the constraints ({constraints})"


# ---- fuzz layouts ---------------------------------------------------------------------------------
# Strides that a Solution declares to read and that contiguous tensors do not have.

CONTIGUOUS = "contiguous"
ROWS_ALIGNED, ROWS_OFF = "rows_aligned", "rows_off"
"""Padded rows that all begin at multiples of 16 bytes, as vectors and the tensor copy engine (TMA) need them, or not.

If they do but the last extent is not such a multiple, code that writes whole vectors writes into the padding. TMA does so.
"""

_VECTOR_BYTES = 16
_ALIGNED_ELEMENTS = 64
_PADDING = (1, 2, 3, 5, 7, 8, 9, 13, 16, 24, 64)
"""Odd padding misaligns every second row for any vector; even padding keeps some alignments and breaks others."""

# Layout -> the class that a Solution must declare for the tensor, and the minimum number of dimensions.
_NEEDS: dict[str, tuple[str, int]] = {
    ROWS_ALIGNED: ("row_contiguous", 2),
    ROWS_OFF: ("row_contiguous", 2),
    "rows_swapped": ("row_contiguous", 3),
    "transposed": ("strided", 2),
    "columns_padded": ("strided", 2),
    "every_other": ("strided", 1),
}
_SHARE_LAID_OUT = 0.75
_COLUMNS_START_AT = (4, 4, 8, 7)


def layout_choices(definition: Definition, solution: Solution) -> dict[str, tuple[str, ...]]:
    """Return layout -> tensors that may have it under the Solution's declared classes; ``contiguous`` is always included.

    A tensor with strides in the Definition keeps them in every case; only the sizes in them vary.
    """
    tensors = [
        name for name in (*definition.tensor_inputs, *definition.written_outputs) if name not in definition.layouts
    ]
    found: dict[str, tuple[str, ...]] = {CONTIGUOUS: ()}
    for layout, (needed, dimensions) in _NEEDS.items():
        takers = tuple(
            name
            for name in tensors
            if accepts(solution.spec.layouts.get(name, CONTIGUOUS), needed) and _rank(definition, name) >= dimensions
        )
        if takers:
            found[layout] = takers
    return found


def _rank(definition: Definition, name: str) -> int:
    return len((definition.inputs.get(name) or definition.outputs[name]).shape or ())


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


def draw_layouts(
    definition: Definition,
    takers: Sequence[str],
    layout: str,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    generator: random.Random,
    *,
    everywhere: bool = False,
) -> dict[str, str]:
    """Return tensor -> ``strided(...)`` for most of the tensors that may have the layout, each with different strides.

    Some stay contiguous unless ``everywhere`` is set, and paddings differ. A kernel that confuses the strides of two tensors
    therefore fails. A tensor without elements stays contiguous.
    """
    solid = [name for name in takers if 0 not in definition.shape_of(name, axes)]
    if not solid or layout == CONTIGUOUS:
        return {}
    surely = solid if everywhere else [generator.choice(solid)]
    laid_out = [name for name in solid if name in surely or generator.random() < _SHARE_LAID_OUT]
    return {
        name: _spelled(
            _strides(layout, definition.shape_of(name, axes), _bytes(definition, name, dtypes), generator),
        )
        for name in laid_out
    }


def _strides(layout: str, shape: tuple[int, ...], itemsize: int, generator: random.Random) -> tuple[int, ...]:
    match layout:
        case "rows_swapped":  # a [B, H, S, D] view of [B, S, H, D] memory, as a model passes its heads
            return _permuted(shape, -3, -2)
        case "transposed":
            return _permuted(shape, -2, -1)
        case "columns_padded":  # as scales that are loaded by columns, which begin at multiples of 16 bytes
            return _columns_padded(shape, generator.choice(_COLUMNS_START_AT))
        case "every_other":
            return tuple(2 * step for step in contiguous_strides(shape))
    return contiguous_strides((*shape[:-1], generator.choice(_row_strides(layout, shape[-1], itemsize))))


def _row_strides(layout: str, size: int, itemsize: int) -> list[int]:
    """Return row strides longer than a row: to the next vector or larger block, or misaligned for every vector."""
    if layout == ROWS_OFF:
        return [size + padding for padding in _PADDING if (size + padding) * itemsize % _VECTOR_BYTES]
    vector = max(1, _VECTOR_BYTES // itemsize)
    blocks = [size // step * step + step for step in (vector, _ALIGNED_ELEMENTS)]
    return [blocks[0], blocks[0] + vector, blocks[1], blocks[1]]


def _columns_padded(shape: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Return strides of consecutive columns, each padded to a multiple of ``multiple`` elements; the gaps are unused."""
    *batches, down, up = shape
    length = -(-down // multiple) * multiple
    return (*contiguous_strides((*batches, up, length))[:-2], 1, length)


def _permuted(shape: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    order = list(range(len(shape)))
    order[one], order[other] = order[other], order[one]
    in_memory = contiguous_strides([shape[dimension] for dimension in order])
    strides = [0] * len(shape)
    for dimension, step in zip(order, in_memory, strict=True):
        strides[dimension] = step
    return tuple(strides)


def _spelled(strides: tuple[int, ...]) -> str:
    return f"strided({', '.join(map(str, strides))})"


# ---- repair of sizes ------------------------------------------------------------------------------
# Changes random sizes to meet the usual constraints, which random sizes rarely meet.

_PASSES = 2  # meeting one constraint (R <= D) may break another (R % 2 == 0)


def repaired(
    constraints: Sequence[str],
    axes: Mapping[str, int],
    fixed: Mapping[str, int],
    dtypes: Mapping[str, str],
    generator: random.Random,
) -> dict[str, int]:
    """Return the axes, changed to meet constraints of known forms.

    Known forms are multiples (``N % 8 == 0``, ``N * sizeof(T) % 16 == 0``), bounds and equalities between an axis and an
    axis or number, and ``and`` and ``or`` of these. The caller must check the result, because other forms are ignored.

    Args:
        constraints: of the Definition and the Solution.
        axes: the sizes that may be changed.
        fixed: the sizes of const axes, which may not.
        dtypes: dtypes for ``sizeof``.
        generator: chooses among alternatives.
    """
    repair = _Repair({**fixed, **axes}, frozenset(axes), dtypes, generator)
    for _ in range(_PASSES):
        broken = [text for text in constraints if not repair.holds(text)]
        for text in broken:
            repair.meet(parse_expression(text))
        if not broken:
            break
    return {name: repair.sizes[name] for name in axes}


@dataclass
class _Repair:
    sizes: dict[str, int]
    movable: frozenset[str]
    dtypes: Mapping[str, str]
    generator: random.Random

    def holds(self, text: str) -> bool:
        try:
            return evaluate_bool(text, self.sizes, self.dtypes)
        except RecordError:
            return False

    def meet(self, node: ast.expr) -> None:
        match node:
            case ast.BoolOp(op=ast.Or(), values=values):
                self.meet(self.generator.choice(values))
            case ast.BoolOp(op=ast.And(), values=values):
                for value in values:
                    self.meet(value)
            case ast.Compare(
                left=ast.BinOp(left=left, op=ast.Mod(), right=divisor),
                ops=[ast.Eq()],
                comparators=[ast.Constant(value=0)],
            ):
                self._make_multiple(left, divisor)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for one, op, other in zip((left, *comparators), ops, comparators, strict=False):
                    self._meet_comparison(one, op, other)

    def _make_multiple(self, left: ast.expr, divisor: ast.expr) -> None:
        """Round the one axis of ``left`` (``N``, ``2*N``, ``N * sizeof(T)``) down to a multiple, but not to zero."""
        names = [node.id for node in ast.walk(left) if isinstance(node, ast.Name) and node.id in self.movable]
        modulus = self._value(divisor)
        if len(names) != 1 or not modulus:
            return
        (name,) = names
        factor = self._value(left, {name: 1})
        if factor and factor == int(factor):
            step = int(modulus) // math.gcd(int(modulus), int(factor))
            self.sizes[name] = max(step, self.sizes[name] // step * step)

    def _meet_comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> None:
        """Set the axis that stands alone on one side, preferably the left, to satisfy the comparison with the other side."""
        slack = {ast.Lt: -1, ast.Gt: 1}.get(type(op), 0)
        for moving, other, sign in ((left, right, 1), (right, left, -1)):
            target = self._value(other)
            if not isinstance(moving, ast.Name) or moving.id not in self.movable or target is None:
                continue
            size, wanted = self.sizes[moving.id], int(target) + sign * slack
            if isinstance(op, ast.Eq):
                self.sizes[moving.id] = wanted
            elif isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                is_upper = isinstance(op, ast.Lt | ast.LtE) == (sign == 1)
                self.sizes[moving.id] = min(size, wanted) if is_upper else max(size, wanted)
            return

    def _value(self, node: ast.expr, changed: Mapping[str, int] | None = None) -> float | None:
        try:
            return float(evaluate(ast.unparse(node), {**self.sizes, **(changed or {})}, self.dtypes))
        except RecordError:
            return None

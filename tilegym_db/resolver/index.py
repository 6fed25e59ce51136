"""An index of the measured points of one Definition: exact sizes, dtypes and code-selecting scalars -> the decision.

Built once for a table, dtypes by dtypes, from the same judgement that :func:`~tilegym_db.resolver.decide.decide` makes: every
point is judged for a request of its own sizes, and the decision, with a reason for every candidate, is kept. Looking a call up
is then one dictionary access. What is in the index is known to be a valid call, so that finding a key also is the check of what
was asked; whatever is not found (another size, a spelling that has to be checked, a mistake) is left to ``make_request`` and
``decide``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import UsageError
from tilegym_db.records import Definition
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.layouts import LAYOUT_CLASSES
from tilegym_db.resolver.decide import Decision, judge_each_serving
from tilegym_db.resolver.entries import Entry
from tilegym_db.resolver.measured_points import (
    CONTIGUOUS,
    MeasuredPoint,
    equal_scalars,
    layouts_match,
    outside_scalars,
    selecting_scalars,
)
from tilegym_db.resolver.request import Request, make_request
from tilegym_db.resolver.table import ResolverTable

__all__ = ["PointIndex", "index_of"]

_Special = tuple[tuple[str, str], ...]
"""The tensors that are not contiguous, with their classes, in the order in which they were stated: all that the judgement of a
point depends on, with the first that a Solution does not read as its reason."""

_NOTHING_SPECIAL: _Special = ()
_CLASSES = frozenset(LAYOUT_CLASSES)
_SCALAR_TYPES = frozenset({bool, int, float, str, type(None)})
NOTHING_STATED: Mapping[str, Any] = MappingProxyType({})


class _Measured:
    """A measured point with what is decided there, by special layouts and then by what is serving."""

    __slots__ = ("decisions", "entry", "plain", "request")

    def __init__(self, entry: Entry, request: Request) -> None:
        self.entry = entry
        self.request = request
        self.plain = not _special(entry.layouts)
        self.decisions: dict[_Special, dict[str | None, Decision]] = {}


class PointIndex:
    """The measured points of one Definition on one GPU, for one set of Solutions."""

    def __init__(
        self,
        definition: Definition,
        table: ResolverTable,
        solutions: Mapping[str, SolutionFiles],
        *,
        sm: str,
        unavailable: Mapping[str, str],
    ) -> None:
        """An index whose points are judged dtype by dtype, when they are asked for.

        Args:
            definition: the operator.
            table: the published measurements of a GPU.
            solutions: the catalog's Solutions of the Definition, by name.
            sm: the device's ``sm_XX``, or ``cpu``.
            unavailable: language -> why it cannot run in this process.
        """
        self._definition, self._table, self._solutions = definition, table, dict(solutions)
        self._tensors = frozenset((*definition.tensor_inputs, *definition.outputs))
        self._scalars = frozenset(name for name, spec in definition.inputs.items() if spec.is_scalar)
        self._selecting = selecting_scalars(definition)
        self._sizes = tuple(definition.size_scalars.items())
        self._dtype_names = tuple(definition.dtypes)
        # A call may leave const axes out, or name all of them: the number of sizes tells the two spellings apart.
        self._axis_names = {len(names): names for names in (tuple(definition.axes), definition.var_axes)}
        self._points: dict[tuple[Any, ...], list[_Measured]] = {}
        # Within these every candidate may serve; what lies outside is left to the judgement of each.
        self._ranges = dict(table.scalar_hull(definition.name))
        self._sm, self._unavailable = sm, unavailable
        self._judged: set[tuple[Any, ...]] = set()

    def _judge_points(self, dtypes: tuple[Any, ...]) -> None:
        """Judge the points of one dtype binding, of which a model has one or two, when it is first asked for."""
        self._judged.add(dtypes)
        binding = dict(zip(self._dtype_names, dtypes, strict=True))
        for entry in self._table.believed_entries(self._definition, binding):
            self._add(entry, self._sm, self._unavailable)
            self._narrow(entry)

    def _narrow(self, entry: Entry) -> None:
        for candidate in entry.candidates:
            for name, (low, high) in (candidate.scalar_ranges or {}).items():
                least, most = self._ranges.get(name, (low, high))
                self._ranges[name] = max(least, low), min(most, high)

    def _add(self, entry: Entry, sm: str, unavailable: Mapping[str, str]) -> None:
        definition = self._definition
        selecting = {name: entry.scalars.get(name) for name in self._selecting}
        # NaN equals nothing, and a dictionary would find it by its identity.
        if entry.definition_digest != definition.digest or any(value != value for value in selecting.values()):
            return
        try:
            request = make_request(
                definition,
                axes={name: entry.axes[name] for name in definition.var_axes if name in entry.axes},
                dtypes=entry.dtypes,
                layouts={name: entry.layouts[name] for name in definition.tensor_inputs if name in entry.layouts},
                scalars=selecting,
                gpu=self._table.gpu,
                sm=sm,
                unavailable=unavailable,
            )
        except UsageError:
            return  # nor can a call be like that
        measured = _Measured(entry, request)
        self._judge(measured, _special(request.layouts))
        for names in self._axis_names.values():
            sizes = tuple(request.axes[name] for name in names)
            key = sizes, tuple(request.dtypes.values()), tuple(selecting.values())
            self._points.setdefault(key, []).append(measured)

    def _judge(self, measured: _Measured, special: _Special) -> dict[str | None, Decision]:
        request = replace(measured.request, layouts=dict(special))
        found = judge_each_serving(MeasuredPoint(measured.entry, exact=True), request, self._table, self._solutions)
        measured.decisions[special] = found
        return found

    def find(
        self,
        axes: Mapping[str, int],
        dtypes: Mapping[str, str],
        layouts: Mapping[str, str] = NOTHING_STATED,
        scalars: Mapping[str, Scalar] = NOTHING_STATED,
        serving: str | None = None,
    ) -> Decision | None:
        """What :func:`~tilegym_db.resolver.decide.decide` says of a call in inference, where a point is exactly that call.

        The arguments are those of :func:`~tilegym_db.resolver.request.make_request`. None says nothing about them: the call may
        be a mistake, be spelled with fewer dtypes than there are, or lie between the points.
        """
        names = self._axis_names.get(len(axes))
        if names is None or len(dtypes) != len(self._dtype_names) or not scalars.keys() <= self._scalars:
            return None
        for scalar, axis in self._sizes:
            if scalar in scalars and (type(scalars[scalar]) is not int or scalars[scalar] != axes.get(axis)):
                return None
        sizes = tuple([axes.get(name) for name in names])
        chosen = tuple([dtypes.get(name) for name in self._dtype_names])
        for size in sizes:
            if type(size) is not int:  # True equals 1, and is no size
                return None
        for dtype in chosen:
            if type(dtype) is not str:
                return None
        selecting: tuple[Scalar, ...] = ()
        if self._selecting:
            if not all(name in scalars and type(scalars[name]) in _SCALAR_TYPES for name in self._selecting):
                return None
            selecting = tuple([scalars[name] for name in self._selecting])
        if chosen not in self._judged:
            self._judge_points(chosen)
        if scalars and outside_scalars(self._definition, scalars, self._ranges):
            return None
        points = self._points.get((sizes, chosen, selecting))
        return None if points is None else self._at(points, layouts, scalars, serving)

    def _at(
        self,
        points: Sequence[_Measured],
        layouts: Mapping[str, str],
        scalars: Mapping[str, Scalar],
        serving: str | None,
    ) -> Decision | None:
        """The decision at one of the points that differ in layouts and in continuous scalars only."""
        special = _NOTHING_SPECIAL
        if layouts:
            if not (layouts.keys() <= self._tensors and _CLASSES.issuperset(layouts.values())):
                return None
            special = _special(layouts)
        if special or len(points) > 1 or not points[0].plain:
            points = [point for point in points if layouts_match(point.entry, layouts, self._definition)]
            if not points:
                return None
        measured = points[0]
        if len(points) > 1:
            measured = max(points, key=lambda point: equal_scalars(point.entry, scalars))
        decisions = measured.decisions.get(special) or self._judge(measured, special)
        return decisions.get(serving) or decisions[None]


def _special(layouts: Mapping[str, str]) -> _Special:
    return tuple([item for item in layouts.items() if item[1] != CONTIGUOUS])


def index_of(
    definition: Definition,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
    *,
    sm: str,
    unavailable: Mapping[str, str],
) -> PointIndex:
    """The index of a Definition, made once per table and set of Solutions; arguments as of :class:`PointIndex`."""
    digests = frozenset((name, files.digest) for name, files in solutions.items())
    key = definition.name, definition.digest, digests, sm, frozenset(unavailable.items())
    index: PointIndex | None = table.indexes.get(key)
    if index is None:
        index = table.indexes[key] = PointIndex(definition, table, solutions, sm=sm, unavailable=unavailable)
    return index

"""A small set of points to measure so that questions of models are answered, by the rule of neighbours. Pure.

A question is answered exactly, or between two points of the same widths. The first choice of points is the least and the most
work of each kind of call, and a chain of lengths that are near each other. The rule itself then says which questions are left,
which become points, and which points the others make superfluous. No point can be left out for
the others of its widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.published.neighbours import (
    MAX_LENGTH_GAP,
    Neighbours,
    independent_axes,
    lengths_of,
    neighbours,
    widths_of,
)
from tilegym_db.published.table import load_table
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import is_code_selecting
from tilegym_db.records.roofline import GpuPeaks, speed_of_light
from tilegym_db.scaffold.model_calls import STAGES, Question, Sizes, Stage, questions

PAIR_S = 1.0
"""Seconds of a GPU for one Solution at one point, without long calls: workers, compilation, fuzz cases. In bulk an H200 gives
42 to 93 verdicts per minute."""
CALLS_PER_PAIR = 30
"""Calls of one Solution at one point, if they are so long that no more than the fewest rounds are timed."""
MAX_POINT_BYTES = 30e9
"""Compulsory bytes of the largest call that is measured; inputs, outputs and their copies must lie in the memory of one GPU."""
SLOWDOWN = 3.0
"""A typical call over the speed of light; baselines are slower than kernels."""

Axes = Mapping[str, int]


@dataclass(frozen=True)
class Point:
    """A call to measure, and the number of questions of its kind that rest on it or its neighbours."""

    question: Question
    answers: int

    @property
    def workload(self) -> Workload:
        """The call as a Workload."""
        return self.question.workload()


@dataclass(frozen=True)
class Cover:
    """The points to measure, and what they answer."""

    points: tuple[Point, ...]
    questions: int
    known: int
    """Questions that the points of the catalog answer already."""
    undescribed: int
    """Questions of operators that no Definition describes; no point answers them."""
    refused: tuple[str, ...]
    """Calls that a Definition excludes, with the reason."""

    def seconds(
        self, definitions: Mapping[str, Definition], solutions: Mapping[str, int], peaks: GpuPeaks | None
    ) -> float:
        """Return the seconds of one GPU that measuring costs; ``solutions`` counts those of each Definition."""
        return sum(self._seconds_of(point, definitions, solutions, peaks) for point in self.points)

    def _seconds_of(
        self, point: Point, definitions: Mapping[str, Definition], solutions: Mapping[str, int], peaks: GpuPeaks | None
    ) -> float:
        question = point.question
        definition = definitions[question.definition]
        light = None
        if peaks is not None:
            axes, dtypes = definition.bind_axes(question.axes), definition.bind_dtypes(question.dtypes)
            light = speed_of_light(definition, axes, dtypes, peaks)
        call_s = 0.0 if light is None else light.us * 1e-6 * SLOWDOWN
        return solutions.get(definition.name, 0) * (PAIR_S + CALLS_PER_PAIR * call_s)


def cover_models(
    catalog: Catalog, models: Sequence[Sizes], gpu: str, *, parallel: Sequence[int]
) -> tuple[Cover, float]:
    """Return the points that models need beside the catalog's Workloads, and the seconds of one GPU that they cost.

    Args:
        catalog: its Workloads count as measured.
        models: sizes of models, as in the checked-in list.
        gpu: slug or family whose peaks give the times of long calls; without published peaks, they are left out.
        parallel: numbers of GPUs that share a model.

    Raises:
        UsageError: the operators of a model's type are not known.
    """
    definitions = dict(catalog.definitions)
    known = [workload for name in definitions for workload in catalog.workloads_for(name)]
    found = cover(questions(models, STAGES, parallel), definitions, known)
    table = load_table(gpu)
    counts = {name: len(catalog.solutions_for(name)) for name in {point.question.definition for point in found.points}}
    return found, found.seconds(definitions, counts, None if table is None else table.load_peaks())


def cover(asked: Iterable[Question], definitions: Mapping[str, Definition], known: Iterable[Workload] = ()) -> Cover:
    """Return a set of points, none of them superfluous, that answers questions beside points that are known already.

    Args:
        asked: the calls of models.
        definitions: the catalog's Definitions by name.
        known: points that are measured anyway, such as the catalog's Workloads.
    """
    kinds: dict[tuple[Any, ...], list[tuple[Question, dict[str, int]]]] = {}
    undescribed, refused, total, answered = 0, list[str](), 0, 0
    for question in asked:
        total += 1
        definition = definitions.get(question.definition)
        if definition is None:
            undescribed += 1
            continue
        try:
            axes = definition.bind_axes(question.axes)
            key = _kind(definition, question.dtypes, question.scalars, question.classes(definition))
        except RecordError as error:
            refused.append(str(error))
            continue
        size = definition.cost_of(axes, definition.bind_dtypes(question.dtypes))[1]
        if size > MAX_POINT_BYTES:
            refused.append(
                f"{definition.name} of {question.model} at {question.stage} moves {size / 1e9:.0f} GB, too much"
            )
            continue
        kinds.setdefault(key, []).append((question, axes))
    measured: dict[tuple[Any, ...], list[dict[str, int]]] = {}
    for workload in known:
        definition = definitions.get(workload.definition)
        if definition is not None:
            call = Question("", 1, _NO_STAGE, "", workload.definition, workload.axes, workload.dtypes, workload.layouts)
            key = _kind(definition, workload.dtypes, workload.scalars(), call.classes(definition))
            measured.setdefault(key, []).append(definition.bind_axes(workload.axes))
    points: list[Point] = []
    for key, asked_here in kinds.items():
        definition = definitions[key[0]]
        free = measured.get(key, [])
        dtypes = definition.bind_dtypes(asked_here[0][0].dtypes)
        missing = [one for one in asked_here if not _is_answered(definition, one[1], dtypes, free)]
        answered += len(asked_here) - len(missing)
        for group in _same_widths(definition, missing):
            points += _points(definition, dtypes, group, free)
    return Cover(tuple(points), total, answered, undescribed, tuple(dict.fromkeys(refused)))


_NO_STAGE = Stage(0, 0, 0)


def _kind(
    definition: Definition, dtypes: Mapping[str, str], scalars: Mapping[str, Any], classes: Mapping[str, str]
) -> tuple[Any, ...]:
    selecting = {
        name: value
        for name, value in scalars.items()
        if name not in definition.size_scalars and is_code_selecting(definition, name)
    }
    parts = (definition.bind_dtypes(dtypes), selecting, classes)
    return definition.name, *(tuple(sorted(part.items())) for part in parts)


def _is_answered(definition: Definition, asked: Axes, dtypes: Mapping[str, str], points: Sequence[Axes]) -> bool:
    """Return True if points answer a call exactly or from both sides; beyond the measured work is not counted."""
    if any(all(point[name] == asked[name] for name in definition.var_axes) for point in points):
        return True
    found = neighbours(definition, asked, dtypes, points) if points else ""
    return isinstance(found, Neighbours) and not found.halves


def _same_widths(
    definition: Definition, asked: Sequence[tuple[Question, dict[str, int]]]
) -> list[list[tuple[Question, dict[str, int]]]]:
    """Return the questions in groups of equal widths and ratios, smallest work first."""
    groups: dict[tuple[Any, ...], list[tuple[Question, dict[str, int]]]] = {}
    serving = definition.serving
    follows = {} if serving is None else serving.follows
    for question, axes in asked:
        widths = tuple(
            follows[name] if name in follows and 1 < axes[name] == axes[follows[name]] else axes[name]
            for name in widths_of(definition)
        )
        ratios = tuple(
            axes[group[0]] / max(axes[other], 1)
            for group in (() if serving is None else serving.independent)
            for other in group[1:]
        )
        groups.setdefault((widths, ratios), []).append((question, axes))
    return [groups[key] for key in groups]


def _points(
    definition: Definition,
    dtypes: Mapping[str, str],
    asked: list[tuple[Question, dict[str, int]]],
    free: Sequence[Axes],
) -> list[Point]:
    """Return the points that answer questions of equal widths, beside the free ones."""
    distinct: dict[tuple[int, ...], tuple[Question, dict[str, int]]] = {}
    for question, axes in asked:
        distinct.setdefault(tuple(axes.values()), (question, axes))
    work = {key: definition.cost_of(axes, dtypes)[1] for key, (_, axes) in distinct.items()}
    ordered = sorted(distinct, key=lambda key: (work[key], key))
    chosen = [distinct[key] for key in _chain(definition, distinct, ordered)]
    for key in ordered:  # whatever the chain does not answer is measured itself
        if not _is_answered(definition, distinct[key][1], dtypes, [*free, *(axes for _, axes in chosen)]):
            chosen.append(distinct[key])
    for candidate in sorted(chosen, key=lambda one: -definition.cost_of(one[1], dtypes)[1]):  # the dearest first
        rest = [*free, *(axes for question, axes in chosen if axes is not candidate[1])]
        if all(_is_answered(definition, distinct[key][1], dtypes, rest) for key in ordered):
            chosen = [one for one in chosen if one[1] is not candidate[1]]
    return [Point(question, len(asked)) for question, _ in chosen]


def _chain(
    definition: Definition,
    distinct: Mapping[tuple[int, ...], tuple[Question, dict[str, int]]],
    ordered: Sequence[tuple[int, ...]],
) -> list[tuple[int, ...]]:
    """Return the questions of least and most work; with lengths, those of a chain in which neighbours are near."""
    lengths = lengths_of(definition)
    if not lengths:
        return list(dict.fromkeys((ordered[0], ordered[-1])))
    name = lengths[0]
    sizes = sorted({axes[name] for _, axes in distinct.values()})
    links, index = [sizes[0]], 0
    while index < len(sizes) - 1:
        near = [other for other in range(index + 1, len(sizes)) if sizes[other] <= MAX_LENGTH_GAP * sizes[index]]
        index = near[-1] if near else index + 1
        links.append(sizes[index])
    repeated = independent_axes(definition)
    chosen: list[tuple[int, ...]] = []
    for link in links:
        here = [key for key in ordered if distinct[key][1][name] == link]
        rows = sorted(here, key=lambda key: _product(distinct[key][1], repeated))
        chosen += [rows[0], rows[-1]]
    return list(dict.fromkeys(chosen))


def _product(axes: Axes, names: Sequence[str]) -> int:
    found = 1
    for name in names:
        found *= axes[name]
    return found

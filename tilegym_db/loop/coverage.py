"""Coverage: the calls of models that kernels answer on a GPU, and the points to measure so that more are answered.

A question is one kind of call of a model (:mod:`tilegym_db.scaffold.model_calls`). The resolver answers it from the published
table. A plan adds points to that table, with the figures of the nearest measured point, and asks again. It takes the points that
answer most questions per second of a GPU, until a goal is reached. Points at which stock code is expected to be faster are left
out.

:func:`measure_next` measures the first points of a plan and publishes them for this user. It then asks the same questions again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tilegym_db.catalog import Catalog, SolutionFiles, writers
from tilegym_db.errors import HardwareError, NotFoundError, TilegymDBError, UsageError
from tilegym_db.measurement.machine import parse_devices, select_machine
from tilegym_db.measurement.plan import why_too_large
from tilegym_db.paths import home
from tilegym_db.published.entries import Candidate, Entry, MeasuredEntries, dtypes_key
from tilegym_db.published.neighbours import MIN_SPEEDUP_BETWEEN, log_distance
from tilegym_db.published.table import ResolverTable, load_table, published_gpus
from tilegym_db.records import Definition, Workload, axes_key
from tilegym_db.records.call import Call, Request
from tilegym_db.records.hardware import memory_bytes
from tilegym_db.records.roofline import speed_of_light
from tilegym_db.records.verdicts import PUBLISHED_SANDBOX_LEVEL, VERIFIED_TIERS
from tilegym_db.resolver.decide import RULE, Decision, Rule, comparable_entries, decide
from tilegym_db.resolver.resolve import make_request
from tilegym_db.scaffold.model_calls import (
    PARALLEL,
    SLOWDOWN,
    USUAL_GPU,
    Costs,
    Question,
    kind_of,
    known_models,
    published_costs,
    questions,
    same_widths,
)
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import done_keys

if TYPE_CHECKING:
    from tilegym_db.measurement.machine import DevicesLike
    from tilegym_db.measurement.plan import BenchReport
    from tilegym_db.measurement.run_setup import Observer

ANSWERS = ("exact", "neighbour", "stock faster", "unmeasured", "no definition")
KERNEL = frozenset(("exact", "neighbour"))
"""The answers that run a kernel."""

MAX_KERNELS = 2
"""Kernels that are measured at a point: the fastest one at the nearest measured point, and the next. Their order may change."""
TRIED = 12
"""Candidates with the highest known gain that are evaluated before one is chosen. A gain falls as points are added."""
CHUNK_S = 90.0
"""Seconds of work that are measured at a time. Operators of one chunk are verified side by side."""


class Answer(NamedTuple):
    """The resolver's answer to a question: one of :data:`ANSWERS`, and the reason."""

    kind: str
    reason: str


def ask(question: Question, gpu: str, catalog: Catalog, table: ResolverTable | None, rule: Rule = RULE) -> Answer:
    """Return the resolver's answer to a question; ``rule`` decides calls that were not measured."""
    if not question.definition:
        return Answer("no definition", "")
    try:
        request = request_of(question, catalog, gpu)
    except TilegymDBError as error:
        return Answer("unmeasured", str(error))
    return _answer_of(decide(request, table, _solutions(catalog, question.definition), rule=rule))


def request_of(question: Question, catalog: Catalog, gpu: str) -> Request:
    """Return a question as the resolver's request."""
    definition = catalog.definition(question.definition)
    layouts = question.classes(definition)
    call = Call(definition.name, question.axes, dict(question.dtypes), layouts, dict(question.scalars))
    return replace(make_request(definition, call, gpu=gpu), launch=question.stage.launch)


def _answer_of(decision: Decision) -> Answer:
    evidence = decision.evidence
    if decision.solution is not None:
        return Answer("exact" if evidence.source == "exact" else "neighbour", evidence.reason)
    is_measured = evidence.reason.startswith("no verified solution is faster than stock at")
    return Answer("stock faster" if is_measured else "unmeasured", evidence.reason)


def _solutions(catalog: Catalog, definition: str) -> dict[str, SolutionFiles]:
    return {files.name: files for files in catalog.solutions_for(definition)}


def served_share(answers: Iterable[str]) -> float:
    """Return the share of answers that run a kernel; 0.0 for no answers."""
    counts = Counter(answers)
    return sum(counts[name] for name in KERNEL) / max(1, counts.total())


# ---- plan -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedPoint:
    """A point to measure. ``answers`` is the number of questions that a kernel answers because of it, if it is the fastest."""

    workload: Workload
    solutions: tuple[str, ...]
    """Kernels that may be the fastest there; stock code is measured beside them."""
    answers: int
    seconds: float
    """Of one GPU, with the start of the operator if this is its first point."""
    basis: str
    """The measured point whose figures are expected here; empty if no GPU has measured such calls."""
    models: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content."""
        return {
            "definition": self.workload.definition,
            "workload": self.workload.to_dict(),
            "solutions": list(self.solutions),
            "answers": self.answers,
            "seconds": round(self.seconds, 1),
            "basis": self.basis,
            "models": list(self.models),
        }


@dataclass
class CoveragePlan:
    """Points to measure on a GPU, in the order of what they answer per second; those of one operator follow each other."""

    gpu: str
    goal: float
    """The share of questions that kernels are to answer."""
    answers: Counter[str]
    """Number of questions by answer, before the points are measured."""
    points: list[PlannedPoint] = field(default_factory=list)
    costs: Costs | None = None
    slower: int = 0
    """Questions that are not measured, and at which stock code is expected to be faster."""
    refused: dict[str, str] = field(default_factory=dict)
    """Call -> the reason why it cannot be measured."""

    @property
    def questions(self) -> int:
        """The number of questions."""
        return self.answers.total()

    @property
    def share(self) -> float:
        """Share of the questions that a kernel answers now, as opposed to stock code or nothing."""
        return sum(self.answers[name] for name in KERNEL) / max(1, self.questions)

    def expected_share(self, points: int | None = None) -> float:
        """Return the expected share after so many points, by default all. Points without a basis do not count."""
        sure = sum(point.answers for point in self.points[:points] if point.basis)
        return self.share + sure / max(1, self.questions)

    @property
    def unsure(self) -> int:
        """Questions of points without a basis: it is not known if a kernel is faster there."""
        return sum(point.answers for point in self.points if not point.basis)

    @property
    def seconds(self) -> float:
        """Seconds of one GPU that all points cost."""
        return sum(point.seconds for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content."""
        return {
            "gpu": self.gpu,
            "goal": self.goal,
            "questions": self.questions,
            "answers": {name: self.answers[name] for name in ANSWERS},
            "share": round(self.share, 4),
            "expected_share": round(self.expected_share(), 4),
            "seconds": round(self.seconds, 1),
            "points": [point.to_dict() for point in self.points],
            "stock_expected_faster": self.slower,
            "unsure": self.unsure,
            "refused": self.refused,
        }


@dataclass
class _Asked:
    """A distinct call, and the questions that make it."""

    question: Question
    request: Request
    questions: list[Question]

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.request.call.axes)


@dataclass
class _Kind:
    """Calls for which one point may stand for another, and the measured points of their kind."""

    definition: Definition
    table: ResolverTable
    solutions: Mapping[str, SolutionFiles]
    entries: list[Entry]
    open: list[_Asked]
    """Calls that are not measured."""
    costs: Costs
    slices: list[tuple[_Asked, ...]] = field(default_factory=list)
    """Calls on more GPUs, which no question of the plan makes, in place of each call without memory."""
    predicted: dict[str, tuple[Entry, str] | None] = field(default_factory=dict)
    chosen: list[_Asked] = field(default_factory=list)
    prices: dict[str, float] = field(default_factory=dict)

    @property
    def is_sure(self) -> bool:
        """True if a GPU has measured such calls."""
        return all(found is None or found[1] for found in self.predicted.values())

    def decided(self, asked: _Asked, entries: Sequence[Entry]) -> Decision:
        """Return the decision for a call if these were the measured points of its kind."""
        key, name = dtypes_key(asked.request.call.dtypes), self.definition.name
        found = tuple(entries)
        measured = MeasuredEntries({key: lambda: found} if found else {}, self.table.scalar_hull(name))
        table = ResolverTable(self.table.gpu, self.table.sm, self.table.published, {name: lambda: measured}, "a plan")
        table.indexes[self.definition.digest, key] = found  # expected figures are not doubted
        return decide(asked.request, table, self.solutions)

    def can_measure(self, asked: _Asked) -> bool:
        """Return True if a call can be a point at which a kernel is expected to be faster."""
        return self.predicted[asked.request.call.key()] is not None

    def with_points(self, points: Iterable[_Asked]) -> list[Entry]:
        """Return the measured entries and those that are expected at points."""
        expected = (self.predicted[one.request.call.key()] for one in points)
        return [*self.entries, *(found[0] for found in expected if found is not None)]

    def answered(self, points: Sequence[_Asked], among: Sequence[_Asked]) -> list[_Asked]:
        """Return the calls that a kernel is expected to answer if points are measured too."""
        entries = self.with_points(points)
        return [one for one in among if self.decided(one, entries).solution is not None]

    def winners(self, asked: _Asked) -> tuple[list[str], list[float]]:
        """Return the kernels to measure at a point, the expected fastest first, and all latencies, stock code included."""
        expected = self.predicted[asked.request.call.key()]
        assert expected is not None
        decision = self.decided(asked, [expected[0]])
        best = decision.evidence.candidate
        assert best is not None
        others = [one.candidate for one in decision.rejected if one.candidate.role == "kernel"]
        ranked = [
            best,
            *sorted((one for one in others if one.latency_us is not None), key=lambda one: one.latency_us or math.inf),
        ]
        current = [one for one in ranked if one.solution in self.solutions]
        names = list(dict.fromkeys(one.solution for one in current))[:MAX_KERNELS]
        stock = [one.latency_us for one in expected[0].candidates if one.provides == "stock"][:1]
        times = [next(one.latency_us for one in current if one.solution == name) for name in names]
        return names, [time_us for time_us in (*times, *stock) if time_us is not None]

    def seconds(self, asked: _Asked) -> float:
        """Return the seconds of a point, without the start of its operator."""
        key = asked.request.call.key()
        if key not in self.prices:
            flops = asked.request.call.cost(self.definition)[0]
            self.prices[key] = self.costs.of_point(self.winners(asked)[1], flops)
        return self.prices[key]


def plan_coverage(
    asked: Sequence[Question],
    gpu: str,
    *,
    goal: float = 1.0,
    catalog: Catalog | None = None,
    done: Iterable[str] = (),
    memory: int | None = None,
    costs: Costs | None = None,
) -> CoveragePlan:
    """Return the points whose measurement brings the share of calls that kernels answer to a goal, cheapest first.

    The set is small, and not proved to be the smallest: the points of most answers per second are taken first, and those that
    later ones make superfluous are taken out again.

    Args:
        goal: a share; the plan ends where it is reached.
        done: uuids of Workloads that are measured on this GPU with a result that answers nothing; no point has one of them.
        memory: bytes of the GPU's memory, by default as its vendor states it.
        costs: what measuring costs; by default as the GPU's published traces show, or those of an H200.

    Raises:
        HardwareError: nothing is published for the GPU, so no figures are expected there.
        UsageError: the goal is no share.
    """
    if not 0 < goal <= 1:
        raise UsageError(f"the goal is a share of calls between 0 and 1, not {goal}.", code="goal_invalid")
    catalog = catalog or Catalog.default()
    table = load_table(gpu)
    costs = costs or published_costs(gpu, catalog) or published_costs(USUAL_GPU, catalog)
    if table is None or costs is None:
        raise HardwareError(
            f"nothing is published for {gpu}, so it is not known which kernels are fast there. Measure some first, on that GPU: "
            "tilegym-db bench --verify",
            code="gpu_without_traces",
        )
    answers = [ask(question, gpu, catalog, table) for question in asked]
    plan = CoveragePlan(table.gpu, goal, Counter(answer.kind for answer in answers), costs=costs)
    missing = [question for question, answer in zip(asked, answers, strict=True) if answer.kind == "unmeasured"]
    room = memory_bytes(table.gpu) if memory is None else memory
    kinds = _kinds(missing, table, catalog, costs)
    for kind in kinds:
        _prepare(kind, plan, set(done), room)
    _choose(kinds, [_steps(kind) for kind in kinds], plan)
    return plan


def _kinds(missing: Iterable[Question], table: ResolverTable, catalog: Catalog, costs: Costs) -> list[_Kind]:
    """Return the unmeasured calls by kind; those that the Definition excludes are left out."""
    grouped: dict[tuple[Any, ...], dict[str, _Asked]] = {}
    for question in missing:
        try:
            request = request_of(question, catalog, table.gpu)
        except TilegymDBError:
            continue
        call = request.call
        key = kind_of(request.definition, call.dtypes, call.scalars, call.layouts)
        known = grouped.setdefault(key, {}).setdefault(call.key(), _Asked(question, request, []))
        known.questions.append(question)
    found = []
    for calls in grouped.values():
        asked = list(calls.values())
        entries = comparable_entries(asked[0].request, table)
        measured = [] if isinstance(entries, str) else list(entries)
        definition = asked[0].request.definition
        kind = _Kind(definition, table, _solutions(catalog, definition.name), measured, asked, costs)
        found.append(kind)
    return found


def _prepare(kind: _Kind, plan: CoveragePlan, done: set[str], room: int) -> None:
    """Expect figures at each open call of a kind, and take out the calls that cannot be points, with the reason."""
    for asked in kind.open:
        call = asked.request.call
        short = why_too_large(kind.definition, asked.question.workload(), room)
        if short is not None:
            plan.refused[f"{call.definition} {axes_key(dict(call.axes))}"] = short
            kind.slices.append(tuple(_slices(asked, kind, room)))
        if not _expect(kind, asked, done, room):
            plan.slower += len(asked.questions)
    for one in itertools.chain.from_iterable(kind.slices):
        _expect(kind, one, done, room)


def _expect(kind: _Kind, asked: _Asked, done: set[str], room: int) -> bool:
    """Predict the figures of a call that can be measured; return False if stock code is predicted to be faster."""
    workload, key = asked.question.workload(), asked.request.call.key()
    kind.predicted[key] = None
    if workload.uuid in done or why_too_large(kind.definition, workload, room) is not None:
        return True
    expected = _expected(kind, asked)
    if kind.decided(asked, [expected[0]]).solution is None:
        return not expected[1]
    kind.predicted[key] = expected
    return True


def _slices(asked: _Asked, kind: _Kind, room: int) -> Iterator[_Asked]:
    """Yield the call of the same model on the fewest more GPUs on which it fits into the memory of each.

    GPUs share each expert (tensor parallelism), or each has some of the experts.
    """
    model = next((one for one in known_models() if one["name"] == asked.question.model), None)
    more = [count for count in PARALLEL if count > asked.question.parallel]
    shared = [] if model is None else questions([model], [asked.question.stage], more)
    first = asked.question
    parts = [
        [one for one in shared if (one.definition, one.group) == (first.definition, first.group)],
        [
            replace(first, axes={**first.axes, EXPERTS: first.axes[EXPERTS] // count}, parallel=count)
            for count in more
            if first.axes.get(EXPERTS, 1) % count == 0
        ],
    ]
    for part in parts:
        fits = (one for one in part if why_too_large(kind.definition, one.workload(), room) is None)
        for other in itertools.islice(fits, 1):
            call = replace(asked.request.call, axes=kind.definition.bind_axes(other.axes))
            yield _Asked(other, replace(asked.request, call=call), [])


EXPERTS = "E"
"""The axis of the experts, by which GPUs can share them."""


def _expected(kind: _Kind, asked: _Asked) -> tuple[Entry, str]:
    """Return the entry that is expected at a call, with the figures of the nearest measured point, and that point's name.

    Without such a point on any GPU, each kernel is expected to be barely good enough, and the name is empty.
    """
    definition, call = kind.definition, asked.request.call
    tables = [kind.table, *(load_table(other) for other in sorted(published_gpus(), reverse=True))]
    for table in filter(None, tables):
        entries: Sequence[Entry] = kind.entries if table is kind.table else ()
        if not entries:
            entries = [
                entry
                for dtypes in table.dtypes_of(definition.name)
                for entry in table.believed_entries(definition, dtypes)
                if entry.definition_digest == definition.digest
            ]
        entries = [entry for entry in entries if any(one.speedup_ci_low for one in entry.candidates)]
        if not entries:
            continue
        near = min(entries, key=lambda one: (log_distance(definition, call.axes, one.call.axes), str(one.call.axes)))
        candidates = tuple(_moved(one, near, kind, call) for one in near.candidates)
        where = f"{table.gpu} {axes_key(dict(near.call.axes))}"
        return Entry(call, near.definition_version, definition.digest, near.op_type, candidates), where
    light = speed_of_light(definition, call.axes, call.dtypes, peaks) if (peaks := kind.table.load_peaks()) else None
    latency = SLOWDOWN * (light.us if light is not None else 1.0)
    candidates = tuple(
        Candidate(
            files.name, files.digest, files.record.spec.language, files.record.spec.role, files.record.spec.provides,
            latency_us=latency, speedup=MIN_SPEEDUP_BETWEEN, speedup_ci_low=MIN_SPEEDUP_BETWEEN, tier=VERIFIED_TIERS[0],
            sandbox_level=PUBLISHED_SANDBOX_LEVEL, envelope_cases=1,
        )
        for files in kind.solutions.values()
    )  # fmt: skip
    return Entry(call, definition.version, definition.digest, definition.op_type, candidates), ""


def _moved(candidate: Candidate, near: Entry, kind: _Kind, call: Call) -> Candidate:
    """Return a candidate with its ratios at another call, as the source of today would be measured there."""
    here, there = (one.cost(kind.definition) for one in (call, near.call))
    factor = max(one / other for one, other in zip(here, there, strict=True) if other) if all(there) else 1.0

    def moved(time_us: float | None) -> float | None:
        return None if time_us is None else time_us * factor

    files = kind.solutions.get(candidate.solution)
    ranges = {
        name: (min(low, float(value)), max(high, float(value)))
        for name, (low, high) in (candidate.scalar_ranges or {}).items()
        if isinstance(value := call.scalars.get(name), int | float)
    }
    digest = candidate.solution_digest if files is None else files.digest
    return replace(
        candidate,
        latency_us=moved(candidate.latency_us),
        ci_low_us=moved(candidate.ci_low_us),
        ci_high_us=moved(candidate.ci_high_us),
        solution_digest=digest,
        scalar_ranges=ranges,
        verified_sizes={},
    )


class _Step(NamedTuple):
    """Points of one kind that are added together."""

    points: tuple[_Asked, ...]
    gained: int
    seconds: float


def _steps(kind: _Kind) -> list[_Step]:
    """Return points in the order of what they add, each step with the questions that it answers and its seconds."""
    left = list(kind.open)
    waiting = [
        (promised / sum(map(kind.seconds, points)), number, points)
        for number, (promised, points) in enumerate(_candidates(kind))
    ]
    steps: list[_Step] = []
    while left and waiting:
        # Most known rates are upper bounds, as a question is answered once. So the few best are evaluated.
        waiting.sort(reverse=True)
        answers = [kind.answered([*kind.chosen, *points], left) for _, _, points in waiting[:TRIED]]
        rates = [
            _questions(found) / sum(map(kind.seconds, points))
            for found, (_, _, points) in zip(answers, waiting, strict=False)
        ]
        best = max(range(len(rates)), key=rates.__getitem__)
        tried = [(rate, *item[1:]) for rate, item in zip(rates, waiting, strict=False) if rate]
        points, waiting = waiting[best][2], [*tried, *waiting[TRIED:]]
        if not rates[best]:
            continue
        kind.chosen += points
        steps.append(_Step(points, _questions(answers[best]), sum(map(kind.seconds, points))))
        done, taken = ({id(one) for one in found} for found in (answers[best], kind.chosen))
        left = [one for one in left if id(one) not in done]
        waiting = [item for item in waiting if not {id(one) for one in item[2]} <= taken]
    return steps


def _questions(calls: Iterable[_Asked]) -> int:
    return sum(len(one.questions) for one in calls)


def _candidates(kind: _Kind) -> list[tuple[int, tuple[_Asked, ...]]]:
    """Return the points at which a kernel is expected to be faster, with the number of questions that each is likely to answer.

    These are the open calls, each alone, the least with the most work of equal widths, and the slices of calls without memory.
    """
    able = [one for one in kind.open if kind.can_measure(one)]
    found: list[tuple[int, tuple[_Asked, ...]]] = []
    by_question = {id(one.question): one for one in able}
    for group in same_widths(kind.definition, [(one.question, one.axes) for one in able]):
        members = [by_question[id(question)] for question, _ in group]
        ordered = sorted(members, key=lambda one: one.request.call.cost(kind.definition)[1])
        promised = _questions(members)
        found += [(promised, (one,)) for one in members]
        found += [(promised, (ordered[0], ordered[-1]))] if len(ordered) > 1 else []
    slices = [tuple(one for one in group if kind.can_measure(one)) for group in kind.slices]
    single = {one.request.call.key(): (one,) for group in slices for one in group}
    promised = _questions(one for one in kind.open if not kind.can_measure(one))
    return found + [(promised, points) for points in (*single.values(), *slices) if points]


def _choose(kinds: Sequence[_Kind], steps: Sequence[list[_Step]], plan: CoveragePlan) -> None:
    """Take the first steps of the kinds whose next steps answer most per second, until the goal is reached.

    Kinds of which nothing is known come after all others.
    """
    needed = plan.goal * plan.questions - sum(plan.answers[name] for name in KERNEL)
    taken = [0] * len(kinds)
    begun: dict[str, None] = {}

    def rate(number: int, until: int) -> float:
        new = steps[number][taken[number] : until]
        setup = 0.0 if kinds[number].definition.name in begun else kinds[number].costs.setup_s
        return sum(step.gained for step in new) / (setup + sum(step.seconds for step in new))

    for is_sure in (True, False):
        able = [number for number, kind in enumerate(kinds) if kind.is_sure == is_sure]
        while needed > TOLERANCE:
            found = [
                (rate(number, until), number, until)
                for number in able
                for until in range(taken[number] + 1, len(steps[number]) + 1)
            ]
            if not found:
                break
            _, number, until = max(found)
            needed -= sum(step.gained for step in steps[number][taken[number] : until])
            taken[number] = until
            begun[kinds[number].definition.name] = None
    for name in begun:
        setup_s = 0.0 if plan.costs is None else plan.costs.setup_s
        for kind, found_steps, count in zip(kinds, steps, taken, strict=True):
            chosen = [point for step in found_steps[:count] for point in step.points]
            if kind.definition.name == name and chosen:
                plan.points += _planned(kind, chosen, setup_s)
                setup_s = 0.0


TOLERANCE = 1e-9


def _planned(kind: _Kind, chosen: list[_Asked], setup_s: float) -> list[PlannedPoint]:
    """Return the points of a kind without superfluous ones, each with the answers that it adds to those before it."""
    goal = {id(one) for one in kind.answered(chosen, kind.open)}
    for candidate in sorted(chosen, key=lambda one: -kind.seconds(one)):
        rest = [one for one in chosen if one is not candidate]
        if rest and goal <= {id(one) for one in kind.answered(rest, kind.open)}:
            chosen = rest
    planned, known = [], set[int]()
    for number, asked in enumerate(chosen):
        answered = kind.answered(chosen[: number + 1], kind.open)
        new = [one for one in answered if id(one) not in known]
        known |= {id(one) for one in new}
        names, _ = kind.winners(asked)
        expected = kind.predicted[asked.request.call.key()]
        assert expected is not None
        models = dict.fromkeys(question.model for one in new for question in one.questions)
        seconds = kind.seconds(asked) + (0.0 if number else setup_s)
        gained = sum(len(one.questions) for one in new)
        planned.append(
            PlannedPoint(asked.question.workload(), tuple(names), gained, seconds, expected[1], tuple(models))
        )
    return planned


# ---- measure --------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The result of measuring the first points of a plan.

    ``before`` and ``after`` count the answers to the same questions. ``left`` is the number of planned points without a result.
    """

    plan: CoveragePlan
    before: Counter[str]
    after: Counter[str]
    report: BenchReport | None = None
    published: str = ""
    left: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """True after Ctrl-C. All earlier measurements are kept."""
        return self.report is not None and self.report.interrupted

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content."""
        return {
            "gpu": self.plan.gpu,
            "before": {name: self.before[name] for name in ANSWERS},
            "after": {name: self.after[name] for name in ANSWERS},
            "measured": {} if self.report is None else dict(self.report.counts),
            "published": self.published,
            "points_left": self.left,
            "notes": self.notes,
        }


def measure_next(
    asked: Sequence[Question],
    seconds: float,
    *,
    goal: float = 1.0,
    devices: DevicesLike = "auto",
    observer: Observer | None = None,
    planned: Callable[[CoveragePlan], None] = lambda plan: None,
    costs: Costs | None = None,
) -> Measured:
    """Measure the next points of a plan for some time on the GPU of this machine, and publish them for this user.

    Every trace is stored at once. A repeated call publishes what an interrupted one stored, and plans without it. Work that would
    probably end too late is not begun, except the first.

    Args:
        seconds: time of this call, without the start of the process.
        planned: called with the plan before anything is measured.
    """
    from tilegym_db.measurement.benchmark import verify

    if not seconds > 0:
        raise UsageError(f"the time to measure is at least one second, not {seconds:g}.", code="seconds_invalid")
    began = time.monotonic()
    chosen = parse_devices(devices)
    machine = select_machine(chosen.gpu)
    catalog = Catalog.default()
    before = Counter(ask(question, machine.gpu, catalog, load_table(machine.gpu)).kind for question in asked)
    published, done = _publish(machine.gpu, catalog)
    plan = plan_coverage(
        asked, machine.gpu, goal=goal, catalog=catalog, done=done, memory=machine.memory_bytes, costs=costs
    )
    planned(plan)
    result = Measured(plan, before, before, published=published, left=len(plan.points))
    if not plan.points:
        result.after = plan.answers
        return result
    writers.add_workloads(catalog, [point.workload for point in plan.points], root=home() / "catalog")
    of_kind = replace(chosen, gpu=machine.gpu)
    for chunk in _chunks(plan.points):
        late = time.monotonic() - began + sum(point.seconds for point in chunk) > seconds
        if result.report is not None and late:
            continue  # a later chunk may be short enough
        names = tuple(dict.fromkeys(name for point in chunk for name in point.solutions))
        uuids = tuple(point.workload.uuid for point in chunk)
        report = verify(names, devices=of_kind, workload=uuids, observer=observer)
        result.report = report if result.report is None else result.report.followed_by(report)
        result.left -= len({trace.workload_uuid for trace in report.traces} & {*uuids})
        if report.interrupted:
            break
    assert result.report is not None
    result.notes += [*result.report.notes, *result.report.unfinished]
    result.published = _publish(machine.gpu, Catalog.default())[0]
    table, catalog = load_table(machine.gpu), Catalog.default()
    result.after = Counter(ask(question, machine.gpu, catalog, table).kind for question in asked)
    return result


def _publish(gpu: str, catalog: Catalog) -> tuple[str, set[str]]:
    """Publish for this user if this installation has measured on the GPU; return the folder and the measured Workloads."""
    from tilegym_db.store.publish import publish

    if not any((home() / "runs").glob(f"*-{gpu}-*")):
        return "", set()
    with open_store(catalog=catalog) as store:
        ingest(store)
        done = {uuid for _, _, uuid, _ in done_keys(store, gpu, "promotion")}
        try:
            return str(publish(store, gpu, own=True).folder), done
        except NotFoundError:  # nothing passed
            return "", done


def _chunks(points: Sequence[PlannedPoint]) -> Iterator[list[PlannedPoint]]:
    """Yield whole operators, together at least :data:`CHUNK_S` of work: few, and enough for all processors."""
    chunk: list[PlannedPoint] = []
    for _, group in itertools.groupby(points, key=lambda point: point.workload.definition):
        chunk += group
        if sum(point.seconds for point in chunk) >= CHUNK_S:
            yield chunk
            chunk = []
    if chunk:
        yield chunk

"""Plans of bench runs: the options of the user, the plan made from them, and the summary and report of a run."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final, Literal

from tilegym_db.backends.toolchains import interpreted_here
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import UsageError, check_kind
from tilegym_db.measurement.drafts import Draft
from tilegym_db.measurement.machine import Machine, Missing
from tilegym_db.records import LANGUAGES, Config, Definition, Trace, Workload, axes_key
from tilegym_db.records.dtypes import STORED_BYTES
from tilegym_db.records.loop import Award
from tilegym_db.records.solution import config_id, name_with_config, why_not_timed
from tilegym_db.records.verdicts import UNTIMED_TIERS
from tilegym_db.store.answer import html_table
from tilegym_db.verification.phases import Spent, added, merged

PairKey = tuple[str, str, str]
"""Solution digest, definition digest, workload uuid."""

DoneKey = tuple[str, str, str, str]
"""A :data:`PairKey` and the id of a config."""

LikelyFastest = Mapping[tuple[str, str], Sequence[tuple[str, Config]]]
"""(definition digest, workload uuid) -> the verified Solutions that may be the fastest there, each with its config. The
first one is the current best.
"""


@dataclass(frozen=True)
class Options:
    """Options of the user. ``workload`` is one glob over uuid, tags and axes key, or several."""

    names: tuple[str, ...] = ()
    language: str | None = None
    workload: str | tuple[str, ...] | None = None
    quick: bool = False
    force: bool = False
    tier: Literal["screen", "promotion"] = "screen"


def names_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the requested names as a tuple; a single name may be a string."""
    check_kind(names, Iterable, "names are those of solutions or definitions: a text, or several")
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class Skipped:
    """One thing that is not measured, and the reason."""

    solution: str
    workload: str
    reason: str


@dataclass
class DefinitionPlan:
    """The Solutions and Workloads of one Definition, and the pairs to run.

    ``timed`` are measured together, interleaved; ``interpreted`` are only verified, in the interpreters of their languages.
    ``pairs`` (solution, workload uuid) run under the source's own defaults; ``tuned`` run under the config that tune found.
    ``likely_fastest`` (workload uuid -> Solutions and configs) are measured again with new candidates, which have to beat
    the first of them, the current best. ``roots`` are the folders that contain the input files of Workloads.
    """

    definition: Definition
    workloads: list[Workload] = field(default_factory=list)
    timed: list[SolutionFiles] = field(default_factory=list)
    interpreted: list[SolutionFiles] = field(default_factory=list)
    pairs: set[tuple[str, str]] = field(default_factory=set)
    tuned: dict[tuple[str, str], Config] = field(default_factory=dict)
    likely_fastest: dict[str, list[tuple[str, Config]]] = field(default_factory=dict)
    roots: tuple[Path, ...] = ()

    def configs_of(self, solution: SolutionFiles) -> list[Config]:
        """Return all planned configs of the Solution, the source's own defaults first."""
        planned = [(name, config) for (name, _), config in self.tuned.items()]
        again = itertools.chain.from_iterable(self.likely_fastest.values())
        found = [config for name, config in (*planned, *again) if name == solution.name]
        return list({config_id(config): config for config in ({}, *found)}.values())

    def configured(self, workload: Workload) -> int:
        """Return the number of candidates of the Workload that run under a config other than their own defaults."""
        again = self.likely_fastest.get(workload.uuid, ())
        return len({(name, config_id(config)) for name, config in (*self.tuned_on(workload), *again) if config})

    def tuned_on(self, workload: Workload) -> list[tuple[str, Config]]:
        """Return the Solutions planned for the Workload under the config that tune found, with that config."""
        return [(name, config) for (name, uuid), config in self.tuned.items() if uuid == workload.uuid]

    def candidates(self) -> list[tuple[SolutionFiles, Config]]:
        """Return every Solution that takes part in a Workload, once per planned config."""
        return [
            (solution, config)
            for solution in (*self.timed, *self.interpreted)
            for config in self.configs_of(solution)
            if any(self.takes_part(solution, workload, config) for workload in self.workloads)
        ]

    def is_wanted(self, workload: Workload) -> bool:
        """Return True if something is planned for the Workload, under any config."""
        return any(uuid == workload.uuid for _, uuid in (*self.pairs, *self.tuned))

    def restricted_to(self, uuids: Collection[str]) -> DefinitionPlan:
        """Return the plan for some workloads. It keeps the list of all workloads, since fuzz cases depend on it."""
        return replace(
            self,
            pairs={pair for pair in self.pairs if pair[1] in uuids},
            tuned={pair: config for pair, config in self.tuned.items() if pair[1] in uuids},
            likely_fastest={uuid: again for uuid, again in self.likely_fastest.items() if uuid in uuids},
        )

    def is_asked(self, solution: SolutionFiles, workload: Workload, config: Config) -> bool:
        """Return True if the Solution is planned itself, and does not only take part so that others are compared with it."""
        pair = solution.name, workload.uuid
        return self.tuned.get(pair) == config if config else pair in self.pairs

    def is_current_best(self, solution: SolutionFiles, workload: Workload, config: Config) -> bool:
        """Return True for the Solution and config to beat on the Workload."""
        return self.likely_fastest.get(workload.uuid, [])[:1] == [(solution.name, config)]

    def takes_part(self, solution: SolutionFiles, workload: Workload, config: Config) -> bool:
        """Return True if the Solution is planned here, or if planned Solutions are compared with it.

        These are stock code and the likely fastest.
        """
        if (solution.name, config) in self.likely_fastest.get(workload.uuid, ()):
            return True
        if config:
            return self.tuned.get((solution.name, workload.uuid)) == config
        if solution.record.spec.provides == "stock":
            return self.is_wanted(workload)
        return (solution.name, workload.uuid) in self.pairs


@dataclass
class Plan:
    """The work of one run."""

    definitions: list[DefinitionPlan] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Reasons for Definitions whose reference does not return. Nothing can be measured against such a reference."""

    @property
    def pair_count(self) -> int:
        """The number of (solution, workload) pairs that get a trace; each tuned config counts as one more."""
        return sum(
            item.takes_part(solution, workload, config)
            for item in self.definitions
            for solution in (*item.timed, *item.interpreted)
            for config in item.configs_of(solution)
            for workload in item.workloads
        )


# ---- planning -------------------------------------------------------------------------------------
# Select what a bench run measures. Pure: catalog and options in, a plan with reasons for all omissions out.

# Larger workloads are not run on a CPU: this is about a tenth of a second per call on two cores.
CPU_MAX_FLOPS = 4e9
CPU_MAX_BYTES = 64e6
INTERPRETER_MAX_ELEMENTS = 1 << 15
QUICK_WORKLOADS = 2
ALREADY_MEASURED = "already measured (--force repeats it)"


def make_plan(
    catalog: Catalog,
    machine: Machine,
    options: Options,
    done: Collection[DoneKey],
    lacks: Missing | None = None,
    excluded: Mapping[DoneKey, str] | None = None,
    tuned: Mapping[PairKey, Config] | None = None,
    likely_fastest: LikelyFastest | None = None,
) -> Plan:
    """Select pairs of Solution and Workload, each under the default config and the config that tune found for it.

    Args:
        done: (solution digest, definition digest, workload uuid, config id) that already have a trace on this GPU.
        lacks: what cannot be used here, with the command that installs it; by default nothing is missing.
        excluded: reasons for pairs that must not run, with keys as in ``done``.
        tuned: (solution digest, definition digest, workload uuid) -> the config that tune found on this GPU.
        likely_fastest: verified Solutions that may be the fastest on this GPU. They are always measured again with new
            candidates, because times of different runs are not comparable. A screen does not change the ranking, so it only
            measures the current best again; a quick run measures none of them.
    """
    if options.language is not None and options.language not in LANGUAGES:
        raise UsageError(
            f"unknown language {options.language!r}; known: {', '.join(LANGUAGES)}.", code="language_unknown"
        )
    lacks = lacks or Missing({}, {})
    planner = _Planner(catalog, machine, options, lacks, done, excluded or {}, tuned or {}, likely_fastest or {})
    matched = False
    for definition, solutions in _selected(catalog, options):
        item = planner.planned(definition, solutions)
        matched = matched or bool(item.workloads)
        if item.pairs or item.tuned:
            planner.plan.definitions.append(item)
    _require_something(planner.plan, options, matched)
    return planner.plan


def refuse_omitting(untimed: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` if a Solution to verify omits an output, as :func:`omitting` found."""
    for name, reason in untimed.items():
        raise UsageError(f"{reason}. Screen it: tilegym-db bench {name}", code="solution_not_timed")


def omitting(catalog: Catalog, names: Sequence[str]) -> dict[str, str]:
    """Return the named Solutions that omit an output, each with the reason why it is not timed."""
    solutions = catalog.solutions_among(names)
    reasons = {name: why_not_timed(name, solutions[name].record.spec.omits) for name in names if name in solutions}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def current_best_alone(
    likely_fastest: LikelyFastest, whole: Collection[str], names: Collection[str], catalog: Catalog
) -> LikelyFastest:
    """Return only the current best of each shape if every name is that of a Solution, so that its verdict is soon known.

    A run of a whole Definition measures all that may be the fastest, because it changes their ranking.

    Args:
        whole: digests of Definitions whose times of other runs cannot be compared; all of theirs stay.
    """
    if not names or any(name in catalog.definitions for name in names):
        return likely_fastest
    return {key: found if key[0] in whole else found[:1] for key, found in likely_fastest.items()}


def refuse_unmatched(names: Collection[str], workload: str | None, catalog: Catalog) -> None:
    """Raise :class:`UsageError` if no Workload of these Definitions and Solutions matches the glob.

    It reads records alone, so a mistake in the glob is reported before PyTorch is loaded.
    """
    if workload is None or not names:
        return
    solutions = catalog.solutions_among([name for name in names if name not in catalog.definition_paths])
    definitions = [solutions[name].record.definition if name in solutions else name for name in names]
    if not any(found.matches(workload) for name in definitions for found in catalog.workloads_for(name)):
        raise _unmatched(workload, definitions[0])


def _unmatched(workload: str | tuple[str, ...], definition: str | None) -> UsageError:
    of, there = "", "list --workloads"
    if definition is not None:
        of = f" of {definition}"
        there = f"sql \"SELECT axes_key, tags, uuid FROM workloads WHERE definition = '{definition}'\""
    return UsageError(
        f"no workload{of} matches {workload!r}, a glob over tags, axes (M=1,*) and uuid. To see them: tilegym-db {there}",
        code="workload_unmatched",
    )


def _require_something(plan: Plan, options: Options, matched: bool) -> None:
    if options.workload is not None and not matched:
        raise _unmatched(options.workload, None)
    if not plan.definitions and not plan.skipped:
        raise UsageError(
            "nothing matches: no solution or no workload is selected. Try: tilegym-db list --solutions",
            code="nothing_selected",
        )


def _selected(catalog: Catalog, options: Options) -> list[tuple[Definition, list[SolutionFiles]]]:
    definitions, solutions = catalog.definitions, catalog.solutions_among(options.names)
    chosen: dict[str, set[str]] = {}
    for name in options.names or tuple(definitions):
        if name in definitions:
            chosen.setdefault(name, set()).update(s.name for s in catalog.solutions_for(name))
        elif name in solutions:
            definition = solutions[name].record.definition
            # Add the stock code: a speedup is relative to it.
            stock = {s.name for s in catalog.solutions_for(definition) if s.record.spec.provides == "stock"}
            chosen.setdefault(definition, set()).update({name} | stock)
        else:
            catalog.refuse_unknown((name,))
    selected = []
    # In the order of the names that were given: the first is wanted first. Without names, in that of the alphabet.
    for name, names in chosen.items():
        found = [solutions[s] for s in sorted(names)]
        if options.language is not None:
            found = [
                s for s in found if s.record.spec.language == options.language or s.record.spec.provides == "stock"
            ]
        if found:
            selected.append((definitions[name], found))
    return selected


@dataclass
class _Planner:
    """The planning of one run, Definition by Definition; see :func:`make_plan`."""

    catalog: Catalog
    machine: Machine
    options: Options
    lacks: Missing
    done: Collection[DoneKey]
    excluded: Mapping[DoneKey, str]
    tuned: Mapping[PairKey, Config]
    likely_fastest: LikelyFastest
    plan: Plan = field(default_factory=Plan)

    def planned(self, definition: Definition, solutions: Sequence[SolutionFiles]) -> DefinitionPlan:
        item = DefinitionPlan(definition, self._workloads(definition), roots=self.catalog.roots)
        for solution in solutions:
            self._place(item, solution)
        self._choose_pairs(item)
        if self.likely_fastest and not self.options.quick:
            self._add_likely_fastest(item)
        return item

    def _skip(self, solution: str, workload: str, reason: str) -> None:
        self.plan.skipped.append(Skipped(solution, workload, reason))

    def _workloads(self, definition: Definition) -> list[Workload]:
        chosen, machine, asked = [], self.machine, self.options.workload
        for workload in self.catalog.workloads_for(definition.name):
            if asked is not None and not workload.matches(asked):
                continue
            if not machine.is_gpu and asked is None and not fits_a_cpu(definition, workload):
                reason: str | None = "too large for a CPU (name it with --workload to run it anyway)"
            else:
                reason = why_too_large(definition, workload, machine.memory_bytes) if machine.is_gpu else None
            if reason is None:
                chosen.append(workload)
            else:
                self._skip("*", axes_key(workload.axes), reason)
        return _quick(chosen, machine) if self.options.quick else chosen

    def _place(self, item: DefinitionPlan, solution: SolutionFiles) -> None:
        spec, is_screen = solution.record.spec, self.options.tier == "screen"
        reason = why_not_timed(solution.name, spec.omits) if self.options.tier == "promotion" else None
        if reason is not None:
            self._skip(solution.name, "*", reason)
            return
        reason = self._why_untimed(solution)
        if reason is None:
            item.timed.append(solution)
        elif is_screen and interpreted_here(spec.language, on_gpu=self.machine.is_gpu) and not self.lacks.of(solution):
            item.interpreted.append(solution)
        else:
            self._skip(solution.name, "*", reason)

    def _why_untimed(self, solution: SolutionFiles) -> str | None:
        """Return the reason why a Solution cannot be timed on this machine, or None.

        Missing packages come first if installing them would help.
        """
        language, is_gpu = solution.record.spec.language, self.machine.is_gpu
        if is_gpu or language == "python":
            return self.lacks.of(solution, its_language=is_gpu)
        only = f"{language} kernels run on a GPU only (here they can be compiled: tilegym-db compile)"
        return self.lacks.of(solution) or only

    def _is_named(self, solution: SolutionFiles) -> bool:
        """Return False for stock code if only other Solutions are named. It is measured where one of them passes."""
        record, names = solution.record, {*self.options.names}
        return record.spec.provides != "stock" or not names or not names.isdisjoint({record.name, record.definition})

    def _choose_pairs(self, item: DefinitionPlan) -> None:
        asked = [solution for solution in (*item.timed, *item.interpreted) if self._is_named(solution)]
        for workload in item.workloads:
            for solution in asked:
                pair = (solution.digest, item.definition.digest, workload.uuid)
                found = self.tuned.get(pair) if solution in item.timed else None
                for config in ({}, found) if found else ({},):
                    reason = self._why_not((*pair, config_id(config)))
                    if (
                        solution in item.interpreted
                        and elements_of(item.definition, workload) > INTERPRETER_MAX_ELEMENTS
                    ):
                        reason = "too large for the interpreter"
                    if reason is not None:
                        self._skip(name_with_config(solution.name, config), axes_key(workload.axes), reason)
                    elif config:
                        item.tuned[solution.name, workload.uuid] = config
                    else:
                        item.pairs.add((solution.name, workload.uuid))

    def _why_not(self, key: DoneKey) -> str | None:
        already = ALREADY_MEASURED if not self.options.force and key in self.done else None
        return self.excluded.get(key, already)

    def _add_likely_fastest(self, item: DefinitionPlan) -> None:
        """Add the likely fastest Solutions to each Workload with a candidate that may be faster than the current best."""
        solutions = self.catalog.solutions_among((item.definition.name,))
        most = 1 if self.options.tier == "screen" else None
        for workload in item.workloads:
            likely = self.likely_fastest.get((item.definition.digest, workload.uuid), ())[:most]
            if not likely or all(pair == likely[0] for pair in _new_candidates(item, workload)):
                continue
            invited = []
            for name, config in likely:
                solution = solutions[name]
                key = (solution.digest, item.definition.digest, workload.uuid, config_id(config))
                if key in self.excluded or self._why_untimed(solution) is not None:
                    continue
                invited.append((name, config))
                if solution not in item.timed:
                    item.timed.append(solution)
                skipped = Skipped(name_with_config(name, config), axes_key(workload.axes), ALREADY_MEASURED)
                if skipped in self.plan.skipped:
                    self.plan.skipped.remove(skipped)
            if invited:
                item.likely_fastest[workload.uuid] = invited


def fits_a_cpu(definition: Definition, workload: Workload) -> bool:
    """Return True if a CPU can measure a Workload in reasonable time."""
    flops, size = definition.cost_of(definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes))
    return flops <= CPU_MAX_FLOPS and size <= CPU_MAX_BYTES


LEAST_SLOTS = 4
"""Slots in which calls are timed, each with inputs and outputs."""
LEAST_CONTENTS = 5
"""Contents of a workload that exist at the same time, each with its fp64 output: three timed sets of a large call, one with
unusual ids or lengths, and the call that is verified in turn with them."""


def why_too_large(definition: Definition, workload: Workload, memory_bytes: int) -> str | None:
    """Return why a Workload cannot be measured in the memory of a GPU; None if it may fit, or the memory is not known (0)."""
    axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)

    def elements(name: str) -> int:
        return math.prod(definition.shape_of(name, axes))

    def size(name: str) -> int:
        return elements(name) * STORED_BYTES[definition.dtype_of(name, dtypes)]

    inputs = sum(map(size, definition.tensor_inputs))
    outputs = sum(map(size, definition.written_outputs))
    oracle = 8 * sum(map(elements, definition.outputs))
    needed = LEAST_SLOTS * (inputs + outputs) + LEAST_CONTENTS * (inputs + oracle)
    if not memory_bytes or needed <= memory_bytes:
        return None
    return (
        f"its contents need at least {needed / 1e9:.0f} GB of memory: {LEAST_SLOTS} times inputs and outputs to time, and "
        f"{LEAST_CONTENTS} times inputs with fp64 outputs to compare; the GPU has {memory_bytes / 1e9:.0f} GB"
    )


def _quick(workloads: Sequence[Workload], machine: Machine) -> list[Workload]:
    """Return a few workloads: on a CPU one tiny (for the interpreter) and one modest, on a GPU one decode and one prefill."""
    kinds = ("stage:decode", "stage:prefill") if machine.is_gpu else ("tiny", "cpu")
    chosen: list[Workload] = []
    for kind in kinds:
        chosen += [workload for workload in workloads if kind in workload.tags][: QUICK_WORKLOADS // 2]
    return chosen or list(workloads[:QUICK_WORKLOADS])


def _new_candidates(item: DefinitionPlan, workload: Workload) -> list[tuple[str, Config]]:
    """Return the candidates that are planned to be timed on a Workload, without stock code."""
    names = {solution.name for solution in item.timed if solution.record.spec.provides != "stock"}
    pairs: list[tuple[str, Config]] = [(name, {}) for name, uuid in item.pairs if uuid == workload.uuid]
    return [(name, config) for name, config in pairs + item.tuned_on(workload) if name in names]


def elements_of(definition: Definition, workload: Workload) -> int:
    """Return the elements of all tensors of a call, inputs and outputs."""
    axes = definition.bind_axes(workload.axes)
    tensors = (*definition.tensor_inputs, *definition.outputs)
    return sum(math.prod(definition.shape_of(name, axes)) for name in tensors)


# ---- summary --------------------------------------------------------------------------------------
# Summary of a run: one row per Solution. Pure.


@dataclass(frozen=True)
class SummaryRow:
    """One Solution in one run.

    ``speedup``: geometric mean of the ratios against stock code. ``over_best``: the same against the fastest verified
    Solution before this run, over the workloads that had one. ``note``: the reason of the first failure, or why nothing
    ran. ``sol_ratio``: geometric mean of the shares of the speed of light; None if the device's is unknown.
    """

    solution: str
    language: str
    passed: int
    total: int
    speedup: float | None
    note: str
    sol_ratio: float | None = None
    over_best: float | None = None
    spread: tuple[float, float] | None = None
    """The lowest and the highest of the ratios against stock code."""


VERIFICATION: Final = "promotion"
"""The tier of verification."""


def summarise(traces: Sequence[Trace]) -> list[SummaryRow]:
    """Return one row per Solution, in order of first appearance; workloads that a Solution excludes do not count.

    A verified pair replaces its screen, and the ratios of a Solution come from one tier: the verification if it has one.
    """
    grouped: dict[str, list[Trace]] = {}
    for trace in traces:
        grouped.setdefault(trace.solution, []).append(trace)
    return [_row(solution, traces) for solution, traces in grouped.items()]


def _row(solution: str, traces: list[Trace]) -> SummaryRow:
    final = [trace for trace in traces if trace.tier == VERIFICATION]
    replaced = {(trace.workload_uuid, config_id(trace.config)) for trace in final}
    counted = [
        trace
        for trace in traces
        if trace.status != "UNSUPPORTED"
        and (not final or trace.tier == VERIFICATION or (trace.workload_uuid, config_id(trace.config)) not in replaced)
    ]
    failures = [trace for trace in counted if trace.status != "PASSED"]
    timed = [trace.performance for trace in final or counted if trace.performance is not None]
    light = [performance.sol_ratio for performance in timed if performance.sol_ratio]
    ratios: dict[str | None, list[float]] = {}
    for performance in timed:
        for comparison in performance.comparisons:
            ratios.setdefault(comparison.provides, []).append(comparison.ratio)
    note = ""
    if not counted:
        unsupported = next(trace for trace in final or traces if trace.status == "UNSUPPORTED")
        note = f"{unsupported.status}: {unsupported.reason}"
    elif failures:
        note = f"{failures[0].status}: {failures[0].reason}"
    elif all(trace.tier == "interpreter" for trace in counted):
        note = "verified in the interpreter, not timed"
    elif all(trace.tier in UNTIMED_TIERS for trace in counted):
        note = "verified, not timed: it omits an output"
    passed = len(counted) - len(failures)
    speedup, over_best = (_mean(ratios.get(provides, ())) for provides in ("stock", "incumbent"))
    stock = ratios.get("stock")
    spread = (min(stock), max(stock)) if stock else None
    return SummaryRow(
        solution, traces[0].language, passed, len(counted), speedup, note, _mean(light), over_best, spread
    )


def _mean(ratios: Sequence[float]) -> float | None:
    """Return the geometric mean, or None for no ratios."""
    return geometric_mean(ratios) if ratios else None


# ---- bench report ---------------------------------------------------------------------------------
# The report that the caller of a bench run gets.


@dataclass(repr=False)
class BenchReport:
    """The result of a run. ``interrupted`` is true after Ctrl-C; all earlier measurements are kept."""

    run_id: str
    machine: Machine
    plan: Plan
    traces: list[Trace] = field(default_factory=list)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    """Gaps in its traces, or reasons to doubt them."""
    unfinished: list[str] = field(default_factory=list)
    """Work that was given up because devices were lost, with reasons."""
    drafts: dict[str, Draft] = field(default_factory=dict)
    """The measured Solutions that were given by a path, by their names in this run."""
    devices: Counter[str] = field(default_factory=Counter)
    """Number of traces per device, if there are several."""
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds per device and phase; the phases are those of :mod:`tilegym_db.verification.phases`."""
    spent: dict[str, tuple[Spent, ...]] = field(default_factory=dict)
    """Time of single Solutions and Definitions per device."""
    began: float = field(default_factory=time.time)
    """Time of the start, in seconds since the epoch."""
    arrived: list[float] = field(default_factory=list)
    """Seconds from the start to each trace."""
    awards: list[Award] = field(default_factory=list)
    """Awards that its traces earned, and earlier ones of the same sources."""

    def followed_by(self, later: BenchReport) -> BenchReport:
        """Return one report of this run and a later one on the same machine, named after the later one."""
        traces = [*self.traces, *later.traces]
        notes = list(dict.fromkeys([*self.notes, *later.notes]))
        unfinished = [*self.unfinished, *later.unfinished]
        return replace(
            later,
            traces=traces,
            notes=notes,
            unfinished=unfinished,
            devices=self.devices + later.devices,
            seconds={device: added(self.seconds.get(device, {}), found) for device, found in later.seconds.items()},
            spent={device: merged([*self.spent.get(device, ()), *found]) for device, found in later.spent.items()},
            began=self.began,
            arrived=[*self.arrived, *(later.began - self.began + seconds for seconds in later.arrived)],
        )

    @property
    def counts(self) -> Counter[str]:
        """The number of traces per status."""
        return Counter(trace.status for trace in self.traces)

    @property
    def smallest_failure(self) -> Trace | None:
        """The trace that failed at the smallest sizes; None if no case failed."""
        failed = (trace for trace in self.traces if trace.failure is not None and trace.status != "UNSUPPORTED")
        return min(
            failed, key=lambda trace: math.prod(trace.failure.axes.values()) if trace.failure else 0, default=None
        )

    @property
    def times(self) -> dict[str, Any]:
        """The time of the run by phase, per device and per Solution or Definition, and when each trace came."""
        spent = {
            device: [
                {**asdict(part), "began": part.began - self.began, "ended": part.ended - self.began} for part in parts
            ]
            for device, parts in self.spent.items()
        }
        arrived = [
            {"solution": trace.solution, "axes": dict(trace.axes), "status": trace.status, "seconds": seconds}
            for trace, seconds in zip(self.traces, self.arrived, strict=True)
        ]
        return {"run_id": self.run_id, "seconds": self.seconds, "spent": spent, "traces": arrived}

    def command_again(self, trace: Trace) -> str:
        """Return the command that verifies the failing case of a trace again; empty without one.

        A Solution that is not in the catalog is given by its path.
        """
        command = "" if trace.failure is None else trace.failure.command
        draft = self.drafts.get(trace.solution)
        return command if draft is None else command.replace(f" {trace.solution} ", f" {draft.words} ", 1)

    def __repr__(self) -> str:
        """Return the run, the device and the number of traces per status."""
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self.counts.items())) or "nothing new"
        return f"<BenchReport {self.run_id} on {self.machine.gpu}: {counts}>"

    def _repr_html_(self) -> str:
        """Return a table with one row per Solution, as the command prints it; the caption names the device and the tiers."""
        tiers = " and ".join(dict.fromkeys(trace.tier for trace in self.traces)) or "nothing new"
        rows = [
            (row.solution, row.language, f"{row.passed}/{row.total}", row.speedup, row.sol_ratio, row.note)
            for row in summarise(self.traces)
        ]
        columns = ("solution", "language", "passed", "speedup over stock", "of the speed of light", "note")
        return html_table(columns, rows, f"{self.machine.gpu_name} ({self.machine.gpu}), {tiers}, run {self.run_id}")

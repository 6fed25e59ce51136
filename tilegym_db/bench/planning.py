"""Chooses what a bench run measures. Pure: catalog and options in, a plan with reasons for everything left out."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tilegym_db.bench.machine import Machine
from tilegym_db.bench.plan import DefinitionPlan, DoneKey, LikelyFastest, Options, PairKey, Plan, Skipped
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import NotFoundError, UsageError, did_you_mean
from tilegym_db.records import LANGUAGES, Config, Definition, Workload, axes_key
from tilegym_db.records.omitted import why_not_timed
from tilegym_db.records.solution import config_id, name_with_config
from tilegym_db.verify.worker.interpreters import interpreted_here

__all__ = ["fits_a_cpu", "make_plan", "refuse_omitting"]

# What one workload may cost on a CPU before it is left to GPUs: about a tenth of a second a call on two cores.
CPU_MAX_FLOPS = 4e9
CPU_MAX_BYTES = 64e6
INTERPRETER_MAX_ELEMENTS = 1 << 15
QUICK_WORKLOADS = 2
ALREADY_MEASURED = "already measured (--again repeats it)"


@dataclass(frozen=True)
class Lacks:
    """What is missing here: by language, and by Solution where a package that it declares is."""

    languages: Mapping[str, str]
    solutions: Mapping[str, str]

    def of(self, solution: SolutionFiles, *, its_language: bool = True) -> str | None:
        """What keeps a Solution from running here, or None."""
        language = self.languages.get(solution.record.spec.language) if its_language else None
        return language or self.solutions.get(solution.name)


def make_plan(
    catalog: Catalog,
    machine: Machine,
    options: Options,
    done: Collection[DoneKey],
    unusable: Mapping[str, str] | None = None,
    excluded: Mapping[DoneKey, str] | None = None,
    tuned: Mapping[PairKey, Config] | None = None,
    likely_fastest: LikelyFastest | None = None,
    unmet: Mapping[str, str] | None = None,
) -> Plan:
    """Select pairs of Solution and Workload, each under the default config and under the one that tune found for it.

    Args:
        catalog: the records.
        machine: where it will run; decides which languages can be timed and which sizes are sensible.
        options: names (of Definitions or Solutions), language, workload glob, quick, again.
        done: (solution digest, definition digest, workload uuid, config id) that already have a trace on this GPU.
        unusable: language -> what is missing for it here, and the command that installs it.
        excluded: pairs, keyed as ``done``, that are not to be run, with the reason.
        tuned: (solution digest, definition digest, workload uuid) -> the config that tune found on this GPU.
        likely_fastest: who may be the fastest on this GPU of all that are verified. Whatever is asked for, they are measured
            again where something else is that may be faster: times of different runs are no comparison. A screen, which
            changes nothing of who is the fastest, takes the current best alone, and a quick run nobody.
        unmet: name of a Solution -> which package that it declares is missing here, and the command that installs it.

    Raises:
        NotFoundError: a name is neither a Definition nor a Solution.
        UsageError: an unknown language, a glob that fits no workload, or nothing at all to run.
    """
    if options.language is not None and options.language not in LANGUAGES:
        raise UsageError(
            f"unknown language {options.language!r}; known: {', '.join(LANGUAGES)}.", code="language_unknown"
        )
    plan = Plan()
    lacks = Lacks(unusable or {}, unmet or {})
    matched = False
    for definition, solutions in _selected(catalog, options):
        item = DefinitionPlan(definition, roots=catalog.roots)
        item.workloads = _workloads(catalog, definition, machine, options, plan)
        for solution in solutions:
            _place(item, solution, machine, options, lacks, plan)
        _choose_pairs(item, options, done, excluded or {}, tuned or {}, plan)
        if likely_fastest and not options.quick:
            most = 1 if options.tier == "screen" else None
            _add_likely_fastest(item, catalog, machine, lacks, excluded or {}, likely_fastest, most, plan)
        matched = matched or bool(item.workloads)
        if item.pairs or item.tuned:
            plan.definitions.append(item)
    _require_something(plan, options, matched)
    return plan


def refuse_omitting(catalog: Catalog, names: Sequence[str]) -> None:
    """Raise :class:`UsageError` where a Solution that omits an output is asked for by name, to be promoted."""
    for name in names:
        found = catalog.solutions.get(name)
        reason = why_not_timed(name, found.record.spec.omits) if found is not None else None
        if reason is not None:
            raise UsageError(f"{reason}. Its verdict: tilegym-db bench {name}", code="solution_not_timed")


def _require_something(plan: Plan, options: Options, matched: bool) -> None:
    if options.workload is not None and not matched:
        raise UsageError(
            f"no workload matches {options.workload!r}: it is a glob over tags, axes (M=1,*) and uuid.",
            code="workload_unmatched",
        )
    if not plan.definitions and not plan.skipped:
        raise UsageError(
            "nothing matches: no solution or no workload is selected. Try: tilegym-db list --solutions",
            code="nothing_selected",
        )


def _selected(catalog: Catalog, options: Options) -> list[tuple[Definition, list[SolutionFiles]]]:
    definitions, solutions = catalog.definitions, catalog.solutions
    chosen: dict[str, set[str]] = {}
    for name in options.names or tuple(definitions):
        if name in definitions:
            chosen.setdefault(name, set()).update(s.name for s in catalog.solutions_for(name))
        elif name in solutions:
            definition = solutions[name].record.definition
            # The stock code comes along: without it there is nothing to be faster than.
            stock = {s.name for s in catalog.solutions_for(definition) if s.record.spec.provides == "stock"}
            chosen.setdefault(definition, set()).update({name} | stock)
        else:
            catalog.refuse_broken(name)
            hint = did_you_mean(name, [*definitions, *solutions])
            raise NotFoundError(
                f"'{name}' is no definition and no solution.{hint} Try: tilegym-db list", code="name_unknown"
            )
    selected = []
    for name, names in sorted(chosen.items()):
        found = [solutions[s] for s in sorted(names)]
        if options.language is not None:
            found = [
                s for s in found if s.record.spec.language == options.language or s.record.spec.provides == "stock"
            ]
        if found:
            selected.append((definitions[name], found))
    return selected


def _workloads(
    catalog: Catalog, definition: Definition, machine: Machine, options: Options, plan: Plan
) -> list[Workload]:
    chosen = []
    for workload in catalog.workloads_for(definition.name):
        if options.workload is not None and not _matches(workload, options.workload):
            continue
        if not machine.is_gpu and options.workload is None and not fits_a_cpu(definition, workload):
            reason = "too large for a CPU (name it with --workload to run it all the same)"
            plan.skipped.append(Skipped("*", axes_key(workload.axes), reason))
            continue
        chosen.append(workload)
    if options.quick:
        chosen = _quick(chosen, machine)
    return chosen


def fits_a_cpu(definition: Definition, workload: Workload) -> bool:
    """Whether a CPU measures a Workload in sensible time."""
    flops, size = definition.cost_of(definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes))
    return flops <= CPU_MAX_FLOPS and size <= CPU_MAX_BYTES


def _quick(workloads: Sequence[Workload], machine: Machine) -> list[Workload]:
    """A few per kind: on a CPU one tiny (the interpreter's) and one modest, on a GPU one decode and one prefill."""
    kinds = ("stage:decode", "stage:prefill") if machine.is_gpu else ("tiny", "cpu")
    chosen: list[Workload] = []
    for kind in kinds:
        chosen += [workload for workload in workloads if kind in workload.tags][: QUICK_WORKLOADS // 2]
    return chosen or list(workloads[:QUICK_WORKLOADS])


def _matches(workload: Workload, asked: str | tuple[str, ...]) -> bool:
    names = (workload.uuid, axes_key(workload.axes), *workload.tags)
    patterns = (asked,) if isinstance(asked, str) else asked
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _place(
    item: DefinitionPlan,
    solution: SolutionFiles,
    machine: Machine,
    options: Options,
    lacks: Lacks,
    plan: Plan,
) -> None:
    language = solution.record.spec.language
    reason = why_not_timed(solution.name, solution.record.spec.omits) if options.tier == "promotion" else None
    if reason is not None:
        plan.skipped.append(Skipped(solution.name, "*", reason))
        return
    reason = _why_untimed(solution, machine, lacks)
    if reason is None:
        item.timed.append(solution)
    elif interpreted_here(language, on_gpu=machine.is_gpu) and options.tier == "screen" and not lacks.of(solution):
        item.interpreted.append(solution)
    else:
        plan.skipped.append(Skipped(solution.name, "*", reason))


def _why_untimed(solution: SolutionFiles, machine: Machine, lacks: Lacks) -> str | None:
    """Why a Solution cannot be timed on this machine, or None. What it lacks comes first, where installing it would help."""
    language = solution.record.spec.language
    if machine.is_gpu or language == "python":
        return lacks.of(solution, its_language=machine.is_gpu)
    return lacks.of(solution) or f"{language} kernels run on a GPU only (here they can be compiled: tilegym-db compile)"


def _choose_pairs(
    item: DefinitionPlan,
    options: Options,
    done: Collection[DoneKey],
    excluded: Mapping[DoneKey, str],
    tuned: Mapping[PairKey, Config],
    plan: Plan,
) -> None:
    for workload in item.workloads:
        wanted = []
        for solution in (*item.timed, *item.interpreted):
            pair = (solution.digest, item.definition.digest, workload.uuid)
            found = tuned.get(pair) if solution in item.timed else None
            for config in ({}, found) if found else ({},):
                reason = _why_not((*pair, config_id(config)), options, done, excluded)
                if solution in item.interpreted and _elements(item.definition, workload) > INTERPRETER_MAX_ELEMENTS:
                    reason = "too large for the interpreter"
                if reason is not None:
                    name = name_with_config(solution.name, config)
                    plan.skipped.append(Skipped(name, axes_key(workload.axes), reason))
                elif config:
                    item.tuned[solution.name, workload.uuid] = config
                else:
                    wanted.append(solution.name)
        item.pairs |= {(name, workload.uuid) for name in wanted}


def _add_likely_fastest(
    item: DefinitionPlan,
    catalog: Catalog,
    machine: Machine,
    lacks: Lacks,
    excluded: Collection[DoneKey],
    likely_fastest: LikelyFastest,
    most: int | None,
    plan: Plan,
) -> None:
    """Wherever something is planned that may be faster than the current best, they take part who can."""
    for workload in item.workloads:
        invited = list(likely_fastest.get((item.definition.digest, workload.uuid), ()))[:most]
        if not invited or all(pair == invited[0] for pair in _new_candidates(item, workload)):
            continue
        for name, config in list(invited):
            solution = catalog.solutions[name]
            key = (solution.digest, item.definition.digest, workload.uuid, config_id(config))
            if key in excluded or _why_untimed(solution, machine, lacks) is not None:
                invited.remove((name, config))
                continue
            if solution not in item.timed:
                item.timed.append(solution)
            skipped = Skipped(name_with_config(name, config), axes_key(workload.axes), ALREADY_MEASURED)
            if skipped in plan.skipped:
                plan.skipped.remove(skipped)
        if invited:
            item.likely_fastest[workload.uuid] = invited


def _new_candidates(item: DefinitionPlan, workload: Workload) -> list[tuple[str, Config]]:
    """What is planned there to be timed, but for stock code."""
    names = {solution.name for solution in item.timed if solution.record.spec.provides != "stock"}
    pairs: list[tuple[str, Config]] = [(name, {}) for name, uuid in item.pairs if uuid == workload.uuid]
    return [(name, config) for name, config in pairs + item.tuned_on(workload) if name in names]


def _why_not(key: DoneKey, options: Options, done: Collection[DoneKey], excluded: Mapping[DoneKey, str]) -> str | None:
    if key in excluded:
        return excluded[key]
    return ALREADY_MEASURED if not options.again and key in done else None


def _elements(definition: Definition, workload: Workload) -> int:
    axes = definition.bind_axes(workload.axes)
    tensors = (*definition.tensor_inputs, *definition.outputs)
    return sum(math.prod(definition.shape_of(name, axes)) for name in tensors)

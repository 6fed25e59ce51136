"""What a bench run measures: what was asked for, and the plan that came of it. Made by :mod:`.planning`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import check_kind
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.solution import config_id

__all__ = ["DefinitionPlan", "DoneKey", "LikelyFastest", "Options", "PairKey", "Plan", "Skipped", "names_of"]

PairKey = tuple[str, str, str]
"""Solution digest, definition digest, workload uuid."""

DoneKey = tuple[str, str, str, str]
"""A :data:`PairKey` and the id of a config."""

LikelyFastest = Mapping[tuple[str, str], Sequence[tuple[str, Config]]]
"""(definition digest, workload uuid) -> the verified Solutions that may be the fastest there, each under the config that made
it so; the first is the current best, which is."""


@dataclass(frozen=True)
class Options:
    """What the user asked for. ``workload`` is a glob over uuid, tags and axes key, or several of them."""

    names: tuple[str, ...] = ()
    language: str | None = None
    workload: str | tuple[str, ...] | None = None
    quick: bool = False
    again: bool = False
    tier: Literal["screen", "promotion"] = "screen"


def names_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names that were asked for; one may be given without a tuple around it."""
    check_kind(names, Iterable, "names are those of solutions or definitions: a text, or several")
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class Skipped:
    """One thing that is not measured, and why."""

    solution: str
    workload: str
    reason: str


@dataclass
class DefinitionPlan:
    """The Solutions and Workloads of one Definition, and which pairs to run.

    ``timed`` are measured together, interleaved; ``interpreted`` are only verified, in their languages' interpreters. ``pairs``
    (solution, workload uuid) run under the source's own defaults; ``tuned`` run under the config that tune found.
    ``likely_fastest`` (workload uuid -> Solutions and configs) are measured again beside what is new there, which has to beat
    the first of them, the current best. Files that hold inputs of Workloads lie below one of ``roots``.
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
        """Every config that the Solution is planned under, the source's own defaults first."""
        planned = [(name, config) for (name, _), config in self.tuned.items()]
        again = itertools.chain.from_iterable(self.likely_fastest.values())
        found = [config for name, config in (*planned, *again) if name == solution.name]
        return list({config_id(config): config for config in ({}, *found)}.values())

    def configured(self, workload: Workload) -> int:
        """How many take part in the Workload under a config that is not their source's own."""
        again = self.likely_fastest.get(workload.uuid, ())
        return len({(name, config_id(config)) for name, config in (*self.tuned_on(workload), *again) if config})

    def tuned_on(self, workload: Workload) -> list[tuple[str, Config]]:
        """The Solutions that are planned for the Workload under the config that tune found, and that config."""
        return [(name, config) for (name, uuid), config in self.tuned.items() if uuid == workload.uuid]

    def candidates(self) -> list[tuple[SolutionFiles, Config]]:
        """Every Solution that takes part in anything, under each config that it is planned under."""
        return [
            (solution, config)
            for solution in (*self.timed, *self.interpreted)
            for config in self.configs_of(solution)
            if any(self.takes_part(solution, workload, config) for workload in self.workloads)
        ]

    def is_wanted(self, workload: Workload) -> bool:
        """True where something is planned for the Workload, under whatever config."""
        return any(uuid == workload.uuid for _, uuid in (*self.pairs, *self.tuned))

    def restricted_to(self, uuids: Collection[str]) -> DefinitionPlan:
        """What is planned for these workloads. It keeps all workloads, since fuzz cases are chosen by them."""
        return replace(
            self,
            pairs={pair for pair in self.pairs if pair[1] in uuids},
            tuned={pair: config for pair, config in self.tuned.items() if pair[1] in uuids},
            likely_fastest={uuid: again for uuid, again in self.likely_fastest.items() if uuid in uuids},
        )

    def is_current_best(self, solution: SolutionFiles, workload: Workload, config: Config) -> bool:
        """True for what is to be beaten on the Workload."""
        return self.likely_fastest.get(workload.uuid, [])[:1] == [(solution.name, config)]

    def takes_part(self, solution: SolutionFiles, workload: Workload, config: Config) -> bool:
        """True where this is planned, or something planned is compared with it: stock code, and the likely fastest."""
        if (solution.name, config) in self.likely_fastest.get(workload.uuid, ()):
            return True
        if config:
            return self.tuned.get((solution.name, workload.uuid)) == config
        if solution.record.spec.provides == "stock":
            return self.is_wanted(workload)
        return (solution.name, workload.uuid) in self.pairs


@dataclass
class Plan:
    """Everything one run does."""

    definitions: list[DefinitionPlan] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Of each Definition whose reference does not return: why. Nothing can be measured against it."""

    @property
    def pair_count(self) -> int:
        """How many (solution, workload) pairs will get a trace; one with a tuned config counts once more for it."""
        return sum(
            item.takes_part(solution, workload, config)
            for item in self.definitions
            for solution in (*item.timed, *item.interpreted)
            for config in item.configs_of(solution)
            for workload in item.workloads
        )

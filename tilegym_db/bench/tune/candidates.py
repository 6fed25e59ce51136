"""Which configs to try, in which order, and which not again. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilegym_db.records import Config, Definition, Solution, Workload, axes_key
from tilegym_db.records.solution import config_id
from tilegym_db.store.tuning import TuningStep

__all__ = [
    "ConfigCandidate",
    "Neighbour",
    "SearchHistory",
    "candidate_order",
    "history_of",
    "is_faulty",
    "nearest_winners",
]

DEFAULTS = "the source's own defaults"


@dataclass(frozen=True)
class ConfigCandidate:
    """A config to try, and why it has its place in the order."""

    config: Config
    reason: str

    @property
    def id(self) -> str:
        """Of the config."""
        return config_id(self.config)


@dataclass(frozen=True)
class Neighbour:
    """What won on another Workload of the same Solution. ``distance`` is in log2 of the sizes."""

    config: Config
    workload: str
    distance: float


@dataclass(frozen=True)
class SearchHistory:
    """What earlier steps say about one pair: the config that leads, and those that need not be tried again, with why."""

    leader: Config | None = None
    settled: dict[str, str] = field(default_factory=dict)


def history_of(steps: Sequence[TuningStep], failed: Mapping[str, str] | None = None) -> SearchHistory:
    """Fold the steps of one pair, oldest first.

    A config that lost to one which has failed since did not lose to anything, and is open again.

    Args:
        steps: of one Solution, Workload and GPU.
        failed: config id -> status, of configs that have a trace which is no pass.
    """
    newest = {config_id(step.config): step for step in steps if step.outcome != "leads"}
    settled = {key: f"its trace says {status}" for key, status in (failed or {}).items()}
    settled |= {key: step.reason for key, step in newest.items() if step.outcome in ("compile", "failed")}
    broken = set(settled)
    for key, step in newest.items():
        if step.outcome in ("slower", "tie") and config_id(step.against or {}) not in broken:
            settled.setdefault(key, step.reason)
    leaders = [step.config for step in steps if step.outcome == "leads"]
    standing = [config for config in leaders if config_id(config) not in broken]
    return SearchHistory(standing[-1] if standing else None, settled)


def is_faulty(status: str) -> bool:
    """True for a verdict that speaks for every Workload: the store then takes back every earlier pass of that config.

    A config that does not compile for one shape, or does not support it, may be the fastest on another.
    """
    return status not in ("PASSED", "UNSUPPORTED", "COMPILE_ERROR")


def nearest_winners(
    definition: Definition, workload: Workload, workloads: Sequence[Workload], winners: Mapping[str, Config]
) -> list[Neighbour]:
    """What won on other Workloads: those of the same dtypes first, each group by distance.

    Args:
        definition: of all of them.
        workload: the one to tune; what won on it before comes first of all, at distance 0.
        workloads: every Workload of the Definition.
        winners: Workload uuid -> the config that won there.
    """
    dtypes = definition.bind_dtypes(workload.dtypes)
    found = []
    for other in workloads:
        if other.uuid in winners:
            name = "this workload" if other.uuid == workload.uuid else axes_key(other.axes)
            neighbour = Neighbour(winners[other.uuid], name, _distance(workload.axes, other.axes))
            found.append((definition.bind_dtypes(other.dtypes) != dtypes, neighbour))
    return [item for _, item in sorted(found, key=lambda pair: (pair[0], pair[1].distance, pair[1].workload))]


def candidate_order(
    solution: Solution, neighbours: Sequence[Neighbour], history: SearchHistory, seed: str
) -> list[ConfigCandidate]:
    """Everything that is left to try: the default config, what won nearby, then the rest of the space.

    Args:
        solution: declares the space.
        neighbours: nearest first. A config that is not in the space any more is left out.
        history: what is settled; the leader is not tried again either, others are tried against it.
        seed: of the order of the rest. The same seed gives the same order, so that a search that was cut short goes on.
    """
    space = {config_id(config): config for config in solution.configs()}
    rest = [ConfigCandidate(config, "the rest of the space, in random order") for config in space.values()]
    random.Random(seed).shuffle(rest)
    near = [
        ConfigCandidate(item.config, f"won on {item.workload}")
        for item in neighbours
        if config_id(item.config) in space
    ]
    skipped = {*history.settled, *([] if history.leader is None else [config_id(history.leader)])}
    ordered: dict[str, ConfigCandidate] = {}
    for candidate in (ConfigCandidate({}, DEFAULTS), *near, *rest):
        ordered.setdefault(candidate.id, candidate)
    return [candidate for key, candidate in ordered.items() if key not in skipped]


def _distance(this: Mapping[str, int], other: Mapping[str, int]) -> float:
    return math.hypot(*(math.log2(max(size, 1) / max(other[name], 1)) for name, size in this.items()))

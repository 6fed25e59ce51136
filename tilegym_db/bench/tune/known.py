"""What earlier searches on this GPU, and this one so far, found out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tilegym_db.bench.plan import DoneKey, PairKey
from tilegym_db.bench.run_setup import RunSetup
from tilegym_db.bench.tier_policy import SCREEN
from tilegym_db.bench.tune.candidates import SearchHistory, history_of, is_faulty
from tilegym_db.records import Config
from tilegym_db.records.solution import config_id
from tilegym_db.store.queries import done_keys, failed_screen, tuned_configs
from tilegym_db.store.tuning import TuningStep, read_tuning_steps

__all__ = ["Known"]


@dataclass
class Known:
    """What earlier runs found out on this GPU: steps, config id -> status of what failed, screens passed, winners."""

    steps: dict[PairKey, list[TuningStep]] = field(default_factory=dict)
    failed: dict[PairKey, dict[str, str]] = field(default_factory=dict)
    screened: set[DoneKey] = field(default_factory=set)
    winners: dict[PairKey, Config] = field(default_factory=dict)
    leaders: dict[PairKey, Config] = field(default_factory=dict)
    """What leads in this run and was not screened yet: no winner, but a good first guess for a neighbour."""

    @classmethod
    def read(cls, setup: RunSetup, *, again: bool) -> Known:
        """With ``again``, only what won: a search that starts anew still begins with that."""
        gpu = setup.machine.gpu
        with setup.store() as store:
            known = cls(winners=tuned_configs(store, gpu))
            if again:
                return known
            failed = failed_screen(store, gpu)
            known.screened = done_keys(store, gpu, SCREEN.tier) - set(failed)
        for (*pair, config), status in failed.items():
            known.failed.setdefault((pair[0], pair[1], pair[2]), {})[config] = status
        for step in read_tuning_steps(setup.home, gpu, setup.catalog):
            known.steps.setdefault(step.pair, []).append(step)
        return known

    def about(self, definitions: Collection[str]) -> Known:
        """What concerns these Definitions, by digest."""
        return Known(
            {pair: steps for pair, steps in self.steps.items() if pair[1] in definitions},
            {pair: failed for pair, failed in self.failed.items() if pair[1] in definitions},
            {key for key in self.screened if key[1] in definitions},
            {pair: config for pair, config in self.winners.items() if pair[1] in definitions},
        )

    def history(self, pair: PairKey) -> SearchHistory:
        """Of one pair. A config that fails on one Workload is not tried on any other of the same Definition."""
        failed = dict(self.failed.get(pair, {}))
        for other in {*self.failed, *self.steps}:
            if other != pair and other[:2] == pair[:2]:
                steps = self.steps.get(other, [])
                said = {config_id(step.config): step.status for step in steps if step.status is not None}
                found = {**self.failed.get(other, {}), **said}
                failed |= {config: status for config, status in found.items() if is_faulty(status)}
        return history_of(self.steps.get(pair, []), failed)

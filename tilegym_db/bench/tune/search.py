"""The search on one Solution and Workload: waves of configs, each verified at the workload's shape, then raced.

All configs share one worker, which changes its config between blocks: what is decided here is only which config is worth
a verdict. The verdict comes from ``bench``, in processes of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilegym_db.bench.buffer_pool import BufferPool
from tilegym_db.bench.contents import WorkloadContents
from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.interleaved import TimedCandidate, TimingBudget, time_interleaved
from tilegym_db.bench.machine import Machine, require_healthy
from tilegym_db.bench.runner import Runner
from tilegym_db.bench.tune.candidates import ConfigCandidate
from tilegym_db.bench.tune.compile_ahead import CompileAhead
from tilegym_db.bench.tune.halving import Loss, choose_winner, halve, reference_of
from tilegym_db.bench.verification import Verified
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Config
from tilegym_db.records.solution import config_id, spell_config
from tilegym_db.records.trace import Status
from tilegym_db.store.tuning import Outcome
from tilegym_db.verify.verifier import Failure

__all__ = ["Search", "SearchBudget", "Step"]


@dataclass(frozen=True)
class SearchBudget:
    """How a wave is raced: ``rungs`` are (rounds, candidates that go on afterwards); at the last one a winner is chosen."""

    wave: int = 8
    rungs: tuple[tuple[int, int], ...] = ((4, 4), (4, 2), (8, 2))
    max_block: int = 5
    block_us: float = 2000.0

    @classmethod
    def quick(cls) -> SearchBudget:
        """Enough to show the machinery."""
        return cls(wave=4, rungs=((4, 2), (6, 2)), max_block=3)


@dataclass(frozen=True)
class Step:
    """What became of one config; fields as in :class:`~tilegym_db.store.tuning.TuningStep`."""

    config: Config
    outcome: Outcome
    reason: str
    against: Config | None = None
    ratio: float | None = None
    status: Status | None = None


class _SharedWorker:
    """The one worker of a search, and whose turn it is."""

    def __init__(self, runner: Runner, pool: BufferPool) -> None:
        self.runner, self.pool = runner, pool
        self._turn: str | None = None

    def release(self) -> None:
        """It is nobody's turn: whoever comes next attaches anew."""
        self._turn = None

    def turn_to(self, config: Config) -> Failure | None:
        """Make the next calls run under a config, in a fresh process where the last config took it down."""
        if not self.runner.handle.usable:
            self._turn = None
            failure = self.runner.handle.load()
            if failure is not None:
                return failure
        if self._turn == config_id(config):
            return None
        self.runner.handle.config = config
        failure = self.runner.enter(self.pool)
        self._turn = config_id(config) if failure is None else None
        return failure


@dataclass
class _Lane:
    """One config in the race."""

    config: Config
    shared: _SharedWorker

    @property
    def name(self) -> str:
        return f"{self.shared.runner.solution.name}[{spell_config(self.config)}]"

    @property
    def device(self) -> str:
        return self.shared.runner.device

    @property
    def solution(self) -> SolutionFiles:
        return self.shared.runner.solution

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        return self.shared.turn_to(self.config) or self.shared.runner.time_block(slots)

    def check_timed_outputs(self, pool: BufferPool, verified: Verified, slots: Sequence[int]) -> Failure | None:
        return self.shared.runner.check_timed_outputs(pool, verified, slots)


@dataclass
class Search:
    """One Solution on one Workload.

    Args:
        runner: with a loaded worker; its config changes while the search runs.
        contents: of the Workload.
        pool: where everyone is timed.
        machine: the device.
        budget: how to race.
        seed: secret of the run; decides the order of blocks.
        leader: the config to beat, from an earlier search; None where there is none yet.
        step: called with what becomes of each config, the moment it is known.
        failed: called where the worker's verdict on a config is a failure, after ``step``.
    """

    runner: Runner
    contents: WorkloadContents
    pool: BufferPool
    machine: Machine
    budget: SearchBudget
    seed: int
    leader: Config | None
    step: Callable[[Step], None]
    failed: Callable[[Config, Failure], None]
    _shared: _SharedWorker = field(init=False)

    def __post_init__(self) -> None:
        self._shared = _SharedWorker(self.runner, self.pool)
        self._order = random.Random(self.seed)

    def run(self, candidates: Sequence[ConfigCandidate], ahead: CompileAhead, deadline: float) -> int:
        """Try configs wave by wave; returns how many are left for another time. At least one wave is tried.

        Args:
            candidates: in order.
            ahead: has begun to compile them, and goes on while a wave is raced.
            deadline: of ``time.monotonic()``.
        """
        left = len(candidates)
        for start in range(0, len(candidates), self.budget.wave):
            wave = candidates[start : start + self.budget.wave]
            refused = ahead.refused(wave)
            for candidate in wave:
                if candidate.id in refused:
                    self.step(Step(candidate.config, "compile", refused[candidate.id]))
            self._race_wave([candidate.config for candidate in wave if candidate.id not in refused])
            left -= len(wave)
            if time.monotonic() > deadline:
                break
        self.runner.leave()
        return left

    def _race_wave(self, configs: Sequence[Config]) -> None:
        racing: dict[str, TimedCandidate[_Lane]] = {}
        for config in configs if self.leader is None else (self.leader, *configs):
            candidate = self._admit(config)
            if candidate is not None:
                racing[config_id(config)] = candidate
        holder = config_id(self.leader or {})
        for rounds, keep in self.budget.rungs:
            if len(racing) > 1:
                self._time(racing, rounds)
            if len(racing) < 2:
                break
            times = _times(racing)
            holder = reference_of(times, holder)
            self._give_up(racing, halve(times, holder, keep))
        if racing:
            self._choose(racing, holder)

    def _admit(self, config: Config) -> TimedCandidate[_Lane] | None:
        """A config that is right at the workload's own shape."""
        self._shared.release()
        self.runner.handle.config = config
        outcome = self.runner.verification.own_shape(self.contents)
        if isinstance(outcome, Failure):
            self._reject(config, outcome)
            return None
        return TimedCandidate(_Lane(config, self._shared), outcome)

    def _time(self, racing: dict[str, TimedCandidate[_Lane]], rounds: int) -> None:
        budget = TimingBudget(
            min_rounds=rounds,
            max_rounds=rounds,
            min_samples=1,
            max_block=self.budget.max_block,
            block_us=self.budget.block_us,
        )
        with timing_lock(self.machine.device):
            time_interleaved(list(racing.values()), self.pool, budget, self._order.randrange(1 << 62))
        for key, candidate in list(racing.items()):
            if candidate.failure is not None:
                del racing[key]
                self._reject(candidate.runner.config, candidate.failure)

    def _choose(self, racing: dict[str, TimedCandidate[_Lane]], holder: str) -> None:
        winner, reason, losses = next(iter(racing)), "every other config of its wave is out", tuple[Loss, ...]()
        if len(racing) > 1:
            choice = choose_winner(_times(racing), holder)
            winner, reason, losses = choice.winner, choice.reason, choice.losses
        if self.leader is None or winner != config_id(self.leader):
            # First who leads, then who lost to it: a run that is killed in between tries the losers again, and no more.
            self.leader = racing[winner].runner.config
            self.step(Step(self.leader, "leads", reason))
        self._give_up(racing, losses)

    def _give_up(self, racing: dict[str, TimedCandidate[_Lane]], losses: Sequence[Loss]) -> None:
        configs = {key: candidate.runner.config for key, candidate in racing.items()}
        for loss in losses:
            self.step(
                Step(configs[loss.config], loss.outcome, loss.reason, configs[loss.against], round(loss.ratio, 5))
            )
            del racing[loss.config]

    def _reject(self, config: Config, failure: Failure) -> None:
        if config_id(config) == config_id(self.leader or {}):
            self.leader = None
        self.step(Step(config, "failed", f"{failure.status}: {failure.reason}", status=failure.status))
        self.failed(config, failure)
        if not self.runner.handle.usable:
            self.runner.handle.close()
            require_healthy(self.machine)


def _times(racing: dict[str, TimedCandidate[_Lane]]) -> dict[str, list[float]]:
    return {key: candidate.rounds for key, candidate in racing.items()}

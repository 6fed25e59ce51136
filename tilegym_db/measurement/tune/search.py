"""Search on one Solution and Workload: waves of configs are verified at the workload's shape and then raced.

All configs share one worker, which changes its config between blocks. The search only decides which config to screen; the
verdict comes from ``bench``, in separate processes.
"""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from tilegym_db.backends.aot import CompileJob, CompileResult, compile_many
from tilegym_db.backends.toolchains import TOOLCHAINS
from tilegym_db.catalog import SolutionFiles
from tilegym_db.measurement.machine import Machine, require_healthy, timing_lock
from tilegym_db.measurement.runner import BufferPool, Runner
from tilegym_db.measurement.timing import (
    TimedCandidate,
    TimingBudget,
    median,
    paired_ratio,
    time_interleaved,
    verdict_of,
)
from tilegym_db.records import Config, Definition, Solution, Workload, axes_key
from tilegym_db.records.solution import config_id, spell_config
from tilegym_db.records.verdicts import Status
from tilegym_db.store.side_files import Outcome, TuningStep
from tilegym_db.verification.expected import WorkloadContents
from tilegym_db.verification.session import VerifiedWorkload
from tilegym_db.verification.verifier import Failure


@dataclass(frozen=True)
class SearchBudget:
    """Limits of a race. ``rungs`` are (rounds, candidates that go on afterwards); the last rung chooses a winner."""

    wave: int = 8
    rungs: tuple[tuple[int, int], ...] = ((4, 4), (4, 2), (8, 2))
    max_block: int = 5
    block_us: float = 2000.0

    @classmethod
    def quick(cls) -> SearchBudget:
        """Return a small budget that still uses every part of the search."""
        return cls(wave=4, rungs=((4, 2), (6, 2)), max_block=3)


@dataclass(frozen=True)
class Step:
    """The outcome of one config; fields as in :class:`~tilegym_db.store.side_files.TuningStep`."""

    config: Config
    outcome: Outcome
    reason: str
    against: Config | None = None
    ratio: float | None = None
    status: Status | None = None


class _SharedWorker:
    """The worker of a search, and the config that it runs now."""

    def __init__(self, runner: Runner, pool: BufferPool) -> None:
        self.runner, self.pool = runner, pool
        self._turn: str | None = None

    def release(self) -> None:
        """Forget the current config, so that the next use attaches again."""
        self._turn = None

    def turn_to(self, config: Config) -> Failure | None:
        """Switch the next calls to a config. Start a fresh process if the last config ended it."""
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

    def check_timed_outputs(self, pool: BufferPool, verified: VerifiedWorkload, slots: Sequence[int]) -> Failure | None:
        return self.shared.runner.check_timed_outputs(pool, verified, slots)


@dataclass
class Search:
    """Search for one Solution on one Workload.

    Args:
        runner: a runner with a loaded worker; its config changes during the search.
        leader: the config to beat, from an earlier search; None without one.
        step: called with the outcome of each config as soon as it is known.
        failed: called after ``step`` if a config fails in the worker.
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
        """Try configs wave by wave, at least one wave; return the number of configs that were not tried.

        No wave begins after ``deadline``, a value of ``time.monotonic()``.
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
        """Verify a config at the workload's own shape; return it as a candidate, or None if it fails."""
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
            # Record the leader before the losers: a run that is killed in between then only tries the losers again.
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


# ---- candidates -----------------------------------------------------------------------------------
# Choose the configs to try, in order, without those already settled. Pure.

DEFAULTS = "the source's own defaults"


@dataclass(frozen=True)
class ConfigCandidate:
    """A config to try, and the reason for its place in the order."""

    config: Config
    reason: str

    @property
    def id(self) -> str:
        """The id of the config."""
        return config_id(self.config)


@dataclass(frozen=True)
class Neighbour:
    """The winner on another Workload of the same Solution. ``distance`` is in log2 of the sizes."""

    config: Config
    workload: str
    distance: float


@dataclass(frozen=True)
class SearchHistory:
    """Results of earlier steps for one pair: the leading config, and the configs not to try again, with reasons."""

    leader: Config | None = None
    settled: dict[str, str] = field(default_factory=dict)


def history_of(steps: Sequence[TuningStep], failed: Mapping[str, str] | None = None) -> SearchHistory:
    """Return the history of one pair from its steps, oldest first, and the status of configs (by id) without a pass.

    A config that lost to another one which has failed since is tried again.
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
    """Return True for a status that holds for every Workload: the store then revokes all earlier passes of the config.

    A config that does not compile for one shape, or does not support it, may be the fastest on another.
    """
    return status not in ("PASSED", "UNSUPPORTED", "COMPILE_ERROR")


def nearest_winners(
    definition: Definition, workload: Workload, workloads: Sequence[Workload], winners: Mapping[str, Config]
) -> list[Neighbour]:
    """Return the winners on other Workloads: those with the same dtypes first, each group by distance.

    An earlier winner of the Workload itself comes first, at distance 0. ``winners`` maps uuids to configs.
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
    solution: Solution,
    neighbours: Sequence[Neighbour],
    history: SearchHistory,
    seed: str,
    first: Sequence[ConfigCandidate] = (),
) -> list[ConfigCandidate]:
    """Return the configs left to try: the default config, winners nearby, those asked for, then the rest of the space.

    Args:
        seed: seed of the order of the rest. The same seed gives the same order, so an interrupted search can be resumed.
        first: configs of the space that are tried before the rest, such as those of another project.
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
    for candidate in (ConfigCandidate({}, DEFAULTS), *near, *first, *rest):
        ordered.setdefault(candidate.id, candidate)
    return [candidate for key, candidate in ordered.items() if key not in skipped]


def _distance(this: Mapping[str, int], other: Mapping[str, int]) -> float:
    return math.hypot(*(math.log2(max(size, 1) / max(other[name], 1)) for name, size in this.items()))


# ---- halving --------------------------------------------------------------------------------------
# Decide which configs stay in the race after some rounds, and which one wins. Pure.
#
# All configs are timed in the same rounds. Two configs are compared by the ratios of their block medians within rounds,
# which cancels common drift.

NOISE = 0.01
"""Relative differences up to this value are noise: the config is not changed for them."""

Rounds = Mapping[str, Sequence[float]]
"""Config id -> median microseconds of its block in each round. All configs took part in the same rounds."""


@dataclass(frozen=True)
class Loss:
    """A config that left the race. ``ratio`` is the time of ``against`` over its own time, so below 1 it was slower."""

    config: str
    outcome: Literal["slower", "tie"]
    against: str
    ratio: float
    reason: str


@dataclass(frozen=True)
class Choice:
    """The config that leads now, with the reason, and the outcome of the others."""

    winner: str
    reason: str
    losses: tuple[Loss, ...]


def reference_of(rounds: Rounds, current_best: str | None) -> str:
    """Return the config to compare with: the current best if it is in the race, else the one with the lowest median."""
    if current_best in rounds:
        return str(current_best)
    return min(rounds, key=lambda key: (median(rounds[key]), key))


def halve(rounds: Rounds, current_best: str, keep: int) -> tuple[Loss, ...]:
    """Return the configs that leave the race now. The current best never leaves, since the others are compared with it.

    Configs that are slower than the leader beyond noise leave, and of the rest all but the ``keep`` fastest.
    """
    ranked = _ranked(rounds, current_best)
    leader = ranked[0]
    losses = []
    candidates = [key for key in ranked if key != current_best]
    for place, key in enumerate(candidates):
        if key == leader:
            continue
        ratio = paired_ratio(rounds[key], rounds[leader])
        if verdict_of(ratio, NOISE) == "slower":
            losses.append(Loss(key, "slower", leader, ratio.median, f"{ratio.median:.2f}x as fast as the leader"))
        elif place >= keep:
            reason = f"place {place + 1} of {len(candidates)}, {keep} go on"
            losses.append(Loss(key, "slower", leader, ratio.median, reason))
    return tuple(losses)


def choose_winner(rounds: Rounds, current_best: str) -> Choice:
    """Return the fastest candidate that beats the current best by more than noise; without one, the current best stays."""
    ranked = _ranked(rounds, current_best)
    winner, reason = current_best, "no other config is faster by more than noise"
    for key in ranked:
        ratio = paired_ratio(rounds[key], rounds[current_best])
        if key != current_best and verdict_of(ratio, NOISE) == "faster":
            winner = key
            reason = f"{ratio.median:.2f}x as fast as the one before (99% interval {ratio.low:.2f} to {ratio.high:.2f})"
            break
    losses = []
    for key in ranked:
        if key == winner:
            continue
        ratio = paired_ratio(rounds[key], rounds[winner])
        if verdict_of(ratio, NOISE) == "slower":
            losses.append(Loss(key, "slower", winner, ratio.median, f"{ratio.median:.2f}x as fast as the winner"))
        else:
            stays = "which was there before" if winner == current_best else "which surely beats the one before"
            losses.append(Loss(key, "tie", winner, ratio.median, f"inside noise of the winner, {stays}"))
    return Choice(winner, reason, tuple(losses))


def _ranked(rounds: Rounds, current_best: str) -> list[str]:
    """Return the configs, fastest first by the median ratio to the current best, which comes first among equals."""
    speeds = {key: paired_ratio(times, rounds[current_best]).median for key, times in rounds.items()}
    return sorted(speeds, key=lambda key: (-speeds[key], key != current_best, key))


# ---- compile ahead --------------------------------------------------------------------------------
# Compile configs in processes without a GPU, in the order of the search, while the GPU times others.


class _StoppedError(Exception):
    """Stop of a compilation whose results are no longer needed."""


class CompileAhead:
    """Compilation of one Solution for one Workload and target. As a context manager, it ends the compilers on exit.

    If a config cannot be compiled without a GPU (a processor, Python, an unknown target), it counts as compiled: the worker
    will compile it.
    """

    def __init__(self, definition: Definition, solution: SolutionFiles, workload: Workload, target: str) -> None:
        self._definition, self._solution, self._workload, self._target = definition, solution, workload, target
        self._useful = target in TOOLCHAINS[solution.record.spec.language].targets
        self._stopped = threading.Event()
        self._results: dict[str, Future[CompileResult]] = {}
        self._thread: threading.Thread | None = None

    def start(self, candidates: Sequence[ConfigCandidate]) -> None:
        """Start to compile the candidates in order."""
        if not self._useful or not candidates:
            return
        jobs = [
            CompileJob(self._definition, self._solution, self._workload, self._target, candidate.config)
            for candidate in candidates
        ]
        self._results = {candidate.id: Future() for candidate in candidates}
        self._thread = threading.Thread(target=self._build, args=(jobs,), daemon=True)
        self._thread.start()

    def refused(self, wave: Sequence[ConfigCandidate]) -> dict[str, str]:
        """Return the compiler's message for each config of a wave that does not compile, by config id.

        Wait until all of them were tried.
        """
        waiting = [(candidate.id, self._results[candidate.id]) for candidate in wave if candidate.id in self._results]
        reasons = {key: refusal(result.result()) for key, result in waiting}
        return {key: reason for key, reason in reasons.items() if reason is not None}

    def _build(self, jobs: list[CompileJob]) -> None:
        try:
            compile_many(jobs, self._take)
        except BaseException as error:  # a thread boundary: the waiting thread raises it again
            for result in self._results.values():
                if not result.done():
                    result.set_exception(error)

    def _take(self, job: CompileJob, result: CompileResult) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        self._results[config_id(job.config)].set_result(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()


def refusal(result: CompileResult) -> str | None:
    """Return the reason if a config does not compile, else None. A missing toolchain does not count."""
    if result.status != "failed":
        return None
    lines = [line.strip() for line in result.log.splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if re.search(r"error\b", line, re.IGNORECASE)]
    return (errors or lines or ["the compiler said nothing"])[-1][:300]

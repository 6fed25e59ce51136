"""Times verified runners against each other: blocks in random order, round after round, until the medians settle.

Every runner has its own worker, so none can touch another's clock or memory; being timed in the same rounds, any two of
them can be compared by the ratios of their block medians, which cancels the drift that both see.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tilegym_db.bench.buffer_pool import BufferPool
from tilegym_db.bench.clocks import ClockReading, ClockWatch
from tilegym_db.bench.statistics import Interval, median, median_interval, paired_ratio
from tilegym_db.bench.verification import Verified
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records.trace import PROCESS_NOISE_US, Comparison, Performance
from tilegym_db.verify.verifier import Failure

__all__ = ["TimedCandidate", "TimedRunner", "TimingBudget", "time_interleaved"]

CHECKED_ROUNDS = 2
"""How many secretly chosen rounds are checked, besides the one after the contents change."""


@dataclass(frozen=True)
class TimingBudget:
    """How long to measure. Times in seconds of wall clock for one workload, all runners together."""

    min_rounds: int = 12
    max_rounds: int = 40
    min_samples: int = 30
    max_block: int = 10
    block_us: float = 4000.0
    budget_s: float = 4.0
    half_width: float = 0.005
    resolution_us: float = 0.1
    """Below this, an interval is as narrow as the clocks allow."""

    @classmethod
    def screening(cls) -> TimingBudget:
        """Enough to say what is worth a promotion: what lies within the noise between two processes is not told apart."""
        return cls(block_us=2000.0, half_width=0.01, resolution_us=PROCESS_NOISE_US)

    @classmethod
    def quick(cls) -> TimingBudget:
        """Enough to show the machinery, with wider intervals."""
        return cls(min_rounds=8, max_rounds=10, min_samples=8, max_block=4, budget_s=1.5)


@dataclass(frozen=True)
class Block:
    """What one block of calls took, in microseconds a call: on the device, and on the host from call to return."""

    device: list[float]
    host: list[float]


class TimedRunner(Protocol):
    """What can be timed: a :class:`~tilegym_db.bench.runner.Runner`, or one config of one that is timed under several."""

    @property
    def name(self) -> str:
        """Unlike that of any other in the same timing."""

    @property
    def solution(self) -> SolutionFiles:
        """What is timed."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:<n>``."""

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        """(device, host) microseconds of one call on each slot, in order."""

    def check_timed_outputs(self, pool: BufferPool, verified: Verified, slots: Sequence[int]) -> Failure | None:
        """Why what the timed calls left in their slots is not what the verified calls gave, or None where it is."""


P = TypeVar("P", bound=TimedRunner)


@dataclass
class TimedCandidate(Generic[P]):
    """One runner in one interleaved timing, with what its calls took in microseconds.

    ``rounds`` are the medians of its blocks, one a round: calls of one block follow each other and resemble each other,
    so it is the rounds that say how sure a time is. ``samples`` and ``host`` are all calls of all rounds. ``current_best`` marks
    what the others have to beat.
    """

    runner: P
    verified: Verified
    block: int = 1
    rounds: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    failure: Failure | None = None
    current_best: bool = False

    def keep(self, block: Block) -> None:
        """Count a block in."""
        self.rounds.append(median(block.device))
        self.samples += block.device
        self.host += block.host

    @property
    def latency(self) -> Interval:
        """The median of all calls, with the 99% interval of the median of the rounds."""
        interval, middle = median_interval(self.rounds), median(self.samples)
        return Interval(middle, min(interval.low, middle), max(interval.high, middle))

    def order(self, slots: int, generator: random.Random) -> list[int]:
        """A random sequence of slots for the next block, so that no call sees the addresses of the one before."""
        sequence = [generator.randrange(slots)]
        while len(sequence) < self.block:
            sequence.append((sequence[-1] + 1 + generator.randrange(max(slots - 1, 1))) % slots)
        return sequence


def time_interleaved(
    candidates: Sequence[TimedCandidate[Any]],
    pool: BufferPool,
    budget: TimingBudget,
    seed: int,
    clocks: ClockWatch | None = None,
) -> dict[str, Performance | Failure]:
    """Time every candidate; runner name -> performance with comparisons against each baseline, or why it failed.

    A round during which heat or power delivery slowed the device counts for nobody, or its runners would no longer be
    paired; the checks of its blocks count all the same.

    Args:
        candidates: each has entered the pool, or carries the failure to do so.
        pool: where all of them are timed.
        budget: how long.
        seed: secret of this run; decides the order of everything, and which blocks are checked.
        clocks: watches the device; without it, nothing is known of its clocks.
    """
    generator = random.Random(seed)
    begun = time.monotonic()
    for candidate in candidates:
        if candidate.failure is None:
            _warm_up(candidate, pool, budget, generator)
    # Work that is done once per address and then skipped leaves stale memory after a refill that it cannot foresee.
    refill = generator.randrange(1, budget.min_rounds)
    checked = {refill, *generator.sample(range(budget.min_rounds), CHECKED_ROUNDS)}
    kept = 0
    for number in range(budget.max_rounds):
        if number == refill:
            pool.fill()
        running = [candidate for candidate in candidates if candidate.failure is None]
        generator.shuffle(running)
        kept += _time_round(running, pool, generator, clocks, checked=number in checked)
        if kept >= budget.min_rounds and (_settled(running, budget) or time.monotonic() > begun + budget.budget_s):
            break
    clock = clocks.reading(begun) if clocks is not None else ClockReading()
    if kept < budget.min_rounds:
        slowed = Failure("UNSUPPORTED", _too_slow_a_device(kept, budget, clock))
        for candidate in candidates:
            candidate.failure = candidate.failure or slowed
    finished = [candidate for candidate in candidates if candidate.failure is None]
    results: dict[str, Performance | Failure] = {e.runner.name: e.failure for e in candidates if e.failure is not None}
    for candidate in finished:
        results[candidate.runner.name] = _performance(candidate, finished, clock)
    return results


def _too_slow_a_device(kept: int, budget: TimingBudget, clock: ClockReading) -> str:
    return (
        f"the device slowed down ({', '.join(clock.slowdowns)}) in {budget.max_rounds - kept} of {budget.max_rounds} "
        "rounds, so no time of it can be believed. Let it cool down, and repeat the command with --again"
    )


def _warm_up(candidate: TimedCandidate[Any], pool: BufferPool, budget: TimingBudget, generator: random.Random) -> None:
    """Two untimed blocks; the second tells how many calls make a block of the wanted length."""
    for _ in range(2):
        candidate.block = 3
        order = candidate.order(pool.slots, generator)
        pool.prepare(order, poison=False)
        outcome = candidate.runner.time_block(order)
        if isinstance(outcome, Failure):
            candidate.failure = outcome
            return
        latency_us = median(outcome[0])
    wanted = max(1, min(budget.max_block, int(budget.block_us / latency_us)))
    candidate.block = max(wanted, -(-budget.min_samples // budget.max_rounds))


def _time_round(
    running: Sequence[TimedCandidate[Any]],
    pool: BufferPool,
    generator: random.Random,
    clocks: ClockWatch | None,
    *,
    checked: bool,
) -> bool:
    """One block of every candidate, in the order given; False where the device slowed down, so that none was kept."""
    begun = time.monotonic()
    blocks = [(candidate, _time_block(candidate, pool, generator, checked=checked)) for candidate in running]
    if clocks is not None:
        clocks.look()
        if clocks.reading(begun).throttled:
            return False
    for candidate, block in blocks:
        if block is not None:
            candidate.keep(block)
    return True


def _time_block(
    candidate: TimedCandidate[Any], pool: BufferPool, generator: random.Random, *, checked: bool
) -> Block | None:
    """One block; None where the candidate failed."""
    order = candidate.order(pool.slots, generator)
    # Other runners write to the same outputs: a block that finds their results there could leave them.
    pool.prepare(order, poison=True, byte=None if checked else generator.randrange(256))
    outcome = candidate.runner.time_block(order)
    if isinstance(outcome, Failure):
        candidate.failure = outcome
        return None
    if checked:
        candidate.failure = candidate.runner.check_timed_outputs(pool, candidate.verified, sorted(set(order)))
    return Block(*outcome)


def _settled(candidates: Sequence[TimedCandidate[Any]], budget: TimingBudget) -> bool:
    return all(_is_settled(candidate, budget) for candidate in candidates)


def _is_settled(candidate: TimedCandidate[Any], budget: TimingBudget) -> bool:
    if len(candidate.samples) < budget.min_samples:
        return False
    interval = candidate.latency
    return interval.half_width <= max(budget.half_width, budget.resolution_us / interval.median)


def _performance(
    candidate: TimedCandidate[Any], finished: Sequence[TimedCandidate[Any]], clock: ClockReading
) -> Performance:
    interval = candidate.latency
    on_gpu = candidate.runner.device != "cpu"
    return Performance(
        latency_us=round(interval.median, 4),
        ci_low_us=round(interval.low, 4),
        ci_high_us=round(interval.high, 4),
        samples=len(candidate.samples),
        host_us=round(median(candidate.host), 3),
        cold_l2=on_gpu,
        timer="events" if on_gpu else "wall",
        comparisons=tuple(
            _compare(candidate, other, provides)
            for other in finished
            if other is not candidate
            for provides in _stands_for(other)
        ),
        clock_mhz=clock.sm_mhz,
        throttled=clock.throttled,
    )


def _stands_for(candidate: TimedCandidate[Any]) -> list[str]:
    """What others are compared with it as: the code that it provides, if any, and what they have to beat."""
    provides = candidate.runner.solution.record.spec.provides
    return [*([provides] if provides is not None else []), *(["incumbent"] if candidate.current_best else [])]


def _compare(candidate: TimedCandidate[Any], other: TimedCandidate[Any], provides: str) -> Comparison:
    shared: Mapping[str, list[float]] = {"this": candidate.rounds, "other": other.rounds}
    count = min(len(rounds) for rounds in shared.values())
    ratio = paired_ratio(shared["this"][:count], shared["other"][:count])
    return Comparison.against(
        other.runner.name,
        provides,
        ratio=round(ratio.median, 5),
        ci_low=round(ratio.low, 5),
        ci_high=round(ratio.high, 5),
    )

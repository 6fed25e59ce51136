"""Times verified members against each other: blocks in random order, round after round, until the medians settle.

Every member has its own worker, so none can touch another's clock or memory; being timed in the same rounds, any two of
them can be compared by the ratios of their block medians, which cancels the drift that both see.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tilegym_db.bench.clocks import ClockReading, ClockWatch
from tilegym_db.bench.member import Verified
from tilegym_db.bench.stage import Stage
from tilegym_db.bench.statistics import Interval, median, median_interval, paired_ratio
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records.trace import PROCESS_NOISE_US, Comparison, Performance
from tilegym_db.verify.verifier import Failure

__all__ = ["Effort", "Entrant", "Player", "run_tournament"]

CHECKED_ROUNDS = 2
"""How many secretly chosen rounds are checked, besides the one after the contents change."""


@dataclass(frozen=True)
class Effort:
    """How long to measure. Times in seconds of wall clock for one workload, all members together."""

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
    def screening(cls) -> Effort:
        """Enough to say what is worth a promotion: what lies within the noise between two processes is not told apart."""
        return cls(block_us=2000.0, half_width=0.01, resolution_us=PROCESS_NOISE_US)

    @classmethod
    def quick(cls) -> Effort:
        """Enough to show the machinery, with wider intervals."""
        return cls(min_rounds=8, max_rounds=10, min_samples=8, max_block=4, budget_s=1.5)


@dataclass(frozen=True)
class Block:
    """What one block of calls took, in microseconds a call: on the device, and on the host from call to return."""

    device: list[float]
    host: list[float]


class Player(Protocol):
    """What can be timed: a :class:`~tilegym_db.bench.member.Member`, or one config of one that plays under several."""

    @property
    def name(self) -> str:
        """Unlike that of any other in the tournament."""

    @property
    def solution(self) -> SolutionFiles:
        """What is timed."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:<n>``."""

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        """(device, host) microseconds of one call on each slot, in order."""

    def check_timed_outputs(self, stage: Stage, verified: Verified, slots: Sequence[int]) -> Failure | None:
        """Why what the timed calls left in their slots is not what the verified calls gave, or None where it is."""


P = TypeVar("P", bound=Player)


@dataclass
class Entrant(Generic[P]):
    """One member in one tournament, with what its calls took in microseconds.

    ``rounds`` are the medians of its blocks, one a round: calls of one block follow each other and resemble each other,
    so it is the rounds that say how sure a time is. ``samples`` and ``host`` are all calls of all rounds. ``incumbent`` marks
    whom the others have to beat.
    """

    member: P
    verified: Verified
    block: int = 1
    rounds: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    failure: Failure | None = None
    incumbent: bool = False

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


def run_tournament(
    entrants: Sequence[Entrant[Any]], stage: Stage, effort: Effort, seed: int, clocks: ClockWatch | None = None
) -> dict[str, Performance | Failure]:
    """Time every entrant; member name -> performance with comparisons against each baseline, or why it failed.

    A round during which heat or power delivery slowed the device counts for nobody, or its members would no longer be
    paired; the checks of its blocks count all the same.

    Args:
        entrants: each has entered the stage, or carries the failure to do so.
        stage: where all of them are timed.
        effort: how long.
        seed: secret of this run; decides the order of everything, and which blocks are checked.
        clocks: watches the device; without it, nothing is known of its clocks.
    """
    generator = random.Random(seed)
    begun = time.monotonic()
    for entrant in entrants:
        if entrant.failure is None:
            _warm_up(entrant, stage, effort, generator)
    # Work that is done once per address and then skipped leaves stale memory after a refill that it cannot foresee.
    refill = generator.randrange(1, effort.min_rounds)
    checked = {refill, *generator.sample(range(effort.min_rounds), CHECKED_ROUNDS)}
    kept = 0
    for number in range(effort.max_rounds):
        if number == refill:
            stage.fill()
        running = [entrant for entrant in entrants if entrant.failure is None]
        generator.shuffle(running)
        kept += _play_round(running, stage, generator, clocks, checked=number in checked)
        if kept >= effort.min_rounds and (_settled(running, effort) or time.monotonic() > begun + effort.budget_s):
            break
    clock = clocks.reading(begun) if clocks is not None else ClockReading()
    if kept < effort.min_rounds:
        slowed = Failure("UNSUPPORTED", _too_slow_a_device(kept, effort, clock))
        for entrant in entrants:
            entrant.failure = entrant.failure or slowed
    finished = [entrant for entrant in entrants if entrant.failure is None]
    results: dict[str, Performance | Failure] = {e.member.name: e.failure for e in entrants if e.failure is not None}
    for entrant in finished:
        results[entrant.member.name] = _performance(entrant, finished, clock)
    return results


def _too_slow_a_device(kept: int, effort: Effort, clock: ClockReading) -> str:
    return (
        f"the device slowed down ({', '.join(clock.slowdowns)}) in {effort.max_rounds - kept} of {effort.max_rounds} "
        "rounds, so no time of it can be believed. Let it cool down, and repeat the command with --again"
    )


def _warm_up(entrant: Entrant[Any], stage: Stage, effort: Effort, generator: random.Random) -> None:
    """Two untimed blocks; the second tells how many calls make a block of the wanted length."""
    for _ in range(2):
        entrant.block = 3
        order = entrant.order(stage.slots, generator)
        stage.prepare(order, poison=False)
        outcome = entrant.member.time_block(order)
        if isinstance(outcome, Failure):
            entrant.failure = outcome
            return
        latency_us = median(outcome[0])
    wanted = max(1, min(effort.max_block, int(effort.block_us / latency_us)))
    entrant.block = max(wanted, -(-effort.min_samples // effort.max_rounds))


def _play_round(
    running: Sequence[Entrant[Any]], stage: Stage, generator: random.Random, clocks: ClockWatch | None, *, checked: bool
) -> bool:
    """One block of every entrant, in the order given; False where the device slowed down, so that none was kept."""
    begun = time.monotonic()
    blocks = [(entrant, _play(entrant, stage, generator, checked=checked)) for entrant in running]
    if clocks is not None:
        clocks.look()
        if clocks.reading(begun).throttled:
            return False
    for entrant, block in blocks:
        if block is not None:
            entrant.keep(block)
    return True


def _play(entrant: Entrant[Any], stage: Stage, generator: random.Random, *, checked: bool) -> Block | None:
    """One block; None where the entrant failed."""
    order = entrant.order(stage.slots, generator)
    # Other members write to the same outputs, so a block that is checked starts from garbage.
    stage.prepare(order, poison=checked)
    outcome = entrant.member.time_block(order)
    if isinstance(outcome, Failure):
        entrant.failure = outcome
        return None
    if checked:
        entrant.failure = entrant.member.check_timed_outputs(stage, entrant.verified, sorted(set(order)))
    return Block(*outcome)


def _settled(entrants: Sequence[Entrant[Any]], effort: Effort) -> bool:
    return all(_is_settled(entrant, effort) for entrant in entrants)


def _is_settled(entrant: Entrant[Any], effort: Effort) -> bool:
    if len(entrant.samples) < effort.min_samples:
        return False
    interval = entrant.latency
    return interval.half_width <= max(effort.half_width, effort.resolution_us / interval.median)


def _performance(entrant: Entrant[Any], finished: Sequence[Entrant[Any]], clock: ClockReading) -> Performance:
    interval = entrant.latency
    on_gpu = entrant.member.device != "cpu"
    return Performance(
        latency_us=round(interval.median, 4),
        ci_low_us=round(interval.low, 4),
        ci_high_us=round(interval.high, 4),
        samples=len(entrant.samples),
        host_us=round(median(entrant.host), 3),
        cold_l2=on_gpu,
        timer="events" if on_gpu else "wall",
        comparisons=tuple(
            _compare(entrant, other, provides)
            for other in finished
            if other is not entrant
            for provides in _stands_for(other)
        ),
        clock_mhz=clock.sm_mhz,
        throttled=clock.throttled,
    )


def _stands_for(entrant: Entrant[Any]) -> list[str]:
    """What others are compared with it as: the code that it provides, if any, and whom they have to beat."""
    provides = entrant.member.solution.record.spec.provides
    return [*([provides] if provides is not None else []), *(["incumbent"] if entrant.incumbent else [])]


def _compare(entrant: Entrant[Any], other: Entrant[Any], provides: str) -> Comparison:
    shared: Mapping[str, list[float]] = {"this": entrant.rounds, "other": other.rounds}
    count = min(len(rounds) for rounds in shared.values())
    ratio = paired_ratio(shared["this"][:count], shared["other"][:count])
    return Comparison.against(
        other.member.name,
        provides,
        ratio=round(ratio.median, 5),
        ci_low=round(ratio.low, 5),
        ci_high=round(ratio.high, 5),
    )

"""Times verified runners against each other: blocks in random order, round after round, until the medians settle.

Every runner has its own worker, so none can touch another's clock or memory; being timed in the same rounds, any two of
them can be compared by the ratios of their block medians, which cancels the drift that both see.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType, TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from tilegym_db.bench.runner import BufferPool
from tilegym_db.catalog import SolutionFiles
from tilegym_db.driver import started_library
from tilegym_db.records.trace import PROCESS_NOISE_US, Comparison, Performance
from tilegym_db.verify.session import Verified
from tilegym_db.verify.verifier import Failure

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
        """Return why what the timed calls left in their slots is not what the verified calls gave, or None if it is."""


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
        """Return a random sequence of slots for the next block, so that no call sees the addresses of the one before."""
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
    """Return one block of every candidate, in the order given; False if the device slowed down, so that none was
    kept.
    """
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
    """Return one block; None if the candidate failed."""
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


# ---- statistics -----------------------------------------------------------------------------------
# Medians with exact confidence intervals, and ratios from interleaved rounds. Pure Python, no distribution assumed.
#
# The interval of a median comes from order statistics: with n samples, the k-th smallest and k-th largest enclose the
# median with probability 1 - 2 P(Binomial(n, 1/2) < k). Unlike a bootstrap it needs no random numbers and is exact
# for any distribution (``docs/decisions/timing.md``, 0002).

Verdict = Literal["faster", "slower", "tie"]

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Interval:
    """A median with the bounds of its confidence interval, in the samples' own unit."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval relative to the median; no unit."""
        return (self.high - self.low) / (2 * self.median) if self.median else math.inf


def median(samples: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@lru_cache(maxsize=4096)
def _rank(count: int) -> int:
    """Return how many samples may be left out on each side at :data:`CONFIDENCE`; 0 keeps the extremes."""
    total = 0.0
    for k in range(count // 2 + 1):
        total += math.comb(count, k) * 0.5**count if count < 1000 else 0.0
        if count >= 1000:
            break
        if 2 * total > 1 - CONFIDENCE:
            return max(k - 1, 0)
    # The normal approximation of the binomial; exact enough from a thousand samples on.
    return max(int(count / 2 - 2.5758 * math.sqrt(count) / 2) - 1, 0)


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median with its 99% interval; with fewer than eight samples the interval is their whole range.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("a median needs at least one sample")
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return Interval(median(ordered), ordered[rank], ordered[-1 - rank])


def paired_ratio(this: Sequence[float], other: Sequence[float]) -> Interval:
    """``other / this`` over interleaved rounds (above 1: ``this`` is faster), with its 99% interval.

    Args:
        this: one time per round.
        other: the other's time in the same rounds; pairing cancels drift that both see.
    """
    logs = median_interval([math.log(b / a) for a, b in zip(this, other, strict=True)])
    return Interval(math.exp(logs.median), math.exp(logs.low), math.exp(logs.high))


def verdict_of(ratio: Interval, noise: float = 0.0) -> Verdict:
    """What a ratio of times proves: ``faster`` or ``slower`` where the whole interval is beyond the noise, else a ``tie``.

    Args:
        ratio: ``other / this`` with its interval, as :func:`paired_ratio` gives it; above 1, this is faster.
        noise: relative differences up to this count for nothing, however sure they are: what pairing does not cancel
            (0.02 where a kernel replaces stock code, more in a session whose control kernels moved).

    A tie is no draw of lots: whoever held the place before keeps it. The verdict of the reversed ratio is the reverse.
    """
    if noise < 0:
        raise ValueError(f"noise is a relative difference >= 0, not {noise}")
    if ratio.low > 1 + noise:
        return "faster"
    return "slower" if ratio.high < 1 / (1 + noise) else "tie"


# ---- clocks ---------------------------------------------------------------------------------------
# What the GPU's clocks did while something was measured. Read-only: no setting is ever changed.
#
# NVIDIA's management library tells it, through NVIDIA's own bindings (nvidia-ml-py): one call takes microseconds.
# PyTorch's ``torch.cuda.clock_rate`` goes through the same bindings, starts the library anew for each value, and
# knows no reasons.

# nvmlClocksEventReasons: bit -> name, and whether it means that the GPU runs slower than it should.
EVENT_REASONS: dict[int, tuple[str, bool]] = {
    0x1: ("gpu idle", False),
    0x2: ("application clocks setting", False),
    0x4: ("software power cap", False),  # normal for large matrix products: that is what the GPU can sustain
    0x8: ("hardware slowdown", True),
    0x10: ("sync boost", False),
    0x20: ("software thermal slowdown", True),
    0x40: ("hardware thermal slowdown", True),
    0x80: ("hardware power brake", True),
    0x100: ("display clock setting", False),
}
IDLE = 0x1


@dataclass(frozen=True)
class ClockSample:
    """The state at one moment of ``time.monotonic()``; None is what the driver would not say."""

    at: float
    sm_mhz: int | None
    reasons: int | None


@dataclass(frozen=True)
class ClockReading:
    """A stretch of time: median SM clock, whether heat or power delivery slowed the GPU, and every reason seen."""

    sm_mhz: int | None = None
    throttled: bool | None = None
    reasons: tuple[str, ...] = ()

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """Those of the reasons that mean heat or power delivery."""
        slowing = {name for name, slows in EVENT_REASONS.values() if slows}
        return tuple(reason for reason in self.reasons if reason in slowing)


def summarise_clocks(samples: Iterable[ClockSample]) -> ClockReading:
    """Return one reading of many samples. While the GPU idles its clock says nothing, so busy moments count where there
    are any.
    """
    taken = list(samples)
    masks = [sample.reasons for sample in taken if sample.reasons is not None]
    busy = [sample for sample in taken if not (sample.reasons or 0) & IDLE]
    clocks = [sample.sm_mhz for sample in busy or taken if sample.sm_mhz is not None]
    seen = 0
    for mask in masks:
        seen |= mask
    known = {bit: reason for bit, reason in EVENT_REASONS.items() if seen & bit}
    return ClockReading(
        sm_mhz=round(median(clocks)) if clocks else None,
        throttled=any(slows for _, slows in known.values()) if masks else None,
        reasons=tuple(name for name, _ in known.values()),
    )


class Nvml:
    """The management library, started. What the driver does not tell is None."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    @classmethod
    def open(cls) -> Self | None:
        """Return the library, started; None if there is no driver, or one that does not answer."""
        library = started_library()
        return None if library is None else cls(library)

    def close(self) -> None:
        """Every successful :meth:`open` is owed one."""
        self._library.nvmlShutdown()

    def device(self, uuid: str) -> Any:
        """Return a handle by the UUID that CUDA gives, since the two libraries number devices differently; None for no
        device.
        """
        names = (prefix + uuid.removeprefix(prefix) for prefix in ("GPU-", "MIG-"))
        handles = (self._told(self._library.nvmlDeviceGetHandleByUUID, name) for name in names)
        return next((handle for handle in handles if handle is not None), None)

    def sample(self, device: Any) -> ClockSample:
        """Return the SM clock and the reasons why it is not higher, now."""
        clock = self._told(self._library.nvmlDeviceGetClockInfo, device, self._library.NVML_CLOCK_SM)
        reasons = self._told(self._library.nvmlDeviceGetCurrentClocksEventReasons, device)
        if reasons is None:  # the name of the same before driver 535; the meaning of the bits did not change
            reasons = self._told(self._library.nvmlDeviceGetCurrentClocksThrottleReasons, device)
        return ClockSample(time.monotonic(), clock, reasons)

    def _told(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._library.NVMLError:
            return None


class ClockWatch:
    """Samples the clocks of one device in a thread of this process while the ``with`` block runs.

    Use it in the process that supervises, not in the one that times: there, nothing but the driver is shared with the
    calls that are measured. On a CPU, or where no driver answers, every reading is empty.
    """

    def __init__(self, device: str, interval_s: float = 0.1, uuid: str | None = None) -> None:
        """``device`` is torch's name of it: ``cuda:0``, or ``cpu``; PyTorch says its ``uuid`` if it is not given."""
        self._uuid = uuid or _uuid_of(device)
        self._interval_s = interval_s
        self._nvml: Nvml | None = None
        self._handle: Any = None
        self._samples: list[ClockSample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._nvml = Nvml.open() if self._uuid is not None else None
        if self._nvml is not None and self._uuid is not None:
            self._handle = self._nvml.device(self._uuid)
            if self._handle is not None:
                self.look()
                self._thread = threading.Thread(target=self._watch, name="clock-watch", daemon=True)
                self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._nvml is not None:
            self._nvml.close()

    def reading(self, since: float | None = None) -> ClockReading:
        """What was seen so far, or since a moment of ``time.monotonic()``. Also answers after the block has ended."""
        return summarise_clocks(sample for sample in tuple(self._samples) if since is None or sample.at >= since)

    def look(self) -> None:
        """Take a sample now, inside the ``with`` block: what is shorter than the interval would else go unseen."""
        if self._nvml is not None and self._handle is not None:
            self._samples.append(self._nvml.sample(self._handle))

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()
        self.look()


def _uuid_of(device: str) -> str | None:
    if device == "cpu":
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)

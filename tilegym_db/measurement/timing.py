"""Interleaved timing of verified runners: blocks in random order, round after round, until the medians settle.

Every runner has its own worker, so runners cannot change each other's clock or memory. All runners are timed in the same
rounds. So two of them can be compared by the ratios of their block medians, which cancels common drift. The module also has
the statistics and the sampling of GPU clocks.
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

from tilegym_db.catalog import SolutionFiles
from tilegym_db.driver import started_library
from tilegym_db.measurement.runner import BufferPool
from tilegym_db.records.trace import PROCESS_NOISE_US, Comparison, Performance
from tilegym_db.verification.session import VerifiedWorkload
from tilegym_db.verification.verifier import Failure

CHECKED_ROUNDS = 2
"""Number of secretly chosen rounds whose outputs are checked, in addition to the one after the contents change."""


@dataclass(frozen=True)
class TimingBudget:
    """Limits of a measurement. ``budget_s`` is wall-clock time for one workload and all its runners."""

    min_rounds: int = 12
    max_rounds: int = 40
    min_samples: int = 30
    max_block: int = 10
    block_us: float = 4000.0
    budget_s: float = 4.0
    half_width: float = 0.005
    resolution_us: float = 0.1
    """An interval below this width is as narrow as the clocks allow."""

    @classmethod
    def screening(cls) -> TimingBudget:
        """Return a budget that suffices to choose candidates for verification.

        It does not resolve differences within the noise between two processes.
        """
        return cls(block_us=2000.0, half_width=0.01, resolution_us=PROCESS_NOISE_US)

    @classmethod
    def quick(cls) -> TimingBudget:
        """Return a small budget with wider intervals, for a first look."""
        return cls(min_rounds=8, max_rounds=10, min_samples=8, max_block=4, budget_s=1.5)


@dataclass(frozen=True)
class Block:
    """Times of one block of calls, in microseconds per call: on the device, and on the host from call to return."""

    device: list[float]
    host: list[float]


class TimedRunner(Protocol):
    """Interface of a timed object: a :class:`~tilegym_db.measurement.runner.Runner`, or one of several configs of a runner."""

    @property
    def name(self) -> str:
        """Name, unique within one timing."""

    @property
    def solution(self) -> SolutionFiles:
        """The Solution that is timed."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:<n>``."""

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        """Return the (device, host) microseconds of one call on each slot, in order."""

    def check_timed_outputs(self, pool: BufferPool, verified: VerifiedWorkload, slots: Sequence[int]) -> Failure | None:
        """Return a failure if the outputs of the timed calls differ from those of the verified calls, or None."""


P = TypeVar("P", bound=TimedRunner)


@dataclass
class TimedCandidate(Generic[P]):
    """One runner in one interleaved timing, with the times of its calls in microseconds.

    ``rounds`` are the medians of its blocks, one per round. Calls of one block are correlated, so the confidence interval
    comes from the rounds. ``samples`` and ``host`` are all calls of all rounds. ``current_best`` marks the candidate to
    beat.
    """

    runner: P
    verified: VerifiedWorkload
    block: int = 1
    rounds: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    failure: Failure | None = None
    current_best: bool = False

    def keep(self, block: Block) -> None:
        """Add the times of a block."""
        self.rounds.append(median(block.device))
        self.samples += block.device
        self.host += block.host

    def forget(self) -> None:
        """Remove all times, before the timing is repeated."""
        for times in (self.rounds, self.samples, self.host):
            times.clear()

    @property
    def latency(self) -> Interval:
        """The median of all calls, with the 99% interval of the median of the rounds."""
        interval, middle = median_interval(self.rounds), median(self.samples)
        return Interval(middle, min(interval.low, middle), max(interval.high, middle))

    def order(self, slots: int, generator: random.Random) -> list[int]:
        """Return a random sequence of slots for the next block. No two calls in a row use the same addresses."""
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
    """Time every candidate. Return per runner name its performance with comparisons against each baseline, or its failure.

    If heat or power delivery slowed the device in a round, the round counts for no runner, since its times would not be
    paired. The output checks of its blocks still count.

    Args:
        seed: secret of this run; it decides all orders, and which blocks are checked.
        clocks: samples the clocks of the device; without it they are unknown.
    """
    generator = random.Random(seed)
    begun = time.monotonic()
    for candidate in candidates:
        if candidate.failure is None:
            _warm_up(candidate, pool, budget, generator)
    # Refill at a secret round: a kernel that caches work per address then leaves stale outputs.
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
        "rounds, so its times cannot be trusted. Let it cool down, and repeat the command with --force"
    )


def _warm_up(candidate: TimedCandidate[Any], pool: BufferPool, budget: TimingBudget, generator: random.Random) -> None:
    """Run two untimed blocks; the second one decides how many calls make a block of the wanted length."""
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
    """Time one block of every candidate, in the given order. Return False if the device slowed down and no block was kept."""
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
    """Time one block; return None if the candidate failed."""
    order = candidate.order(pool.slots, generator)
    # Overwrite the outputs: all runners share them, and a block could leave correct results of another runner.
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
    """Return the roles of a candidate in comparisons: its kind of baseline, if any, and ``incumbent`` for the current best."""
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
# Medians with exact confidence intervals, and ratios from interleaved rounds. Pure Python; no distribution is assumed.
#
# The interval of a median comes from order statistics: with n samples, the k-th smallest and k-th largest enclose the
# median with probability 1 - 2 P(Binomial(n, 1/2) < k). Unlike a bootstrap it needs no random numbers, and it is exact for
# any distribution (``docs/decisions/timing.md``, 0002).

Verdict = Literal["faster", "slower", "tie"]

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Interval:
    """A median with its confidence interval, in the unit of the samples."""

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
    """Return how many samples to drop on each side at :data:`CONFIDENCE`; 0 keeps the extremes."""
    total = 0.0
    for k in range(count // 2 + 1):
        total += math.comb(count, k) * 0.5**count if count < 1000 else 0.0
        if count >= 1000:
            break
        if 2 * total > 1 - CONFIDENCE:
            return max(k - 1, 0)
    # Use the normal approximation of the binomial; it is accurate enough from a thousand samples on.
    return max(int(count / 2 - 2.5758 * math.sqrt(count) / 2) - 1, 0)


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median with its 99% interval; with fewer than eight samples the interval is their whole range."""
    if not samples:
        raise ValueError("a median needs at least one sample")
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return Interval(median(ordered), ordered[rank], ordered[-1 - rank])


def paired_ratio(this: Sequence[float], other: Sequence[float]) -> Interval:
    """Return ``other / this`` over interleaved rounds (above 1: ``this`` is faster), with its 99% interval.

    Both have one time per round, and pairing cancels common drift.
    """
    logs = median_interval([math.log(b / a) for a, b in zip(this, other, strict=True)])
    return Interval(math.exp(logs.median), math.exp(logs.low), math.exp(logs.high))


def verdict_of(ratio: Interval, noise: float = 0.0) -> Verdict:
    """Return ``faster`` or ``slower`` if the whole interval of a ratio is beyond the noise, else ``tie``.

    At a tie, the current holder of the place keeps it. The verdict of the reversed ratio is the reverse. ``noise`` covers errors
    that pairing does not cancel: 0.02 if a kernel replaces stock code, more in a session whose control kernels moved.
    """
    if noise < 0:
        raise ValueError(f"noise is a relative difference >= 0, not {noise}")
    if ratio.low > 1 + noise:
        return "faster"
    return "slower" if ratio.high < 1 / (1 + noise) else "tie"


# ---- clocks ---------------------------------------------------------------------------------------
# The GPU's clocks during a measurement. Read-only: settings are never changed.
#
# The data comes from NVIDIA's management library, through NVIDIA's own bindings (nvidia-ml-py); one call takes
# microseconds. PyTorch's ``torch.cuda.clock_rate`` uses the same bindings, but starts the library for each value and gives
# no reasons.

# nvmlClocksEventReasons: bit -> name, and true if the GPU runs slower than it should.
EVENT_REASONS: dict[int, tuple[str, bool]] = {
    0x1: ("gpu idle", False),
    0x2: ("application clocks setting", False),
    0x4: ("software power cap", False),  # normal for large matrix products: the limit that the GPU can sustain
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
    """The state at one value of ``time.monotonic()``. None means that the driver gave no value."""

    at: float
    sm_mhz: int | None
    reasons: int | None


@dataclass(frozen=True)
class ClockReading:
    """A period of time: the median SM clock, true if heat or power delivery slowed the GPU, and all reasons seen."""

    sm_mhz: int | None = None
    throttled: bool | None = None
    reasons: tuple[str, ...] = ()

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """The reasons that mean heat or power delivery."""
        slowing = {name for name, slows in EVENT_REASONS.values() if slows}
        return tuple(reason for reason in self.reasons if reason in slowing)


def summarise_clocks(samples: Iterable[ClockSample]) -> ClockReading:
    """Return one reading of many samples.

    The clock of an idle GPU says nothing, so only busy samples count if there are any.
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
    """The management library, started. Values that the driver does not give are None."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    @classmethod
    def open(cls) -> Self | None:
        """Start the library and return it; None if there is no driver, or it does not answer."""
        library = started_library()
        return None if library is None else cls(library)

    def close(self) -> None:
        """Shut the library down, once per successful :meth:`open`."""
        self._library.nvmlShutdown()

    def device(self, uuid: str) -> Any:
        """Return a handle for the UUID that CUDA gives; None for no device. The two libraries number devices differently."""
        names = (prefix + uuid.removeprefix(prefix) for prefix in ("GPU-", "MIG-"))
        handles = (self._value_of(self._library.nvmlDeviceGetHandleByUUID, name) for name in names)
        return next((handle for handle in handles if handle is not None), None)

    def sample(self, device: Any) -> ClockSample:
        """Return the current SM clock, and the reasons why it is not higher."""
        clock = self._value_of(self._library.nvmlDeviceGetClockInfo, device, self._library.NVML_CLOCK_SM)
        reasons = self._value_of(self._library.nvmlDeviceGetCurrentClocksEventReasons, device)
        if reasons is None:  # the old name before driver 535; the meaning of the bits did not change
            reasons = self._value_of(self._library.nvmlDeviceGetCurrentClocksThrottleReasons, device)
        return ClockSample(time.monotonic(), clock, reasons)

    def _value_of(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._library.NVMLError:
            return None


class ClockWatch:
    """Thread that samples the clocks of one device while the ``with`` block runs.

    Use it in the supervising process, not in the timed one: it then shares only the driver with the measured calls. On a
    CPU, or if no driver answers, every reading is empty.
    """

    def __init__(self, device: str, interval_s: float = 0.1, uuid: str | None = None) -> None:
        """Watch ``device``, torch's name of it: ``cuda:0``, or ``cpu``. By default PyTorch gives the ``uuid``."""
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
        """Return the reading so far, or since a value of ``time.monotonic()``. This also works after the block has ended."""
        return summarise_clocks(sample for sample in tuple(self._samples) if since is None or sample.at >= since)

    def look(self) -> None:
        """Take a sample now, inside the ``with`` block. A period shorter than the interval might have no sample otherwise."""
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

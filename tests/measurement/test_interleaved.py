"""The order of play and what is made of it, with runners whose times are known. Real runners: ``test_runner.py``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegym_db.measurement.timing import (
    Block,
    ClockReading,
    TimedCandidate,
    TimingBudget,
    median_interval,
    time_interleaved,
)
from tilegym_db.verification.verifier import Failure

SLOTS = 8


@dataclass
class Clock:
    """What every runner sees slowing down: each call takes a little longer than the one before."""

    drift: float = 1.0

    def tick(self) -> float:
        self.drift *= 1.001
        return self.drift


@dataclass
class Simulated:
    """A runner that takes ``latency_us``, times the clock's drift."""

    name: str
    latency_us: float
    clock: Clock = field(default_factory=Clock)
    provides: str | None = None
    fails_at: int = -1
    noise: float = 0.0
    block_noise: float = 0.0
    device: str = "cpu"
    blocks: list[list[int]] = field(default_factory=list)
    checked: list[list[int]] = field(default_factory=list)
    wrong_when_checked: bool = False

    @property
    def solution(self) -> Any:
        return SimpleNamespace(record=SimpleNamespace(spec=SimpleNamespace(provides=self.provides)))

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        self.blocks.append(list(slots))
        if len(self.blocks) == self.fails_at:
            return Failure("RUNTIME_ERROR", "died")
        generator = random.Random(len(self.blocks))
        block_us = self.latency_us * generator.uniform(1, 1 + self.block_noise)
        times = [block_us * self.clock.tick() * generator.uniform(1, 1 + self.noise) for _ in slots]
        return times, [1.0] * len(slots)

    def check_timed_outputs(self, pool: object, verified: object, slots: Sequence[int]) -> Failure | None:
        self.checked.append(list(slots))
        return Failure("REJECTED", "another result") if self.wrong_when_checked else None


@dataclass
class SimulatedPool:
    """Remembers what was asked of it."""

    slots: int = SLOTS
    fills: int = 0
    poisoned: list[list[int]] = field(default_factory=list)
    """What was filled with random garbage, which only the checked blocks need."""
    refilled: int = 0

    def fill(self) -> None:
        self.fills += 1

    def prepare(self, slots: Sequence[int], *, poison: bool, byte: int | None = None) -> None:
        self.refilled += poison
        if poison and byte is None:
            self.poisoned.append(sorted(set(slots)))


@dataclass
class HotDevice:
    """Clocks of a device that is slowed down by heat during the given rounds, counted from 0."""

    hot_rounds: set[int] = field(default_factory=set)
    looks: int = 0

    def look(self) -> None:
        self.looks += 1

    def reading(self, since: float) -> ClockReading:
        hot = self.looks - 1 in self.hot_rounds
        return ClockReading(1980, hot, ("gpu idle", "hardware thermal slowdown") if hot else ())


def play(
    *runners: Simulated,
    budget: TimingBudget | None = None,
    seed: int = 1,
    pool: SimulatedPool | None = None,
    clocks: HotDevice | None = None,
    current_best: str = "",
) -> dict[str, Any]:
    verified: Any = None
    candidates = [TimedCandidate(runner, verified, current_best=runner.name == current_best) for runner in runners]  # type: ignore[arg-type]
    return time_interleaved(
        candidates,
        pool or SimulatedPool(),  # type: ignore[arg-type]
        budget or TimingBudget(),
        seed,
        clocks,  # type: ignore[arg-type]
    )


def test_a_ratio_survives_a_clock_that_slows_down_all_the_time():
    clock = Clock()
    results = play(Simulated("stock", 200, clock, "stock"), Simulated("kernel", 100, clock))
    (comparison,) = results["kernel"].comparisons
    assert (comparison.other, comparison.provides) == ("stock", "stock")
    assert comparison.ratio == pytest.approx(2, rel=0.02)
    assert 1.95 < comparison.ci_low <= comparison.ci_high < 2.05
    spread = results["kernel"].ci_high_us / results["kernel"].ci_low_us
    assert spread > comparison.ci_high / comparison.ci_low


def test_only_baselines_are_compared_with():
    runners = [
        Simulated("stock", 3, provides="stock"),
        Simulated("library", 2, provides="library"),
        Simulated("a", 1),
        Simulated("b", 1),
    ]
    results = play(*runners)
    assert [comparison.other for comparison in results["a"].comparisons] == ["stock", "library"]
    assert [comparison.other for comparison in results["stock"].comparisons] == ["library"]


@pytest.mark.parametrize(("provides", "as_what"), [(None, ["incumbent"]), ("compile", ["compile", "incumbent"])])
def test_all_but_the_current_best_are_compared_with_it(provides, as_what):
    runners = [Simulated("stock", 3, provides="stock"), Simulated("best", 2, provides=provides), Simulated("new", 1)]
    results = play(*runners, current_best="best")
    found = [(comparison.other, comparison.provides) for comparison in results["new"].comparisons]
    assert found == [("stock", "stock"), *(("best", what) for what in as_what)]
    assert results["new"].comparisons[-1].ratio == pytest.approx(2, rel=0.02)
    assert [comparison.other for comparison in results["best"].comparisons] == ["stock"]


def test_a_runner_that_fails_leaves_the_others_in_play():
    results = play(Simulated("stock", 2, provides="stock"), Simulated("dies", 1, fails_at=7), Simulated("kernel", 1))
    assert results["dies"] == Failure("RUNTIME_ERROR", "died")
    assert [comparison.other for comparison in results["kernel"].comparisons] == ["stock"]


def test_steady_times_end_rounds_early_and_noisy_ones_late():
    budget = TimingBudget(min_rounds=12, max_rounds=40, budget_s=60)
    steady, noisy = Simulated("steady", 1000), Simulated("noisy", 1000, noise=1.0)
    steady.clock.tick = noisy.clock.tick = lambda: 1.0  # type: ignore[method-assign]
    assert play(steady, budget=budget)["steady"].samples < play(noisy, budget=budget)["noisy"].samples
    assert len(noisy.blocks) == budget.max_rounds + 2  # and the warm-up


def test_noisy_times_end_with_the_budget():
    noisy = Simulated("noisy", 1000, noise=1.0)
    play(noisy, budget=TimingBudget(min_rounds=5, max_rounds=10_000, budget_s=0.0))
    assert len(noisy.blocks) == 5 + 2


def test_calls_of_one_round_do_not_count_as_independent():
    """Every call of a round shares what that round was like: many calls a round make the interval no narrower."""
    widths = []
    for block_us in (1.0, 100_000.0):
        runner = Simulated("kernel", 1000, block_noise=0.3)
        runner.clock.tick = lambda: 1.0  # type: ignore[method-assign]
        budget = TimingBudget(min_rounds=20, max_rounds=20, min_samples=1, max_block=50, block_us=block_us)
        found = play(runner, budget=budget)["kernel"]
        widths.append((found.samples, found.ci_high_us - found.ci_low_us))
    (few, narrow), (many, wide) = widths
    assert (few, many) == (20, 20 * 50)
    assert wide == pytest.approx(narrow)


@given(st.lists(st.lists(st.floats(1, 1e4), min_size=1, max_size=5), min_size=1, max_size=30))
def test_interval_is_that_of_the_rounds_and_holds_the_latency(blocks):
    candidate = TimedCandidate(None, None)  # type: ignore[arg-type]
    for block in blocks:
        candidate.keep(Block(block, [1.0] * len(block)))
    of_rounds, latency = median_interval(candidate.rounds), candidate.latency
    assert latency.low <= latency.median <= latency.high
    assert latency.low <= of_rounds.low
    assert of_rounds.high <= latency.high


def test_rounds_on_a_hot_device_do_not_count_and_are_repeated():
    budget = TimingBudget(min_rounds=12, max_rounds=40, min_samples=1, max_block=1, half_width=1.0)
    stock, kernel, clocks = Simulated("stock", 200, provides="stock"), Simulated("kernel", 100), HotDevice({0, 5, 6})
    results = play(stock, kernel, budget=budget, clocks=clocks)
    assert clocks.looks == budget.min_rounds + 3
    assert results["kernel"].samples == results["stock"].samples == budget.min_rounds
    assert results["kernel"].clock_mhz == 1980
    assert results["kernel"].comparisons[0].ratio == pytest.approx(2, rel=0.02)


def test_a_device_that_stays_hot_gives_no_times_and_says_why():
    budget = TimingBudget(min_rounds=12, max_rounds=14)
    results = play(Simulated("kernel", 100), budget=budget, clocks=HotDevice(set(range(100))))
    assert results["kernel"].status == "UNSUPPORTED"
    assert "slowed down (hardware thermal slowdown) in 14 of 14 rounds" in results["kernel"].reason


def test_a_cheat_is_caught_on_a_hot_device_too():
    cheat = Simulated("cheat", 1, wrong_when_checked=True)
    results = play(cheat, budget=TimingBudget(min_rounds=12, max_rounds=14), clocks=HotDevice(set(range(100))))
    assert results["cheat"] == Failure("REJECTED", "another result")


@given(seed=st.integers(0, 2**62))
def test_secret_blocks_start_from_garbage_with_a_new_content_set(seed):
    runner, pool = Simulated("kernel", 500), SimulatedPool()
    play(runner, seed=seed, pool=pool)
    assert pool.fills == 1
    assert 2 <= len(runner.checked) <= 3
    assert pool.poisoned == runner.checked
    played = [sorted(set(block)) for block in runner.blocks[2:]]
    assert all(slots in played for slots in runner.checked)


def test_a_timed_call_that_left_another_result_ends_the_runner():
    results = play(Simulated("stock", 2, provides="stock"), Simulated("cheat", 1, wrong_when_checked=True))
    assert results["cheat"] == Failure("REJECTED", "another result")
    assert results["stock"].latency_us > 0


@given(seed=st.integers(0, 2**62), slots=st.integers(2, SLOTS), block=st.integers(1, 20))
def test_no_call_gets_the_addresses_of_the_one_before(seed, slots, block):
    order = TimedCandidate(None, None, block).order(slots, random.Random(seed))  # type: ignore[arg-type]
    assert len(order) == block
    assert set(order) <= set(range(slots))
    assert all(one != two for one, two in itertools.pairwise(order))


def test_a_single_slot_is_played_again_and_again():
    assert TimedCandidate(None, None, 3).order(1, random.Random(0)) == [0, 0, 0]  # type: ignore[arg-type]

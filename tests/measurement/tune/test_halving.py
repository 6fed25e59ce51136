"""The configs that stay in the race and the one that wins it, from times that are known. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tilegym_db.measurement.tune.search import choose_winner, halve, reference_of

LATENCIES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.floats(5, 500), min_size=2, max_size=9)


def rounds(latencies: dict[str, float], count: int = 16, noise: float = 0.0, seed: int = 0) -> dict[str, list[float]]:
    """Return paired times under a clock that slows down by a third, each with separate noise."""
    generator = random.Random(seed)
    drift = [1 + round / (3 * count) for round in range(count)]
    return {
        key: [latency * slow * generator.uniform(1, 1 + noise) for slow in drift] for key, latency in latencies.items()
    }


def lost(losses: Sequence) -> dict[str, tuple[str, str]]:
    return {loss.config: (loss.outcome, loss.against) for loss in losses}


def test_config_surely_slower_than_the_leader_leaves_early():
    losses = halve(rounds({"default": 10, "fast": 5, "slow": 20}, 4), "default", keep=4)
    assert lost(losses) == {"slow": ("slower", "fast")}
    assert losses[0].reason == "0.25x as fast as the leader"
    assert losses[0].ratio == 0.25


def test_of_equals_only_so_many_go_on_and_the_reason_says_so():
    equal = {"default": 10.0, **{f"c{number}": 10 + number / 1000 for number in range(6)}}
    losses = halve(rounds(equal, 4), "default", keep=2)
    assert sorted(lost(losses)) == ["c2", "c3", "c4", "c5"]
    assert losses[0].reason == "place 3 of 6, 2 go on"


@given(LATENCIES, st.integers(1, 4), st.floats(0, 0.2))
def test_halving_keeps_the_best_and_the_leader_within_the_limit(latencies, keep, noise):
    times = rounds(latencies, 8, noise)
    current_best = min(latencies)
    dropped = set(lost(halve(times, current_best, keep)))
    assert current_best not in dropped
    assert len(set(latencies) - dropped - {current_best}) <= keep
    assert all(loss.against not in dropped for loss in halve(times, current_best, keep))


def test_fastest_config_wins_if_it_beats_the_best_beyond_noise():
    choice = choose_winner(rounds({"default": 10, "good": 9, "best": 8}), "default")
    assert choice.winner == "best"
    assert choice.reason == "1.25x as fast as the one before (99% interval 1.25 to 1.25)"
    assert lost(choice.losses) == {"default": ("slower", "best"), "good": ("slower", "best")}


def test_a_tie_inside_noise_stays_with_the_current_best():
    choice = choose_winner(rounds({"default": 10, "hardly": 9.95, "slow": 11}), "default")
    assert choice.winner == "default"
    assert choice.reason == "no other config is faster by more than noise"
    assert lost(choice.losses) == {"hardly": ("tie", "default"), "slow": ("slower", "default")}
    assert choice.losses[0].reason == "inside noise of the winner, which was there before"


def test_a_config_that_is_only_sometimes_fast_does_not_win():
    times = rounds({"default": 10, "steady": 9.5})
    times["erratic"] = [4.0, 30.0, 4.1, 31.0] * 4
    times["lucky"] = [5.0] * 9 + [20.0] * 7
    assert choose_winner(times, "default").winner == "steady"


def test_equal_configs_rarely_unseat_each_other():
    """At 99% confidence and beyond 1% of noise; a quarter of the runs would do so if the faster median won."""
    changed = sum(
        choose_winner(rounds({"default": 10, "same": 10}, noise=0.05, seed=seed), "default").winner != "default"
        for seed in range(300)
    )
    assert changed <= 3


@given(LATENCIES)
def test_everyone_but_the_winner_has_a_loss_with_a_reason(latencies):
    choice = choose_winner(rounds(latencies, 8), min(latencies))
    assert {choice.winner, *lost(choice.losses)} == set(latencies)
    assert all(loss.reason and loss.against == choice.winner for loss in choice.losses)


def test_lowest_median_is_the_standard_without_a_current_best():
    times = rounds({"a": 10, "b": 9})
    assert reference_of(times, "a") == "a"
    assert reference_of(times, "gone") == reference_of(times, None) == "b"

"""Which configs stay in the race after some rounds, and which one wins. Pure: times in, decisions with reasons out.

All configs are timed in the same rounds, so any two are compared by the ratios of their block medians within rounds,
which cancels the drift that both see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tilegym_db.bench.statistics import median, paired_ratio, verdict_of

__all__ = ["NOISE", "Choice", "Loss", "choose_winner", "halve", "reference_of"]

NOISE = 0.01
"""Relative differences up to this decide nothing: a config is not changed for them."""

Rounds = Mapping[str, Sequence[float]]
"""Config id -> median microseconds of its block in each round; all took part in the same rounds."""


@dataclass(frozen=True)
class Loss:
    """A config that is out. ``ratio`` is the time of ``against`` over its own, so below 1 it was slower."""

    config: str
    outcome: Literal["slower", "tie"]
    against: str
    ratio: float
    reason: str


@dataclass(frozen=True)
class Choice:
    """The config that leads from here on, why, and what became of the others."""

    winner: str
    reason: str
    losses: tuple[Loss, ...]


def reference_of(rounds: Rounds, current_best: str | None) -> str:
    """Whom to compare with: the current best where it is in the race, else the one with the lowest median."""
    if current_best in rounds:
        return str(current_best)
    return min(rounds, key=lambda key: (median(rounds[key]), key))


def halve(rounds: Rounds, current_best: str, keep: int) -> tuple[Loss, ...]:
    """Who leaves the race now; the current best never does, since the others are compared with it.

    Out are those that are slower than the leader beyond noise, and of the rest all but the ``keep`` fastest.

    Args:
        rounds: of everyone still in the race.
        current_best: the config to beat.
        keep: how many candidates go on.
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
    """The fastest candidate that beats the current best by more than noise; where none does, the current best stays."""
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
    """Fastest first, by the median ratio to the current best, which is first among equals."""
    speeds = {key: paired_ratio(times, rounds[current_best]).median for key, times in rounds.items()}
    return sorted(speeds, key=lambda key: (-speeds[key], key != current_best, key))

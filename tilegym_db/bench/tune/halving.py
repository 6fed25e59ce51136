"""Which configs stay in the race after some rounds, and which one wins. Pure: times in, decisions with reasons out.

All configs are timed in the same rounds, so any two are compared by the ratios of their block medians within rounds,
which cancels the drift that both see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tilegym_db.bench.statistics import median, paired_ratio, verdict_of

__all__ = ["NOISE", "Choice", "Loss", "choose_winner", "halve", "yardstick_of"]

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


def yardstick_of(rounds: Rounds, incumbent: str | None) -> str:
    """Whom to compare with: the incumbent where it is in the race, else the one with the lowest median."""
    if incumbent in rounds:
        return str(incumbent)
    return min(rounds, key=lambda key: (median(rounds[key]), key))


def halve(rounds: Rounds, incumbent: str, keep: int) -> tuple[Loss, ...]:
    """Who leaves the race now; the incumbent never does, since the others are compared with it.

    Out are those that are slower than the leader beyond noise, and of the rest all but the ``keep`` fastest.

    Args:
        rounds: of everyone still in the race.
        incumbent: the config to beat.
        keep: how many challengers go on.
    """
    ranked = _ranked(rounds, incumbent)
    leader = ranked[0]
    losses = []
    challengers = [key for key in ranked if key != incumbent]
    for place, key in enumerate(challengers):
        if key == leader:
            continue
        ratio = paired_ratio(rounds[key], rounds[leader])
        if verdict_of(ratio, NOISE) == "slower":
            losses.append(Loss(key, "slower", leader, ratio.median, f"{ratio.median:.2f}x as fast as the leader"))
        elif place >= keep:
            reason = f"place {place + 1} of {len(challengers)}, {keep} go on"
            losses.append(Loss(key, "slower", leader, ratio.median, reason))
    return tuple(losses)


def choose_winner(rounds: Rounds, incumbent: str) -> Choice:
    """The fastest challenger that beats the incumbent by more than noise; where none does, the incumbent stays."""
    ranked = _ranked(rounds, incumbent)
    winner, reason = incumbent, "no other config is faster by more than noise"
    for key in ranked:
        ratio = paired_ratio(rounds[key], rounds[incumbent])
        if key != incumbent and verdict_of(ratio, NOISE) == "faster":
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
            stays = "which was there before" if winner == incumbent else "which surely beats the one before"
            losses.append(Loss(key, "tie", winner, ratio.median, f"inside noise of the winner, {stays}"))
    return Choice(winner, reason, tuple(losses))


def _ranked(rounds: Rounds, incumbent: str) -> list[str]:
    """Fastest first, by the median ratio to the incumbent, which is first among equals."""
    speeds = {key: paired_ratio(times, rounds[incumbent]).median for key, times in rounds.items()}
    return sorted(speeds, key=lambda key: (-speeds[key], key != incumbent, key))

"""The verdict and time of others beside ours, and how often the two disagree. Foreign figures are shown, never ranked with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilegym_db.integrations.interchange.judging import NOT_RUN, Judgement
from tilegym_db.store.imported import DataSet

__all__ = ["ComparedPair", "compared", "summary"]


@dataclass(frozen=True)
class ComparedPair:
    """One Solution on one Workload: what the data set says, and what was found here."""

    definition: str
    solution: str
    workload: str
    foreign_status: str | None
    """The newest line of the data set; None where it has none."""
    foreign_hardware: str | None
    foreign_latency_us: float | None
    ours: Judgement | None

    @property
    def agreement(self) -> str:
        """``agree``, ``we fail it``, ``they fail it``, or why there is nothing to compare."""
        if self.ours is None:
            return "not judged here"
        if self.ours.status == NOT_RUN:
            return "not run here"
        if self.foreign_status is None:
            return "no foreign verdict"
        they, we = self.foreign_status == "PASSED", self.ours.status == "PASSED"
        return "agree" if they == we else "we fail it" if they else "they fail it"


def compared(found: DataSet, judgements: Sequence[Judgement]) -> list[ComparedPair]:
    """Every pair that either side has a verdict on, in the order of the data set."""
    foreign: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for item in found.of_kind("trace"):
        foreign[item.definition, item.record["solution"], item.name] = item.record[
            "evaluation"
        ]  # lines are in time order
    ours = {(item.definition, item.solution, item.workload): item for item in judgements}
    pairs = []
    for key in dict.fromkeys([*foreign, *ours]):
        evaluation = foreign.get(key)
        performance = (evaluation or {}).get("performance") or {}
        latency = performance.get("latency_ms") or None
        pairs.append(
            ComparedPair(
                *key,
                foreign_status=evaluation["status"] if evaluation else None,
                foreign_hardware=evaluation["environment"]["hardware"] if evaluation else None,
                foreign_latency_us=latency * 1e3 if latency else None,
                ours=ours.get(key),
            )
        )
    return pairs


def summary(pairs: Sequence[ComparedPair]) -> dict[str, int]:
    """How many pairs agree, and in which way the others do not."""
    return dict(Counter(pair.agreement for pair in pairs).most_common())

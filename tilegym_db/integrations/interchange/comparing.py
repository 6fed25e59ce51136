"""The verdict and time of others beside ours, and how often the two disagree. Foreign figures are shown, never ranked with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilegym_db.catalog.reader import CatalogReader
from tilegym_db.integrations.interchange.adapt import native_name
from tilegym_db.integrations.interchange.drafts import imported_tag, origin_tag
from tilegym_db.integrations.interchange.judgements import NOT_RUN, Judgement
from tilegym_db.records import Trace
from tilegym_db.store.imported import DataSet

__all__ = ["ComparedPair", "PairKey", "compared", "promoted_pairs", "summary"]

PairKey = tuple[str, str, str]
"""Definition, Solution and Workload, by the names of the data set."""


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
    promoted_status: str | None = None
    """Of the newest trace of what was added to the catalog from a draft: a promotion, or a failure. None where there is none."""
    promoted_gpu: str | None = None
    promoted_latency_us: float | None = None

    @property
    def agreement(self) -> str:
        """``agree``, ``we fail it``, ``they fail it``, or why there is nothing to compare. A trace counts before a judgement."""
        status = self.promoted_status or (None if self.ours is None else self.ours.status)
        if status is None:
            return "not judged here"
        if status == NOT_RUN:
            return "not run here"
        if self.foreign_status is None:
            return "no foreign verdict"
        they, we = self.foreign_status == "PASSED", status == "PASSED"
        return "agree" if they == we else "we fail it" if they else "they fail it"


def promoted_pairs(found: DataSet, catalog: CatalogReader, traces: Iterable[Trace]) -> dict[PairKey, Trace]:
    """The newest trace of each pair of a data set whose Definition was added to the catalog from a draft.

    Args:
        found: the data set.
        catalog: where its Definitions and Workloads are looked for, by the tags that a draft gives them.
        traces: promotions that stand and failures, oldest first.
    """
    names: dict[tuple[str, str, str], PairKey] = {}
    for item in found.of_kind("definition"):
        record = catalog.definitions.get(native_name(item.name))
        if record is None or origin_tag(found) not in record.tags:
            continue
        uuids = {tag: workload.uuid for workload in catalog.workloads_for(record.name) for tag in workload.tags}
        solutions = [solution.name for solution in found.of_kind("solution") if solution.definition == item.name]
        for workload in found.of_kind("workload"):
            uuid = uuids.get(imported_tag(workload))
            if uuid is None or workload.definition != item.name:
                continue
            for solution in solutions:
                names[record.name, native_name(solution), uuid] = (item.name, solution, workload.name)
    keyed = ((names.get((trace.definition, trace.solution, trace.workload_uuid)), trace) for trace in traces)
    return {key: trace for key, trace in keyed if key is not None}


def compared(
    found: DataSet, judgements: Sequence[Judgement], promoted: Mapping[PairKey, Trace] | None = None
) -> list[ComparedPair]:
    """Every pair that either side has a verdict on, in the order of the data set."""
    promoted = promoted or {}
    foreign: dict[PairKey, Mapping[str, Any]] = {}
    for item in found.of_kind("trace"):
        foreign[item.definition, item.record["solution"], item.name] = item.record[
            "evaluation"
        ]  # lines are in time order
    ours = {(item.definition, item.solution, item.workload): item for item in judgements}
    pairs = []
    for key in dict.fromkeys([*foreign, *ours, *promoted]):
        trace = promoted.get(key)
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
                promoted_status=trace.status if trace else None,
                promoted_gpu=trace.gpu if trace else None,
                promoted_latency_us=trace.performance.latency_us if trace and trace.performance else None,
            )
        )
    return pairs


def summary(pairs: Sequence[ComparedPair]) -> dict[str, int]:
    """How many pairs agree, and in which way the others do not."""
    return dict(Counter(pair.agreement for pair in pairs).most_common())

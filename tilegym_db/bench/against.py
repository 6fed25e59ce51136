"""Which earlier version each Solution is measured against: that of a git revision, or that of a run of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilegym_db.bench.history import SourceHistory, Version
from tilegym_db.bench.regression import RegressionRow, RowVerdict
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import NotFoundError, RecordError, UsageError

__all__ = ["Pair", "Pairs", "pairs_of_revision", "pairs_of_run"]


@dataclass(frozen=True)
class Pair:
    """A Solution of today and what it is measured against."""

    new: SolutionFiles
    old: Version


@dataclass
class Pairs:
    """What is to be measured, and a row with the reason for each Solution that is not."""

    changed: list[Pair] = field(default_factory=list)
    others: list[RegressionRow] = field(default_factory=list)

    def leave_out(self, solution: SolutionFiles, verdict: RowVerdict, reason: str) -> None:
        """Add a row without a measurement."""
        self.others.append(RegressionRow(solution.name, verdict, reason, solution.record.definition))


def pairs_of_revision(revision: str, chosen: Sequence[SolutionFiles]) -> Pairs:
    """What changed since a git revision.

    Raises:
        NotFoundError: no catalog of the chosen Solutions has such a revision.
    """
    histories, pairs, unknown = _Histories(), Pairs(), []
    for solution in chosen:
        try:
            history = histories.of(solution)
            commit = history.commit(revision)
            if commit is None:
                raise UsageError(f"{history.root} has no revision '{revision}'", code="revision_unknown")
        except UsageError as error:
            pairs.leave_out(solution, "not comparable", str(error))
            unknown.append(str(error))
            continue
        try:
            old = history.at(commit, solution)
        except RecordError as error:
            pairs.leave_out(solution, "not comparable", str(error))
            continue
        if old is None:
            pairs.leave_out(solution, "not comparable", f"did not exist at {revision}")
        elif old.digest == solution.digest:
            pairs.leave_out(solution, "unchanged", f"the same source and spec as at {revision}")
        else:
            pairs.changed.append(Pair(solution, old))
    if unknown and len(unknown) == len(chosen):
        raise NotFoundError(
            f"'{revision}' is no run of the store, and {'; '.join(sorted(set(unknown)))}. Runs that there are: "
            'tilegym-db sql "SELECT DISTINCT run_id FROM traces"',
            code="run_unknown",
        )
    return pairs


def pairs_of_run(run_id: str, measured: Mapping[str, str], chosen: Sequence[SolutionFiles]) -> Pairs:
    """What changed since a run that measured these Solutions (name -> digest).

    Raises:
        NotFoundError: the run measured none of the chosen ones.
    """
    histories, pairs = _Histories(), Pairs()
    concerned = [solution for solution in chosen if solution.name in measured]
    if not concerned:
        raise NotFoundError(
            f"run {run_id} measured none of the solutions asked for, but: {', '.join(measured)}.",
            code="run_without_solutions",
        )
    for solution in concerned:
        digest = measured[solution.name]
        if digest == solution.digest:
            pairs.leave_out(solution, "unchanged", f"the same source and spec as in run {run_id}")
            continue
        try:
            old = histories.of(solution).with_digest(solution, digest)
        except UsageError as error:
            pairs.leave_out(solution, "not comparable", str(error))
            continue
        if old is None:
            reason = f"the source of that run (digest {digest[:12]}) is in no commit, so it cannot be measured again"
            pairs.leave_out(solution, "not comparable", reason)
        else:
            pairs.changed.append(Pair(solution, old))
    return pairs


class _Histories:
    """One :class:`SourceHistory` for each root of the catalog."""

    def __init__(self) -> None:
        self._known: dict[Path, SourceHistory] = {}

    def of(self, solution: SolutionFiles) -> SourceHistory:
        root = solution.root
        if root not in self._known:
            self._known[root] = SourceHistory(root)
        return self._known[root]

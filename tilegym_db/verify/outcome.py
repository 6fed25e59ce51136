"""What verifying calls found: the figures of what passed, or why it did not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records.case import Case
from tilegym_db.records.trace import Correctness, Status
from tilegym_db.verify.verdicts import OutputVerdict

__all__ = ["CANNOT_VERIFY", "Failure", "Verdict", "cannot_verify", "incorrect", "not_set_up"]

CANNOT_VERIFY = (RecordError, StoreError, torch.OutOfMemoryError)
"""A workload without an oracle, or without memory for it here: that workload's trouble, not the run's."""


@dataclass(frozen=True)
class Failure:
    """Why a Solution did not pass: the status, the gate, the case, and a sentence for whoever wrote it."""

    status: Status
    reason: str
    log: str = ""
    gate: str | None = None
    correctness: Correctness | None = None
    case: Case | None = None
    output: str | None = None
    """Name of the output that failed, where one was compared; ``verdict`` says how."""
    verdict: OutputVerdict | None = None
    excused: bool = False
    """True where stock code in the same dtype fails the same case."""
    no_memory: bool = False
    """True where the GPU had no memory left, which other workers may have held."""


@dataclass
class Verdict:
    """The worst figures over the cases that passed."""

    rel_fro: float = 0.0
    worst_row_rel: float = 0.0
    max_abs: float = 0.0
    matched_ratio: float = 1.0
    cases: int = 0
    deterministic: bool = True

    def add(self, outputs: Mapping[str, OutputVerdict]) -> None:
        """Take one passed case into account."""
        self.cases += 1
        for verdict in outputs.values():
            self.rel_fro = max(self.rel_fro, verdict.rel_fro)
            self.worst_row_rel = max(self.worst_row_rel, verdict.worst_row_rel)
            self.max_abs = max(self.max_abs, verdict.max_abs)
            self.matched_ratio = min(self.matched_ratio, verdict.matched_ratio)

    def correctness(self, oracle_name: str = "fp64") -> Correctness:
        """The figures as a Trace stores them."""
        return Correctness(
            rel_fro=_finite(self.rel_fro),
            worst_row_rel=_finite(self.worst_row_rel),
            max_abs=_finite(self.max_abs),
            matched_ratio=self.matched_ratio,
            deterministic=self.deterministic,
            oracle=oracle_name,
            cases=self.cases,
        )


def incorrect(
    gate: str,
    reason: str,
    case: Case,
    output: str | None = None,
    verdicts: Mapping[str, OutputVerdict] | None = None,
) -> Failure:
    """A wrong result: the gate that says so, why, and the figures where an output was compared."""
    worst = Verdict()
    worst.add(verdicts or {})
    if verdicts is None:
        correctness = Correctness(gate=gate, cases=1)
    else:
        correctness = Correctness(
            rel_fro=_finite(worst.rel_fro),
            worst_row_rel=_finite(worst.worst_row_rel),
            max_abs=_finite(worst.max_abs),
            matched_ratio=worst.matched_ratio,
            gate=gate,
            cases=1,
        )
    verdict = verdicts[output] if verdicts and output else None
    return Failure("INCORRECT_NUMERICAL", reason, "", gate, correctness, case, output, verdict)


def cannot_verify(error: BaseException) -> Failure:
    """What one of :data:`CANNOT_VERIFY` means for a workload."""
    no_memory = isinstance(error, torch.OutOfMemoryError)
    return Failure("UNSUPPORTED", f"cannot be verified on this machine: {error}", no_memory=no_memory)


def not_set_up(failure: Failure) -> Failure:
    """What it means that a worker was late, lost or in error before it was given a source: that Solution is not to blame."""
    return replace(failure, status="UNSUPPORTED", reason=f"this machine could not set up a worker: {failure.reason}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

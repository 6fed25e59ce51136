"""Cases that stock code in the same dtype fails against the oracle prove nothing about anybody else, and are dropped.

PyTorch's own matrix product in bfloat16 gives NaN on a CPU for a row of -inf at some sizes: a Solution that does the same is not
worse than what it replaces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tilegym_db.bench.worker_handle import WorkerHandle
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.verifier import Failure, Verdict

__all__ = ["MOST_DROPPED", "StockWitness"]

MOST_DROPPED = 0.25
"""Share of the cases that may be dropped so: a Solution that fails more is wrong, whatever stock code does."""


class CaseVerifier(Protocol):
    """What is asked of the verification of the stock code (:class:`tilegym_db.bench.verification.Verification`)."""

    handle: WorkerHandle

    def case_alone(self, expected: Expected) -> Verdict | Failure:
        """Every gate on one case, and nothing else."""
        ...

    def outputs_of(self, expected: Expected) -> Mapping[str, torch.Tensor] | Failure:
        """What one call on these contents leaves, whatever that is."""
        ...


@dataclass
class StockWitness:
    """Runs the Definition's stock code at a case that somebody failed; started when it is first asked.

    Args:
        make: verification of the stock code, in a worker of its own; None where the catalog has none.
    """

    make: Callable[[], CaseVerifier | None]
    _stock: CaseVerifier | None = None
    _asked: dict[str, bool] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fails(self, expected: Expected) -> bool:
        """True where the comparison with the oracle refuses the stock code's result too."""
        with self._lock:
            key = expected.case.key
            if key not in self._asked:
                self._asked[key] = self._run(expected)
            return self._asked[key]

    def close(self) -> None:
        """End the worker, if there is one."""
        with self._lock:
            if self._stock is not None:
                self._stock.handle.close()
                self._stock = None

    def outputs(self, expected: Expected) -> Mapping[str, torch.Tensor] | None:
        """What the stock code gives on these contents, or None where nobody can say: there is none, or no memory for it."""
        with self._lock:
            stock = self._started(expected)
            if stock is None:
                return None
            try:
                found = stock.outputs_of(expected)
            except torch.OutOfMemoryError:
                return None
            return None if isinstance(found, Failure) else found

    def _run(self, expected: Expected) -> bool:
        stock = self._started(expected)
        if stock is None:
            return False
        outcome = stock.case_alone(expected)
        return isinstance(outcome, Failure) and outcome.verdict is not None

    def _started(self, expected: Expected) -> CaseVerifier | None:
        """The verification of the stock code, where it takes such calls."""
        self._stock = self._stock or self.make()
        if self._stock is None or self._stock.handle.excludes(expected.case) is not None:
            return None
        return self._stock

"""Verification at a Workload's own shape with every content set, in its turn or ahead of it while helpers are at fuzz cases."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from tilegym_db.bench.contents import WorkloadContents
from tilegym_db.bench.worker_handle import WorkerHandle
from tilegym_db.verify.outcome import CANNOT_VERIFY, Failure, Verdict, cannot_verify
from tilegym_db.verify.worker.process import WorkerProcess
from tilegym_db.verify.worker.shared_buffers import SharedBuffers, plan_slot

__all__ = ["OwnShape", "ShapesAhead", "check_own_shape"]

IN_MODEL_CALL = 3
"""Which of the calls on a workload's first contents is made as a model makes it; screens make fewer."""


@dataclass(frozen=True)
class OwnShape:
    """A pass at one workload's shape: what was compared, and what was written for each content set that is timed."""

    verdict: Verdict
    outputs: list[Mapping[str, torch.Tensor]]


def check_own_shape(handle: WorkerHandle, contents: WorkloadContents) -> OwnShape | Failure:
    """Every gate with every content set, in a worker that has the source loaded.

    Raises:
        Exception: one of :data:`CANNOT_VERIFY`.
    """
    verdict = Verdict(deterministic=handle.solution.record.spec.deterministic)
    outputs: list[Mapping[str, torch.Tensor]] = []
    case = contents.sets[0].case
    with SharedBuffers(plan_slot(handle.definition, case), 1, handle.device) as buffers:
        failure = handle.attach(buffers, case)
        for number, expected in enumerate(contents.verified):
            if failure is not None:
                break
            calls = handle.policy.calls if number == 0 else 2
            outcome = handle.verify_slot(buffers, expected, calls, in_model=IN_MODEL_CALL)
            if isinstance(outcome, Failure):
                failure = outcome
            else:
                verdict.add(outcome[0])
                outputs += [outcome[1]] if number < len(contents.sets) else []
        if failure is None and contents.other is not None:
            failure = handle.call_in_turn(buffers, contents.sets[0], contents.other, outputs[0])
        handle.detach()
    if failure is None and handle.policy.in_turn:
        failure = handle.check_state()
    return OwnShape(verdict, outputs) if failure is None else failure


@dataclass
class ShapesAhead:
    """The workloads that one Solution is verified at next, in their order: their contents, as far as these are drawn.

    A new shape mostly has to be compiled. So the worker of a Solution whose fuzz cases others take does that meanwhile.
    """

    waiting: deque[Future[WorkloadContents | Failure]] = field(default_factory=deque)
    _found: dict[str, tuple[WorkerProcess | None, OwnShape | Failure]] = field(default_factory=dict)

    @classmethod
    def of(cls, contents: Iterable[Future[WorkloadContents | Failure] | None]) -> ShapesAhead:
        """Of these workloads."""
        return cls(deque(future for future in contents if future is not None))

    def check_next(self, handle: WorkerHandle) -> bool:
        """Verify the next workload ahead of its turn; false where there is none, or it did not pass.

        What does not pass is verified again in its turn, where a lost worker gets its second chance, and no other is verified
        ahead after it; only a timeout stands, which would be waited for again.
        """
        if not self.waiting or not self.waiting[0].done():
            return False
        contents = self.waiting.popleft().result()
        if isinstance(contents, Failure):
            return True
        try:
            outcome = check_own_shape(handle, contents)
        except CANNOT_VERIFY as error:
            outcome = cannot_verify(error)
        if isinstance(outcome, OwnShape) or outcome.status == "TIMEOUT":
            self._found[contents.workload.uuid] = handle.worker, outcome
        if isinstance(outcome, OwnShape):
            return True
        self.waiting.clear()
        return False

    def take(self, handle: WorkerHandle, contents: WorkloadContents) -> OwnShape | Failure | None:
        """What came of a workload whose turn has come, once; None where it was not verified, or not by the worker of now."""
        self.waiting = deque(future for future in self.waiting if not _is_of(future, contents))
        worker, outcome = self._found.pop(contents.workload.uuid, (None, None))
        return None if isinstance(outcome, OwnShape) and worker is not handle.worker else outcome


def _is_of(future: Future[WorkloadContents | Failure], contents: WorkloadContents) -> bool:
    return future.done() and future.result() is contents

"""Builds Traces: provenance of the run, verdict of one pair, timing where there is one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tilegym_db.bench.machine import Machine
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Config, Definition, Trace, Workload
from tilegym_db.records.base import canonical_json
from tilegym_db.records.trace import Correctness, Envelope, Performance, Tier, clip_log, new_trace_id
from tilegym_db.verify.sandbox.process import SANDBOX_LEVEL
from tilegym_db.verify.verifier import Failure

__all__ = ["RunContext", "envelope_of"]


@dataclass(frozen=True)
class RunContext:
    """What every trace of one run shares. ``seed`` is secret until the run's traces state it."""

    run_id: str
    machine: Machine
    seed: int
    attempts: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def failed(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        failure: Failure,
        config: Config,
    ) -> Trace:
        """The trace of a pair that did not pass."""
        correctness = failure.correctness if failure.status == "INCORRECT_NUMERICAL" else None
        verdict = {
            "status": failure.status,
            "reason": failure.reason,
            "log": clip_log(failure.log),
            "correctness": correctness,
        }
        return self._trace(definition, solution, workload, tier, config, verdict)

    def passed(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        correctness: Correctness,
        performance: Performance | None,
        envelope: Envelope | None,
        config: Config,
    ) -> Trace:
        """The trace of a pair that passed; without performance in the interpreter tier."""
        verdict = {
            "status": "PASSED",
            "correctness": correctness,
            "performance": performance,
            "envelope": envelope,
        }
        return self._trace(definition, solution, workload, tier, config, verdict)

    def _trace(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        config: Config,
        verdict: Mapping[str, Any],
    ) -> Trace:
        key = (solution.digest, workload.uuid, canonical_json(config))
        attempt = self.attempts.get(key, -1) + 1
        self.attempts[key] = attempt
        machine = self.machine
        return Trace(
            trace_id=new_trace_id(self.run_id, tier, attempt, solution.digest, config, workload.uuid),
            run_id=self.run_id,
            timestamp=datetime.now(UTC),
            definition=definition.name,
            definition_version=definition.version,
            definition_digest=definition.digest,
            op_type=definition.op_type,
            solution=solution.name,
            solution_digest=solution.digest,
            language=solution.record.spec.language,
            role=solution.record.spec.role,
            config=config,
            workload_uuid=workload.uuid,
            axes=definition.bind_axes(workload.axes),
            dtypes=definition.bind_dtypes(workload.dtypes),
            scalars=workload.scalars(),
            layouts=workload.layout_classes(definition),
            gpu=machine.gpu,
            gpu_name=machine.gpu_name,
            sm=machine.sm,
            driver=machine.driver,
            cuda=machine.cuda,
            libs=machine.libs,
            tier=tier,
            attempt=attempt,
            sandbox_level=SANDBOX_LEVEL,
            **verdict,
        )


def envelope_of(cases: list[str], seed: int) -> Envelope:
    """The fuzz cases that a solution passed in this run, as a count and a digest of their descriptions."""
    digest = hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()
    return Envelope(cases=len(cases), digest=digest, seed=str(seed))

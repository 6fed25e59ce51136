"""Builds Traces: provenance of the run, verdict of one pair, timing where there is one."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tilegym_db.bench.machine import Machine
from tilegym_db.bench.phases import Phases
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Config, Definition, Trace, Workload
from tilegym_db.records.base import canonical_json
from tilegym_db.records.case import Case
from tilegym_db.records.trace import (
    Audit,
    Correctness,
    FailurePoint,
    FuzzCases,
    Performance,
    Tier,
    clip_log,
    new_trace_id,
)
from tilegym_db.verify.verifier import Failure

__all__ = ["RunContext", "attempts_of", "fuzz_cases_of", "reproduce_command"]

OWN_CONTENTS = "the workload's own"
TIER_COMMANDS: dict[Tier, str] = {"promotion": "promote", "screen": "bench", "untimed": "bench", "interpreter": "bench"}


@dataclass(frozen=True)
class RunContext:
    """What every trace of one run shares. ``seed`` is secret until the run's traces state it.

    ``command`` is the subcommand that shows a failure of a workload as a whole again, where it is not the tier's own. Where the
    run's time goes is added up in ``phases``.
    """

    run_id: str
    machine: Machine
    seed: int
    command: str | None = None
    attempts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    phases: Phases = field(default_factory=Phases)

    def failed(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        failure: Failure,
        config: Config,
        sandbox_level: int,
    ) -> Trace:
        """The trace of a pair that did not pass."""
        correctness = failure.correctness if failure.status == "INCORRECT_NUMERICAL" else None
        verdict = {
            "status": failure.status,
            "reason": failure.reason,
            "log": clip_log(failure.log),
            "correctness": correctness,
            "failure": self._failure_point(failure, definition, solution, workload, tier, config),
        }
        return self._trace(definition, solution, workload, tier, config, sandbox_level, verdict)

    def _failure_point(
        self,
        failure: Failure,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        config: Config,
    ) -> FailurePoint | None:
        """Where a Solution failed: at one case, or on the workload as a whole. None where nothing was judged."""
        words = ["tilegym-db", self.command or TIER_COMMANDS[tier], solution.name, "--gpu", self.machine.gpu]
        command = shlex.join([*words, "--workload", workload.uuid, "--again"])
        if failure.case is not None:
            point = _point_of_case(failure, failure.case, definition, solution, config, self.machine.gpu)
            if not failure.case.files:
                return point
            held = f"{failure.case.contents}, and {', '.join(failure.case.files)} as its file has it"
            return point.model_copy(update={"contents": held, "command": command})
        if failure.status == "UNSUPPORTED":
            return None
        return FailurePoint(
            gate=failure.gate or failure.status.lower(),
            axes=definition.bind_axes(workload.axes),
            dtypes=definition.bind_dtypes(workload.dtypes),
            layouts=workload.layout_classes(definition),
            contents=OWN_CONTENTS,
            seed=str(self.seed),
            command=command,
        )

    def passed(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        correctness: Correctness,
        performance: Performance | None,
        envelope: FuzzCases | None,
        audit: Audit | None,
        config: Config,
        sandbox_level: int,
    ) -> Trace:
        """The trace of a pair that passed; without performance in a tier that takes no time."""
        verdict = {
            "status": "PASSED",
            "correctness": correctness,
            "performance": performance,
            "envelope": envelope,
            "audit": audit,
        }
        return self._trace(definition, solution, workload, tier, config, sandbox_level, verdict)

    def _trace(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        config: Config,
        sandbox_level: int,
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
            blobs={name: spec.sha256 for name, spec in workload.files().items() if spec.sha256 is not None},
            gpu=machine.gpu,
            gpu_name=machine.gpu_name,
            sm=machine.sm,
            driver=machine.driver,
            cuda=machine.cuda,
            libs=machine.libs,
            gpu_uuid=machine.gpu_uuid,
            host=machine.host,
            tier=tier,
            attempt=attempt,
            sandbox_level=sandbox_level,
            **verdict,
        )


def attempts_of(traces: Iterable[Trace]) -> dict[tuple[str, str, str], int]:
    """The highest attempt of each pair of a run so far, as :class:`RunContext` counts them."""
    found: dict[tuple[str, str, str], int] = {}
    for trace in traces:
        key = (trace.solution_digest, trace.workload_uuid, canonical_json(trace.config))
        found[key] = max(trace.attempt, found.get(key, -1))
    return found


def fuzz_cases_of(
    cases: list[str], dropped: list[str], seed: int, scalars: Mapping[str, tuple[float, float]] | None = None
) -> FuzzCases:
    """The cases that a solution passed in this run, as a count and a digest of their descriptions; scalars by range."""
    digest = hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()
    return FuzzCases(
        cases=len(cases), digest=digest, seed=str(seed), dropped=tuple(dropped), scalars=dict(scalars or {})
    )


def _point_of_case(
    failure: Failure, case: Case, definition: Definition, solution: SolutionFiles, config: Config, gpu: str
) -> FailurePoint:
    verdict = failure.verdict
    return FailurePoint(
        gate=failure.gate or failure.status.lower(),
        axes=case.axes,
        dtypes=case.dtypes,
        layouts=case.layouts,
        contents=case.contents,
        seed=str(case.seed),
        offset=case.offset,
        output=failure.output,
        index=verdict.index if verdict else (),
        expected=verdict.expected if verdict else "",
        got=verdict.got if verdict else "",
        worst_row=verdict.worst_row if verdict else None,
        command=reproduce_command(definition, solution.name, case, config, gpu),
    )


def reproduce_command(definition: Definition, solution: str, case: Case, config: Config, gpu: str) -> str:
    """The command that verifies this one case again, alone. Seeds draw other numbers on another kind of device."""
    variable = {name: size for name, size in case.axes.items() if name in definition.var_axes}
    words = ["tilegym-db", "reproduce", solution, "--gpu", gpu]
    for option, values in (
        ("--axes", variable),
        ("--dtype", case.dtypes),
        ("--scalar", case.scalars),
        ("--layout", case.layouts),
        ("--config", config),
    ):
        for name, value in values.items():
            words += [option, f"{name}={value}"]
    words += ["--contents", case.contents, "--seed", str(case.seed)]
    return shlex.join(words + (["--offset", str(case.offset)] if case.offset else []))

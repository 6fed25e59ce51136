"""Trace: one measurement. This source, this workload, this GPU; verdict, correctness and timing."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tilegym_db.records.base import NAME_PATTERN, Record, RecordPart, canonical_json
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import Tunable
from tilegym_db.records.workload import NAMESPACE

__all__ = [
    "STATUSES",
    "Comparison",
    "Correctness",
    "Envelope",
    "Performance",
    "Status",
    "Tier",
    "Trace",
    "clip_log",
    "new_trace_id",
]

Status = Literal[
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_DTYPE",
    "INCORRECT_NUMERICAL",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
    "UNSUPPORTED",
    "REJECTED",
]
STATUSES: tuple[str, ...] = Status.__args__  # type: ignore[attr-defined]
Tier = Literal["interpreter", "screen", "promotion"]

MAX_LOG_CHARACTERS = 4000


class Correctness(RecordPart):
    """How far the outputs were from the oracle, over the worst content set. Relative figures have no unit."""

    rel_fro: float | None = None
    """Relative Frobenius error of the worst output; null where it is not finite."""
    worst_row_rel: float | None = None
    max_abs: float | None = None
    matched_ratio: float | None = None
    """Share of elements inside the element-wise bound."""
    deterministic: bool | None = None
    gate: str | None = None
    """The gate that decided a failure, or that came closest to one."""
    oracle: str = "fp64"
    cases: int = 0
    """Fuzz cases and content sets that were compared."""


class Comparison(RecordPart):
    """A ratio of times, ``other / this`` (above 1: this solution is faster), with its 99% confidence interval."""

    other: str = Field(alias="with")
    provides: str | None = None
    ratio: float
    ci_low: float
    ci_high: float

    model_config = {"serialize_by_alias": True}

    @classmethod
    def against(cls, name: str, provides: str | None, *, ratio: float, ci_low: float, ci_high: float) -> Self:
        """A comparison with the solution ``name``; ``with`` is a keyword of Python, so no argument can have that name."""
        return cls.model_validate(
            {"with": name, "provides": provides, "ratio": ratio, "ci_low": ci_low, "ci_high": ci_high}
        )


class Performance(RecordPart):
    """Timing of one call. Times are microseconds of device time unless the timer is ``wall``."""

    latency_us: float = Field(gt=0)
    ci_low_us: float
    ci_high_us: float
    samples: int = Field(ge=1)
    host_us: float | None = None
    """Host time from call to return, median."""
    cold_l2: bool = False
    timer: Literal["cupti", "events", "wall"]
    comparisons: tuple[Comparison, ...] = ()
    sol_us: float | None = None
    """Speed-of-light time from the Definition's cost and the GPU's calibrated peaks."""
    sol_ratio: float | None = None
    clock_mhz: int | None = None
    throttled: bool | None = None


class Envelope(RecordPart):
    """What the solution was verified over, for this very config."""

    cases: int
    digest: str
    seed: str
    """The run's secret seed, stored after the fact (a 64-bit integer, in decimal)."""


class Trace(Record):
    """One measurement. Correctness and performance are present exactly when the status allows them."""

    kind: ClassVar[str] = "trace"

    trace_id: str
    run_id: str
    timestamp: datetime
    definition: str = Field(pattern=NAME_PATTERN)
    definition_version: str
    definition_digest: str
    op_type: str
    solution: str = Field(pattern=NAME_PATTERN)
    solution_digest: str
    language: str
    role: Literal["kernel", "baseline"] = "kernel"
    config: dict[str, Tunable] = {}
    workload_uuid: str
    axes: dict[str, int]
    dtypes: dict[str, str] = {}
    scalars: dict[str, Scalar] = {}
    layouts: dict[str, str] = {}
    gpu: str
    gpu_name: str
    sm: str = ""
    driver: str = ""
    cuda: str = ""
    libs: dict[str, str] = {}
    tier: Tier
    attempt: int = 0
    sandbox_level: int = 0
    evidence_level: Literal["op"] = "op"
    envelope: Envelope | None = None
    status: Status
    reason: str = ""
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None

    @model_validator(mode="after")
    def _metrics_match_status(self) -> Self:
        wants_correctness = self.status in ("PASSED", "INCORRECT_NUMERICAL")
        wants_performance = self.status == "PASSED" and self.tier != "interpreter"
        for name, wanted, value in (
            ("correctness", wants_correctness, self.correctness),
            ("performance", wants_performance, self.performance),
        ):
            if wanted != (value is not None):
                verb = "needs" if wanted else "must not have"
                raise ValueError(f"a {self.tier} trace with status {self.status} {verb} '{name}'")
        if self.status not in ("PASSED",) and not (self.reason or self.log):
            raise ValueError(f"a trace with status {self.status} needs a reason")
        return self


def new_trace_id(
    run_id: str, tier: str, attempt: int, solution_digest: str, config: dict[str, Tunable], workload_uuid: str
) -> str:
    """uuid5 of what makes a measurement one measurement: written twice, it is ingested once."""
    key: list[Any] = [run_id, tier, attempt, solution_digest, config, workload_uuid]
    return str(uuid.uuid5(NAMESPACE, canonical_json(key)))


def clip_log(text: str) -> str:
    """The head and tail of a long log; compilers say what is wrong first or last."""
    if len(text) <= MAX_LOG_CHARACTERS:
        return text
    half = MAX_LOG_CHARACTERS // 2 - 20
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"

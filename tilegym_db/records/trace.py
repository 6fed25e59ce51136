"""Trace: one measurement. This source, this workload, this GPU; verdict, correctness and timing."""

from __future__ import annotations

import re
import secrets
import uuid
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import NAME_PATTERN, Flag, Int64, Real, Record, RecordPart, canonical_json
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import Tunable
from tilegym_db.records.workload import NAMESPACE

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
Tier = Literal["interpreter", "untimed", "screen", "promotion"]
UNTIMED_TIERS: tuple[Tier, ...] = ("interpreter", "untimed")
"""Tiers of verdicts without a time: of an interpreter, and of a Solution that omits an output."""

MAX_LOG_CHARACTERS = 4000
MAX_ERROR_LINE = 300
_ERROR = re.compile(r"\b(error|fatal|exception|undefined)\b|\w(Error|Exception)\b", re.IGNORECASE)


class Correctness(RecordPart):
    """How far the outputs were from the oracle, over the worst content set. Relative figures have no unit."""

    rel_fro: Real | None = None
    """Relative Frobenius error of the worst output; null where it is not finite."""
    worst_row_rel: Real | None = None
    max_abs: Real | None = None
    matched_ratio: Real | None = None
    """Share of elements inside the element-wise bound."""
    deterministic: Flag | None = None
    gate: str | None = None
    """The gate that decided a failure, or that came closest to one."""
    oracle: str = "fp64"
    cases: Int64 = 0
    """Fuzz cases and content sets that were compared."""


class Comparison(RecordPart):
    """A ratio of times, ``other / this`` (above 1: this solution is faster), with its 99% confidence interval."""

    other: str = Field(alias="with")
    """Name of the Solution, with its config in brackets where it has one."""
    provides: str | None = None
    """What it stands for: the code that it provides (``stock``, ``library``, ``compile``), or ``incumbent``, which was the
    fastest verified one before this run. One that is both is compared with twice."""
    ratio: Real
    ci_low: Real
    ci_high: Real

    model_config = {"serialize_by_alias": True}

    @classmethod
    def against(cls, name: str, provides: str | None, *, ratio: float, ci_low: float, ci_high: float) -> Self:
        """Return a comparison with the solution ``name``; ``with`` is a keyword of Python, so no argument can have that
        name.
        """
        return cls.model_validate(
            {"with": name, "provides": provides, "ratio": ratio, "ci_low": ci_low, "ci_high": ci_high}
        )


PROCESS_NOISE_US = 0.3
"""What the difference between two kernels may change by from one pair of processes to the next, however short both are
(``docs/decisions/timing.md``, 0017). No interval within one run knows of it."""


class Performance(RecordPart):
    """Timing of one call. Times are microseconds of device time unless the timer is ``wall``."""

    latency_us: Real = Field(gt=0)
    """Median of all calls."""
    ci_low_us: Real
    """Lower end of the 99% interval, from the medians of the rounds: calls of one round are not independent."""
    ci_high_us: Real
    samples: Int64 = Field(ge=1)
    host_us: Real | None = None
    """Host time from call to return, median."""
    cold_l2: Flag = False
    timer: Literal["cupti", "events", "wall"]
    comparisons: tuple[Comparison, ...] = ()
    sol_us: Real | None = None
    """Speed-of-light time from the Definition's cost and the GPU's calibrated peaks."""
    sol_ratio: Real | None = None
    """``sol_us / latency_us``; above 1 where a call beat the calibration's own kernels."""
    clock_mhz: Int64 | None = None
    """SM clock while it was timed, median; null on a CPU, or where the driver does not say."""
    throttled: Flag | None = None
    """Heat or power delivery slowed the GPU at some time; the rounds that saw it were discarded."""


class FuzzCases(RecordPart):
    """What the solution was verified over, for this very config."""

    cases: Int64
    digest: str
    seed: str
    """The run's secret seed, stored after the fact (a 64-bit integer, in decimal)."""
    dropped: tuple[str, ...] = ()
    """Cases that proved nothing, because the reference as written does not pass them itself, or stock code does not."""
    scalars: dict[str, tuple[float, float]] = {}
    """Continuous scalar -> the smallest and the largest value that was verified. Absent from traces before ranges were drawn."""


class Audit(RecordPart):
    """What the promotion tier found out about a pass beyond its outputs."""

    wall_us: Real | None = None
    """The harness's own measure of one call, by its wall clock over calls on contents never seen before."""
    owned_share: Real | None = Field(default=None, ge=0, le=1)
    """Share of the device time that was spent in kernels which the Solution's own language built; null on a CPU."""
    profiled_us: Real | None = Field(default=None, ge=0)
    """Device time of one call by CUPTI: every kernel, copy and memset that it caused, on any stream. It has no part in
    the latency; null on a CPU."""
    kernels: tuple[str, ...] = ()
    """Names of the device kernels that one call launched."""
    notes: tuple[str, ...] = ()
    """Soft findings of the static scan, each with its line and rule."""


class FailurePoint(RecordPart):
    """Where a Solution failed, for whoever wrote it, and the command that shows it again."""

    gate: str
    axes: dict[str, Int64]
    dtypes: dict[str, str] = {}
    layouts: dict[str, str] = {}
    contents: str
    """The distribution that the inputs were drawn from, or that they were those of the workload as a whole."""
    seed: str
    offset: Int64 = 0
    """Elements by which every tensor's address was moved off its alignment."""
    output: str | None = None
    index: tuple[Int64, ...] = ()
    """Of the first wrong element."""
    expected: str = ""
    got: str = ""
    worst_row: Int64 | None = None
    command: str


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
    axes: dict[str, Int64]
    dtypes: dict[str, str] = {}
    scalars: dict[str, Scalar] = {}
    layouts: dict[str, str] = {}
    blobs: dict[str, str] = {}
    """Input -> sha256 of the file that its contents came from. Of every other input they were drawn."""
    gpu: str
    gpu_name: str
    sm: str = ""
    driver: str = ""
    cuda: str = ""
    libs: dict[str, str] = {}
    gpu_uuid: str = ""
    """Which of all GPUs of this kind, as the driver numbers them (``GPU-...``); empty on a CPU and in older traces."""
    host: str = ""
    """Name of the machine; empty in older traces."""
    tier: Tier
    attempt: Int64 = 0
    sandbox_level: Int64 = 0
    evidence_level: Literal["op"] = "op"
    envelope: FuzzCases | None = None
    status: Status
    reason: str = ""
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None
    audit: Audit | None = None
    failure: FailurePoint | None = None

    @field_validator("timestamp")
    @classmethod
    def _in_utc(cls, value: datetime) -> datetime:
        try:
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        except OverflowError:
            raise RecordError(f"{value} is no time in UTC", code="time_out_of_range") from None

    @model_validator(mode="after")
    def _metrics_match_status(self) -> Self:
        wants_correctness = self.status in ("PASSED", "INCORRECT_NUMERICAL")
        wants_performance = self.status == "PASSED" and self.tier not in UNTIMED_TIERS
        for name, wanted, value in (
            ("correctness", wants_correctness, self.correctness),
            ("performance", wants_performance, self.performance),
        ):
            if wanted and value is None:
                raise RecordError(
                    f"a {self.tier} trace with status {self.status} needs '{name}'", code="figures_missing"
                )
            if value is not None and not wanted:
                raise RecordError(
                    f"a {self.tier} trace with status {self.status} must not have '{name}'", code="figures_unexpected"
                )
        if self.status not in ("PASSED",) and not (self.reason or self.log):
            raise RecordError(f"a trace with status {self.status} needs a reason", code="reason_missing")
        return self


def new_run_id(gpu: str) -> str:
    """Of a run that starts now on a GPU slug: sorts by time, and two at once differ."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{gpu}-{secrets.token_hex(3)}"


def new_trace_id(
    run_id: str, tier: str, attempt: int, solution_digest: str, config: dict[str, Tunable], workload_uuid: str
) -> str:
    """uuid5 of what makes a measurement one measurement: written twice, it is ingested once."""
    key: list[Any] = [run_id, tier, attempt, solution_digest, config, workload_uuid]
    return str(uuid.uuid5(NAMESPACE, canonical_json(key)))


def clip_log(text: str) -> str:
    """Return a log of at most :data:`MAX_LOG_CHARACTERS`: head, tail, and of what lies between, the lines that name an
    error.

    Compilers say what is wrong first or last; but a generated kernel's listing may come before it and a stack after.
    """
    if len(text) <= MAX_LOG_CHARACTERS:
        return text
    third = MAX_LOG_CHARACTERS // 3 - 40
    named = _lines_naming_an_error(text[third:-third], third)
    if not named:
        half = MAX_LOG_CHARACTERS // 2 - 20
        return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"
    cut = len(text) - 2 * third
    return f"{text[:third]}\n... {cut} characters cut, among them ...\n{named}\n...\n{text[-third:]}"


def _lines_naming_an_error(text: str, allowance: int) -> str:
    found: list[str] = []
    for line in text.splitlines():
        if _ERROR.search(line):
            line = line[:MAX_ERROR_LINE]
            allowance -= len(line) + 1
            if allowance < 0:
                break
            found.append(line)
    return "\n".join(found)


PUBLISHED_SANDBOX_LEVEL = 2
"""A worker confined less than this could have reached what judges it, so its pass never leaves the machine it was made on."""

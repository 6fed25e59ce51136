"""Trace: one measurement of a source on a workload and a GPU, with status, correctness and timing."""

from __future__ import annotations

import re
import secrets
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import Flag, Int64, Real, Record, RecordPart, in_utc
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import Tunable
from tilegym_db.records.text import NAME_PATTERN, canonical_json, shown
from tilegym_db.records.verdicts import (
    UNTIMED_TIERS,
    Status,
    Tier,
)
from tilegym_db.records.workload import NAMESPACE

MAX_LOG_CHARACTERS = 4000
MAX_ERROR_LINE = 300
_ERROR = re.compile(r"\b(error|fatal|exception|undefined)\b|\w(Error|Exception)\b", re.IGNORECASE)


def _not_text(value: Scalar) -> Scalar:
    if isinstance(value, str):
        raise RecordError(f"{shown(value)!r} is text, and no operator takes text", code="scalar_kind")
    return value


class Correctness(RecordPart):
    """Errors of the outputs against the oracle, over the worst content set. Relative figures have no unit."""

    rel_fro: Real | None = None
    """Relative Frobenius error of the worst output; null if it is not finite."""
    worst_row_rel: Real | None = None
    max_abs: Real | None = None
    matched_ratio: Real | None = None
    """Share of elements inside the element-wise bound."""
    deterministic: Flag | None = None
    gate: str | None = None
    """The gate that decided a failure, or that came closest to one."""
    oracle: str = "fp64"
    cases: Int64 = 0
    """Number of fuzz cases and content sets that were compared."""


class Comparison(RecordPart):
    """A ratio of times, ``other / this`` (above 1: this solution is faster), with its 99% confidence interval."""

    other: str = Field(alias="with")
    """Name of the Solution, with its config in brackets if it has one."""
    provides: str | None = None
    """Kind of the other solution: ``stock``, ``library``, ``compile``, or ``incumbent``, the fastest verified one before this
    run. A solution that is both a baseline and the incumbent has two comparisons."""
    ratio: Real
    ci_low: Real
    ci_high: Real

    model_config = {"serialize_by_alias": True}

    @classmethod
    def against(cls, name: str, provides: str | None, *, ratio: float, ci_low: float, ci_high: float) -> Self:
        """Return a comparison with the solution ``name``; needed because ``with`` is a Python keyword."""
        return cls.model_validate(
            {"with": name, "provides": provides, "ratio": ratio, "ci_low": ci_low, "ci_high": ci_high}
        )


PROCESS_NOISE_US = 0.3
"""Microseconds by which the difference of two kernels may vary between pairs of processes, even for short kernels
(``docs/decisions/timing.md``, 0017). Intervals within one run do not include it."""


class Performance(RecordPart):
    """Timing of one call. Times are microseconds of device time unless the timer is ``wall``."""

    latency_us: Real = Field(gt=0)
    """Median of all calls."""
    ci_low_us: Real
    """Lower end of the 99% interval of the medians of the rounds, because calls of one round are not independent."""
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
    """``sol_us / latency_us``; above 1 if a call beat the calibration's kernels."""
    clock_mhz: Int64 | None = None
    """SM clock during the timing, median; null on a CPU, or if the driver does not report it."""
    throttled: Flag | None = None
    """Heat or power delivery slowed the GPU at some time; the affected rounds were discarded."""


class FuzzCases(RecordPart):
    """The fuzz cases on which the solution was verified, for exactly this config."""

    cases: Int64
    digest: str
    seed: str
    """The run's secret seed, stored after the run (a 64-bit integer, in decimal)."""
    dropped: tuple[str, ...] = ()
    """Cases that were dropped, because the reference as written or stock code fails them too."""
    scalars: dict[str, tuple[Real, Real]] = {}
    """Continuous scalar -> the smallest and the largest verified value. Missing in traces that predate ranges."""
    largest: dict[str, Int64] = {}
    """Independent axis -> its largest size in a large case that passed. Missing in traces that predate it."""
    largest_elements: Int64 = 0
    """Elements of the largest tensor of a large case that passed: index arithmetic is right up to there."""
    batch_slices: Int64 = 0
    """Slices along the batch axis that had the same bits alone as in their call. 0 for Solutions that do not promise it."""


class Audit(RecordPart):
    """Findings of the promotion tier about a passing solution, beyond its outputs."""

    wall_us: Real | None = None
    """The harness's wall-clock time of one call, over calls on contents never seen before."""
    owned_share: Real | None = Field(default=None, ge=0, le=1)
    """Share of the device time in kernels that the Solution's language built; null on a CPU."""
    profiled_us: Real | None = Field(default=None, ge=0)
    """Device time of one call by CUPTI: all its kernels, copies and memsets on any stream. Not used for the latency; null on
    a CPU."""
    kernels: tuple[str, ...] = ()
    """Names of the device kernels that one call launched."""
    notes: tuple[str, ...] = ()
    """Soft findings of the static scan, each with its line and rule."""


class FailurePoint(RecordPart):
    """The place at which a Solution failed, and the command that reproduces it."""

    gate: str
    axes: dict[str, Int64]
    dtypes: dict[str, str] = {}
    layouts: dict[str, str] = {}
    contents: str
    """The distribution of the inputs, or a note that they were the workload's own."""
    seed: str
    offset: Int64 = 0
    """Elements by which every tensor's address was moved off its alignment."""
    output: str | None = None
    index: tuple[Int64, ...] = ()
    """Index of the first wrong element."""
    expected: str = ""
    got: str = ""
    worst_row: Int64 | None = None
    command: str


class Overruling(RecordPart):
    """A person's decision that a failed trace does not count. The ``reason`` of the overruling trace says why."""

    trace_id: str
    by: str
    """Login name of the person."""


class Trace(Record):
    """One measurement. Correctness and performance are present exactly if the status allows them.

    A trace with status OVERRULED is not measured: it repeats what identifies the trace that a person overruled.
    """

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
    scalars: dict[str, Annotated[Scalar, AfterValidator(_not_text)]] = {}
    layouts: dict[str, str] = {}
    blobs: dict[str, str] = {}
    """Input -> sha256 of the file with its contents. The contents of all other inputs were drawn."""
    gpu: str = Field(pattern=NAME_PATTERN)
    gpu_name: str
    sm: str = ""
    driver: str = ""
    cuda: str = ""
    libs: dict[str, str] = {}
    gpu_uuid: str = ""
    """The driver's id of the GPU (``GPU-...``); empty on a CPU and in older traces."""
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
    overrules: Overruling | None = None

    @field_validator("timestamp")
    @classmethod
    def _in_utc(cls, value: datetime) -> datetime:
        return in_utc(value)

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
        if (self.status == "OVERRULED") != (self.overrules is not None):
            raise RecordError("'overrules' belongs to the status OVERRULED, and to no other", code="overruling_unfit")
        if self.status not in ("PASSED",) and not (self.reason or self.log):
            raise RecordError(f"a trace with status {self.status} needs a reason", code="reason_missing")
        return self


def new_run_id(gpu: str) -> str:
    """Return an id for a run on a GPU slug; ids sort by start time, and two at the same time differ."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{gpu}-{secrets.token_hex(3)}"


def new_trace_id(
    run_id: str, tier: str, attempt: int, solution_digest: str, config: dict[str, Tunable], workload_uuid: str
) -> str:
    """Return the uuid5 of the values that identify a measurement, so that a trace written twice is ingested once."""
    key: list[Any] = [run_id, tier, attempt, solution_digest, config, workload_uuid]
    return str(uuid.uuid5(NAMESPACE, canonical_json(key)))


def clip_log(text: str) -> str:
    """Return at most :data:`MAX_LOG_CHARACTERS` of a log: head, tail, and the lines between them that name an error.

    Compilers print the cause first or last, but a generated kernel's listing may precede it and a stack may follow.
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

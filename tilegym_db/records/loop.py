"""Records of the loop from a task to an award: Task, Attempt, Award, Experiment and Pattern.

They hold what was asked, tried and found. The database decides what still counts: an award is void if its trace is
gone, or if a failure revoked it.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import Int64, Line, Prose, Real, Record, RecordPart, in_utc
from tilegym_db.records.solution import Config
from tilegym_db.records.text import NAME_PATTERN, canonical_json
from tilegym_db.records.verdicts import MIN_SPEEDUP
from tilegym_db.records.workload import NAMESPACE

# Attempts and awards are journaled under the words that they had first: "promoted", "promotions" and the kind "promotion".
Step = Literal["received", "scanned", "compiled", "screened", "promoted"]
STEPS: tuple[Step, ...] = Step.__args__  # type: ignore[attr-defined]
Verdict = Literal["pending", "refused", "no_gpu", "promoted"]
Language = Literal["python", "triton", "tilelang", "cutile"]
UNMEASURED = "unmeasured"

_DIGEST = r"^[0-9a-f]{64}$"


def _in_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise RecordError("a time needs a time zone", code="time_zone_missing")
    return in_utc(value)


Moment = Annotated[datetime, AfterValidator(_in_utc)]


class MeasuredBy(RecordPart):
    """A Solution that was verified on a Workload when a task was made, with its trace."""

    solution: str = Field(pattern=NAME_PATTERN)
    trace_id: str
    latency_us: Real = Field(gt=0)


class TaskWorkload(RecordPart):
    """One Workload of a task, and the times to beat on it."""

    uuid: str
    axes: dict[str, Int64]
    dtypes: dict[str, str] = {}
    layouts: dict[str, str] = {}
    """Tensor -> layout class; a tensor that is not listed is contiguous."""
    current_best: MeasuredBy | None = None
    """The fastest verified Solution; null if nothing is verified yet."""
    baseline: MeasuredBy | None = None
    """The fastest verified baseline: stock code, a library or torch.compile."""
    sol_us: Real | None = None
    """Speed-of-light time, if the GPU is calibrated."""


class PatternReference(RecordPart):
    """A page of the pattern base, and the digest of its text when the task was made."""

    id: str
    digest: str = Field(pattern=_DIGEST)


class Task(Record):
    """A request for a kernel of one Definition, language and GPU, with the speedup that it must reach.

    The id is a uuid5 of everything except the time: two machines with the same records and traces make the same task.
    """

    kind: ClassVar[str] = "task"

    schema_version: Literal[1] = 1
    id: str = ""
    definition: str = Field(pattern=NAME_PATTERN)
    definition_version: str
    definition_digest: str = Field(pattern=_DIGEST)
    workloads: tuple[TaskWorkload, ...] = Field(min_length=1)
    gpu: str = Field(pattern=NAME_PATTERN)
    limits: dict[str, Real] = {}
    """Calibrated peaks of the GPU: rates per second, sizes in bytes, times in microseconds."""
    language: Language
    objective: Literal["latency", "coverage"] = "latency"
    """``latency``: be faster on these workloads. ``coverage``: serve a part of a model that runs stock code."""
    model: Line = ""
    """Digest of the model's config, if the objective is its coverage."""
    min_speedup: Real = Field(default=MIN_SPEEDUP, ge=MIN_SPEEDUP, le=1000)
    patterns: tuple[PatternReference, ...] = ()
    created: Moment

    @model_validator(mode="after")
    def _is_its_id(self) -> Self:
        expected = self._identity()
        if not self.id:
            object.__setattr__(self, "id", expected)
        elif self.id != expected:
            raise RecordError(f"id {self.id!r} does not match the content, whose id is {expected!r}", code="id_differs")
        return self

    def _identity(self) -> str:
        content = self.model_dump(mode="json", exclude={"id", "created"}, exclude_defaults=True)
        return str(uuid.uuid5(NAMESPACE, canonical_json(["task", content])))


class Attempt(Record):
    """Progress of one submission to a task. Each step writes one line; the last line of a number counts."""

    kind: ClassVar[str] = "attempt"

    schema_version: Literal[1] = 1
    task: str
    number: Int64 = Field(ge=1)
    solution: str = Field(pattern=NAME_PATTERN)
    solution_digest: str = ""
    """Digest of the source and its spec; of the folder's bytes if the folder holds no valid Solution."""
    stage: Step
    """The last step that it passed; ``received`` also if it is not a valid Solution."""
    verdict: Verdict
    gate: Line = ""
    """The check that refused it: a rule of the scan, a gate of the verifier, or ``speed``."""
    reason: Prose = ""
    command: Prose = ""
    """Command that reproduces the failing case."""
    trace_ids: tuple[str, ...] = ()
    promotions: tuple[str, ...] = ()
    """Ids of its awards."""
    wall_s: Real = Field(default=0.0, ge=0)
    """Seconds since it was received, over every run of the command that worked on it."""
    device_s: Real = Field(default=0.0, ge=0)
    """Seconds of ``wall_s`` in steps that verify and time on the device."""
    timestamp: Moment

    @model_validator(mode="after")
    def _says_why(self) -> Self:
        if self.verdict in ("refused", "no_gpu") and not self.reason:
            raise RecordError(f"an attempt with the verdict {self.verdict} needs a reason", code="reason_missing")
        if (self.verdict == "promoted") != bool(self.promotions) or (self.verdict == "promoted") != (
            self.stage == "promoted"
        ):
            raise RecordError(
                "an attempt has the verdict 'promoted' with the ids of its awards, and in the stage 'promoted'",
                code="award_incomplete",
            )
        return self


class Award(Record):
    """A kernel that beat the best baseline of the same rounds, in a trace of the promotion tier. Evidence for one operator."""

    kind: ClassVar[str] = "promotion"

    schema_version: Literal[1] = 1
    id: str = Field(pattern=r"^[a-z0-9][A-Za-z0-9_.\-]{0,255}_v[1-9][0-9]*$")
    """``<language>_<definition>_<gpu>_<dtypes>_<shape>_v<n>``; n counts the awards with the same id before ``_v``."""
    solution: str = Field(pattern=NAME_PATTERN)
    solution_digest: str = Field(pattern=_DIGEST)
    definition: str = Field(pattern=NAME_PATTERN)
    definition_digest: str = Field(pattern=_DIGEST)
    language: Language
    config: Config = {}
    gpu: str = Field(pattern=NAME_PATTERN)
    workload_uuid: str
    axes: dict[str, Int64]
    dtypes: dict[str, str] = {}
    trace_id: str
    baseline: Line
    """The baseline in the rounds with the lowest lower end of the interval."""
    ratio: Real
    ci_low: Real = Field(ge=MIN_SPEEDUP)
    ci_high: Real
    evidence_level: Literal["op"] = "op"
    applied: Literal[False] = False
    """An award changes no model; publishing does."""
    created: Moment

    @property
    def prefix(self) -> str:
        """The id without its number."""
        return self.id.rpartition("_v")[0]


class Coverage(RecordPart):
    """Share of a model's time in verified kernels, by the profiler's launch numbers, over several profiles."""

    median: Real = Field(ge=0, le=1)
    low: Real = Field(ge=0, le=1)
    high: Real = Field(ge=0, le=1)
    profiles: Int64 = Field(ge=1)
    time_of: Literal["gpu", "cpu"]
    """``cpu`` on a machine without a GPU: the process's CPU time replaces GPU time."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.median <= self.high:
            raise RecordError(
                f"the median {self.median} must lie between {self.low} and {self.high}", code="median_outside"
            )
        return self


class Experiment(Record):
    """One change to the kernels that serve a model, measured before and after, and the decision by rule."""

    kind: ClassVar[str] = "experiment"

    schema_version: Literal[1] = 1
    id: str
    model: Line
    config_digest: str = Field(pattern=_DIGEST)
    gpu: str = Field(pattern=NAME_PATTERN)
    base: Line
    """The digest of the resolver's table before the change."""
    definition: str = Field(pattern=NAME_PATTERN)
    task: str = ""
    changed: dict[str, str] = {}
    """Solution -> digest of the published source."""
    before: Coverage
    after: Coverage | None = None
    runs: tuple[str, ...] = ()
    """Ids of the ModelRuns that were measured with the change."""
    total_speedup: Real | None = None
    total_ci_low: Real | None = None
    decision: Literal["keep", "discard", "timeout", "crash"]
    reason: Prose
    seconds: Real = Field(ge=0)
    timestamp: Moment


class Pattern(Record):
    """A technique for writing kernels with its measured gain; if ``anti`` is true, a technique to avoid."""

    kind: ClassVar[str] = "pattern"

    schema_version: Literal[1] = 1
    id: str = Field(pattern=r"^[a-z]+/[a-z0-9][a-z0-9_-]*$")
    """``<language>/<name>``: the page, and the name in its section."""
    title: Line
    language: Literal["any", "python", "triton", "tilelang", "cutile"]
    versions: dict[str, str] = {}
    """Package -> versions that it was measured with, as a requirement (``>=3.4``)."""
    applies_to: tuple[str, ...] = Field(min_length=1)
    """Definitions, families of them (``norm``), or ``*``."""
    evidence: tuple[str, ...] = Field(min_length=1)
    """``trace:ID``, ``search:GPU/SOLUTION``, or ``unmeasured`` alone."""
    anti: bool = False
    digest: str = Field(pattern=_DIGEST)
    text: Prose

    @model_validator(mode="after")
    def _cites(self) -> Self:
        if UNMEASURED in self.evidence and len(self.evidence) > 1:
            raise RecordError("evidence is 'unmeasured' alone, or what was measured", code="evidence_mixed")
        wrong = [item for item in self.evidence if item != UNMEASURED and not item.startswith(("trace:", "search:"))]
        if wrong:
            raise RecordError(
                f"evidence {wrong[0]!r} must read trace:ID, search:GPU/SOLUTION or 'unmeasured'", code="evidence_syntax"
            )
        return self

    def fits(self, definition: str, op_type: str, language: str) -> bool:
        """Return True if it applies to kernels of a Definition in a language."""
        return self.language in ("any", language) and bool({"*", definition, op_type} & set(self.applies_to))


def identified(values: dict[str, Any]) -> str:
    """Return the uuid5 of the values that identify a record of the loop."""
    return str(uuid.uuid5(NAMESPACE, canonical_json(values)))

"""Records of the loop from a task to an award (Task, Attempt, Award, Experiment and Pattern), and ModelRun.

They hold what was asked, tried and found. The database decides what still counts: an award is void if its trace is
gone, or if a failure revoked it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import Flag, Int64, Line, Prose, Real, Record, RecordPart, in_utc
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


# ---- model runs ----------------------------------------------------------------------------------
# ModelRun: one model on one GPU, stock and patched, timed in interleaved rounds; and the claims that its times allow.


class Estimate(RecordPart):
    """A median with its 99% confidence interval; with fewer than eight samples, there is no interval."""

    median: Real = Field(gt=0)
    ci_low: Real | None = Field(default=None, gt=0)
    ci_high: Real | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.ci_low is None or self.ci_high is None:
            if self.ci_low is not None or self.ci_high is not None:
                raise RecordError("an interval has two ends", code="interval_open")
        elif not self.ci_low <= self.median <= self.ci_high:
            raise RecordError(
                f"the median {self.median} must lie in its interval {self.ci_low}..{self.ci_high}",
                code="median_outside",
            )
        return self


class ModelTiming(RecordPart):
    """Times of greedy generation, or of a prefill alone, in one execution mode of the model."""

    ttft_ms: Estimate
    """Time to the first token: the prefill, until its logits are ready."""
    tpot_ms: Estimate | None = None
    """Time per output token after the first; null if there is no second token."""
    total_ms: Estimate
    """Time of the whole call."""
    tokens_per_s: Real | None = Field(default=None, gt=0)
    """New tokens of all sequences over the median of ``total_ms``, which includes the prefill; null for a prefill alone."""
    peak_memory_bytes: Int64 | None = None
    """Maximum memory that PyTorch allocated, including weights and cache; null on a CPU."""


class Speedups(RecordPart):
    """Times of another execution mode over those of this one in the same rounds; above 1, this one is faster."""

    ttft: Estimate
    tpot: Estimate | None = None
    total: Estimate


class ExecutionMode(RecordPart):
    """Another execution mode of the same model, on the same prompts in the same rounds."""

    timing: ModelTiming
    against: dict[str, Speedups] = Field(min_length=1)
    """Other mode -> speedup of this one; every run has ``stock`` and ``patched``."""
    equal_tokens: Int64 = Field(ge=0)
    """See :attr:`ModelRun.equal_tokens`."""
    kernels: dict[str, Int64] = {}
    """Definition -> calls of a verified kernel in the first generation, which compiles. Replays of a CUDA graph are not
    counted."""
    library: str = ""
    """Name and version of the library whose kernels run; empty for this package and PyTorch."""


class ModelRun(Record):
    """A comparison of a patched model with the stock one, in interleaved rounds in one process on the same weights.

    Speedups are stock time over patched time of the same round (above 1: the patch is faster).
    """

    kind: ClassVar[str] = "model_run"

    schema_version: Literal[1] = 1
    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
    timestamp: datetime
    evidence_level: Literal["model"] = "model"
    """Always ``model``; traces have ``op``, and the two kinds of times must not be compared."""
    model: str = Field(min_length=1)
    model_class: str
    config_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """sha256 of the config as it was built, with reduced layers."""
    layers: Int64 = Field(ge=1)
    parameters: Int64 = Field(ge=1)
    weights: Literal["random"] = "random"
    dtype: str
    batch: Int64 = Field(ge=1)
    prompt_tokens: Int64 = Field(ge=1)
    """Random token ids per sequence."""
    new_tokens: Int64 = Field(ge=0)
    """New tokens per sequence; 0 means a prefill alone."""
    rounds: Int64 = Field(ge=1)
    gpu: str = Field(pattern=NAME_PATTERN)
    gpu_name: str
    sm: str = ""
    driver: str = ""
    cuda: str = ""
    libs: dict[str, str] = {}
    timer: Literal["events", "wall"]
    throttled: Flag | None = None
    """True if heat or power delivery slowed the GPU during the run; null if unknown."""
    proved: Flag = False
    """True if the patch was made with ``verify=True``."""
    required: tuple[Literal["deterministic", "batch_invariant"], ...] = ()
    """What was required of the bits of the kernels that served."""
    stock: ModelTiming
    patched: ModelTiming
    ttft_speedup: Estimate
    tpot_speedup: Estimate | None = None
    total_speedup: Estimate
    kernels: dict[str, Int64] = {}
    """Definition -> calls of a verified kernel in one generation."""
    experts: dict[str, Int64] = {}
    """Implementation of experts in transformers -> calls of it by the stock model in one generation; empty if it has none.
    ``generate`` may decode with another one than it prefills with."""
    gpu_shares: dict[str, Real] | None = None
    """Definition -> its share of the GPU time of one call of the patched model; null without a profile on a GPU."""
    equal_tokens: Int64 = Field(ge=0)
    """Greedy tokens equal to those of stock; a first difference changes the tokens after it. Out of ``batch * new_tokens``,
    or out of the first tokens for a prefill alone."""
    ways: dict[str, ExecutionMode] = {}
    """Name -> another execution mode of the run, in this process (``stock_static_cache``) or in a separate one (``liger``)."""
    absent: dict[str, str] = {}
    """Name -> reason if a requested mode is not in ``ways``."""

    @property
    def compared_tokens(self) -> int:
        """The number of tokens that ``equal_tokens`` is out of."""
        return self.batch * max(self.new_tokens, 1)

    def prefill_tokens_per_s(self, timing: ModelTiming) -> float:
        """Return prompt tokens of all sequences over the median time to the first token."""
        return self.batch * self.prompt_tokens / timing.ttft_ms.median * 1e3

    @field_validator("timestamp")
    @classmethod
    def _in_utc(cls, value: datetime) -> datetime:
        if value.tzinfo is None:
            raise RecordError("timestamp needs a time zone", code="time_zone_missing")
        return in_utc(value)

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        for name, equal in [("", self.equal_tokens), *((name, way.equal_tokens) for name, way in self.ways.items())]:
            if equal > self.compared_tokens:
                raise RecordError(
                    f"equal_tokens {equal} {f'of {name} ' if name else ''}are more than batch * new_tokens",
                    code="tokens_too_many",
                )
        return self

    @model_validator(mode="after")
    def _shares_are_of_one_whole(self) -> Self:
        shares = (self.gpu_shares or {}).values()
        if any(share < 0 for share in shares) or sum(shares) > 1.0001:  # each is rounded
            raise RecordError(
                f"gpu_shares {self.gpu_shares} must not be negative, and add up to 1 at most", code="gpu_shares_invalid"
            )
        return self

    @model_validator(mode="after")
    def _figures_fit(self) -> Self:
        timings = {"stock": self.stock, "patched": self.patched}
        timings |= {name: way.timing for name, way in self.ways.items()}
        for name, timing in timings.items():
            if (timing.tpot_ms is not None) != (self.new_tokens >= 2):
                raise RecordError(
                    f"{name}.tpot_ms needs at least two new tokens, and new_tokens is {self.new_tokens}",
                    code="figure_unexpected",
                )
            if (timing.tokens_per_s is not None) != (self.new_tokens >= 1):
                raise RecordError(
                    f"{name}.tokens_per_s is there from one new token on, and new_tokens is {self.new_tokens}",
                    code="figure_unexpected",
                )
        speedups = {"tpot_speedup": self.tpot_speedup}
        speedups |= {f"ways.{n}.against.{o}.tpot": s.tpot for n, w in self.ways.items() for o, s in w.against.items()}
        for name, speedup in speedups.items():
            if (speedup is not None) != (self.new_tokens >= 2):
                raise RecordError(
                    f"{name} needs at least two new tokens, and new_tokens is {self.new_tokens}",
                    code="figure_unexpected",
                )
        return self

    @model_validator(mode="after")
    def _ways_are_told_apart(self) -> Self:
        names = {"stock", "patched", *self.ways}
        for name, way in self.ways.items():
            if name in ("stock", "patched") or name in self.absent:
                raise RecordError(
                    f"ways.{name} has the name of a way that every run has, or is absent as well",
                    code="ways_incomplete",
                )
            unknown = sorted(set(way.against) - (names - {name}))
            if unknown:
                raise RecordError(
                    f"ways.{name}.against names {unknown[0]!r}, which is not another way of this run",
                    code="way_unknown",
                )
        return self


# ---- claims ---------------------------------------------------------------------------------------
# Rules for when a patched-vs-stock model timing may be reported as a speedup.

CONTROL = "stock_again"
"""Name of the control: stock a second time, in the same rounds. Its difference from stock is noise."""

MIN_ROUNDS = 8
"""Minimum number of samples whose whole range is a 99% interval of their median: 1 - 2 / 2**8 = 0.992."""

ClaimVerdict = Literal["faster", "slower", "no difference", "nothing"]


@dataclass(frozen=True)
class Claim:
    """A claim about a speedup, and the reason for its limits. ``nothing``: not even the interval may be shown."""

    verdict: ClaimVerdict
    reason: str = ""


def claim_of(speedup: Estimate, *, rounds: int, kernel_calls: int, control: Estimate | None) -> Claim:
    """Return the claim that rounds of stock against patched allow.

    Args:
        rounds: number of rounds that count, per mode.
        kernel_calls: calls of a verified kernel in one generation of the patched model.
        control: stock time over the time of :data:`CONTROL` in the same rounds; None without a control.
    """
    if kernel_calls == 0:
        return Claim("nothing", "no kernel ran in the patched model, so both ran stock code")
    if rounds < MIN_ROUNDS:
        return Claim("nothing", f"{rounds} rounds are too few for a 99% interval; it takes {MIN_ROUNDS} at least")
    if speedup.ci_low is None or speedup.ci_high is None:
        return Claim("nothing", "its interval was not kept")
    if control is None or control.ci_low is None or control.ci_high is None:
        return Claim("nothing", "no control, stock against itself, took part in the rounds")
    shown = f"{control.ci_low:.3f} to {control.ci_high:.3f}"
    if not control.ci_low <= 1 <= control.ci_high:
        return Claim(
            "nothing", f"stock against itself differs by {shown}: something else changed during the run. Repeat it"
        )
    margin = max(control.ci_high, 1 / control.ci_low)
    if speedup.ci_low > margin:
        return Claim("faster")
    if speedup.ci_high < 1 / margin:
        return Claim("slower")
    return Claim("no difference", f"stock against itself differs by as much ({shown})")


def claims_of(run: ModelRun) -> dict[str, Claim]:
    """Return figure (``ttft``, ``tpot``, ``total``) -> claim about its speedup; ``tpot`` only if there is one."""
    control = run.ways[CONTROL].against.get("stock") if CONTROL in run.ways else None
    speedups = {"ttft": run.ttft_speedup, "tpot": run.tpot_speedup, "total": run.total_speedup}
    return {
        what: claim_of(
            speedup,
            rounds=run.rounds,
            kernel_calls=sum(run.kernels.values()),
            control=None if control is None else getattr(control, what),
        )
        for what, speedup in speedups.items()
        if speedup is not None
    }

"""ModelRun: one model on one GPU, stock and patched, timed in interleaved rounds; and the claims that its times allow."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import Flag, Int64, Real, Record, RecordPart, in_utc
from tilegym_db.records.text import NAME_PATTERN


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

Verdict = Literal["faster", "slower", "no difference", "nothing"]


@dataclass(frozen=True)
class Claim:
    """A claim about a speedup, and the reason for its limits. ``nothing``: not even the interval may be shown."""

    verdict: Verdict
    reason: str = ""


def claim_of(speedup: Estimate, *, rounds: int, kernel_calls: int, control: Estimate | None) -> Claim:
    """Return the claim that rounds of stock against patched allow.

    Args:
        speedup: stock time over patched time, with its interval if there is one.
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

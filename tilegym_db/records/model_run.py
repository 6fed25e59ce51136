"""ModelRun: one model on one GPU, as it is and patched, timed in turns. What a user sees, not what one operator does."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tilegym_db.records.base import NAME_PATTERN, Int64, Record, RecordPart

__all__ = ["Estimate", "ModelRun", "ModelTiming"]


class Estimate(RecordPart):
    """A median with its 99% confidence interval; with fewer than eight samples that is their whole range."""

    median: float = Field(gt=0)
    ci_low: float = Field(gt=0)
    ci_high: float = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.ci_low <= self.median <= self.ci_high:
            raise ValueError(f"the median {self.median} must lie in its interval {self.ci_low}..{self.ci_high}")
        return self


class ModelTiming(RecordPart):
    """Greedy generation by one of the two."""

    ttft_ms: Estimate
    """To the first token: the prefill, until its logits are there."""
    tpot_ms: Estimate
    """Per output token after the first."""
    total_ms: Estimate
    """The whole call of ``generate``."""
    tokens_per_s: float = Field(gt=0)
    """New tokens of all sequences over the median of ``total_ms``, so the prefill counts."""
    peak_memory_bytes: Int64 | None = None
    """The most that PyTorch had allocated, weights included; none on a CPU."""


class ModelRun(Record):
    """A comparison of a patched model with itself unpatched, rounds interleaved in one process on the same weights.

    Speedups are stock time over patched time of the same round (above 1: the patch is faster).
    """

    kind: ClassVar[str] = "model_run"

    schema_version: Literal[1] = 1
    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
    timestamp: datetime
    evidence_level: Literal["model"] = "model"
    """Traces are ``op``: their numbers and these say nothing of each other."""
    model: str = Field(min_length=1)
    model_class: str
    config_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """sha256 of the config as it was built, reduced layers included."""
    layers: Int64 = Field(ge=1)
    parameters: Int64 = Field(ge=1)
    weights: Literal["random"] = "random"
    dtype: str
    batch: Int64 = Field(ge=1)
    prompt_tokens: Int64 = Field(ge=1)
    """Of each sequence; random token ids."""
    new_tokens: Int64 = Field(ge=2)
    """Of each sequence."""
    rounds: Int64 = Field(ge=1)
    gpu: str = Field(pattern=NAME_PATTERN)
    gpu_name: str
    sm: str = ""
    driver: str = ""
    cuda: str = ""
    libs: dict[str, str] = {}
    timer: Literal["events", "wall"]
    throttled: bool | None = None
    """Whether heat or power delivery slowed the GPU meanwhile; null where nobody says."""
    proved: bool = False
    """True where the patch was made with ``verify=True``."""
    stock: ModelTiming
    patched: ModelTiming
    ttft_speedup: Estimate
    tpot_speedup: Estimate
    total_speedup: Estimate
    kernels: dict[str, Int64] = {}
    """Definition -> calls that ran a verified kernel, in one generation."""
    equal_tokens: Int64 = Field(ge=0)
    """How many of ``batch * new_tokens`` greedy tokens are those of stock, a first difference changing what follows."""

    @field_validator("timestamp")
    @classmethod
    def _in_utc(cls, value: datetime) -> datetime:
        if value.tzinfo is None:
            raise ValueError("timestamp needs a time zone")
        return value.astimezone(UTC)

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        if self.equal_tokens > self.batch * self.new_tokens:
            raise ValueError(f"equal_tokens {self.equal_tokens} are more than batch * new_tokens")
        return self
